"""Read the small files of a run folder: configuration, summary, rows.

Every command reads them here. A file that is not as the run wrote it is one DamagedDataError, never
another library's error, and no line or file takes more memory than `MAX_BYTES`. This imports
nothing that takes time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import yaml

from tpu_rl.errors import DamagedDataError, InputError, MachineError, TpuRlError, typed_command

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"
REPORT = "report.html"
PICTURES = "pictures"
"""The folder of small copies of the pictures of samples."""

MAX_BYTES = 64 * 2**20
"""Bytes of a line, or of a file that is not made of lines. No run writes longer ones."""
_ROW = re.compile(rb'\{"step": (0|[1-9][0-9]{0,17})[,}]')
SEAL = "# sha256 of the lines above: "
CHECKSUM = "sha256"
"""The key of the hash of the other keys in summary.json and in records of checkpoints."""


def damage(path: Path, why: str, fix: str = "") -> DamagedDataError:
    """Return the error for a file that is not as the run wrote it."""
    return DamagedDataError(
        f"{path.name} cannot be read.",
        where=str(path),
        why=why,
        fix=fix
        or "put a good copy back, or start again in another --run-dir; "
        f"{typed_command('verify')} RUN_DIR names all faults",
    )


def require_there(path: Path) -> None:
    """Raise DamagedDataError if a file or folder that a run writes was removed meanwhile."""
    if not path.exists():
        raise damage(path, "it was removed while the run went on")


def exists(path: Path) -> bool:
    """Return True if there is anything of that name, a broken link included."""
    return os.path.lexists(path)


def has_checkpoints(run_dir: Path) -> bool:
    """Return True if a run has saved a step in the folder, whole or damaged."""
    folders = (run_dir / CHECKPOINTS, run_dir / CHECKPOINTS / "damaged")
    names = [path.name.partition(".")[0] for folder in folders for path in folder.glob("*")]
    return any(name.isdecimal() for name in names)


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read it.

    Raises OSError if it cannot be read, or is a pipe or a device, which may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_text(path: Path) -> str:
    """Return the text of a file of at most `MAX_BYTES`."""
    return _decode(path, read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """Return the content of a file of at most `MAX_BYTES`."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(content) > MAX_BYTES:
        raise damage(path, f"it has more than {MAX_BYTES:,} bytes")
    return content


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise damage(path, f"it is no text: {error}") from error


def _unreadable(path: Path, error: OSError) -> TpuRlError:
    if isinstance(error, PermissionError):
        return MachineError(
            f"{path.name} cannot be read.",
            where=str(path),
            why=error.strerror or str(error),
            fix="give this user the right to read it",
        )
    return damage(path, error.strerror or str(error))


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def unlink_copies(run_dir: Path) -> None:
    """Give the files of a run folder inodes of their own, before the run writes them in place.

    A folder that was copied with hard links (cp -al, rsync --link-dest) shares them with its
    original, in which they would change, too. Checkpoints and models are never written in place.
    """
    for path in [*run_dir.glob("*"), *run_dir.glob("tensorboard/**/*")]:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink == 1:
            continue
        copy = path.with_name(f"{path.name}.tmp")
        shutil.copy2(path, copy)
        copy.replace(path)


# --- objects ---


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; {} if there is no such file."""
    if not exists(path):
        return {}
    try:
        return mapping(json.loads(read_text(path)))
    except (ValueError, TypeError, RecursionError) as error:
        raise damage(path, f"it is not a JSON object: {error}") from error


def mapping(value: Any) -> dict[str, Any]:
    """Return a dict; raise TypeError for anything else."""
    if not isinstance(value, dict):
        raise TypeError(f"it is a {type(value).__name__}")
    return value


def checksum(values: dict[str, Any]) -> str:
    """Return the SHA-256 of values as JSON with sorted keys, without their own checksum."""
    others = {key: value for key, value in values.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return summary.json; {} if the run is not finished."""
    path = run_dir / SUMMARY
    summary = read_json(path)
    if CHECKSUM in summary and summary[CHECKSUM] != checksum(summary):
        raise damage(path, "its values are not those that were written")
    if exists(path) and type(summary.get("steps")) is not int:
        raise damage(path, "it does not say how many steps the run has taken")
    return summary


# --- the configuration ---


def sealed(text: str) -> str:
    """Return the text of a configuration with a last line that has its hash."""
    return f"{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n"


def read_config(path: Path, may_be_edited: bool = False) -> tuple[dict[str, Any], str]:
    """Return (values, text) of a configuration that a run has saved.

    Args:
        may_be_edited: whether a person may have changed it since.
    """
    text = read_text(path)
    body, mark, digest = text.rpartition(SEAL)
    is_beside_checkpoints = has_checkpoints(path.parent)
    if not may_be_edited and (mark or is_beside_checkpoints) and text != sealed(body):
        raise damage(
            path,
            f"it is not what the run wrote: its last line says {digest.strip()[:12] or 'no hash'}",
            "put it back as it was; settings that may change are given as flags",
        )
    try:
        return mapping(yaml.safe_load(text) or {}), body or text
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise damage(path, f"it is no configuration: {error}") from error


# --- rows ---


def read_rows(path: Path, keys: tuple[str, ...] = ("step",)) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that may be missing; an unfinished last line is left out.

    Each has an integer `step`, if that is a key, and numbers under the other keys.
    """
    if exists(path):
        try:
            with open_regular(path) as file:
                yield from rows_of(path, lines(path, file), keys)
        except OSError as error:
            raise _unreadable(path, error) from error


def read_metrics(run_dir: Path, keys: tuple[str, ...] = ("step",)) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics.jsonl, which has each step once and in order."""
    path = run_dir / METRICS
    last = -1
    for row in read_rows(path, keys):
        if row["step"] <= last:
            raise damage(path, f"step {row['step']} comes after step {last}")
        last = row["step"]
        yield row


def require_metrics(run_dir: Path, keys: tuple[str, ...] = ("step",)) -> list[dict[str, Any]]:
    """Return the rows of `read_metrics`. Raises InputError if there are none."""
    rows = list(read_metrics(run_dir, keys))
    if not rows:
        raise InputError(
            "there is nothing to report yet",
            where=str(run_dir / METRICS),
            why="the file is missing or has no rows",
            fix="give the folder of a run, after its first step",
        )
    return rows


def lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file with their ends."""
    while line := file.readline(MAX_BYTES + 1):
        if len(line) > MAX_BYTES:
            raise damage(path, f"it has a line of more than {MAX_BYTES:,} bytes")
        yield line


def rows_of(
    path: Path, written: Iterable[bytes], keys: tuple[str, ...] = ("step",)
) -> Iterator[dict[str, Any]]:
    """Yield the rows of complete lines, as `read_rows` does."""
    for line in written:
        if not line.endswith(b"\n"):
            continue
        row = parse_row(line, keys)
        if isinstance(row, str):
            raise damage(path, f"it has a line that is not a row: {row}")
        yield row


def parse_row(line: bytes, keys: tuple[str, ...] = ("step",)) -> dict[str, Any] | str:
    """Return the row of a line, or why it is none."""
    try:
        row = mapping(json.loads(line))
        for key in keys:
            float(row[key])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return repr(error)
    if "step" in keys and type(row["step"]) is not int:
        return "its step is no integer"
    return row


def truncate_after(path: Path, last_step: int) -> None:
    """Delete the rows after a step; rows are in the order of their steps.

    A last line that was cut off by a crash is deleted too.
    """
    if not exists(path):
        return
    end = 0
    with path.open("rb+") as file:
        for line in lines(path, file):
            if not line.endswith(b"\n"):
                break
            step = _step_of(line)
            if isinstance(step, str):
                number = _line_number(path, end)
                raise DamagedDataError(
                    f"{path.name}, line {number}, is not a row of metrics.",
                    where=f"{path}:{number}",
                    why=step,
                    fix="Mend or delete that line by hand, or start again in another --run-dir.",
                )
            if step > last_step:
                break
            end += len(line)
        file.truncate(end)


def _step_of(line: bytes) -> int | str:
    """Return the step of a row, or why the line is no row.

    A row as a run writes it begins with its step, and the rest is not parsed: checkpoints have the
    hash of all rows before them.
    """
    if (match := _ROW.match(line)) and line.endswith(b"}\n"):
        return int(match[1])
    row = parse_row(line)
    return row if isinstance(row, str) else row["step"]


def _line_number(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return file.read(offset).count(b"\n") + 1


# --- hashes of rows ---


class RowHashes:
    """The sizes and hashes of files of rows as they grow. Nothing is read twice."""

    def __init__(self, run_dir: Path):
        self._files = {run_dir / name: hashlib.sha256() for name in (METRICS, SAMPLES)}
        self._sizes = dict.fromkeys(self._files, 0)

    def current(self) -> dict[str, dict[str, Any]]:
        """Return name -> size and SHA-256 of what each file holds now."""
        for path, digest in self._files.items():
            if path.exists():
                with path.open("rb") as file:
                    file.seek(self._sizes[path])
                    while block := file.read(2**20):
                        digest.update(block)
                        self._sizes[path] += len(block)
        return {
            path.name: {"size": self._sizes[path], "sha256": digest.hexdigest()}
            for path, digest in self._files.items()
        }


def changed_rows(run_dir: Path, recorded: dict[str, dict[str, Any]]) -> Iterator[tuple[Path, str]]:
    """Yield (file, what is wrong) for each file of rows that does not begin with what was recorded.

    Args:
        recorded: what `RowHashes.current` returned at a checkpoint.
    """
    for name, expected in recorded.items():
        path = run_dir / name
        remaining = expected["size"]
        if not path.is_file():
            if remaining:
                yield path, "it is missing"
            continue
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while remaining and (block := file.read(min(remaining, 2**20))):
                digest.update(block)
                remaining -= len(block)
        if remaining:
            yield path, f"it is {remaining:,} bytes shorter than at a checkpoint"
        elif digest.hexdigest() != expected["sha256"]:
            yield path, "rows before a checkpoint are not those that were written"


def cut_rows(run_dir: Path, recorded: dict[str, dict[str, Any]]) -> None:
    """Delete the rows after a checkpoint, which `require_rows` has found whole up to it."""
    for name, rows in recorded.items():
        if (run_dir / name).exists():
            os.truncate(run_dir / name, rows["size"])


def require_rows(run_dir: Path, recorded: dict[str, dict[str, Any]]) -> None:
    """Raise DamagedDataError unless the rows are those that a checkpoint recorded."""
    for path, why in changed_rows(run_dir, recorded):
        raise damage(path, why)


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the record of a checkpoint, in a folder or a file STEP.json; None if it has none.

    Raises DamagedDataError if it is not as it was written.
    """
    file = path if path.suffix == ".json" else path / "record" / "metadata"
    if not exists(file):
        return None
    values = read_json(file)
    record = values.get("record", values)
    others = {key: value for key, value in record.items() if key != CHECKSUM}
    if record.get(CHECKSUM) != checksum(record):
        raise damage(file, "its hash differs")
    return others


def newest_record(run_dir: Path) -> dict[str, Any] | None:
    """Return the record of the newest checkpoint that has an intact one."""
    folder = run_dir / CHECKPOINTS
    steps = {
        int(name): path
        for path in folder.glob("*")
        if (name := path.name.removesuffix(".json")).isdecimal()
    }
    for _, path in sorted(steps.items(), reverse=True):
        try:
            record = read_record(path)
        except DamagedDataError:
            continue
        if record is not None:
            return record
    return None


def require_recorded_rows(run_dir: Path, names: tuple[str, ...] = (METRICS, SAMPLES)) -> None:
    """Raise DamagedDataError unless the rows are those of the newest checkpoint.

    Raises it also if there are checkpoints and no metrics at all.
    """
    if has_checkpoints(run_dir) and not (run_dir / METRICS).is_file():
        raise damage(run_dir / METRICS, "it is missing beside checkpoints")
    record = newest_record(run_dir)
    recorded = ((record or {}).get("extra") or {}).get("run", {}).get("rows", {})
    require_rows(run_dir, {name: rows for name, rows in recorded.items() if name in names})
