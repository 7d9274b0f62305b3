"""Weights in MXFP4: against transformers, and a model of gpt-oss whose files have them."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.fixtures.decoders import CONFIGS
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.models.hf import mxfp4, safetensors_files

CONFIG = CONFIGS["gpt_oss"] | {"hidden_size": 64, "intermediate_size": 32}
QUANTIZED = CONFIG | {"quantization_config": {"quant_method": "mxfp4"}}


def random_pair(noise, experts, outputs, inputs):
    blocks = noise.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    return blocks, noise.integers(117, 130, blocks.shape[:-1], np.uint8)


def write(path, tensors):
    """Write a file of numpy arrays. Our own writer knows no bytes."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)


@pytest.fixture
def quantized(tmp_path):
    """Return a model directory with experts in MXFP4, and the numbers in them."""
    model = models.from_config(CONFIG)
    models.save(tmp_path / "model", model, model.init(jax.random.key(0)))
    path = tmp_path / "model" / "model.safetensors"
    tensors = {
        name: np.array(stored.read())
        for name, stored in safetensors_files.read_header(path).items()
    }
    noise = np.random.default_rng(0)
    numbers = {}
    for name in [name for name in tensors if name.endswith("_proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = random_pair(noise, experts, outputs, inputs)
        tensors |= {name + "_blocks": blocks, name + "_scales": scales}
        nibbles = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
        values = mxfp4.VALUES[nibbles] * 2.0 ** (scales[..., None].astype(np.float32) - 127)
        numbers[name] = values.reshape(experts, outputs, inputs).swapaxes(1, 2)
    write(path, tensors)
    (tmp_path / "model" / "config.json").write_text(json.dumps(QUANTIZED))
    return tmp_path / "model", numbers


def test_values_are_those_of_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = random_pair(np.random.default_rng(0), 3, 5, 64)
    blocks[0, 0] = np.arange(32).reshape(2, 16) * 8 + 7
    write(tmp_path / "model.safetensors", {"w_blocks": blocks, "w_scales": scales})
    ours = mxfp4.join(safetensors_files.find_tensors(tmp_path))
    assert {*ours} == {"w"}
    expected = theirs.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    found = ours["w"].read()
    assert found.dtype == ml_dtypes.bfloat16
    assert found.shape == ours["w"].shape == expected.shape == (3, 64, 5)
    np.testing.assert_array_equal(found.astype(np.float32), expected.float().numpy())


@pytest.mark.slow
def test_a_quantized_model_is_loaded_and_saved_without_quantization(quantized, tmp_path):
    directory, numbers = quantized
    assert models.file_dtype(directory) == "bfloat16"
    model, params = models.load(directory)
    layer = params["layers"]["layer_0"]
    gate_up = numbers["model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(layer["expert_gate"][0], gate_up[..., 0::2])
    np.testing.assert_array_equal(layer["expert_up"][0], gate_up[..., 1::2])
    down = numbers["model.layers.0.mlp.experts.down_proj"]
    np.testing.assert_array_equal(layer["expert_down"][0], down)
    models.save(tmp_path / "saved", model, params)
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path / "saved")[1], params)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_scales_that_do_not_fit_are_refused(tmp_path):
    blocks, scales = random_pair(np.random.default_rng(0), 3, 5, 64)
    for tensors in (
        {"w_blocks": blocks},
        {"w_blocks": blocks, "w_scales": scales[:2]},
        {"w_blocks": blocks, "w_scales": scales.astype(np.float32)},
        {"w_blocks": scales, "w_scales": scales},
    ):
        write(tmp_path / "model.safetensors", tensors)
        with pytest.raises(InputError, match="w_blocks and its scales do not fit"):
            mxfp4.join(safetensors_files.find_tensors(tmp_path))


def test_other_quantizations_are_refused():
    for settings in ({"quant_method": "fp8"}, {"bits": 4}, "mxfp4"):
        with pytest.raises(InputError, match="quantization_config"):
            models.from_config(CONFIG | {"quantization_config": settings})
    with pytest.raises(InputError, match="quantization_config"):
        models.from_config(CONFIGS["llama3"] | {"quantization_config": {"quant_method": "mxfp4"}})
