"""Credit over turns in a small game: GRPO by episode, by turn and by step groups (GiGPO).

    python research/2026_11/corridor.py --to runs/bench [--seeds 0 1 2] [--arms episode turn step]

The shipped arithmetic model plays a corridor of five cells (corridor_game.py). In each turn it
reads an expression that belongs to its cell, and steps to the right if the last digit of its answer
is 5 or more, to the left if not. The last cell earns 1 and ends the episode; after 8 turns it ends
anyway. There are 24 steps of 8 prompts with 8 episodes.

Prints one line per run: the mean reward of the episodes in the first and in the last four steps,
the mean number of turns in the last four, and the share of tokens whose turn has others to be
compared with. These episodes are what the policy learns from, sampled before it does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import arms

FLAGS = [
    "arithmetic_grpo",
    *("--environment", f"{Path(__file__).resolve().with_name('corridor_game.py')}:Corridor"),
    "--reward",
    *("--steps", "24", "--batch.prompts", "8", "--batch.row-length", "512"),
    *("--sampling.max-new-tokens", "120", "--sampling.max-turns", "8"),
    *("--evaluation.rows", "16", "--evaluation.interval", "1000"),
]
DISCOUNT = ("--algorithm.gamma", "0.95")
ARMS = {
    "episode": FLAGS,
    "turn": [*FLAGS, "--algorithm.credit", "turn", *DISCOUNT],
    "step": [*FLAGS, "--algorithm.credit", "step", *DISCOUNT],
}
STEPS = 4


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    flags = parser.parse_args()
    arms.print_heading("arm", "seed", "reward at first", "reward at last", "turns", "compared, %")
    for arm in flags.arms:
        for seed in flags.seeds:
            run_dir = flags.to / f"corridor_{arm}_{seed}"
            arms.run(run_dir, [*ARMS[arm], "--seed", str(seed)])
            rows = [row for row in arms.read_metrics(run_dir) if "reward/mean" in row]
            compared = "-"
            if "policy/compared" in rows[-1]:
                compared = f"{100 * mean(rows, 'policy/compared'):.0f}"
            arms.print_row(
                arm,
                seed,
                f"{mean(rows[:STEPS], 'reward/mean'):.2f}",
                f"{mean(rows[-STEPS:], 'reward/mean'):.2f}",
                f"{mean(rows[-STEPS:], 'env/turns'):.1f}",
                compared,
            )


def mean(rows: list[dict[str, Any]], metric: str) -> float:
    """Return the mean of a metric over rows."""
    return sum(row[metric] for row in rows) / len(rows)


if __name__ == "__main__":
    main()
