"""The errors that a user sees: what went wrong, where, why, and how to fix it.

The commands print them as one short text and exit with their code. Any other exception
that reaches the user is a bug and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from tpu_rl.redaction import redact

_CONTROLS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[P-_X^][^\x1b\n]*\x1b\\|[ -~])"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
"""Terminal escape sequences, and characters that move the cursor or reverse text."""


def printable(text: str) -> str:
    """Return a text of a user's program without what a terminal would obey."""
    return _CONTROLS.sub("", text)


def typed_command(name: str) -> str:
    """Return a command as the user of this process types it.

    That is `tpu-rl NAME` in a process which began so, or without a checkout, else
    `python launch/NAME.py`.
    """
    has_scripts = (Path(__file__).parents[1] / "launch" / f"{name}.py").is_file()
    is_program = Path(sys.argv[0]).name == "tpu-rl"
    return f"python launch/{name}.py" if has_scripts and not is_program else f"tpu-rl {name}"


class TpuRlError(Exception):
    """An error with a remedy.

    Use one of the subclasses, which carry the exit code of the process.

    Args:
      what: what went wrong, without the remedy.
      where: the flag, file, line or step.
      why: the cause, for example the message of another library.
      fix: what the user can do about it.
    """

    code = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = ""):
        # Errors are printed and stored. Messages of other libraries may contain a token, and those
        # of a user's functions what a model wrote.
        self.what = redact(printable(what))
        self.where = redact(printable(where))
        self.why = redact(printable(why))
        self.fix = redact(printable(fix))
        lines = [self.what]
        for name, text in (("where", self.where), ("why", self.why), ("fix", self.fix)):
            if text:
                lines.append(f"  {name}: {text}")
        super().__init__("\n".join(lines))

    def within(self, place: str) -> Self:
        """Return the same error, whose place begins with a wider one."""
        where = f"{place}; {self.where}" if self.where else place
        return type(self)(self.what, where=where, why=self.why, fix=self.fix)

    def with_text(self, old: str, new: str) -> Self:
        """Return the same error with one text in place of another."""
        texts = (self.what, self.where, self.why, self.fix)
        what, where, why, fix = (text.replace(old, new) for text in texts)
        return type(self)(what, where=where, why=why, fix=fix)


class InputError(TpuRlError):
    """The user's flags, files, data or reward function are at fault (exit code 2)."""

    code = 2


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a hint with the known name most like `name`; `otherwise` if none is like it."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {nearest[0]}?" if nearest else otherwise


def unknown_name(what: str, name: str, known: Iterable[str], where: str = "") -> InputError:
    """Return the error of a name that is none of the known ones."""
    names = list(known)
    hint = did_you_mean(name, names)
    fix = f"{hint} All: {', '.join(names) or 'none'}".lstrip()
    return InputError(f"unknown {what} {name!r}", where=where, fix=fix)


def missing_file(what: str, file: Path, where: str = "", otherwise: str = "") -> InputError:
    """Return the error of a file that is not there, with the one of its folder most like it."""
    folder = file.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    nearest = difflib.get_close_matches(file.name, names, n=1)
    fix = f"did you mean {folder / nearest[0]}?" if nearest else otherwise
    return InputError(what, where=where or str(file), fix=fix)


def reported(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Let a command print its error as one message, and return its exit code."""

    @functools.wraps(main)
    def command(argv: list[str]) -> int:
        try:
            return main(argv)
        except TpuRlError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.code

    return command


@contextlib.contextmanager
def refused(
    kinds: type[Exception] | tuple[type[Exception], ...],
    what: str,
    where: str = "",
    fix: str = "",
    kind: type[TpuRlError] = InputError,
) -> Iterator[None]:
    """Raise one `kind` of error for errors of other libraries, whose messages are its `why`."""
    try:
        yield
    except kinds as error:
        # The message of a KeyError is no more than the key.
        text = repr(error) if isinstance(error, LookupError) else str(error)
        if isinstance(error, OSError) and str(error.filename) in where:
            text = error.strerror or text
        why = (text.splitlines() or [type(error).__name__])[0][:300]
        raise kind(what, where=where, why=why, fix=fix) from error


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Give the place to an InputError that names none."""
    try:
        yield
    except InputError as error:
        if error.where:
            raise
        raise error.within(where) from error


class MachineError(TpuRlError):
    """The machine lacks something: a device, a package, disk space, a permission (exit code 3)."""

    code = 3


class DamagedDataError(TpuRlError):
    """Data that this program wrote have been damaged since (exit code 4)."""

    code = 4
