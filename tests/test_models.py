"""The decoder against itself: packed rows and the cache give what one plain sequence gives, on every family."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny import VOCABULARY, attention_model, plain_log_probs
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.models import caches, layers
from tpu_rl.sampler import SamplerConfig, sample
from tpu_rl.types import Model, Params, Rows

BASE = {
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "llama2": BASE | {"model_type": "llama", "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "llama3": BASE
    | {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 10, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
    "mistral": BASE | {"model_type": "mistral", "head_dim": 8, "sliding_window": 5},
    "qwen2": BASE
    | {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 12, "rope_theta": 1e6},
    "mixtral": BASE
    | {"model_type": "mixtral", "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": BASE
    | {
        "model_type": "qwen3_moe",
        "head_dim": 12,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "olmoe": BASE
    | {
        "model_type": "olmoe",
        "intermediate_size": 20,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "clip_qkv": 1.5,
    },
    "gemma2": BASE
    | {
        "model_type": "gemma2",
        "num_hidden_layers": 3,
        "head_dim": 10,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": BASE
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
}
"""A small odd-sized model of every family: Hugging Face configurations in the older form. Windows are 5 tokens."""

LIKE_OTHERS = ("mixtral", "qwen3_moe")
"""Families whose layers others have too: in the slow tests only, but for parity."""

every_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in CONFIGS]
)
LENGTH = 17
CAPACITY = LENGTH + 2


class Tiny(NamedTuple):
    model: Model
    params: Params
    logits: Callable
    """(params, tokens, positions, segment_ids, branch_ids), jitted; called on [3, LENGTH] only, to compile once."""
    extend: Callable
    """Of its policy, jitted; called on 3 rows of CAPACITY with 11 or 2 tokens only."""


@functools.cache
def tiny(family):
    model = models.from_config(CONFIGS[family])
    noise = np.random.default_rng(0)

    def random(path, leaf):  # norms and biases too: at their initial ones and zeros some faults would not show
        gain = 1.0 if path[-1].key.endswith("_norm") and not model.config.norm.unit_offset else 0.0
        return jnp.asarray(gain + 0.2 * noise.standard_normal(leaf.shape, np.float32))

    params = jax.tree_util.tree_map_with_path(random, jax.eval_shape(model.init, jax.random.key(0)))

    def logits(params, *rows):
        return model.logits(params, model.hidden(params, *rows))

    return Tiny(model, params, jax.jit(logits), jax.jit(models.policy(model).extend))


def tokens_of(shape, seed=2):
    return jnp.asarray(np.random.default_rng(seed).integers(0, BASE["vocab_size"], shape, np.int32))


def log_probs(family, tokens, *layout):
    """[3, LENGTH, V] of the family's tiny model."""
    return jax.nn.log_softmax(tiny(family).logits(tiny(family).params, tokens, *layout))


def plain(rows):
    """positions, segment_ids and branch_ids of [rows, LENGTH] with a sequence a row."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH)[None, :], (rows, LENGTH))
    return positions, jnp.ones_like(positions), jnp.zeros_like(positions)


@every_family
def test_shared_prompt_rows_equal_separate_rows(family):
    prompt, first, second = tokens_of((7,), 1), tokens_of((5,), 2), tokens_of((4,), 3)
    padding = jnp.zeros(LENGTH, jnp.int32)

    def row(*parts):
        return jnp.concatenate([*parts, padding])[:LENGTH]

    tokens = jnp.stack([row(prompt, first, second), row(prompt, first), row(prompt, second)])
    positions, segments, branches = (np.array(part) for part in plain(3))
    positions[0] = [*range(7), *range(7, 12), *range(7, 11), 0]
    branches[0] = [0] * 7 + [1] * 5 + [2] * 4 + [0]
    segments[0, 16:], segments[1, 12:], segments[2, 11:] = 0, 0, 0
    out = log_probs(family, tokens, positions, segments, branches)
    assert jnp.isfinite(out).all()
    np.testing.assert_allclose(out[0, :12], out[1, :12], atol=2e-5)
    np.testing.assert_allclose(out[0, 12:16], out[2, 7:11], atol=2e-5)
    assert float(jnp.abs(out[0, 12:16] - out[1, 7:11]).max()) > 0.1  # the two completions do differ


def prefill(family, tokens, lengths):
    """The cache of the first `lengths` of tokens [3, LENGTH], and the logits [3, 11, V] on the way."""
    model, params, _, extend = tiny(family)
    positions, _, trunk = plain(3)
    cache = models.policy(model).init_cache(params, 3, CAPACITY)
    logits, cache = extend(params, cache, tokens[:, :11], positions[:, :11], trunk[:, :11], lengths)
    return cache, logits


@every_family
def test_cache_equals_whole_sequences(family):
    """Ragged prefill, then steps of two tokens, of which some rows keep none or one."""
    _, params, _, extend = tiny(family)
    tokens, lengths = tokens_of((3, LENGTH)), jnp.array([11, 6, 1])
    expected = log_probs(family, tokens, *plain(3))
    cache, logits = prefill(family, tokens, lengths)
    assert all(leaf.shape[1] == 3 for kind in ("full", "sliding") for leaf in jax.tree.leaves(cache.get(kind, [])))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(jax.nn.log_softmax(logits)[row, :length], expected[row, :length], atol=2e-5)

    for commit in (jnp.array([2, 0, 2]), jnp.array([2, 2, 1]), jnp.array([2, 2, 2])):
        at = cache["lengths"][:, None] + jnp.arange(2)[None, :]
        trunk = jnp.zeros_like(at)
        logits, cache = extend(params, cache, jnp.take_along_axis(tokens, at, 1), at, trunk, commit)
        wanted = jnp.take_along_axis(expected, at[..., None], 1)
        np.testing.assert_allclose(jax.nn.log_softmax(logits), wanted, atol=2e-5)
    assert cache["lengths"].tolist() == [17, 10, 6]


def test_numbers_are_quantised_to_half_a_step():
    x = jax.random.normal(jax.random.key(0), (3, 5, 2, 16)) * jnp.array([1e-3, 1.0, 40.0])[:, None, None, None]
    x = x.at[0, 0].set(0.0)
    numbers, scale = caches.quantise(x)
    assert numbers.dtype == jnp.int8
    assert int(jnp.abs(numbers).max()) == 127
    assert float((jnp.abs(numbers * scale[..., None] - x) / jnp.maximum(scale, 1e-30)[..., None]).max()) <= 0.5 + 1e-4
    np.testing.assert_array_equal((numbers * scale[..., None])[0, 0], 0.0)


@pytest.mark.parametrize(("family", "transposed"), [("qwen3", False), ("gemma3", False), ("gemma3", True)])
def test_an_int8_cache_equals_whole_sequences_of_rounded_keys_and_values(family, transposed, monkeypatch):
    model, params, _, _ = tiny(family)
    model = models.with_int8_cache(models.with_cache_for_cpus(model) if transposed else model)
    tokens, lengths = tokens_of((3, LENGTH)), jnp.array([11, 6, 1])
    plainly = log_probs(family, tokens, *plain(3))
    cache = models.policy(model).init_cache(params, 3, CAPACITY)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache["full"])} == {"int8", "float32"}
    positions, _, branches = plain(3)
    extend = jax.jit(models.policy(model).extend)
    logits, cache = extend(params, cache, tokens, positions, branches, lengths)
    at = cache["lengths"][:, None] + jnp.arange(2)[None, :]
    after, _ = extend(params, cache, jnp.take_along_axis(tokens, at, 1), at, jnp.zeros_like(at), jnp.full(3, 2))

    def rounded(x):
        numbers, scale = caches.quantise(x)
        return numbers * scale[..., None]

    attention = layers.attention
    monkeypatch.setattr(layers, "attention", lambda q, k, v, *a, **how: attention(q, rounded(k), rounded(v), *a, **how))
    whole = jax.jit(model.hidden)(params, tokens, *plain(3))
    expected = jax.nn.log_softmax(model.logits(params, whole))
    assert 1e-4 < float(jnp.abs(expected - plainly).max()) < 0.1
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(jax.nn.log_softmax(logits)[row, :length], expected[row, :length], atol=2e-5)
    np.testing.assert_allclose(jax.nn.log_softmax(after), jnp.take_along_axis(expected, at[..., None], 1), atol=2e-5)


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_candidates_are_branches_that_leave_no_trace(family):
    _, params, _, extend = tiny(family)
    tokens, candidates, lengths = tokens_of((3, LENGTH)), tokens_of((3, 2), 5), jnp.array([11, 6, 8])
    cache, _ = prefill(family, tokens, lengths)
    at = jnp.broadcast_to(lengths[:, None], (3, 2))
    branches = jnp.broadcast_to(jnp.arange(1, 3)[None, :], (3, 2))
    looked, after = extend(params, cache, candidates, at, branches, jnp.zeros(3, jnp.int32))
    for k in range(2):
        whole = tokens.at[jnp.arange(3), lengths].set(candidates[:, k])
        expected = log_probs(family, whole, *plain(3))[jnp.arange(3), lengths]
        np.testing.assert_allclose(jax.nn.log_softmax(looked[:, k]), expected, atol=2e-5)

    at = lengths[:, None] + jnp.arange(2)[None, :]
    step = (jnp.take_along_axis(tokens, at, 1), at, jnp.zeros_like(at), jnp.full(3, 2))
    np.testing.assert_array_equal(extend(params, after, *step)[0], extend(params, cache, *step)[0])


def test_what_does_not_fit_the_cache_is_dropped():
    _, params, _, extend = tiny("llama3")
    cache, _ = prefill("llama3", tokens_of((3, LENGTH)), jnp.array([11, 11, 11]))
    cache |= {"lengths": jnp.full(3, CAPACITY - 1)}
    at = cache["lengths"][:, None] + jnp.arange(2)[None, :]
    logits, after = extend(params, cache, tokens_of((3, 2)), at, jnp.zeros_like(at), jnp.zeros(3, jnp.int32))
    assert jnp.isfinite(logits).all()
    np.testing.assert_array_equal(after["full"]["k"][..., :-1, :], cache["full"]["k"][..., :-1, :])
    assert float(jnp.abs(after["full"]["k"][..., -1, :] - cache["full"]["k"][..., -1, :]).max()) > 0


def test_gradients_are_finite_and_blind_to_padding():
    model, params, _, _ = tiny("gemma2")
    positions, segments, branches = plain(1)
    segments = segments.at[:, 9:].set(0)

    @jax.jit
    def gradient(params, tokens):
        def loss(params):
            hidden = model.hidden(params, tokens, positions, segments, branches)
            return jnp.sum(model.logits(params, hidden)[:, :9] ** 2)

        return jax.grad(loss)(params)

    tokens = tokens_of((1, LENGTH))
    first, second = gradient(params, tokens), gradient(params, tokens.at[:, 9:].set(3))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(first))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(first))


def test_products_have_the_gradients_of_einsum():
    for equation, inputs, weights in (
        ("btd,dhe->bthe", (2, 3, 6), (6, 2, 4)),
        ("bthe,hed->btd", (2, 3, 2, 4), (2, 4, 6)),
    ):
        x, weight = jax.random.normal(jax.random.key(0), inputs), jax.random.normal(jax.random.key(1), weights)

        def gradients(multiply, equation=equation, x=x, weight=weight):
            return jax.grad(lambda x, weight: jnp.sum(jnp.sin(multiply(equation, x, weight))), (0, 1))(x, weight)

        for own, plain in zip(gradients(layers.product), gradients(jnp.einsum), strict=True):
            np.testing.assert_allclose(own, plain, rtol=1e-5, atol=1e-5)


def test_visible_by_hand():
    """One row: prompt p p, branch 1 a a, branch 2 b b, then another segment q, then padding."""
    slots = layers.Slots(
        jnp.arange(8)[None],
        jnp.array([[0, 1, 2, 3, 2, 3, 0, 0]]),
        jnp.array([[1, 1, 1, 1, 1, 1, 2, 0]]),
        jnp.array([[0, 0, 1, 1, 2, 2, 0, 0]]),
    )
    full = ["10000000", "11000000", "11100000", "11110000", "11001000", "11001100", "00000010", "00000001"]
    near = ["10000000", "11000000", "01100000", "00110000", "01001000", "00001100", "00000010", "00000001"]
    for window, rows in ((None, full), (2, near)):
        seen = layers.visible(slots, slots, window)[0].astype(int)
        assert ["".join(map(str, row)) for row in seen.tolist()] == rows


def test_ids_that_are_no_tokens_have_no_probability():
    model, params, _, _ = tiny("qwen2")
    config = dataclasses.replace(model.config, vocab=dataclasses.replace(model.config.vocab, valid=100))
    hidden = jnp.ones((1, 4, config.width))
    out = jax.nn.softmax(models.decoder(config).logits(params, hidden))
    assert float(out[..., 100:].max()) == 0.0
    expected = jax.nn.softmax(model.logits(params, hidden)[..., :100])
    np.testing.assert_allclose(out[..., :100], expected, rtol=1e-6)


def test_pattern_and_tail():
    config = tiny("gemma3").model.config
    assert config.kinds == ("sliding", "full", "sliding", "full", "sliding")
    assert (config.period, config.repetitions) == (2, 2)
    assert tiny("qwen2").model.config.period == 3
    deep = models.from_config(CONFIGS["gemma3"] | {"num_hidden_layers": 26, "sliding_window_pattern": 6}).config
    assert (deep.period, deep.repetitions, deep.kinds.count("full")) == (6, 4, 4)


@every_family
def test_axes_are_like_params(family):
    model, params, _, _ = tiny(family)
    jax.tree.map(lambda leaf, axes: np.testing.assert_equal(len(axes), leaf.ndim), params, model.axes)
    assert hash(model.config) == hash(models.from_config(CONFIGS[family]).config)


def test_random_params():
    """Draws differ from leaf to leaf and from key to key, and have the size they should."""
    model = tiny("qwen3").model
    first, second = (jax.jit(model.init)(jax.random.key(seed)) for seed in (0, 1))
    layer = first["layers"]["layer_0"]
    assert float(jnp.abs(layer["query"] - second["layers"]["layer_0"]["query"]).max()) > 0
    assert float(jnp.abs(layer["gate"] - layer["up"]).max()) > 0
    for name, spread in (("query", 40**-0.5), ("output", (48 * 4) ** -0.5), ("down", (52 * 4) ** -0.5)):
        assert float(layer[name].std()) == pytest.approx(spread, rel=0.05)
    np.testing.assert_array_equal(layer["mlp_norm"], 1.0)


def test_bfloat16_computes_in_bfloat16_with_float32_logits():
    params = tiny("llama2").params
    model = models.from_config(CONFIGS["llama2"], "bfloat16", param_dtype="float32")
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))}
    assert dtypes == {jnp.dtype("float32")}
    hidden = jax.eval_shape(model.hidden, params, *(jnp.zeros((1, 4), jnp.int32) for _ in range(4)))
    assert hidden.dtype == jnp.bfloat16
    assert jax.eval_shape(model.logits, params, hidden).dtype == jnp.float32
    tokens = tokens_of((3, LENGTH))
    exact, rounded = log_probs("llama2", tokens, *plain(3)), jax.nn.log_softmax(models.apply(model, params, tokens))
    assert 1e-4 < float(jnp.abs(exact - rounded).mean()) < 0.1


def test_role_and_apply_select_and_agree():
    model, params, _, _ = tiny("llama3")
    tokens = tokens_of((3, LENGTH))
    positions, segments, branches = plain(3)
    role = models.role(model, lambda params: params["policy"])
    tree = {"policy": params, "reference": None}
    hidden = role.hidden(tree, Rows(tokens, positions, segments, branches, segments, positions))
    expected = log_probs("llama3", tokens, positions, segments, branches)
    np.testing.assert_allclose(jax.nn.log_softmax(role.logits(tree, hidden)), expected, atol=2e-5)
    np.testing.assert_allclose(jax.nn.log_softmax(models.apply(model, params, tokens)), expected, atol=2e-5)


def shifted(model):
    """The model wrapped as adapters or heads wrap it: params are {"base", "shift" [V]}, logits have the shift added."""

    def hidden(params, *rows):
        return model.hidden(params["base"], *rows)

    def shift(params, logits):
        return logits + jnp.broadcast_to(params["shift"], logits.shape)

    def logits(params, hidden):
        return shift(params, model.logits(params["base"], hidden))

    def init_cache(params, rows, length):
        return model.init_cache(params["base"], rows, length)

    def extend(params, *step):
        logits, cache = model.extend(params["base"], *step)
        return shift(params, logits), cache

    return model._replace(hidden=hidden, logits=logits, init_cache=init_cache, extend=extend)


def policy_params(params):
    return params["policy"]


@pytest.mark.parametrize("name", ["decoder", "attention"])
def test_a_wrapped_model_samples_as_wrapped(name):
    base = tiny("llama3").model if name == "decoder" else attention_model()
    weights = tiny("llama3").params if name == "decoder" else base.init(jax.random.key(0))
    vocabulary = BASE["vocab_size"] if name == "decoder" else VOCABULARY
    model, params = shifted(base), {"base": weights, "shift": jnp.zeros(vocabulary).at[7].set(4.0)}
    config = SamplerConfig(max_new_tokens=6, samples_per_prompt=4, prompt_length=4)
    policy = models.policy(model, policy_params)
    rollout = sample(policy, {"policy": params}, [[1, 2, 3], [4]], jax.random.key(1), config)
    tokens, chosen = jnp.asarray(rollout.tokens), np.asarray(rollout.action_mask)
    scored = jax.jit(functools.partial(plain_log_probs, model))
    wrapped, bare = (np.asarray(scored(p, tokens)) for p in (params, params | {"shift": jnp.zeros(vocabulary)}))
    np.testing.assert_allclose(rollout.log_probs[chosen], wrapped[chosen], atol=2e-5)
    assert np.abs(bare - wrapped)[chosen].max() > 0.5  # the shift does show


def test_equal_models_are_one_policy():
    """The sampler compiles a policy once, by its hash."""
    first, second = (models.from_config(CONFIGS["llama3"]) for _ in range(2))
    for select in (None, policy_params):
        assert models.policy(first, select) == models.policy(second, select)
        assert hash(models.policy(first, select)) == hash(models.policy(second, select))
    different = [
        models.policy(first, policy_params),
        models.policy(first),
        models.policy(shifted(first), policy_params),
        models.policy(tiny("llama2").model),
    ]
    assert len(set(different)) == 4


def test_newer_and_older_configurations_read_alike():
    older = models.from_config(CONFIGS["gemma3"]).config
    newer = {key: value for key, value in CONFIGS["gemma3"].items() if "rope" not in key and "pattern" not in key}
    newer["layer_types"] = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    newer["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    nested = {"model_type": "gemma3", "text_config": newer, "vision_config": {}}
    for source in (newer, nested):
        config = models.from_config(source).config
        assert config.inside_gemma3 == (source is nested)
        assert dataclasses.replace(config, source=older.source, inside_gemma3=False) == older
    flat = {key: value for key, value in CONFIGS["llama3"].items() if "rope" not in key}
    flat["rope_parameters"] = {**LLAMA3_ROPE, "rope_theta": 5e5}
    assert models.from_config(flat).config.rope == models.from_config(CONFIGS["llama3"]).config.rope


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama2", {"rope_parameters": LINEAR}),
        ("llama2", {"rope_parameters": LINEAR, "rope_theta": 5e5}),
        ("mixtral", {"rope_parameters": LINEAR}),
        ("llama2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": LINEAR}),
        ("gemma3", {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}}),
        ("gemma3", {"rope_parameters": {"full_attention": LINEAR}, "rope_theta": 3e6, "rope_local_base_freq": 2e4}),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": 3e6}}, "rope_scaling": LINEAR}),
    ],
)
def test_rotary_embeddings_are_read_as_transformers_reads_them(family, change):
    transformers = pytest.importorskip("transformers")
    source = {key: value for key, value in CONFIGS[family].items() if "rope" not in key} | change
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(source)).rope_parameters
    config = models.from_config(source).config
    kinds = {"full_attention": config.rope, "sliding_attention": config.sliding_rope}
    for name, ours in kinds.items():
        expected = theirs.get(name, theirs)
        assert ours.theta == expected["rope_theta"]
        assert ours.scaling == expected["rope_type"]
        assert ours.factor == expected.get("factor", 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mamba"},
            "supported: llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, olmoe, gemma2, gemma3_text, gemma3",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
        ({"hidden_act": "relu"}, "'relu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"head_dim": 9}, "4 heads of width 9 with 4 key-value heads"),
        ({"num_key_value_heads": 3}, "with 3 key-value heads"),
    ],
)
def test_unsupported_configurations_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        models.from_config(CONFIGS["llama2"] | change)
