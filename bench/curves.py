"""Learning curves of finished runs, as one picture: a line an arm, the mean of its seeds, in a band from least to most.

python bench/curves.py runs/bench/ppo_0 runs/bench/ppo_1 runs/bench/vapo_0 ... --to docs/curves/ppo.svg

Runs are called ARM_SEED, as all scripts of this folder call them; drawn is `eval/accuracy`, sampled answers to held-out
problems.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from tpu_rl import charts


def curve(run_dir: Path) -> dict[int, float]:
    """Step -> accuracy."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}


def arm(label: str, runs: list[Path]) -> charts.Series:
    """Over the steps that all its runs have."""
    curves = [curve(run_dir) for run_dir in runs]
    steps = sorted(set.intersection(*map(set, curves)))
    values = np.array([[one[step] for step in steps] for one in curves])
    return charts.Series(label, np.array(steps), values.mean(0), values.min(0), values.max(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--to", type=Path, required=True)
    flags = parser.parse_args()
    arms: dict[str, list[Path]] = {}
    for run_dir in flags.runs:
        arms.setdefault(run_dir.name.rpartition("_")[0], []).append(run_dir)
    series = [arm(label.replace("_", " "), runs) for label, runs in arms.items()]
    flags.to.parent.mkdir(parents=True, exist_ok=True)
    flags.to.write_text(charts.as_svg(charts.line_chart(series, size=charts.WIDE, percent=True)), encoding="utf-8")


if __name__ == "__main__":
    main()
