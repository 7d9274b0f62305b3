"""Policy gradients as a sentence: a baseline, a surrogate, weights, and a list of parts.

    policy_gradient(
        roles,
        sampling,
        advantages=of_groups(group_scaled),
        surrogate=clipped(0.2, 0.28),
        weights=masked.token_mean,
        parts=(overlong(4096), entropy_bonus(0.01)),
    )

GRPO and its relatives, REINFORCE and PPO are such sentences. Parts are in `losses`: `returns`
(clips and penalties), `sampler_correction`, `entropy`, `reference_kl`, `robust`, `pretraining_mix`
and `observations`. To write one, see `losses.policy_batch.Part`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tpu_rl.losses.controllers import combined
from tpu_rl.losses.log_probs import log_probs_of_hidden
from tpu_rl.losses.masked import Weighting
from tpu_rl.losses.policy_batch import Draft, Part, PolicyBatch, begin
from tpu_rl.losses.policy_gradient import SurrogateFunction, policy_loss
from tpu_rl.types import Algorithm, Array, Experience, Max, Metrics, Params, Roles, Sampling


def policy_gradient(
    roles: Roles,
    sampling: Sampling,
    *,
    advantages: Callable[[Draft], Draft],
    surrogate: SurrogateFunction,
    weights: Weighting,
    parts: Sequence[Part] = (),
) -> Algorithm:
    """Build a policy-gradient method. It learns from a Rollout.

    Its state is that of its parts, by their names.

    Args:
      advantages: gives a batch in the making its advantages, e.g. `credit.of_groups`.
      surrogate: loss of each token, e.g. `losses.policy_gradient.clipped`.
      weights: function from learned tokens to weights, e.g. `masked.token_mean`.
      parts: what else changes rewards, weights or loss, in the order of the effects.
    """
    policy = roles["policy"]
    controllers = {part.name: part.controller for part in parts if part.controller is not None}

    def make_batch(experience: Experience, params: Params, state: Any) -> tuple[PolicyBatch, Any]:
        states = dict(state) if controllers else {}
        draft = begin(experience, params, policy, sampling.temperature, sampling.max_new_tokens)
        # Rewards and learned tokens, then advantages and weights of these, [N, T].
        for part in parts:
            if part.draft is not None:
                draft, of_part = part.draft(draft, states.get(part.name))
                if part.controller is not None:
                    states[part.name] = of_part
        draft = advantages(draft)
        layout = draft.layout
        batch = draft.pack(weights(draft.learned, layout.minibatch, layout.minibatches))
        # Weights of further terms, and changes of advantages and weights, [M, K, R, S].
        for part in parts:
            if part.batch is not None:
                batch = part.batch(batch, draft, states.get(part.name))
        return batch, states if controllers else state

    def loss(params: Params, batch: PolicyBatch) -> tuple[Array, Metrics]:
        changed = batch.temperature
        hidden = policy.hidden(params, batch.rows)
        log_probs = log_probs_of_hidden(
            policy,
            params,
            hidden,
            batch.rows,
            sampling.temperature if changed is None else changed.max(),
            entropy_gradient=any(part.entropy_gradient for part in parts),
        )
        value, metrics = policy_loss(log_probs, batch, surrogate, parts, params, hidden)
        if changed is not None:
            metrics["policy/temperature"] = Max(changed.max())
        return value, metrics

    stops_gradient = any(part.stops_gradient for part in parts)
    return Algorithm(make_batch, loss, *combined(controllers), stops_gradient=stops_gradient)
