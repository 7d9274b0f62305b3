"""Steps of solutions with labels, right or wrong, for process reward models.

The data bring labeled steps, or the reference completes arithmetic prompts and the task itself
labels the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpu_rl import data
from tpu_rl.data import Row
from tpu_rl.environments import TASKS, task_of
from tpu_rl.errors import InputError
from tpu_rl.experience.config import DataConfig, FileData
from tpu_rl.experience.source import Source, StepExperience, from_scored, offline
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.scoring import Scored, require_single_rows
from tpu_rl.types import QExamples, TrainState

ToExamples = Callable[[list[Row]], QExamples]
"""Rows of labeled steps -> token ids, with a label at the end of each step."""

LabelCompletion = Callable[[str, str], list[tuple[str, bool]]]
"""(prompt, completion) -> its steps, each with True if it is right; see `Task.label_steps`."""


def given_step_source(stream: data.RowStream, to_examples: ToExamples) -> Source:
    """Return the source of the stream's own labeled steps."""

    def draw(step: int, state: TrainState) -> StepExperience:
        del step, state
        return offline(to_examples(next(stream)[1]))

    return Source(draw, stream.get_state, stream.set_state)


def sampled_step_source(
    engine: Engine,
    stream: data.RowStream,
    label_completion: LabelCompletion,
    to_examples: ToExamples,
) -> Source:
    """Return the source of the steps of sampled completions, labeled by their task."""

    def draw(step: int, state: TrainState) -> StepExperience:
        rows = next(stream)[1]
        request = RolloutRequest(rows, step, policy_step=int(state.step))
        scored = engine.roll_out(state.params, request)
        return from_scored(scored, step, to_examples(label_steps(scored, rows, label_completion)))

    return Source(draw, stream.get_state, stream.set_state)


def require_steps(data_config: DataConfig, sampled_by: str | None) -> None:
    """Check that something labels steps.

    Args:
        data_config: a task's settings, or files.
        sampled_by: the role that writes the steps; None if the data bring them.

    Raises:
        InputError: if neither the data nor their task say which steps are right.
    """
    if sampled_by is None:
        is_labeled = isinstance(data_config, FileData) and data_config.format == "plain"
    else:
        task = task_of(data_config)
        is_labeled = task is not None and task.label_steps is not None
    if not is_labeled:
        labeling = ", ".join(name for name, task in TASKS.items() if task.label_steps is not None)
        raise InputError(
            "nothing says which steps are right",
            where="--algorithm.steps",
            why="a file has columns prompt, completions (the steps) and labels; "
            f"of tasks only {labeling} knows them",
            fix="give such a --data.path with --algorithm.steps given, "
            "or arithmetic with --algorithm.steps reference",
        )


def label_steps(
    scored: Scored, rows: Sequence[Row], label_completion: LabelCompletion
) -> list[Row]:
    """Return the completions of a task's prompts as rows of labeled steps.

    A completion without text is left out.
    """
    require_single_rows(scored)
    group_size = len(scored.completions) // len(rows)
    labeled = []
    for index, completion in enumerate(scored.completions):
        problem = index // group_size
        prompt = rows[problem]["prompt"]
        steps = label_completion(prompt, completion)
        if steps:
            labeled.append(
                {
                    "prompt": prompt,
                    "completions": tuple(text for text, _ in steps),
                    "labels": tuple(label for _, label in steps),
                    "ended": not bool(scored.rollout.truncated[index]),
                    "problem": problem,
                }
            )
    return labeled
