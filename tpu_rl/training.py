"""The one update step that serves every algorithm.

It splits the params into trainable and frozen leaves by path, differentiates the trainable ones, scans micro-batches,
applies optax and returns a new TrainState. A step whose batch, loss or gradient is not finite changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tpu_rl import sharding
from tpu_rl.types import Algorithm, Array, First, Max, Metric, Metrics, Min, Params, Probe, Sum, TrainState

Trainable = Callable[[str], bool]
"""Path of a leaf, "policy/blocks/..." -> does it train?"""

UpdateStep = Callable[[TrainState, Any], tuple[TrainState, Metrics]]
"""(state, batch of one optimizer step) -> (state, metrics by kind, to be read by `reduce_updates`)."""


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
    """The state before the first step.

    Optimizer moments are float32, as gradients are, whatever the parameters' dtype, and lie on the mesh as their
    parameters do; its counters, the step and what the algorithm remembers are copied to every device of it.
    """
    chosen, _ = partition(params, trainable)

    def init(chosen: Params) -> Any:
        return optimizer.init(jax.tree.map(lambda x: x.astype(jnp.float32), chosen))

    everywhere, shardings = replicated(chosen), None
    algorithm_state = algorithm.init_state(params)
    if everywhere is not None:
        shardings = moment_shardings(jax.eval_shape(init, chosen), chosen, everywhere)
        # Copies of parameters have their place already.
        algorithm_state = jax.tree.map(
            lambda x: x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, everywhere), algorithm_state
        )
    opt_state = jax.jit(init, out_shardings=shardings)(chosen)
    return TrainState(jnp.zeros((), jnp.int32, device=everywhere), params, opt_state, algorithm_state)


def abstract_train_state(
    params: Params, algorithm: Algorithm, optimizer: optax.GradientTransformation, trainable: Trainable
) -> TrainState:
    """Shapes, dtypes and places of `init_train_state`'s result, from those of params that lie on a mesh."""
    everywhere = replicated(params)
    assert everywhere is not None, "the params have no place on a mesh"

    def init(params: Params) -> TrainState:
        chosen = jax.tree.map(lambda x: x.astype(jnp.float32), partition(params, trainable)[0])
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(chosen), algorithm.init_state(params))

    def place(leaf: Any, where: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    state = jax.eval_shape(init, params)
    return jax.tree.map(place, state, moment_shardings(state, params, everywhere))


def moment_shardings(opt_state: Any, params: Params, otherwise: Sharding) -> Any:
    """The sharding of each leaf of an optimizer's state: its parameter's, whose path its own path ends with.

    By path and not by `optax.tree_map_params`, which knows no optimizer that looks at its parameters' names.
    """
    placed = dict(jax.tree_util.tree_flatten_with_path(params)[0])

    def place(path: tuple, moment: Any) -> Sharding:
        ends = (placed.get(path[start:]) for start in range(len(path)))
        param = next((leaf for leaf in ends if leaf is not None), None)
        return param.sharding if param is not None and param.shape == moment.shape else otherwise

    return jax.tree_util.tree_map_with_path(place, opt_state)


def replicated(params: Params) -> Sharding | None:
    """The sharding of an array copied to every device of the mesh that `params` lie on; None where there is no mesh."""
    place = jax.tree.leaves(params)[0].sharding
    return NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else None


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """What the compiler is told of the programs that learn on a mesh, all of them: others would round otherwise.

    jax 0.10's compiler for CPUs gives what stands behind a product to a library with scratch of its own, which no
    figure of a program's memory contains: without it an update takes a quarter less memory, and no more time
    (docs/scaling.md). Decoding is faster with it.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_cpu_experimental_ynn_fusion_type": ""} if on_cpu and jax.__version__.startswith("0.10.") else None


def make_batch_step(
    algorithm: Algorithm, compiler_options: dict[str, Any] | None = None
) -> Callable[..., tuple[Any, Any]]:
    """The algorithm's make_batch, jitted. Experience that is not finite makes a batch that is not, which no update
    learns from: an algorithm may take NaN for a group of equal rewards. Nor does it change the algorithm's state.
    """

    def make_batch(experience: Any, params: Params, state: Any) -> tuple[Any, Any]:
        batch, new_state = algorithm.make_batch(experience, params, state)
        usable = all_finite(experience)
        kept = usable & all_finite(new_state)

        def mark(leaf: Array) -> Array:
            return jnp.where(usable, leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

        return jax.tree.map(mark, batch), jax.tree.map(lambda new, old: jnp.where(kept, new, old), new_state, state)

    return jax.jit(make_batch, compiler_options=compiler_options)


def all_finite(tree: Any) -> Array:
    """Whether every number of a tree is finite: [] bool."""
    numbers = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.ones((), bool), *(jnp.isfinite(leaf).all() for leaf in numbers)]).all()


def minibatch(batch: Any, index: int) -> Any:
    """The [K, R, S] slice of a [M, K, R, S] batch that one optimizer step learns from."""
    return jax.tree.map(lambda x: x[index], batch)


def add_up(metrics: Metrics) -> Metrics:
    """Metrics stacked along their first axis, over micro-batches or updates -> one of each kind."""

    def one(metric: Metric) -> Metric:
        match metric:
            case Sum(value, weight):
                return Sum(value.sum(0), weight.sum(0))
            case Max(value):
                return Max(value.max(0))
            case Min(value):
                return Min(value.min(0))
            case First(metric):
                return First(one(metric))

    return {name: one(metric) for name, metric in metrics.items()}


def reduce_metrics(metrics: Metrics) -> dict[str, Array]:
    """Metrics by kind -> plain numbers; a mean over nothing is zero."""

    def number(metric: Metric) -> Array:
        match metric:
            case Sum(value, weight):
                return value / (weight + (weight == 0))
            case Max(value) | Min(value):
                return value
            case First(metric):
                return number(metric)

    return {name: number(metric) for name, metric in metrics.items()}


def reduce_updates(history: list[Metrics]) -> dict[str, float]:
    """The metrics of one batch's updates, fetched to the host, as one row.

    Updates that were skipped count in optim/skipped and nowhere else; if all of them were, it stands alone.
    """
    taken = [update for update in history if not reduce_metrics(update)["optim/skipped"]]
    row = {"optim/skipped": float(len(history) - len(taken))}
    if not taken:
        return row

    def over_updates(name: str, first: Metric) -> Metric:
        updates = taken[:1] if isinstance(first, First) else taken
        return jax.tree.map(lambda *values: np.stack(values), *(update[name] for update in updates))

    metrics = add_up({name: over_updates(name, metric) for name, metric in taken[0].items()})
    return {name: float(number) for name, number in reduce_metrics(metrics).items()} | row


def make_update_step(
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    trainable: Trainable,
    shardings: TrainState | None = None,
    narrow: Callable[[Params], Params] = lambda params: params,
    probe: Probe | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> UpdateStep:
    """(state, batch with leaves [K, R, S]) -> (state, metrics), jitted; the state is donated and keeps its dtypes.

    `shardings` (a TrainState of them) pins the new state to the old one's place on the mesh; what of the optimizer's
    state lies in the hosts' memory is fetched for the step and brought back. `narrow` makes of params
    what the models compute with: a micro-batch's gradient has its types, only their sum is float32. `probe` measures,
    and may add to the loss.
    """

    def update(stored: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state = stored if shardings is None else _moved(stored, shardings, sharding.DEVICE)
        chosen, frozen = partition(state.params, trainable)
        if probe is None:
            loss, stacked, gradients = accumulate(algorithm, chosen, frozen, batch, narrow)
            measured = {}
        else:
            loss, stacked, gradients, measured = _accumulate_probed(probe, algorithm, chosen, frozen, batch, narrow)
        norm = optax.tree.norm(gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, chosen)
        # A clipped ratio may hide an infinite log-prob from loss and gradient: the batch is looked at, too.
        finite = jnp.isfinite(loss) & jnp.isfinite(norm) & all_finite(batch)
        one = jnp.ones(())
        metrics = (
            add_up(stacked)
            | measured
            | {
                "optim/loss": Sum(loss, one),
                "optim/grad_norm": Sum(norm, one),
                "optim/learning_rate": Sum(jnp.asarray(learning_rate(state.step), jnp.float32), one),
                "optim/skipped": Max(1.0 - finite),
            }
        )
        params = combine(optax.apply_updates(chosen, updates), frozen)
        params, algorithm_state = algorithm.after_update(params, state.algorithm_state, reduce_metrics(metrics))
        new_state = TrainState(state.step + 1, params, opt_state, algorithm_state)
        new_state = jax.tree.map(lambda new, old: jnp.where(finite, new.astype(old.dtype), old), new_state, state)
        return new_state if shardings is None else _moved(new_state, shardings, sharding.HOST), metrics

    out_shardings = None if shardings is None else (shardings, None)
    return jax.jit(update, donate_argnums=0, out_shardings=out_shardings, compiler_options=compiler_options)


def _moved(state: TrainState, places: TrainState, kind: str) -> TrainState:
    """Inside jit: the state with what of the optimizer's state has its place in the hosts' memory in this one."""

    def one(leaf: Array, place: Sharding) -> Array:
        return jax.device_put(leaf, place.with_memory_kind(kind)) if sharding.is_on_host(place) else leaf

    return replace(state, opt_state=jax.tree.map(one, state.opt_state, places.opt_state))


def accumulate(
    algorithm: Algorithm,
    chosen: Params,
    frozen: Params,
    batch: Any,
    narrow: Callable[[Params], Params] = lambda params: params,
) -> tuple[Array, Metrics, Params]:
    """(loss, stacked metrics, gradients in float32), summed over the micro-batches of one optimizer step.

    Nothing is averaged: the batch's weights are normalised over the whole step, so the sum is exact however it is cut.
    """

    def loss_of(trained: Params, micro_batch: Any) -> tuple[Array, Metrics]:
        return algorithm.loss(combine(trained, frozen), micro_batch)

    def one(carry: tuple[Array, Params], micro_batch: Any) -> tuple[tuple[Array, Params], Metrics]:
        loss, gradients = carry
        (value, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(narrowed, micro_batch)
        gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, gradient)
        return (loss + value, gradients), metrics

    narrowed = narrow(chosen)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), chosen)
    (loss, gradients), metrics = jax.lax.scan(one, (jnp.zeros(()), zeros), batch)
    return loss, metrics, gradients


def _accumulate_probed(
    probe: Probe,
    algorithm: Algorithm,
    chosen: Params,
    frozen: Params,
    batch: Any,
    narrow: Callable[[Params], Params],
) -> tuple[Array, Metrics, Params, Metrics]:
    """`accumulate`, and the metrics of the probe over the whole step."""

    def loss_of(params: tuple[Params, Params], micro_batch: Any) -> tuple[Array, Metrics]:
        return algorithm.loss(_with_leaves(*params), micro_batch)

    weights, nothing = probe.zeros, jax.tree.map(lambda _: None, probe.zeros)
    if probe.weights is not None:
        weights = probe.weights(_measure(loss_of, combine(narrow(chosen), frozen), probe.zeros, batch))
    probing = algorithm._replace(loss=loss_of)
    loss, metrics, (gradients, measured) = accumulate(
        probing, (chosen, weights), (frozen, nothing), batch, lambda both: (narrow(both[0]), both[1])
    )
    added = jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, weights, measured), jnp.zeros(()))
    return loss + added, metrics, gradients, probe.metrics(measured)


def _measure(loss_of: Callable[..., Any], params: Params, leaves: Params, batch: Any) -> Params:
    """The gradient of the probe's leaves alone, which does not depend on the loss: no more than forward passes."""

    def one(total: Params, micro_batch: Any) -> tuple[Params, None]:
        part, _ = jax.grad(lambda leaves: loss_of((params, leaves), micro_batch), has_aux=True)(leaves)
        return jax.tree.map(jnp.add, total, part), None

    return jax.lax.scan(one, leaves, batch)[0]


def _with_leaves(params: Params, leaves: Params) -> Params:
    """Params with a role's leaves beside its own."""
    return params | {name: params[name] | added for name, added in leaves.items()}
