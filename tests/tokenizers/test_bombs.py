"""Tokenizers and weights that were made to do harm: each ends as one message, in 10 s and 1 GB."""

import json
import resource
import time
from pathlib import Path

import pytest

from tpu_rl import tokenizers
from tpu_rl.errors import InputError
from tpu_rl.models.hf import families, safetensors_files
from tpu_rl.tokenizers import probe

WORDS = {"<eos>": 0, "<unk>": 1, "a": 2, "b": 3}
MODEL = {"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"}
SPECIAL = {
    "id": 0,
    "content": "<eos>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
GOOD = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [SPECIAL],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": MODEL,
}


def replaced(by: str, kind: str = "String", pattern: str = "a") -> dict:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": by}


def split(pattern: str) -> dict:
    return {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
    }


def sequence(kind: str, *parts: dict) -> dict:
    names = {"normalizer": "normalizers", "decoder": "decoders", "pre_tokenizer": "pretokenizers"}
    return {kind: {"type": "Sequence", names[kind]: list(parts)}}


def template(count: int) -> dict:
    token = {"SpecialToken": {"id": "<eos>", "type_id": 0}}
    return {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [token] * count + [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<eos>": {"id": "<eos>", "ids": [0], "tokens": ["<eos>"]}},
        }
    }


def padded(length: int) -> dict:
    return {
        "padding": {
            "strategy": {"Fixed": length},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<eos>",
        }
    }


SPACED = {
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": "."},
        "behavior": "Isolated",
        "invert": False,
    }
}
TOKENIZERS = {
    "normalizer to megabytes": SPACED | {"normalizer": replaced("b" * 10**6)},
    "normalizer to thousands": SPACED | {"normalizer": replaced("b" * 3000)},
    "normalizers in a row": SPACED | sequence("normalizer", *[replaced("aaaaaaaaaa")] * 9),
    "normalizers doubling": SPACED | sequence("normalizer", *[replaced("aa")] * 40),
    "prepended": SPACED | {"normalizer": {"type": "Prepend", "prepend": "a" * 10**7}},
    "prepended twice": SPACED
    | sequence("normalizer", *[{"type": "Prepend", "prepend": "b" * 10**5}] * 20),
    "normalizer of every place": SPACED | {"normalizer": replaced("b" * 10**5, "Regex", "")},
    "decoder to megabytes": {"decoder": replaced("b" * 10**7)},
    "decoders in a row": sequence("decoder", *[replaced("aaaaaaaaaa")] * 9),
    "decoders doubling": sequence("decoder", *[replaced("aa")] * 40),
    "decoder of every place": {"decoder": replaced("b" * 10**6, "Regex", ".")},
    "post-processor of 100": template(100),
    "post-processor of 100,000": template(10**5),
    "padding": padded(10**9),
    "more padding": padded(2**62),
    "little padding": padded(10**5),
    "nested plus": split("(a+)+$"),
    "nested star": split("(a*)*$"),
    "alternatives": split("(a|a)*$"),
    "three groups": split("(a|aa|aaa)+$"),
    "words": split(r"(\w+\s?)+$"),
    "digits": split(r"(0+0+)+$"),
    "letters": split("([a-z]+)*$"),
    "regex of the normalizer": {"normalizer": replaced("b", "Regex", "(a+)+$")},
    "regex of the decoder": SPACED
    | sequence("decoder", {"type": "Fuse"}, replaced("b", "Regex", "(a|a)*$")),
    "long token": {"model": MODEL | {"vocab": WORDS | {"c" * 10**6: 4}}},
    "hole in the byte table": {"pre_tokenizer": {"type": "ByteLevel"}, "model": 3},
    "no such part": {"normalizer": {"type": "Bomb"}},
    "unknown token missing": {"model": {"type": "Unigram", "unk_id": 9, "vocab": [["a", 0.0]]}},
    "broken map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAP////8="}},
}
SLOW = [name for name in TOKENIZERS if name not in ("nested plus", "decoder to megabytes")]


def write(directory: Path, changes: dict) -> Path:
    (directory / "tokenizer.json").write_text(json.dumps(GOOD | changes))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    )
    return directory


def processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_folder", lambda: tmp_path / "cache")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in TOKENIZERS],
)
def test_a_tokenizer_bomb_is_refused(tmp_path, name):
    directory = write(tmp_path, TOKENIZERS[name])
    began = processor_seconds()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError) as error:
        tokenizers.load(directory)
    assert processor_seconds() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18
    assert len(str(error.value)) < 1500


def test_a_good_tokenizer_is_tried_once(tmp_path, monkeypatch):
    assert tokenizers.load(write(tmp_path, {})).encode("a b") == [2, 3]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    probe._require_harmless.cache_clear()
    monkeypatch.setattr(probe.subprocess, "Popen", None)
    probe.require_harmless(tmp_path / "tokenizer.json", "")


def entry(start: int, end: int, dtype: object = "F32", shape: object = (1,)) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [start, end]})


HEADERS = {
    "dtype of a number": (f'{{"a":{entry(0, 4, 3)}}}', 4),
    "dtype of a list": (f'{{"a":{entry(0, 4, ["F32"])}}}', 4),
    "unknown dtype": (f'{{"a":{entry(0, 4, "F33")}}}', 4),
    "small shape": (f'{{"a":{entry(0, 8)}}}', 8),
    "huge shape": (f'{{"a":{entry(0, 4, shape=[2**40, 2**40])}}}', 4),
    "overlap": (f'{{"a":{entry(0, 4)},"b":{entry(0, 4)}}}', 4),
    "partial overlap": (f'{{"a":{entry(0, 8, shape=[2])},"b":{entry(4, 8)}}}', 8),
    "gap": (f'{{"a":{entry(0, 4)},"b":{entry(8, 12)}}}', 12),
    "duplicate": (f'{{"a":{entry(0, 4)},"a":{entry(0, 4)}}}', 4),
    "trailing bytes": (f'{{"a":{entry(0, 4)}}}', 9),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_no_layout_is_refused(tmp_path, name):
    text, size = HEADERS[name]
    data = len(text).to_bytes(8, "little") + text.encode() + bytes(size)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(InputError):
        safetensors_files.find_tensors(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rope_theta": float("nan")},
        {"rope_theta": float("inf")},
        {"rope_theta": -1.0},
        {"rms_norm_eps": float("inf")},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1e-6},
        {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}},
    ],
)
def test_numbers_that_would_spoil_every_logit_are_refused(wrong):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    source = {"model_type": "llama", "num_attention_heads": 2} | sizes | wrong
    with pytest.raises(InputError, match=next(iter(wrong)) + "|factor"):
        families.read_config(source, "float32", "float32")
