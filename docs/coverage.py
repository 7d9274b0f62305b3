"""Make docs/coverage.md from docs/coverage.tsv: published methods and the commands that run them.

    python docs/coverage.py

A line of the table has the id of a method, its title, a status, commands and a note. Commands
begin with a name of launch/, and "; " stands between two of them. Capital words in commands stand
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
}


class Method(NamedTuple):
    """A line of the table."""

    id: str
    title: str
    status: str
    command: str
    """Name of launch/ and arguments; "" if nothing runs. Perhaps several, split by `commands`."""
    note: str

    @property
    def commands(self) -> list[str]:
        """The commands, in the order in which they are typed."""
        names = "|".join(path.stem for path in LAUNCH.glob("*.py"))
        return re.split(rf"; (?=(?:{names}) )", self.command) if self.command else []


def read() -> list[Method]:
    """Return the methods of the table."""
    lines = DATA.read_text(encoding="utf-8").splitlines()[1:]
    return [Method(*line.split("\t")) for line in lines]


def page(methods: list[Method]) -> str:
    """Return the page."""
    counts = Counter(method.status for method in methods)
    lines = [
        "# Coverage of published methods",
        "",
        f"{len(methods)} methods of the literature, and the command that runs each, or what is",
        "missing. A command says that the mechanism runs, not that a paper's numbers are",
        "reproduced: measurements are in the [benchmarks](benchmarks/README.md).",
        "",
        *(f"- **{status}** ({counts[status]}): {text}." for status, text in STATUSES.items()),
        "",
        "In commands, `DIR` is a model, `rows.jsonl` your data, `FILE.py:NAME` your code, and",
        "`JUDGE`, `TEACHER` and `AUTHOR` are models that you have. B: base methods; D, E, F:",
        "papers.",
        "",
        "This page is generated: edit `docs/coverage.tsv`, then run `python docs/coverage.py`.",
        "",
        "| id | method | runs | command or reason |",
        "|---|---|---|---|",
    ]
    for method in methods:
        lines.append(f"| {method.id} | {method.title} | {method.status} | {cell(method)} |")
    return "\n".join(lines) + "\n"


def cell(method: Method) -> str:
    """Return the commands as code, and the note."""
    parts = []
    typed = [command.partition(" ") for command in method.commands]
    if typed:
        parts.append(", then ".join(f"`python launch/{name}.py {rest}`" for name, _, rest in typed))
    if method.note:
        parts.append(method.note.replace("|", "\\|"))
    return ": ".join(parts)


def main() -> None:
    PAGE.write_text(page(read()), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
