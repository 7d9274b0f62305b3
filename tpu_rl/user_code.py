"""Functions and classes of Python files of the user, named FILE.py:NAME.

This imports the standard library only, because every worker process starts with it.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpu_rl.errors import InputError, did_you_mean, missing_file

FIX_FILE = "repair it until `python FILE` runs without an error"
PYTHON = "python:"
"""The beginning of the name of something that a Python program passed."""


class Passed:
    """Objects that a Python program passed, by the names that flags have for them: PYTHON + NAME.

    `kind` is the name of one in messages, and `fix` how to pass one again.
    """

    def __init__(self, kind: str, fix: str):
        self.by_name: dict[str, Any] = {}
        self._kind = kind
        self._fix = fix

    @contextmanager
    def for_run(self, objects: Mapping[str, Any]) -> Iterator[None]:
        """Let `find` find objects, too, in this context."""
        before = dict(self.by_name)
        self.by_name.update(objects)
        try:
            yield
        finally:
            self.by_name.clear()
            self.by_name.update(before)

    def find(self, path: str) -> Any:
        """Return the object with a name. Raises InputError if this process has none."""
        name = path.removeprefix(PYTHON)
        if name not in self.by_name:
            raise InputError(
                f"the {self._kind} {name} came from Python; pass it again",
                where=path,
                why="it is not kept in the run folder, and nobody passed it in this process",
                fix=self._fix,
            )
        return self.by_name[name]


def load_function(path: str, kind: str) -> Callable[..., Any]:
    """Return the function that "file.py:function" names. The file is run.

    Args:
        path: a path, absolute or from the working folder, a colon, and the name of a function.
        kind: the thing that the function is, for messages: "reward" or "algorithm".

    Raises:
        InputError: if there is no such file, it does not load, or it has no such function.
    """
    file_name, _, name = path.rpartition(":")
    members = load_members(file_name, kind, f"as in --{kind} my_{kind}.py:{name or 'function'}")
    if not callable(members.get(name)):
        functions = [
            key
            for key, value in members.items()
            if inspect.isfunction(value) and value.__module__ == members["__name__"]
        ]
        raise InputError(
            f"no function {name!r} in the {kind} file",
            where=f"{file_name} defines {', '.join(functions) or 'no function'}",
            fix=did_you_mean(name, functions),
        )
    if kind == "reward" and inspect.isclass(members[name]):
        raise InputError(
            f"{name!r} in the reward file is a class",
            where=file_name,
            why="calling it makes an object, and no rewards",
            fix=f"name an object of it: score = {name}()",
        )
    return members[name]


def load_members(file_name: str, kind: str, example: str = "") -> dict[str, Any]:
    """Return everything that a Python file defines, by name. The file is run.

    It can import the files of its folder, as with `python FILE`; installed modules go first.

    Args:
        file_name: a path, absolute or from the working folder.
        kind: the thing that the file defines, for messages.
        example: a hint for a file that is not Python source.

    Raises:
        InputError: if there is no such file, or it does not load.
    """
    file = Path(file_name).expanduser().absolute()
    require_file(file, kind, file_name)
    # Two files may have the same name.
    module_name = f"{kind}_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise InputError(
            f"the {kind} file is not Python source, whose name ends in .py",
            where=file_name,
            fix=example,
        )
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up here.
    sys.modules[module_name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    # The user's program may raise anything.
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        raise InputError(
            f"the {kind} file does not load",
            where=user_line(error, file),
            why=f"{type(error).__name__}: {error}",
            fix=FIX_FILE,
        ) from None
    return vars(module)


def require_file(file: Path, kind: str, given: str) -> None:
    """Raise InputError if there is no such file. `given` is what the user wrote."""
    if not file.is_file():
        raise missing_file(f"no such {kind} file", file, where=given)


def name_of(value: Any) -> str:
    """Return the name of a function or a class, or that of a value's class."""
    return getattr(value, "__name__", type(value).__name__)


def user_line(error: BaseException, file: Path) -> str:
    """Return the last line of the user's file in the error's traceback, as "file:line"."""
    # A syntax error has no frame in the file.
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"{file}:{error.lineno}"
    frame = user_frame(error, file)
    return f"{file}:{frame.lineno}" if frame else str(file)


def user_frame(error: BaseException, file: Path) -> traceback.FrameSummary | None:
    """Return the last frame of the user's file in the error's traceback; None without one."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if frame.filename == str(file)), None)
