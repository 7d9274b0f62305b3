"""Controllers: coefficients and references that algorithms adapt from step to step.

A controller is an (init_state, after_update) of its own. `combined` makes those of an algorithm.
Coefficients stay where they are in steps that learn nothing (`is_empty`), whose metrics measure
nothing. References count all steps, because rounds and schedules do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.algos.roles import moving_reference
from tpu_rl.losses import masked
from tpu_rl.losses.policy_batch import RunningReturns, learned_tokens
from tpu_rl.losses.reference_kl import ReferenceKl, adapted_kl_scale
from tpu_rl.types import Array, Params, Rollout, no_state, unchanged

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


def is_empty(metrics: Mapping[str, Array]) -> Array:
    """Return [] bool: True if the step had no weight on any token, from its reduced metrics."""
    return jnp.asarray(metrics.get("optim/empty", 0.0)) > 0


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


def entropy_controller(coef: float, target: float, delta: float, largest: float) -> Controller:
    """Return the controller of an entropy coefficient (Skywork-OR1, arXiv 2505.22312; TRL 1.16).

    After each optimizer step the coefficient rises by `delta` if the policy's entropy, in nats per
    token, is at most `target`, and falls by it otherwise, within 0 and `largest`. The state is
    (coefficient, entropy of the last step). It reads the metric "policy/entropy", of all actions;
    with a top entropy quantile, TRL's entropy is that of the tokens in it.
    """

    def init_state(params: Params) -> tuple[Array, Array]:
        del params
        # No entropy is known yet, so that the first batch has no bonus.
        return jnp.asarray(coef, jnp.float32), jnp.asarray(jnp.inf, jnp.float32)

    def after_update(
        params: Params, state: tuple[Array, Array], metrics: dict[str, Array]
    ) -> tuple[Params, tuple[Array, Array]]:
        entropy = metrics["policy/entropy"].astype(jnp.float32)
        step = jnp.where(entropy <= target, delta, -delta)
        coef = jnp.clip(state[0] + step, 0.0, largest)
        stays = is_empty(metrics)
        return params, (jnp.where(stays, state[0], coef), jnp.where(stays, state[1], entropy))

    return init_state, after_update


def applied_entropy_coef(state: tuple[Array, Array], target: float) -> Array:
    """Return the coefficient of a batch: 0 while the last entropy is above the target."""
    coef, entropy = state
    return jnp.where(entropy <= target, coef, 0.0)


TEMPERATURES = (0.1, 10.0)
"""The smallest and the largest factor of the sampling temperature."""


def temperature_controller(target: float, rate: float) -> Controller:
    """Return the controller of the sampling temperature that keeps the policy's entropy at the
    target, in nats per token.

        ln T <- ln T + rate (target - H),    |target - H| at most 1

    H is the mean entropy of the distributions that tokens were sampled from, "policy/entropy". The
    state is the factor of the run's temperature, 1 at first. AceReason-Nemotron 1.1 (arXiv
    2506.13284) solves for T before a stage; here it follows the policy.
    """

    def init_state(params: Params) -> Array:
        del params
        return jnp.ones((), jnp.float32)

    def after_update(
        params: Params, factor: Array, metrics: dict[str, Array]
    ) -> tuple[Params, Array]:
        missing = jnp.clip(target - metrics["policy/entropy"], -1.0, 1.0)
        moved = jnp.clip(factor * jnp.exp(rate * missing), *TEMPERATURES)
        stays = is_empty(metrics)
        return params, jnp.where(stays, factor, moved).astype(jnp.float32)

    return init_state, after_update


def temperature_factor(state: Mapping[str, Any]) -> Array:
    """Return the factor of the sampling temperature in an algorithm's state."""
    return state["temperature"] if "temperature" in state else state["base"]["temperature"]


def running_returns(reward_clip: float | None) -> dict[str, Controller]:
    """Return the controller "returns", whose state make_batch renews (`normalized_rewards`), or
    none without a clip."""

    def init_state(params: Params) -> RunningReturns:
        del params
        return RunningReturns(*jnp.zeros((3,), jnp.float32))

    return {} if reward_clip is None else {"returns": (init_state, unchanged)}


class Stagnation(NamedTuple):
    """Progress since the last reset of the reference, [] float32."""

    best: Array
    """The largest mean return of a batch."""
    batches: Array
    """Batches since then."""


def stagnation_controller(patience: int) -> Controller:
    """Return the controller that resets the reference to the policy when the mean return of
    `patience` batches was not above the best one before (ProRL, arXiv 2505.24864, section 2.3).

    `with_return` tells it of each batch. The paper watches a validation score, and resets the
    moments of the optimizer too; here they stay.
    """

    def init_state(params: Params) -> Stagnation:
        del params
        return Stagnation(jnp.asarray(-jnp.inf, jnp.float32), jnp.zeros((), jnp.float32))

    def after_update(
        params: Params, state: Stagnation, metrics: dict[str, Array]
    ) -> tuple[Params, Stagnation]:
        del metrics
        is_due = state.batches >= patience
        moved = jax.tree.map(
            lambda old, new: jnp.where(is_due, new, old), params["reference"], params["policy"]
        )
        begun = init_state(params)
        state = Stagnation(
            *(jnp.where(is_due, new, old) for new, old in zip(begun, state, strict=True))
        )
        return params | {"reference": moved}, state

    return init_state, after_update


def with_return(state: Stagnation, rollout: Rollout) -> Stagnation:
    """Return the state after a batch; one without scored episodes changes nothing."""
    learned = learned_tokens(rollout)
    scored = learned.any(-1)
    mean = masked.mean(masked.total(rollout.rewards, learned, axis=-1), scored)
    is_better = mean > state.best
    moved = Stagnation(
        jnp.where(is_better, mean, state.best), jnp.where(is_better, 0.0, state.batches + 1)
    )
    return Stagnation(
        *(jnp.where(scored.any(), new, old) for new, old in zip(moved, state, strict=True))
    )


def _kl_scale(target: float, horizon: float) -> Controller:

    def init_state(params: Params) -> Array:
        del params
        return jnp.ones((), jnp.float32)

    def after_update(
        params: Params, scale: Array, metrics: dict[str, Array]
    ) -> tuple[Params, Array]:
        kl = metrics["policy/kl_completion"]
        moved = adapted_kl_scale(scale, kl, target, horizon)
        return params, jnp.where(is_empty(metrics), scale, moved)

    return init_state, after_update
