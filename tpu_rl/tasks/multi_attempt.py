"""Several attempts at one problem (multi-attempt reinforcement learning, arXiv 2503.04808).

After a wrong answer, or one that cannot be read, the model may try again while attempts are left.
The reward of the episode is

     1      if an attempt is right
    -0.5    if none is right, but one could be read
    -1      if none could be read

In training the number of attempts is 1 to 5, the same for the completions of one prompt. In
evaluations it is the number of turns, `--sampling.max-turns` or one of `--evaluation.turns`. No
episode has more attempts than turns.

Problems are rows with the columns `prompt` and `answer`. Words tell the model how many attempts it
has, and that one was wrong. The problems of the arithmetic task are told in their own characters:
the shipped model knows no others. After a wrong answer "#12" with two attempts left it reads "=2;".
The first attempt has no such notice, because that model solves no problem that does not come first
in its text. So there the number of attempts is known only once one was wrong.
"""

from __future__ import annotations

import random
from typing import Any

from tpu_rl.environments import answers
from tpu_rl.environments.contract import PlainState
from tpu_rl.tasks import arithmetic

MOST_ATTEMPTS = 5
"""The largest number of attempts in training."""


class MultiAttempt(PlainState):
    """A problem, and the attempts at it. A text game."""

    text_game = True

    def reset(
        self,
        prompt: Any,
        answer: str,
        seed: int = 0,
        max_turns: int = 1,
        is_evaluation: bool = False,
        **row: Any,
    ) -> str | None:
        """Begin a problem, and say how many attempts there are."""
        self._is_expression = isinstance(prompt, str) and set(prompt) <= set(arithmetic.ALPHABET)
        if is_evaluation:
            self._left = max_turns
        else:
            self._left = random.Random(seed).randint(1, min(MOST_ATTEMPTS, max_turns))
        self._answer = answer
        self._reward = -1.0
        return None if self._is_expression else f"\nYou have {_attempts(self._left)}."

    def step(self, text: str) -> tuple[str, None, bool, dict[str, Any]]:
        """Judge an attempt."""
        if self._is_expression:
            value, right = arithmetic.parse_answer(text), int(self._answer)
        else:
            value, right = answers.final_number(text), answers.read_number(self._answer)
        self._left -= 1
        is_right = value is not None and value == right
        if value is not None:
            self._reward = 1.0 if is_right else -0.5
        if is_right or not self._left:
            return "", None, True, {}
        if self._is_expression:
            return f"={self._left};", None, False, {}
        return f"Your answer is incorrect. You have {_attempts(self._left)} left.", None, False, {}

    def get_reward(self) -> float:
        """Return the reward of the episode."""
        return self._reward


def _attempts(number: int) -> str:
    return f"{number} attempt{'' if number == 1 else 's'}"


ENVIRONMENTS = {"multi_attempt": MultiAttempt}
