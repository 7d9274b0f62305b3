"""The log of an episode, from which it goes on in another step or another process.

The log has each turn of the policy, with the log-probs and the version of the policy that sampled
it, and each answer of the environment. An episode goes on by a replay: its turns are taken and its
answers are read as they were, and what comes after the last of them is sampled and asked. So
nothing in a log is asked twice. An agent's function is called again in another process, and has its
requests answered from the log. The environment itself lives on in its process; another process
gives a new one the state that came with the last answer (`Reply.saved`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from tpu_rl.environments.pool import Reply, ToolResult
from tpu_rl.sampler import Turn


class Call(NamedTuple):
    """The request of an agent for a turn."""

    prompt: list[int]
    key: np.ndarray
    """[2] uint32: its random key."""
    when: int = 0
    """Calls that were under way at the same time have one number; later calls have larger ones."""
    repeats: int = 0
    """The number of earlier calls with this prompt."""


class LoggedTurn(NamedTuple):
    """A turn of the policy."""

    turn: Turn
    policy_step: int
    """The optimizer steps that the policy had taken which sampled it."""
    call: Call = Call([], np.zeros(2, np.uint32))
    """Question of an agent. An environment asks for nothing."""


class LoggedAnswer(NamedTuple):
    """An answer of the environment, which may be on its way."""

    to: str
    """reset, call, step or reward."""
    reply: Future[Reply]


@dataclass
class EpisodeLog:
    """An episode so far."""

    seed: int
    """The seed that `reset` gets."""
    key: np.ndarray = field(default_factory=lambda: np.zeros(2, np.uint32))
    """[2] uint32: the random key of its tokens."""
    turns: list[LoggedTurn] = field(default_factory=list)
    answers: list[LoggedAnswer] = field(default_factory=list)
    waits: list[tuple[str, float]] = field(default_factory=list)
    """As in `EpisodeOutcomes`."""
    pool_id: int | None = None
    """The number of the episode in this process's pool. None: its environment is not here."""
    end: Callable[[], None] = lambda: None
    """Ends its environment in this process, because nobody will go on."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(len(logged.turn.tokens) for logged in self.turns)

    def copy(self) -> EpisodeLog:
        """Return the log as it is now, for another process."""
        return replace(
            self,
            turns=[*self.turns],
            answers=[*self.answers],
            waits=[*self.waits],
            pool_id=None,
        )

    def lost_state(self) -> Any:
        """Return the state that a new environment needs; None if it needs none.

        It needs one if the environment was in another process, and may be asked once more.
        """
        if self.pool_id is not None or not self.answers:
            return None
        return self.answers[-1].reply.result().saved


CLASSES = (EpisodeLog, LoggedTurn, Turn, Call, LoggedAnswer, Reply, ToolResult)
"""Classes of logs in checkpoints."""
