"""Learning curves of finished runs as one SVG: one line per arm, the mean of its seeds.

    python bench/curves.py runs/bench/ppo_0 runs/bench/ppo_1 runs/bench/vapo_0 ... \\
        --to docs/curves/ppo.svg

The band of a line goes from its worst to its best seed. Run folders are named ARM_SEED, as in all
scripts of this folder. The metric is `eval/accuracy`: sampled answers to held-out problems. Choose
another one with --metric.
"""

from __future__ import annotations

from pathlib import Path

import arms
import numpy as np
import plots

from tpu_rl.report.series import Series


def curve(run_dir: Path, metric: str) -> dict[int, float]:
    """Return step -> value of the metric."""
    rows = arms.read_metrics(run_dir)
    return {row["step"]: row[metric] for row in rows if metric in row}


def arm_series(label: str, run_dirs: list[Path], metric: str) -> Series:
    """Return the mean of an arm's runs over the steps that all of them have."""
    curves = [curve(run_dir, metric) for run_dir in run_dirs]
    steps = sorted(set.intersection(*map(set, curves)))
    values = np.array([[values[step] for step in steps] for values in curves])
    return Series(label, np.array(steps), values.mean(0), (values.min(0), values.max(0)))


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--to", type=Path, required=True, help="the SVG file")
    parser.add_argument("--metric", default="eval/accuracy")
    flags = parser.parse_args()
    runs: dict[str, list[Path]] = {}
    for run_dir in flags.runs:
        runs.setdefault(run_dir.name.rpartition("_")[0], []).append(run_dir)
    series = [
        arm_series(arm.replace("_", " "), run_dirs, flags.metric) for arm, run_dirs in runs.items()
    ]
    figure = plots.line_chart(series, percent="accuracy" in flags.metric)
    flags.to.parent.mkdir(parents=True, exist_ok=True)
    flags.to.write_text(plots.as_svg(figure), encoding="utf-8")


if __name__ == "__main__":
    main()
