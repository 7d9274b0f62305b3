"""Damage the files of a run folder one by one: does every command say so, or give the same bits?

    python bench/damage_run.py --to runs/damage [--cases 240] [--seed 0] [--part 0/1]

Makes two small GRPO runs in `--to`, of which the second has another seed. Each case damages one
file of a copy of the first run in a way of `KINDS`, and then reads it with `launch/verify.py`,
`python_run.read_run`, `launch/report.py`, one time in four `launch/export.py`, and at last resumes.
Each command must exit with 4 or give what it gives for the undamaged run: the same rows, page,
model, parameter digest. A damaged model must be named by verify.py. All commands run in this
process. Prints what is wrong of each case that is, and the counts.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tpu_rl.checkpoint import manifests
from tpu_rl.commands import python_run, run
from tpu_rl.commands.tools import export, report, verify
from tpu_rl.errors import DamagedDataError, TpuRlError

FLAGS = shlex.split("""
arithmetic_grpo --batch.prompts 4 --batch.group-size 4 --batch.row-length 128
--evaluation.rows 8 --evaluation.interval 2 --checkpoint.interval 1 --steps 3
""")
BLOCK = 512
GIANT_BYTES = 80 * 2**20
"""More than a line of a run folder may have."""
DAMAGED = DamagedDataError.code


class Target(NamedTuple):
    """The file to damage."""

    path: Path
    same_of_other: Path
    """The file of that name in the other run."""
    elsewhere: Path
    """Another file of the same run."""
    rng: random.Random


# --- ways to damage a file ---


def _edit(
    change: Callable[[bytearray, random.Random], bytes | bytearray],
) -> Callable[[Target], None]:
    def damage(target: Target) -> None:
        content = bytearray(target.path.read_bytes())
        target.path.write_bytes(change(content, target.rng))

    return damage


def _flip(content: bytearray, rng: random.Random, bits: int = 1) -> bytes | bytearray:
    for _ in range(bits):
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
    return content


def _block(content: bytearray, rng: random.Random) -> slice:
    size = min(BLOCK, max(1, len(content) // 3))
    start = rng.randrange(len(content) - size + 1)
    return slice(start, start + size)


def _replace_block(
    content: bytearray, rng: random.Random, block: bytes | None
) -> bytes | bytearray:
    place = _block(content, rng)
    size = place.stop - place.start
    content[place] = rng.randbytes(size) if block is None else (block * size)[: size * bool(block)]
    return content


def _swap(content: bytearray, rng: random.Random) -> bytes | bytearray:
    half = len(content) // 2
    return content[half:] + content[:half]


def _repeat_block(content: bytearray, rng: random.Random) -> bytes | bytearray:
    place = _block(content, rng)
    return content[: place.stop] + content[place] + content[place.stop :]


def _drop_line(content: bytearray, rng: random.Random) -> bytes | bytearray:
    lines = content.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def _repeat_line(content: bytearray, rng: random.Random) -> bytes | bytearray:
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return b"".join([*lines[: at + 1], *lines[at:]])


def _change_digit(content: bytearray, rng: random.Random) -> bytes | bytearray:
    places = [place for place, byte in enumerate(content[:100_000]) if chr(byte) in "123456789"]
    if not places:
        return _flip(content, rng)
    place = rng.choice(places)
    content[place] = ord("1") + (content[place] - ord("1") + 1) % 9
    return content


def _link_to_itself(target: Target) -> None:
    target.path.unlink()
    target.path.symlink_to(target.path.name)


def _broken_link(target: Target) -> None:
    target.path.unlink()
    target.path.symlink_to("nothing")


def _folder(target: Target) -> None:
    target.path.unlink()
    target.path.mkdir()


def _giant_line(target: Target) -> None:
    with target.path.open("r+b") as file:
        file.truncate(GIANT_BYTES)


def _of_other_run(target: Target) -> None:
    shutil.copy(target.same_of_other, target.path)


def _of_other_file(target: Target) -> None:
    shutil.copy(target.elsewhere, target.path)


KINDS: dict[str, Callable[[Target], None]] = {
    "a flipped bit": _edit(_flip),
    "eight flipped bits": _edit(lambda content, rng: _flip(content, rng, 8)),
    "a changed digit": _edit(_change_digit),
    "deleted": lambda target: target.path.unlink(),
    "emptied": _edit(lambda content, rng: b""),
    "cut in half": _edit(lambda content, rng: content[: len(content) // 2]),
    "the last byte cut": _edit(lambda content, rng: content[:-1]),
    "the first byte cut": _edit(lambda content, rng: content[1:]),
    "a block of zeros": _edit(lambda content, rng: _replace_block(content, rng, b"\0")),
    "a block of noise": _edit(lambda content, rng: _replace_block(content, rng, None)),
    "a block removed": _edit(lambda content, rng: _replace_block(content, rng, b"")),
    "a block repeated": _edit(_repeat_block),
    "halves swapped": _edit(_swap),
    "a line removed": _edit(_drop_line),
    "a line repeated": _edit(_repeat_line),
    "noise appended": _edit(lambda content, rng: content + rng.randbytes(64)),
    "appended to itself": _edit(lambda content, rng: content + content),
    "all noise": _edit(lambda content, rng: rng.randbytes(len(content))),
    "compressed": _edit(lambda content, rng: gzip.compress(content)),
    "a giant line": _giant_line,
    "of another run": _of_other_run,
    "another file of the run": _of_other_file,
    "a link to itself": _link_to_itself,
    "a broken link": _broken_link,
    "a folder": _folder,
}


# --- commands ---


def quiet(command: Callable[[], Any]) -> tuple[Any, str]:
    """Return (what a command returns or the code of its error, its trace if it has one)."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            result = command()
    except TpuRlError as error:
        return error.code, ""
    except BaseException:
        return None, traceback.format_exc()
    text = errors.getvalue()
    return result, text if "Traceback (most recent call last)" in text else ""


def results(run_dir: Path) -> dict[str, Any]:
    """Return the parts of a finished run that are compared."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timings = ("time", "perf/")
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "rows": [
            {name: value for name, value in row.items() if not name.startswith(timings)}
            for row in rows
        ],
        "samples": (run_dir / "samples.jsonl").read_text(),
        "digest": summary["params_digest"],
        "model": files_of(run_dir / "model"),
    }


def files_of(folder: Path) -> dict[str, Any]:
    """Return the hashes of a model's files but its card, which has dates."""
    files = manifests.describe_files(folder, [folder])
    return {name: seen for name, seen in files.items() if name != "README.md"}


def read_back(run_dir: Path) -> tuple[Any, ...]:
    """Call `python_run.read_run` and return its result without the folder."""
    found = python_run.read_run(str(run_dir))
    return found.metrics, found.summary


def page(run_dir: Path) -> int | str:
    """Return the page that launch/report.py writes, or its exit code."""
    code = report.main([str(run_dir)])
    return code or (run_dir / "report.html").read_text()


def exported(run_dir: Path) -> Any:
    """Return the files that launch/export.py writes, or its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        code = export.main([str(run_dir), "--to", f"{folder}/model"])
        return code or files_of(Path(folder) / "model")


def resumed(run_dir: Path) -> Any:
    """Return the results of the run after the same command, or its exit code.

    The command goes on from the last checkpoint, as if the run had ended before its report.
    """
    page = run_dir / "report.html"
    if page.is_file():
        page.unlink()
    code = run.main([*FLAGS, "--run-dir", str(run_dir)])
    return code or results(run_dir)


class Case(NamedTuple):
    """A case and what came of it."""

    name: str
    faults: list[str]
    """What is wrong."""
    outcome: str


def try_case(number: int, kind: str, name: str, whole: Path, other: Path, seed: int) -> Case:
    """Damage a file of a copy of the run, and read the copy with every command."""
    label = f"{number}: {name}, {kind}"
    rng = random.Random(f"{seed} {number}")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / whole.name
        shutil.copytree(whole, run_dir)
        names = [str(path.relative_to(whole)) for path in files(whole) if path.stat().st_size]
        elsewhere = rng.choice([other_name for other_name in names if other_name != name])
        is_model = name.startswith("model/")
        same_of_other = other / name
        if not same_of_other.exists():  # Orbax names some files at random.
            same_of_other = whole / elsewhere
        KINDS[kind](Target(run_dir / name, same_of_other, whole / elsewhere, rng))
        commands: dict[str, Callable[[Path], Any]] = {"read_run": read_back, "report": page}
        if number % 4 == 0:
            commands["export"] = exported
        if not is_model:
            commands["resume"] = resumed
        faults: list[str] = []
        verified, trace = quiet(lambda: verify.main([str(run_dir)]))
        if trace or verified not in (0, DAMAGED):
            faults.append(f"verify: {trace or verified}")
        if is_model and verified != DAMAGED and not same(run_dir / name, whole / name):
            faults.append("verify does not name it")
        refused = verified == DAMAGED
        for command_name, command in commands.items():
            found, trace = quiet(lambda command=command: command(run_dir))
            if trace:
                faults.append(f"{command_name}: {trace}")
            elif found == DAMAGED:
                refused = True
            elif isinstance(found, int):
                faults.append(f"{command_name}: exit code {found}")
            elif found != expected(command_name, command, whole):
                faults.append(f"{command_name}: other bits")
    return Case(label, faults, "exit code 4" if refused else "the same bits")


_EXPECTED: dict[str, Any] = {}


def expected(name: str, command: Callable[[Path], Any], whole: Path) -> Any:
    """Return the result of a command on the undamaged run."""
    if name not in _EXPECTED:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / whole.name
            shutil.copytree(whole, copy)
            _EXPECTED[name] = quiet(lambda: command(copy))[0]
    return _EXPECTED[name]


def same(path: Path, original: Path) -> bool:
    """Return True if a file has its original content."""
    return path.is_file() and path.read_bytes() == original.read_bytes()


def files(run_dir: Path) -> list[Path]:
    """Return the files of a run folder."""
    return [path for path in sorted(run_dir.rglob("*")) if path.is_file()]


def choose(whole: Path, cases: int, seed: int) -> list[tuple[str, str]]:
    """Return (kind, name of a file) of each case: kinds in turn, half the files from the root."""
    rng = random.Random(seed)
    names = [str(path.relative_to(whole)) for path in files(whole) if path.stat().st_size]
    root = [name for name in names if "/" not in name]
    kinds = list(KINDS)
    return [
        (kinds[number % len(kinds)], rng.choice(root if rng.random() < 0.5 else names))
        for number in range(cases)
    ]


def make_run(run_dir: Path, seed: int) -> None:
    """Make a run unless it is there."""
    command = [*FLAGS, "--run-dir", str(run_dir), "--seed", str(seed)]
    if run.main(command):
        raise SystemExit(f"the run in {run_dir} failed")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="the folder of the two runs")
    parser.add_argument("--cases", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="I/N: every Nth case, from the Ith")
    flags = parser.parse_args()
    whole = flags.to / "whole" / "run"
    other = flags.to / "other" / "run"
    make_run(whole, 0)
    make_run(other, 1)
    first, parts = map(int, flags.part.split("/"))
    outcomes: Counter[str] = Counter()
    kinds: set[str] = set()
    num_wrong = 0
    chosen = list(enumerate(choose(whole, flags.cases, flags.seed)))[first::parts]
    for count, (number, (kind, name)) in enumerate(chosen, start=1):
        case = try_case(number, kind, name, whole, other, flags.seed)
        kinds.add(kind)
        for fault in case.faults:
            print(f"WRONG  {case.name}: {fault}", flush=True)
        num_wrong += bool(case.faults)
        outcomes["wrong" if case.faults else case.outcome] += 1
        if count % 20 == 0:
            # Each compiled program keeps memory maps, of which a process may have 65,530.
            jax.clear_caches()
            print(f"{count} of {len(chosen)}: {dict(outcomes)}", flush=True)
    print(f"{len(chosen)} cases of {len(kinds)} kinds: {dict(outcomes)}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
