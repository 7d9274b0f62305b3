"""Runs of a model that reads images."""

import json

import pytest

from tests.fixtures.gemma4_models import write_gemma4
from tests.fixtures.image_models import write_gemma, write_idefics, write_internvl
from tpu_rl.commands import run


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_sampler_and_trainer_agree_on_images_and_the_tower_may_be_frozen(tmp_path):
    from safetensors.numpy import load_file

    flags = ["--evaluation.rows", "0", "--batch.micro-batch-rows", "4"]
    first = tmp_path / "first"
    run.main(["pictures_sft", "--steps", "1", *flags, "--run-dir", str(first)])
    second = tmp_path / "second"
    small = ["--batch.prompts", "4", "--batch.group-size", "4", "--model.freeze", "vision"]
    model = ["--model.path", str(first / "model")]
    # Random rewards differ within groups, so that every step learns.
    (tmp_path / "mine.py").write_text(
        "def score(completions):\n    return [float(len(text) % 3) for text in completions]\n"
    )
    reward = ["--reward", f"{tmp_path / 'mine.py'}:score"]
    run.main(
        ["pictures_grpo", *model, *reward, *small, *flags, "--steps", "2", "--run-dir", str(second)]
    )
    for row in rows_of(second)[1:]:
        assert row["policy/log_prob_gap_max"] < 1e-5
    before, after = (
        load_file(folder / "model" / "model.safetensors") for folder in (first, second)
    )
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert not any(name.startswith("vision_tower.") for name in changed)
    assert "multi_modal_projector.linear_1.weight" in changed
    assert (second / "model" / "preprocessor_config.json").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize("write", [write_gemma, write_gemma4, write_idefics, write_internvl])
@pytest.mark.parametrize("lora", [(), ("--model.lora.rank", "4")])
def test_sampler_and_trainer_agree_for_every_family(tmp_path, write, lora):
    model = tmp_path / "model"
    model.mkdir()
    write(model)
    reward = tmp_path / "mine.py"
    reward.write_text(
        "def score(completions):\n    return [float(len(text) % 3) for text in completions]\n"
    )
    flags = [
        *("--model.path", str(model), "--model.random-init", "--model.images"),
        *("--batch.prompts", "4", "--batch.group-size", "4", "--batch.micro-batch-rows", "4"),
        *("--batch.row-length", "256", "--sampling.max-prompt-tokens", "120", "--steps", "2"),
        *("--evaluation.rows", "0", "--reward", f"{reward}:score"),
        *("--optimizer.learning-rate", "0.01", "--run-dir", str(tmp_path / "run"), *lora),
    ]
    run.main(["pictures_grpo", *flags])
    rows = rows_of(tmp_path / "run")[1:]
    assert rows
    for row in rows:
        assert row["policy/log_prob_gap_max"] < 1e-4
        assert row["policy/log_prob_gap_mean"] < 1e-6
