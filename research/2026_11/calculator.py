"""GSM8K's solutions with and without a calculator.

    python research/2026_11/calculator.py --to runs/calculator --data DIR [--seeds 0 1 2]

DIR has GSM8K's train.jsonl and test.jsonl. A small model learns from scratch (calculator_sft), and
answers the first 200 problems of the test set, with the calculator and without it.

Prints one line per run: accuracy, and the mean share of right marks of the sampled solutions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import arms

EVALUATIONS = [*("--evaluation.rows", "200"), *("--evaluation.interval", "100")]


def cells(evaluation: dict[str, Any]) -> list[str]:
    """Return accuracy, sampled and greedy, and the share of right marks, sampled."""
    marks = evaluation["rewards"]["gsm8k_marks"]["value"]
    greedy = arms.percent(evaluation["greedy"])
    return [arms.percent(evaluation), greedy, "-" if marks is None else f"{100 * marks:.1f}"]


def main() -> None:
    """Train and evaluate, and print the table."""
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--data", type=Path, required=True, help="folder of GSM8K")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", default="200")
    flags = parser.parse_args()
    data = ["--data.path", str(flags.data / "train.jsonl")]
    data += ["--data.evaluation-path", str(flags.data / "test.jsonl")]
    arms.print_heading("calculator", "seed", "sampled", "greedy", "right marks, %")
    for seed in flags.seeds:
        run_dir = flags.to / f"sft_{seed}"
        training = ["calculator_sft", *data, *EVALUATIONS, "--steps", flags.steps]
        with_tool = arms.run(run_dir, [*training, "--seed", str(seed)])
        # The same model, without a step that changes it.
        without = ["--environment", "", "--sampling.stop-strings"]
        model = ["--model.path", str(run_dir / "model"), "--model.no-random-init"]
        still = ["--steps", "1", "--optimizer.learning-rate", "1e-12"]
        alone = arms.run(
            flags.to / f"alone_{seed}",
            ["calculator_sft", *data, *EVALUATIONS, *without, *model, *still],
        )
        arms.print_row("yes", seed, *cells(with_tool["eval"]["after"]))
        arms.print_row("no", seed, *cells(alone["eval"]["before"]))


if __name__ == "__main__":
    main()
