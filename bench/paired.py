"""Arms with several seeds on the task of every_method.py, for mismatch.py and answer_forms.py.

A study names its arms, its contrasts and its page. A line of the results is added when a run ends,
and what stands there is not run again; all arms of a seed run before the next one.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import arms
import every_method
import numpy as np

from tpu_rl.evaluation import intervals
from tpu_rl.report import markdown

Line = dict[str, Any]
"""A run: its `name` and `seed`, which answers are right (`sampled`, `greedy`), its `seconds`."""


class Paired(NamedTuple):
    """A study."""

    results: Path
    page: Path
    arms: Mapping[str, str]
    """Name -> preset and flags of launch/run.py; {to} is the folder of the runs."""
    seeds: int
    steps: int
    summarize: Callable[[list[Line]], str]
    """Writes the page from the lines."""
    prepare: Callable[[Path], None] = lambda folder: None
    """Writes into the folder what arms read."""
    metrics: Mapping[str, str] = {}
    """Key of a line -> metric, of which the line has the mean over the last steps."""
    last: int = 0
    """How many steps these are; 0: all."""


def share(line: Line) -> float:
    """Return the share of right sampled answers of a run."""
    return float(every_method.unpacked(line["sampled"], every_method.SAMPLES).mean())


def interval(values: Sequence[float | None], form: str) -> str:
    """Return the mean of the values of the seeds, with its 95 % interval; "-" without values."""
    values = [value for value in values if value is not None]
    if not values:
        return "-"
    estimate = intervals.mean_estimate(values)
    mean = format(float(np.mean(values)), form)
    if np.isnan(estimate.low):
        return mean
    return f"{mean} ({format(estimate.low, form)} to {format(estimate.high, form)})"


def points(a: list[Line], b: list[Line]) -> str:
    """Return the difference a - b in points with its interval over the seeds of both."""
    by_seed = {line["seed"]: share(line) for line in b}
    values = [share(line) - by_seed[line["seed"]] for line in a if line["seed"] in by_seed]
    if not values:
        return "-"
    return f"{interval([100 * value for value in values], '+.1f')}, {len(values)} seeds"


def by_arm(study: Paired, lines: list[Line]) -> dict[str, list[Line]]:
    """Return the lines of each arm, in the order of the arms."""
    return {name: [line for line in lines if line["name"] == name] for name in study.arms}


def contrasts(runs: Mapping[str, list[Line]], pairs: tuple[tuple[str, str], ...]) -> str:
    """Return the table of the differences that were chosen before any run."""
    rows = [[f"{a} minus {b}", points(runs[a], runs[b])] for a, b in pairs]
    return f"{markdown.table(('contrast', 'points'), rows)}\n"


def settings(runs: Mapping[str, list[Line]], flags: Mapping[str, str]) -> str:
    """Return the flags of the arms that have run."""
    listing = "\n".join(f"{name:22} {flags[name]}" for name, own in runs.items() if own)
    return f"## Settings\n\nPreset and flags of `launch/run.py`:\n\n```\n{listing}\n```\n"


def run_all(
    study: Paired, folder: Path, results: Path, names: list[str], seeds: int, minutes: float
) -> None:
    """Run what has no line in `results`, until the time is over."""
    deadline = time.monotonic() + 60 * minutes
    opened = every_method.open_study(folder)
    study.prepare(folder)
    done = {(line["name"], line["seed"]) for line in arms.read_lines(results)}
    for seed in range(seeds):
        for name in names:
            if (name, seed) in done:
                continue
            if time.monotonic() > deadline:
                return
            run_dir = folder / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
            shutil.rmtree(run_dir, ignore_errors=True)  # A run that broke off.
            begun = time.monotonic()
            every_method.train(opened, study.arms[name], run_dir, seed, study.steps)
            line = {"name": name, "seed": seed} | every_method.judged(
                opened, str(run_dir / "model")
            )
            line["seconds"] = round(time.monotonic() - begun, 1)
            rows = arms.read_metrics(run_dir)[-study.last :]
            for key, metric in study.metrics.items():
                values = [row[metric] for row in rows if metric in row]
                line[key] = float(np.mean(values)) if values else None
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"DONE {name} {seed} {share(line):.3f} {line['seconds']}", flush=True)


def main(study: Paired, description: str | None, folder: str) -> None:
    """Run a study from the command line."""
    parser = arms.make_parser(description)
    parser.add_argument("--to", type=Path, default=Path(folder))
    parser.add_argument("--arms", nargs="+", default=list(study.arms), choices=study.arms)
    parser.add_argument("--seeds", type=int, default=study.seeds)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after these")
    parser.add_argument("--small", action="store_true", help="one step; results stay in --to")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    flags = parser.parse_args()
    if flags.page:
        study.page.write_text(study.summarize(arms.read_lines(study.results)), encoding="utf-8")
        return
    if not flags.small:
        run_all(study, flags.to, study.results, flags.arms, flags.seeds, flags.minutes)
        return
    results = flags.to / "results.jsonl"
    run_all(study._replace(steps=1), flags.to, results, flags.arms, 1, flags.minutes)
    study.summarize(arms.read_lines(results))
