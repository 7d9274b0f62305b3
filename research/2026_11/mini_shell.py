"""A shell on a dict of files: GRPO and PPO, from a model that imitates a careless user.

    python research/2026_11/mini_shell.py --to runs/mini_shell [--seeds 0 1 2] [--arms grpo ppo]

Trains one model by SFT, with which all arms and seeds begin. Prints one line per run: tasks done of
500 held-out ones, before and after; commands per episode and the largest gap between the log-probs
of sampler and trainer, over all steps.
"""

from __future__ import annotations

from pathlib import Path

import arms

ARMS = {"grpo": ["mini_shell_grpo"], "ppo": ["mini_shell_ppo"]}
COLUMNS = ("turns at first", "turns at last", "largest gap")
STEPS = 5


def cells(run_dir: Path) -> list[str]:
    """Return the mean number of turns in the first and in the last steps, and the gap."""
    rows = [row for row in arms.read_metrics(run_dir) if "env/turns" in row]
    turns = [row["env/turns"] for row in rows]
    means = [f"{sum(part) / len(part):.2f}" for part in (turns[:STEPS], turns[-STEPS:])]
    return [*means, f"{max(row['policy/log_prob_gap_max'] for row in rows):.0e}"]


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    flags = parser.parse_args()
    arms.run(flags.to / "sft", ["mini_shell_sft"])
    model = str(flags.to / "sft" / "model")
    chosen = {arm: [*ARMS[arm], "--model.path", model] for arm in flags.arms}
    arms.table(flags.to, chosen, flags.seeds, COLUMNS, cells)


if __name__ == "__main__":
    main()
