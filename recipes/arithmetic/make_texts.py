"""Write texts that a base model continues with a sum or a difference:

    python recipes/arithmetic/make_texts.py --to DIR

A text has worked examples in lines of their own, and a last line that ends with "=". DIR then holds
sums_train.jsonl, sums_held_out.jsonl and differences_held_out.jsonl. A difference is a sum turned
around: of 7 + 9 = 16 it asks 16 - 9. The pairs of numbers of training, of the held-out rows and of
the worked examples are three different sets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

HELD_OUT = 100
EXAMPLE_SHARE = 0.1
HELD_OUT_SHARE = 0.3
"""Of the pairs of numbers. The rest is for training."""

Pair = tuple[int, int]


def rows(largest: int, worked: int) -> dict[str, list[dict[str, str]]]:
    """Return name of the file -> rows, in an order that does not change.

    Args:
        largest: the largest number of a sum; the smallest is 1.
        worked: the number of worked examples in a text.
    """
    rng = random.Random(0)
    pairs = list(itertools.combinations_with_replacement(range(1, largest + 1), 2))
    rng.shuffle(pairs)
    num_examples = round(EXAMPLE_SHARE * len(pairs))
    num_held_out = round(HELD_OUT_SHARE * len(pairs))
    examples = pairs[:num_examples]
    held_out = both_orders(pairs[num_examples : num_examples + num_held_out], rng)
    train = both_orders(pairs[num_examples + num_held_out :], rng)
    return {
        "sums_train": [row("+", pair, rng.sample(examples, worked)) for pair in train],
        "sums_held_out": [
            row("+", pair, rng.sample(examples, worked)) for pair in held_out[:HELD_OUT]
        ],
        "differences_held_out": [
            row("-", pair, rng.sample(examples, worked)) for pair in held_out[:HELD_OUT]
        ],
    }


def both_orders(pairs: list[Pair], rng: random.Random) -> list[Pair]:
    """Return each pair as it is and turned around, if that is another one, shuffled."""
    ordered = [order for pair in pairs for order in {pair, pair[::-1]}]
    ordered.sort()
    rng.shuffle(ordered)
    return ordered


def row(sign: str, pair: Pair, examples: list[Pair]) -> dict[str, str]:
    """Return a row of `data.path`: a prompt that is a text, and its answer."""
    lines = [" ".join(question(sign, *example)) for example in examples]
    last, answer = question(sign, *pair)
    return {"prompt": "\n".join([*lines, last]), "answer": answer}


def question(sign: str, left: int, right: int) -> tuple[str, str]:
    """Return a question and its answer, such as ("7 + 9 =", "16") or ("16 - 9 =", "7")."""
    if sign == "+":
        return f"{left} + {right} =", str(left + right)
    return f"{left + right} - {right} =", str(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="the directory to write")
    parser.add_argument("--largest", type=int, default=20, help="the largest number of a sum")
    parser.add_argument("--worked", type=int, default=2, help="worked examples in a text")
    flags = parser.parse_args()
    flags.to.mkdir(parents=True, exist_ok=True)
    for name, part in rows(flags.largest, flags.worked).items():
        path = flags.to / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{len(part)} rows written to {path}")


if __name__ == "__main__":
    main()
