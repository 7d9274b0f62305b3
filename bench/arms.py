"""Shared by the scripts of this folder: run several arms with several seeds, print Markdown tables.

An arm is a list of flags of launch/run.py. Finished runs are not repeated, so an interrupted script
continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

METRICS = {"accuracy": "accuracy", "low": "accuracy_low", "high": "accuracy_high"}
"""Key of an evaluation -> metric."""

Arms = Mapping[str, Sequence[str]]
"""Name -> flags of launch/run.py."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the description as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def run(run_dir: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Run launch/run.py in `run_dir`, unless it is finished there, and return its summary.json."""
    command = [sys.executable, str(ROOT / "launch/run.py"), *flags, "--run-dir", str(run_dir)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    return read_lines(run_dir / "metrics.jsonl")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none if there is no file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def estimate(row: Mapping[str, Any], prefix: str = "eval/") -> dict[str, float]:
    """Return the accuracy of a metrics row with its interval."""
    return {key: row[prefix + metric] for key, metric in METRICS.items()}


def percent(evaluation: Mapping[str, Any]) -> str:
    """Format an accuracy with its interval, in percent; "-" for an empty evaluation."""
    if not evaluation:
        return "-"
    accuracy, low, high = (100 * evaluation[key] for key in METRICS)
    return f"{accuracy:.1f} ({low:.1f} to {high:.1f})"


def print_heading(*columns: str) -> None:
    """Print the first two lines of a Markdown table."""
    print_row(*columns)
    print("|" + "---|" * len(columns), flush=True)


def print_row(*cells: object) -> None:
    """Print a line of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def table(
    folder: Path,
    arms: Arms,
    seeds: Sequence[int],
    columns: Sequence[str] = (),
    cells: Callable[[Path], list[str]] = lambda run_dir: [],
) -> None:
    """Run all arms, and print the accuracy of each on held-out problems, before and after.

    `cells` returns the cells of further `columns` for a run folder.
    """
    print_heading(
        "arm",
        "seed",
        "sampled before",
        "sampled after",
        "greedy before",
        "greedy after",
        *columns,
        "seconds",
    )
    for arm, flags in arms.items():
        for seed in seeds:
            run_dir = folder / f"{arm}_{seed}"
            summary = run(run_dir, [*flags, "--seed", str(seed)])
            before, after = summary["eval"]["before"], summary["eval"]["after"]
            evaluations = (before, after, before.get("greedy", {}), after.get("greedy", {}))
            seconds = f"{summary['seconds']:.0f}"
            print_row(arm, seed, *map(percent, evaluations), *cells(run_dir), seconds)
