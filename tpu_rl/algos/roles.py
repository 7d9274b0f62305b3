"""Roles that several algorithms ask for in the same way."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tpu_rl.algorithm_spec import RoleSpec
from tpu_rl.types import Array, Params


def with_reference(
    roles: dict[str, RoleSpec], needed: bool, is_reset: bool = False
) -> dict[str, RoleSpec]:
    """Return `roles`, with a frozen role "reference" if it is needed, which may be reset to the
    policy now and then.

    A run without that role neither keeps a reference model nor makes a reference pass.
    """
    if not needed:
        return roles
    return roles | {"reference": RoleSpec(trainable=False, tracks_policy=float(is_reset))}


def moving_reference(
    every: int, mix: float = 1.0, role: str = "reference"
) -> tuple[
    Callable[[Params], Array],
    Callable[[Params, Array, dict[str, Array]], tuple[Params, Array]],
]:
    """Return (init_state, after_update) of an algorithm whose reference follows its policy.

    The state counts updates. At each `every`-th update the reference moves the share `mix` of the
    way to the policy; 1 makes them equal. The RoleSpec of the reference has `tracks_policy=mix`.
    `role` is its name.
    """

    def init_state(params: Params) -> Array:
        del params
        return jnp.zeros((), jnp.int32)

    def after_update(
        params: Params, updates: Array, metrics: dict[str, Array]
    ) -> tuple[Params, Array]:
        del metrics
        is_due = (updates + 1) % every == 0

        def move(old: Array, new: Array) -> Array:
            # A mean with the weights 0 and 1 may round.
            return jnp.where(is_due, new if mix == 1 else (1 - mix) * old + mix * new, old)

        moved = jax.tree.map(move, params[role], params["policy"])
        return params | {role: moved}, updates + 1

    return init_state, after_update
