"""Runs of distillation: completions of policy and teacher, teachers of another size, resume."""

import json
import shutil

import jax
import numpy as np
import pytest

from tests.fixtures.runs import digest, rows_of
from tpu_rl import models
from tpu_rl.commands import run
from tpu_rl.commands.roles import model_path
from tpu_rl.tokenizers import load as load_tokenizer

TINY = [
    "--batch.prompts=4",
    "--batch.group-size=2",
    "--batch.row-length=128",
    "--evaluation.rows=8",
    "--evaluation.interval=4",
    "--checkpoint.interval=1",
]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, str]:
    """Directories of the shipped model with noise on its weights, and of its first layer."""
    folder = tmp_path_factory.mktemp("teachers")
    shipped = model_path("builtin:arithmetic")
    tokenizer = load_tokenizer(shipped)
    model, params = models.load(shipped)
    random = np.random.default_rng(0)
    noisy = jax.tree.map(lambda x: x + 0.02 * random.normal(size=x.shape).astype(x.dtype), params)
    models.save(str(folder / "noisy"), model, noisy, tokenizer)
    first_layer = models.first_layers_params(model, params, 1)
    models.save(str(folder / "small"), models.first_layers(model, 1), first_layer, tokenizer)
    return {name: str(folder / name) for name in ("noisy", "small")}


@pytest.mark.nightly
def test_resume_equals_an_uninterrupted_run(tmp_path, teachers, capsys):
    """The run has every possible part: two teachers, one of them smaller, and completions of the
    policy and of the teacher."""
    command = [
        "arithmetic_align_distil",
        *TINY,
        f"--algorithm.teacher={teachers['noisy']}",
        f"--algorithm.teacher-reverse={teachers['small']}",
        "--algorithm.on-policy=0.5",
        "--algorithm.off-policy=teacher",
    ]
    parts = tmp_path / "parts"
    whole = tmp_path / "whole"
    assert run.main([*command, "--run-dir", str(parts), "--steps", "2"]) == 0
    assert run.main([*command, "--run-dir", str(parts), "--steps", "4"]) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    assert run.main([*command, "--run-dir", str(whole), "--steps", "4"]) == 0
    assert digest(parts) == digest(whole)
    row = rows_of(whole)[-1]
    assert row["distill/divergence"] > 0
    assert row["distill/tokens_high"] > 0
    assert {
        "reward/mean",
        "distill/teacher_reward",
        "distill/divergence_on_policy",
        "distill/loss_high",
    } <= row.keys()
    records = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert sum(record.get("by") == "teacher" for record in records) == len(records) / 2


@pytest.mark.slow
def test_teacher_with_another_tokenizer_is_refused(tmp_path, teachers, capsys):
    """The vocabulary has the same size, but two token ids mean something else."""
    other = tmp_path / "other"
    shutil.copytree(teachers["small"], other)
    tokenizer = other / "tokenizer.json"
    swapped = json.loads(tokenizer.read_text())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    tokenizer.write_text(json.dumps(swapped))
    teacher = f"--algorithm.teacher={other}"
    command = ["arithmetic_gkd", *TINY, teacher, "--run-dir", str(tmp_path / "run")]
    assert run.main(command) == 2
    assert "another tokenizer" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["arithmetic_sequence_distil", "arithmetic_mini_llm"])
def test_presets_with_other_losses_run(tmp_path, teachers, preset):
    teacher = f"--algorithm.teacher={teachers['small']}"
    command = [preset, *TINY, teacher, "--steps", "1", "--run-dir", str(tmp_path)]
    assert run.main(command) == 0
    assert {"sft/loss", "distill/loss"} & rows_of(tmp_path)[-1].keys()


@pytest.mark.nightly
def test_completions_of_the_data_are_off_policy(tmp_path, teachers):
    """The data complete one half of the prompts, the policy the other half."""
    command = [
        "arithmetic_gkd",
        *TINY,
        f"--algorithm.teacher={teachers['small']}",
        "--algorithm.on-policy=0.5",
    ]
    assert run.main([*command, "--steps", "1", "--run-dir", str(tmp_path)]) == 0
    row = rows_of(tmp_path)[-1]
    assert row["distill/divergence_on_policy"] > 0
    assert row["distill/divergence_off_policy"] > 0
