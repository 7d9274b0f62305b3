"""Flags as command-line arguments, and by the names that earlier versions and TRL gave them.

docs/reference/flags.md compares the names of TRL and verl in full.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tpu_rl.commands.flags import help_text
from tpu_rl.errors import InputError

_TABLES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("other_libraries.yaml").read_text(encoding="utf-8")
)
TRANSLATED = {library: _TABLES[library] for library in ("trl", "verl")}
"""Library -> its name of a setting -> our name, or {our name: {its value: ours}}."""
EARLIER = _TABLES["earlier"]
"""Flags of earlier versions -> their names now."""
FOREIGN = _TABLES["first_parts"]
"""Library -> first parts of settings that it alone has, with - in place of _."""


def _names_of_trl() -> dict[str, str]:
    meant = {
        name.replace("_", "-"): f"--{ours if isinstance(ours, str) else next(iter(ours))}"
        for name, ours in TRANSLATED["trl"].items()
    }
    others = {name: flag for name, flag in meant.items() if flag != f"--{name}"}
    return others | _TABLES["in_words"]


TRL = _names_of_trl()
"""Names of TRL's settings, with - in place of _ -> the flags that mean the same here."""

OTHER_FILES = "write flags, --NAME VALUE; docs/reference/flags.md compares the names"


def library_of(*settings: str) -> str | None:
    """Return the library that settings belong to, such as verl's "data.train_files=a"."""
    names = [s.partition("=")[0].removeprefix("--").replace("_", "-") for s in settings]
    parts = {name.partition(".")[0] for name in names}
    libraries = [library for library, firsts in FOREIGN.items() if parts & {*firsts}]
    if any("=" in setting and not setting.startswith("--") for setting in settings):
        libraries.append("verl")
    return next(iter(libraries), "TRL" if TRL.keys() & {*names} else None)


def arguments(flag: str, value: Any) -> list[str]:
    """Return the command-line arguments that set one flag to a Python value."""
    if isinstance(value, bool):
        parents, dot, leaf = flag.rpartition(".")
        return [f"--{flag}" if value else f"--{parents}{dot}no-{leaf}"]
    if isinstance(value, list | tuple):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}={value}"]


def require_once(default: Any, flags: Sequence[str]) -> None:
    """Check that no flag of several values is given twice, where the last one would replace the
    others.

    Args:
        default: the configuration whose fields the flags are.
        flags: the words of one command line.

    Raises:
        InputError: if one is.
    """
    # A flag without a value, which empties what a preset says, is replaced without a loss.
    words = [
        flag.partition("=")[0]
        for flag, following in itertools.zip_longest(flags, flags[1:], fillvalue="--")
        if flag.startswith("--") and ("=" in flag or not following.startswith("--"))
    ]
    names = [word.replace("_", "-") for word in words]
    for name in dict.fromkeys(names):
        value = help_text.setting(default, name.removeprefix("--").replace("-", "_"))
        if isinstance(value, tuple) and names.count(name) > 1:
            raise InputError(
                f"{name} is given {names.count(name)} times",
                where=name,
                why="the last one would replace the others",
                fix=f"write all values behind one: {name} A B",
            )


def remedy(flag: str) -> str | None:
    """Return the remedy for a flag that has another name here, or None.

    Args:
        flag: as it was typed, such as "--learning_rate=1e-5".
    """
    typed = flag.partition("=")[0]
    name = typed.removeprefix("--").replace("_", "-")
    phase = re.fullmatch(r"phases\.(\d+)\.forget", name)
    if phase:
        return f"did you mean --phases.{phase[1]}.reset-roles?"
    if name in EARLIER:
        return f"did you mean {EARLIER[name]}?"
    if name in TRL:
        return f"TRL's {typed.removeprefix('--')} is {TRL[name]}"
    library = library_of(flag)
    return library and f"{typed} is a setting of {library}: {OTHER_FILES}"


def remedy_in_group(flag: str) -> str | None:
    """Return the remedy for an unknown flag whose last part is TRL's name of one of its group.

    Args:
        flag: a flag that the parser refuses, such as "--optimizer.lr".
    """
    group, _, name = flag.partition("=")[0].replace("_", "-").rpartition(".")
    meant = TRL.get(name, "")
    return f"did you mean {meant}?" if group and meant.startswith(f"{group}.") else None
