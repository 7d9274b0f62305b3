"""The log of an episode, from which it goes on in another step or another process.

The log has each turn of the policy, with the log-probs and the version of the policy that sampled
it, and each answer of the environment. An episode goes on by a replay: its turns are taken and its
answers are read as they were, and what comes after the last of them is sampled and asked. So
nothing in a log is asked twice. An agent's function is called again in another process, and has its
requests answered from the log. The environment itself lives on in its process; another process
gives a new one the state that came with the last answer (`Reply.saved`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from tpu_rl.environments.pool import Reply, ToolResult
from tpu_rl.sampler import Turn


class LoggedTurn(NamedTuple):
    """A turn of the policy."""

    turn: Turn
    policy_step: int
    """The optimizer steps that the policy had taken which sampled it."""


class LoggedRequest(NamedTuple):
    """The request of an agent for a turn; see `serving.record.Call`."""

    when: int
    prompt: list[int]
    repeats: int


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
    requests: list[LoggedRequest] = field(default_factory=list)
    """Of an agent: what it asked for each turn."""
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
        """Return the log as it is now."""
        return replace(self, turns=[*self.turns], answers=[*self.answers], waits=[*self.waits])

    def lost_state(self) -> Any:
        """Return the state that a new environment needs; None if it needs none.

        It needs one if the environment was in another process, and may be asked once more.
        """
        if self.pool_id is not None or not self.answers:
            return None
        return self.answers[-1].reply.result().saved

    def to_json(self) -> dict[str, Any]:
        """Return the log as JSON values. Waits for the answers that are on their way."""
        return {
            "seed": self.seed,
            "key": self.key.tolist(),
            "turns": [
                {
                    "tokens": logged.turn.tokens,
                    "log_probs": logged.turn.log_probs.tolist(),
                    "behaviour_log_probs": logged.turn.behaviour_log_probs.tolist(),
                    "stopped": logged.turn.stopped,
                    "policy_step": logged.policy_step,
                }
                for logged in self.turns
            ],
            "requests": self.requests,
            "answers": [
                [answer.to, _reply_to_json(answer.reply.result())] for answer in self.answers
            ],
            "waits": self.waits,
        }


def from_json(values: dict[str, Any]) -> EpisodeLog:
    """Return the log whose `to_json` returned these values."""
    return EpisodeLog(
        seed=values["seed"],
        key=np.array(values["key"], np.uint32),
        turns=[
            LoggedTurn(
                Turn(
                    0,
                    turn["tokens"],
                    np.array(turn["log_probs"], np.float32),
                    np.array(turn["behaviour_log_probs"], np.float32),
                    turn["stopped"],
                ),
                turn["policy_step"],
            )
            for turn in values["turns"]
        ],
        requests=[LoggedRequest(*request) for request in values.get("requests", [])],
        answers=[
            LoggedAnswer(to, answered(_reply_from_json(reply))) for to, reply in values["answers"]
        ],
        waits=[(kind, seconds) for kind, seconds in values.get("waits", ())],
    )


def answered(reply: Reply) -> Future[Reply]:
    """Return a future with this answer."""
    future: Future[Reply] = Future()
    future.set_result(reply)
    return future


def _reply_to_json(reply: Reply) -> dict[str, Any]:
    results = [result._replace(images=_as_texts(result.images)) for result in reply.results]
    return reply._asdict() | {"results": results, "images": _as_texts(reply.images)}


def _reply_from_json(values: dict[str, Any]) -> Reply:
    results = [ToolResult(*result) for result in values["results"]]
    restored = tuple(result._replace(images=_as_bytes(result.images)) for result in results)
    return Reply(**values | {"results": restored, "images": _as_bytes(values["images"])})


def _as_texts(images: tuple[bytes, ...]) -> Any:
    return [base64.b64encode(image).decode() for image in images]


def _as_bytes(images: Any) -> tuple[bytes, ...]:
    return tuple(base64.b64decode(image) for image in images)
