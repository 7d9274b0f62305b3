"""Scripts of bench/ keep up with the code."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
PEERS = ("tinker",)
"""Packages that scripts measure, and that a test may lack."""
IMPORT = """
import runpy, sys
sys.path.insert(0, ".")
runpy.run_path(sys.argv[1], run_name="imported")
"""
SCRIPTS = sorted(path.name for path in BENCH.glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_imported(name):
    """In a process of its own: some scripts change settings of JAX."""
    command = [sys.executable, "-c", IMPORT, str(BENCH / name)]
    ended = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=False)
    if any(f"No module named '{package}" in ended.stderr for package in PEERS):
        pytest.skip(f"{name} measures another package")
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_methods_of_each_kind_take_a_step(tmp_path):
    """`every_method.py --small`: rollouts, pairs, scored completions, texts, a curriculum."""
    methods = ["grpo", "dpo", "rrhf", "ce_u", "hints"]
    script = BENCH / "every_method.py"
    command = [sys.executable, str(script), "--small", "--to", str(tmp_path), "--only", *methods]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(methods)
