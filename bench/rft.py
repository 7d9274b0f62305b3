"""Rejection-sampling fine-tuning against GRPO at equal numbers of sampled completions.

    python bench/rft.py --to runs/bench [--seeds 0 1 2] [--arms grpo rft expert_iteration all]

Every arm takes 100 steps of 32 prompts with 8 completions. In `rft` the policy samples; in
`expert_iteration` the policy of up to ten steps before does. Both imitate one right answer per
problem. `all` is `rft` with all different right answers.

Prints one line per run: accuracy on held-out problems before and after; the share of the sampled
completions that the policy learned from, in the first and in the last ten steps.
"""

from __future__ import annotations

from pathlib import Path

import arms

ARMS = {
    "grpo": ["arithmetic_grpo"],
    "rft": ["arithmetic_rft"],
    "expert_iteration": [
        "arithmetic_rft",
        *("--algorithm.sampled-by", "reference"),
        *("--algorithm.round-steps", "10"),
    ],
    "all": ["arithmetic_rft", "--algorithm.max-per-prompt", "None"],
}
COLUMNS = ("accepted at first, %", "accepted at last, %")
STEPS = 10


def accepted_cells(run_dir: Path) -> list[str]:
    """Return the mean share of accepted completions in the first and in the last steps."""
    rows = arms.read_metrics(run_dir)
    shares = [row["rft/accepted"] for row in rows if "rft/accepted" in row]
    if not shares:
        return ["-", "-"]
    return [f"{100 * sum(part) / len(part):.0f}" for part in (shares[:STEPS], shares[-STEPS:])]


if __name__ == "__main__":
    arms.main(__doc__, ARMS, COLUMNS, accepted_cells)
