"""Guess a number: the environment, and a script that writes its rows.

    python recipes/guess_number/game.py --to DIR

DIR then holds demonstrations.jsonl, train.jsonl and held_out.jsonl. A game has a range of 15
numbers, and four guesses are enough for a player who halves what is left. The held-out ranges begin
with other numbers than those of the other two files.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

SIZE = 7
GUESSES = 3
LOWS = range(1, 94)
"""The smallest numbers of ranges."""
HELD_OUT_LOWS = 14
DEMONSTRATIONS = 400

Row = dict[str, Any]


class Guess:
    """A game. The policy's turn is its guess, and each answer repeats what is left."""

    def question(self, low: int, high: int) -> str:
        """Return the prompt of a game."""
        return (
            f"I think of a number from {low} to {high}. You have {GUESSES} guesses. Say a number."
        )

    def reset(self, number: int, low: int, high: int, max_turns: int, **row: Any) -> None:
        """Begin a game, of which the prompt has told the range."""
        del row
        self.number = number
        self.low = low
        self.high = high
        self.guesses_left = max_turns

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Judge a guess. Only the right one earns 1."""
        self.guesses_left -= 1
        guess = int(text) if text.isdecimal() and len(text) < 4 else None
        if guess == self.number:
            return "right", 1.0, True, {}
        return self.hint(guess), 0.0, self.guesses_left == 0, {}

    def hint(self, guess: int | None) -> str:
        """Return the answer to a wrong guess; None is a turn that is no number."""
        if guess is None:
            return f"A number, please: {self.low} to {self.high}"
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return f"Too low: {self.low} to {self.high}"
        self.high = min(self.high, guess - 1)
        return f"Too high: {self.low} to {self.high}"


class ListedGuess(Guess):
    """The same game, whose prompt and answers list the numbers that are left."""

    def question(self, low: int, high: int) -> str:
        return f"I think of a number from {low} to {high}: {numbers(low, high)}. Say a number."

    def hint(self, guess: int | None) -> str:
        return f"{super().hint(guess).partition(':')[0]}: {numbers(self.low, self.high)}"


GAMES = {"ranges": Guess, "lists": ListedGuess}


def numbers(low: int, high: int) -> str:
    return " ".join(map(str, range(low, high + 1)))


def rows(low: int, game: Guess) -> list[Row]:
    """Return the games of a range, one for each number."""
    high = low + SIZE - 1
    prompt = [{"role": "user", "content": game.question(low, high)}]
    return [
        {"prompt": prompt, "number": number, "low": low, "high": high}
        for number in range(low, high + 1)
    ]


def split(game: Guess) -> tuple[list[Row], list[Row]]:
    """Return the rows for training and those of held-out ranges, in an order that stays."""
    lows = random.Random(0).sample(LOWS, len(LOWS))
    parts = (lows[HELD_OUT_LOWS:], lows[:HELD_OUT_LOWS])
    train, held_out = ([row for low in part for row in rows(low, game)] for part in parts)
    random.Random(1).shuffle(train)
    return train, held_out


def demonstration(row: Row, game: Guess, rng: random.Random) -> Row:
    """Return the messages of a player who guesses at random among the numbers that are left."""
    low, high = row["low"], row["high"]
    messages = list(row["prompt"])
    game.reset(**row, max_turns=GUESSES)
    done = False
    while not done:
        guess = rng.randint(low, high)
        answer, _, done, _ = game.step(str(guess))
        low, high = game.low, game.high
        messages.append({"role": "assistant", "content": str(guess)})
        if not done:
            messages.append({"role": "user", "content": answer})
    return {"messages": messages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="the directory to write")
    parser.add_argument("--game", choices=GAMES, default="ranges", help="what answers tell")
    flags = parser.parse_args()
    flags.to.mkdir(parents=True, exist_ok=True)
    game = GAMES[flags.game]()
    train, held_out = split(game)
    rng = random.Random(2)
    demonstrations = [demonstration(row, game, rng) for row in rng.sample(train, DEMONSTRATIONS)]
    files = {"demonstrations": demonstrations, "train": train, "held_out": held_out}
    for name, part in files.items():
        path = flags.to / f"games_{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{len(part)} rows written to {path}")


if __name__ == "__main__":
    main()
