"""The sampler against exact probabilities, on a trigram table that needs no model."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests.fixtures import several
from tests.fixtures.sampling import KEY, PROMPTS, ROOT, STOP, V, completions, trigram
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.sampler import (
    SamplerConfig,
    invert_cdf,
    row_keys,
    run_key,
    sample,
    sample_tokens,
    take_rows,
)
from tpu_rl.types import Purpose


@pytest.fixture(scope="module")
def params():
    return {"table": 1.5 * jax.random.normal(jax.random.key(7), (V, V, V))}


@pytest.fixture(scope="module")
def toy():
    return trigram()[0]


def truncated_softmax(logits: np.ndarray, config: SamplerConfig) -> np.ndarray:
    """[V] -> [V] float64, by sorting: the plain definition of temperature, top-k, top-p and min-p
    in this order."""
    logits = np.asarray(logits, np.float64) / config.temperature
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p)
    if config.top_k is not None:
        p[order[config.top_k :]] = 0
        p /= p.sum()
    if config.top_p is not None:
        enough = np.searchsorted(np.cumsum(p[order]), config.top_p) + 1
        p[order[enough:]] = 0
        p /= p.sum()
    if config.min_p is not None:
        p[p < config.min_p * p.max()] = 0
        p /= p.sum()
    return p


TRUNCATIONS = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("truncation", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_samples_follow_the_exact_probabilities(toy, params, truncation):
    config = SamplerConfig(
        max_new_tokens=1, samples_per_prompt=4000, max_num_seqs=4000, prompt_length=4, **truncation
    )
    rollout = sample(toy, params, [[1, 2, 3]], KEY, config)
    exact = truncated_softmax(params["table"][2, 3], config)
    counts = np.bincount(rollout.tokens[:, 3], minlength=V)
    possible = exact > 0
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible], 4000 * exact[possible]).pvalue > 1e-3
    if truncation:
        plain = truncated_softmax(params["table"][2, 3], SamplerConfig(1))
        assert (
            stats.chisquare(counts + 1, (4000 + V) * plain).pvalue < 1e-6
        )  # the test can tell the difference


@pytest.mark.parametrize("truncation", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_both_log_probs_against_plain_numpy(toy, params, truncation):
    config = SamplerConfig(max_new_tokens=6, stop_ids=(STOP,), samples_per_prompt=3, **truncation)
    rollout = sample(toy, params, PROMPTS, KEY, config)
    full = SamplerConfig(1, temperature=config.temperature)
    checked = 0
    for n, row in enumerate(rollout.tokens):
        for t in np.flatnonzero(rollout.action_mask[n]):
            logits = params["table"][row[t - 2] if t > 1 else 0, row[t - 1]]
            checked += 1
            np.testing.assert_allclose(
                [rollout.log_probs[n, t], rollout.behaviour_log_probs[n, t]],
                np.log(
                    [
                        truncated_softmax(logits, full)[row[t]],
                        truncated_softmax(logits, config)[row[t]],
                    ]
                ),
                atol=2e-6,
            )
    assert checked == rollout.action_mask.sum() > 20
    for log_probs in (rollout.log_probs, rollout.behaviour_log_probs):
        assert not log_probs[~rollout.action_mask].any()
    if set(truncation) <= {"temperature"}:
        np.testing.assert_array_equal(rollout.log_probs, rollout.behaviour_log_probs)


def test_calls_of_one_shape_share_their_programs(params):
    """Answers to 36 prompts, in three parts of the 16 rows of a step, and greedy ones."""
    policy, counts = trigram()
    step = SamplerConfig(
        max_new_tokens=9, samples_per_prompt=4, prompt_length=8, stop_ids=(STOP,), max_num_seqs=9
    )
    sample(policy, params, PROMPTS, KEY, step)
    programs = list(counts.traces)
    own = replace(step, samples_per_prompt=1)
    shaped = replace(own, shapes_of=(len(PROMPTS), 4))
    finished = {}
    rollout = sample(policy, params, 9 * PROMPTS, KEY, shaped, on_finished=finished.update)
    greedy = sample(policy, params, PROMPTS, KEY, replace(shaped, temperature=0))
    assert counts.traces == programs
    alone = sample(trigram()[0], params, 9 * PROMPTS, KEY, own)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), rollout, alone)
    assert [finished[row] for row in range(36)] == completions(alone)
    drawn = sample(trigram()[0], params, PROMPTS, KEY, replace(own, temperature=0))
    assert completions(greedy) == completions(drawn)
    np.testing.assert_array_equal(greedy.log_probs, drawn.log_probs)


def test_greedy_takes_the_most_likely_token_and_reports_unscaled_log_probs(toy, params):
    rollout = sample(
        toy, params, PROMPTS, KEY, SamplerConfig(max_new_tokens=5, temperature=0, top_k=3)
    )
    table = np.asarray(params["table"], np.float64)
    for row, prompt, log_probs in zip(rollout.tokens, PROMPTS, rollout.log_probs, strict=True):
        expected = [0, *prompt]
        for _ in range(5):
            logits = table[expected[-2], expected[-1]]
            expected.append(int(logits.argmax()))
            at = len(expected) - 2
            np.testing.assert_allclose(
                log_probs[at], logits.max() - np.log(np.exp(logits).sum()), atol=2e-6
            )
        assert row[: len(expected) - 1].tolist() == expected[1:]
    assert not rollout.behaviour_log_probs.any()


@pytest.mark.parametrize(
    ("vocabulary", "density"), [(1, 0.5), (128, 1e-4), (129, 0.5), (50_000, 1e-4), (50_000, 0.5)]
)
def test_tokens_without_probability_are_never_returned(vocabulary, density):
    rng = np.random.default_rng(vocabulary)
    mass = np.where(
        rng.random((64, vocabulary)) < density, rng.random((64, vocabulary)) ** 20, 0
    ).astype(np.float32)
    mass[np.arange(64), rng.integers(vocabulary, size=64)] = 1.0
    mass[:16, -1], mass[16:32, 0] = 0, 0
    mass[mass.max(axis=1) == 0, 0] = 1.0
    for uniform in (
        0.0,
        1e-7,
        0.25,
        0.5,
        1 - 2**-24,
        np.nextafter(np.float32(1), np.float32(0)),
        1.0,
    ):
        token = jax.jit(invert_cdf)(jnp.asarray(mass), jnp.full(64, uniform, jnp.float32))
        assert (np.take_along_axis(mass, np.asarray(token)[:, None], axis=1) > 0).all(), uniform


def test_inversion_finds_the_interval_that_holds_the_uniform():
    rng = np.random.default_rng(0)
    mass = rng.random((200, 1000)).astype(np.float32) * (rng.random((200, 1000)) < 0.3)
    uniform = rng.random(200).astype(np.float32)
    token = np.asarray(jax.jit(invert_cdf)(jnp.asarray(mass), jnp.asarray(uniform)))
    cumulative = (
        np.cumsum(mass.astype(np.float64), axis=1) / mass.sum(axis=1, dtype=np.float64)[:, None]
    )
    upper = np.take_along_axis(cumulative, token[:, None], axis=1)[:, 0]
    lower = upper - np.take_along_axis(mass, token[:, None], axis=1)[:, 0] / mass.sum(axis=1)
    assert ((lower - 1e-6 <= uniform) & (uniform <= upper + 1e-6)).all()
    assert (token // 128).max() > 3
    # After NaN, the token is any, but one of the vocabulary.
    nothing = jax.jit(invert_cdf)(jnp.full(mass.shape, jnp.nan), jnp.asarray(uniform))
    assert np.asarray(nothing).max() < 1000


@pytest.mark.slow
def test_ties_at_the_threshold_stay_and_the_likeliest_token_always_does():
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.4, 0.2, 0.2, 0.2])), (4, 4))
    uniforms = jnp.array([0.01, 0.5, 0.7, 0.99])
    tokens, *_ = sample_tokens(logits, uniforms, SamplerConfig(1, top_k=2))
    assert set(tokens.tolist()) == {0, 1, 2, 3}
    tokens, *_ = sample_tokens(logits, uniforms, SamplerConfig(1, top_p=1e-6))
    assert set(tokens.tolist()) == {0}


def test_same_key_same_samples_and_other_keys_differ(toy, params):
    config = SamplerConfig(max_new_tokens=8)
    first = sample(toy, params, PROMPTS, KEY, config)
    again = sample(toy, params, PROMPTS, KEY, config)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for key in (
        run_key(0, Purpose.ROLLOUT, 1),
        run_key(0, Purpose.EVALUATION, 0),
        run_key(1, Purpose.ROLLOUT, 0),
    ):
        assert (sample(toy, params, PROMPTS, key, config).tokens != first.tokens).any(axis=1).all()
    np.testing.assert_array_equal(first.birth_key, jax.random.key_data(row_keys(KEY, np.arange(4))))


def test_completions_of_one_prompt_differ(toy, params):
    rollout = sample(
        toy, params, [[1, 2]], KEY, SamplerConfig(max_new_tokens=12, samples_per_prompt=8)
    )
    assert len({tuple(row) for row in rollout.tokens.tolist()}) == 8


@pytest.mark.slow
def test_a_row_depends_on_its_key_and_prompt_alone(toy, params):
    config = SamplerConfig(
        max_new_tokens=8, stop_ids=(STOP,), samples_per_prompt=2, prompt_length=8
    )
    together = completions(sample(toy, params, PROMPTS, KEY, config))

    order = [2, 0, 3, 1]
    ids = np.array([[2 * i, 2 * i + 1] for i in order]).ravel()
    shuffled = completions(
        sample(toy, params, [PROMPTS[i] for i in order], KEY, config, row_ids=ids)
    )
    assert [shuffled[ids.tolist().index(n)] for n in range(8)] == together

    for max_num_seqs in (2, 6):  # four waves; two waves, the last one filled up
        assert (
            completions(
                sample(toy, params, PROMPTS, KEY, replace(config, max_num_seqs=max_num_seqs))
            )
            == together
        )

    each = replace(config, samples_per_prompt=1)
    assert (
        completions(sample(toy, params, [p for p in PROMPTS for _ in range(2)], KEY, each))
        == together
    )
    assert completions(sample(toy, params, PROMPTS[1:2], KEY, each, row_ids=[3])) == together[3:4]
    wider = completions(sample(toy, params, PROMPTS, KEY, replace(config, prompt_length=16)))
    assert wider == together


def test_the_uniform_of_a_token_comes_from_its_row_key_and_position(toy, params):
    rollout = sample(
        toy, params, PROMPTS, KEY, SamplerConfig(max_new_tokens=5, samples_per_prompt=2)
    )
    for row, mask, birth_key in zip(
        rollout.tokens, rollout.action_mask, rollout.birth_key, strict=True
    ):
        for t in np.flatnonzero(mask):
            uniform = jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(birth_key), t))
            logits = params["table"][row[t - 2] if t > 1 else 0, row[t - 1]]
            cumulative = np.cumsum(truncated_softmax(logits, SamplerConfig(1)))
            below = cumulative[row[t] - 1] if row[t] else 0
            assert below - 1e-6 <= uniform <= cumulative[row[t]] + 1e-6


@pytest.mark.slow
def test_rows_end_at_their_stop_token_or_limit_and_stay_frozen(toy, params):
    config = SamplerConfig(
        max_new_tokens=10, samples_per_prompt=8, stop_ids=(STOP, 11), pad_id=0, prompt_length=5
    )
    limits = np.tile([1, 2, 10, 10], 8)
    rollout = sample(toy, params, PROMPTS, KEY, config, limits=limits, policy_step=3)
    free = completions(sample(toy, params, PROMPTS, KEY, replace(config, stop_ids=())))
    lengths = []
    for n, completion in enumerate(completions(rollout)):
        stops = [t for t, token in enumerate(free[n]) if token in config.stop_ids]
        length = min(limits[n], stops[0] + 1 if stops else 10)
        lengths.append(length)
        assert completion == free[n][:length]
        assert rollout.truncated[n] == (completion[-1] not in config.stop_ids)
        prompt = PROMPTS[n // 8]
        assert rollout.tokens[n].tolist() == prompt + completion + [0] * (15 - len(prompt) - length)
        assert np.flatnonzero(rollout.action_mask[n]).tolist() == list(
            range(len(prompt), len(prompt) + length)
        )
    assert set(lengths) >= {1, 2, 10}
    assert 0 < rollout.truncated.sum() < 32
    assert any(
        rollout.action_mask[n].sum() == limits[n] and not rollout.truncated[n] for n in range(32)
    )
    assert rollout.group_id.tolist() == sorted([0, 1, 2, 3] * 8)
    assert rollout.policy_step.tolist() == [3] * 32
    assert not rollout.rewards.any()
    assert rollout.rewards.dtype == np.float32


def test_decoding_stops_early_and_goes_on_over_segments(params):
    policy, counts = trigram()
    config = SamplerConfig(max_new_tokens=300, prompt_length=8)

    def steps(limits):
        counts.steps.clear()
        rollout = sample(policy, params, PROMPTS, KEY, config, limits=limits)
        jax.effects_barrier()
        assert rollout.action_mask.sum(axis=1).tolist() == limits
        return len(counts.steps)

    assert steps([3, 1, 7, 2]) == 7
    assert steps([150, 1, 1, 1]) == 150
    assert steps([300, 5, 5, 5]) == 300


@pytest.mark.slow
def test_the_same_shapes_compile_once(params):
    policy, counts = trigram()
    config = SamplerConfig(max_new_tokens=4, prompt_length=8, max_num_seqs=3)
    sample(policy, params, PROMPTS, KEY, config)
    traced = len(counts.traces)
    assert sorted(set(counts.traces)) == [1, 8]
    other = {"table": params["table"] + 1}
    sample(
        policy, other, PROMPTS[::-1], run_key(5, Purpose.ROLLOUT, 9), config, limits=[1, 2, 3, 4]
    )
    assert len(counts.traces) == traced


def test_take_rows_gathers_any_cache():
    cache = {
        "lengths": jnp.arange(3),
        "reference": {"lengths": jnp.arange(3), "full": jnp.arange(24).reshape(2, 3, 4)},
        "q": (jnp.arange(3).reshape(1, 3),),
    }
    taken = take_rows(cache, jnp.array([2, 0, 2, 1]))
    assert (
        taken["lengths"].tolist()
        == taken["reference"]["lengths"].tolist()
        == taken["q"][0][0].tolist()
        == [2, 0, 2, 1]
    )
    np.testing.assert_array_equal(
        taken["reference"]["full"], cache["reference"]["full"][:, np.array([2, 0, 2, 1])]
    )


FAMILIES = {
    "llama": {"model_type": "llama"},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 10,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_log_probs_are_those_of_the_model_that_trains(family):
    model = models.from_config(
        {
            "hidden_size": 40,
            "intermediate_size": 52,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 131,
            "max_position_embeddings": 64,
            **family,
        }
    )
    params = jax.jit(model.init)(jax.random.key(3))
    config = SamplerConfig(
        max_new_tokens=20, temperature=0.7, top_p=0.95, stop_ids=(5,), samples_per_prompt=3
    )
    rollout = sample(models.policy(model), params, PROMPTS, KEY, config)
    scores = (
        jax.jit(partial(models.apply, model))(params, rollout.tokens)[:, :-1] / config.temperature
    )
    log_probs = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(scores)), rollout.tokens[:, 1:, None], axis=2
    )[..., 0]
    mask = rollout.action_mask[:, 1:]
    assert mask.sum() > 100
    assert np.abs(log_probs - rollout.log_probs[:, 1:])[mask].max() < 2e-5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": 2.0}, "min_p is 2"),
        ({"samples_per_prompt": 0}, "samples_per_prompt is 0"),
        ({"stop_ids": (-1,)}, "stop_ids is"),
    ],
)
def test_bad_settings_are_named(values, message):
    with pytest.raises(InputError, match=message):
        SamplerConfig(**{"max_new_tokens": 4, **values})


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "a prompt is empty"),
        ([[1], [1] * 9], {}, "longer than prompt_length = 8"),
        ([[1]], {"limits": [1, 2]}, "limits has shape"),
        ([[1]], {"limits": [0]}, "limits go from 0 to 0"),
        ([[1]], {"limits": [5]}, "limits go from 5 to 5"),
        ([[1]], {"row_ids": [1, 2]}, "row_ids has shape"),
    ],
)
def test_bad_prompts_are_named(toy, params, prompts, options, message):
    with pytest.raises(InputError, match=message):
        sample(
            toy, params, prompts, KEY, SamplerConfig(max_new_tokens=4, prompt_length=8), **options
        )


ON_A_MESH = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tests.fixtures.sampling import KEY, PROMPTS, STOP, V, trigram
from tpu_rl.train import sharding
from tpu_rl.sampler import SamplerConfig, sample

policy, counts = trigram()
params = {"table": 1.5 * jax.random.normal(jax.random.key(7), (V, V, V))}
config = SamplerConfig(max_new_tokens=140, stop_ids=(STOP,), samples_per_prompt=2)
alone = sample(policy, params, PROMPTS[:3], KEY, config)
mesh = sharding.make_mesh(2, 2)
spread = jax.device_put(params, NamedSharding(mesh, PartitionSpec(None, None, "tensor")))
with jax.set_mesh(mesh):
    once = sample(policy, spread, PROMPTS[:3], KEY, config, mesh=mesh)
    traced = len(counts.traces)
    again = sample(policy, spread, PROMPTS[:3], KEY, config, mesh=mesh)
assert len(counts.traces) == traced
for other in (once, again):
    np.testing.assert_array_equal(alone.tokens, other.tokens)
    np.testing.assert_allclose(alone.log_probs, other.log_probs, atol=1e-6)
print("same")
"""


@pytest.mark.slow
def test_rows_spread_over_a_mesh_are_the_same_rows():
    command, env = [sys.executable, "-c", ON_A_MESH], several.virtual_devices(4)
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.stdout.strip() == "same", result.stderr
