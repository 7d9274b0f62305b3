"""Tasks of reasoning-gym, one turn each: `reasoning_gym:chain_sum`, or several with commas.

`reset` returns the question with the number `index` of the row (by default one that the seed
chooses), and `step` the score of the answer: what stands between <answer> and </answer>, or after
"Answer:", or all of the text. `environments.reasoning` makes rows. A question is a function of the
task, the number and the version of the package.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from tpu_rl.environments.contract import Factory
from tpu_rl.errors import InputError
from tpu_rl.tasks import adapters

CHUNK = 500
"""Questions of one data set object. Some make all of them at once, or allow only so many."""
EVALUATION_START = 2**30
"""Numbers of questions from here on are held out."""
REFUSED = {
    "composite": "it consists of other tasks",
    "game_of_life_halting": "its scorer gives 1.0 to any answer",
}
RAISING = ("boxnet", "game_of_life", "prime_factorization")
"""Tasks whose scorers raise for answers that they cannot read. Such answers are wrong."""


def factory(name: str) -> Factory | dict[str, Factory]:
    """Return the class of a task, or a dict of classes for names with commas between them.

    Raises:
        InputError: if there is no such task, or its scorer is known to be wrong.
        MachineError: if reasoning-gym is not installed.
    """
    names = [part.strip() for part in name.split(",")]
    known = adapters.require("reasoning_gym.factory", "reasoning-gym").DATASETS
    for task in names:
        if task in REFUSED or task not in known:
            raise InputError(
                f"reasoning_gym:{task} cannot be used",
                where="--environment",
                why=REFUSED.get(task, f"known are {', '.join(sorted(known))}"),
                fix="choose another task",
            )
    classes = {task: _class_of(task) for task in names}
    return classes[names[0]] if len(names) == 1 else classes


def _class_of(task: str) -> Factory:
    class Task:
        text_game = True

        def reset(self, seed: int, index: int | None = None, **row: Any) -> str:
            number = seed % EVALUATION_START if index is None else index
            self._dataset, self._entry = _question(task, number)
            return self._entry["question"]

        def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
            try:
                score = self._dataset.score_answer(answer_in(text), self._entry)
            except (ValueError, TypeError, KeyError):
                if task not in RAISING:
                    raise
                score = 0.0
            return "", float(score), True, {}

    # The name of a class is that of its reward in metrics.
    Task.__name__ = task
    return Task


def _question(task: str, number: int) -> tuple[Any, dict[str, Any]]:
    """Return the data set of a question, which scores it, and the question."""
    # Some tasks draw from the global random numbers.
    with adapters.PrivateRandom(number)():
        dataset = _dataset(task, number // CHUNK)
        return dataset, dataset[number % CHUNK]


@functools.lru_cache(maxsize=64)
def _dataset(task: str, chunk: int) -> Any:
    package = adapters.require("reasoning_gym", "reasoning-gym")
    # Question i of a data set is made from seed + i, so that no two numbers share a question.
    return package.create_dataset(task, seed=chunk * CHUNK, size=CHUNK)


def answer_in(text: str) -> str:
    """Return the answer that a text gives."""
    marked = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if marked:
        return marked[-1].strip()
    _, found, after = text.rpartition("Answer:")
    return after.strip() if found else text.strip()
