"""Environments of gymnasium with numbered or written actions: `gymnasium:FrozenLake-v1`.

The model's text is the action, or its last integer is. An observation is shown as Python writes it.
"""

from __future__ import annotations

import re
from typing import Any

from tpu_rl.environments.contract import Factory
from tpu_rl.tasks import adapters


def factory(name: str) -> Factory:
    """Return the class of an environment by its id."""

    class Game:
        text_game = True

        def __init__(self):
            gymnasium = adapters.require("gymnasium")
            self._game = gymnasium.make(name)
            space = self._game.action_space
            if not isinstance(space, (gymnasium.spaces.Discrete, gymnasium.spaces.Text)):
                raise ValueError(f"its actions are {space}: they must be Discrete or Text")
            self._is_numbered = isinstance(space, gymnasium.spaces.Discrete)

        def reset(self, seed: int, **row: Any) -> str:
            observation, _ = self._game.reset(seed=seed)
            return str(observation)

        def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
            action: Any = text
            if self._is_numbered:
                numbers = re.findall(r"-?[0-9]{1,9}", text)
                action = int(numbers[-1]) if numbers else None
            if action is None or not self._game.action_space.contains(action):
                return f"the action must be one of {self._game.action_space}", 0.0, False, {}
            observation, reward, terminated, truncated, info = self._game.step(action)
            return str(observation), float(reward), terminated or truncated, info

    return Game
