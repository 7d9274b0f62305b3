"""Runs of models that read images of any size, several a row."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.fixtures.gemma4_models import write_gemma4, write_rows
from tests.fixtures.qwen_models import write_inputs
from tpu_rl.commands import run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen2_5_vl", ["--model.freeze", "vision"]),
        pytest.param("qwen3_vl", ["--model.lora.rank", "2"], marks=pytest.mark.nightly),
        pytest.param("qwen3_vl_moe", [], marks=pytest.mark.nightly),
    ],
)
def test_sampler_and_trainer_agree_on_images_of_any_size(tmp_path, family, flags, capsys):
    write_inputs(tmp_path, family)
    command = (
        ["grpo", "--data.path", str(tmp_path / "rows.jsonl"), "--model.path", str(tmp_path)]
        + ["--model.random-init", "--reward", f"{tmp_path / 'mine.py'}:score", *flags]
        + ["--batch.prompts", "6", "--batch.group-size", "4", "--batch.row-length", "256"]
        + ["--batch.micro-batch-rows", "2", "--sampling.max-prompt-tokens", "120"]
        + ["--sampling.max-new-tokens", "8", "--evaluation.rows", "0"]
        + ["--run-dir", str(tmp_path / "run")]
    )
    run.main([*command, "--steps", "2"])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    for row in map(json.loads, lines[1:]):
        assert row["policy/log_prob_gap_max"] < 1e-4
        assert row["policy/log_prob_gap_mean"] < 1e-6
    # A run goes on with the pictures that it began with.
    command += ["--steps", "3"]
    assert run.main([*command, "--data.max-pixels", "1024"]) == 2
    assert "data.max_pixels: None -> 1024" in capsys.readouterr().err
    Image.new("RGB", (24, 24)).save(tmp_path / "1_0.png")
    assert run.main(command) == 2
    assert "1 of 12 rows, the first of them row 2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("large", ["--model.freeze", "vision"]),
        pytest.param("small", ["--optimizer.weight-decay", "0.1"], marks=pytest.mark.nightly),
        pytest.param("mixture", ["--model.lora.rank", "2"], marks=pytest.mark.nightly),
    ],
)
def test_sampler_and_trainer_agree_on_images_of_gemma_4(tmp_path, name, flags):
    from safetensors.numpy import load_file

    write_gemma4(tmp_path, name)
    write_rows(tmp_path)
    run.main(
        ["grpo", "--data.path", str(tmp_path / "rows.jsonl"), "--model.path", str(tmp_path)]
        + ["--model.random-init", "--model.images", "--reward", f"{tmp_path / 'mine.py'}:score"]
        + ["--batch.prompts", "6", "--batch.group-size", "4", "--batch.row-length", "512"]
        + ["--batch.micro-batch-rows", "2", "--sampling.max-prompt-tokens", "200"]
        + ["--sampling.max-new-tokens", "8", "--evaluation.rows", "0", "--steps", "2"]
        + ["--run-dir", str(tmp_path / "run"), *flags]
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    for row in map(json.loads, lines[1:]):
        assert row["policy/log_prob_gap_max"] < 1e-4
        assert row["policy/log_prob_gap_mean"] < 1e-6
    if name == "small":
        tensors = load_file(tmp_path / "run" / "model" / "model.safetensors")
        bound = "model.vision_tower.encoder.layers.0.mlp.up_proj.input_max"
        assert tensors[bound] == np.inf
