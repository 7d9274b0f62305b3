"""Partial completions: what one call of `sample` hands to a later one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpu_rl.types import Rollout


class PartialCompletion(NamedTuple):
    """The first n tokens of a completion, or an entire completion.

    Log-probs are under the policies that sampled the tokens, as in `Rollout`.
    """

    tokens: np.ndarray
    """[n] int32."""
    log_probs: np.ndarray
    """[n] float32."""
    behaviour_log_probs: np.ndarray
    """[n] float32."""
    birth_key: np.ndarray
    """[2] uint32: the row's random key."""
    policy_step: int
    """The optimizer step whose parameters sampled the first token."""
    ended: bool
    """True if the completion is entire."""
    truncated: bool
    """True if it ended at its length limit."""


def partial_completions(rollout: Rollout, ended: np.ndarray) -> list[PartialCompletion]:
    """Return the completions of a rollout, to be resumed by a later call of `sample`.

    `ended` [N] is True for the rows that are entire, as `stop_when` was told.
    """
    tokens = np.asarray(rollout.tokens)
    log_probs = np.asarray(rollout.log_probs)
    behaviour_log_probs = np.asarray(rollout.behaviour_log_probs)
    birth_key = np.asarray(rollout.birth_key)
    return [
        PartialCompletion(
            tokens=tokens[row, mask],
            log_probs=log_probs[row, mask],
            behaviour_log_probs=behaviour_log_probs[row, mask],
            birth_key=birth_key[row],
            policy_step=int(rollout.policy_step[row]),
            ended=bool(ended[row]),
            truncated=bool(ended[row]) and bool(rollout.truncated[row]),
        )
        for row, mask in enumerate(np.asarray(rollout.action_mask))
    ]
