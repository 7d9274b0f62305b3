"""Families of models that read images: their features, masks and files."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.image_models import IDEFICS, write_idefics
from tests.fixtures.qwen_models import config_of
from tpu_rl import models
from tpu_rl.algorithm_spec import RoleSpec
from tpu_rl.commands import config as configuration
from tpu_rl.commands import roles
from tpu_rl.errors import InputError
from tpu_rl.models import layers
from tpu_rl.models.decoder import param_shapes
from tpu_rl.models.vision.features import Features, two_way
from tpu_rl.sampler import SamplerConfig, SegmentConfig
from tpu_rl.sampler.conversation_sampler import ConversationSampler, TurnRequest, part_length
from tpu_rl.types import FEATURES

TOWER = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 20,
}
VOCABULARY = 20
LLAVA = {
    "model_type": "llava",
    "image_token_index": 19,
    "vision_config": TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
    "vision_feature_select_strategy": "full",
    "text_config": TEXT | {"model_type": "llama"},
}
GEMMA = {
    "model_type": "gemma3",
    "image_token_index": 19,
    "boi_token_index": 18,
    "eoi_token_index": 17,
    "mm_tokens_per_image": 4,
    "vision_config": LLAVA["vision_config"],
    "text_config": TEXT
    | {"model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window": 3},
}
SMOLVLM = {
    "model_type": "smolvlm",
    "image_token_id": 19,
    "scale_factor": 2,
    "vision_config": TOWER | {"model_type": "smolvlm_vision"},
    "text_config": TEXT | {"model_type": "llama"},
}


INTERNVL = {
    "model_type": "internvl",
    "image_token_id": 19,
    "image_seq_length": 4,
    "vision_config": TOWER | {"model_type": "internvl_vision", "image_size": [16, 16]},
    "text_config": TEXT | {"model_type": "qwen2"},
    "tie_word_embeddings": False,
}
INTERNVL["vision_config"]["patch_size"] = [4, 4]


def changed(config, tower=None, text=None, **outer):
    return config | {
        "vision_config": config["vision_config"] | (tower or {}),
        "text_config": config["text_config"] | (text or {}),
        **outer,
    }


def ids_of(config, count=2):
    """Return a text with images, as we write it, and as transformers does."""
    ours: list[int] = [3]
    theirs = [3]
    per_image = models.from_config(config, images=True).config.vision.features_per_piece
    for index in range(count):
        ours += [5, *range(VOCABULARY + index * per_image, VOCABULARY + (index + 1) * per_image)]
        theirs += [5, *[19] * per_image]
    return [*ours, 6, 7, 8], [*theirs, 6, 7, 8]


def images(config, count=2, seed=0):
    tower = config["vision_config"]
    (size,) = {*np.ravel(tower["image_size"]).tolist()}
    pixels = np.random.default_rng(seed).normal(size=(count, 3, size, size))
    return pixels.astype(np.float32)


def logits_of(model, params, tokens, pixels):
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ones = jnp.ones_like(tokens)
    hidden = model.hidden(params, tokens, positions, ones, 0 * ones, images=jnp.asarray(pixels))
    return model.logits(params, hidden)


@pytest.mark.parametrize(
    "config",
    [
        LLAVA,
        changed(LLAVA, {"model_type": "clip_vision_model"}),
        INTERNVL,
        config_of("qwen3_vl"),
    ],
)
def test_positions_of_a_random_tower_are_as_large_as_its_patches(config):
    """Smaller ones vanish behind the first norm, and a tower from scratch does not learn places."""
    model = models.from_config(config)
    top = model.init(jax.random.key(0))["vision"]
    # A picture of qwen3_vl is shown as several frames, all equal.
    patch = top["vision_patch"] if "vision_patch" in top else top["vision_frames"].sum(2)
    pixels = np.random.default_rng(0).normal(size=(50, *patch.shape[1:]))
    patches = np.einsum("icpq,ecpq->ie", pixels, patch)
    ratio = np.sqrt(np.mean(top["vision_position"] ** 2) / np.mean(patches**2))
    assert 0.5 < ratio < 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        LLAVA,
        changed(LLAVA, {"num_hidden_layers": 3, "patch_size": 8}, vision_feature_layer=-1),
        changed(
            LLAVA,
            {"hidden_act": "gelu", "vision_use_head": True},
            {"model_type": "qwen2"},
            vision_feature_select_strategy="default",
            multimodal_projector_bias=False,
        ),
        GEMMA,
        changed(
            GEMMA,
            {"vision_use_head": True, "num_hidden_layers": 3},
            {
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            mm_tokens_per_image=16,
        ),
        changed(GEMMA, {"image_size": 24}, {"sliding_window": 64}, mm_tokens_per_image=9),
        SMOLVLM,
        changed(SMOLVLM, {"image_size": 24}, scale_factor=3, tie_word_embeddings=True),
        changed(SMOLVLM, None, {"num_key_value_heads": 2}, model_type="idefics3", scale_factor=4),
        INTERNVL,
        changed(
            INTERNVL,
            {"attention_bias": True, "num_hidden_layers": 3, "image_size": 24},
            {"model_type": "qwen3"},
            vision_feature_layer=-2,
            tie_word_embeddings=True,
        ),
        changed(INTERNVL, {"patch_size": 2}, {"model_type": "llama"}, downsample_ratio=0.25),
    ],
    ids=lambda config: config["model_type"],
)
def test_logits_gradients_and_files_are_transformers(tmp_path, config):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    named = json.loads(json.dumps(config))
    kind = named.pop("model_type")
    theirs: Any = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(kind, **named), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        # Gemma's projector begins with zeros, and biases and norms are alike.
        for parameter in theirs.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = models.load(tmp_path / "theirs", images=True)
    ours, ids = ids_of(config)
    pixels = images(config)
    is_idefics = kind in ("smolvlm", "idefics3")
    inputs = {"pixel_values": torch.tensor(pixels[None] if is_idefics else pixels)}
    if kind == "gemma3":
        inputs["token_type_ids"] = torch.tensor([[int(i == 19) for i in ids]])
    with torch.enable_grad():
        outputs = theirs(input_ids=torch.tensor([ids]), **inputs)
        outputs.logits.sin().sum().backward()

    def total(params):
        logits = logits_of(model, params, [ours], pixels)
        return jnp.sin(logits).sum(), logits

    with jax.default_matmul_precision("highest"):
        (_, logits), gradients = jax.value_and_grad(total, has_aux=True)(params)
    np.testing.assert_allclose(logits, outputs.logits.detach().numpy(), atol=1e-4)
    named_gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    checked = 0
    of_layers = gradients["vision_layers"]["layer_0"]
    for name, gradient in (
        ("patch_embedding.weight", gradients["vision"]["vision_patch"]),
        ("patch_embedding.bias", gradients["vision"].get("vision_patch_bias")),
        ("position_embedding.weight", gradients["vision"]["vision_position"]),
        ("layers.0.self_attn.q_proj.weight", gradients["vision_layers"]["layer_0"]["vision_query"]),
        ("multi_modal_projector.linear_1.weight", gradients["vision"].get("projector_in")),
        ("modality_projection.proj.weight", gradients["vision"].get("projector_matrix")),
        ("mm_input_projection_weight", gradients["vision"].get("projector_matrix")),
        ("mm_soft_emb_norm.weight", gradients["vision"].get("projector_pooled_norm")),
        ("patch_embeddings.projection.weight", gradients["vision"]["vision_patch"]),
        ("patch_embeddings.projection.bias", gradients["vision"].get("vision_patch_bias")),
        ("embeddings.cls_token", gradients["vision"].get("vision_class")),
        ("embeddings.position_embeddings", gradients["vision"]["vision_position"]),
        ("layer.0.attention.q_proj.weight", of_layers["vision_query"][0]),
        ("layer.0.lambda_2", of_layers.get("vision_mlp_gain", [None])[0]),
        ("projector.layer_norm.weight", gradients["vision"].get("projector_merged_norm")),
    ):
        found = [
            grad
            for key, grad in named_gradients.items()
            if key.endswith(name)
            and ("vision" in key or "proj" in key or "connector" in key)
            and "text_model" not in key
            and "language_model" not in key
        ]
        if not found or gradient is None:
            continue
        (expected,) = found
        gradient = gradient[0] if "layers.0" in name else gradient
        gradient = gradient.T if name == "mm_input_projection_weight" else gradient
        gradient = gradient.reshape(expected.shape)
        np.testing.assert_allclose(gradient, expected.numpy(), rtol=2e-3, atol=2e-4)
        checked += 1
    assert checked >= 5
    models.save(tmp_path / "ours", model, params)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    again, report = loaded
    assert not any(report.values())
    with torch.no_grad():
        saved = again(input_ids=torch.tensor([ids]), **inputs).logits
    np.testing.assert_allclose(saved, outputs.logits.detach().numpy(), atol=1e-4)


def model_and_params(config):
    """Return a model with random weights. Norms, which are about 1, are not all alike."""
    model = models.from_config(config, images=True)
    random = np.random.default_rng(0)

    def leaf(path, shape):
        is_norm = path[-1].key.endswith("_norm")
        scale = 0.2 if is_norm else shape.shape[-1] ** -0.5
        return jnp.asarray((is_norm + scale * random.normal(size=shape.shape)).astype(np.float32))

    return model, jax.tree_util.tree_map_with_path(leaf, param_shapes(model.config))


def test_queries_of_an_image_have_the_place_of_its_last_token():
    config = models.from_config(GEMMA, images=True).config
    # Two rows that begin at slot 7 of a cache: an image, and one that is cut at the end.
    tokens = jnp.array([[3, 24, 25, 26, 27, 5], [3, 4, 5, 20, 21, 22]])
    index = 7 + jnp.arange(6)[None] + 0 * tokens
    queries = layers.TokenIndex(index, index, 0 * tokens + 1, 0 * tokens + 13)
    seen = two_way(config, tokens, queries, Features(jnp.zeros((8, 16))))
    assert seen is not None
    assert seen.index.tolist() == [[7, 11, 11, 11, 11, 12], [7, 8, 9, 12, 12, 12]]
    mask = layers.attention_mask(seen, queries, sliding_window=3)
    # In a sliding window, too, the image sees all of itself, and no text that is further back.
    assert mask[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 0],
        [0, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]


@pytest.mark.slow
def test_tokens_of_an_image_see_all_of_it_and_nothing_else_behind_them():
    model, params = model_and_params(GEMMA)
    ours, _ = ids_of(GEMMA)
    pixels = images(GEMMA)

    def states(pixels, tokens=ours):
        return np.asarray(logits_of(model, params, [tokens], pixels))[0]

    # [3, 5, four features, 5, four features, 6, 7, 8]
    before = states(pixels)
    last_feature = [*ours]
    last_feature[5] = ours[4]
    # The first feature of the first image sees its last one, and the text before it does not.
    moved = np.abs(states(pixels, last_feature) - before).max(-1)
    assert moved[2] > 1e-4
    np.testing.assert_array_equal(moved[:2] < 1e-6, True)
    # The first image does not see the second one, and the text between them neither.
    moved = np.abs(states(np.stack([pixels[0], pixels[0]])) - before).max(-1)
    np.testing.assert_array_equal(moved[:7] < 1e-6, True)
    assert moved[7:].min() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("config", [GEMMA, SMOLVLM], ids=lambda config: config["model_type"])
def test_cached_and_packed_tokens_see_what_single_rows_see(config):
    model, params = model_and_params(config)
    pixels = images(config)
    ours, _ = ids_of(config)
    first, second = ours[:6], [9, *ours[6:11]]
    answers = [[6, 7], [10, 11, 12], [13, 6]]
    of_first = [logits_of(model, params, [first + answer], pixels)[0] for answer in answers[:2]]
    of_second = logits_of(model, params, [second + answers[2]], pixels)[0]
    # A prompt with an image and two answers, and directly behind them another prompt.
    rows = [first, *answers[:2], second, answers[2]]
    tokens = sum(rows, [])
    positions = [*range(6), 6, 7, 6, 7, 8, *range(8)]
    segments = [1] * 11 + [2] * 8
    branches = [0] * 6 + [1, 1] + [2] * 3 + [0] * 6 + [1, 1]
    index = [jnp.array([x]) for x in (tokens, positions, segments, branches)]
    for size in (None, 8):
        inputs = [jnp.pad(x, ((0, 0), (0, 5))) for x in index]
        tiles = None
        if size is not None:
            tiles = jnp.tile(jnp.arange(3)[None, None], (1, 3, 1))
        hidden = model.hidden(params, *inputs, tiles, images=jnp.asarray(pixels))
        packed = np.asarray(model.logits(params, hidden))[0]
        np.testing.assert_allclose(packed[:8], of_first[0], atol=1e-5)
        np.testing.assert_allclose(packed[8:11], of_first[1][6:], atol=1e-5)
        np.testing.assert_allclose(packed[11:19], of_second, atol=1e-5)
    # A cache: the prompt at once, as the sampler does, and then tokens one by one.
    reading = params | {FEATURES: models.image_features(model)(params, pixels)}
    cache = model.init_cache(reading, 1, 12)
    row = jnp.array([first + answers[1]])
    parts = []
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9)):
        places = jnp.arange(start, stop)[None]
        commit = jnp.array([stop - start])
        logits, cache = model.extend(reading, cache, row[:, start:stop], places, 0 * places, commit)
        parts.append(logits[0])
    # Products of one token add up in another order, and rounding grows with the logits, up to 5.
    largest = np.abs(of_first[1]).max()
    np.testing.assert_allclose(jnp.concatenate(parts), of_first[1], atol=1e-5 * largest)


@pytest.mark.slow
def test_gemma_reads_texts_alone_unless_it_is_told_to(tmp_path):
    model, params = model_and_params(GEMMA)
    models.save(tmp_path / "model", model, params)
    text_model, text_params = models.load(tmp_path / "model")
    assert text_model.config.vision is None
    assert not {"vision", "vision_layers"} & text_params.keys()
    again, loaded = models.load(tmp_path / "model", images=True)
    assert again.config.vision.around == (18, 17)
    for path, leaf in jax.tree.leaves_with_path(params):
        np.testing.assert_array_equal(leaf, dict(jax.tree.leaves_with_path(loaded))[path])
    with pytest.raises(InputError, match="reads no images"):
        models.from_config(GEMMA["text_config"], images=True)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (GEMMA, {"vision_tower.": "vision_tower.vision_model."}),
        (
            GEMMA,
            {
                "vision_tower.": "model.vision_tower.vision_model.",
                "multi_modal_projector.": "model.multi_modal_projector.",
                "language_model.model.": "model.language_model.",
            },
        ),
        (LLAVA, {"vision_tower.": "model.vision_tower.", "language_model.lm_head": "lm_head"}),
        (SMOLVLM, {"model.vision_model.": "vision_model.", "model.connector.": "connector."}),
        (INTERNVL, {"vision_tower.": "model.vision_tower.", "language_model.lm_head": "lm_head"}),
    ],
)
def test_names_of_published_files_are_read(tmp_path, config, names):
    from safetensors.numpy import load_file, save_file

    model, params = model_and_params(config)
    models.save(tmp_path, model, params)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for prefix, other in names.items():
        renamed = {
            name.replace(prefix, other, 1) if name.startswith(prefix) else name: tensor
            for name, tensor in tensors.items()
        }
        assert renamed.keys() != tensors.keys()
        tensors = renamed
    # SigLIP's pooling head is left out.
    tower = "vision_tower.vision_model." if config is GEMMA else "vision_tower."
    tensors[f"{tower}head.probe"] = np.zeros((1, 1, 8), np.float32)
    save_file(tensors, file)
    _, loaded = models.load(tmp_path, images=True)
    for path, leaf in jax.tree.leaves_with_path(params):
        np.testing.assert_array_equal(leaf, dict(jax.tree.leaves_with_path(loaded))[path])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(GEMMA, mm_tokens_per_image=5), "mm_tokens_per_image"),
        (changed(SMOLVLM, scale_factor=3), "scale_factor"),
        (changed(SMOLVLM, {"image_size": 19 * 4}, scale_factor=1), "image_size"),
        (changed(GEMMA, {"model_type": "clip"}), "vision tower is not supported"),
        (changed(GEMMA, {"image_size": [16, 16]}), "image_size"),
        (GEMMA | {"model_type": "gemma4_unified"}, "reads no images"),
        (changed(INTERNVL, {"use_qk_norm": True}), "use_qk_norm = True"),
        (changed(INTERNVL, {"norm_type": "rms_norm"}), "norm_type = 'rms_norm'"),
        (changed(INTERNVL, {"image_size": [16, 24]}), "image_size"),
        (changed(INTERNVL, {"image_size": 12}), "downsample_ratio"),
        (changed(INTERNVL, vision_feature_select_strategy="full"), "select_strategy = 'full'"),
    ],
)
def test_what_would_be_wrong_is_refused(config, message):
    with pytest.raises(InputError, match=message):
        models.from_config(config, images=True)


def test_a_part_of_a_text_ends_before_an_image_that_does_not_fit():
    ids = [*range(10), *range(24, 28), 6, *range(28, 32), 5]
    run = (20, 4)
    assert part_length(ids, 16, None) == 16
    assert [part_length(ids, chunk, run) for chunk in (9, 10, 11, 13, 14, 15, 17, 18, 19, 64)] == [
        *(9, 10, 10, 10, 14, 15, 15, 15, 19, 20)
    ]


@pytest.mark.slow
def test_a_conversation_reads_images_of_later_turns_whole():
    config = changed(GEMMA, None, {"sliding_window": 32})
    model, params = model_and_params(config)
    pixels = images(config)
    reading = params | {FEATURES: models.image_features(model)(params, pixels)}
    live = ConversationSampler(
        models.policy(model),
        reading,
        SamplerConfig(max_new_tokens=4, stop_ids=(), segments=SegmentConfig(steps=2)),
        num_slots=1,
        max_length=64,
        prompt_length=8,
        whole_images=(VOCABULARY, 4),
    )
    text, log_probs = [3, *range(VOCABULARY, VOCABULARY + 4), 5], []
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    # In the second turn the image begins two places before the end of a chunk of 16.
    later = [*[7] * 13, *range(VOCABULARY + 4, VOCABULARY + 8), 5, 6]
    starts = []
    for turn in range(2):
        live.submit([TurnRequest(0, list(text), key, 4)])
        while not live.is_idle:
            for written in live.step():
                starts.append(len(text))
                text += written.tokens
                log_probs.append(written.log_probs)
        text += later if turn == 0 else []
    tokens = jnp.array([text])
    logits = jax.nn.log_softmax(logits_of(model, params, tokens, pixels)[0])
    for start, sampled in zip(starts, log_probs, strict=True):
        places = np.arange(start, start + len(sampled))
        expected = logits[places - 1, tokens[0, places]]
        np.testing.assert_allclose(sampled, expected, atol=1e-5)


def test_exact_sampling_is_refused_where_tokens_see_later_ones():
    config = configuration.preset("pictures_grpo")
    config = replace(config, model=replace(config.model, exact_sampling=True))
    with pytest.raises(InputError, match="images see later tokens and --model.exact-sampling"):
        roles.role_models(config, models.from_config(GEMMA, images=True))


@pytest.mark.parametrize(
    ("source", "ids"),
    [
        (LLAVA, (19,)),
        (GEMMA, (17, 18, 19)),
        (SMOLVLM, (19,)),
        (config_of("qwen2_5_vl", vision_token_id=94), (90, 91, 92, 93, 94)),
    ],
)
def test_tokens_that_stand_for_images_are_impossible_for_every_role(tmp_path, source, ids):
    """A sampled one would be read as an image that nobody gave."""
    (tmp_path / "config.json").write_text(json.dumps(source))
    flags = ["--model.images"] if source is GEMMA else []
    config = configuration.parse(["sft", "--model.path", str(tmp_path), *flags])
    model = roles.from_config(config, tmp_path)
    assert model.config.vocab.unsampled == ids
    # A teacher that reads texts has the same impossible tokens, so that divergences are finite.
    (tmp_path / "teacher").mkdir()
    text = TEXT | {"model_type": "llama", "vocab_size": model.config.vocab.size}
    text = source if source is GEMMA else text
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(text))
    teacher = roles.role_model(
        config, model, RoleSpec(trainable=False, path=str(tmp_path / "teacher"))
    )
    assert teacher.config.vocab.unsampled == ids
    table = np.ones((model.config.vocab.size, 16), np.float32)
    params = {"embedding": table, "unembedding": table}
    hidden = jnp.ones((3, 16))

    def log_probs(hidden):
        return jax.nn.log_softmax(teacher.logits(params, hidden) / 0.1)

    probs = np.exp(np.asarray(log_probs(hidden)))
    others = np.delete(np.arange(model.config.vocab.size), ids)
    np.testing.assert_allclose(probs[:, ids], 0.0)
    np.testing.assert_allclose(probs[:, others], 1 / len(others), rtol=1e-6)
    assert np.isfinite(jax.grad(lambda hidden: log_probs(hidden).sum())(hidden)).all()


def test_tokens_around_tiles_are_impossible(tmp_path):
    """config.json names only the image token of Idefics3, and the tokenizer the others."""
    write_idefics(tmp_path)
    config = configuration.parse(["sft", "--model.path", str(tmp_path)])
    model = roles.from_config(config, tmp_path)
    size = model.config.vocab.size
    first = size - len(IDEFICS) + IDEFICS.index("<image>")
    assert model.config.vocab.unsampled == tuple(range(first, size))
    table = jnp.ones((size, 16))
    logits = model.logits({"embedding": table, "unembedding": table}, jnp.ones((1, 16)))
    probs = np.asarray(jax.nn.softmax(logits[0]))
    np.testing.assert_array_equal(probs[first:], 0.0)
    # The end of a turn stands before them, and is sampled like other tokens.
    np.testing.assert_allclose(probs[:first], 1 / first, rtol=1e-6)


def test_a_tokenizer_of_tiles_that_cannot_be_read_is_named(tmp_path):
    write_idefics(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7}]}))
    with pytest.raises(InputError, match=r"tokenizer\.json has no readable vocabulary"):
        models.from_config(tmp_path)
