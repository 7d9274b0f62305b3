"""The sampler records which experts processed each token, and packed rows replay them (R3)."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.decoders import tiny
from tpu_rl import models, sampler
from tpu_rl.errors import InputError
from tpu_rl.experience.layout import with_routing
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.models.moe import router
from tpu_rl.sampler import SamplerConfig, cache_ops
from tpu_rl.train import packing

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 8, 9, 10], [11, 12]]
CONFIG = SamplerConfig(
    max_new_tokens=8, samples_per_prompt=2, max_num_seqs=3, stop_ids=(3,), record_routing=True
)
"""Fewer slots than rows, so that slots are refilled, from two pools."""


def recording(family):
    return models.variant(tiny(family).model, records_routing=True)


@functools.cache
def sampled(family):
    policy = models.policy(recording(family))
    return sampler.sample(policy, tiny(family).params, PROMPTS, jax.random.key(0), CONFIG)


FAMILIES = ["olmoe", pytest.param("deepseek_v3", marks=pytest.mark.nightly)]
"""DeepSeek-V3 has a layer without experts, groups of experts and a correction."""


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_the_record_is_what_one_pass_over_the_whole_rows_chooses(family):
    rollout = sampled(family)
    rows, length = rollout.tokens.shape
    cache = recording(family).init_cache(tiny(family).params, rows, length)
    column = jnp.broadcast_to(jnp.arange(length)[None], (rows, length))
    extend = jax.jit(recording(family).extend)
    tokens = jnp.asarray(rollout.tokens)
    lengths = jnp.full(rows, length)
    _, cache = extend(tiny(family).params, cache, tokens, column, 0 * column, lengths)
    last = np.where(rollout.action_mask, np.arange(length), 0).max(1)
    is_read = np.arange(length) < last[:, None]
    wanted = np.asarray(cache_ops.latest_routing(cache, length))
    np.testing.assert_array_equal(rollout.routing, np.where(is_read[..., None], wanted, 0))
    assert wanted.min() == 1
    assert wanted.max() == tiny(family).model.config.moe.num_experts


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_replay_the_record(family):
    rollout = sampled(family)
    model = recording(family)
    mask, group_id = np.asarray(rollout.action_mask), np.asarray(rollout.group_id)
    layout = packing.assign_slots(mask, group_id, row_length=64, micro_batch_rows=2)
    role = models.role(model, lambda params: params)
    probe = models.probe({"policy": model}, 0.0)
    assert probe is not None
    report = probe.zeros["policy"]
    recorded = np.asarray(rollout.routing)

    @jax.jit
    def log_probs_and_usage(layout):
        rows = jax.tree.map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), layout.rows(jnp.asarray(rollout.tokens))
        )

        def total(report):
            found = token_log_probs(role, tiny(family).params | report, rows).log_probs
            return found.sum(), layout.unpack(found.reshape(layout.source.shape))

        usage, found = jax.grad(total, has_aux=True)(report)
        return found, usage[router.REPORT].expert_tokens

    layout = jax.tree.map(jnp.asarray, layout)
    plain, usage = log_probs_and_usage(layout)
    replayed, same_usage = log_probs_and_usage(with_routing(layout, recorded))
    np.testing.assert_array_equal(replayed, plain)
    np.testing.assert_array_equal(same_usage, usage)

    count = model.config.moe.num_experts
    others = np.where(recorded > 0, 1 + (recorded + 1) % count, 0).astype(recorded.dtype)
    changed, other_usage = log_probs_and_usage(with_routing(layout, others))
    difference = np.abs(np.asarray(changed - plain))[mask]
    assert np.median(difference) > 0.01
    routing = np.asarray(with_routing(layout, others).routing).reshape(
        -1, model.config.mixture_layers, model.config.moe.experts_per_token
    )
    counts = np.stack(
        [np.bincount(routing[:, i].ravel(), minlength=count + 1) for i in range(routing.shape[1])]
    )
    own = usage.sum() - counts[:, 1:].sum()  # Those of tokens that the sampler did not read.
    assert 0 <= own < 0.3 * usage.sum()
    assert np.all(other_usage >= counts[:, 1:])
    np.testing.assert_allclose(other_usage.sum() - counts[:, 1:].sum(), own)


def test_what_cannot_be_recorded_is_refused():
    case = tiny("olmoe")
    key = jax.random.key(0)
    with pytest.raises(InputError, match="records no routing"):
        sampler.sample(models.policy(case.model), case.params, PROMPTS, key, CONFIG)
    drafting = replace(CONFIG, speculation=sampler.Speculation(tokens=2))
    with pytest.raises(InputError, match="nor with drafts"):
        sampler.sample(models.policy(recording("olmoe")), case.params, PROMPTS, key, drafting)
