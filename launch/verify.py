"""Is what a run has written whole? Reads only, needs no accelerator, and may run while the run does.

    python launch/verify.py RUN_DIR

Compares every file of every checkpoint with the manifest that was written right after it (in a store: every array with
its digest), and reads each row of metrics.jsonl and samples.jsonl: whole, each step once. Exit code 0: whole; 4: not.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from launch import stored_runs
from tpu_rl import manifests, stores
from tpu_rl.errors import DamagedDataError, InputError, TpuRlError

METRICS, SAMPLES, SUMMARY = "metrics.jsonl", "samples.jsonl", "summary.json"


@dataclass(frozen=True)
class Flags:
    run_dir: tyro.conf.Positional[str]
    """A run folder, also in a store (gs://)."""


class Finding(NamedTuple):
    """Something to say of a run."""

    text: str
    is_fault: bool = True
    """False: what a job that was ended leaves, and the same command mends."""


def main(argv: list[str]) -> int:
    flags = tyro.cli(Flags, args=argv, prog="launch/verify.py", description=__doc__)
    try:
        findings = verify(flags.run_dir)
    except TpuRlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    for finding in findings:
        print(f"{'FAULT' if finding.is_fault else 'note '}  {finding.text}")
    faults = sum(finding.is_fault for finding in findings)
    print(f"{flags.run_dir}: {faults} faults" if faults else f"{flags.run_dir}: whole")
    return DamagedDataError.code if faults else 0


def verify(address: str) -> list[Finding]:
    """All that is to be said of a run folder; InputError if it is none, DamagedDataError if its rows are in a store and
    not as they were published."""
    run_dir = stored_runs.fetched(address)
    metrics, samples = Rows.read(run_dir / METRICS), Rows.read(run_dir / SAMPLES)
    in_store = stores.is_address(address)
    return [
        *(of_stored_checkpoints(address) if in_store else of_checkpoints(run_dir / "checkpoints")),
        *of_metrics(metrics),
        *of_samples(samples, metrics.steps),
        *of_summary(run_dir, metrics.steps),
    ]


# --- checkpoints -------------------------------------------------------------------------------------------------


def of_checkpoints(folder: Path) -> Iterator[Finding]:
    steps = sorted((path for path in folder.glob("*") if path.name.isdecimal()), key=lambda path: int(path.name))
    if not steps:
        yield Finding("no checkpoints yet", is_fault=False)
    for path in steps:
        yield from of_checkpoint(path)
    for path in sorted(folder.glob("damaged/*")):
        yield Finding(f"checkpoint {path.name} is damaged and was set aside: {path}", is_fault=False)


def of_checkpoint(path: Path) -> Iterator[Finding]:
    found = manifests.compare(path)
    if found is None:
        text = f"checkpoint {path.name} has no manifest: the job ended right after it. To restore it checks its arrays"
        yield Finding(text, is_fault=False)
        return
    for what, names in found._asdict().items():
        for name in names:
            yield Finding(f"checkpoint {path.name}: {what} {path / name}")
    if not any(found):
        yield Finding(f"checkpoint {path.name}: all files as they were written", is_fault=False)


def of_stored_checkpoints(address: str) -> Iterator[Finding]:
    """Every array is read, on the CPU, and its digest compared."""
    import jax  # imported here: it takes a second, and folders are verified without

    from tpu_rl import checkpoint

    jax.config.update("jax_platforms", "cpu")
    checkpoints = checkpoint.read_checkpoints(stored_runs.checkpoints_of(address))
    steps = checkpoints.steps()
    if not steps:
        yield Finding("no checkpoints yet", is_fault=False)
    for step in steps:
        try:
            checkpoints.check(step)
            yield Finding(f"checkpoint {step}: all arrays as they were written", is_fault=False)
        except DamagedDataError as error:
            yield Finding(f"{error.what} {error.where} {error.why}".rstrip())
        except InputError as error:
            if step in checkpoints.steps():
                raise
            yield Finding(error.what, is_fault=False)
    for name in checkpoints.aside():
        yield Finding(f"checkpoint {name} is damaged and was set aside: {address}", is_fault=False)


# --- rows --------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of a file of JSON lines."""

    name: str
    steps: list[int]
    """The `step` of each whole row."""
    lines: list[bytes]
    """Each whole row as it stands there."""
    findings: list[Finding]
    """Of lines that are no rows."""

    @staticmethod
    def read(path: Path) -> Rows:
        rows = Rows(path.name, [], [], [])
        if not path.exists():
            rows.findings.append(Finding(f"{path.name} is missing"))
            return rows
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
            step = step_of(line)
            if not line.endswith(b"\n"):
                text = f"{path.name}, line {number}, is cut off: the job ended while it wrote it"
                rows.findings.append(Finding(text, is_fault=False))
            elif step is None:
                rows.findings.append(Finding(f"{path.name}, line {number}, is not a row: {line[:60]!r}"))
            else:
                rows.steps.append(step)
                rows.lines.append(line)
        return rows


def step_of(line: bytes) -> int | None:
    """The step of a row, or None where it is no row."""
    try:
        row: Any = json.loads(line)
        return row["step"] if type(row["step"]) is int else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def of_metrics(rows: Rows) -> Iterator[Finding]:
    """Steps 0, 1, 2, ... in their order, each once."""
    yield from rows.findings
    last = -1
    for step in rows.steps:
        if step == last:
            yield Finding(f"{rows.name}: step {step} stands there twice")
        elif step < last:
            yield Finding(f"{rows.name}: step {step} stands behind step {last}")
        elif step > last + 1:
            missing = f"step {last + 1}" if step == last + 2 else f"steps {last + 1} to {step - 1}"
            yield Finding(f"{rows.name}: {missing} missing")
        last = max(step, last)
    yield Finding(f"{rows.name}: {len(rows.steps)} whole rows, up to step {last}", is_fault=False)


def of_samples(rows: Rows, metrics_steps: list[int]) -> Iterator[Finding]:
    """The rows of a step stand together, the steps in order, each once, none without a row in metrics.jsonl."""
    yield from rows.findings
    known, last = set(metrics_steps), -1
    for step, group in itertools.groupby(zip(rows.steps, rows.lines, strict=True), key=lambda row: row[0]):
        lines = [line for _, line in group]
        half = len(lines) // 2
        if step < last:
            yield Finding(f"{rows.name}: step {step} stands behind step {last}")
        elif lines[:half] == lines[half:]:
            yield Finding(f"{rows.name}: all rows of step {step} stand there twice")
        elif step not in known:
            is_newest = step > max(known, default=-1)
            text = f"{rows.name}: step {step} has no row in {METRICS}" + (": the job ended between" * is_newest)
            yield Finding(text, is_fault=not is_newest)
        last = max(step, last)
    yield Finding(f"{rows.name}: {len(rows.steps)} whole rows", is_fault=False)


def of_summary(run_dir: Path, metrics_steps: list[int]) -> Iterator[Finding]:
    """Of a run that is finished, its last step stands in metrics.jsonl."""
    path = run_dir / SUMMARY
    if not path.exists():
        return
    try:
        steps = json.loads(path.read_bytes())["steps"]
    except (ValueError, KeyError, TypeError):
        yield Finding(f"{SUMMARY} cannot be read")
        return
    last = max(metrics_steps, default=-1)
    if last < steps:
        yield Finding(f"{SUMMARY} says {steps} steps, {METRICS} ends at step {last}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
