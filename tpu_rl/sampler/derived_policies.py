"""Policies made of others: of two models that sample together, or at another temperature.

    mix        log mixture(a) = (1 - s) log policy(a) + s log reference(a), up to normalization:
               the opponent of Nash-MD                            arXiv 2312.00886, section 5
    restrict   the policy in the nucleus of another model: NLPO   `losses.nucleus`
    tempered   logits over a number in the params, so that one compiled program serves all of them

The temperature is the sampler's and divides the logits that come out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tpu_rl.losses import nucleus
from tpu_rl.types import Array, Params, Policy


# Cached, so that equal calls return the same object: policies are static arguments of jit.
@functools.cache
def mix(policy: Policy, reference: Policy, share: float) -> Policy:
    """Return the mixture with the share `share` of the reference."""
    return _together(policy, reference, lambda own, other: (1 - share) * own + share * other)


@functools.cache
def restrict(policy: Policy, mask: Policy, top_p: float, temperature: float) -> Policy:
    """Return the policy in the nucleus of `mask` at the sampling temperature."""
    drop = nucleus.SAMPLED_DROP
    return _together(
        policy, mask, lambda own, other: nucleus.restrict(own, other / temperature, top_p, drop)
    )


TEMPERATURE = "temperature"
"""Entry of the whole params tree with the factor of the sampler's temperature."""


@functools.cache
def tempered(policy: Policy) -> Policy:
    """Return the policy whose logits are divided by params["temperature"]."""

    def extend(params: Params, *rest: Any) -> tuple[Array, Any]:
        logits, cache = policy.extend(params, *rest)
        return logits / params[TEMPERATURE], cache

    return policy._replace(extend=extend, exact=False)


def _together(first: Policy, second: Policy, combine: Callable[[Array, Array], Array]) -> Policy:
    """Return the policy whose logits are combined from those of two, which read the same tokens and
    the same params tree."""

    def init_cache(params: Params, rows: int, length: int) -> Any:
        return tuple(policy.init_cache(params, rows, length) for policy in (first, second))

    def extend(
        params: Params,
        caches: Any,
        tokens: Array,
        positions: Array,
        branch_ids: Array,
        commit: Array,
    ) -> tuple[Array, Any]:
        new = (tokens, positions, branch_ids, commit)
        own, first_cache = first.extend(params, caches[0], *new)
        other, second_cache = second.extend(params, caches[1], *new)
        return combine(own, other), (first_cache, second_cache)

    return Policy(init_cache, extend, first.max_rollback)
