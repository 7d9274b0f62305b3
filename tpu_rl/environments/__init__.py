"""What a policy acts in: the Environment protocol, single-turn questions, and tasks that need no data files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tpu_rl.environments.arithmetic import (
    ALPHABET,
    Arithmetic,
    ArithmeticDemonstrations,
    ArithmeticSource,
    bare,
    evaluate,
    labelled_steps,
    parse,
    split_of,
    written,
)
from tpu_rl.environments.star_graph import StarGraph, StarGraphSource, parse_path

__all__ = [
    "ALPHABET",
    "Arithmetic",
    "ArithmeticDemonstrations",
    "ArithmeticSource",
    "Environment",
    "SingleTurn",
    "StarGraph",
    "StarGraphSource",
    "bare",
    "evaluate",
    "labelled_steps",
    "parse",
    "parse_path",
    "single_turn",
    "split_of",
    "written",
]

Prompt = str | list[dict[str, Any]]
"""Plain text, or the messages of a conversation."""


class Environment(Protocol):
    """A conversation partner on the host. States are immutable values of the environment's own; no JAX in here."""

    def reset(self, example: Mapping[str, Any]) -> tuple[Any, Prompt]:
        """One data row -> (state, what the policy is to continue)."""
        ...

    def step(self, state: Any, text: str) -> tuple[Any, list[dict[str, Any]], float | None, bool]:
        """What the policy wrote -> (state, messages in answer, reward or None, done)."""
        ...


class SingleTurn:
    """A question and one answer, judged by reward functions: `step` itself gives no reward."""

    def reset(self, example: Mapping[str, Any]) -> tuple[None, Prompt]:
        return None, example["prompt"]

    def step(self, state: None, text: str) -> tuple[None, list[dict[str, Any]], float | None, bool]:
        del text
        return state, [], None, True


single_turn: Environment = SingleTurn()
