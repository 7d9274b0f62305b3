"""A shell on a dict of files: tasks that need a look around before they can be done.

    bin etc tmp                     the directories
    move apple to tmp               the task, of one or two parts
    $ find apple                    the policy's turns
    etc/apple                       what the shell answers
    $ mv etc/apple tmp
    $ exit                          ends the episode

The reward is 1 if the files are then exactly those that the task asks for, else 0. The task does
not say where a file is. Commands: ls, cd, cat, echo WORD > FILE, cp, mv, rm, find NAME, grep WORD,
exit.

Tasks are drawn at random, and many make no sense: they remove a file twice, or move it to where it
is. A task is kept only if it asks for a change, and a solver that sees what the policy sees does it
through the shell (arXiv 2601.16443 filters terminal tasks in this way).

Demonstrations are those of a careless user, who mostly guesses where a file is, and sometimes
leaves before the last part is done. So a model that imitates them knows all commands, and fails
often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from tpu_rl import ranges
from tpu_rl.ranges import In, Share
from tpu_rl.tasks.made_rows import MadeRows, split_of, task

DIRECTORIES = ("bin", "doc", "etc", "lib", "src", "tmp", "usr", "var")
FILES = (
    *("apple", "basil", "cocoa", "dates", "fig", "grape", "honey", "jam"),
    *("kiwi", "lemon", "mango", "nuts", "olive", "peach", "rice", "sugar"),
)
WORDS = ("blue", "brown", "cyan", "gold", "gray", "green", "pink", "red")
"""Contents of files."""
OTHERS = (
    *("ls", "cd", "cat", "echo", "cp", "mv", "rm", "find", "grep", "exit"),
    *("move", "copy", "remove", "rename", "write", "to", "and", "the", "file", "with"),
    *("not", "found", "bad", "command"),
)
"""What else is written, besides the marks. The tokenizer of `builtin:mini_shell` has a token for
each word."""
MARKS = ("\n", " ", "$", "/", ">", ".")

PROMPT = "$ "
NOT_FOUND = "not found"
BAD_COMMAND = "bad command"
MAX_COMMANDS = 8
"""Commands, with `exit`, that a task may need."""

Files = dict[str, str]
"""Path, as in "etc/apple" -> content."""


class Shell:
    """Files in directories, and commands that read and change them."""

    def __init__(self, directories: Sequence[str], files: Mapping[str, str]):
        self.directories = ["", *directories]
        self.files = dict(files)
        self.here = ""
        self._commands = {
            ("ls", 0): lambda: self._list(self.here),
            ("ls", 1): self._list_at,
            ("cd", 1): self._change_directory,
            ("cat", 1): lambda path: self.files.get(self._path(path), NOT_FOUND),
            ("cp", 2): lambda old, new: self._transfer(old, new, keep=True),
            ("mv", 2): lambda old, new: self._transfer(old, new, keep=False),
            ("rm", 1): self._remove,
            ("find", 1): self._find,
            ("grep", 1): self._grep,
        }

    def run(self, line: str) -> str:
        """Run a command, and return what it prints."""
        name, *arguments = line.split() or [""]
        if name == "echo" and len(arguments) == 3 and arguments[1] == ">":
            return self._write(arguments[2], arguments[0])
        command = self._commands.get((name, len(arguments)))
        return BAD_COMMAND if command is None else command(*arguments)

    def _path(self, text: str) -> str:
        """Return the whole path of a path from here."""
        parts = self.here.split("/") if self.here and not text.startswith("/") else []
        for part in text.split("/"):
            if part == "..":
                parts = parts[:-1]
            elif part not in ("", "."):
                parts.append(part)
        return "/".join(parts)

    def _list(self, directory: str) -> str:
        prefix = f"{directory}/" if directory else ""
        names = [path for path in (*self.directories[1:], *self.files) if path.startswith(prefix)]
        return " ".join(sorted({path.removeprefix(prefix).split("/")[0] for path in names}))

    def _list_at(self, path: str) -> str:
        directory = self._path(path)
        return self._list(directory) if directory in self.directories else NOT_FOUND

    def _change_directory(self, path: str) -> str:
        directory = self._path(path)
        if directory not in self.directories:
            return NOT_FOUND
        self.here = directory
        return ""

    def _target(self, path: str, name: str) -> str | None:
        """Return where a file goes that is written to a path; None without such a directory."""
        target = self._path(path)
        if target in self.directories:
            return f"{target}/{name}".removeprefix("/")
        return target if target.rpartition("/")[0] in self.directories else None

    def _write(self, path: str, content: str) -> str:
        target = self._path(path)
        if target in self.directories or target.rpartition("/")[0] not in self.directories:
            return NOT_FOUND
        self.files[target] = content
        return ""

    def _transfer(self, old: str, new: str, keep: bool) -> str:
        source = self._path(old)
        target = self._target(new, source.rpartition("/")[2])
        if source not in self.files or target is None:
            return NOT_FOUND
        content = self.files[source] if keep else self.files.pop(source)
        self.files[target] = content
        return ""

    def _remove(self, path: str) -> str:
        return "" if self.files.pop(self._path(path), None) is not None else NOT_FOUND

    def _found(self, paths: Sequence[str]) -> str:
        return "\n".join(sorted(paths)) or NOT_FOUND

    def _find(self, name: str) -> str:
        return self._found([path for path in self.files if path.rpartition("/")[2] == name])

    def _grep(self, word: str) -> str:
        return self._found([path for path, content in self.files.items() if content == word])


class MiniShell:
    """The environment: a text game whose moves are commands."""

    def reset(self, directories: list[str], files: Files, goal: Files) -> None:
        """Begin with the files of a row."""
        self._shell = Shell(directories, files)
        self._goal = goal

    def __getstate__(self) -> dict[str, Any]:
        shell = self._shell
        return {
            "directories": shell.directories[1:],
            "files": shell.files,
            "here": shell.here,
            "goal": self._goal,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.reset(state["directories"], state["files"], state["goal"])
        self._shell.here = state["here"]

    def step(self, text: str) -> tuple[str, None, bool, dict[str, Any]]:
        """Run a command. `exit` ends the episode."""
        command = text.strip()
        if command == "exit":
            return "", None, True, {}
        return answer(self._shell, command), None, False, {}

    def get_reward(self) -> float:
        """Return 1 if the task is done, and nothing else was changed."""
        return float(self._shell.files == self._goal)


def answer(shell: Shell, command: str) -> str:
    """Return the text after a command: its output, and the prompt of the next one."""
    printed = shell.run(command)
    return f"{printed}\n{PROMPT}" if printed else PROMPT


# --- tasks ---


class Kind(NamedTuple):
    """The texts of a kind of part, with the names of its fields in braces."""

    asked: str
    """The words that ask for it."""
    look: str
    """The command that finds the file; "" if there is nothing to find."""
    act: str
    """The command that does it, with the file at `path`."""


KINDS = {
    "move": Kind("move {file} to {directory}", "find {file}", "mv {path} {directory}"),
    "copy": Kind("copy {file} to {directory}", "find {file}", "cp {path} {directory}"),
    "rename": Kind("rename {file} to {new}", "find {file}", "mv {path} {parent}/{new}"),
    "remove": Kind("remove {file}", "find {file}", "rm {path}"),
    "remove_with": Kind("remove the file with {word}", "grep {word}", "rm {path}"),
    "write": Kind("write {word} to {directory}/{new}", "", "echo {word} > {directory}/{new}"),
}


class Part(NamedTuple):
    """A part of a task."""

    kind: str
    """A key of `KINDS`."""
    file: str = ""
    directory: str = ""
    new: str = ""
    """The file's new name."""
    word: str = ""

    def written(self, text: str, path: str = "") -> str:
        """Return a text of `KINDS` for this part, with the file at this path."""
        return text.format(path=path, parent=path.rpartition("/")[0], **self._asdict())


def outcome(part: Part, files: Files) -> Files | None:
    """Return the files after a part is done; None if it has no meaning or more than one.

    This is what a task means. It shares nothing with the shell, which is tested against it.
    """
    if part.kind == "write":
        path = f"{part.directory}/{part.new}"
        return None if path in files else {**files, path: part.word}
    if part.kind == "remove_with":
        paths = [path for path, content in files.items() if content == part.word]
    else:
        paths = [path for path in files if path.endswith(f"/{part.file}")]
    if len(paths) != 1:
        return None
    (path,) = paths
    others = {other: content for other, content in files.items() if other != path}
    if part.kind in ("remove", "remove_with"):
        return others
    new = f"{path.partition('/')[0]}/{part.new}" if part.kind == "rename" else ""
    new = new or f"{part.directory}/{part.file}"
    if new in files:
        return None
    kept = files if part.kind == "copy" else others
    return {**kept, new: files[path]}


class Problem(NamedTuple):
    """A task with the files that it begins with."""

    directories: list[str]
    files: Files
    parts: list[Part]

    def prompt(self) -> str:
        """Return the text that the policy reads first."""
        asked = " and ".join(part.written(KINDS[part.kind].asked) for part in self.parts)
        return f"{' '.join(self.directories)}\n{asked}\n{PROMPT}"

    def goal(self) -> Files | None:
        """Return the files at the end; None if a part has no meaning."""
        files: Files | None = self.files
        for part in self.parts:
            files = None if files is None else outcome(part, files)
        return files


class Carefulness(NamedTuple):
    """How a user works."""

    looks: float = 1.0
    """The probability of looking where a file is, and not guessing."""
    forgets: float = 0.0
    """The probability of leaving before the last of several parts."""


def use(
    problem: Problem, carefulness: Carefulness, generator: np.random.Generator
) -> tuple[str, Files, int]:
    """Work on a task as a user does who sees no more than the policy.

    Returns (the transcript after the prompt, the files at the end, the number of commands).
    """
    shell = Shell(problem.directories, problem.files)
    parts = problem.parts
    if len(parts) > 1 and generator.random() < carefulness.forgets:
        parts = parts[:-1]
    transcript = ""
    count = 1

    def type_in(command: str) -> str:
        nonlocal transcript, count
        count += 1
        printed = answer(shell, command)
        transcript += f"{command}\n{printed}"
        return printed.removesuffix(PROMPT).strip()

    for part in parts:
        kind = KINDS[part.kind]
        look = part.written(kind.look)
        guess = generator.integers(len(problem.directories))
        path = f"{problem.directories[guess]}/{part.file}"
        if look and (part.kind == "remove_with" or generator.random() < carefulness.looks):
            path = type_in(look).split("\n")[0]
            if path == NOT_FOUND:
                continue
        type_in(part.written(kind.act, path))
    return f"{transcript}exit\n", shell.files, count


def is_solvable(problem: Problem) -> bool:
    """Return True if the task asks for a change that a careful user makes in time."""
    goal = problem.goal()
    if goal is None or goal == problem.files:
        return False
    _, files, count = use(problem, Carefulness(), np.random.default_rng(0))
    return files == goal and count <= MAX_COMMANDS


def draw(config: MiniShellData, generator: np.random.Generator) -> Problem:
    """Return a random task, which may make no sense."""

    def choose(names: tuple[str, ...], count: int) -> list[str]:
        return [names[int(index)] for index in generator.permutation(len(names))[:count]]

    directories = sorted(choose(DIRECTORIES, config.directories))
    names = choose(FILES, config.files)
    files = {}
    for name in names:
        directory = directories[generator.integers(len(directories))]
        files[f"{directory}/{name}"] = WORDS[generator.integers(len(WORDS))]
    kinds = [*KINDS]
    parts = [
        Part(
            kind=kinds[generator.integers(len(kinds))],
            file=names[generator.integers(len(names))],
            directory=directories[generator.integers(len(directories))],
            new=FILES[generator.integers(len(FILES))],
            word=WORDS[generator.integers(len(WORDS))],
        )
        for _ in range(generator.integers(1, config.max_parts + 1))
    ]
    return Problem(directories, files, parts)


# --- rows ---


@dataclass(frozen=True)
class MiniShellData(ranges.Checked):
    """Tasks for a shell; training and evaluation never share one."""

    FLAG = "--data"
    directories: Annotated[int, In(f"[2, {len(DIRECTORIES)}]")] = 3
    files: Annotated[int, In(f"[1, {len(FILES) // 2}]")] = 4
    max_parts: Annotated[int, In("[1, 3]")] = 2
    """A task has 1 to so many parts."""
    looks: Share = 0.25
    """Demonstrations: the probability of looking where a file is, and not guessing."""
    forgets: Share = 0.3
    """Demonstrations: the probability of leaving before the last of several parts."""


@dataclass(frozen=True)
class MiniShellSource(MadeRows):
    """Endless tasks with the columns `prompt`, `directories`, `files`, `goal` and `completion`.

    `completion` is the transcript of the careless user.
    """

    config: MiniShellData = MiniShellData()
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    STREAM = (13,)

    def row(self, index: int) -> dict[str, Any]:
        generator = self.generator(index)
        while True:
            problem = draw(self.config, generator)
            text = f"{problem.prompt()}{sorted(problem.files.items())}"
            if split_of(text) == self.split and is_solvable(problem):
                break
        carefulness = Carefulness(self.config.looks, self.config.forgets)
        return {
            "prompt": problem.prompt(),
            "directories": problem.directories,
            "files": problem.files,
            "goal": problem.goal(),
            "completion": use(problem, carefulness, generator)[0],
        }


TASK = task(MiniShellData, MiniShellSource)

ENVIRONMENTS = {"mini_shell": MiniShell}
