"""Optax optimizers and learning-rate schedules from small configs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from tpu_rl.errors import InputError

UNDECAYED_SUFFIXES = ("_norm", "_bias")
"""Weight decay skips leaves whose names end like this: norms and biases."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, a schedule and clipping by the global norm."""

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up: constant, or decay to `final_share` of the learning rate at the
    last step."""
    warmup_steps: int = 0
    """Optimizer steps of linear increase from zero."""
    final_share: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to this norm."""
    offload: bool = False
    """Keep the Adam moments in host memory between optimizer steps. They take twice the bytes of
    the parameters in float32. Each step copies them to the device and back; plan.py estimates the
    time that this takes."""

    def __post_init__(self):
        if not 0 < self.learning_rate < float("inf"):
            raise InputError(
                f"learning rate {self.learning_rate} is not a positive number",
                where="--optimizer.learning-rate",
                fix="use a value such as 1e-6",
            )
        if self.max_grad_norm <= 0:
            raise InputError(
                f"max_grad_norm {self.max_grad_norm} is not positive",
                where="--optimizer.max-grad-norm",
                fix="use e.g. 1.0",
            )


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


def by_role(config: OptimizerConfig, schedule: optax.Schedule, scales: Mapping[str, float]) -> Any:
    """Return an optimizer with separate clipping and state for each trainable role.

    With one optimizer per role, large gradients of one role do not scale down those of another.
    `scales` maps each role to its learning rate as a multiple of the schedule.
    """

    def label_by_role(params: Any) -> Any:
        return {
            role: jax.tree.map(lambda _, role=role: role, leaves) for role, leaves in params.items()
        }

    def scaled(scale: float) -> optax.Schedule:
        return lambda step: scale * schedule(step)

    if list(scales.values()) == [1.0]:
        return build(config, schedule)
    optimizers: dict[Hashable, optax.GradientTransformation] = {
        role: build(config, scaled(scale)) for role, scale in scales.items()
    }
    return optax.partition(optimizers, label_by_role)


def build(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return AdamW with clipping by the global norm, as `make_update_step` applies it."""
    adamw = optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)
