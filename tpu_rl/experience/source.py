"""Types of sources: where a stage's experience comes from, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tpu_rl.rollout import records
from tpu_rl.rollout.scoring import Scored
from tpu_rl.types import Rollout, TrainState


class StepExperience(NamedTuple):
    """The experience of one step, with its part of the metrics row and of samples.jsonl."""

    data: Any
    """Rollout, Demonstrations, Completions, Pairs or QExamples."""
    metrics: dict[str, float]
    records: list[dict[str, Any]]
    """One object per completion, of which samples.jsonl keeps some (`rollout.samples`)."""
    warnings: list[str]
    """Lines for the console, such as reward functions that failed."""
    rollouts: tuple[Rollout, ...] = ()
    """The tokens of `records`: their rows, in order, are those of the records."""
    samples: Sequence[dict[str, Any]] = ()
    """The records that samples.jsonl keeps, after the update."""


class Source(NamedTuple):
    """A stream of experience. Its state is a JSON value and part of each checkpoint."""

    draw: Callable[[int, TrainState], StepExperience]
    """(step of the run, state) -> experience. Offline sources ignore the state."""
    get_state: Callable[[], dict[str, Any]]
    set_state: Callable[[dict[str, Any]], None]
    close: Callable[[], None] = lambda: None
    """End work that goes on between two calls of `draw`."""


def offline(data: Any) -> StepExperience:
    """Return data that was not sampled: it has no metrics."""
    return StepExperience(data, {}, [], [])


def from_scored(scored: Scored, step: int, data: Any = None) -> StepExperience:
    """Return scored completions as the experience of a step.

    The data are the rollout itself, unless given: pairs or labels made of it.
    """
    return StepExperience(
        scored.rollout if data is None else data,
        records.metrics(scored),
        records.records(scored, step),
        records.warnings(scored),
        (scored.rollout,),
    )
