"""Every family against transformers, in float32 on CPUs: load, compute, save again."""

import copy
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.decoders import CONFIGS, LENGTH, families, plain, tiny, tokens_of
from tpu_rl import models
from tpu_rl.models.hf import safetensors_files
from tpu_rl.models.moe import router
from tpu_rl.train import sharding

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=families(at_night=False))
def checkpoint(request, tmp_path_factory):
    """Return (family, a random transformers model of it, the directory it was saved to)."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(CONFIGS[request.param]))
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for weight in theirs.parameters():  # norms and biases too, which start as ones and zeros
            weight.add_(0.2 * torch.randn_like(weight))
        for name, buffer in theirs.named_buffers():
            if name.endswith(("correction_bias", "layer_scalar")):
                buffer.add_(0.2 * torch.randn_like(buffer))
    directory = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(directory, safe_serialization=True)
    return request.param, theirs, directory


def their_logits(theirs, tokens, padding=0):
    """Return logits [T, V] of one sequence with that many tokens of left padding."""
    mask = torch.tensor([[0] * padding + [1] * (len(tokens) - padding)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = theirs(
            torch.tensor(np.asarray(tokens)[None], dtype=torch.long),
            attention_mask=mask,
            position_ids=positions,
        )
    return out.logits[0].numpy()


def test_logits_equal_those_of_transformers(checkpoint):
    """Rows: whole (beyond the window of 5), left-padded, and two sequences packed before right
    padding."""
    family, theirs, directory = checkpoint
    model, params = models.load(directory)
    assert dataclasses.replace(model.config, source="") == dataclasses.replace(
        tiny(family).model.config, source=""
    )

    tokens = np.array(tokens_of((3, LENGTH)))
    positions, segments, branches = (np.array(part) for part in plain(3))
    segments[1, :6], positions[1] = 0, [0] * 6 + [*range(11)]
    segments[2], positions[2] = [1] * 8 + [2] * 6 + [0] * 3, [*range(8), *range(6), 0, 0, 0]
    ours = np.asarray(tiny(family).logits(params, tokens, positions, segments, branches))
    assert np.isfinite(ours).all()

    pairs = [
        (ours[0], their_logits(theirs, tokens[0])),
        (ours[1, 6:], their_logits(theirs, tokens[1], padding=6)[6:]),
        (ours[2, :8], their_logits(theirs, tokens[2, :8])),
        (ours[2, 8:14], their_logits(theirs, tokens[2, 8:14])),
    ]
    for mine, other in pairs:
        assert np.abs(mine - other).max() < 1e-4 * np.abs(other).max()


def test_saved_models_load_in_transformers(checkpoint, tmp_path):
    family, theirs, directory = checkpoint
    model, params = models.load(directory)
    models.save(tmp_path / "saved", model, params)
    back, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    back.eval()
    assert back.dtype == torch.float32
    tokens = tokens_of((LENGTH,))
    np.testing.assert_array_equal(their_logits(back, tokens), their_logits(theirs, tokens))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_saved_in_16_bits_and_shards_load_in_transformers(dtype, checkpoint, tmp_path):
    """The same numbers, rounded once, as transformers itself rounds them."""
    family, theirs, directory = checkpoint
    model, params = models.load(directory)
    models.save(tmp_path / "saved", model, params, dtype=dtype, max_shard_bytes=20_000)
    assert len([*(tmp_path / "saved").glob("*.safetensors")]) > 1
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert back.dtype == getattr(torch, dtype)
    rounded = dict(theirs.named_parameters())
    for name, weight in back.named_parameters():
        # In float16, transformers keeps the norms of some families in float32.
        expected = rounded[name].to(back.dtype).to(weight.dtype)
        torch.testing.assert_close(weight, expected, rtol=0, atol=0)


def require_same_text_logits(theirs, family, directory):
    """Save a model with a vision tower, and require equal logits of it and its text model here."""
    theirs.save_pretrained(directory)
    _, params = models.load(directory)
    tokens = tokens_of((3, LENGTH)) % 128
    ours = np.asarray(tiny(family).logits(params, tokens, *plain(3)))[0]
    with torch.no_grad():
        other = theirs(torch.tensor(np.asarray(tokens)[:1], dtype=torch.long)).logits[0].numpy()
    assert np.abs(ours - other).max() < 1e-4 * np.abs(other).max()


def test_gemma3_with_images_is_read_as_text(tmp_path):
    """The checkpoint has a vision tower and the names that transformers writes today."""
    text = CONFIGS["gemma3"]
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=130
    )
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    require_same_text_logits(theirs, "gemma3", tmp_path)

    # PEFT finds the modules of an adapter by the pattern, and its tensors by their names.
    model = models.with_lora(
        models.from_config(tmp_path), models.LoraConfig(3, targets=("q_proj", "down_proj"))
    )
    adapters = models.random_adapters(
        model, jax.random.key(0), sharding.make_mesh(devices=jax.devices()[:1])
    )
    models.save_adapters(tmp_path / "adapter", model, adapters, str(tmp_path))
    pattern = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())[
        "target_modules"
    ]
    found = {name for name, _ in theirs.named_modules() if re.fullmatch(pattern, name)}
    stored = safetensors_files.read_header(tmp_path / "adapter" / "adapter_model.safetensors")
    assert found == {name.removeprefix("base_model.model.").split(".lora_")[0] for name in stored}
    assert len(found) == 2 * text["num_hidden_layers"]


@pytest.mark.parametrize(
    "family",
    [
        "gemma4_moe",
        pytest.param("gemma4_small", marks=pytest.mark.nightly),
    ],
)
def test_gemma4_with_images_is_read_as_text(family, tmp_path):
    """The small models hear, too."""
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    vision |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    towers = {"vision_config": vision}
    if family == "gemma4_small":
        audio = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        towers["audio_config"] = audio | {"output_proj_dims": 8}
    text = copy.deepcopy(CONFIGS[family]) | {"use_bidirectional_attention": "vision"}
    config = transformers.Gemma4Config(text_config=text, **towers)
    theirs = transformers.Gemma4ForConditionalGeneration(config).eval()
    require_same_text_logits(theirs, family, tmp_path)


def test_bfloat16_checkpoints_load_without_loss(tmp_path):
    config = transformers.AutoConfig.for_model(**copy.deepcopy(CONFIGS["qwen3"]))
    theirs = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    expected = theirs.model.layers[1].mlp.up_proj.weight.float().detach().numpy().T
    for dtype in ("float32", "bfloat16"):
        _, params = models.load(tmp_path, dtype=dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        np.testing.assert_array_equal(
            params["layers"]["layer_0"]["up"][1].astype(jnp.float32), expected
        )


def test_balance_loss_equals_that_of_transformers():
    """Both get the same logits of four layers, with padding."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    noise = np.random.default_rng(0)
    logits = [noise.standard_normal((3, 7, 5), np.float32) for _ in range(4)]
    mask = np.arange(7)[None, :] < np.array([[7], [4], [1]])
    layers = []
    for layer in logits:
        probabilities = jax.nn.softmax(layer)
        chosen = jax.lax.top_k(probabilities, 2)[1]
        layers.append(router.usage(chosen, probabilities, jnp.asarray(mask)))
    found = router.balance(jax.tree.map(lambda *parts: jnp.stack(parts), *layers))
    theirs = tuple(torch.tensor(layer).reshape(-1, 5) for layer in logits)
    expected = load_balancing_loss_func(theirs, 5, 2, torch.tensor(mask).long())
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
