"""Write the four subtasks of resolving an issue from the history of a git repository:

    python recipes/issue_subtasks/make_rows.py --repository DIR --to DIR

They are those of SoRFT (arXiv 2502.20127). An issue is a commit that changes a few lines of a few
Python files, and its message is the description. A row of the kind

    files      lists files of the repository, and asks which of them change
    functions  lists the functions of those files, and asks which of them change
    lines      shows these functions with numbered lines, and asks which lines change
    edit       shows them, and asks for a unified diff, if nothing else changes

The newest tenth of the issues is held out. Training rows are in train.jsonl, the others in
held_out.jsonl. Only git reads the repository; nothing of it is run.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MAX_FILES = 3
"""Changed files of an issue."""
MAX_LINES = 40
"""Changed lines of an issue."""
MAX_SHOWN = 30
"""Files among which the changed ones are looked for."""
MAX_CHARACTERS = 6000
"""Of the functions that change: longer ones make no rows of lines and edits."""
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


class Function(NamedTuple):
    """A function or a method of a file."""

    name: str
    """With its class, as in `Stack.push`."""
    first: int
    last: int
    """Line numbers, from 1."""


class Change(NamedTuple):
    """What an issue changes in one file."""

    path: str
    source: str
    """The file before."""
    lines: list[int]
    """Numbers of the lines that go, or behind which lines come."""


class Git:
    """Reads a repository."""

    def __init__(self, repository: Path):
        self._repository = repository

    def __call__(self, *arguments: str) -> str:
        """Return what `git ARGUMENTS` prints. Raises SystemExit with its message if it fails."""
        command = ["git", "-C", str(self._repository), *arguments]
        result = subprocess.run(command, capture_output=True, check=False)
        if result.returncode:
            message = result.stderr.decode(errors="replace").strip()
            sys.exit(f"error: git {arguments[0]} failed in {self._repository}\n  why: {message}")
        return result.stdout.decode("utf-8", errors="replace")

    def changes(self, commit: str) -> list[Change]:
        """Return what a commit changes, in Python files that are there before and after it."""
        diff = ("diff", "--no-color", "--no-ext-diff", "--no-renames", "--diff-filter=M")
        names = self(*diff, "--name-only", "-z", f"{commit}^", commit, "--", "*.py")
        changes = []
        for path in names.split("\0")[:-1]:
            patch = self(*diff, "--unified=0", f"{commit}^", commit, "--", path)
            lines: list[int] = []
            for first, count in HUNK.findall(patch):
                lines += range(int(first), int(first) + max(1, int(count or 1)))
            changes.append(Change(path, self("show", f"{commit}^:{path}"), lines))
        return changes


def functions_of(source: str) -> list[Function]:
    """Return the functions of a file and the methods of its classes; none if it is no Python 3."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    found = []
    bodies: list[tuple[str, list[ast.stmt]]] = [("", tree.body)]
    for prefix, body in bodies:
        for node in body:
            if isinstance(node, ast.ClassDef):
                bodies.append((f"{prefix}{node.name}.", node.body))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + node.name
                found.append(Function(name, node.lineno, node.end_lineno or node.lineno))
    return sorted(found, key=lambda function: function.first)


def rows_of(git: Git, commit: str, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the rows of one issue; none if the commit changes too much or no Python file."""
    description = git("log", "-1", "--format=%B", commit).strip()
    changes = git.changes(commit)
    num_lines = sum(len(change.lines) for change in changes)
    if not description or not 1 <= len(changes) <= MAX_FILES or num_lines > MAX_LINES:
        return
    paths = [change.path for change in changes]

    def row(kind: str, shown: str, task: str, **columns: Any) -> dict[str, Any]:
        text = f"An issue of a repository:\n\n{description}\n\n{shown}\n\n{task}"
        return {"prompt": [{"role": "user", "content": text}], "kind": kind} | columns

    listed = [path for path in git("ls-tree", "-rz", "--name-only", f"{commit}^").split("\0")]
    others = [path for path in listed if path.endswith(".py") and path not in paths]
    files = sorted(paths + rng.sample(others, min(len(others), MAX_SHOWN - len(paths))))
    form = "Answer with one item a line and nothing else."
    if len(files) > len(paths):
        shown = "Files:\n" + "\n".join(files)
        yield row("files", shown, f"Which of these files must change? {form}", answer=paths)

    # A function is named FILE:NAME. It changes if one of its lines does.
    all_names: list[str] = []
    changed: list[tuple[Change, Function]] = []
    for change in changes:
        for function in functions_of(change.source):
            all_names.append(f"{change.path}:{function.name}")
            if any(function.first <= line <= function.last for line in change.lines):
                changed.append((change, function))
    if not changed:
        return
    names = [f"{change.path}:{function.name}" for change, function in changed]
    shown = "Functions:\n" + "\n".join(all_names)
    yield row("functions", shown, f"Which of these functions must change? {form}", answer=names)

    numbered = []
    for change, function in changed:
        body = change.source.splitlines()[function.first - 1 : function.last]
        lines = [f"{function.first + i} {line}" for i, line in enumerate(body)]
        numbered.append("\n".join([f"{change.path}:", *lines]))
    shown = "\n\n".join(numbered)
    if len(shown) > MAX_CHARACTERS:
        return
    answer = [
        f"{change.path}:{line}"
        for change, function in changed
        for line in change.lines
        if function.first <= line <= function.last
    ]
    form = "Answer with FILE:NUMBER, one a line, and nothing else."
    yield row("lines", shown, f"Which of these lines must change? {form}", answer=answer)
    if len(set(answer)) < num_lines:
        return  # Other lines change, too, which the prompt does not show.
    patch = git("diff", "--no-color", "--no-ext-diff", f"{commit}^", commit, "--", *paths)
    yield row("edit", shown, "Write the change as a unified diff, in a fenced block.", patch=patch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repository", type=Path, required=True, help="with its history")
    parser.add_argument("--to", type=Path, required=True, help="the directory to write")
    parser.add_argument("--commits", type=int, default=1000, help="the newest ones that are read")
    flags = parser.parse_args()
    git = Git(flags.repository)
    history = ["rev-list", "--no-merges", "--min-parents=1", f"--max-count={flags.commits}"]
    commits = git(*history, "HEAD", "--", "*.py").split()[::-1]
    rng = random.Random(0)
    issues = [rows for rows in (list(rows_of(git, commit, rng)) for commit in commits) if rows]
    if len(issues) < 2:
        sys.exit(f"error: {len(commits)} commits make {len(issues)} issues\n  fix: name another")
    first_held_out = len(issues) - max(1, len(issues) // 10)
    flags.to.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", issues[:first_held_out]), ("held_out", issues[first_held_out:])):
        path = flags.to / f"{name}.jsonl"
        rows = [row for issue in part for row in issue]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{len(rows)} rows of {len(part)} issues written to {path}")


if __name__ == "__main__":
    main()
