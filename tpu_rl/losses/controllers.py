"""Controllers: coefficients and references that algorithms adapt from step to step.

A controller is an (init_state, after_update) of its own. `combined` makes those of an algorithm.
Coefficients stay where they are in steps that learn nothing (`is_empty`), whose metrics measure
nothing. References count all steps, because rounds and schedules do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tpu_rl.losses.policy_batch import Controller
from tpu_rl.losses.shapes import Bools
from tpu_rl.types import Array, Params, no_state, unchanged


def combined(controllers: Mapping[str, Controller]) -> Controller:
    """Make the controller whose state is the dict of the states of all; () if there are none."""
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


def is_empty(metrics: Mapping[str, Array]) -> Bools:
    """Say whether the step had no weight on any token, [] bool, from its reduced metrics."""
    return jnp.asarray(metrics.get("optim/empty", 0.0)) > 0


def moving_reference(every: int, mix: float = 1.0, role: str = "reference") -> Controller:
    """Make the controller of a reference that follows the policy.

    The state counts updates. At each `every`-th update the reference moves the share `mix` of the
    way to the policy; 1 makes them equal. The RoleSpec of the reference has `tracks_policy=mix`.
    `role` is its name.
    """

    def init_state(params: Params) -> Array:
        return jnp.zeros((), jnp.int32)

    def after_update(
        params: Params, updates: Array, metrics: dict[str, Array]
    ) -> tuple[Params, Array]:
        is_due = (updates + 1) % every == 0

        def move(old: Array, new: Array) -> Array:
            # A mean with the weights 0 and 1 may round.
            return jnp.where(is_due, new if mix == 1 else (1 - mix) * old + mix * new, old)

        moved = jax.tree.map(move, params[role], params["policy"])
        return params | {role: moved}, updates + 1

    return init_state, after_update
