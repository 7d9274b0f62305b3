"""Learning from completions judged one by one, good or bad: nothing need be compared.

    s = sum_t log policy(y_t | x, y_<t) - log reference(y_t | x, y_<t)          of a completion
    kto   w (1 - sigmoid(+-beta (s - z)))     z = max(0, mean s of answers to other prompts), arXiv 2402.01306
    bco   - w log sigmoid(+-beta (s - z))     z = mean s of good and bad in the steps so far, arXiv 2404.04656
    apo_zero   kto with z = 0 (arXiv 2408.06266, unpaired)

+ for good and - for bad completions; w is their class's weight over the completions of the optimizer step. Both rows
of a pair count as one completion each.

Deviations: z of kto, which the paper takes from the micro-batch at hand, is one number an optimizer step, from a pass
without gradient before the batch's first: so it does not depend on how the batch is cut. A completion is put after the
prompt of the group before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from tpu_rl import masked, packing, preferences
from tpu_rl.errors import InputError
from tpu_rl.log_probs import token_log_probs
from tpu_rl.needs import Needs, RoleSpec, pairs_from
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Pairs, Params, Roles, Rows, Sampling, Sum

LOSSES = {"kto": preferences.kto, "apo_zero": preferences.kto, "bco": preferences.bco}


@dataclass(frozen=True)
class KtoConfig:
    loss: Literal["kto", "bco", "apo_zero"] = "kto"
    beta: float = 0.1
    """What a nat of log-ratio is worth in reward."""
    good_weight: float = 1.0
    """Times what a good completion counts; with n_good x good_weight near n_bad x bad_weight both sides are heard."""
    bad_weight: float = 1.0
    pairs: Literal["given", "reference"] = "given"
    """By the data file, or sampled from the reference and judged by --reward."""

    def __post_init__(self):
        if self.beta <= 0 or min(self.good_weight, self.bad_weight) < 0:
            what = f"beta {self.beta} must be above 0, and weights {self.good_weight} and {self.bad_weight} not below"
            raise InputError(what, where="--algorithm", fix="use e.g. 0.1, 1 and 1")

    @property
    def needs(self) -> Needs:
        return pairs_from(self.pairs, judged=True, reference_log_probs=True)

    @property
    def roles(self) -> dict[str, RoleSpec]:
        """The data bring the reference's log-probs of their completions, but not of those after other prompts."""
        policy, reference = {"policy": RoleSpec(trainable=True)}, {"reference": RoleSpec(trainable=False)}
        return policy | reference if self.loss == "kto" or self.pairs == "reference" else policy


@struct.dataclass
class Batch:
    """Leaves [M, K, R, S]; the loss sees [R, S]."""

    rows: Rows
    weights: dict[str, Array]
    """"preference": what a completion counts, on its first action."""
    action_mask: Array
    preferred: Array
    baseline: Array
    """z, in nats."""
    reference_log_probs: Array


def kto(config: KtoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Learns from Pairs of one row or two. State (bco): the mean s of the steps so far, and how many they are."""
    del sampling

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[Batch, Any]:
        pairs, layout = experience
        assert isinstance(pairs, Pairs)
        mask = pairs.action_mask
        weights = preferences.completion_weights(mask, layout.minibatch, layout.minibatches)
        weights *= jnp.where(pairs.preferred, config.good_weight, config.bad_weight)[:, None]
        rows = layout.rows(pairs.tokens)
        baseline = jnp.broadcast_to(state["mean"] if config.loss == "bco" else 0.0, layout.minibatches)
        if config.loss == "kto":
            shifts = _mismatched_log_ratios(roles, params, pairs, *layout.source.shape[2:])
            baseline = jnp.maximum(_mean_of_steps(shifts, mask.any(-1), layout.minibatch, layout.minibatches), 0.0)
        preferred = jnp.broadcast_to(pairs.preferred[:, None], mask.shape)
        baseline = jnp.broadcast_to(baseline[:, None, None, None], rows.tokens.shape)
        mask, preferred, reference = map(layout.pack, (mask, preferred, pairs.reference_log_probs))
        return Batch(rows, {"preference": layout.pack(weights)}, mask, preferred, baseline, reference), state

    def loss(params: Params, batch: Batch) -> tuple[Array, Metrics]:
        log_probs = token_log_probs(roles["policy"], params, batch.rows).log_probs
        log_ratio = jnp.where(batch.action_mask, log_probs - batch.reference_log_probs, 0.0)
        score = masked.sequence_total(log_ratio, batch.rows.sequence_ids)
        losses = LOSSES[config.loss](score, batch.preferred, batch.baseline, config.beta)
        weights = batch.weights["preference"]
        value = masked.total(weights * losses, weights > 0)

        def over(counted: Array, values: Array) -> Sum:
            return Sum(masked.total(values, counted), counted.sum().astype(jnp.float32))

        first, above = weights > 0, score - batch.baseline
        right = jnp.where(batch.preferred, above > 0, above < 0) + 0.5 * (above == 0)
        return value, {
            "preference/loss": Sum(value, weights.sum()),
            "preference/accuracy": over(first, right),
            "preference/chosen": over(first & batch.preferred, config.beta * score),
            "preference/rejected": over(first & ~batch.preferred, config.beta * score),
            "preference/score": over(first, score),
            "preference/baseline": over(first, batch.baseline),
        }

    def init_state(params: Params) -> Any:
        del params
        return {"mean": jnp.zeros(()), "steps": jnp.zeros(())} if config.loss == "bco" else ()

    def after_update(params: Params, state: Any, metrics: dict[str, Array]) -> tuple[Params, Any]:
        if config.loss != "bco":
            return params, state
        steps = state["steps"] + 1
        return params, {"mean": state["mean"] + (metrics["preference/score"] - state["mean"]) / steps, "steps": steps}

    return Algorithm(make_batch, loss, init_state, after_update)


def _mismatched_log_ratios(roles: Roles, params: Params, pairs: Pairs, rows_at_once: int, row_length: int) -> Array:
    """[N]: s of each row's prompt with the completion of the next group, a row a sequence."""
    tokens, mask = preferences.mismatched(pairs.tokens, pairs.action_mask, pairs.group_id, row_length)
    rows = packing.one_a_row(tokens, mask, rows_at_once)

    def log_ratios(micro_batch: Rows) -> Array:
        policy, reference = (token_log_probs(roles[name], params, micro_batch) for name in ("policy", "reference"))
        return policy.log_probs - reference.log_probs

    found = packing.over_micro_batches(log_ratios, rows).reshape(-1, row_length)
    return masked.total(found[: len(mask)], mask, axis=-1)


def _mean_of_steps(values: Array, exists: Array, minibatch: Array, minibatches: int) -> Array:
    """[N] -> [M]: the mean over the rows of each optimizer step."""

    def sums(x: Array) -> Array:
        return jax.ops.segment_sum(jnp.where(exists, x, 0.0), minibatch, num_segments=minibatches + 1)[:minibatches]

    return sums(values) / jnp.maximum(sums(jnp.ones_like(values)), 1.0)
