"""The decoder against itself, for every family.

Packed rows and the cache must give the results of plain sequences.
"""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.decoders import (
    BASE,
    CAPACITY,
    CONFIGS,
    LENGTH,
    LLAMA3_ROPE,
    every_family,
    every_family_with_branches,
    plain,
    tiny,
    tokens_of,
)
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.models import kv_cache, layers
from tpu_rl.proofs.tiny import VOCABULARY, attention_model, plain_log_probs
from tpu_rl.sampler import SamplerConfig, sample
from tpu_rl.types import MIXED_INPUTS, PackedRows


def log_probs(family, tokens, *layout):
    """Return log-probs [3, LENGTH, V] of the family's tiny model."""
    return jax.nn.log_softmax(tiny(family).logits(tiny(family).params, tokens, *layout))


@pytest.mark.slow
@every_family_with_branches
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
    """Return the cache of the first `lengths` of tokens [3, LENGTH], and logits [3, 11, V]."""
    model, params, _, extend = tiny(family)
    positions, _, trunk = plain(3)
    cache = models.policy(model).init_cache(params, 3, CAPACITY)
    logits, cache = extend(params, cache, tokens[:, :11], positions[:, :11], trunk[:, :11], lengths)
    return cache, logits


@every_family
def test_cache_equals_whole_sequences(family):
    """Ragged prefill, then steps of two tokens, of which some rows commit none or one."""
    _, params, _, extend = tiny(family)
    tokens, lengths = tokens_of((3, LENGTH)), jnp.array([11, 6, 1])
    expected = log_probs(family, tokens, *plain(3))
    cache, logits = prefill(family, tokens, lengths)
    assert all(
        leaf.shape[1] == 3
        for kind in ("full", "sliding", "unrotated", "linear")
        for leaf in jax.tree.leaves(cache.get(kind, []))
    )
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(
            jax.nn.log_softmax(logits)[row, :length], expected[row, :length], atol=2e-5
        )

    for commit in (jnp.array([2, 0, 2]), jnp.array([2, 2, 1]), jnp.array([2, 2, 2])):
        at = cache["lengths"][:, None] + jnp.arange(2)[None, :]
        trunk = jnp.zeros_like(at)
        logits, cache = extend(params, cache, jnp.take_along_axis(tokens, at, 1), at, trunk, commit)
        wanted = jnp.take_along_axis(expected, at[..., None], 1)
        np.testing.assert_allclose(jax.nn.log_softmax(logits), wanted, atol=2e-5)
    assert cache["lengths"].tolist() == [17, 10, 6]


def test_quantization_error_is_at_most_half_a_step():
    x = (
        jax.random.normal(jax.random.key(0), (3, 5, 2, 16))
        * jnp.array([1e-3, 1.0, 40.0])[:, None, None, None]
    )
    x = x.at[0, 0].set(0.0)
    numbers, scale = kv_cache.quantize(x)
    assert numbers.dtype == jnp.int8
    assert int(jnp.abs(numbers).max()) == 127
    assert (
        float(
            (jnp.abs(numbers * scale[..., None] - x) / jnp.maximum(scale, 1e-30)[..., None]).max()
        )
        <= 0.5 + 1e-4
    )
    np.testing.assert_array_equal((numbers * scale[..., None])[0, 0], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "transposed"), [("qwen3", False), ("gemma3", False), ("gemma3", True)]
)
def test_int8_cache_equals_whole_sequences_with_rounded_keys_and_values(
    family, transposed, monkeypatch
):
    model, params, _, _ = tiny(family)
    model = models.with_int8_cache(
        models.variant(model, attention={"cpu_cache": True}) if transposed else model
    )
    tokens, lengths = tokens_of((3, LENGTH)), jnp.array([11, 6, 1])
    plainly = log_probs(family, tokens, *plain(3))
    cache = models.policy(model).init_cache(params, 3, CAPACITY)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache["full"])} == {"int8", "float32"}
    positions, _, branches = plain(3)
    extend = jax.jit(models.policy(model).extend)
    logits, cache = extend(params, cache, tokens, positions, branches, lengths)
    at = cache["lengths"][:, None] + jnp.arange(2)[None, :]
    after, _ = extend(
        params, cache, jnp.take_along_axis(tokens, at, 1), at, jnp.zeros_like(at), jnp.full(3, 2)
    )

    def rounded(x):
        numbers, scale = kv_cache.quantize(x)
        return numbers * scale[..., None]

    attention = layers.attention
    monkeypatch.setattr(
        layers,
        "attention",
        lambda q, k, v, *a, **how: attention(q, rounded(k), rounded(v), *a, **how),
    )
    whole = jax.jit(model.hidden)(params, tokens, *plain(3))
    expected = jax.nn.log_softmax(model.logits(params, whole))
    assert 1e-4 < float(jnp.abs(expected - plainly).max()) < 0.1
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(
            jax.nn.log_softmax(logits)[row, :length], expected[row, :length], atol=2e-5
        )
    np.testing.assert_allclose(
        jax.nn.log_softmax(after), jnp.take_along_axis(expected, at[..., None], 1), atol=2e-5
    )


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_cache_that_is_read_row_by_row_equals_whole_sequences(family, monkeypatch):
    """With keys transposed, as on CPUs: latents are one wide head, and sinks are no rows."""
    monkeypatch.setattr(kv_cache, "CPU_BLOCK_BYTES", 1)
    model, params, _, _ = tiny(family)
    tokens, lengths = tokens_of((3, LENGTH)), jnp.array([11, 6, 1])
    expected = log_probs(family, tokens, *plain(3))
    positions, _, trunk = plain(3)
    policy = models.policy(models.variant(model, attention={"cpu_cache": True}))
    cache = policy.init_cache(params, 3, CAPACITY)
    logits, cache = jax.jit(policy.extend)(params, cache, tokens, positions, trunk, lengths)
    assert kv_cache.TRANSPOSED_KEYS in cache["full"]
    for row, length in enumerate(lengths):
        found = jax.nn.log_softmax(logits)[row, :length]
        np.testing.assert_allclose(found, expected[row, :length], atol=2e-5)


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_uncommitted_branches_leave_the_cache_unchanged(family):
    _, params, _, extend = tiny(family)
    tokens, candidates, lengths = (
        tokens_of((3, LENGTH)),
        tokens_of((3, 2), 5),
        jnp.array([11, 6, 8]),
    )
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


def test_tokens_beyond_the_end_of_the_cache_are_dropped():
    _, params, _, extend = tiny("llama3")
    cache, _ = prefill("llama3", tokens_of((3, LENGTH)), jnp.array([11, 11, 11]))
    cache |= {"lengths": jnp.full(3, CAPACITY - 1)}
    at = cache["lengths"][:, None] + jnp.arange(2)[None, :]
    logits, after = extend(
        params, cache, tokens_of((3, 2)), at, jnp.zeros_like(at), jnp.zeros(3, jnp.int32)
    )
    assert jnp.isfinite(logits).all()
    np.testing.assert_array_equal(after["full"]["k"][..., :-1, :], cache["full"]["k"][..., :-1, :])
    assert float(jnp.abs(after["full"]["k"][..., -1, :] - cache["full"]["k"][..., -1, :]).max()) > 0


@pytest.mark.slow
def test_gradients_are_finite_and_ignore_padding():
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


@pytest.mark.slow
def test_product_has_the_gradients_of_einsum():
    for equation, inputs, weights in (
        ("btd,hed->bthe", (2, 3, 6), (2, 4, 6)),
        ("bthe,hed->btd", (2, 3, 2, 4), (2, 4, 6)),
    ):
        x, weight = (
            jax.random.normal(jax.random.key(0), inputs),
            jax.random.normal(jax.random.key(1), weights),
        )

        def gradients(multiply, equation=equation, x=x, weight=weight):
            return jax.grad(
                lambda x, weight: jnp.sum(jnp.sin(multiply(equation, x, weight))), (0, 1)
            )(x, weight)

        for ours, einsums in zip(gradients(layers.product), gradients(jnp.einsum), strict=True):
            np.testing.assert_allclose(ours, einsums, rtol=1e-5, atol=1e-5)


def test_attention_mask_by_hand():
    """One row: prompt p p, branch 1 a a, branch 2 b b, then another segment q, then padding."""
    segments = jnp.array([[1, 1, 1, 1, 1, 1, 2, 0]])
    slots = layers.TokenIndex(
        jnp.arange(8)[None],
        jnp.array([[0, 1, 2, 3, 2, 3, 0, 0]]),
        segments,
        layers.visible_until(segments, jnp.array([[0, 0, 1, 1, 2, 2, 0, 0]])),
    )
    full = [
        "10000000",
        "11000000",
        "11100000",
        "11110000",
        "11001000",
        "11001100",
        "00000010",
        "00000001",
    ]
    near = [
        "10000000",
        "11000000",
        "01100000",
        "00110000",
        "01001000",
        "00001100",
        "00000010",
        "00000001",
    ]
    for window, rows in ((None, full), (2, near)):
        seen = layers.attention_mask(slots, slots, window)[0].astype(int)
        assert ["".join(map(str, row)) for row in seen.tolist()] == rows


def test_padding_of_the_vocabulary_has_probability_zero():
    model, params, _, _ = tiny("qwen2")
    config = dataclasses.replace(
        model.config, vocab=dataclasses.replace(model.config.vocab, valid=100)
    )
    hidden = jnp.ones((1, 4, config.hidden_size))
    out = jax.nn.softmax(models.decoder(config).logits(params, hidden))
    assert float(out[..., 100:].max()) == 0.0
    expected = jax.nn.softmax(model.logits(params, hidden)[..., :100])
    np.testing.assert_allclose(out[..., :100], expected, rtol=1e-6)


def test_layer_types_are_split_into_pattern_and_tail():
    config = tiny("gemma3").model.config
    assert config.layer_types == ("sliding", "full", "sliding", "full", "sliding")
    assert (config.period, config.repetitions) == (2, 2)
    assert tiny("qwen2").model.config.period == 3
    deep = models.from_config(
        CONFIGS["gemma3"] | {"num_hidden_layers": 26, "sliding_window_pattern": 6}
    ).config
    assert (deep.period, deep.repetitions, deep.layer_types.count("full")) == (6, 4, 4)


@every_family
def test_axes_have_the_structure_of_params(family):
    model, params, _, _ = tiny(family)
    jax.tree.map(
        lambda leaf, axes: np.testing.assert_equal(len(axes), leaf.ndim), params, model.axes
    )
    assert hash(model.config) == hash(models.from_config(CONFIGS[family]).config)


def test_random_params_have_the_right_scale_and_differ_by_leaf_and_key():
    model = tiny("qwen3").model
    first, second = (jax.jit(model.init)(jax.random.key(seed)) for seed in (0, 1))
    layer = first["layers"]["layer_0"]
    assert float(jnp.abs(layer["query"] - second["layers"]["layer_0"]["query"]).max()) > 0
    assert float(jnp.abs(layer["gate"] - layer["up"]).max()) > 0
    for name, spread in (
        ("query", 40**-0.5),
        ("output", (48 * 4) ** -0.5),
        ("down", (52 * 4) ** -0.5),
    ):
        assert float(layer[name].std()) == pytest.approx(spread, rel=0.05)
    np.testing.assert_array_equal(layer["mlp_norm"], 1.0)


@pytest.mark.slow
def test_bfloat16_computes_in_bfloat16_with_float32_logits():
    params = tiny("llama2").params
    model = models.from_config(CONFIGS["llama2"], "bfloat16", param_dtype="float32")
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))}
    assert dtypes == {jnp.dtype("float32")}
    hidden = jax.eval_shape(model.hidden, params, *(jnp.zeros((1, 4), jnp.int32) for _ in range(4)))
    assert hidden.dtype == jnp.bfloat16
    assert jax.eval_shape(model.logits, params, hidden).dtype == jnp.float32
    tokens = tokens_of((3, LENGTH))
    exact, rounded = (
        log_probs("llama2", tokens, *plain(3)),
        jax.nn.log_softmax(models.apply(model, params, tokens)),
    )
    assert 1e-4 < float(jnp.abs(exact - rounded).mean()) < 0.1


def test_role_and_apply_agree():
    model, params, _, _ = tiny("llama3")
    tokens = tokens_of((3, LENGTH))
    positions, segments, branches = plain(3)
    role = models.role(model, lambda params: params["policy"])
    tree = {"policy": params, "reference": None}
    hidden = role.hidden(
        tree, PackedRows(tokens, positions, segments, branches, segments, positions)
    )
    expected = log_probs("llama3", tokens, positions, segments, branches)
    np.testing.assert_allclose(jax.nn.log_softmax(role.logits(tree, hidden)), expected, atol=2e-5)
    np.testing.assert_allclose(
        jax.nn.log_softmax(models.apply(model, params, tokens)), expected, atol=2e-5
    )


def shifted(model):
    """The model wrapped as adapters or heads wrap it: params are {"base", "shift" [V]}, logits have
    the shift added."""

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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "attention"])
def test_sampler_uses_a_wrapped_model(name):
    base = tiny("llama3").model if name == "decoder" else attention_model()
    weights = tiny("llama3").params if name == "decoder" else base.init(jax.random.key(0))
    vocabulary = BASE["vocab_size"] if name == "decoder" else VOCABULARY
    model, params = shifted(base), {"base": weights, "shift": jnp.zeros(vocabulary).at[7].set(4.0)}
    config = SamplerConfig(max_new_tokens=6, samples_per_prompt=4, prompt_length=4)
    policy = models.policy(model, policy_params)
    rollout = sample(policy, {"policy": params}, [[1, 2, 3], [4]], jax.random.key(1), config)
    tokens, chosen = jnp.asarray(rollout.tokens), np.asarray(rollout.action_mask)
    scored = jax.jit(functools.partial(plain_log_probs, model))
    wrapped, bare = (
        np.asarray(scored(p, tokens)) for p in (params, params | {"shift": jnp.zeros(vocabulary)})
    )
    np.testing.assert_allclose(rollout.log_probs[chosen], wrapped[chosen], atol=2e-5)
    assert np.abs(bare - wrapped)[chosen].max() > 0.5  # the shift does show


def test_equal_models_give_equal_policies():
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


def test_newer_and_older_configurations_are_read_alike():
    older = models.from_config(CONFIGS["gemma3"]).config
    newer = {
        key: value
        for key, value in CONFIGS["gemma3"].items()
        if "rope" not in key and "pattern" not in key
    }
    newer["layer_types"] = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    newer["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    nested = {"model_type": "gemma3", "text_config": newer, "vision_config": {}}
    for source in (newer, nested):
        config = models.from_config(source).config
        assert config.multimodal == (source is nested)
        assert dataclasses.replace(config, source=older.source, multimodal=False) == older
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
        (
            "llama2",
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "rope_scaling": LINEAR,
            },
        ),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": LINEAR,
                    "sliding_attention": {"rope_type": "default"},
                }
            },
        ),
        (
            "gemma3",
            {
                "rope_parameters": {"full_attention": LINEAR},
                "rope_theta": 3e6,
                "rope_local_base_freq": 2e4,
            },
        ),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_theta": 3e6}}, "rope_scaling": LINEAR},
        ),
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
            "supported: llama, mistral, qwen2, qwen3, qwen2_vl_text, qwen2_5_vl_text, "
            "qwen3_vl_text, qwen3_vl_moe_text, mixtral, qwen3_moe, olmoe, "
            "gemma2, gemma3_text, gemma4_text, gemma4_unified_text, smollm3, olmo2, olmo3, phi3, "
            "glm4, gpt_oss, deepseek_v3, granite, qwen3_5_text, qwen3_5_moe_text, qwen3_next, "
            "gemma3, gemma4, gemma4_unified, qwen3_5, qwen3_5_moe, llava, idefics3, "
            "smolvlm, internvl, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "may always rotate all of them"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.1}, "1 of the 10 dimensions"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0]}},
            "5 pairs(.|\n)*has 1 numbers",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1]},
            "no_rope_layers = \\[1\\](.|\n)*each of 2 layers",
        ),
        (
            {
                "model_type": "smollm3",
                "no_rope_layers": [1, 0],
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 5,
            },
            "no_rope_layers = \\[1, 0\\] is not supported(.|\n)*needs a rotary embedding",
        ),
        ({"hidden_act": "relu"}, "'relu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": None}, "lacks vocab_size"),
        (
            {"head_dim": 9},
            "heads = 4, head_dim = 9, num_key_value_heads = 4 are not supported",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 are not supported"),
    ],
)
def test_unsupported_configurations_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        models.from_config(CONFIGS["llama2"] | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"n_group": 3}, "n_group = 3"),
        ({"topk_group": 1, "num_experts_per_tok": 3}, "topk_group = 1"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace = 3 is not supported"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"v_head_dim": 20}, "v_head_dim = 20"),
        ({"kv_lora_rank": "16"}, "kv_lora_rank = 16 is out of range"),
    ],
)
def test_unsupported_latent_attention_and_routing_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        models.from_config(CONFIGS["deepseek_v3"] | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"linear_num_value_heads": 3},
            "value_heads = 3, linear_num_key_heads = 2 are not supported",
        ),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0 is out of range"),
        ({"hidden_act": "gelu"}, "linear attention with hidden_act = 'gelu'"),
        ({"attention_bias": True}, "linear attention with attention_bias = True"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "full_attention or linear_attention"),
        (
            {"model_type": "qwen3_next", "mlp_only_layers": [1]},
            "only some layers have experts",
        ),
        (
            {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size = 0 is out of range",
        ),
    ],
)
def test_unsupported_linear_attention_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        models.from_config(CONFIGS["qwen3_5"] | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"is_causal": False}, "is_causal = False is not supported"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers = 5 is out of range"),
        ({"num_kv_shared_layers": 4}, "no layer before the last 4 is of type full"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input = -1 is out of range"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99},
            "vocab_size_per_layer_input = 99 is not supported",
        ),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads = 3 are not"),
        ({"global_head_dim": 0}, "global_head_dim = 0 is out of range"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "must have the same head_dim"),
        ({"enable_moe_block": True}, "num_experts = None is out of range"),
    ],
)
def test_unsupported_variants_of_gemma4_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        models.from_config(CONFIGS["gemma4"] | change)


def test_lengths_with_other_rotary_angles_are_refused():
    config = models.from_config(CONFIGS["phi3"]).config
    config.require_length(32, "--batch.row-length")
    with pytest.raises(InputError, match=r"of 33 tokens(.|\n)*--batch.row-length(.|\n)*beyond 32"):
        config.require_length(33, "--batch.row-length")
    models.from_config(CONFIGS["llama3"]).config.require_length(10**6, "--batch.row-length")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_inputs_between_two_tokens_are_rows_of_another_table(family):
    """Slot i reads row i of a table of mixtures. At share 1 it is the other token that is read."""
    model, params, _, _ = tiny(family)
    tokens, others = tokens_of((1, LENGTH)), tokens_of((1, LENGTH), seed=5)
    positions = jnp.arange(LENGTH)[None]
    rows = (positions, jnp.ones_like(positions), jnp.zeros_like(positions))
    hidden = jax.jit(model.hidden)
    table = params["embedding"]
    for share in (0.3, 1.0):
        entry = {MIXED_INPUTS: {"tokens": others, "share": jnp.float32(share)}}
        mixed = (1 - share) * table[tokens[0]] + share * table[others[0]]
        virtual = params | {"embedding": table.at[:LENGTH].set(mixed)}
        expected = hidden(virtual, positions, *rows)
        actual = hidden(params | entry, tokens, *rows)
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)
        if share == 1:
            np.testing.assert_allclose(actual, hidden(params, others, *rows), rtol=2e-4, atol=2e-5)
