"""Types of sources: where a stage's experience comes from, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from tpu_rl import data
from tpu_rl.data import Row
from tpu_rl.data.encoding import bucket
from tpu_rl.experience.layout import Widths
from tpu_rl.rollout import records
from tpu_rl.rollout.engine import Engine, RolloutRequest
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
    snapshot: Callable[[], Callable[[], dict[str, Any]]]
    """Capture the state; the returned function serializes it. Few steps need that."""
    set_state: Callable[[dict[str, Any]], None]
    close: Callable[[], None] = lambda: None
    """End work that goes on between two calls of `draw`."""

    def get_state(self) -> dict[str, Any]:
        """Return the state."""
        return self.snapshot()()


def of_stream(stream: data.RowStream, draw: Callable[[int, TrainState], StepExperience]) -> Source:
    """Return the source whose state is that of a stream of rows."""

    def snapshot() -> Callable[[], dict[str, Any]]:
        state = stream.get_state()
        return lambda: state

    return Source(draw, snapshot, stream.set_state)


def of_rows(
    stream: data.RowStream, make: Callable[[list[Row], int, TrainState], StepExperience]
) -> Source:
    """Return the source of what is made of the stream's rows, a batch of them in each step."""
    return of_stream(stream, lambda step, state: make(next(stream)[1], step, state))


def of_data(stream: data.RowStream, encode: Callable[[list[Row]], Any]) -> Source:
    """Return the source of texts that the stream's rows bring."""
    return of_rows(stream, lambda rows, step, state: offline(encode(rows), rows, step))


def of_engine(
    stream: data.RowStream,
    engine: Engine,
    make: Callable[[Scored, int, TrainState], StepExperience],
) -> Source:
    """Return the source of what is made of scored completions of the stream's prompts."""

    def roll_out(rows: list[Row], step: int, state: TrainState) -> StepExperience:
        request = RolloutRequest(rows, step, policy_step=int(state.step))
        return make(engine.roll_out(state.params, request), step, state)

    return of_rows(stream, roll_out)


class Memory(Protocol):
    """A transform (`experience.transforms`) that remembers something from batch to batch."""

    def __call__(self, scored: Scored, step: int, state: TrainState) -> Scored: ...

    def metrics(self) -> dict[str, float]:
        """Return its part of a metrics row, after a call."""
        ...

    def get_state(self) -> Any:
        """Return a JSON value that later calls do not change."""
        ...

    def set_state(self, state: Any) -> None: ...


def with_memories(source: Source, memories: Mapping[str, Memory]) -> Source:
    """Return the source whose checkpoints have the states of these transforms of its batches."""
    if not memories:
        return source

    def draw(step: int, state: TrainState) -> StepExperience:
        experience = source.draw(step, state)
        for memory in memories.values():
            experience.metrics.update(memory.metrics())
        return experience

    def snapshot() -> Callable[[], dict[str, Any]]:
        of_source = source.snapshot()
        states = {name: memory.get_state() for name, memory in memories.items()}
        return lambda: {"source": of_source(), **states}

    def set_state(state: dict[str, Any]) -> None:
        source.set_state(state["source"])
        for name, memory in memories.items():
            memory.set_state(state[name])

    return source._replace(draw=draw, snapshot=snapshot, set_state=set_state)


def with_widths(source: Source, widths: Widths) -> Source:
    """Return the source whose checkpoints also have the widths of its batches in packed rows.

    Checkpoints of earlier versions have none: a run goes on from those as if it began.
    """

    def snapshot() -> Callable[[], dict[str, Any]]:
        of_source, state = source.snapshot(), widths.get_state()
        return lambda: of_source() | {"widths": state}

    def set_state(state: dict[str, Any]) -> None:
        widths.set_state(state.get("widths", {}))
        source.set_state({name: value for name, value in state.items() if name != "widths"})

    return source._replace(snapshot=snapshot, set_state=set_state)


def offline(texts: Any, rows: Sequence[Row] = (), step: int = 0) -> StepExperience:
    """Return data that was not sampled, made of rows: it has no metrics."""
    return StepExperience(texts, {}, records.of_data(rows, step), [])


def from_scored(scored: Scored, step: int, made: Any = None) -> StepExperience:
    """Return scored completions as the experience of a step.

    The data are the rollout itself, unless given: pairs or labels made of it.
    """
    return StepExperience(
        pad_rows_to_bucket(scored.rollout) if made is None else made,
        records.metrics(scored),
        records.records(scored, step),
        records.warnings(scored),
        (scored.rollout,),
    )


def pad_rows_to_bucket(rollout: Rollout) -> Rollout:
    """Return a rollout with rows without actions at its end, if episodes have several rows.

    How many rows such a batch has depends on what happened in it, and programs are compiled for
    each number. Here it is one of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...
    """
    if rollout.episode_id is None or rollout.parent is None:
        return rollout
    num_rows = len(rollout.tokens)
    size = bucket(num_rows)

    def pad(array: Any) -> np.ndarray:
        return np.pad(array, [(0, size - num_rows)] + [(0, 0)] * (np.ndim(array) - 1))

    padded = jax.tree.map(pad, rollout)
    # Groups stay adjacent, and rows share nothing with the others.
    return replace(
        padded,
        group_id=np.pad(rollout.group_id, (0, size - num_rows), mode="edge"),
        episode_id=np.append(
            rollout.episode_id,
            np.arange(num_rows, size, dtype=np.int32) + np.max(rollout.episode_id) + 1,
        ),
        parent=np.append(rollout.parent, np.arange(num_rows, size, dtype=np.int32)),
    )
