"""Small configs -> optax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from tpu_rl.errors import InputError

UNDECAYED = ("_norm", "_bias")
"""How the names of leaves end that weight decay leaves alone: norms and biases."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, a schedule and a clipped global norm."""

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: constant, or down to `final_share` of the learning rate at the last step."""
    warmup_steps: int = 0
    """Optimizer steps of linear rise from zero."""
    final_share: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it."""
    offload: bool = False
    """Keep the moments in the hosts' memory between optimizer steps, twice the parameters' bytes in float32. A step
    fetches them and brings them back; plan.py says what that takes."""

    def __post_init__(self):
        if not 0 < self.learning_rate < float("inf"):
            raise InputError(
                f"learning rate {self.learning_rate} is not a positive number",
                where="--optimizer.learning-rate",
                fix="use a value such as 1e-6",
            )
        if self.clip_norm <= 0:
            raise InputError(
                f"clip norm {self.clip_norm} is not positive", where="--optimizer.clip-norm", fix="use e.g. 1.0"
            )


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """optimizer step -> learning rate; `steps` is the length of the whole run in optimizer steps."""
    peak, last = config.learning_rate, config.learning_rate * config.final_share
    decay_steps = max(steps - 1 - config.warmup_steps, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, last, decay_steps),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, alpha=config.final_share),
    }[config.schedule]
    if not config.warmup_steps:
        return after
    # The first step already moves: warm-up rises over (step + 1) / warmup_steps.
    rise = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([rise, after], [config.warmup_steps])


def decayed(params: optax.Params) -> optax.Params:
    """Which leaves weight decay applies to: matrices, by name, since stacked norms are two-dimensional too."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not path[-1].key.endswith(UNDECAYED), params)


def by_role(config: OptimizerConfig, schedule: optax.Schedule, scales: Mapping[str, float]) -> Any:
    """One optimizer for each trainable role (role -> its learning rate over the schedule's), so that no role's
    gradients are scaled down because of another's."""

    def label(params: Any) -> Any:
        return {role: jax.tree.map(lambda _, role=role: role, leaves) for role, leaves in params.items()}

    def scaled(scale: float) -> optax.Schedule:
        return lambda step: scale * schedule(step)

    if list(scales.values()) == [1.0]:
        return build(config, schedule)
    return optax.partition({role: build(config, scaled(scale)) for role, scale in scales.items()}, label)


def build(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer that `training.make_update_step` applies."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule, config.beta1, config.beta2, config.epsilon, weight_decay=config.weight_decay, mask=decayed
        ),
    )
