"""Scripts of bench/ keep up with the code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
IMPORT = """
import runpy, sys
sys.path.insert(0, ".")
for name in sys.argv[1:]:
    try:
        runpy.run_path(name, run_name="imported")
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] not in ("tinker",):
            raise
"""
"""Some scripts measure packages that a test may lack."""


@pytest.mark.slow
def test_all_scripts_are_imported():
    """In a process of their own: some change settings of JAX."""
    scripts = sorted(str(path) for path in BENCH.glob("*.py"))
    command = [sys.executable, "-c", IMPORT, *scripts]
    ended = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=False)
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


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_errors_of_log_probs_are_put_in_and_cured(tmp_path):
    script = BENCH / "mismatch.py"
    names = ["0, none", "0.08, recomputed"]
    command = [sys.executable, str(script), "--small", "--to", str(tmp_path), "--arms", *names]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    gaps = [json.loads(line)["gap"] for line in lines]
    assert gaps[0] < 1e-4
    assert 0.07 < gaps[1] < 0.09


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_rewards_of_both_kinds_take_a_step(tmp_path):
    """`every_reward.py --small`: a start, GRPO, a coin, and the further arms of the task action."""
    script = BENCH / "every_reward.py"
    names = ["box_iou", "action"]
    command = [sys.executable, str(script), "--small", "--to", str(tmp_path), "--only", *names]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 6 + 4
