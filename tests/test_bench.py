"""Scripts of bench/ keep up with the code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def small_results(script: str, folder: Path, *flags: str) -> list[dict[str, Any]]:
    """Run a script with --small, and return the lines of its results."""
    command = [sys.executable, str(BENCH / script), "--small", "--to", str(folder), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_methods_of_each_kind_take_a_step(tmp_path):
    """`every_method.py --small`: rollouts, pairs, scored completions, texts, a curriculum."""
    methods = ["grpo", "dpo", "rrhf", "ce_u", "hints"]
    lines = small_results("every_method.py", tmp_path, "--only", *methods)
    assert len(lines) == 1 + len(methods)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_errors_of_log_probs_are_put_in_and_cured(tmp_path):
    lines = small_results("mismatch.py", tmp_path, "--arms", "0, none", "0.08, recomputed")
    gaps = [line["gap"] for line in lines]
    assert gaps[0] < 1e-4
    assert 0.07 < gaps[1] < 0.09


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_answers_in_other_forms_are_rewarded_by_a_verifier_and_by_their_likelihood(tmp_path):
    lines = small_results("answer_forms.py", tmp_path, "--arms", "verifier", "spread", "placebo")
    assert [line["name"] for line in lines] == ["verifier", "spread", "placebo"]
    row = json.loads((tmp_path / "forms.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert row["answer"] in row["form"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_best_of_eight_are_imitated_near_the_first_policy(tmp_path):
    lines = small_results("super_hf.py", tmp_path, "--arms", "KL 0.1", "grpo")
    assert [line["diversity"] > 0 for line in lines] == [True, True]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_losses_two_tokens_ahead_join_sft_and_grpo(tmp_path):
    lines = small_results("star_graphs.py", tmp_path, "--arms", "sft", "grpo")
    assert [tuple(line["run"]) for line in lines[:4]] == [
        ("walks", 0, "sft", False),
        ("walks", 0, "sft", True),
        ("walks", 0, "grpo", False),
        ("walks", 0, "grpo", True),
    ]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_rewards_of_both_kinds_take_a_step(tmp_path):
    """`every_reward.py --small`: a start, GRPO, a coin, and the further arms of the task action."""
    lines = small_results("every_reward.py", tmp_path, "--only", "box_iou", "action")
    assert len(lines) == 6 + 4


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_zeros_in_place_of_faults_are_measured():
    command = [sys.executable, str(BENCH / "fault_zeros.py"), "--small"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "zero" in ended.stdout


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_judge_of_three_verdicts_takes_a_step(tmp_path):
    (line,) = small_results("three_verdicts.py", tmp_path)
    assert len(line["verdicts"]) == len(line["labels"]) == 50
