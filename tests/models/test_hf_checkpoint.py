"""Model directories: which ones load, what `save` writes, and how damaged ones are refused."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

from tests.fixtures.decoders import CONFIGS, every_family, tiny
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.models.hf import checkpoint, safetensors_files


def assert_same(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.fixture
def saved(tmp_path):
    """Return the directory of a saved tiny model, which the test may damage."""
    model, params, _, _ = tiny("llama3")
    models.save(tmp_path / "model", model, params)
    return tmp_path / "model"


@every_family
def test_save_and_load_is_bit_exact(family, tmp_path):
    model, params, _, _ = tiny(family)
    models.save(tmp_path / "model", model, params)
    again, loaded = models.load(tmp_path / "model")
    assert_same(loaded, params)
    assert again.config.attention == model.config.attention
    assert again.config.layer_types == model.config.layer_types
    assert again.axes == model.axes


def test_bfloat16_is_written_as_bfloat16(tmp_path):
    model = models.from_config(CONFIGS["llama2"], "bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny("llama2").params)
    models.save(tmp_path / "model", model, params)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    _, loaded = models.load(tmp_path / "model", dtype="bfloat16", param_dtype="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype("float32")}
    assert_same(loaded, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))


def test_float16_is_read(saved):
    path = saved / "model.safetensors"
    tensors = {
        name: np.array(stored.read())
        for name, stored in safetensors_files.read_header(path).items()
    }
    halves = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    layout = {name: (half.dtype, half.shape) for name, half in halves.items()}
    safetensors_files.write_file(path, layout, halves.values())
    _, loaded = models.load(saved)
    np.testing.assert_array_equal(
        loaded["embedding"], halves["model.embed_tokens.weight"].astype(np.float32)
    )


def test_large_models_are_written_to_several_files(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 30_000)
    model, params = models.load(saved)
    models.save(tmp_path / "parts", model, params)
    files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert_same(models.load(tmp_path / "parts")[1], params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_is_written_in_shards_that_safetensors_reads(dtype, saved, tmp_path):
    """Every number is the rounded one, in small files whose index is complete."""
    model, params = models.load(saved)
    target = tmp_path / "parts"
    models.save(target, model, params, dtype=dtype, max_shard_bytes=20_000, card="# Card\n")
    index = json.loads((target / safetensors_files.INDEX).read_text())
    whole = safetensors_files.read_header(saved / "model.safetensors")
    expected_dtype = safetensors_files.DTYPE_NAMES[dtype]
    assert index["weight_map"].keys() == whole.keys()
    assert len(set(index["weight_map"].values())) > 2
    num_bytes = 0
    for file in sorted(set(index["weight_map"].values())):
        with safetensors.safe_open(target / file, "numpy") as tensors:
            names = tensors.keys()
            assert names == [name for name in names if index["weight_map"][name] == file]
            assert len(names) == 1 or (target / file).stat().st_size < 20_000 + 4_000
            for name in names:
                stored = tensors.get_tensor(name)
                assert stored.dtype == expected_dtype
                np.testing.assert_array_equal(stored, whole[name].read().astype(expected_dtype))
                num_bytes += stored.nbytes
    assert index["metadata"]["total_size"] == num_bytes
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == dtype
    assert (target / "README.md").read_text() == "# Card\n"
    assert models.file_dtype(target) == dtype


def test_numbers_beyond_float16_are_refused_and_leave_nothing(saved, tmp_path):
    model, params = models.load(saved)
    large = params | {"final_norm": params["final_norm"].at[0].set(1e5)}
    with pytest.raises(InputError, match="model.norm.weight does not fit float16") as error:
        models.save(tmp_path / "half", model, large, dtype="float16")
    assert "1e+05" in error.value.why
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    models.save(tmp_path / "half", model, large, dtype="bfloat16")


def test_the_dtype_of_files_is_that_of_most_numbers(saved):
    """Some checkpoints in 16 bits have norms in 32."""
    path = saved / "model.safetensors"
    tensors = {
        name: np.array(stored.read(), np.float32 if "norm" in name else np.float16)
        for name, stored in safetensors_files.read_header(path).items()
    }
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    safetensors_files.write_file(path, layout, tensors.values())
    assert models.file_dtype(saved) == "float16"
    path.unlink()
    with pytest.raises(InputError, match="no safetensors file"):
        models.file_dtype(saved)


def test_saving_replaces_a_model_and_nothing_else(saved, tmp_path):
    model, params = models.load(saved)
    changed = params | {"final_norm": params["final_norm"] + 1}
    models.save(saved, model, changed)
    assert_same(models.load(saved)[1], changed)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing temporary is left
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("...")
    with pytest.raises(InputError, match="not a model directory"):
        models.save(tmp_path / "thesis", model, params)


def test_a_failed_save_leaves_the_old_model(saved, tmp_path):
    class Broken:
        def save_pretrained(self, path):
            raise RuntimeError("disk on fire")

    model, params = models.load(saved)
    with pytest.raises(RuntimeError, match="disk on fire"):
        models.save(
            saved, model, params | {"final_norm": params["final_norm"] + 1}, tokenizer=Broken()
        )
    assert_same(models.load(saved)[1], params)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_vocabulary_beyond_the_tokenizer_is_no_token(saved):
    vocab = {f"t{i}": i for i in range(100)}
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocab},
        "added_tokens": [{"id": 104, "content": "<eos>"}],
    }
    (saved / "tokenizer.json").write_text(json.dumps(tokenizer))
    model, params = models.load(saved)
    assert (model.config.vocab.size, model.config.vocab.valid) == (131, 105)
    logits = model.logits(params, jnp.ones((1, model.config.hidden_size)))
    assert float(jax.nn.softmax(logits)[0, 105:].max()) == 0.0


def test_only_special_tokens_may_lie_beyond_the_embedding(saved):
    vocab = {f"t{i}": i for i in range(100)}
    for special in (True, False):
        tokenizer = {
            "model": {"vocab": vocab},
            "added_tokens": [{"id": 131, "content": "<x>", "special": special}],
        }
        (saved / "tokenizer.json").write_text(json.dumps(tokenizer))
        if special:
            assert models.from_config(saved).config.vocab.valid == 131
        else:
            with pytest.raises(InputError, match="knows 132 ids and the model's embedding 131"):
                models.from_config(saved)


def edit_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = {
        name: np.array(stored.read())
        for name, stored in safetensors_files.read_header(path).items()
    }
    change(tensors)
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    safetensors_files.write_file(path, layout, tensors.values())


def test_misfits_are_named(saved):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(40, np.float32)
        tensors["model.norm.weight"] = np.zeros(7, np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(
            5, np.float32
        )  # harmless

    edit_tensors(saved, change)
    with pytest.raises(InputError) as error:
        models.load(saved)
    assert error.value.why == (
        "1 missing: model.layers.1.mlp.up_proj.weight; "
        "1 not part of the model: model.layers.0.self_attn.q_proj.bias; "
        "1 of another shape: model.norm.weight (7,) instead of (40,)"
    )


def test_a_tied_model_may_have_a_copy_of_its_unembedding(tmp_path):
    model, params, _, _ = tiny("qwen2")
    models.save(tmp_path / "model", model, params)
    edit_tensors(
        tmp_path / "model",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}),
    )
    assert_same(models.load(tmp_path / "model")[1], params)
    edit_tensors(tmp_path / "model", lambda tensors: tensors["lm_head.weight"][130].fill(0))
    with pytest.raises(InputError, match="lm_head.weight is not the embedding"):
        models.load(tmp_path / "model")
    edit_tensors(
        tmp_path / "model",
        lambda tensors: tensors.update({"lm_head.weight": np.zeros((7, 40), np.float32)}),
    )
    with pytest.raises(InputError, match="lm_head.weight is not the embedding"):
        models.load(tmp_path / "model")


def write(name, content):
    def change(directory):
        (directory / name).write_bytes(content)

    return change


def pickle_only(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def index(content):
    def change(directory):
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        write("model.safetensors.index.json", content)(directory)

    return change


def index_to(name):
    return index(json.dumps({"weight_map": {"model.norm.weight": name}}).encode())


def cut_short(directory):
    os.truncate(
        directory / "model.safetensors", (directory / "model.safetensors").stat().st_size - 4
    )


def gguf_only(directory):
    (directory / "model.safetensors").rename(directory / "model-Q4_K_M.gguf")


DAMAGE = [
    (gguf_only, "no safetensors file.*it has GGUF files"),
    (pickle_only, r"no safetensors file.*only pickled weights \(pytorch_model.bin\)"),
    (
        write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "Git LFS pointer",
    ),
    (
        write("model.safetensors", b"<!DOCTYPE html><html>404</html>"),
        "model.safetensors is not.*web page",
    ),
    (write("model.safetensors", b"\x08\0\0\0\0\0\0\0not json"), "no readable header"),
    (write("model.safetensors", b""), "length is impossible"),
    (cut_short, "cut short"),
    (index_to("../model.safetensors"), "leads out of the model directory"),
    (index_to("/etc/passwd"), "leads out of the model directory"),
    (index_to("model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors is missing"),
    (index(b"[]"), "not an index"),
    (write("model.safetensors.index.json", b"[]"), None),
    (write("config.json", b"{"), "config.json is not JSON"),
    (write("config.json", b"[]"), "config.json is not a JSON object"),
    (lambda directory: (directory / "config.json").unlink(), "no config.json"),
    (lambda directory: (directory / "model.safetensors").rename(directory / "a.safetensors"), None),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damaged_directories(saved, damage, message):
    damage(saved)
    if (
        message is None
    ):  # another name for the only file is no damage, nor is an index beside a whole model
        assert_same(models.load(saved)[1], tiny("llama3").params)
        return
    with pytest.raises(InputError, match="(?s)" + message):
        models.load(saved)


def test_integer_weights_are_refused(saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(InputError, match="type I32 are not supported"):
        models.load(saved)


def test_hub_ids_come_from_the_local_cache(saved, tmp_path, monkeypatch):
    """The snapshot has the layout of the hub's client; there is no network."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    snapshot = cache / "models--owner--tiny" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    saved.rename(snapshot)
    (cache / "models--owner--tiny" / "refs").mkdir()
    (cache / "models--owner--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_same(models.load("owner/tiny")[1], tiny("llama3").params)
    with pytest.raises(InputError, match="neither a directory nor a model in the local cache"):
        models.load("owner/absent")
    for name in ("my--model", "owner/a..b"):  # which the hub's client takes for no id
        with pytest.raises(InputError, match="neither a directory nor a model in the local cache"):
            models.load(name)
    with pytest.raises(InputError, match="no such model directory"):
        models.load(tmp_path / "absent")
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="the folder runs of runs holds no nope") as error:
        models.load("runs/nope")
    assert "give one of one" in error.value.fix


@pytest.mark.slow
def test_modules_for_several_tokens_are_left_out(tmp_path):
    """DeepSeek-V3 has them as further layers."""
    source = CONFIGS["deepseek_v3"] | {"num_nextn_predict_layers": 1}
    model, params = models.from_config(source), tiny("deepseek_v3").params
    models.save(tmp_path / "model", tiny("deepseek_v3").model, params)
    path = tmp_path / "model" / "model.safetensors"
    tensors = {
        name: np.array(stored.read())
        for name, stored in safetensors_files.read_header(path).items()
    }
    tensors |= {"model.layers.3.eh_proj.weight": np.ones((40, 80), np.float32)}
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    safetensors_files.write_file(path, layout, tensors.values())
    with pytest.raises(InputError, match=r"1 not part of the model: model.layers.3.eh_proj"):
        models.load(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(source))
    assert_same(models.load(tmp_path / "model")[1], params)
    models.save(tmp_path / "again", model, params)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0


@pytest.mark.slow
def test_images_and_modules_for_several_tokens_of_qwen3_5_are_left_out(tmp_path):
    """The names of a published checkpoint, which has a language model inside."""
    text = CONFIGS["qwen3_5"] | {"mtp_num_hidden_layers": 1}
    params = tiny("qwen3_5").params
    models.save(tmp_path / "text", tiny("qwen3_5").model, params)
    tensors = {
        name.replace("model.", "model.language_model."): np.array(stored.read())
        for name, stored in safetensors_files.read_header(
            tmp_path / "text" / "model.safetensors"
        ).items()
    }
    for name in ("model.visual.pos_embed.weight", "mtp.layers.0.input_layernorm.weight"):
        tensors[name] = np.ones(3, np.float32)
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    whole = tmp_path / "whole"
    whole.mkdir()
    safetensors_files.write_file(whole / "model.safetensors", layout, tensors.values())
    source = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
    (whole / "config.json").write_text(json.dumps(source))
    model, found = models.load(whole)
    assert model.config.multimodal
    assert_same(found, params)
    models.save(tmp_path / "again", model, found)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["mtp_num_hidden_layers"] == 0


@pytest.mark.slow
def test_experts_of_qwen3_5_are_read_from_one_tensor(tmp_path):
    """Published checkpoints have all experts of a layer in two tensors."""
    model, params = tiny("qwen3_5_moe").model, tiny("qwen3_5_moe").params
    models.save(tmp_path / "model", model, params)
    path = tmp_path / "model" / "model.safetensors"
    tensors = {
        name: np.array(stored.read())
        for name, stored in safetensors_files.read_header(path).items()
    }
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}.{expert}.{name}.weight") for expert in range(6)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{prefix}.down_proj"] = down
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    safetensors_files.write_file(path, layout, tensors.values())
    assert_same(models.load(tmp_path / "model")[1], params)
