"""The one update step that serves every algorithm.

The step splits the params into trainable and frozen leaves by path, differentiates the loss with
respect to the trainable ones, accumulates gradients over micro-batches with `lax.scan`, applies the
optax optimizer and returns a new TrainState. If the batch, the loss or the gradient is not finite,
the step changes no bit of the state. If no token of the batch has a weight, the optimizer takes no
step: momentum and weight decay move nothing either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tpu_rl import jax_versions
from tpu_rl.train import packing, sharding
from tpu_rl.types import (
    Algorithm,
    Array,
    First,
    Max,
    Metric,
    Metrics,
    Min,
    Params,
    PerToken,
    Probe,
    Sum,
    TrainState,
)

Trainable = Callable[[str], bool]
"""Path of a leaf, such as "policy/blocks/..." -> True if the leaf is trained."""

UpdateStep = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
"""(state, batch of one optimizer step) -> (state, metrics). `reduce_updates` reads the metrics."""


@runtime_checkable
class Weighted(Protocol):
    """The batch of an algorithm whose tokens have weights; see `types.Algorithm`."""

    weights: dict[str, Array]


# Params and the train state.


def partition(params: Params, trainable: Trainable) -> tuple[Params, Params]:
    """Split params into (trainable, frozen).

    Both trees have the structure of params, with None in place of the leaves of the other tree.
    """

    def is_trainable(path: tuple) -> bool:
        return trainable(jax.tree_util.keystr(path, simple=True, separator="/"))

    trained = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if is_trainable(path) else None, params
    )
    frozen = jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if is_trainable(path) else leaf, params
    )
    return trained, frozen


def combine(trained: Params, frozen: Params) -> Params:
    """Merge the two trees of `partition` into one."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda leaf: leaf is None
    )


def init_train_state(
    params: Params,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    trainable: Trainable,
) -> TrainState:
    """Return the state before the first step.

    Optimizer moments are float32, as gradients are, whatever the dtype of the parameters. They are
    sharded like their parameters. The optimizer's counters, the step and the algorithm's state are
    replicated over the mesh.
    """
    trained, _ = partition(params, trainable)

    def init_optimizer(trained: Params) -> Any:
        return optimizer.init(_as_float32(trained))

    replicated = replicated_sharding(trained)
    opt_shardings = None
    algorithm_state = algorithm.init_state(params)
    if replicated is not None:
        opt_shardings = opt_state_shardings(
            jax.eval_shape(init_optimizer, trained), trained, replicated
        )
        # Leaves that are copies of parameters already have a sharding; new arrays do not.
        algorithm_state = jax.tree.map(
            lambda leaf: (
                leaf
                if isinstance(leaf.sharding, NamedSharding)
                else jax.device_put(leaf, replicated)
            ),
            algorithm_state,
        )
    opt_state = jax.jit(init_optimizer, out_shardings=opt_shardings)(trained)
    return TrainState(
        step=jnp.zeros((), jnp.int32, device=replicated),
        params=params,
        opt_state=opt_state,
        algorithm_state=algorithm_state,
    )


def abstract_train_state(
    params: Params,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    trainable: Trainable,
) -> TrainState:
    """Return the result of `init_train_state` as jax.ShapeDtypeStruct leaves with shardings.

    `params` are arrays, or shapes with shardings, on a mesh.
    """
    replicated = replicated_sharding(params)
    assert replicated is not None, "the params have no place on a mesh"

    def init(params: Params) -> TrainState:
        trained, _ = partition(params, trainable)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(_as_float32(trained)),
            algorithm_state=algorithm.init_state(params),
        )

    def with_sharding(leaf: Any, leaf_sharding: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf_sharding)

    state = jax.eval_shape(init, params)
    return jax.tree.map(with_sharding, state, opt_state_shardings(state, params, replicated))


def _as_float32(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


def opt_state_shardings(opt_state: Any, params: Params, default: Sharding) -> Any:
    """Return the sharding of each leaf of an optimizer state.

    A leaf has the sharding of the parameter whose path is a suffix of the leaf's own path, provided
    their shapes agree. All other leaves have the `default` sharding.

    `optax.tree_map_params` would not do: it does not support optimizers that depend on the names of
    their parameters.
    """
    params_by_path = dict(jax.tree_util.tree_flatten_with_path(params)[0])

    def sharding_of(path: tuple, leaf: Any) -> Sharding:
        # The longest suffix that is the path of a parameter decides.
        for start in range(len(path)):
            param = params_by_path.get(path[start:])
            if param is not None:
                return param.sharding if param.shape == leaf.shape else default
        return default

    return jax.tree_util.tree_map_with_path(sharding_of, opt_state)


def replicated_sharding(params: Params) -> Sharding | None:
    """Return the sharding that replicates an array over the mesh of `params`, or None."""
    params_sharding = jax.tree.leaves(params)[0].sharding
    if not isinstance(params_sharding, NamedSharding):
        return None
    return NamedSharding(params_sharding.mesh, PartitionSpec())


ASYNCHRONOUS_COLLECTIVES = {
    "xla_enable_async_all_gather": "true",
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
}
"""Compiler options of TPUs: weights are gathered and gradients summed asynchronously."""

WHOLE_PRODUCTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
"""Compiler options of v5e and v6e: products take whole weights. By default XLA multiplies large
products shard by shard ("windowed"), in smaller products and with sums rounded to bfloat16."""


def takes_windows(mesh: Mesh) -> bool:
    """Return True if XLA multiplies large products in windows on a mesh, unless it is told not to
    (`WHOLE_PRODUCTS`)."""
    return mesh.size > 1 and mesh.devices.flat[0].device_kind in ("TPU v5 lite", "TPU v6 lite")


def compiler_options(mesh: Mesh, whole_products: bool = True) -> dict[str, Any] | None:
    """Return the compiler options of all training programs on a mesh, with whole products where
    they are wanted.

    They all use the same options, because programs compiled with other options round differently.

    On CPUs, the compiler of jax 0.10 hands the operations after a matrix product to a library with
    its own scratch memory, which no memory analysis of a program includes. Without that library an
    update takes a quarter less memory and no more time (docs/benchmarks/scaling.md). Decoding is
    faster with it, so the sampler does not use these options.

    On TPUs, collectives do not overlap with computation by default, or not all of them, and on v5e
    and v6e products are cut so that they do (docs/benchmarks/scaling.md).

    On several GPUs, XLA's scheduler hides collectives behind computation. Its options for pipelined
    collectives are left out: jaxlib 0.11.2 has none of them any more.
    """
    device = mesh.devices.flat[0]
    if takes_windows(mesh) and whole_products:
        return ASYNCHRONOUS_COLLECTIVES | WHOLE_PRODUCTS
    if device.device_kind in ("TPU v4", "TPU v5", "TPU v5 lite", "TPU v6 lite"):
        return dict(ASYNCHRONOUS_COLLECTIVES)
    if device.platform == "gpu" and mesh.size > 1:
        return {"xla_gpu_enable_latency_hiding_scheduler": True}
    if device.platform == "cpu" and jax_versions.RELEASE[:2] == (0, 10):
        return {"xla_cpu_experimental_ynn_fusion_type": ""}
    return None


# Batches.


def make_batch_step(
    algorithm: Algorithm, compiler_options: dict[str, Any] | None = None
) -> Callable[..., tuple[Any, Any]]:
    """Return the algorithm's `make_batch`, jitted and guarded against values that are not finite.

    If the experience is not finite, every floating-point leaf of the batch becomes NaN, so that the
    update step skips it. The guard is needed because an algorithm may turn NaN into a finite value:
    for example, it may read NaN rewards as a group of equal rewards. The algorithm's state changes
    only if both the experience and the new state are finite.
    """

    def make_batch(experience: Any, params: Params, state: Any) -> tuple[Any, Any]:
        batch, new_state = algorithm.make_batch(experience, params, state)
        experience_is_finite = all_finite(experience)
        accept_state = experience_is_finite & all_finite(new_state)

        def poison(leaf: Array) -> Array:
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                return leaf
            return jnp.where(experience_is_finite, leaf, jnp.nan)

        batch = jax.tree.map(poison, batch)
        new_state = jax.tree.map(
            lambda new, old: jnp.where(accept_state, new, old), new_state, state
        )
        return batch, new_state

    return jax.jit(make_batch, compiler_options=compiler_options)


def all_finite(tree: Any) -> Array:
    """Return True, [] bool, if every floating-point number of a tree is finite."""
    checks = [jnp.ones((), bool)]
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            checks.append(jnp.isfinite(leaf).all())
    return jnp.stack(checks).all()


def has_weight(batch: Any) -> Array:
    """Return False, [] bool, if a batch has weights and all of them are zero.

    There is nothing to learn then, as when no completion was accepted.
    """
    weights = jax.tree.leaves(batch.weights if isinstance(batch, Weighted) else None)
    if not weights:
        return jnp.ones((), bool)
    return jnp.stack([jnp.any(leaf != 0) for leaf in weights]).any()


@jax.jit
def minibatch(batch: Any, index: int) -> Any:
    """Return the [K, R, S] slice of a [M, K, R, S] batch that one optimizer step learns from."""
    return jax.tree.map(lambda leaf: leaf[index], batch)


# Metrics.


def merge_metrics(metrics: Metrics) -> Metrics:
    """Reduce metrics over their first axis (micro-batches or updates), each by its kind."""

    def merge(metric: Metric) -> Metric:
        match metric:
            case Sum(value, weight):
                return Sum(value.sum(0), weight.sum(0))
            case Max(value):
                return Max(value.max(0))
            case Min(value):
                return Min(value.min(0))
            case First(metric):
                return First(merge(metric))
            case PerToken():
                return metric

    return {name: merge(metric) for name, metric in metrics.items()}


def no_measurement(metric: Metric) -> Metric:
    """Return a metric of the same kind and shape that changes nothing in `merge_metrics`."""

    def filled(shape: Array, value: float) -> Array:
        return jnp.full(shape.shape, value, shape.dtype)

    match metric:
        case Sum(value, weight):
            return Sum(filled(value, 0), filled(weight, 0))
        case Max(value):
            return Max(filled(value, -jnp.inf))
        case Min(value):
            return Min(filled(value, jnp.inf))
        case First(metric):
            return First(no_measurement(metric))
        case PerToken(value):
            return PerToken(filled(value, 0))


def reduce_metrics(metrics: Metrics) -> dict[str, Array]:
    """Return the reported number of each metric. A mean with total weight zero is zero.

    Numbers of single tokens are left out.
    """

    def number(metric: Metric) -> Array:
        match metric:
            case Sum(value, weight):
                # A weight of zero divides by one instead, and the value is then zero, too.
                return value / (weight + (weight == 0))
            case Max(value) | Min(value):
                return value
            case First(metric):
                return number(metric)
            case PerToken():
                raise TypeError("numbers of single tokens are not one number")

    return {
        name: number(metric) for name, metric in metrics.items() if not isinstance(metric, PerToken)
    }


def split_per_token(metrics: Metrics) -> tuple[Metrics, dict[str, Array]]:
    """Return the metrics of an update that are one number each, and those of its tokens.

    The latter are [K, R, S], by names without their prefix "token/".
    """
    per_token: dict[str, Array] = {}
    others: Metrics = {}
    for name, metric in metrics.items():
        if isinstance(metric, PerToken):
            per_token[name.removeprefix("token/")] = metric.value
        else:
            others[name] = metric
    return others, per_token


def reduce_updates(history: list[Metrics]) -> dict[str, float]:
    """Reduce the metrics of all updates of one batch, already on the host, to one row of numbers.

    Numbers of single tokens are split off before (`split_per_token`).

    Skipped updates count in optim/skipped and in no other metric. If all updates were skipped,
    optim/skipped is the only metric.
    """
    applied = [update for update in history if not reduce_metrics(update)["optim/skipped"]]
    skipped = {"optim/skipped": float(len(history) - len(applied))}
    if not applied:
        return skipped

    stacked: Metrics = {}
    for name, metric in applied[0].items():
        updates = applied[:1] if isinstance(metric, First) else applied
        stacked[name] = jax.tree.map(
            lambda *values: np.stack(values), *(update[name] for update in updates)
        )
    reduced = reduce_metrics(merge_metrics(stacked))
    return {name: float(number) for name, number in reduced.items()} | skipped


# The update step.


def make_update_step(
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    trainable: Trainable,
    shardings: TrainState | None = None,
    cast_to_compute_dtype: Callable[[Params], Params] = lambda params: params,
    probe: Probe | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> UpdateStep:
    """Return the jitted step (state, batch with leaves [K, R, S]) -> (state, metrics).

    The state is donated and keeps its dtypes.

    Args:
        algorithm: supplies the loss and `after_update`.
        optimizer: applied to the trainable leaves.
        learning_rate: the schedule inside the optimizer; only reported here.
        trainable: selects the trainable leaves by path.
        shardings: a TrainState of shardings, which pins the new state to the place of the old one.
            Optimizer leaves in host memory are fetched for the step and returned afterwards.
        cast_to_compute_dtype: returns the params that the models compute with. The gradient of each
            micro-batch has the dtypes of its result; only their sum is float32.
        probe: measures inside the models, and may add to the loss.
        compiler_options: see the function `compiler_options`.
    """

    def update(stored: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state = stored
        if shardings is not None:
            state = _move_offloaded(stored, shardings, sharding.DEVICE)
        trained, frozen = partition(state.params, trainable)
        if probe is None:
            loss, stacked, gradients = accumulate(
                algorithm, trained, frozen, batch, cast_to_compute_dtype
            )
            probe_metrics = {}
        else:
            loss, stacked, gradients, probe_metrics = _accumulate_probed(
                probe, algorithm, trained, frozen, batch, cast_to_compute_dtype
            )
        norm = optax.tree.norm(gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, trained)
        learns = has_weight(batch)
        trained, opt_state = _new_where(
            learns, (optax.apply_updates(trained, updates), opt_state), (trained, state.opt_state)
        )
        # The batch is checked as well: a clipped ratio may hide an infinite log-prob from both the
        # loss and the gradient.
        finite = jnp.isfinite(loss) & jnp.isfinite(norm) & all_finite(batch)
        one = jnp.ones(())
        metrics = merge_metrics(stacked) | probe_metrics
        metrics |= {
            "optim/loss": Sum(loss, one),
            "optim/grad_norm": Sum(norm, one),
            "optim/learning_rate": Sum(jnp.asarray(learning_rate(state.step), jnp.float32), one),
            "optim/empty": Sum(1.0 - learns, one),
            "optim/skipped": Max(1.0 - finite),
        }
        params = combine(trained, frozen)
        params, algorithm_state = algorithm.after_update(
            params, state.algorithm_state, reduce_metrics(metrics)
        )
        new_state = TrainState(
            step=state.step + learns,
            params=params,
            opt_state=opt_state,
            algorithm_state=algorithm_state,
        )
        # Not `optax.apply_if_finite`: after its limit of bad updates it applies NaN.
        new_state = _new_where(finite, new_state, state)
        if shardings is not None:
            new_state = _move_offloaded(new_state, shardings, sharding.HOST)
        return new_state, metrics

    out_shardings = None if shardings is None else (shardings, None)
    return jax.jit(
        update, donate_argnums=0, out_shardings=out_shardings, compiler_options=compiler_options
    )


def _new_where(condition: Array, new: Any, old: Any) -> Any:
    """Choose the new tree, in the dtypes of the old one, if the condition holds, else the old."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n.astype(o.dtype), o), new, old)


def _move_offloaded(state: TrainState, shardings: TrainState, memory_kind: str) -> TrainState:
    """Move the optimizer leaves that are stored in host memory to the given kind of memory.

    Runs inside jit. `shardings` says which leaves are stored on the host.
    """

    def move(leaf: Array, leaf_sharding: Sharding) -> Array:
        if not sharding.is_on_host(leaf_sharding):
            return leaf
        return jax.device_put(leaf, leaf_sharding.with_memory_kind(memory_kind))

    return replace(state, opt_state=jax.tree.map(move, state.opt_state, shardings.opt_state))


def accumulate(
    algorithm: Algorithm,
    trained: Params,
    frozen: Params,
    batch: Any,
    cast_to_compute_dtype: Callable[[Params], Params] = lambda params: params,
) -> tuple[Array, Metrics, Params]:
    """Sum loss and gradients over the micro-batches of one optimizer step.

    Returns (loss, metrics stacked over micro-batches, float32 gradients). Nothing is averaged here:
    the weights of the batch are normalized over the entire step, so the sum is exact however the
    step is split into micro-batches. Micro-batches without any token are not computed.
    """

    def loss_of(trained: Params, micro_batch: Any) -> tuple[Array, Metrics]:
        return algorithm.loss(combine(trained, frozen), micro_batch)

    def add_micro_batch(
        carry: tuple[Array, Params], micro_batch: Any
    ) -> tuple[tuple[Array, Params], Metrics]:
        total_loss, total_gradients = carry
        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            compute_params, micro_batch
        )
        total_gradients = jax.tree.map(
            lambda total, gradient: total + gradient.astype(jnp.float32), total_gradients, gradients
        )
        return (total_loss + loss, total_gradients), metrics

    def add_if_occupied(
        carry: tuple[Array, Params], item: tuple[Any, Array]
    ) -> tuple[tuple[Array, Params], Metrics]:
        micro_batch, occupied = item
        _, metrics = jax.eval_shape(loss_of, compute_params, micro_batch)
        nothing = {name: no_measurement(metric) for name, metric in metrics.items()}
        return jax.lax.cond(
            occupied, add_micro_batch, lambda carry, _: (carry, nothing), carry, micro_batch
        )

    # Cast once, outside the scan, and not once per micro-batch.
    compute_params = cast_to_compute_dtype(trained)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
    (loss, gradients), metrics = jax.lax.scan(
        add_if_occupied, (jnp.zeros(()), zeros), (batch, computed_micro_batches(batch))
    )
    return loss, metrics, gradients


def computed_micro_batches(batch: Any) -> Array:
    """Return [K] bool: True for micro-batches with tokens, and for the first one.

    So there is something to measure in a step without any token.
    """
    return packing.is_occupied(batch).at[0].set(True)


def _accumulate_probed(
    probe: Probe,
    algorithm: Algorithm,
    trained: Params,
    frozen: Params,
    batch: Any,
    cast_to_compute_dtype: Callable[[Params], Params],
) -> tuple[Array, Metrics, Params, Metrics]:
    """Do the same as `accumulate`, with a probe in the params.

    Also returns the metrics of the probe over the entire step.
    """

    # The probe's leaves travel beside the params, as pairs (params, probe leaves), so that
    # `accumulate` differentiates the loss for both.
    def loss_of(
        params_and_leaves: tuple[Params, Params], micro_batch: Any
    ) -> tuple[Array, Metrics]:
        params, leaves = params_and_leaves
        return algorithm.loss(_with_probe_leaves(params, leaves), micro_batch)

    def cast(params_and_leaves: tuple[Params, Params]) -> tuple[Params, Params]:
        params, leaves = params_and_leaves
        return cast_to_compute_dtype(params), leaves

    leaves = probe.zeros
    no_leaves = jax.tree.map(lambda _: None, probe.zeros)
    if probe.weights is not None:
        params = combine(cast_to_compute_dtype(trained), frozen)
        leaves = probe.weights(_measure(loss_of, params, probe.zeros, batch))
    loss, metrics, (gradients, measured) = accumulate(
        algorithm._replace(loss=loss_of), (trained, leaves), (frozen, no_leaves), batch, cast
    )
    # Models add the product of leaf and measurement to the gradient only. Add it to the loss here.
    products = jax.tree.map(jnp.vdot, leaves, measured)
    probe_loss = jax.tree.reduce(jnp.add, products, jnp.zeros(()))
    return loss + probe_loss, metrics, gradients, probe.metrics(measured)


def _measure(loss_of: Callable[..., Any], params: Params, leaves: Params, batch: Any) -> Params:
    """Return the gradient of the probe's leaves alone, summed over micro-batches.

    It does not depend on the loss, so this costs no more than forward passes.
    """

    def add_micro_batch(total: Params, micro_batch: Any) -> Params:
        measured, _ = jax.grad(lambda leaves: loss_of((params, leaves), micro_batch), has_aux=True)(
            leaves
        )
        return jax.tree.map(jnp.add, total, measured)

    def add_if_occupied(total: Params, item: tuple[Any, Array]) -> tuple[Params, None]:
        micro_batch, occupied = item
        return jax.lax.cond(
            occupied, add_micro_batch, lambda total, _: total, total, micro_batch
        ), None

    # `leaves` are zeros, so they also serve as the initial sum.
    return jax.lax.scan(add_if_occupied, leaves, (batch, computed_micro_batches(batch)))[0]


def _with_probe_leaves(params: Params, leaves: Params) -> Params:
    """Return params with the probe's leaves of each role added to that role's own."""
    return params | {role: params[role] | role_leaves for role, role_leaves in leaves.items()}
