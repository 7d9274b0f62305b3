"""The built-in rewards: one row of `BUILTIN` for each, with all that the library knows of it.

To add a reward, write its function in a file of this folder and add its row here. `--reward`, the
dry run, majority votes, scores during sampling and docs/reference/rewards.md read the row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from tpu_rl.environments import TASKS, calculator, search
from tpu_rl.environments.answers import final_number
from tpu_rl.rewards import (
    actions,
    choice,
    confidence,
    gsm8k_answers,
    length,
    math_verify_pool,
    others,
    programs,
    recall,
    sets,
    similarity,
    sql_pool,
    text_form,
    tool_matching,
    unit_test_quality,
)
from tpu_rl.rewards.scoring import Reward
from tpu_rl.rewards.worker_pool import IsolatedReward

ReadAnswer = Callable[[str], Hashable | None]
"""Returns a completion's final answer, or None if it gives none."""

ReadGroups = Callable[[Sequence[Sequence[str]]], Sequence[Sequence[Hashable | None] | Exception]]
"""Returns, for each problem, values that are equal where the answers of its completions are; None
for a completion without an answer. An exception stands for a problem whose answers could not be
compared."""


class AnswerReaders(NamedTuple):
    """The functions that majority votes read final answers with. Without any, nothing votes."""

    read_answer: ReadAnswer | None = None
    """Reads the answer of one completion."""
    read_groups: ReadGroups | None = None
    """Compares the completions of each problem, where one answer has many forms."""


class Verifier(NamedTuple):
    """A built-in reward. The documentation shows the first paragraph of its function."""

    score: Reward
    """With a `make`: its reward with default settings."""
    readers: AnswerReaders = AnswerReaders()
    """Majority votes need one of them."""
    in_workers: bool = False
    """True if the function computes in other processes and needs no whole batch. It then scores
    complete groups while others are decoded."""
    score_unsandboxed: Reward | None = None
    """A reward that has it runs programs in the sandbox. This one runs them without, for
    --allow-unsandboxed-code where the kernel has no sandbox."""
    make: Callable[..., Reward] | None = None
    """Returns the reward with settings, as `NAME(KEY=VALUE, ...)` names them. The defaults of its
    parameters say of which kind each setting is; a function stands for the name of a reward."""
    required: tuple[str, ...] = ()
    """The settings that must be there."""

    @property
    def needs_sandbox(self) -> bool:
        """True if the reward runs programs that a model wrote."""
        return self.score_unsandboxed is not None


def _made(make: Callable[..., Reward]) -> Verifier:
    return Verifier(make(), make=make)


def _rows_of_tasks() -> Mapping[str, Verifier]:
    """Return the rewards of all tasks by name."""
    return {
        name: Verifier(score, AnswerReaders(task.read_answers.get(name)))
        for task in TASKS.values()
        for name, score in task.rewards.items()
    }


BUILTIN: dict[str, Verifier] = {
    **{
        make.__name__: _made(make)
        for make in (
            length.cosine_length,
            length.easy_length,
            length.effort,
            text_form.phrases,
            text_form.repetition,
            text_form.think_format,
            sets.f_beta,
            sets.hit_score,
            sets.listed_items,
            tool_matching.tool_calls,
            actions.action,
            actions.box_iou,
            actions.point_in_box,
            similarity.ordered_keys,
            similarity.patch_ratio,
            similarity.rubric,
            confidence.brier,
            confidence.doubt,
            others.after,
            others.coin,
            others.majority,
            sql_pool.sql,
            sql_pool.sql_match,
        )
    },
    "dense": _made(others.dense)._replace(required=("of",)),
    "for_rows": _made(others.for_rows)._replace(required=("of", "column", "values")),
    "consistent": _made(others.consistent)._replace(required=("of",)),
    "implicit": _made(others.implicit)._replace(required=("model", "reference")),
    "similarity": _made(others.similarity)._replace(required=("model",)),
    "pattern": _made(text_form.pattern)._replace(required=("regex",)),
    "recall": _made(recall.recall)._replace(required=("documents",)),
    "choice": Verifier(choice.right_letter, AnswerReaders(choice.read_letter)),
    "environment": Verifier(others.environment),
    "gsm8k": Verifier(gsm8k_answers.gsm8k, AnswerReaders(final_number)),
    "gsm8k_marks": Verifier(calculator.right_marks),
    "math": Verifier(
        math_verify_pool.math_equivalent,
        AnswerReaders(read_groups=math_verify_pool.math_answers),
        in_workers=True,
    ),
    "python_tests": Verifier(
        programs.python_tests,
        in_workers=True,
        score_unsandboxed=programs.python_tests_unsandboxed,
    ),
    "python_checks": Verifier(
        programs.python_checks,
        in_workers=True,
        score_unsandboxed=programs.python_checks_unsandboxed,
    ),
    # Not during sampling, which would disturb its clock.
    "python_speed": Verifier(
        programs.python_speed, score_unsandboxed=programs.python_speed_unsandboxed
    ),
    "unit_test_quality": Verifier(unit_test_quality.unit_test_quality),
    **{name: Verifier(score) for name, score in search.REWARDS.items()},
    **_rows_of_tasks(),
}
"""Rewards by the names that presets and `--reward` use."""

for _row in BUILTIN.values():
    if _row.readers != AnswerReaders():
        _row.score.__dict__["answer_readers"] = _row.readers  # `majority(of=)` asks for them.


def answer_readers(name: str | None) -> AnswerReaders:
    """Return the readers for majority votes on a reward; none if it is not built in."""
    return BUILTIN[name].readers if name in BUILTIN else AnswerReaders()


def runs_during_sampling(function: Reward) -> bool:
    """Return True if the function can score some groups while others are decoded.

    Such a function runs in other processes and does not need the whole batch.
    """
    if isinstance(function, IsolatedReward):
        return not function.whole_batch
    return any(
        row.in_workers and function in (row.score, row.score_unsandboxed)
        for row in BUILTIN.values()
    )
