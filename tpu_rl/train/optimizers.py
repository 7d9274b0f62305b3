"""Optax optimizers and learning-rate schedules from small configs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from tpu_rl import ranges
from tpu_rl.ranges import CountOrNone, In, NotNegative, ReadOnlyWith, Share

UNDECAYED_SUFFIXES = ("_norm", "_bias", "_decay_log", "_gain", "_scalar", "_min", "_max")
"""Weight decay skips leaves whose names end like this: norms, biases, bounds, and what the decays
of linear attention are made of."""

MUON_RMS = 0.2
"""The root mean square of Muon's updates, as a multiple of the learning rate. It is that of AdamW's
updates in practice (arXiv 2502.16982), so that the learning rates of AdamW suit Muon, too."""

MatrixAxes = Callable[[str], tuple[tuple[int, ...], tuple[int, ...]] | None]
"""Name of a leaf -> its input axes and its output axes, counted from the last; None if the leaf is
no matrix that Muon should orthogonalize."""


@dataclass(frozen=True)
class OptimizerConfig(ranges.Checked):
    """An optimizer with warm-up, a schedule and clipping by the global norm."""

    FLAG = "--optimizer"

    name: Literal["adamw", "adafactor", "muon", "lion", "sgd"] = "adamw"
    """adafactor: a factored second moment, without a first one; learning rates as for adamw. muon:
    orthogonalized momentum for the matrices of the layers and AdamW for the rest, at one learning
    rate as for adamw. lion: the sign of the momentum; use a tenth to a third of adamw's learning
    rate. sgd: with momentum beta1; it needs far higher learning rates."""
    learning_rate: Annotated[float, In("[1e-12, 1e2]", fix="use a value such as 1e-6")] = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up: constant, or decay to `final_share` of the learning rate at the
    last step."""
    warmup_steps: CountOrNone = 0
    """Optimizer steps of linear increase from zero."""
    final_share: Share = 0.1
    weight_decay: NotNegative = 0.0
    """The share of each matrix that a step takes off, as a multiple of the learning rate."""
    beta1: Annotated[float, In("[0, 1)"), ReadOnlyWith("name", "adamw", "muon", "lion", "sgd")] = (
        0.9
    )
    """Decay rate of the momentum; in muon, also of AdamW's first moment. In lion, the share of the
    momentum in an update. 0.95 is usual for muon."""
    beta2: Annotated[float, In("[0, 1)"), ReadOnlyWith("name", "adamw", "muon", "lion")] = 0.999
    """Decay rate of AdamW's second moment; in lion, of the momentum, where 0.99 is usual."""
    epsilon: Annotated[NotNegative, ReadOnlyWith("name", "adamw", "muon")] = 1e-8
    max_grad_norm: Annotated[float, In("(0, inf]")] = 1.0
    """Gradients with a larger global norm are scaled down to this norm."""
    continued: bool = False
    """Begin with the moments that the optimizer had when the run ended that wrote --model.path,
    RUN/model. The schedule begins anew."""
    reset_every: CountOrNone = 0
    """Begin the moments anew after so many optimizer steps, as ProRL (arXiv 2505.24864) does with
    each new reference; 0 never. The schedule goes on."""
    offload: bool = False
    """Keep the optimizer's state in host memory between optimizer steps. AdamW's takes twice the
    bytes of the parameters in float32. Each step copies it to the device and back; plan.py
    estimates the time that this takes."""


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the schedule: optimizer step -> learning rate.

    `steps` is the length of the entire run in optimizer steps.
    """
    peak = config.learning_rate
    final = config.learning_rate * config.final_share
    # The first step after the warm-up has the peak and the last step of the run has the final
    # learning rate, hence one step less.
    decay_steps = max(steps - 1 - config.warmup_steps, 1)
    schedules = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, final, decay_steps),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, alpha=config.final_share),
    }
    after_warmup = schedules[config.schedule]
    if not config.warmup_steps:
        return after_warmup
    # The learning rate during warm-up is peak * (step + 1) / warmup_steps, so that the first step
    # already changes the parameters.
    warmup = optax.linear_schedule(
        peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1)
    )
    return optax.join_schedules([warmup, after_warmup], [config.warmup_steps])


def decay_mask(params: optax.Params) -> optax.Params:
    """Return a tree of bools: True on the leaves that weight decay applies to, the matrices.

    Leaves are told apart by name, because norms that are stacked over layers are two-dimensional,
    too.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path[-1].key.endswith(UNDECAYED_SUFFIXES), params
    )


def by_role(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    scales: Mapping[str, float],
    matrix_axes: MatrixAxes | None = None,
) -> Any:
    """Return an optimizer with separate clipping and state for each trainable role.

    With one optimizer per role, large gradients of one role do not scale down those of another.
    `scales` maps each role to its learning rate as a multiple of the schedule. Muon needs
    `matrix_axes`.
    """

    def label_by_role(params: Any) -> Any:
        return {
            role: jax.tree.map(lambda _, role=role: role, leaves) for role, leaves in params.items()
        }

    def scaled(scale: float) -> optax.Schedule:
        return lambda step: scale * schedule(step)

    if list(scales.values()) == [1.0]:
        return build(config, schedule, matrix_axes)
    optimizers: dict[Hashable, optax.GradientTransformation] = {
        role: build(config, scaled(scale), matrix_axes) for role, scale in scales.items()
    }
    return optax.partition(optimizers, label_by_role)


def build(
    config: OptimizerConfig, schedule: optax.Schedule, matrix_axes: MatrixAxes | None = None
) -> optax.GradientTransformation:
    """Return an optimizer with clipping by the global norm, as `make_update_step` applies it.

    Muon needs `matrix_axes`.
    """
    clip = optax.clip_by_global_norm(config.max_grad_norm)
    if config.name == "adamw":
        optimizer = optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )
    elif config.name == "lion":
        optimizer = optax.lion(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )
    elif config.name == "sgd":
        optimizer = optax.sgd(schedule, momentum=config.beta1 or None)
    elif config.name == "adafactor":
        # Not scaled by the parameters: their scale is 0 where adapters begin, and learning rates
        # would mean something else than for the other optimizers.
        optimizer = optax.adafactor(schedule, multiply_by_parameter_scale=False)
    else:
        assert matrix_axes is not None, "Muon needs the axes of its matrices"
        optimizer = _muon(config, schedule, matrix_axes)
    if config.reset_every:
        optimizer = reset_every(optimizer, config.reset_every)
    if config.name not in ("adamw", "lion"):
        optimizer = optax.chain(optimizer, _weight_decay(config, schedule))
    return optax.chain(clip, optimizer)


class ResetState(NamedTuple):
    """State of `reset_every`."""

    step: jax.Array
    """Updates so far, int32."""
    inner: optax.OptState


def reset_every(
    optimizer: optax.GradientTransformation, steps: int
) -> optax.GradientTransformation:
    """Begin the state of an optimizer anew before each `steps`-th step. Its schedules go on."""

    def init(params: optax.Params) -> ResetState:
        return ResetState(jnp.zeros([], jnp.int32), optimizer.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ResetState]:
        is_new = state.step % steps == 0

        def begun(old: Any, new: Any) -> Any:
            return old if is_schedule(old) else jnp.where(is_new, new.astype(old.dtype), old)

        inner = jax.tree.map(begun, state.inner, optimizer.init(params), is_leaf=is_schedule)
        updates, inner = optimizer.update(updates, inner, params)
        return updates, ResetState(state.step + 1, inner)

    return optax.GradientTransformation(init, update)


def is_schedule(node: Any) -> bool:
    """Return True for the state of a schedule in that of an optimizer."""
    return isinstance(node, optax.ScaleByScheduleState)


def state_bytes(config: OptimizerConfig, params: Any, matrix_axes: MatrixAxes | None = None) -> int:
    """Return the bytes of the state of an optimizer of `params`, which may be shapes."""

    def init(params: Any) -> Any:
        # As `init_train_state` does: states are float32 whatever the dtype of the params.
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        return build(config, optax.constant_schedule(0.0), matrix_axes).init(wide)

    leaves = jax.tree.leaves(jax.eval_shape(init, params))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _weight_decay(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Return decoupled weight decay as AdamW has it, to follow an optimizer's learning rate.

    optax.sgd has none. That of optax.adafactor does not follow the learning rate, and that of
    contrib.muon would also decay norms and biases.
    """
    if not config.weight_decay:
        return optax.identity()
    return optax.add_decayed_weights(
        lambda step: -config.weight_decay * schedule(step), mask=decay_mask
    )


def _muon(
    config: OptimizerConfig, schedule: optax.Schedule, matrix_axes: MatrixAxes
) -> optax.GradientTransformation:
    """Return Muon, without weight decay.

    Axes that are neither inputs nor outputs are those of layers and of experts. Each matrix along
    them is orthogonalized by itself.
    """

    def dimension_numbers(params: Any) -> Any:
        def leaf_numbers(path: Any, leaf: Any) -> contrib.MuonDimensionNumbers | None:
            axes = matrix_axes(path[-1].key)
            return None if axes is None else contrib.MuonDimensionNumbers(*axes)

        return jax.tree_util.tree_map_with_path(leaf_numbers, params)

    return contrib.muon(
        schedule,
        beta=config.beta1,
        eps=config.epsilon,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        muon_weight_dimension_numbers=dimension_numbers,
        consistent_rms=MUON_RMS,
    )
