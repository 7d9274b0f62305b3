"""KTO and its relatives: learn from completions that were judged one by one, good or bad.

    s         = sum_t log policy(y_t | x, y_<t) - log reference(y_t | x, y_<t)
    kto       w (1 - sigmoid(+-beta (s - z))),   z = max(0, mean s of answers to other prompts)
                                                                                 arXiv 2402.01306
    bco       -w log sigmoid(+-beta (s - z)),    z = mean s, good and bad, of the steps before
                                                                                 arXiv 2404.04656
    apo_zero  kto with z = 0                                           arXiv 2408.06266, unpaired

The sign is + for good and - for bad completions. w is the weight of the completion's class over the
number of completions of the optimizer step. Each completion of a pair counts by itself.

Deviations: BCO's paper has z = (mean s of good + mean s of bad completions) / 2. Ours is the mean
over all of them, as in TRL, of the steps before: with 5 good and 1 bad one it can have another
sign. The paper of KTO takes z from the micro-batch at hand. Here it is one number per
optimizer step, from a pass without gradients before the first update of the batch, so it does not
depend on how the batch is split. For z, each prompt is joined with a completion of the next
prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import ranges
from tpu_rl.algorithm_spec import ExperienceSpec, RoleSpec, pairs_from
from tpu_rl.algos.roles import with_reference
from tpu_rl.losses import masked, preference
from tpu_rl.losses.controllers import is_empty
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.ranges import NotNegative, Positive
from tpu_rl.train import packing
from tpu_rl.types import (
    Algorithm,
    Array,
    Experience,
    Metrics,
    PackedRows,
    Pairs,
    Params,
    Roles,
    Sampling,
    Sum,
)

LOSSES = {"kto": preference.kto, "apo_zero": preference.kto, "bco": preference.bco}


@dataclass(frozen=True)
class KtoConfig(ranges.Checked):
    """The default is KTO itself."""

    loss: Literal["kto", "bco", "apo_zero"] = "kto"
    """Loss of a completion; see the head of `tpu_rl/algos/kto.py`."""
    beta: Positive = 0.1
    """Reward per nat of log-ratio."""
    good_weight: NotNegative = 1.0
    """Weight of good completions. Choose the two weights so that n_good x good_weight is near n_bad
    x bad_weight."""
    bad_weight: NotNegative = 1.0
    """Weight of bad completions."""
    pairs: Literal["given", "reference"] = "given"
    """given: the data file has judged completions. reference: they are sampled from the reference
    and judged by --reward."""

    @property
    def experience(self) -> ExperienceSpec:
        return pairs_from(self.pairs, graded=True, reference_log_probs=True)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        policy = {"policy": RoleSpec(trainable=True)}
        # The data have the reference's log-probs of their completions, but not of completions after
        # other prompts, which the z of kto needs.
        return with_reference(policy, needed=self.loss == "kto" or self.pairs == "reference")


@struct.dataclass
class Batch:
    """Leaves are [M, K, R, S]; the loss sees [R, S]."""

    rows: PackedRows
    weights: dict[str, Array]
    """"preference": the weight of each completion, on its first action."""
    action_mask: Array
    preferred: Array
    """bool: True if the token's completion is good."""
    baseline: Array
    """z, in nats."""
    reference_log_probs: Array


def kto(config: KtoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build KTO. It learns from Pairs, of one row or of two.

    The state of bco is the mean s of the updates so far, and their number.
    """

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        pairs, layout = experience
        assert isinstance(pairs, Pairs)
        mask = pairs.action_mask
        weights = preference.completion_weights(mask, layout.minibatch, layout.minibatches)
        weights *= jnp.where(pairs.preferred, config.good_weight, config.bad_weight)[:, None]
        rows = layout.rows(pairs.tokens)
        # z of each optimizer step, [M].
        baseline = jnp.zeros(layout.minibatches)
        if config.loss == "bco":
            baseline = jnp.broadcast_to(state["mean"], layout.minibatches)
        elif config.loss == "kto":
            log_ratios = _mismatched_log_ratios(roles, params, pairs, *layout.source.shape[2:])
            means = _mean_by_step(log_ratios, mask.any(-1), layout.minibatch, layout.minibatches)
            baseline = jnp.maximum(means, 0.0)
        batch = Batch(
            rows=rows,
            weights={"preference": layout.pack(weights)},
            action_mask=layout.pack(mask),
            preferred=layout.pack(jnp.broadcast_to(pairs.preferred[:, None], mask.shape)),
            baseline=jnp.broadcast_to(baseline[:, None, None, None], rows.tokens.shape),
            reference_log_probs=layout.pack(pairs.reference_log_probs),
        )
        return batch, state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        log_probs = token_log_probs(roles["policy"], params, batch.rows).log_probs
        log_ratio = jnp.where(batch.action_mask, log_probs - batch.reference_log_probs, 0.0)
        score = masked.sequence_total(log_ratio, batch.rows.sequence_ids)
        losses = LOSSES[config.loss](score, batch.preferred, batch.baseline, config.beta)
        weights = batch.weights["preference"]
        first = weights > 0
        value = masked.total(weights * losses, first)
        above = score - batch.baseline
        right = jnp.where(batch.preferred, above > 0, above < 0) + 0.5 * (above == 0)
        reward = config.beta * score
        return value, {
            "preference/loss": Sum(value, weights.sum()),
            "preference/accuracy": masked.average(right, first),
            "preference/chosen": masked.average(reward, first & batch.preferred),
            "preference/rejected": masked.average(reward, first & ~batch.preferred),
            "preference/score": masked.average(score, first),
            "preference/baseline": masked.average(batch.baseline, first),
        }

    def init_state(params: Params) -> Any:
        return {"mean": jnp.zeros(()), "steps": jnp.zeros(())} if config.loss == "bco" else ()

    def after_update(params: Params, state: Any, metrics: dict[str, Array]) -> tuple[Params, Any]:
        if config.loss != "bco":
            return params, state
        steps = state["steps"] + 1
        moved = state["mean"] + (metrics["preference/score"] - state["mean"]) / steps
        stays = is_empty(metrics)
        return params, {
            "mean": jnp.where(stays, state["mean"], moved),
            "steps": jnp.where(stays, state["steps"], steps),
        }

    return Algorithm(make_batch, loss, init_state, after_update)


def _mismatched_log_ratios(
    roles: Roles, params: Params, pairs: Pairs, rows_at_once: int, row_length: int
) -> Array:
    """Compute s of each row's prompt with the completion of the next group, [N].

    Each of these sequences has a packed row of its own.
    """
    tokens, mask = preference.mismatched_completions(
        pairs.tokens, pairs.action_mask, pairs.group_id, row_length
    )
    rows = packing.one_per_row(tokens, mask, rows_at_once)

    def log_ratios(micro_batch: PackedRows) -> Array:
        policy = token_log_probs(roles["policy"], params, micro_batch)
        reference = token_log_probs(roles["reference"], params, micro_batch)
        return policy.log_probs - reference.log_probs

    by_row = packing.over_micro_batches(log_ratios, rows).reshape(-1, row_length)
    return masked.total(by_row[: len(mask)], mask, axis=-1)


def _mean_by_step(values: Array, exists: Array, minibatch: Array, minibatches: int) -> Array:
    """Compute the mean of values [N] over the rows of each optimizer step, [M]."""

    def step_totals(row_values: Array) -> Array:
        counted = jnp.where(exists, row_values, 0.0)
        # The extra segment takes the rows that no optimizer step learns from.
        totals = jax.ops.segment_sum(counted, minibatch, num_segments=minibatches + 1)
        return totals[:minibatches]

    return step_totals(values) / jnp.maximum(step_totals(jnp.ones_like(values)), 1.0)
