"""Environments of GEM (gem-llm): `gem:game:GuessTheNumber-v0-easy`."""

from __future__ import annotations

from typing import Any

from tpu_rl.environments.contract import Factory
from tpu_rl.tasks import adapters


def factory(name: str) -> Factory:
    """Return the class of an environment by its id."""

    class Game:
        text_game = True

        def __init__(self):
            gem = adapters.require("gem", "gem-llm")
            adapters.require("gem.envs", "gem-llm")  # It registers the names.
            self._game = gem.make(name)

        def reset(self, seed: int, **row: Any) -> str:
            self._random = adapters.PrivateRandom(seed)
            with self._random():
                observation, _ = self._game.reset(seed=seed)
            return observation

        def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            with self._random():
                return self._game.step(text)

    return Game
