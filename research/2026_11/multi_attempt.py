"""Training with one to five attempts against training with one, at equal numbers of answers.

    python research/2026_11/multi_attempt.py --to runs/bench [--seeds 0 1 2] [--arms single multiple]

In 100 steps `single` samples 25,600 answers. `multiple` takes 60 steps, because its episodes have
more than one answer; the table counts them. Both get the rewards of the environment multi_attempt.

Prints one line per run: greedy accuracy on 500 held-out problems with one attempt and with two,
before and after.
"""

from __future__ import annotations

from pathlib import Path

import arms

EVALUATIONS = ["--evaluation.turns", "1", "2", "--evaluation.interval", "50"]
ARMS = {
    "single": ["arithmetic_multi_attempt", "--sampling.max-turns", "1", "--steps", "100"],
    "multiple": ["arithmetic_multi_attempt", "--steps", "60"],
}
COLUMNS = ("one before", "two before", "one after", "two after", "answers", "seconds")


def cells(run_dir: Path) -> list[str]:
    """Return the accuracies of a run, and how many answers it sampled."""
    rows = arms.read_metrics(run_dir)
    evaluations = [row for row in rows if "eval/turns_1_greedy_accuracy" in row]
    accuracies = [
        arms.percent(arms.estimate(row, f"eval/turns_{turns}_greedy_"))
        for row in (evaluations[0], evaluations[-1])
        for turns in (1, 2)
    ]
    answers = sum(row["env/turns"] * 256 for row in rows if "env/turns" in row)
    return [*accuracies, f"{answers:,.0f}"]


def main() -> None:
    """Run the arms, and print their table."""
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    flags = parser.parse_args()
    arms.print_heading("arm", "seed", *COLUMNS)
    for arm in flags.arms:
        for seed in flags.seeds:
            run_dir = flags.to / f"{arm}_{seed}"
            summary = arms.run(run_dir, [*ARMS[arm], *EVALUATIONS, "--seed", str(seed)])
            arms.print_row(arm, seed, *cells(run_dir), f"{summary['seconds']:.0f}")


if __name__ == "__main__":
    main()
