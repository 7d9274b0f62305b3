"""requirements-lock.txt and the ranges of setup.py."""

import runpy
from pathlib import Path

import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def test_locked_versions_lie_within_the_ranges(monkeypatch):
    """Each package of setup.py that is no extra has a line; jax has one for each Python."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    lines = (ROOT / "requirements-lock.txt").read_text().splitlines()
    locked: dict[str, list[str]] = {}
    for line in map(Requirement, (line for line in lines if not line.startswith("#"))):
        (version,) = line.specifier
        locked.setdefault(canonicalize_name(line.name), []).append(version.version)
    assert [len(versions) for name, versions in locked.items() if len(versions) > 1] == [2, 2]
    assert "torch" not in locked
    extras = [text for texts in given["extras_require"].values() for text in texts]
    for text in given["install_requires"] + extras:
        required = Requirement(text)
        name = canonicalize_name(required.name)
        if text in given["install_requires"] or name in locked:
            assert all(map(required.specifier.contains, locked[name])), text
