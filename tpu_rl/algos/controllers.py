"""What algorithms adapt from step to step: coefficients and references.

A controller is an (init_state, after_update) of its own. `combined` makes those of an algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from tpu_rl.algos.roles import moving_reference
from tpu_rl.losses.reference_kl import ReferenceKl, adapted_kl_scale
from tpu_rl.types import Array, Params, no_state, unchanged

InitState = Callable[[Params], Any]
AfterUpdate = Callable[[Params, Any, dict[str, Array]], tuple[Params, Any]]
Controller = tuple[InitState, AfterUpdate]
"""(init_state, after_update) as in `types.Algorithm`."""


def combined(controllers: Mapping[str, Controller]) -> Controller:
    """Return the controller whose state is the dict of the states of all; () if there are none."""
    if not controllers:
        return no_state, unchanged

    def init_state(params: Params) -> dict[str, Any]:
        return {name: init(params) for name, (init, _) in controllers.items()}

    def after_update(
        params: Params, state: dict[str, Any], metrics: dict[str, Array]
    ) -> tuple[Params, dict[str, Any]]:
        states = {}
        for name, (_, update) in controllers.items():
            params, states[name] = update(params, state[name], metrics)
        return params, states

    return init_state, after_update


def kl_controllers(config: ReferenceKl) -> dict[str, Controller]:
    """Return the controllers of the KL to the reference that a configuration wants.

    "kl_scale" holds a KL target. Its state is the scale of the KL coefficients, 1 at first. It
    reads the metric "policy/kl_completion". "reference" resets the reference on schedule.
    """
    controllers = {}
    if config.kl_target is not None:
        controllers["kl_scale"] = _kl_scale(config.kl_target, config.kl_horizon)
    if config.reference_reset_every:
        controllers["reference"] = moving_reference(config.reference_reset_every)
    return controllers


def _kl_scale(target: float, horizon: float) -> Controller:

    def init_state(params: Params) -> Array:
        del params
        return jnp.ones((), jnp.float32)

    def after_update(
        params: Params, scale: Array, metrics: dict[str, Array]
    ) -> tuple[Params, Array]:
        kl = metrics["policy/kl_completion"]
        return params, adapted_kl_scale(scale, kl, target, horizon)

    return init_state, after_update
