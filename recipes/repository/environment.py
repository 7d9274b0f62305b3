"""A small repository as an environment: its files are listed, read and edited, and its tests run.

`--environment recipes/repository/environment.py:Repository` gives a chat model four tools. `Shell`
is the same repository as a text game of short commands, for models without a chat template. A row
has the columns

    files          {path: text} of Python files, packages included
    tests          asserts that the model may run, each a text
    hidden_tests   asserts of which all must hold in the end; without it --reward judges

Both kinds of asserts call what the files define at their top level, and run in the sandbox. The
hidden ones are in a process apart from the program (`tpu_rl.sandbox.unit_tests`).
"""

from __future__ import annotations

import functools
import re
from typing import Any

from tpu_rl import sandbox
from tpu_rl.environments.contract import PlainState
from tpu_rl.sandbox import SandboxLimits, unit_tests

LIMITS = SandboxLimits(seconds=10.0)
NO_FILE = "no such file"
PASS = "all tests pass"
PROGRAM = """
import importlib.util, sys

FILES = {files!r}

class Finder:
    def find_spec(self, name, path=None, target=None):
        file = name.replace(".", "/")
        if f"{{file}}/__init__.py" in FILES:
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return importlib.util.spec_from_loader(name, self) if f"{{file}}.py" in FILES else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        is_package = module.__spec__.submodule_search_locations is not None
        file = module.__name__.replace(".", "/") + ("/__init__.py" if is_package else ".py")
        exec(compile(FILES[file], file, "exec"), module.__dict__)

sys.meta_path.insert(0, Finder())
{imports}
"""
RUN = """
for test in {tests!r}:
    try:
        exec(test)
    except AssertionError:
        print(test.removeprefix("assert "))
        break
    except Exception as error:
        print(test.removeprefix("assert "), type(error).__name__, error)
        break
else:
    print({passed!r})
"""


class Repository(PlainState):
    """The repository of an episode, with tools. The hidden tests judge it in the end."""

    def __init__(self):
        sandbox.require()

    def reset(
        self,
        files: dict[str, str],
        tests: list[str] | None = None,
        hidden_tests: list[str] | None = None,
    ) -> None:
        """Begin with the files of a row."""
        self.files = dict(files)
        self.tests = tests or []
        self._hidden_tests = hidden_tests

    def list_files(self) -> str:
        """List the files of the repository."""
        return "\n".join(sorted(self.files))

    def read_file(self, path: str) -> str:
        """Read a file, with the numbers of its lines.

        Args:
            path: The path, as `list_files` has it.
        """
        lines = self.files[path].splitlines() if path in self.files else [NO_FILE]
        return "\n".join(f"{number} {line}" for number, line in enumerate(lines, 1))

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text in a file.

        Args:
            path: The path, as `list_files` has it.
            old: The text to replace, which must be in the file once.
            new: The text in its place.
        """
        if path not in self.files:
            return NO_FILE
        count = self.files[path].count(old) if old else 0
        if count != 1:
            return f"the old text is in the file {count} times"
        self.files[path] = self.files[path].replace(old, new)
        return "done"

    def run_tests(self) -> str:
        """Run the tests of the repository. The first that fails is shown."""
        return _failing(tuple(sorted(self.files.items())), tuple(self.tests))

    def get_reward(self) -> float | None:
        """Return 1 if all hidden tests hold, else 0; None without any."""
        if self._hidden_tests is None:
            return None
        return _verdict(tuple(sorted(self.files.items())), tuple(self._hidden_tests))


class Shell(Repository):
    """The same as a text game: ls, read NAME, test, edit NAME LINE TEXT, done. Names lack ".py"."""

    text_game = True

    def step(self, text: str) -> tuple[str, None, bool, dict[str, Any]]:
        """Do a command. `done` ends the episode."""
        word, *rest = text.strip().split(" ", 3)
        path = f"{rest[0]}.py" if rest else ""
        if word == "done":
            return "", None, True, {}
        if word == "edit" and len(rest) == 3:
            return f"{self._edit_line(path, rest[1], rest[2])}\n$ ", None, False, {}
        if word == "read" and len(rest) == 1:
            printed = self.read_file(path)
        else:
            known = {"ls": self.list_files, "test": self.run_tests}
            printed = known[word]() if word in known and not rest else "bad command"
        return f"{printed}\n$ ", None, False, {}

    def _edit_line(self, path: str, number: str, text: str) -> str:
        """Replace the text of a line, which keeps its indent."""
        lines = self.files.get(path, "").splitlines()
        if not (re.fullmatch("[0-9]{1,4}", number) and 1 <= int(number) <= len(lines)):
            return "no such line"
        old = lines[int(number) - 1]
        lines[int(number) - 1] = old[: len(old) - len(old.lstrip())] + text
        self.files[path] = "\n".join(lines) + "\n"
        return "ok"


def program_of(files: tuple[tuple[str, str], ...]) -> str:
    """Return one program with all files as modules, and the names of their top level."""
    modules = [path.removesuffix(".py").removesuffix("/__init__") for path, _ in files]
    imports = (f"from {module.replace('/', '.')} import *" for module in modules)
    return PROGRAM.format(files=dict(files), imports="\n".join(imports))


# Episodes of a group often end with the same files.
@functools.lru_cache(maxsize=4096)
def _failing(files: tuple[tuple[str, str], ...], tests: tuple[str, ...]) -> str:
    program = program_of(files) + RUN.format(tests=tests, passed=PASS)
    outcome = sandbox.run(program, limits=LIMITS)
    # The last line of a traceback says what is wrong.
    last = outcome.errors.strip().rpartition("\n")[2]
    return outcome.printed.strip() if not outcome.ended else last or outcome.ended


@functools.lru_cache(maxsize=4096)
def _verdict(files: tuple[tuple[str, str], ...], tests: tuple[str, ...]) -> float:
    return float(unit_tests.passes(program_of(files), "\n".join(tests), LIMITS))
