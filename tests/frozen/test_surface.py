"""The names that users write are those of surface.json."""

import json

from tests.frozen import surface


def test_names_and_defaults_are_those_of_the_file():
    old = json.loads(surface.FILE.read_text(encoding="utf-8"))
    lines = list(surface.differences(old, surface.surface()))
    assert not lines, "\n".join([*lines, "if meant: python -m tests.frozen.surface --write"])


def test_differences_are_named():
    old = {"flags": {"a": 1, "b": 2}, "rewards": ["x", "y"]}
    new = {"flags": {"a": 1, "b": 3, "c": 4}, "rewards": ["y", "z"]}
    assert list(surface.differences(old, new)) == [
        "/flags/b: 2 -> 3",
        "/flags/c: None -> 4",
        "/rewards: x left",
        "/rewards: z is new",
    ]
