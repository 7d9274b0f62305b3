"""Gemma 4's tower: images of any size, which some layers see both ways."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.gemma4_models import CONFIGS, SIZES, VOCABULARY, config_of, processed
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.models import layers
from tpu_rl.models.decoder import param_shapes
from tpu_rl.models.decoder import random_params as random_tree
from tpu_rl.models.vision import features as image_features
from tpu_rl.sampler import SamplerConfig, SegmentConfig
from tpu_rl.sampler.conversation_sampler import ConversationSampler, TurnRequest
from tpu_rl.types import FEATURES


def text_with_images(config, sizes):
    """Return the ids of a text with images as transformers and as this library has them, the pieces
    of the images and what transformers' processor made of them."""
    tower = models.from_config(config, images=True).config.vision
    theirs, ours, pieces, made = [], [], [], []
    for seed, size in enumerate(sizes):
        made.append(processed(config, size, seed))
        rows, (count,) = tower.pieces(made[-1])
        first = VOCABULARY + sum(map(len, pieces))
        theirs += [5, 92, *[90] * count, 93, 6]
        ours += [5, 92, *range(first, first + count), 93, 6]
        pieces.append(rows)
    return [*theirs, 7, 8], np.array([[*ours, 7, 8]]), np.concatenate(pieces), made


def hidden(model, params, tokens, pieces):
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ones = jnp.ones_like(tokens)
    images = None if pieces is None else jnp.asarray(pieces)
    return model.hidden(params, tokens, positions, ones, 0 * ones, images=images)


def random_params(config):
    """Return params whose bounds clip something, and whose gains and biases are not all alike."""
    random = np.random.default_rng(0)

    def leaf(path, shape):
        name = path[-1].key
        noise = random.normal(size=shape.shape)
        if name.endswith(("_min", "_max")):
            return jnp.asarray(
                (1 + 0.2 * noise) * (1 if name.endswith("_max") else -1), jnp.float32
            )
        is_gain = name.endswith(("_norm", "_gain", "_scalar"))
        # Scores are not divided by anything, and large ones would magnify rounding.
        gain = 0.3 if name.endswith(("query_norm", "key_norm")) else float(is_gain)
        scale = 0.2 if is_gain or name.endswith("_bias") else max(shape.shape[-1:]) ** -0.5
        return jnp.asarray(gain + scale * noise, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, param_shapes(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_transformers_for_images_of_five_sizes(tmp_path, name):
    torch = pytest.importorskip("torch")
    import transformers

    config = config_of(name)
    named = {key: value for key, value in config.items() if key != "model_type"}
    # With some seeds an element is within rounding of its bound, and one of the two clips it.
    torch.manual_seed(1)
    model_class = transformers.Gemma4ForConditionalGeneration
    theirs: Any = model_class(transformers.Gemma4Config(**json.loads(json.dumps(named))))
    theirs = theirs.eval()
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += (0.1 if parameter.ndim == 1 else 0.15) * torch.randn_like(parameter)
        for key, buffer in theirs.named_buffers():
            if key.endswith(("_min", "_max")):
                buffer.fill_((1.5 if key.endswith("max") else -1.5) * float(torch.rand(()) + 0.5))
            elif key.endswith(("std_bias", "std_scale", "layer_scalar")):
                buffer += 0.2 * torch.randn_like(buffer)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = models.load(tmp_path / "theirs", images=True)

    their_ids, tokens, pieces, made = text_with_images(config, SIZES)
    ids = torch.tensor([their_ids])
    inputs = {
        key: torch.tensor(np.concatenate([image[key] for image in made]))
        for key in ("pixel_values", "image_position_ids")
    }
    inputs["mm_token_type_ids"] = (ids == 90).int()
    with torch.enable_grad():
        outputs = theirs(input_ids=ids, **inputs)
        outputs.logits.sin().sum().backward()
    expected = outputs.logits.detach().numpy()

    def total(params):
        logits = model.logits(params, hidden(model, params, tokens, pieces))
        return jnp.sin(logits).sum(), logits

    with jax.default_matmul_precision("highest"):
        (_, logits), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
        # The sampler reads a prompt at once, and then tokens one by one.
        reading = params | {FEATURES: models.image_features(model)(params, pieces)}
        cache, extend = model.init_cache(reading, 1, 128), jax.jit(model.extend)
        split = tokens.shape[1] - 2
        sampled = []
        for part in (slice(0, split), slice(split, split + 1), slice(split + 1, split + 2)):
            new = jnp.asarray(tokens[:, part])
            place = jnp.arange(tokens.shape[1])[None, part]
            part_logits, cache = extend(
                reading, cache, new, place, 0 * new, jnp.array([new.shape[1]])
            )
            sampled.append(part_logits)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    np.testing.assert_allclose(jnp.concatenate(sampled, 1), logits, atol=1e-4)

    tower, text = theirs.model.vision_tower, theirs.model.language_model
    attention, layer = tower.encoder.layers[1].self_attn, tower.encoder.layers[1]
    top, stack = gradients["vision"], gradients["vision_layers"]["layer_0"]
    pairs = [
        (top["vision_pixels"], tower.patch_embedder.input_proj.weight),
        (top["vision_axis_positions"], tower.patch_embedder.position_embedding_table),
        (top["projector_matrix"], theirs.model.embed_vision.embedding_projection.weight),
        (stack["vision_query"][1], attention.q_proj.linear.weight),
        (stack["vision_key_norm"][1], attention.k_norm.weight),
        (stack["vision_output"][1], attention.o_proj.linear.weight),
        (stack["vision_down"][1], layer.mlp.down_proj.linear.weight),
        (stack["vision_mlp_post_norm"][1], layer.post_feedforward_layernorm.weight),
        (gradients["embedding"], text.embed_tokens.weight),
    ]
    if name == "small":
        pairs.append((gradients["layer_embedding"], text.embed_tokens_per_layer.weight))
        assert not np.any(stack["vision_query_input_min"])
    else:
        assert not np.any(top["vision_feature_gain"])
    for ours, parameter in pairs:
        largest = np.abs(parameter.grad.numpy()).max()
        assert largest > 0
        np.testing.assert_allclose(ours, parameter.grad.numpy(), atol=1e-4 * largest)

    models.save(tmp_path / "ours", model, params)
    written, faults = model_class.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(faults.values())
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(written.state_dict()[key], tensor), key
    with torch.no_grad():
        again = written(input_ids=ids, **inputs).logits.numpy()
    np.testing.assert_allclose(again, expected, atol=1e-4)
    _, loaded = models.load(tmp_path / "ours", images=True)
    for path, leaf in jax.tree.leaves_with_path(params):
        np.testing.assert_array_equal(leaf, dict(jax.tree.leaves_with_path(loaded))[path])

    # Without images nothing of the tower is loaded, and a text has the logits that it has alone.
    text_model, text_params = models.load(tmp_path / "theirs")
    assert text_model.config.vision is None
    with torch.no_grad():
        plain = theirs(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits.numpy()
    for one, weights in ((text_model, text_params), (model, params)):
        found = one.logits(weights, hidden(one, weights, [[5, 6, 7, 8, 9]], None))
        np.testing.assert_allclose(found, plain, atol=1e-4)


def model_and_params(name, **tower):
    config = config_of(name)
    config["vision_config"] = config["vision_config"] | tower
    model = models.from_config(config, images=True)
    return config, model, random_params(model.config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["large", "small"])
def test_packed_tokens_see_what_single_rows_see(name):
    """A prompt with two answers, and another one behind it; each image is in one prompt."""
    config, model, params = model_and_params(name)
    _, tokens, pieces, _ = text_with_images(config, [(2, 3), (3, 2)])
    # [5, 92, six features, 93, 6] of each image.
    prompts = [tokens[0, :10].tolist(), tokens[0, 10:20].tolist()]
    answers = [[6, 7], [10, 11, 12], [13, 6]]
    single = [
        model.logits(params, hidden(model, params, [prompts[of] + answer], pieces))[0]
        for of, answer in zip((0, 0, 1), answers, strict=True)
    ]
    rows = [prompts[0], *answers[:2], prompts[1], answers[2]]
    positions = [*range(12), *range(10, 13), *range(12)]
    segments = [1] * 15 + [2] * 12
    branches = [0] * 10 + [1, 1] + [2] * 3 + [0] * 10 + [1, 1]
    inputs = [
        jnp.pad(jnp.array([x]), ((0, 0), (0, 5)))
        for x in (sum(rows, []), positions, segments, branches)
    ]
    for tiles in (None, jnp.tile(jnp.arange(4)[None, None], (1, 4, 1))):
        states = model.hidden(params, *inputs, tiles, images=jnp.asarray(pieces))
        packed = model.logits(params, states)[0]
        np.testing.assert_allclose(packed[:12], single[0], atol=1e-5)
        np.testing.assert_allclose(packed[12:15], single[1][10:], atol=1e-5)
        np.testing.assert_allclose(packed[15:27], single[2], atol=1e-5)


@pytest.mark.slow
def test_features_see_all_of_their_image_in_sliding_layers_alone():
    config, model, _ = model_and_params("large")
    assert model.config.vision.two_way == ("sliding",)
    _, tokens, pieces, _ = text_with_images(config, [(1, 2), (2, 2)])
    # [5, 92, two features, 93, 6, 5, 92, four features, 93, 6, 7, 8]
    grid = image_features.grid_of(jnp.asarray(pieces))
    features = image_features.Features(jnp.zeros((6, 32)), None, grid)
    index = jnp.arange(tokens.shape[1])[None]
    queries = layers.TokenIndex(index, index, 0 * index + 1, 0 * index + index.size)
    seen = image_features.two_way(model.config, jnp.asarray(tokens), queries, features)
    assert seen is not None
    assert seen.index[0].tolist() == [0, 1, 3, 3, *range(4, 8), *[11] * 4, *range(12, 16)]
    later = model.config.vision.later_features(pieces[None])
    assert later.tolist() == [[1, 0, 3, 2, 1, 0]]
    _, causal, _ = model_and_params("small")
    assert image_features.two_way(causal.config, jnp.asarray(tokens), queries, features) is None


@pytest.mark.slow
def test_full_layers_do_not_see_later_features():
    config, model, params = model_and_params("large")
    _, tokens, pieces, _ = text_with_images(config, [(2, 2)])
    changed = tokens.copy()
    changed[0, 5] = tokens[0, 2]

    def states(params, tokens):
        return hidden(model, params, tokens, pieces)[0]

    moved = np.abs(states(params, changed) - states(params, tokens)).max(-1)
    assert moved[2] > 1e-4
    np.testing.assert_array_equal(moved[:2] < 1e-6, True)
    # With full layers alone the first feature sees what it saw.
    full = replace(model.config, layer_types=("full", "full", "full"))
    model = models.decoder(full)
    params = random_params(full)
    moved = np.abs(states(params, changed) - states(params, tokens)).max(-1)
    np.testing.assert_array_equal(moved[:5] < 1e-6, True)
    assert moved[5] > 1e-4


@pytest.mark.slow
def test_a_tower_that_clips_nothing_has_finite_params_and_files_that_say_so(tmp_path):
    from safetensors.numpy import load_file, save_file

    _, model, params = model_and_params("small")
    key = jax.random.key(0)
    layer = {"vision_up_input_max": params["vision_layers"]["layer_0"]["vision_up_input_max"]}
    (open_bound,) = jax.tree.leaves(random_tree(model.config, key, jax.eval_shape(lambda: layer)))
    # A checkpoint of a run with other params is refused.
    assert np.isfinite(open_bound).all()
    params["vision_layers"]["layer_0"]["vision_up_input_max"] = open_bound
    models.save(tmp_path, model, params)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.vision_tower.encoder.layers.1.mlp.up_proj.input_max"
    assert stored[name] == np.inf
    again, loaded = models.load(tmp_path, images=True)
    towers = [replace(one.config.vision, source="") for one in (again, model)]
    assert towers[0] == towers[1]
    for path, leaf in jax.tree.leaves_with_path(params):
        np.testing.assert_array_equal(leaf, dict(jax.tree.leaves_with_path(loaded))[path])
    save_file(stored | {name: np.array(np.nan, np.float32)}, file)
    with pytest.raises(InputError, match=r"1 of .* hold NaN(.|\n)*up_proj.input_max"):
        models.load(tmp_path, images=True)


def test_a_tower_for_sound_is_left_out_and_the_saved_model_has_none(tmp_path):
    from safetensors.numpy import load_file, save_file

    _, model, params = model_and_params("small")
    models.save(tmp_path, model, params)
    tensors = load_file(tmp_path / "model.safetensors")
    sound = dict.fromkeys(("audio_tower.norm.weight", "embed_audio.projection.weight"))
    tensors |= {f"model.{name}": np.ones(3, np.float32) for name in sound}
    save_file(tensors, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["audio_config"] is None
    file.write_text(json.dumps(config | {"audio_config": {"hidden_size": 4}}))
    found, loaded = models.load(tmp_path, images=True)
    assert found.config.vision.has_audio
    models.save(tmp_path / "again", found, loaded)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["audio_config"] is None
    assert not any("audio" in name for name in load_file(tmp_path / "again" / "model.safetensors"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": None}, "no vision tower"),
        ({"vision_config": {"rope_parameters": {"rope_type": "linear"}}}, "rope_type = 'linear'"),
        ({"vision_config": {"head_dim": 6}}, "head_dim = 6"),
        ({"vision_config": {"attention_bias": True}}, "attention_bias = True"),
        ({"vision_config": {"num_key_value_heads": 7}}, "num_key_value_heads = 7"),
        ({"vision_config": {"num_hidden_layers": 0}}, "vision_config.num_hidden_layers"),
        ({"vision_config": {"hidden_activation": "relu"}}, "hidden_activation = 'relu'"),
        ({"model_type": "gemma4_unified"}, "reads no images"),
    ],
)
def test_what_would_be_wrong_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        models.from_config(config_of("large", **changes), images=True)


def test_patches_of_another_processor_are_refused():
    config, model, _ = model_and_params("large")
    tower = model.config.vision
    made = processed(config, (2, 3))
    with pytest.raises(ValueError, match="patches of 4 x 4 pixels, 2 x 2 of them"):
        tower.pieces(made | {"pixel_values": made["pixel_values"][..., :27]})
    made["image_position_ids"][0, 23] = -1
    with pytest.raises(ValueError, match="numbers of 4 x 6 patches"):
        tower.pieces(made)
    few = replace(tower, num_positions=5)
    with pytest.raises(ValueError, match="positions for 5 in a row or a column"):
        few.pieces(processed(config, (2, 3)))


def test_tokens_of_images_and_sound_are_never_sampled():

    _, model, _ = model_and_params("large")
    assert model.config.vision.tokens == set(range(90, 97))


@pytest.mark.slow
def test_a_conversation_reads_images_of_later_turns_whole():
    config, model, params = model_and_params("large")
    _, _, pieces, _ = text_with_images(config, [(2, 2), (2, 3)])
    reading = params | {FEATURES: models.image_features(model)(params, pieces)}
    live = ConversationSampler(
        models.policy(model),
        reading,
        SamplerConfig(max_new_tokens=4, stop_ids=(), segments=SegmentConfig(steps=2)),
        num_slots=1,
        max_length=64,
        prompt_length=8,
        whole_images=(VOCABULARY, 6),
    )
    text, log_probs = [3, *range(VOCABULARY, VOCABULARY + 4), 5], []
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    # In the second turn the image begins two places before the end of a chunk of 16.
    later = [*[7] * 13, *range(VOCABULARY + 4, VOCABULARY + 10), 5, 6]
    starts = []
    for turn in range(2):
        live.submit([TurnRequest(0, list(text), key, 4)])
        while not live.is_idle:
            for written in live.step():
                starts.append(len(text))
                text += written.tokens
                log_probs.append(written.log_probs)
        text += later if turn == 0 else []
    logits = model.logits(params, hidden(model, params, [text], pieces))[0]
    expected = np.asarray(jax.nn.log_softmax(logits))
    for start, sampled in zip(starts, log_probs, strict=True):
        places = np.arange(start, start + len(sampled))
        chosen = expected[places - 1, np.array(text)[places]]
        np.testing.assert_allclose(sampled, chosen, atol=1e-5)
