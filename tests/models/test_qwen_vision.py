"""Qwen's towers: images of any size, rotary positions in rows and columns, DeepStack."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from tests.fixtures.qwen_models import CONFIGS, SIZES, VOCABULARY, config_of
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.models.layers import RopeConfig, attention_mask, rope_angles
from tpu_rl.models.vision import blocks
from tpu_rl.models.vision import features as image_features
from tpu_rl.types import FEATURES


def processed(height, width, seed=0):
    """What transformers' processor makes of a picture: patches of equal frames, merged 2 x 2."""
    noise = np.random.default_rng(seed).normal(size=(3, height, width)).astype(np.float32)
    grid = (height // 4, width // 4)
    patches = noise.reshape(3, grid[0] // 2, 2, 4, grid[1] // 2, 2, 4)
    patches = patches.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, 1, 16)
    pixels = np.repeat(patches, 2, axis=2).reshape(len(patches), -1)
    return {"pixel_values": pixels, "image_grid_thw": np.array([[1, *grid]])}


def text_with_images(model, sizes):
    """Return the ids of a text with images as transformers and as this library has them, the pieces
    of the images and what transformers' processor made of them."""
    theirs, ours, pieces, made = [], [], [], []
    for seed, (height, width) in enumerate(sizes):
        made.append(processed(height, width, seed))
        rows, (count,) = model.config.vision.pieces(made[-1])
        first = VOCABULARY + sum(map(len, pieces))
        theirs += [5, 92, *[90] * count, 93, 6]
        ours += [5, 92, *range(first, first + count), 93, 6]
        pieces.append(rows)
    return [*theirs, 7, 8], np.array([[*ours, 7, 8]]), np.concatenate(pieces), made


def positions_of(model, tokens, pieces):
    """Return the positions of `experience.layout` for rows that all read the same pieces."""
    advances = model.config.vision.advances(pieces)
    taken = np.where(tokens >= VOCABULARY, advances[np.maximum(tokens - VOCABULARY, 0)], 1)
    return np.cumsum(taken, axis=1) - taken


def hidden(model, params, tokens, pieces):
    positions = jnp.asarray(positions_of(model, tokens, pieces))
    tokens = jnp.asarray(tokens)
    ones = jnp.ones_like(tokens)
    return model.hidden(params, tokens, positions, ones, 0 * ones, images=jnp.asarray(pieces))


def test_positions_are_those_of_the_papers():
    """An image of 2 x 3 features between texts: rows and columns count from the text before, and
    the text goes on behind the longer side."""
    model = models.from_config(config_of("qwen2_5_vl"))
    _, tokens, pieces, _ = text_with_images(model, [(16, 24), (8, 8)])
    positions = positions_of(model, tokens, pieces)
    assert positions.tolist() == [[0, 1, *[2] * 6, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
    features = image_features.Features(
        jnp.zeros((7, 32)), None, image_features.grid_of(jnp.asarray(pieces))
    )
    found = image_features.rotary_positions(model.config, jnp.asarray(tokens), positions, features)
    time, row, column = np.moveaxis(np.asarray(found)[0, 2:8], -1, 0)
    assert time.tolist() == [2] * 6
    assert row.tolist() == [2, 2, 2, 3, 3, 3]
    assert column.tolist() == [2, 3, 4, 2, 3, 4]


def test_frequencies_turn_with_time_rows_or_columns():
    positions = jnp.array([[[1, 10, 100]]])
    plain = RopeConfig(sections=(2, 1, 1))
    axes = {"in turn": [1, 1, 10, 100], "alternating": [1, 10, 100, 1]}
    for expected, config in zip(
        axes.values(), (plain, RopeConfig(sections=(2, 1, 1), sections_alternate=True)), strict=True
    ):
        cos, _ = rope_angles(config, 8, positions)
        for i, position in enumerate(expected):
            alone, _ = rope_angles(RopeConfig(), 8, jnp.array([[position]]))
            assert cos[0, 0, i] == alone[0, 0, i]


def test_patches_see_all_of_their_segment_and_no_other():
    ids = jnp.array([1, 1, 1, 2, 3, 3])
    mask = attention_mask(*blocks.segments(ids), None)[0]
    np.testing.assert_array_equal(mask, ids[:, None] == ids[None])


def test_a_grid_of_another_model_is_refused():
    model = models.from_config(config_of("qwen3_vl"))
    made = processed(16, 16)
    with pytest.raises(ValueError, match="patches of 4 x 4 pixels"):
        model.config.vision.pieces(made | {"pixel_values": made["pixel_values"][:, :50]})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2_5_vl", {"vision_config": {"out_hidden_size": 48}}, "hidden_size = 48"),
        ("qwen2_5_vl", {"vision_config": {"depth": 0}}, "vision_config.depth"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [9]}}, "deepstack"),
        ("qwen3_vl", {"vision_config": {"num_position_embeddings": 24}}, "num_position"),
        ("qwen3_vl_moe", {"text_config": {"moe_intermediate_size": 16}}, "either way round"),
        ("qwen2_vl", {"text_config": {"use_sliding_window": True, "max_window_layers": 1}}, "use_"),
        (
            "qwen2_vl",
            {"text_config": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}},
            "mrope_section",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(family, changes, message):
    config = config_of(family)
    for part, fields in changes.items():
        config[part] = config[part] | fields
    with pytest.raises(InputError, match=message):
        models.from_config(config)


def test_older_files_have_the_fields_of_the_text_outside():
    config = config_of("qwen2_5_vl")
    flat = {**config, **config["text_config"], "tie_word_embeddings": True}
    del flat["text_config"]
    nested = models.from_config(config | {"tie_word_embeddings": True}).config
    found = models.from_config(flat).config
    assert found.vocab.tied
    assert found.rope == nested.rope
    assert "vocab_size" not in found.vision.source


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(n, marks=[pytest.mark.nightly] * (n != "qwen2_5_vl")) for n in CONFIGS],
)
def test_logits_and_gradients_are_transformers_for_images_of_five_sizes(tmp_path, family):
    torch = pytest.importorskip("torch")
    import transformers

    names = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    names["qwen3_vl_moe"] = "Qwen3VLMoe"
    config_class = getattr(transformers, names[family] + "Config")
    model_class = getattr(transformers, names[family] + "ForConditionalGeneration")
    config = {key: value for key, value in config_of(family).items() if key != "model_type"}
    torch.manual_seed(0)
    theirs: Any = model_class(config_class(**config)).eval()
    for parameter in theirs.parameters():
        parameter.data += (0.1 if parameter.ndim == 1 else 0.08) * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = models.load(tmp_path / "theirs")

    their_ids, tokens, pieces, made = text_with_images(model, SIZES)
    ids = torch.tensor([their_ids])
    kinds = (ids == 90).int()
    grids = torch.tensor(np.concatenate([image["image_grid_thw"] for image in made]))
    pixels = torch.tensor(np.concatenate([image["pixel_values"] for image in made]))
    inputs = {"mm_token_type_ids": kinds, "image_grid_thw": grids}
    with torch.enable_grad():
        outputs = theirs(input_ids=ids, pixel_values=pixels, **inputs)
        outputs.logits.sin().sum().backward()

    features = image_features.Features(
        jnp.zeros(()), None, image_features.grid_of(jnp.asarray(pieces))
    )
    positions = image_features.rotary_positions(
        model.config,
        jnp.asarray(tokens),
        jnp.asarray(positions_of(model, tokens, pieces)),
        features,
    )
    expected, _ = theirs.model.get_rope_index(ids, kinds, image_grid_thw=grids)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(positions), -1, 0), expected.numpy())

    def total(params):
        logits = model.logits(params, hidden(model, params, tokens, pieces))
        return jnp.sin(logits).sum(), logits

    with jax.default_matmul_precision("highest"):
        (_, logits), gradients = jax.value_and_grad(total, has_aux=True)(params)
        # The sampler counts positions in its cache.
        reading = params | {FEATURES: models.image_features(model)(params, pieces)}
        cache = model.init_cache(reading, 1, 128)
        split = tokens.shape[1] - 2
        sampled = []
        for part in (slice(0, split), slice(split, split + 1), slice(split + 1, split + 2)):
            new = jnp.asarray(tokens[:, part])
            place = jnp.arange(tokens.shape[1])[None, part]
            part_logits, cache = model.extend(
                reading, cache, new, place, 0 * new, jnp.array([new.shape[1]])
            )
            sampled.append(part_logits)
    np.testing.assert_allclose(logits, outputs.logits.detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(jnp.concatenate(sampled, 1), logits, atol=1e-4)
    tower = theirs.model.visual
    merger = tower.merger.linear_fc1 if family.startswith("qwen3_vl") else tower.merger.mlp[0]
    layers = gradients["vision_layers"]["layer_0"]
    attention = [layers[f"vision_{name}"][1] for name in ("query", "key", "value")]
    for ours, parameter in (
        (gradients["vision"]["vision_frames"], tower.patch_embed.proj.weight),
        (np.concatenate(attention), tower.blocks[1].attn.qkv.weight),
        (gradients["vision"]["projector_merge"], merger.weight),
    ):
        largest = np.abs(parameter.grad.numpy()).max()
        np.testing.assert_allclose(ours, parameter.grad.numpy(), atol=1e-4 * largest)
    models.save(tmp_path / "ours", model, params)
    written, faults = model_class.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(faults.values())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(written.state_dict()[name], tensor), name
    _, again = models.load(tmp_path / "ours")
    for path, leaf in jax.tree.leaves_with_path(params):
        np.testing.assert_array_equal(leaf, dict(jax.tree.leaves_with_path(again))[path])


@pytest.mark.slow
def test_pixels_and_counts_are_those_of_transformers_processor(tmp_path):
    import json

    from tpu_rl.tokenizers.images import ImageReader

    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(
            {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4}
            | {"min_pixels": 64, "max_pixels": 1024}
        )
    )
    model = models.from_config(config_of("qwen2_5_vl"))
    reader = ImageReader(str(tmp_path), 90, "", VOCABULARY, model.config.vision)
    pictures = [Image.new("RGB", size, (9, 99, 200)) for size in [(40, 24), (3, 5), (90, 90)]]
    pieces, layouts = reader.read(pictures)
    assert layouts == [(15,), (2,), (16,)]
    grid = image_features.grid_of(pieces)
    assert grid.rows[[0, 15, 17]].tolist() == [3, 2, 4]
    random = np.random.default_rng(1)
    sizes = [(24, 40), (1, 200), (200, 1), *random.integers(1, 150, (24, 2)).tolist()]
    pictures = [Image.new("RGB", tuple(size)) for size in sizes]
    assert reader.layouts(pictures) == reader.read(pictures)[1]
    with pytest.raises(InputError, match="image 1 of 1 cannot be read"):
        reader.layouts([Image.new("RGB", (2000, 4))])
