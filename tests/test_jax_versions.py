"""Differences between versions of jax."""

import ast
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import tpu_rl
from tpu_rl import jax_versions


@pytest.fixture(autouse=True)
def _uncached():
    jax_versions.can_compile_kernels.cache_clear()
    yield
    jax_versions.can_compile_kernels.cache_clear()


@pytest.mark.parametrize(
    ("installed", "compiles"),
    [("0.0.17", False), ("0.0.21.1", False), ("0.0.23", True), ("0.0.52", True)],
)
def test_a_libtpu_before_the_one_that_jax_names_compiles_no_kernels(
    installed, compiles, monkeypatch, capsys
):
    found = [SimpleNamespace(version=installed)]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter(found))
    needed = ["numpy>=2", 'libtpu==0.0.23.*; extra == "tpu"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    assert jax_versions.can_compile_kernels() is compiles
    shown = capsys.readouterr().err
    assert ('pip install "libtpu==0.0.23"' in shown) is not compiles


@pytest.mark.parametrize("dtype", ["bool", "int4", "int8", "uint32", "bfloat16", "float32"])
@pytest.mark.parametrize("release", [(0, 7, 2), jax_versions.RELEASE])
def test_old_and_new_versions_agree_on_the_bits_of_numbers(dtype, release, monkeypatch):
    monkeypatch.setattr(jax_versions, "RELEASE", release)
    bits = {"bool": 8, "int4": 4, "int8": 8, "uint32": 32, "bfloat16": 16, "float32": 32}
    assert jax_versions.itemsize_bits(jnp.dtype(dtype)) == bits[dtype]


def test_no_other_module_compares_versions_of_jax():
    """`host` reads it for a line that installs packages."""
    readers = set()
    for path in Path(tpu_rl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.__version__":
                readers.add(path.name)
    assert readers == {"jax_versions.py", "host.py"}
    assert jax.__version__.startswith(".".join(map(str, jax_versions.RELEASE)))
