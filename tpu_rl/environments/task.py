"""The type of a task: problems made by a formula, and the verifiers of their answers.

A task is one file of this folder and one row of `TASKS` in `tpu_rl.environments`. The rest of the
library reads that table: the settings become flags (`--data.*`), the rewards become names for
`--reward`, and the rows are trained and evaluated on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    # Reward workers import this file: it must not load JAX, as tpu_rl.data does.
    from tpu_rl.data import Row, Rows

TaskReward = Callable[..., Sequence[float | None]]
"""fn(prompts, completions, **columns) -> one reward per completion; None does not score it."""


def no_slices(row: Row) -> tuple[str, ...]:
    """Return no slice, for tasks that have none."""
    del row
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
    rewards: Mapping[str, TaskReward]
    """Name -> reward function. Names must be unique among all tasks."""
    read_answers: Mapping[str, Callable[[str], Hashable | None]] = {}
    """Name of a reward -> what reads the final answer that it judges from a completion; None if the
    completion gives none. Majority votes need it."""
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
