"""Write train.jsonl and held_out.jsonl, whose prompts ask for three words in reverse order:

    python recipes/word_reversal/make_rows.py [--to DIR] [--letters]

The files share no word. They come with the repository; run this again after you change words.txt or
the prompt. With --letters the prompts ask for one word spelled backwards, which is much harder for
a model that reads tokens and not letters.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HELD_OUT_WORDS = 50
TRAIN_ROWS = 480
HELD_OUT_ROWS = 50
WORDS_PER_ROW = 3
WORDS_PROMPT = "Write these words in reverse order: {text}"
LETTERS_PROMPT = "Spell the word '{text}' backwards. Answer with the reversed word only."

Rows = list[dict[str, Any]]


def split_words() -> tuple[list[str], list[str]]:
    """Return the words for training and those that are held out, in an order that stays."""
    words = (HERE / "words.txt").read_text(encoding="utf-8").split()
    random.Random(0).shuffle(words)
    return words[HELD_OUT_WORDS:], words[:HELD_OUT_WORDS]


def row(prompt: str, text: str, answer: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": prompt.format(text=text)}], "answer": answer}


def word_rows() -> tuple[Rows, Rows]:
    """Return rows of three words, for training and held out."""
    rng = random.Random(1)
    parts = []
    for words, count in zip(split_words(), (TRAIN_ROWS, HELD_OUT_ROWS), strict=True):
        lists = [rng.sample(words, WORDS_PER_ROW) for _ in range(count)]
        parts.append([row(WORDS_PROMPT, " ".join(some), " ".join(some[::-1])) for some in lists])
    return parts[0], parts[1]


def letter_rows() -> tuple[Rows, Rows]:
    """Return rows of one word, for training and held out."""
    train, held_out = split_words()
    return (
        [row(LETTERS_PROMPT, word, word[::-1]) for word in train],
        [row(LETTERS_PROMPT, word, word[::-1]) for word in held_out],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=HERE, help="the directory to write")
    parser.add_argument("--letters", action="store_true", help="one word, spelled backwards")
    flags = parser.parse_args()
    flags.to.mkdir(parents=True, exist_ok=True)
    parts = letter_rows() if flags.letters else word_rows()
    for name, rows in zip(("train.jsonl", "held_out.jsonl"), parts, strict=True):
        text = "".join(json.dumps(values) + "\n" for values in rows)
        (flags.to / name).write_text(text, encoding="utf-8")
        print(f"{len(rows)} rows written to {flags.to / name}")


if __name__ == "__main__":
    main()
