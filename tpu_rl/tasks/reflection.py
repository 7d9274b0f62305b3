"""Another try after a reflection: `--environment reflection:NAME`, with the text game NAME.

    trial 1             turns of the game, until it ends
    "Reflect:"          if it was not won, the policy writes a turn about what went wrong
    trial 2             the same game again, below all of this

As in RetroAct (arXiv 2503.01490) one policy plans and reflects, and a reflection earns by how much
better the next trial is. The reward at the end of trial k is R_k - R_{k-1}, R being what the game
itself pays, with R_0 = 0. So the return of a reflection is R_{k+1} - R_k with two trials, which
`--algorithm.credit turn` compares with other reflections; the return of the episode is that of its
last trial.

Deviations: the paper learns off-policy from stored trials, with the likelihood of an expert's
trials in the loss; here every trial is the policy's own and new. Both roles share all weights.
"""

from __future__ import annotations

from typing import Any

from tpu_rl.environments import contract, named
from tpu_rl.environments.contract import Factory
from tpu_rl.errors import InputError

TRIALS = 2
WON = 1.0
"""A trial that pays so much needs no other."""
ASK = "Reflect: "


def factory(name: str) -> Factory:
    """Make the class that plays a game, reflects, and plays it again.

    Args:
        name: the name of the game.

    Raises:
        InputError: if it is not one text game.
    """
    game = named.load(name).get(None)
    where = f"reflection:{name}"
    if game is None or contract.describe(contract.make(game, where), where).form != "game":
        raise InputError(
            f"{name} is not one text game",
            where="--environment",
            why="after a reflection the game begins again, and tools have no end",
            fix="name an environment with `step`",
        )
    return lambda: Reflection(game())


class Reflection:
    """A game, a reflection and the same game again."""

    text_game = True

    def __init__(self, game: Any):
        self._game = game

    def reset(self, seed: int, prompt: Any = "", **row: Any) -> str | None:
        """Begin the first trial."""
        self._row = {"prompt": prompt, **row}
        self._seed = seed
        self._task = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        self._trial = 1
        self._before = 0.0
        """What the last trial paid."""
        self._is_playing = True
        return self._begin()

    def _begin(self) -> str | None:
        self._steps_paid = 0.0
        begin = contract.reset(self._game, self._row, self._seed)
        return None if begin is None else _text(begin)

    def _gain(self) -> float:
        """Return by how much the trial pays more than the last one, at its end."""
        paid = self._steps_paid + (contract.reward(self._game) or 0.0)
        gain = paid - self._before
        self._before = paid
        return gain

    def step(self, text: str) -> tuple[str, float | None, bool, dict[str, Any]]:
        """Make a move, or reflect."""
        if not self._is_playing:
            self._is_playing = True
            self._trial += 1
            return f"\n{self._task}{self._begin() or ''}", None, False, {}
        shown, reward, done = contract.step(self._game, text)
        observation = _text(shown)
        self._steps_paid += reward or 0.0
        if not done:
            return observation, None, False, {}
        gain = self._gain()
        self._is_playing = False
        is_over = self._before >= WON or self._trial == TRIALS
        return observation if is_over else f"{observation}{ASK}", gain, is_over, {}

    def get_reward(self) -> float:
        """Return the reward still to be paid for a trial that has not ended."""
        return self._gain() if self._is_playing else 0.0


def _text(observation: contract.Observation) -> str:
    """Return the text of an observation. Raises Fault if it has images."""
    if not isinstance(observation, str):
        raise contract.Fault("reflection repeats text games, and this one shows images")
    return observation
