"""The geometric mixture of two policies, as a `Policy` like any other.

    log mixture(a) = (1 - s) log policy(a) + s log reference(a), up to normalization

It is the opponent of Nash-MD (arXiv 2312.00886, section 5). The temperature is the sampler's and
divides the mixed logits.
"""

from __future__ import annotations

import functools
from typing import Any

from tpu_rl.types import Array, Params, Policy


# Cached, so that equal calls return the same object: policies are static arguments of jit.
@functools.cache
def mix(policy: Policy, reference: Policy, share: float) -> Policy:
    """Return the mixture with the share `share` of the reference.

    Its cache is {"policy": ..., "reference": ...}; both policies read the same params tree.
    """

    def init_cache(params: Params, rows: int, length: int) -> Any:
        return {
            "policy": policy.init_cache(params, rows, length),
            "reference": reference.init_cache(params, rows, length),
        }

    def extend(
        params: Params,
        cache: Any,
        tokens: Array,
        positions: Array,
        branch_ids: Array,
        commit: Array,
    ) -> tuple[Array, Any]:
        new = (tokens, positions, branch_ids, commit)
        policy_logits, policy_cache = policy.extend(params, cache["policy"], *new)
        reference_logits, reference_cache = reference.extend(params, cache["reference"], *new)
        mixed = (1 - share) * policy_logits + share * reference_logits
        return mixed, {"policy": policy_cache, "reference": reference_cache}

    return Policy(init_cache, extend, policy.max_rollback)
