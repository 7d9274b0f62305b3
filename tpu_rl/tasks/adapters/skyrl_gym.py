"""Environments of SkyRL-gym: `skyrl_gym:gsm8k`. The columns of the row are its `extras`."""

from __future__ import annotations

from typing import Any

from tpu_rl.environments.contract import Factory
from tpu_rl.tasks import adapters


def factory(name: str) -> Factory:
    """Return the class of an environment by its id."""

    class Game:
        text_game = True

        def __init__(self):
            self._package = adapters.require("skyrl_gym", "skyrl-gym")
            self._package.spec(name)  # An unknown name is refused at once.

        def reset(self, seed: int, prompt: Any = "", **row: Any) -> str | None:
            self._random = adapters.PrivateRandom(seed)
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            with self._random():
                extras = {"prompt": prompt, **row}
                self._game = self._package.make(name, env_config={}, extras=extras)
                shown, _ = self._game.init(messages)
            return "\n".join(message["content"] for message in shown[len(messages) :]) or None

        def step(self, text: str) -> Any:
            with self._random():
                return self._game.step(text)

    return Game
