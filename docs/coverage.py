"""Make docs/coverage.md from docs/coverage.tsv: published methods and the commands that run them.

    python docs/coverage.py

A line of the table has the id of a method, its title, a status, commands, a note, and where a
figure of it stands. Commands begin with a name of launch/ or a script of recipes/ without its .py,
and "; " stands between two of them. Capital words in commands stand
for folders of the reader.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
PAGE = DOCS / "coverage.md"
DATA = DOCS / "coverage.tsv"
LAUNCH = DOCS.parent / "launch"

IDS = {"B": 12, "D": 30, "E": 67, "F": 100}
"""Letter of a list -> the number of its methods."""
STATUSES = {
    "yes": "a command runs the method",
    "part": "a command runs a part of it, or the reader writes the rest",
    "no": "not here",
    "not applicable": "it trains no language model, needs what no package brings, or is a survey",
}


class Method(NamedTuple):
    """A line of the table."""

    id: str
    title: str
    status: str
    command: str
    """Name of launch/ and arguments; "" if nothing runs. Perhaps several, split by `commands`."""
    note: str
    measured: str
    """The section with its figure, seen from docs/; "" without one."""

    @property
    def commands(self) -> list[str]:
        """The commands, in the order in which they are typed."""
        names = "|".join([r"recipes/[\w/]+", *(path.stem for path in LAUNCH.glob("*.py"))])
        return re.split(rf"; (?=(?:{names}) )", self.command) if self.command else []


def read() -> list[Method]:
    """Return the methods of the table."""
    lines = DATA.read_text(encoding="utf-8").splitlines()[1:]
    return [Method(*line.split("\t")) for line in lines]


def page(methods: list[Method]) -> str:
    """Return the page."""
    counts = Counter(method.status for method in methods)
    with_figure = sum(bool(method.measured) for method in methods)
    with_command = sum(bool(method.command) for method in methods)
    lines = [
        "# Coverage of published methods",
        "",
        f"{len(methods)} methods of the literature, and the command that runs each, or what is",
        "missing. A command says that the mechanism runs, not that a paper's numbers are",
        f"reproduced. {with_command} methods have a command, and {with_figure} a figure that we",
        "measured, whatever it says. Some figures have one seed; their pages say so.",
        "",
        *(f"- **{status}** ({counts[status]}): {text}." for status, text in STATUSES.items()),
        "",
        "In commands, `DIR` is a model, `rows.jsonl` your data, `FILE.py:NAME` your code, and",
        "`JUDGE`, `TEACHER` and `AUTHOR` are models that you have. B: base methods; D, E, F:",
        "papers.",
        "",
        "This page is generated: edit `docs/coverage.tsv`, then run `python docs/coverage.py`.",
        "",
        "| id | method | runs | command or reason | figure |",
        "|---|---|---|---|---|",
    ]
    for method in methods:
        figure = f"[figure]({method.measured})" if method.measured else ""
        cells = [method.id, method.title, method.status, cell(method), figure]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(method: Method) -> str:
    """Return the commands as code, and the note."""
    parts = []
    typed = [command.partition(" ") for command in method.commands]
    if typed:
        paths = [name if "/" in name else f"launch/{name}" for name, _, _ in typed]
        shown = [f"`python {path}.py {typed[i][2]}`" for i, path in enumerate(paths)]
        parts.append(", then ".join(shown))
    if method.note:
        parts.append(method.note.replace("|", "\\|"))
    return ": ".join(parts)


def main() -> None:
    PAGE.write_text(page(read()), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
