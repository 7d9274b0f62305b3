"""Slots that refill, batches that shrink, caches that grow: the same rows as a static batch's, in
fewer steps."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import several
from tests.fixtures.sampling import (
    KEY,
    PROMPTS,
    STOP,
    TWO_KINDS,
    V,
    completions,
    contains,
    decoder,
    same_or_within_rounding,
    trigram,
)
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.losses import return_distributions
from tpu_rl.sampler import SamplerConfig, SegmentConfig, guided_policy, sample
from tpu_rl.types import Policy

ROOT = Path(__file__).parents[2]
PARAMS = {"table": 1.5 * jax.random.normal(jax.random.key(7), (V, V, V))}


def countdown() -> tuple[Policy, list[int], list[int]]:
    """Says the number below the one it read: the prompt [n] has a completion of n tokens, n - 1 to
    0, the stop.

    With it, rows decoded in each step, and prompts in each prefill.
    """
    steps, prefills = [], []

    def init_cache(params, rows, length):
        del params, length
        return {"lengths": jnp.zeros(rows, jnp.int32)}

    def extend(params, cache, tokens, positions, branch_ids, commit):
        del params, positions, branch_ids
        rows, width = tokens.shape
        record = steps if width == 1 else prefills
        jax.debug.callback(lambda _: record.append(rows), tokens)
        return 100 * jax.nn.one_hot(tokens - 1, 256), {"lengths": cache["lengths"] + commit}

    return Policy(init_cache, extend), steps, prefills


def long_tailed(rows: int) -> np.ndarray:
    """Lengths: mean 39, 95th percentile 113, at most 192."""
    return np.clip(np.random.default_rng(0).lognormal(3.276, 0.88, rows).astype(int) + 1, 1, 192)


# --- fewer steps ---


@pytest.mark.slow
def test_known_lengths_take_hardly_more_steps_than_the_ideal():
    policy, steps, _ = countdown()
    lengths = long_tailed(256)
    config = SamplerConfig(max_new_tokens=192, max_num_seqs=32, prompt_length=2)
    rollout = sample(policy, {}, [[255]] * 256, KEY, config, limits=lengths)
    jax.effects_barrier()
    np.testing.assert_array_equal(rollout.action_mask.sum(1), lengths)
    ideal, static = lengths.sum() / 32, lengths.reshape(-1, 32).max(1).sum()
    assert len(steps) <= 1.1 * ideal
    assert static > 3 * ideal  # what waves of 32 rows take


@pytest.mark.nightly
def test_unknown_lengths_take_less_than_1_3_times_the_ideal():
    """Rows end where the policy stops, which nobody knows before: the last ones are decoded in ever
    smaller batches."""
    policy, steps, _ = countdown()
    lengths = long_tailed(1024)
    config = SamplerConfig(
        max_new_tokens=192,
        max_num_seqs=32,
        prompt_length=2,
        stop_ids=(0,),
        segments=SegmentConfig(32, 4),
    )
    rollout = sample(policy, {}, [[length] for length in lengths], KEY, config)
    jax.effects_barrier()
    np.testing.assert_array_equal(rollout.action_mask.sum(1), lengths)
    assert not rollout.truncated.any()
    assert len(steps) <= 1.3 * lengths.sum() / 32
    assert sum(steps) <= 1.15 * lengths.sum()
    assert min(steps) == 4


@pytest.mark.slow
@pytest.mark.parametrize("max_num_seqs", [2, 100])
def test_each_prompt_is_prefilled_once(max_num_seqs):
    policy, _, prefills = countdown()
    config = SamplerConfig(
        max_new_tokens=16,
        max_num_seqs=max_num_seqs,
        samples_per_prompt=3,
        prompt_length=2,
        stop_ids=(0,),
        temperature=0,
    )
    prompts = [[length] for length in (4, 16, 1, 9, 2, 2, 12)]
    rollout = sample(policy, {}, prompts, KEY, config)
    jax.effects_barrier()
    assert rollout.action_mask.sum(1).tolist() == [
        length for (length,) in prompts for _ in range(3)
    ]
    pools = {2: 4, 100: 1}[max_num_seqs]
    assert prefills == [-(-7 // pools)] * pools


@pytest.mark.nightly
def test_few_programs_serve_a_long_decode():
    policy, counts = trigram()
    config = SamplerConfig(
        max_new_tokens=200, max_num_seqs=16, prompt_length=8, segments=SegmentConfig(8, 4, 50)
    )
    prompts = PROMPTS * 10
    sample(policy, PARAMS, prompts, KEY, config, limits=np.arange(1, 41) * 5)
    # Prefill, and a step with a queue; without one, two sizes of the cache and, in the last, two
    # smaller batches.
    assert len(counts.traces) <= 6
    traced = len(counts.traces)
    sample(policy, PARAMS, prompts[::-1], KEY, config, limits=np.arange(40, 0, -1) * 5)
    assert len(counts.traces) == traced


# --- the same rows ---


@pytest.mark.slow
def test_slots_leave_no_trace():
    policy, _ = trigram()
    prompts, group = PROMPTS * 3, 3
    config = SamplerConfig(
        max_new_tokens=40, stop_ids=(STOP,), samples_per_prompt=group, prompt_length=8
    )
    limits = np.random.default_rng(3).integers(1, 41, 12 * group)
    static = sample(policy, PARAMS, prompts, KEY, config, limits=limits)
    assert 0 < static.truncated.sum() < 12 * group
    for slots, borders in ((4, SegmentConfig(7, 1, 10)), (11, SegmentConfig(3, 2, 5))):
        refilled = sample(
            policy,
            PARAMS,
            prompts,
            KEY,
            replace(config, max_num_seqs=slots, segments=borders),
            limits=limits,
        )
        jax.tree.map(np.testing.assert_array_equal, refilled, static)


@pytest.mark.slow
def test_refilled_compacted_and_grown_equals_static():
    model, params = decoder(**TWO_KINDS)
    policy = models.policy(model)
    config = SamplerConfig(
        max_new_tokens=40, stop_ids=(5, 9), samples_per_prompt=3, prompt_length=8, temperature=1.3
    )
    prompts = PROMPTS * 2
    static = sample(policy, params, prompts, KEY, config)
    refilled = sample(
        policy,
        params,
        prompts,
        KEY,
        replace(config, max_num_seqs=7, segments=SegmentConfig(6, 1, 8)),
    )
    same = same_or_within_rounding(
        refilled, static, lambda r: jax.jit(partial(models.apply, model))(params, r.tokens), config
    )
    assert same >= 22
    assert len(set(static.action_mask.sum(1))) > 5


@pytest.mark.nightly
@pytest.mark.parametrize(
    "candidate_mass",
    [pytest.param(1.0, marks=pytest.mark.slow), pytest.param(0.6, marks=pytest.mark.nightly)],
)
def test_a_guided_policy_refills_both_of_its_caches(candidate_mass):
    """{reference, q}, of different models; q's has room for the candidates."""
    reference, reference_params = decoder()
    q, q_params = decoder(hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    q, q_params = (
        models.variant(q, num_outputs=1),
        models.head_params(q, q_params, 1, jax.random.key(1)),
    )
    params = guided_policy.with_kl_coef({"policy": reference_params, "q": q_params}, 0.05)
    policy = guided_policy.guide(
        models.policy(reference, lambda tree: tree["policy"]),
        models.policy(q, lambda tree: tree["q"]),
        return_distributions.offset("q_sharp"),
        4,
        "own",
        candidate_mass,
    )
    config = SamplerConfig(max_new_tokens=20, stop_ids=(5,), samples_per_prompt=2, prompt_length=8)
    static = sample(policy, params, PROMPTS, KEY, config)
    refilled = sample(
        policy,
        params,
        PROMPTS,
        KEY,
        replace(config, max_num_seqs=3, segments=SegmentConfig(4, 1, 5)),
    )

    def logits_of(rollout):
        positions = jnp.broadcast_to(jnp.arange(rollout.tokens.shape[1]), rollout.tokens.shape)
        cache = policy.init_cache(params, *rollout.tokens.shape)
        lengths = jnp.full(len(rollout.tokens), rollout.tokens.shape[1])
        return policy.extend(
            params, cache, rollout.tokens, positions, jnp.zeros_like(positions), lengths
        )[0]

    assert same_or_within_rounding(refilled, static, jax.jit(logits_of), config) >= 7


# --- between segments ---


@pytest.mark.slow
def test_each_row_is_handed_over_once_and_early():
    policy, steps, _ = countdown()
    lengths = [3, 30, 8, 1, 17, 2, 9, 12]
    config = SamplerConfig(
        max_new_tokens=30, max_num_seqs=3, prompt_length=2, stop_ids=(0,), segments=SegmentConfig(4)
    )
    handed: list[tuple[int, dict[int, list[int]]]] = []

    def on_finished(rows):
        jax.effects_barrier()
        handed.append((len(steps), rows))

    rollout = sample(
        policy, {}, [[length] for length in lengths], KEY, config, on_finished=on_finished
    )
    assert sorted(row for _, rows in handed for row in rows) == list(range(8))
    together = {row: tokens for _, rows in handed for row, tokens in rows.items()}
    assert [together[row] for row in range(8)] == completions(rollout)
    assert completions(rollout) == [list(range(length))[::-1] for length in lengths]
    early = [rows for at, rows in handed if at < 30]
    assert sum(map(len, early)) >= 6
    assert len(handed) > 3


@pytest.mark.nightly
def test_a_stop_string_ends_a_row_after_its_last_token_whatever_the_segments():
    policy, _ = trigram()
    config = SamplerConfig(
        max_new_tokens=40, stop_ids=(STOP,), samples_per_prompt=6, prompt_length=8
    )
    free = sample(policy, PARAMS, PROMPTS, KEY, config)
    texts = ["".join(chr(ord("a") + token) for token in row) for row in completions(free)]
    pairs = (text[i : i + 2] for text in texts for i in range(3, len(text) - 1))
    string = next(pair for pair in pairs if 3 < sum(pair in text for text in texts) < 20)
    expected = [row[: contains(string)(row) or len(row)] for row in completions(free)]
    hit = np.array([string in text for text in texts])
    for slots, borders in ((256, SegmentConfig(64, 24, 40)), (4, SegmentConfig(5, 1, 40))):
        how = replace(config, max_num_seqs=slots, segments=borders)
        handed: dict[int, list[int]] = {}
        rollout = sample(
            policy, PARAMS, PROMPTS, KEY, how, stop_at=contains(string), on_finished=handed.update
        )
        assert completions(rollout) == expected == [handed[row] for row in range(24)]
        np.testing.assert_array_equal(rollout.truncated, free.truncated & ~hit)
        np.testing.assert_array_equal(
            rollout.log_probs, np.where(rollout.action_mask, free.log_probs, 0)
        )
        after = rollout.tokens[
            ~rollout.action_mask & (np.arange(rollout.tokens.shape[1])[None] >= 8)
        ]
        assert (after == config.pad_id).all()


@pytest.mark.slow
def test_a_stop_string_frees_its_slot():
    policy, steps, _ = countdown()
    config = SamplerConfig(
        max_new_tokens=200, max_num_seqs=2, prompt_length=2, segments=SegmentConfig(10)
    )
    sample(
        policy, {}, [[200]] * 8, KEY, config, stop_at=lambda tokens: 5 if len(tokens) >= 5 else None
    )
    jax.effects_barrier()
    assert len(steps) == 40  # four pairs, each to the next border


# --- penalty and bias ---


@pytest.mark.nightly
def test_penalty_and_bias_are_the_behavior_s_alone():
    policy, _ = trigram()
    top_p, bias = 0.8, ((2, -np.inf), (4, 1.5))
    config = SamplerConfig(
        max_new_tokens=9,
        samples_per_prompt=3,
        temperature=0.8,
        repetition_penalty=1.7,
        logit_bias=bias,
        top_p=top_p,
    )
    rollout = sample(policy, PARAMS, PROMPTS, KEY, replace(config, max_num_seqs=5))
    table = np.asarray(PARAMS["table"], np.float64)
    for n, row in enumerate(rollout.tokens):
        for t in np.flatnonzero(rollout.action_mask[n]):
            plain = table[row[t - 2] if t > 1 else 0, row[t - 1]]
            own = plain.copy()
            for token in set(row[:t].tolist()):
                own[token] = own[token] / 1.7 if own[token] > 0 else own[token] * 1.7
            for token, added in bias:
                own[token] += added
            plain, own = (np.exp(x / 0.8) / np.exp(x / 0.8).sum() for x in (plain, own))
            order = np.argsort(-own)
            own[order[np.searchsorted(np.cumsum(own[order]), top_p) + 1 :]] = 0
            own /= own.sum()
            np.testing.assert_allclose(rollout.log_probs[n, t], np.log(plain[row[t]]), atol=3e-6)
            np.testing.assert_allclose(
                rollout.behaviour_log_probs[n, t], np.log(own[row[t]]), atol=3e-6
            )
            uniform = jax.random.uniform(
                jax.random.fold_in(jax.random.wrap_key_data(rollout.birth_key[n]), t)
            )
            cumulative = np.cumsum(own)
            assert cumulative[row[t]] - own[row[t]] - 1e-6 <= uniform <= cumulative[row[t]] + 1e-6
    assert not (rollout.tokens[rollout.action_mask] == 2).any()
    free = sample(
        policy, PARAMS, PROMPTS, KEY, SamplerConfig(max_new_tokens=12, samples_per_prompt=4)
    )
    assert (free.tokens[free.action_mask] == 2).any()


@pytest.mark.slow
def test_greedy_heeds_penalty_and_bias():
    policy, _ = trigram()
    config = SamplerConfig(max_new_tokens=1, temperature=0, logit_bias=((7, 100.0),))
    rollout = sample(policy, PARAMS, PROMPTS, KEY, config)
    assert completions(rollout) == [[7]] * 4
    logits = np.asarray(PARAMS["table"], np.float64)[2, 3]
    np.testing.assert_allclose(
        rollout.log_probs[0, 3], logits[7] - np.log(np.exp(logits).sum()), atol=2e-6
    )
    once = SamplerConfig(max_new_tokens=V - 3, temperature=0, repetition_penalty=1e6)
    drawn = completions(sample(policy, {"table": PARAMS["table"] - 20}, [[1, 2, 3]], KEY, once))[0]
    assert len(set(drawn) | {1, 2, 3}) == V  # nothing twice while there is anything else


def test_a_bias_on_no_token_is_refused():
    config = SamplerConfig(max_new_tokens=1, logit_bias=((V, 1.0),))
    with pytest.raises(InputError, match=f"names token {V}"):
        sample(trigram()[0], PARAMS, PROMPTS, KEY, config)


def test_a_bias_that_forbids_every_token_is_refused():
    bias = tuple((token, -np.inf) for token in range(V))
    config = SamplerConfig(max_new_tokens=1, logit_bias=bias)
    with pytest.raises(InputError, match="forbids every token"):
        sample(trigram()[0], PARAMS, PROMPTS, KEY, config)


# --- several devices ---

ON_A_MESH = r"""
import re, sys
import jax, numpy as np
from tests.fixtures.sampling import KEY, PROMPTS
from tests.fixtures.sampling import decoder
from tpu_rl import models
from tpu_rl.train import sharding
from tpu_rl.sampler import SamplerConfig, SegmentConfig, decode_loop, sample

model, params = decoder()
if "transposed" in sys.argv:
    model = models.variant(model, attention={"cpu_cache": True})
policy, prompts, limits = models.policy(model), PROMPTS + PROMPTS[:3], np.arange(21) * 7 % 20 + 1
segments = SegmentConfig(4, 1, 8)
config = SamplerConfig(
    20, samples_per_prompt=3, max_num_seqs=8, prompt_length=8, stop_ids=(5,), segments=segments
)
alone = sample(policy, params, prompts, KEY, config, limits=limits)
mesh = sharding.make_mesh(2, 1, 2)
cut = sharding.place(params, model.axes, mesh)
segment, moved, shardings = decode_loop.decode_segment, [], []

def look(*arguments):
    if arguments[4] is not None and not moved:
        for line in segment.lower(*arguments).compile().as_text().splitlines():
            kinds = "all-gather|all-to-all|collective-permute"
            match = re.search(rf"= \w+\[([\d,]*)\]\S* ({kinds})\(", line)
            if match:
                moved.append(int(np.prod([int(size) for size in match[1].split(",") if size])))
        shardings.append(arguments[6].cache["full"]["v"].sharding.spec)
    return segment(*arguments)

decode_loop.decode_segment = look
with jax.set_mesh(mesh):
    spread = sample(policy, cut, prompts, KEY, config, limits=limits, mesh=mesh)
np.testing.assert_array_equal(alone.tokens, spread.tokens)
np.testing.assert_allclose(alone.log_probs, spread.log_probs, atol=1e-5)
row = 2 * 2 * 8 * (8 + 8)  # layers, heads, their width, tokens
# Beside the logits of 8 rows, which the vocabulary's cut and not refilling spreads over devices.
assert moved and max(moved) < row, (max(moved), row)
assert "tensor" in str(shardings[0]), shardings
print("same")
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param("plain", marks=pytest.mark.slow),
        pytest.param("transposed", marks=pytest.mark.nightly),
    ],
)
def test_refilling_moves_no_cache_between_devices(keys):
    command, env = [sys.executable, "-c", ON_A_MESH, keys], several.virtual_devices(4)
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert result.stdout.strip() == "same", result.stderr
