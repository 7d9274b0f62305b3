"""Checks of a run folder: is everything that a run has written complete and undamaged?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tpu_rl.checkpoint import gcs, manifests, remote_run
from tpu_rl.errors import DamagedDataError, InputError

# As in tpu_rl.metrics, which imports JAX.
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SUMMARY = "summary.json"


class Finding(NamedTuple):
    """A result of a check."""

    text: str
    is_fault: bool = True
    """False for notes, such as what an interrupted job leaves; resuming the run repairs that."""


def verify(address: str) -> list[Finding]:
    """Return all findings about a run folder.

    Raises:
      InputError: it is no run folder.
      DamagedDataError: rows in a bucket are not as they were published.
    """
    run_dir = remote_run.fetch(address)
    metrics = read_rows(run_dir / METRICS)
    samples = read_rows(run_dir / SAMPLES)
    if gcs.is_address(address):
        findings = list(check_stored_checkpoints(address))
    else:
        findings = list(check_checkpoints(run_dir / remote_run.CHECKPOINTS))
    findings += check_metrics(metrics)
    findings += check_samples(samples, metrics.steps)
    findings += check_summary(run_dir, metrics.steps)
    return findings


# --- checkpoints ---


def check_checkpoints(folder: Path) -> Iterator[Finding]:
    """Compare the files of all checkpoints on a disk with their manifests."""
    folders = [path for path in folder.glob("*") if path.name.isdecimal()]
    if not folders:
        yield Finding("no checkpoints yet", is_fault=False)
    for path in sorted(folders, key=lambda path: int(path.name)):
        yield from check_checkpoint(path)
    for path in sorted(folder.glob("damaged/*")):
        yield Finding(
            f"checkpoint {path.name} is damaged and was set aside: {path}", is_fault=False
        )


def check_checkpoint(path: Path) -> Iterator[Finding]:
    """Compare the files of one checkpoint with its manifest."""
    differences = manifests.compare(path)
    if differences is None:
        yield Finding(
            f"checkpoint {path.name} has no manifest: the job ended right after it. "
            "Its arrays are checked when it is restored",
            is_fault=False,
        )
        return
    for kind, names in differences._asdict().items():
        for name in names:
            yield Finding(f"checkpoint {path.name}: {kind} {path / name}")
    if not any(differences):
        yield Finding(f"checkpoint {path.name}: all files as they were written", is_fault=False)


def check_stored_checkpoints(address: str) -> Iterator[Finding]:
    """Read every array of all checkpoints in a bucket, on the CPU, and compare its digest."""
    import jax  # Imported here because it takes a second, and folders on disks do without.

    from tpu_rl.checkpoint import manager

    jax.config.update("jax_platforms", "cpu")
    checkpoints = manager.read_checkpoints(remote_run.checkpoints_of(address))
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
            # The run, which goes on, may have deleted the step meanwhile.
            if step in checkpoints.steps():
                raise
            yield Finding(error.what, is_fault=False)
    for name in checkpoints.damaged_steps():
        yield Finding(f"checkpoint {name} is damaged and was set aside: {address}", is_fault=False)


# --- rows ---


class Rows(NamedTuple):
    """The rows of a file of JSON lines."""

    name: str
    """The name of the file."""
    steps: list[int]
    """The `step` of each complete row."""
    lines: list[bytes]
    """Each complete row as it was written."""
    findings: list[Finding]
    """The findings about lines that are not rows."""


def read_rows(path: Path) -> Rows:
    """Read a file of rows."""
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
            rows.findings.append(
                Finding(f"{path.name}, line {number}, is not a row: {line[:60]!r}")
            )
        else:
            rows.steps.append(step)
            rows.lines.append(line)
    return rows


def step_of(line: bytes) -> int | None:
    """Return the step of a row, or None if the line is not a row."""
    try:
        row: Any = json.loads(line)
        return row["step"] if type(row["step"]) is int else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def check_metrics(rows: Rows) -> Iterator[Finding]:
    """Check that metrics.jsonl has the steps 0, 1, 2, ... in order, each once."""
    yield from rows.findings
    last = -1
    for step in rows.steps:
        if step == last:
            yield Finding(f"{rows.name}: step {step} appears twice")
        elif step < last:
            yield Finding(f"{rows.name}: step {step} comes after step {last}")
        elif step > last + 1:
            missing = f"step {last + 1}" if step == last + 2 else f"steps {last + 1} to {step - 1}"
            yield Finding(f"{rows.name}: {missing} missing")
        last = max(step, last)
    yield Finding(f"{rows.name}: {len(rows.steps)} whole rows, up to step {last}", is_fault=False)


def check_samples(rows: Rows, metrics_steps: list[int]) -> Iterator[Finding]:
    """Check samples.jsonl.

    The rows of a step must be together, the steps in order and each once, and every step must have
    a row in metrics.jsonl.
    """
    yield from rows.findings
    known_steps = set(metrics_steps)
    newest_step = max(known_steps, default=-1)
    last = -1
    pairs = zip(rows.steps, rows.lines, strict=True)
    for step, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        lines = [line for _, line in group]
        half = len(lines) // 2
        if step < last:
            yield Finding(f"{rows.name}: step {step} comes after step {last}")
        elif lines[:half] == lines[half:]:
            yield Finding(f"{rows.name}: all rows of step {step} appear twice")
        elif step not in known_steps:
            text = f"{rows.name}: step {step} has no row in {METRICS}"
            # Samples are written before metrics.
            if step > newest_step:
                yield Finding(f"{text}: the job ended between", is_fault=False)
            else:
                yield Finding(text)
        last = max(step, last)
    yield Finding(f"{rows.name}: {len(rows.steps)} whole rows", is_fault=False)


def check_summary(run_dir: Path, metrics_steps: list[int]) -> Iterator[Finding]:
    """Check that the last step of a finished run is in metrics.jsonl."""
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
