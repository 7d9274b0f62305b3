"""All calls of an episode, as rows of token ids that share prefixes.

Each call continues a prompt. A prompt that begins with a whole row extends it: what is new in the
prompt was observed, and the completion was chosen. Any other prompt begins a row of its own, a
branch of the row with which it has the most tokens in common. So an agent that only appends makes
one row. One that drops or rewrites its history, asks twice, or has helpers makes several.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from tpu_rl.rollout.branches import Branch
from tpu_rl.rollout.conversations.episode_log import LoggedTurn
from tpu_rl.sampler import Turn
from tpu_rl.sampler.conversation_sampler import common_prefix


def branches_of(turns: Iterable[LoggedTurn]) -> list[Branch]:
    """Return the branches of the turns of an agent's episode, in the order in which they began.

    Those of calls that were made at the same time are ordered by their prompts, so that it does
    not matter which of them was answered first.
    """
    branches: list[Branch] = []

    def order(logged: LoggedTurn) -> tuple[Any, ...]:
        call = logged.call
        return call.when, len(call.prompt), call.prompt, call.repeats

    for logged in sorted(turns, key=order):
        _add(branches, logged.call.prompt, logged.turn)
    return branches


def _add(branches: list[Branch], prompt: list[int], turn: Turn) -> None:
    """Add a call to the branches."""
    parent, shared = _longest_match(branches, prompt)
    if shared and shared == len(branches[parent].tokens):
        branches[parent].add(prompt[shared:], turn)
        return
    branch = Branch(parent, shared)
    branch.add(prompt, turn)
    branches.append(branch)


def _longest_match(branches: list[Branch], prompt: list[int]) -> tuple[int, int]:
    """Return (index of the branch, tokens in common).

    The branch that the prompt extends is preferred to others that have as much in common.
    """
    best = (len(branches), 0)
    for index, branch in enumerate(branches):
        common = common_prefix(branch.tokens, prompt)
        extends = common == len(branch.tokens)
        if common > best[1] or (common == best[1] > 0 and extends):
            best = (index, common)
    return best


def call_key(row_key: np.ndarray, prompt: list[int], repeats: int) -> np.ndarray:
    """Return the random key [2] uint32 of a call.

    It depends on the episode's key, the prompt, and the number of earlier calls with this prompt.
    It does not depend on when calls arrive, nor on other episodes.
    """
    numbers: list[Any] = [row_key, np.asarray([repeats, *prompt])]
    data = b"".join(np.asarray(part, "<i8").tobytes() for part in numbers)
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), "<u4").astype(np.uint32)
