"""A built-in reward: one row of `tpu_rl.wings.VERIFIERS`, with all that the library knows of it.

To add a reward, write its function in a file of `tpu_rl.verifiers`, with its row in the file's
`VERIFIERS`, and name the file in `tpu_rl.wings`. `--reward`, the dry run, majority votes, scores
during sampling and docs/reference/rewards.md read the row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from tpu_rl import wings
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
    require_sandbox: Callable[[], None] | None = None
    """A reward that has it runs programs in the sandbox; with confine=False it runs them without,
    for --allow-unsandboxed-code. It raises MachineError where the kernel has no sandbox."""
    make: Callable[..., Reward] | None = None
    """Returns the reward with settings, as `NAME(KEY=VALUE, ...)` names them. The defaults of its
    parameters say of which kind each setting is; a function stands for the name of a reward."""
    required: tuple[str, ...] = ()
    """The settings that must be there."""

    @property
    def reads_reward(self) -> bool:
        """True if one of the settings is another reward."""
        made = inspect.signature(self.make).parameters.values() if self.make else ()
        return any(callable(parameter.default) for parameter in made if parameter.default)

    @property
    def needs_sandbox(self) -> bool:
        """True if the reward runs programs that a model wrote."""
        return self.require_sandbox is not None


def with_settings(make: Callable[..., Reward], *required: str) -> Verifier:
    """Make the row of a reward with settings, of which those named must be there."""
    return Verifier(make(), make=make, required=required)


def answer_readers(name: str | None) -> AnswerReaders:
    """Return the readers for majority votes on a reward; none if it is not built in."""
    row = None if name is None else wings.VERIFIERS.get(name)
    return AnswerReaders() if row is None else row.readers


def row_of(function: Reward) -> Verifier | None:
    """Find the row of a built-in reward by its function; None for any other function."""
    score = function.func if isinstance(function, functools.partial) else function
    return next((row for row in wings.VERIFIERS.loaded() if row.score == score), None)


def runs_during_sampling(function: Reward) -> bool:
    """Return True if the function can score some groups while others are decoded.

    Such a function runs in other processes and does not need the whole batch.
    """
    if isinstance(function, IsolatedReward):
        return not function.whole_batch
    row = row_of(function)
    return row is not None and row.in_workers
