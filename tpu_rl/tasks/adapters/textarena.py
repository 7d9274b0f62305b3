"""Games of textarena for one player: `textarena:GuessTheNumber-v0`.

The model reads what is new since its last move, without its own words. The reward comes at the end.
"""

from __future__ import annotations

from typing import Any

from tpu_rl.environments.contract import Factory
from tpu_rl.tasks import adapters


def factory(name: str) -> Factory:
    """Return the class of a game by its id."""

    class Game:
        text_game = True

        def __init__(self):
            self._package = adapters.require("textarena")
            self._game = self._package.make(name)
            self._inner = self._game
            # Wrappers of observations show the whole history at each turn.
            while isinstance(self._inner, self._package.Wrapper):
                self._inner = self._inner.env
            self.reset(seed=0)  # A game for several players is refused at once.

        def reset(self, seed: int, **row: Any) -> str:
            self._random = adapters.PrivateRandom(seed)
            with self._random():
                self._game.reset(num_players=1, seed=seed)
                return self._news()

        def step(self, text: str) -> tuple[str, float | None, bool, dict[str, Any]]:
            with self._random():
                done, info = self._game.step(action=text)
                observation = self._news()
                rewards = self._game.close()[0] if done else None
            return observation, float((rewards or {}).get(0, 0.0)), bool(done), info

        def _news(self) -> str:
            _, messages = self._inner.get_observation()
            echo = self._package.ObservationType.PLAYER_ACTION
            # Some games mix up the order of sender, text and kind.
            texts = [
                part
                for message in messages
                if echo not in message
                for part in message
                if isinstance(part, str)
            ]
            return "\n".join(texts)

    return Game
