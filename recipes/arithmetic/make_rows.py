"""Write chats about sums or products of two-digit numbers, for training and held out:

    python recipes/arithmetic/make_rows.py --to DIR

DIR then holds sums_train.jsonl, sums_held_out.jsonl, products_train.jsonl and
products_held_out.jsonl. No unordered pair of numbers is in two files of a kind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRAIN = 800
HELD_OUT = 100
OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "sums": ("+", operator.add),
    "products": ("*", operator.mul),
}
"""Name of the files -> the sign in the question, and what computes the answer."""


def rows(operation: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training rows and the held-out rows, in an order that does not change."""
    sign, compute = OPERATIONS[operation]
    rng = random.Random(0)
    pairs = rng.sample(list(itertools.combinations(range(10, 100), 2)), TRAIN + HELD_OUT)
    all_rows = []
    for pair in pairs:
        left, right = rng.sample(pair, 2)
        question = f"What is {left} {sign} {right}? Answer with the number only."
        answer = str(compute(left, right))
        prompt = [{"role": "user", "content": question}]
        all_rows.append({"prompt": prompt, "completion": answer, "answer": answer})
    return all_rows[:TRAIN], all_rows[TRAIN:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="the directory to write")
    directory = parser.parse_args().to
    directory.mkdir(parents=True, exist_ok=True)
    for operation in OPERATIONS:
        for name, part in zip(("train", "held_out"), rows(operation), strict=True):
            path = directory / f"{operation}_{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
            print(f"{len(part)} rows written to {path}")


if __name__ == "__main__":
    main()
