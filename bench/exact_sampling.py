"""The sampler-trainer gap with and without --model.exact-sampling, and what it costs.

    python bench/exact_sampling.py --to runs/exact [--steps 6] [--dtypes float32 bfloat16]
        [--flags arithmetic_grpo --evaluation.rows 0]

Each arm is a run with the given flags. Arms take turns, `--rounds` times. Prints the mean and the
largest gap over all steps, and medians of the seconds of rollouts and updates over the steps that
compiled nothing: those within twice the fastest.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import arms

FLAGS = ["arithmetic_grpo", "--evaluation.rows", "0"]


def seconds(rows: list[dict[str, Any]], name: str) -> float:
    """Return the median of a time over the steps that compiled nothing."""
    times = [row[name] for row in rows if name in row]
    return statistics.median(time for time in times if time <= 2 * min(times))


def main() -> None:
    """Run the arms and print the table."""
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", default="6")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=FLAGS)
    options = parser.parse_args()
    modes = {"default": [], "exact": ["--model.exact-sampling"]}
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for round_ in range(options.rounds):
        for dtype in options.dtypes:
            for mode, flags in modes.items():
                run_dir = options.to / f"{dtype}_{mode}_{round_}"
                common = [*options.flags, "--steps", options.steps, "--model.dtype", dtype]
                arms.run(run_dir, [*common, *flags])
                rows.setdefault((dtype, mode), []).extend(arms.read_metrics(run_dir))
    arms.print_heading("dtype", "sampling", "mean gap", "largest gap", "rollout, s", "update, s")
    for (dtype, mode), of_arm in rows.items():
        means = [row["policy/log_prob_gap_mean"] for row in of_arm if "time/step" in row]
        largest = max(row["policy/log_prob_gap_max"] for row in of_arm if "time/step" in row)
        times = [f"{seconds(of_arm, f'time/{part}'):.2f}" for part in ("rollout", "update")]
        arms.print_row(dtype, mode, f"{statistics.mean(means):.1e}", f"{largest:.1e}", *times)


if __name__ == "__main__":
    main()
