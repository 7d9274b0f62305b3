"""The type of a task: problems made by a formula, and the verifiers of their answers.

A task is one file of `tpu_rl.tasks` and one row of `TASKS` in `tpu_rl.wings`. The rest of the
library reads that table: the settings become flags (`--data.*`), and the rows are trained and
evaluated on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tpu_rl import lazy, wings

if TYPE_CHECKING:
    # Reward workers import this file: it must not load JAX, as tpu_rl.data does.
    from tpu_rl.data import Row, Rows


def no_slices(row: Row) -> tuple[str, ...]:
    """Return no slice, for tasks that have none."""
    return ()


class Task(NamedTuple):
    """A task that makes its own problems."""

    settings: type
    """Frozen dataclass with the task's settings: the field `data` of an experiment."""
    train_rows: Callable[[Any, int], Rows]
    """(settings, seed) -> training problems, each with the column `prompt`. Rows that are made by a
    formula are a frozen dataclass: its `repr` identifies them in checkpoints."""
    demonstrations: Callable[[Any, int], Rows]
    """(settings, seed) -> training problems with the column `completion`, to imitate."""
    evaluation_rows: Callable[[Any, int], Rows]
    """(settings, count) -> at least `count` held-out problems, the same for every seed."""
    label_steps: Callable[[str, str], list[tuple[str, bool]]] | None = None
    """(prompt, completion) -> the completion's steps, and True for each right one. Process reward
    models need it."""
    variants: Callable[[Row], list[Row]] | None = None
    """Problem -> easier problems of its kind, with their own answers, for training at test time."""
    slices_of: Callable[[Row], tuple[str, ...]] = no_slices
    """Row -> names of the slices that it belongs to. Reward models report accuracy by slice."""


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a completion: the completion itself, or what the model said last.

    A conversation may end with what a tool answered.
    """
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return (said or completion)[-1].get("content") or ""


def task_of(settings: object) -> Task | None:
    """Return the task with these settings, or None if they belong to no task (data files)."""
    task = wings.TASKS.get(lazy.name_of(type(settings).__name__, "Data"))
    return task if task is not None and type(settings) is task.settings else None
