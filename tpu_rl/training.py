"""The one update step that serves every algorithm.

It splits the params into trainable and frozen leaves by path, differentiates the trainable ones, scans micro-batches,
applies optax and returns a new TrainState. A step whose loss or gradient is not finite changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_rl.types import Algorithm, Array, Max, Metrics, Min, Params, Sum, TrainState

Trainable = Callable[[str], bool]
"""Path of a leaf, "policy/blocks/..." -> does it train?"""

UpdateStep = Callable[[TrainState, Any], tuple[TrainState, dict[str, Array]]]


def partition(params: Params, trainable: Trainable) -> tuple[Params, Params]:
    """(trainable, frozen): two trees of params' structure with None where a leaf is in the other."""

    def path_of(path: tuple) -> str:
        return jax.tree_util.keystr(path, simple=True, separator="/")

    chosen = jax.tree_util.tree_map_with_path(lambda path, x: x if trainable(path_of(path)) else None, params)
    frozen = jax.tree_util.tree_map_with_path(lambda path, x: None if trainable(path_of(path)) else x, params)
    return chosen, frozen


def combine(trainable: Params, frozen: Params) -> Params:
    """The inverse of `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda x: x is None)


def init_train_state(
    params: Params, algorithm: Algorithm, optimizer: optax.GradientTransformation, trainable: Trainable
) -> TrainState:
    """The state before the first step. Optimizer moments are laid out over the mesh like their parameters."""
    chosen, _ = partition(params, trainable)
    opt_state = jax.jit(optimizer.init)(chosen)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, algorithm.init_state(params))


def minibatch(batch: Any, index: int) -> Any:
    """The [K, R, S] slice of a [M, K, R, S] batch that one optimizer step learns from."""
    return jax.tree.map(lambda x: x[index], batch)


def reduce_metrics(metrics: Metrics) -> dict[str, Array]:
    """Metrics stacked over micro-batches -> one number each, by kind."""

    def one(metric: Sum | Max | Min) -> Array:
        match metric:
            case Sum(value, weight):
                weight = jnp.sum(jnp.broadcast_to(weight, value.shape))
                return jnp.where(weight > 0, jnp.sum(value) / jnp.where(weight > 0, weight, 1.0), 0.0)
            case Max(value):
                return jnp.max(value)
            case Min(value):
                return jnp.min(value)

    return {name: one(metric) for name, metric in metrics.items()}


def make_update_step(
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    trainable: Trainable,
    shardings: TrainState | None = None,
) -> UpdateStep:
    """(state, batch with leaves [K, R, S]) -> (state, metrics), jitted; the state is donated.

    `shardings` (a TrainState of them) pins the new state to the old one's place on the mesh.
    """

    def update(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        chosen, frozen = partition(state.params, trainable)
        loss, metrics, gradients = accumulate(algorithm, chosen, frozen, batch)
        norm = optax.tree.norm(gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, chosen)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        metrics = reduce_metrics(metrics) | {
            "optim/loss": loss,
            "optim/grad_norm": norm,
            "optim/learning_rate": jnp.asarray(learning_rate(state.step), jnp.float32),
            "optim/skipped": 1.0 - finite,
        }
        params = combine(optax.apply_updates(chosen, updates), frozen)
        params, algorithm_state = algorithm.after_update(params, state.algorithm_state, metrics)
        new_state = TrainState(state.step + 1, params, opt_state, algorithm_state)
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, state), metrics

    out_shardings = None if shardings is None else (shardings, None)
    return jax.jit(update, donate_argnums=0, out_shardings=out_shardings)


def accumulate(algorithm: Algorithm, chosen: Params, frozen: Params, batch: Any) -> tuple[Array, Metrics, Params]:
    """(loss, stacked metrics, gradients in float32), summed over the micro-batches of one optimizer step.

    Nothing is averaged: the batch's weights are normalised over the whole step, so the sum is exact however it is cut.
    """

    def loss_of(chosen: Params, micro_batch: Any) -> tuple[Array, Metrics]:
        return algorithm.loss(combine(chosen, frozen), micro_batch)

    def one(carry: tuple[Array, Params], micro_batch: Any) -> tuple[tuple[Array, Params], Metrics]:
        loss, gradients = carry
        (value, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(chosen, micro_batch)
        gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, gradient)
        return (loss + value, gradients), metrics

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), chosen)
    (loss, gradients), metrics = jax.lax.scan(one, (jnp.zeros(()), zeros), batch)
    return loss, metrics, gradients


def over_updates(history: list[dict[str, Array]]) -> dict[str, float]:
    """The metrics of one batch's updates as one row: the mean, but the extreme of *_min and *_max.

    The gap between the sampler's and the trainer's log-probs is the first update's: later the policy has moved.
    """

    def one(name: str) -> float:
        values = [float(update[name]) for update in history]
        if "log_prob_gap" in name:
            return values[0]
        if name.endswith("_max"):
            return max(values)
        return min(values) if name.endswith("_min") else sum(values) / len(values)

    return {name: one(name) for name in history[0]}
