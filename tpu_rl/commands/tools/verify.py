"""Check that everything a run has written is complete and undamaged.

    python launch/verify.py RUN_DIR

This compares every file of every checkpoint with its manifest (in a bucket: every array with its
digest). It also reads each row of metrics.jsonl and samples.jsonl: rows must be complete, and each
step must appear once. The command only reads, needs no accelerator, and may run while the run goes
on. The exit code is 0 if everything is whole, and 4 if not.
"""

from __future__ import annotations

import hashlib
import itertools
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from tpu_rl import run_files
from tpu_rl.checkpoint import identity, manifests, remote_run
from tpu_rl.errors import DamagedDataError, InputError, reported, typed_command
from tpu_rl.run_files import METRICS, SAMPLES, SUMMARY
from tpu_rl.storage import gcs


@dataclass(frozen=True)
class Flags:
    run_dir: tyro.conf.Positional[str]
    """A run folder, on a disk or in a bucket (gs://)."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog=typed_command("verify"), description=__doc__)
    findings = verify(flags.run_dir)
    for finding in findings:
        print(f"{'FAULT' if finding.is_fault else 'note '}  {finding.text}")
    faults = sum(finding.is_fault for finding in findings)
    print(f"{flags.run_dir}: {faults} faults" if faults else f"{flags.run_dir}: whole")
    return DamagedDataError.code if faults else 0


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
        findings += check_model(run_dir)
    findings += check_identity(run_dir)
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
    """Compare the files of one checkpoint with its manifest, or else its arrays."""
    # Reading a pipe may never end. A link is judged by what it leads to.
    irregular = [file for file in path.rglob("*") if not file.is_file() and not file.is_dir()]
    if irregular:
        for file in irregular:
            yield Finding(f"checkpoint {path.name}: no regular file {file}")
        return
    differences = manifests.compare(path)
    if differences is None:
        yield Finding(
            f"checkpoint {path.name} has no manifest: the job ended right after it", is_fault=False
        )
        yield from check_stored_checkpoints(str(path.parents[1]), only=int(path.name))
        return
    for kind, names in differences._asdict().items():
        for name in names:
            yield Finding(f"checkpoint {path.name}: {kind} {path / name}")
    if not any(differences):
        yield Finding(f"checkpoint {path.name}: all files as they were written", is_fault=False)


def check_stored_checkpoints(address: str, only: int | None = None) -> Iterator[Finding]:
    """Read every array of all checkpoints, or of one, on the CPU, and compare its digest."""
    import jax  # Imported here because it takes a second, and folders on disks do without.

    from tpu_rl.checkpoint import manager

    jax.config.update("jax_platforms", "cpu")
    checkpoints = manager.read_checkpoints(remote_run.checkpoints_of(address))
    steps = checkpoints.steps() if only is None else [only]
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
    for name in checkpoints.damaged_steps() if only is None else ():
        yield Finding(f"checkpoint {name} is damaged and was set aside: {address}", is_fault=False)


# --- the run ---


def check_identity(run_dir: Path) -> Iterator[Finding]:
    """Check configuration, name and rows against what the checkpoints recorded of them."""
    yield from _faults(lambda: run_files.read_config(run_dir / run_files.CONFIG))
    folder = run_dir / run_files.CHECKPOINTS
    steps = {
        int(name): path
        for path in folder.glob("*")
        if (name := path.name.removesuffix(".json")).isdecimal()
    }
    damaged_rows: dict[Path, str] = {}
    for step, path in sorted(steps.items()):
        try:
            record = run_files.read_record(path)
            if record is None:
                if not run_files.exists(path / manifests.MANIFEST):
                    yield Finding(f"checkpoint {step} has no record")
                continue
            recorded = record["extra"].get(identity.KEY, {})
            if record["step"] != step:
                yield Finding(f"checkpoint {step} is a copy of checkpoint {record['step']}")
            elif recorded and recorded["id"] != identity.read(run_dir):
                yield Finding(f"checkpoint {step} is of another run, {recorded['id']}")
            damaged_rows |= dict(run_files.changed_rows(run_dir, recorded.get("rows", {})))
        except DamagedDataError as error:
            yield Finding(f"checkpoint {step}: {error.what} {error.why}")
    for file, why in damaged_rows.items():
        yield Finding(f"{file.name}: {why}")
    for path in sorted(run_dir.glob("*/*.npz")):
        if not _is_whole_archive(path):
            yield Finding(f"{path.relative_to(run_dir)} is damaged")
    yield from _faults(lambda: list(run_files.read_rows(run_dir / "dataset_changes.jsonl", ())))


def _faults(read: Callable[[], Any]) -> Iterator[Finding]:
    """Yield the fault of a file, if it has one."""
    try:
        read()
    except DamagedDataError as error:
        yield Finding(f"{error.what} {error.where}: {error.why}")


def _is_whole_archive(path: Path) -> bool:
    """Return True if the parts of an .npz file have their checksums."""
    try:
        with run_files.open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    # zipfile and zlib each raise their own errors for damaged files.
    except Exception:
        return False


def check_model(run_dir: Path) -> Iterator[Finding]:
    """Compare the models that a finished run has written with their hashes in summary.json."""
    try:
        files = run_files.read_summary(run_dir).get("files", {})
    except DamagedDataError:
        return  # `check_summary` says so.
    changed = manifests.changed_files(run_dir, files)
    for name in changed:
        state = "changed" if run_files.exists(run_dir / name) else "missing"
        yield Finding(f"{state}: {run_dir / name}")
    if files and not changed:
        yield Finding(f"{len(files)} files of models: as they were written", is_fault=False)


# --- rows ---


class Rows(NamedTuple):
    """The rows of a file of JSON lines."""

    name: str
    """The name of the file."""
    steps: list[int]
    """The `step` of each complete row."""
    hashes: list[bytes]
    """The SHA-256 of each complete row: rows may be more than memory."""
    findings: list[Finding]
    """The findings about lines that are not rows."""


def read_rows(path: Path) -> Rows:
    """Read a file of rows."""
    rows = Rows(path.name, [], [], [])
    if not path.is_file():
        state = "no regular file" if run_files.exists(path) else "missing"
        rows.findings.append(Finding(f"{path.name} is {state}"))
        return rows
    try:
        with path.open("rb") as file:
            _add_rows(rows, run_files.lines(path, file))
    except DamagedDataError as error:
        rows.findings.append(Finding(f"{path.name}: {error.why}"))
    return rows


def _add_rows(rows: Rows, lines: Iterator[bytes]) -> None:
    for number, line in enumerate(lines, start=1):
        row = run_files.parse_row(line)
        if not line.endswith(b"\n"):
            text = f"{rows.name}, line {number}, is cut off: the job ended while it wrote it"
            rows.findings.append(Finding(text, is_fault=False))
        elif isinstance(row, str):
            rows.findings.append(
                Finding(f"{rows.name}, line {number}, is not a row: {line[:60]!r}")
            )
        else:
            rows.steps.append(row["step"])
            rows.hashes.append(hashlib.sha256(line).digest())


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
    pairs = zip(rows.steps, rows.hashes, strict=True)
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
    """Check that the last step of a finished run is the last one of metrics.jsonl."""
    try:
        summary = run_files.read_summary(run_dir)
    except DamagedDataError as error:
        yield Finding(f"{SUMMARY} cannot be read: {error.why}")
        return
    if not summary:
        return
    steps = summary["steps"]
    last = max(metrics_steps, default=-1)
    if last < steps:
        yield Finding(f"{SUMMARY} says {steps} steps, {METRICS} ends at step {last}")
    elif last > steps:
        text = f"{SUMMARY} says {steps} steps, {METRICS} goes on to step {last}"
        is_continued = _planned_steps(run_dir) > steps
        yield Finding(text + ": the run was continued" * is_continued, is_fault=not is_continued)


def _planned_steps(run_dir: Path) -> int:
    """Return the number of steps of the configuration; 0 if it cannot be read."""
    try:
        steps = run_files.read_config(run_dir / run_files.CONFIG)[0].get("steps")
    except DamagedDataError:
        return 0  # `check_identity` says so.
    return steps if isinstance(steps, int) else 0
