"""Partial completions: what one call of `sample` hands to a later one, in memory or as JSON."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

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


# --- JSON ---


_TOKEN_DTYPES = {"tokens": np.int32, "log_probs": np.float32, "behaviour_log_probs": np.float32}
"""Fields of a `PartialCompletion` with one value per token."""

_ROW_DTYPES = {
    "birth_key": np.uint32,
    "policy_step": np.int32,
    "ended": np.bool_,
    "truncated": np.bool_,
}
"""The other fields."""


def completions_to_json(completions: Sequence[PartialCompletion]) -> dict[str, Any]:
    """Return the completions as JSON values.

    "counts" lists the number of tokens of each completion. Every other entry is a field of all
    completions: the bytes of their concatenated values, in base 64.
    """
    values: dict[str, Any] = {"counts": [len(completion.tokens) for completion in completions]}
    for name, dtype in (_TOKEN_DTYPES | _ROW_DTYPES).items():
        arrays = [np.atleast_1d(np.asarray(x._asdict()[name], dtype)) for x in completions]
        # The empty array is for an empty list of completions.
        column = np.concatenate([np.zeros(0, dtype), *arrays])
        values[name] = base64.b64encode(column.tobytes()).decode()
    return values


def completions_from_json(values: dict[str, Any]) -> list[PartialCompletion]:
    """Return the completions that `completions_to_json` was given."""
    counts = values["counts"]
    columns = {
        name: np.frombuffer(base64.b64decode(values[name]), dtype)
        for name, dtype in (_TOKEN_DTYPES | _ROW_DTYPES).items()
    }
    ends = np.cumsum(counts, dtype=np.int64)[:-1]
    by_token = {name: np.split(columns[name], ends) for name in _TOKEN_DTYPES}
    key_words = len(columns["birth_key"]) // max(len(counts), 1)
    birth_keys = columns["birth_key"].reshape(len(counts), key_words)
    return [
        PartialCompletion(
            tokens=by_token["tokens"][row],
            log_probs=by_token["log_probs"][row],
            behaviour_log_probs=by_token["behaviour_log_probs"][row],
            birth_key=birth_keys[row],
            policy_step=int(columns["policy_step"][row]),
            ended=bool(columns["ended"][row]),
            truncated=bool(columns["truncated"][row]),
        )
        for row in range(len(counts))
    ]
