"""Say how games of evaluations were played:

python recipes/guess_number/read_games.py runs/guess_number/evaluations/*.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

HEADER = "wins | guesses per won game | later guesses that agree with the hints | middles first"


def read_game(prompt: str, transcript: str) -> tuple[list[int | None], list[tuple[int, int]]]:
    """Return the guesses of a game, None where a turn is no number, and what was left before each.

    What is left follows from the guesses and from "Too low" and "Too high".
    """
    low, high = (int(number) for number in re.findall(r"from (\d+) to (\d+)", prompt)[0])
    guesses, ranges = [], []
    for turn in re.split(r"^assistant: ", transcript, flags=re.MULTILINE)[1:]:
        text, _, answer = turn.partition("\nuser: ")
        guess = int(text) if text.rstrip("\n").isdecimal() else None
        guesses.append(guess)
        ranges.append((low, high))
        if guess is not None and answer.startswith("Too low"):
            low = max(low, guess + 1)
        elif guess is not None and answer.startswith("Too high"):
            high = min(high, guess - 1)
    return guesses, ranges


def summary(lines: Iterable[str]) -> str:
    """Return the statistics of a file of `evaluations`, as a line of a table."""
    wins, lengths, agree, middles = [], [], [], []
    for line in lines:
        problem = json.loads(line)
        if "completions" not in problem:
            continue  # The first line says what was measured.
        for transcript, reward in zip(problem["completions"], problem["rewards"], strict=True):
            guesses, ranges = read_game(problem["prompt"], transcript)
            wins.append(reward)
            lengths += [len(guesses)] if reward else []
            fits = [
                guess is not None and low <= guess <= high
                for guess, (low, high) in zip(guesses, ranges, strict=True)
            ]
            agree += fits[1:]
            middles.append(guesses[0] == sum(ranges[0]) // 2)
    return " | ".join(
        f"{sum(values) / max(len(values), 1):.2f} of {len(values)}"
        for values in (wins, lengths, agree, middles)
    )


def main() -> None:
    print(f"file | {HEADER}")
    for name in sys.argv[1:]:
        print(f"{name} | {summary(Path(name).read_text(encoding='utf-8').splitlines())}")


if __name__ == "__main__":
    main()
