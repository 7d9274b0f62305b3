"""Runs of a model that reads images."""

import json

import pytest

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
