"""Environments in the form of Tunix's BaseEnv: `Env = tunix.adapt(TheirEnv)` in a file of yours.

An instance is made for each episode, of the columns of the row: `TheirEnv.from_dict(row)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_rl.environments.contract import Factory


def adapt(environment: Any, show: str = "") -> Factory:
    """Return a class that plays a BaseEnv.

    Args:
        environment: the class.
        show: the key of the text in an observation that is a dict; by default its only key.
    """

    def shown(observation: Any) -> str:
        if not isinstance(observation, Mapping):
            return str(observation)
        key = show or next(iter(observation), "")
        if not show and len(observation) > 1:
            raise ValueError(f"an observation has the keys {list(observation)}: choose one, `show`")
        return str(observation.get(key, ""))

    class Game:
        text_game = True

        def reset(self, **row: Any) -> str:
            self._game = environment.from_dict(row)
            observation, _ = self._game.reset()
            return shown(observation)

        def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
            observation, reward, done, info = self._game.step(text)
            return shown(observation), reward, done, info

    return Game
