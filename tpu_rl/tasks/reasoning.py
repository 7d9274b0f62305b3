"""Rows for tasks of reasoning-gym, which makes the questions (`adapters.reasoning_gym`).

A row has an instruction as its prompt, and says which task and which question follow it. Row i is a
question of task i modulo their number. Rewards are reported for each task.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal

from tpu_rl.environments.task import Task
from tpu_rl.errors import InputError
from tpu_rl.tasks.adapters.reasoning_gym import CHUNK, EVALUATION_START
from tpu_rl.tasks.made_rows import MadeRows

SHORT = (
    *("basic_arithmetic", "calendar_arithmetic", "chain_sum", "count_bits", "family_relationships"),
    *("gcd", "leg_counting", "letter_counting", "simple_geometry", "spell_backward"),
)
"""Ten tasks whose questions are short, and whose scorers accept what is right alone."""


@dataclass(frozen=True)
class ReasoningGymData:
    """Questions of tasks of reasoning-gym; training and evaluation never share one."""

    tasks: tuple[str, ...] = SHORT
    """Names of tasks. --environment reasoning_gym:NAME,NAME,... has the same."""
    questions: int = 2500
    """Questions of each task to train on. A worker keeps what makes 500 at once."""
    instruction: str = "Reply with the answer alone.\n"
    """The text before each question."""
    chat: bool = True
    """Whether a prompt is a message of the user, or a text to continue."""

    def __post_init__(self):
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise InputError(
                f"{', '.join(self.tasks) or 'no task'}: there must be tasks, none twice",
                where="--data.tasks",
            )
        if not 1 <= self.questions < EVALUATION_START // 2:
            raise InputError(f"{self.questions} questions are impossible", where="--data.questions")
        if not self.instruction:
            raise InputError("the instruction is empty", where="--data.instruction")


@dataclass(frozen=True)
class ReasoningGymSource(MadeRows):
    """`config.questions` rows of each task, with the columns `prompt`, `index` and `environment`.

    Another seed has other questions, but for rare coincidences.
    """

    config: ReasoningGymData = ReasoningGymData()
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    def __len__(self) -> int:
        return self.config.questions * len(self.config.tasks)

    def row(self, index: int) -> dict[str, Any]:
        number, task = divmod(index, len(self.config.tasks))
        if self.split == "eval":
            number += EVALUATION_START
        else:
            first = zlib.crc32(str(self.seed).encode()) % (EVALUATION_START // 2)
            number += first - first % CHUNK
        text = self.config.instruction
        return {
            "prompt": [{"role": "user", "content": text}] if self.config.chat else text,
            "index": number,
            "environment": self.config.tasks[task],
        }


def _demonstrations(data: ReasoningGymData, seed: int) -> ReasoningGymSource:
    raise InputError(
        "tasks of reasoning-gym have no solutions to imitate",
        where="--data",
        fix="choose an algorithm that samples, such as grpo",
    )


def _evaluation_rows(data: ReasoningGymData, count: int) -> ReasoningGymSource:
    if count > data.questions * len(data.tasks):
        raise InputError(
            f"there are {data.questions * len(data.tasks)} questions, not {count}",
            where="--evaluation.rows",
            fix="raise --data.questions",
        )
    return ReasoningGymSource(data, "eval")


TASK = Task(
    settings=ReasoningGymData,
    train_rows=lambda data, seed: ReasoningGymSource(data, "train", seed),
    demonstrations=_demonstrations,
    evaluation_rows=_evaluation_rows,
)
