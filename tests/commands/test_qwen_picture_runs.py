"""Runs of models that read images of any size, several a row."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.fixtures.qwen_models import SIZES, config_of
from tpu_rl.commands import roles, run


def write_inputs(folder, family):
    """Write a model of the family without weights, rows with 0 to 2 images each, and a reward."""
    source = Path(roles.model_path("builtin:pictures"))
    shutil.copy(source / "tokenizer_config.json", folder)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    size = len(tokenizer["model"]["vocab"])
    for number, name in enumerate(("<|vision_start|>", "<|vision_end|>")):
        last = tokenizer["added_tokens"][-1]
        tokenizer["added_tokens"].append(last | {"id": size + number, "content": name})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokens = {"image_token_id": 4, "vision_start_token_id": size, "vision_end_token_id": size + 1}
    config = config_of(family, **tokens, tie_word_embeddings=True)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config["text_config"] = config["text_config"] | {"vocab_size": size + 2, **ends}
    (folder / "config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4}
    processor |= {"min_pixels": 64, "max_pixels": 2048}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    noise = np.random.default_rng(0)
    rows = []
    for index in range(12):
        names = []
        for number in range(index % 3):
            name = f"{index}_{number}.png"
            height, width = SIZES[(index + number) % len(SIZES)]
            content = io.BytesIO()
            pixels = noise.integers(0, 255, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(content, format="PNG")
            (folder / name).write_bytes(content.getvalue())
            names.append(name)
        row = {"prompt": "<image>" * len(names) + "count red?", "answer": "3"}
        rows.append(json.dumps(row | ({"images": names} if names else {})))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "mine.py").write_text(
        "def score(completions):\n    return [float(len(text) % 3) for text in completions]\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen2_5_vl", ["--model.freeze", "vision"]),
        pytest.param("qwen3_vl", ["--model.lora.rank", "2"], marks=pytest.mark.nightly),
    ],
)
def test_sampler_and_trainer_agree_on_images_of_any_size(tmp_path, family, flags):
    write_inputs(tmp_path, family)
    run.main(
        ["grpo", "--data.path", str(tmp_path / "rows.jsonl"), "--model.path", str(tmp_path)]
        + ["--model.random-init", "--reward", f"{tmp_path / 'mine.py'}:score", *flags]
        + ["--batch.prompts", "6", "--batch.group-size", "4", "--batch.row-length", "256"]
        + ["--batch.micro-batch-rows", "2", "--sampling.max-prompt-tokens", "120"]
        + ["--sampling.max-new-tokens", "8", "--evaluation.rows", "0", "--steps", "2"]
        + ["--run-dir", str(tmp_path / "run")]
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    for row in map(json.loads, lines[1:]):
        assert row["policy/log_prob_gap_max"] < 1e-4
        assert row["policy/log_prob_gap_mean"] < 1e-6
