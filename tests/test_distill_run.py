"""Distillation as a user runs it: whose completions a batch holds, teachers of another size, resume."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from launch import run, sources
from launch.roles import model_path
from tests import tiny
from tpu_rl import models
from tpu_rl.tokenizers import load as load_tokenizer

TINY = [
    "--batch.prompts", "4", "--batch.completions", "2", "--batch.row-length", "128", "--evaluation.rows", "8",
    "--evaluation.every", "4", "--checkpoint-every", "1",
]  # fmt: skip


def test_texts_of_two_origins_are_one_batch():
    sampled, written = (
        tiny.rollout(groups=((3, (4, 1)), (2, (2, 2)))),
        tiny.demonstrations(groups=((5, (6,)), (1, (2,)))),
    )
    batch = sources.together([(sampled, True), (written, False)])
    assert batch.tokens.shape == (6, 11)
    np.testing.assert_array_equal(batch.group_id, [0, 0, 1, 1, 2, 3])
    np.testing.assert_array_equal(batch.on_policy, [True] * 4 + [False] * 2)
    for rows, texts in ((slice(0, 4), sampled), (slice(4, 6), written)):
        width = texts.tokens.shape[1]
        np.testing.assert_array_equal(batch.tokens[rows, :width], texts.tokens)
        np.testing.assert_array_equal(batch.action_mask[rows, :width], texts.action_mask)
        assert not batch.action_mask[rows, width:].any()


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, str]:
    """Directories: the shipped model with noise on its weights, and its first layers alone."""
    folder, shipped = tmp_path_factory.mktemp("teachers"), model_path("builtin:arithmetic")
    model, params = models.load(shipped)
    random = np.random.default_rng(0)
    noisy = jax.tree.map(lambda x: x + 0.02 * random.normal(size=x.shape).astype(x.dtype), params)
    small = models.first_layers(model, 1)
    for name, one, weights in (("noisy", model, noisy), ("small", small, models.first_layers_params(model, params, 1))):
        models.save(str(folder / name), one, weights, load_tokenizer(shipped))
    return {name: str(folder / name) for name in ("noisy", "small")}


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def digest(run_dir: Path) -> str:
    return json.loads((run_dir / "summary.json").read_text())["params_digest"]


@pytest.mark.slow
def test_two_steps_then_four_equal_four(tmp_path, teachers, capsys):
    """With every part that a run can have: two teachers, one of them smaller, and completions of policy and teacher."""
    command = [
        "arithmetic_align_distil", *TINY, "--algorithm.teacher", teachers["noisy"], "--algorithm.teacher-reverse",
        teachers["small"], "--algorithm.on-policy", "0.5", "--algorithm.off-policy", "teacher",
    ]  # fmt: skip
    apart, whole = tmp_path / "apart", tmp_path / "whole"
    assert run.main([*command, "--run-dir", str(apart), "--steps", "2"]) == 0
    assert run.main([*command, "--run-dir", str(apart), "--steps", "4"]) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    assert run.main([*command, "--run-dir", str(whole), "--steps", "4"]) == 0
    assert digest(apart) == digest(whole)
    row = rows_of(whole)[-1]
    assert row["distill/divergence"] > 0
    assert row["distill/tokens_high"] > 0
    for name in ("reward/mean", "distill/teacher_reward", "distill/divergence_on_policy", "distill/loss_high"):
        assert name in row
    records = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert sum(record.get("by") == "teacher" for record in records) == len(records) / 2


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path, teachers, capsys):
    """Here the same size: only what the ids mean is another."""
    other = tmp_path / "other"
    shutil.copytree(teachers["small"], other)
    tokenizer = other / "tokenizer.json"
    # 1 and 2 change places.
    swapped = json.loads(tokenizer.read_text())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    tokenizer.write_text(json.dumps(swapped))
    command = ["arithmetic_gkd", *TINY, "--algorithm.teacher", str(other), "--run-dir", str(tmp_path / "run")]
    assert run.main(command) == 2
    assert "another tokenizer" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["arithmetic_sequence_distil"], ["arithmetic_mini_llm"]])
def test_other_forms_run(tmp_path, teachers, flags):
    command = [*flags, *TINY, "--algorithm.teacher", teachers["small"], "--steps", "1", "--run-dir", str(tmp_path)]
    assert run.main(command) == 0
    assert {"sft/loss", "distill/loss"} & rows_of(tmp_path)[-1].keys()


@pytest.mark.slow
def test_the_data_s_own_completions(tmp_path, teachers):
    """Half of the prompts as the data solve them, half by the policy."""
    command = ["arithmetic_gkd", *TINY, "--algorithm.teacher", teachers["small"], "--algorithm.on-policy", "0.5"]
    assert run.main([*command, "--steps", "1", "--run-dir", str(tmp_path)]) == 0
    row = rows_of(tmp_path)[-1]
    assert row["distill/divergence_on_policy"] > 0
    assert row["distill/divergence_off_policy"] > 0
