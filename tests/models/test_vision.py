"""Models that read images: their features, and where token ids refer to them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.models.vision import towers
from tpu_rl.types import FEATURES

CONFIG = {
    "model_type": "llava",
    "image_token_index": 19,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
    "text_config": {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 20,
    },
}
VOCABULARY = 20
PER_IMAGE = 4
IDS = [3, *range(VOCABULARY, VOCABULARY + 2 * PER_IMAGE), 5, 6]
"""A text with two images."""


def images(count=2, seed=0, size=8):
    return np.random.default_rng(seed).normal(size=(count, 3, size, size)).astype(np.float32)


def model_and_params(config=CONFIG):
    model = models.from_config(config)
    return model, model.init(jax.random.key(0))


def hidden(model, params, tokens, pixels):
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.hidden(
        params, tokens, positions, jnp.ones_like(tokens), 0 * tokens, images=jnp.asarray(pixels)
    )


@pytest.mark.slow
def test_cached_tokens_see_the_same_images_as_packed_ones():
    model, params = model_and_params()
    tokens: Any = np.array([IDS])
    packed = model.logits(params, hidden(model, params, tokens, images()))
    reading = params | {FEATURES: models.image_features(model)(params, images())}
    cache = model.init_cache(reading, 1, 16)
    positions = jnp.arange(len(IDS))[None]
    trunk = jnp.zeros((1, len(IDS)), int)
    parts = []
    for part, count in ((slice(0, 9), 9), (slice(9, 11), 2)):
        inputs = (jnp.asarray(tokens)[:, part], positions[:, part], trunk[:, part])
        logits, cache = model.extend(reading, cache, *inputs, jnp.array([count]))
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), packed, atol=1e-5)


def test_an_image_matters_and_ids_choose_among_images():
    model, params = model_and_params()
    both = hidden(model, params, [IDS], images())
    swapped = [3, *IDS[1 + PER_IMAGE : 1 + 2 * PER_IMAGE], *IDS[1 : 1 + PER_IMAGE], 5, 6]
    np.testing.assert_allclose(hidden(model, params, [swapped], images()[::-1]), both, atol=1e-5)
    assert np.abs(hidden(model, params, [swapped], images()) - both).max() > 1e-3


@pytest.mark.slow
def test_ids_without_their_image_are_never_silent():
    model, params = model_and_params()
    assert np.isnan(np.asarray(hidden(model, params, [IDS], images(1)))).any()


@pytest.mark.slow
def test_gradients_reach_the_tower_and_the_projector():
    model, params = model_and_params()
    gradients = jax.grad(lambda p: jnp.sum(jnp.sin(hidden(model, p, [IDS], images()))))(params)
    tower = gradients["vision_layers"]["layer_0"]["vision_query"]
    # The last layer is behind the states that are the features.
    assert [bool(np.abs(layer).max() > 0) for layer in tower] == [True, True, False]
    for name in ("vision_patch", "vision_position", "projector_in", "projector_out_bias"):
        assert np.abs(gradients["vision"][name]).max() > 0


@pytest.mark.slow
def test_a_directory_is_written_as_it_was_read(tmp_path):
    model, params = model_and_params()
    models.save(tmp_path / "model", model, params)
    again, loaded = models.load(tmp_path / "model")
    assert again.config.vision is not None
    for path, leaf in jax.tree.leaves_with_path(params):
        np.testing.assert_array_equal(leaf, dict(jax.tree.leaves_with_path(loaded))[path])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vision_config", {"model_type": "pixtral"}, "vision tower is not supported"),
        ("vision_feature_layer", [-2, -1], "vision_feature_layer"),
        ("projector_hidden_act", "swish", "projector_hidden_act"),
        ("vision_config", {"model_type": "clip_vision_model", "patch_size": 5}, "patch_size"),
        ("vision_config", {"model_type": "clip_vision_model", "hidden_size": -1}, "hidden_size"),
    ],
)
def test_other_towers_are_refused(field, value, message):
    with pytest.raises(InputError, match=message):
        models.from_config(CONFIG | {field: value})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tower", "text", "other"),
    [
        pytest.param({}, {}, {}, marks=pytest.mark.nightly),
        ({"hidden_act": "gelu"}, {"num_key_value_heads": 1}, {"vision_feature_layer": -1}),
        (
            {"image_size": 12, "num_hidden_layers": 4},
            {"model_type": "qwen2"},
            {"vision_feature_select_strategy": "full", "multimodal_projector_bias": False},
        ),
    ],
)
def test_logits_and_gradients_are_transformers(tmp_path, tower, text, other):
    torch = pytest.importorskip("torch")
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = CONFIG | {
        "vision_config": CONFIG["vision_config"] | tower,
        "text_config": CONFIG["text_config"] | {"num_key_value_heads": 2} | text,
        **other,
    }
    torch.manual_seed(0)
    theirs: Any = LlavaForConditionalGeneration(LlavaConfig.from_dict(config)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = models.load(tmp_path / "theirs")
    vision = model.config.vision
    per_image = vision.features_per_piece
    pixels = images(size=vision.image_size)
    ids = [3, *[19] * per_image, 4, *[19] * per_image, 5, 6]
    ours = np.array([ids])
    ours[ours == 19] = VOCABULARY + np.arange(2 * per_image)
    with torch.enable_grad():
        outputs = theirs(input_ids=torch.tensor([ids]), pixel_values=torch.tensor(pixels))
        outputs.logits.sin().sum().backward()

    def total(params):
        logits = model.logits(params, hidden(model, params, ours, pixels))
        return jnp.sin(logits).sum(), logits

    with jax.default_matmul_precision("highest"):
        (_, logits), gradients = jax.value_and_grad(total, has_aux=True)(params)
    np.testing.assert_allclose(logits, outputs.logits.detach().numpy(), atol=1e-5)
    tower_module = theirs.model.vision_tower
    projector = theirs.model.multi_modal_projector
    for ours_gradient, parameter in (
        (gradients["vision"]["vision_patch"], tower_module.embeddings.patch_embedding.weight),
        (gradients["vision"]["projector_in"], projector.linear_1.weight),
    ):
        np.testing.assert_allclose(ours_gradient, parameter.grad.numpy(), rtol=1e-3, atol=1e-5)
    models.save(tmp_path / "ours", model, params)
    loaded: Any = LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    report = loaded[1]
    assert not any(report.values())


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, pytest.param(48, marks=pytest.mark.nightly)])
def test_the_kernel_of_the_tower_computes_the_same_features_and_gradients(size):
    """With a class token there are 5 patches, or 145: less and more than a block of 128."""
    tower = CONFIG["vision_config"] | {"image_size": size, "num_hidden_layers": 2}
    model, params = model_and_params(CONFIG | {"vision_config": tower, "vision_feature_layer": -1})
    kernel = models.with_attention_kernel(model, "interpreted")
    pixels = images(2, size=size)

    def value_and_gradient(model):
        def loss(params):
            states = towers.features(model.config, params, pixels).states
            return (states * jnp.sin(jnp.arange(states.size).reshape(states.shape))).sum()

        return jax.jit(jax.value_and_grad(loss))(params)

    (expected, gradient), (found, found_gradient) = map(value_and_gradient, (model, kernel))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    for leaf, same in zip(jax.tree.leaves(found_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(leaf, same, atol=1e-6 * largest)
