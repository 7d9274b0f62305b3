"""Write chats about sums or products of two-digit numbers, for training and held out:

    python recipes/arithmetic/make_rows.py --to DIR

DIR then holds KIND_train.jsonl and KIND_held_out.jsonl of sums, products and worked_sums, whose
completions have the steps. No unordered pair of numbers is in two files of a kind, and worked_sums
has the pairs of sums.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TRAIN = 800
HELD_OUT = 100


class Kind(NamedTuple):
    """What the rows of a kind ask, and the answer."""

    question: str
    compute: Callable[[int, int], int]
    completion: Callable[[int, int], str]


def worked_sum(left: int, right: int) -> str:
    """Return the sums of the ones and of the tens, the sum of both, and the result alone."""
    ones = left % 10 + right % 10
    tens = left // 10 * 10 + right // 10 * 10
    return "\n".join(
        [
            f"{left % 10} + {right % 10} = {ones}",
            f"{left // 10 * 10} + {right // 10 * 10} = {tens}",
            f"{tens} + {ones} = {left + right}",
            str(left + right),
        ]
    )


KINDS = {
    "sums": Kind(
        "What is {} + {}? Answer with the number only.", operator.add, lambda a, b: str(a + b)
    ),
    "products": Kind(
        "What is {} * {}? Answer with the number only.", operator.mul, lambda a, b: str(a * b)
    ),
    "worked_sums": Kind("What is {} + {}? Work in steps.", operator.add, worked_sum),
}


def rows(kind: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training rows and the held-out rows, in an order that does not change."""
    question, compute, completion = KINDS[kind]
    rng = random.Random(0)
    pairs = rng.sample(list(itertools.combinations(range(10, 100), 2)), TRAIN + HELD_OUT)
    all_rows = []
    for pair in pairs:
        left, right = rng.sample(pair, 2)
        row = {"prompt": [{"role": "user", "content": question.format(left, right)}]}
        row |= {"completion": completion(left, right), "answer": str(compute(left, right))}
        all_rows.append(row)
    return all_rows[:TRAIN], all_rows[TRAIN:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="the directory to write")
    directory = parser.parse_args().to
    directory.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        for name, part in zip(("train", "held_out"), rows(kind), strict=True):
            path = directory / f"{kind}_{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
            print(f"{len(part)} rows written to {path}")


if __name__ == "__main__":
    main()
