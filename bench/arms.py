"""What the scripts beside this one share: runs of several arms and seeds -> a table in Markdown.

An arm is a list of flags of launch/run.py. A finished run is not run again, so a script that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

METRICS = {"accuracy": "accuracy", "low": "accuracy_low", "high": "accuracy_high"}

Arms = Mapping[str, Sequence[str]]


def run(run_dir: Path, flags: Sequence[str]) -> dict:
    """summary.json of the run in `run_dir`, which is made if it is not finished."""
    command = [sys.executable, str(ROOT / "launch/run.py"), *flags, "--run-dir", str(run_dir)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def percent(found: dict) -> str:
    """An accuracy with its interval, both in %."""
    return f"{100 * found['accuracy']:.1f} ({100 * found['low']:.1f} to {100 * found['high']:.1f})" if found else "-"


def estimate(row: dict, prefix: str = "eval/") -> dict:
    """An accuracy with its interval, of a metrics row."""
    return {name: row[prefix + metric] for name, metric in METRICS.items()}


def table(folder: Path, arms: Arms, seeds: Sequence[int]) -> None:
    """Prints a line a run: accuracy on the held-out problems before and after, sampled and greedy."""
    print("| arm | seed | sampled before | sampled after | greedy before | greedy after | seconds |")
    print("|---|---|---|---|---|---|---|")
    for arm, flags in arms.items():
        for seed in seeds:
            summary = run(folder / f"{arm}_{seed}", [*flags, "--seed", str(seed)])
            before, after = summary["eval"]["before"], summary["eval"]["after"]
            found = (before, after, before.get("greedy", {}), after.get("greedy", {}))
            print(f"| {arm} | {seed} | {' | '.join(map(percent, found))} | {summary['seconds']:.0f} |", flush=True)


def main(description: str, arms: Arms) -> None:
    """The command line of a script that has nothing but arms."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=arms, default=list(arms))
    flags = parser.parse_args()
    table(flags.to, {arm: arms[arm] for arm in flags.arms}, flags.seeds)
