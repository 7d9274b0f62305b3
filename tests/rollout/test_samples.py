"""What samples.jsonl keeps: some completions of some steps, and numbers of their tokens."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.fixtures.echo import TOKENIZER, digit, score_prompts
from tpu_rl.experience.source import from_scored
from tpu_rl.rollout import pictures, records, samples
from tpu_rl.tokenizers.images import ImageReader


def test_steps_and_rows_are_chosen_evenly():
    assert [step for step in range(1, 13) if samples.is_kept(step, 5)] == [1, 5, 10]
    assert samples.evenly(12, 4) == [0, 3, 6, 9]
    assert samples.evenly(3, 8) == [0, 1, 2]
    assert samples.evenly(3, 0) == []


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ((4, 4, 4, 4), 8, [0, 1, 2, 3, 8, 9, 10, 11]),
        ((4, 4, 4, 4), 11, [0, 1, 2, 3, 8, 9, 10, 11]),
        ((2, 4, 1), 4, [0, 1]),
        ((8, 8), 4, [0, 2, 4, 6]),
        ((1, 1, 1, 1), 2, [0, 2]),
        ((), 4, []),
        ((2, 2), 0, []),
    ],
)
def test_groups_are_kept_whole(sizes, most, expected):
    group_ids = [group for group, size in enumerate(sizes) for _ in range(size)]
    assert samples.of_whole_groups(group_ids, most) == expected


@pytest.fixture
def experience():
    scored = score_prompts(["12", "34"], {"digit": digit}, group_size=2)
    log_probs = np.where(scored.rollout.action_mask, np.float32(-0.12345), np.float32(0))
    return from_scored(replace(scored, rollout=replace(scored.rollout, log_probs=log_probs)), 3)


def kept(experience, most=8, **numbers):
    folder = Path("unused")
    return samples.keep(experience.records, experience.rollouts, TOKENIZER, most, numbers, folder)


def test_a_kept_completion_has_what_the_model_read_and_its_tokens(experience):
    shape = experience.rollouts[0].tokens.shape
    advantage = np.full(shape, 0.70711)
    advantage[2] = np.arange(shape[1])
    gap = np.full(shape, -1.2345e-7)
    gap[0] = np.nan
    first, _, third, fourth = kept(experience, advantage=advantage, gap=gap)
    assert first["row"] == 0
    assert first["rendered"] == f"{TOKENIZER.decode(TOKENIZER.prefix_ids, False)}12"
    start = len(TOKENIZER.encode_prompt("12"))
    assert first["tokens"] == {
        "id": [*TOKENIZER.encode("1"), TOKENIZER.eos_ids[0]],
        "text": ["1", "<eos>"],
        "log_prob": [-0.123, -0.123],
        "advantage": 0.707,
    }
    assert third["tokens"]["advantage"] == [float(start), float(start + 1)]
    assert fourth["tokens"]["gap"] == [-1.2e-7]
    assert {name: first[name] for name in experience.records[0]} == experience.records[0]


def test_only_so_many_tokens_have_numbers(experience, monkeypatch):
    monkeypatch.setattr(samples, "MAX_TOKENS", 3)
    lengths = [len(record.get("tokens", {}).get("id", [])) for record in kept(experience)]
    assert lengths == [2, 1, 0, 0]
    assert [record["row"] for record in kept(experience, most=3)] == [0, 1]


def test_tokens_between_two_actions_have_no_numbers(experience):
    (rollout,) = experience.rollouts
    start = int(rollout.action_mask[0].argmax())
    tokens, mask = rollout.tokens.copy(), rollout.action_mask.copy()
    tokens[0, start : start + 3] = TOKENIZER.encode("198")
    mask[0, start : start + 3] = [True, False, True]
    changed = experience._replace(rollouts=(replace(rollout, tokens=tokens, action_mask=mask),))
    record = kept(changed)[0]["tokens"]
    assert record["text"] == ["1", "9", "8"]
    assert [number is None for number in record["log_prob"]] == [False, True, False]


def test_texts_of_tokens_are_the_whole_text():
    """Bytes of one character are shown with the last of them; a leading space is not lost."""
    pieces = {1: b"\xc3", 2: b"\xa9", 3: b" a", 4: b"b", 5: b"\xe2\x9c"}

    def decode(ids):
        # As sentencepiece does, without a space at the beginning.
        return b"".join(pieces[i] for i in ids).decode("utf-8", "replace").removeprefix(" ")

    ids = [4, 3, 1, 2, 3, 4, 5]
    texts = samples.token_texts(ids, decode)
    assert texts == ["b", " a", "", "é", " a", "b", "\ufffd"]
    assert "".join(texts) == decode(ids)


READER = ImageReader("", 4, "<image>", 46, 16, 32)


def test_a_sample_names_small_copies_of_its_pictures(tmp_path):
    scored = score_prompts(["12", "34"], {"digit": digit}, group_size=2)
    large, noise = Image.new("RGB", (640, 320), "red"), np.random.default_rng(0)
    rough = Image.fromarray(noise.integers(0, 255, (300, 300, 3), np.uint8))
    rows = [
        scored.rows[0] | {"images": [large, rough], "answer": [1, 2, 30, 40]},
        scored.rows[1] | {"images": ["gone.png"]},
    ]
    said = ["at (3, 4)", *scored.completions[1:]]
    objects = records.records(replace(scored, rows=rows, completions=said), 3)
    assert objects[0]["marks"] == {"completion": [3, 4], "answer": [1, 2, 30, 40]}
    assert objects[1]["marks"] == {"answer": [1, 2, 30, 40]}
    assert objects[2]["marks"] == {}
    names = pictures.kept(objects[0]["images"], READER, tmp_path)
    assert [name["size"] for name in names] == [[640, 320], [300, 300]]
    assert pictures.kept(objects[1]["images"], READER, tmp_path) == names
    files = {path.name: path for path in tmp_path.iterdir()}
    assert files.keys() == {name["file"] for name in names}
    with Image.open(files[names[0]["file"]]) as small:
        assert small.size == (192, 96)
    assert [Path(name["file"]).suffix for name in names] == [".png", ".jpg"]
    [gone] = pictures.kept(objects[2]["images"], READER, tmp_path)
    assert "there is no file gone.png" in gone["error"]
    tokenizer: Any = SimpleNamespace(images=READER, decode=TOKENIZER.decode)
    kept_objects = samples.keep(objects, (scored.rollout,), tokenizer, 2, {}, tmp_path)
    assert kept_objects[0]["images"] == names
    many = pictures.kept([large] * 11, READER, tmp_path)
    assert many[pictures.MAX_OF_SAMPLE :] == [{"error": "3 more pictures"}]
