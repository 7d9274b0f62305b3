"""The game of guess_the_number.py: textarena's GuessTheNumber, where only a right guess earns."""

from __future__ import annotations

from typing import Any

from tpu_rl.environments.adapters import textarena

GAME: Any = textarena.factory("GuessTheNumber-v0")


class OnlyWins(GAME):
    """The game, which ends with reward 0 at an invalid move, such as a second guess of a number.

    textarena pays for the second invalid move by how near the last guess was, up to 0.95.
    """

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Guess a number, in brackets."""
        observation, reward, done, info = super().step(text)
        is_invalid = "invalid move" in observation
        return observation, float(reward == 1.0 and not is_invalid), done or is_invalid, info
