"""Flags in a short YAML file, `--config FILE.yaml`:

    preset: grpo
    model.path: models/smollm2
    data: {path: train.jsonl}
    reward: [0.5*gsm8k, my_reward.py:score]
    optimizer.learning-rate: 1e-5
    wandb: true

Keys are the names of flags without dashes, nested or with dots. Flags on the command line come
after those of the file, and win. A run's own config.yaml, which has every setting, takes the place
of a preset instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tpu_rl.commands.flags import flag_names
from tpu_rl.errors import InputError, missing_file, refused
from tpu_rl.runtime.worker_child import shorten

PRESET = "preset"
MAX_BYTES = 1 << 20
"""Size of the largest YAML file that is read."""
FIX = "see docs/reference/flags.md for the names of flags"
MERGE = "tag:yaml.org,2002:merge"
"""The tag of the key `<<`."""


def read(path: Path) -> tuple[str | None, list[str]]:
    """Return (the preset that the file names or None, the arguments that its other keys stand for).

    Raises InputError if there is no such file, or it is not a mapping of flags to values.
    """
    where = f"--config {path}"
    content = read_mapping(path, where)
    library = flag_names.library_of(*map(str, content))
    if library in flag_names.FOREIGN:
        raise InputError(f"the file is one of {library}", where=where, fix=flag_names.OTHER_FILES)
    preset = content.pop(PRESET, None)
    if preset is not None and not isinstance(preset, str):
        raise InputError(f"{PRESET}: {preset} is no name", where=where)
    return preset, arguments(content, where)


def read_mapping(path: Path, where: str = "") -> dict[Any, Any]:
    """Return the content of a YAML file, a mapping that is not empty.

    Args:
        where: the place that errors name, by default the file.

    Raises:
        InputError: if it cannot be read, or is something else.
    """
    where = where or str(path)
    if not path.exists():
        raise missing_file("no such file", path, where)
    unreadable = "the configuration cannot be read"
    if not (path.is_file() and path.stat().st_size <= MAX_BYTES):
        raise InputError(
            unreadable,
            where=where,
            why=f"it is no regular file of at most {MAX_BYTES:,} bytes",
            fix="write one `flag: value` a line into a file",
        )
    with refused((OSError, UnicodeDecodeError), unreadable, where=where):
        text = path.read_text(encoding="utf-8")
    try:
        content = yaml.load(text, _Loader)
    # Deep nesting, and numbers of thousands of digits.
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError(
            "the configuration is no YAML",
            where=where,
            why=" ".join(str(error).split()),
            fix="write one `flag: value` a line",
        ) from None
    if not isinstance(content, dict) or not content:
        raise InputError(
            "the configuration has no flags",
            where=where,
            why=f"it is {shorten(content)}",
            fix="write one `flag: value` a line",
        )
    return content


def arguments(content: Mapping[Any, Any], where: str) -> list[str]:
    """Return the arguments that a mapping of flags, nested or with dots, stands for.

    Raises InputError if a key or value is none of a flag. It names `where`.
    """
    flags = flat(content, where)
    return [part for flag, value in flags.items() for part in flag_names.arguments(flag, value)]


def flat(content: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return flag, with dots -> value of a mapping of flags, nested or with dots.

    Raises InputError if a key or value is none of a flag, or a flag stands twice. It names `where`.
    """
    flags: dict[str, Any] = {}
    for flag, value in _flat(content, "", where):
        if flag_name(flag) in map(flag_name, flags):
            raise InputError(f"the flag {flag_name(flag)} stands twice", where=where, fix=FIX)
        flags[flag] = value
    return flags


def flag_name(flag: str) -> str:
    """Return the one spelling of a flag that may also be written with underscores."""
    return flag.replace("_", "-")


def _flat(content: Mapping[Any, Any], parents: str, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the flags of a mapping, which begin with `parents`, and their values."""
    for key, value in content.items():
        if not isinstance(key, str) or not key.strip():
            raise InputError(f"{key!r} is no flag", where=where, fix=FIX)
        flag = parents + key.removeprefix("--")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{flag}.", where)
            continue
        if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
            raise InputError(f"{flag} is a list of lists or mappings", where=where, fix=FIX)
        yield flag, value


class _Loader(yaml.SafeLoader):
    """Reads YAML whose repeated keys are errors; PyYAML's own loader keeps the last in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        # Keys that `<<` merges may stand in the mapping, too, and are then of no effect.
        nodes = [key for key, _ in node.value if key.tag != MERGE]
        keys = [self.construct_object(key, deep=True) for key in nodes]
        repeated = next((key for key in keys if keys.count(key) > 1), None)
        if repeated is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {repeated!r} stands twice", node.start_mark
            )
        return super().construct_mapping(node, deep)
