"""Episodes of several rows: each row is a branch, which shares a beginning with an earlier one.

An episode has more than one row if its history was rewritten on the way: by a chat template that
drops what the model thought, or by a program that shortens a conversation. Rewards judge episodes,
and the policy learns from rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpu_rl.sampler import Turn
from tpu_rl.types import Rollout


@dataclass
class Branch:
    """A row in the making. Lists have one entry for each token."""

    parent: int = 0
    """Index of an earlier branch that begins with the same tokens; its own index without one."""
    shared: int = 0
    """The number of these tokens."""
    tokens: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    """True where this branch chose the token. The tokens that it shares were chosen, if at all, by
    the branch that had them first."""
    log_probs: list[float] = field(default_factory=list)
    behaviour_log_probs: list[float] = field(default_factory=list)
    truncated: bool = False
    """True if the last completion ended at its limit."""

    def observe(self, token_ids: list[int]) -> None:
        self.tokens += token_ids
        self.is_action += [False] * len(token_ids)
        zeros = [0.0] * len(token_ids)
        self.log_probs += zeros
        self.behaviour_log_probs += zeros

    @property
    def actions(self) -> list[int]:
        """The tokens that the policy chose."""
        return [token for token, chosen in zip(self.tokens, self.is_action, strict=True) if chosen]

    @property
    def num_observed(self) -> int:
        """The number of tokens after the first action that the policy did not choose."""
        if True not in self.is_action:
            return 0
        return self.is_action[self.is_action.index(True) :].count(False)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for values in (self.tokens, self.is_action, self.log_probs, self.behaviour_log_probs):
            del values[length:]

    def add(self, observed: list[int], turn: Turn) -> None:
        """Append what was observed, and then what the policy wrote."""
        self.observe(observed)
        self.tokens += turn.tokens
        self.is_action += [True] * len(turn.tokens)
        self.log_probs += turn.log_probs.tolist()
        self.behaviour_log_probs += turn.behaviour_log_probs.tolist()
        self.truncated = not turn.stopped


def to_rollout(
    episodes: list[list[Branch]],
    keys: np.ndarray,
    group_size: int,
    length: int,
    pad_id: int,
    policy_step: int | np.ndarray,
) -> Rollout:
    """Return the branches of all episodes as the rows of a rollout of `length` columns.

    `policy_step` is that of all episodes, or [episodes] that of the first token of each.
    The first rows of a group's episodes share what comes before their first actions. If each
    episode has one branch, there are no episode ids. If besides all prompts of a group are equal,
    nothing says what rows share.
    """
    num_rows = sum(map(len, episodes))
    shape = (num_rows, length)
    tokens = np.full(shape, pad_id, np.int32)
    action_mask = np.zeros(shape, bool)
    log_probs = np.zeros(shape, np.float32)
    behaviour_log_probs = np.zeros(shape, np.float32)
    parent = np.arange(num_rows, dtype=np.int32)
    shared = np.zeros(num_rows, np.int32)
    episode_id = np.repeat(np.arange(len(episodes), dtype=np.int32), [len(e) for e in episodes])
    truncated = np.zeros(num_rows, bool)
    row = 0
    first_of_group = 0
    for episode, branches in enumerate(episodes):
        start = row
        if episode % group_size == 0:
            first_of_group = row
        for branch in branches:
            end = len(branch.tokens)
            tokens[row, :end] = branch.tokens
            action_mask[row, :end] = branch.is_action
            log_probs[row, :end] = branch.log_probs
            behaviour_log_probs[row, :end] = branch.behaviour_log_probs
            truncated[row] = branch.truncated
            if branch.shared:
                parent[row] = start + branch.parent
                shared[row] = branch.shared
            row += 1
        if start != first_of_group:
            same = tokens[start] == tokens[first_of_group]
            # Up to the first action of either.
            same &= ~np.maximum.accumulate(action_mask[start] | action_mask[first_of_group])
            parent[start] = first_of_group
            shared[start] = same.argmin()
    are_several = num_rows > len(episodes)
    prompt_lengths = action_mask.argmax(1)
    same_prompts = np.all((shared == prompt_lengths) | (parent == np.arange(num_rows)))
    is_plain = not are_several and bool(same_prompts)
    # Rollout's fields are declared as jax arrays; these numpy arrays are placed on devices later.
    fields: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": action_mask,
        "log_probs": log_probs,
        "behaviour_log_probs": behaviour_log_probs,
        "rewards": np.zeros(shape, np.float32),
        "group_id": episode_id // group_size,
        "policy_step": np.full(len(episodes), policy_step, np.int32)[episode_id],
        "birth_key": keys[episode_id],
        "truncated": truncated,
        "scored": np.ones(num_rows, bool),
        "parent": None if is_plain else parent,
        "shared": None if is_plain else shared,
        "episode_id": episode_id if are_several else None,
    }
    return Rollout(**fields)
