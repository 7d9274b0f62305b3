"""Runs of rejection-sampling fine-tuning: expert iteration, a teacher, nothing to learn from."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.fixtures.runs import TINY, digest, rows_of
from tpu_rl import models
from tpu_rl.commands import run
from tpu_rl.commands.roles import model_path

SMALL = ["arithmetic_rft", *TINY[1:], "--batch.micro-batch-rows", "2"]


def is_first_model(run_dir: Path) -> bool:
    """Return whether a run ended with the weights of the shipped model."""
    trained = models.load(str(run_dir / "model"))[1]
    first = models.load(model_path("builtin:arithmetic"))[1]
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, trained, first)))


@pytest.mark.nightly
def test_a_run_in_which_nothing_passes_ends_with_the_first_model(tmp_path, capsys):
    command = [*SMALL, "--steps", "2", "--evaluation.rows", "0", "--run-dir", str(tmp_path)]
    assert run.main([*command, "--algorithm.min-reward", "2"]) == 0
    assert "step 1: no completion was accepted" in capsys.readouterr().err
    for row in rows_of(tmp_path)[-2:]:
        assert (row["optim/empty"], row["optim/skipped"], row["rft/accepted"]) == (1, 0, 0)
    assert is_first_model(tmp_path)


@pytest.mark.nightly
def test_expert_iteration_resumes_within_a_round(tmp_path, capsys):
    command = [*SMALL, "--algorithm.sampled-by", "reference", "--algorithm.round-steps", "3"]
    command += ["--algorithm.max-per-prompt", "1", "--batch.num-minibatches", "2"]
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    assert run.main([*command, "--run-dir", str(parts), "--steps", "2"]) == 0
    assert run.main([*command, "--run-dir", str(parts), "--steps", "4"]) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    assert run.main([*command, "--run-dir", str(whole), "--steps", "4"]) == 0
    assert digest(parts) == digest(whole)
    assert rows_of(parts)[-2:] == rows_of(whole)[-2:]
    samples = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert {sample["accepted"] for sample in samples} == {True, False}
    assert all(sample["reward"] == 1 for sample in samples if sample["accepted"])
    assert not is_first_model(whole)


@pytest.mark.nightly
def test_a_teacher_samples(tmp_path):
    command = [*SMALL, "--algorithm.sampled-by", "teacher", "--steps", "1"]
    command += ["--algorithm.teacher", model_path("builtin:arithmetic")]
    assert run.main([*command, "--run-dir", str(tmp_path)]) == 0
    assert rows_of(tmp_path)[-1]["rft/accepted"] > 0
