"""Rows for the recipes of this folder:

    python recipes/chains/make_rows.py --to runs/chain_rows

Problems are arithmetic expressions with `prompt`, `answer`, `solution` and `completion` (both the
worked solution), so that SFT and RL read the same file, and with `concept`: "sums" without products
and "products" with one at least. Only held_out_products.jsonl has expressions of the evaluation
split.

    mixed.jsonl             2 to 5 terms
    half_a, half_b.jsonl    mixed.jsonl, split at random
    sums, products.jsonl    five terms of one concept
    held_out_products.jsonl the same of the evaluation split
    bare.jsonl              five terms with the bare result as the completion
    worked.jsonl            the same expressions, solved in steps
    texts.jsonl             other solved expressions with products, as plain texts
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal

from tpu_rl.tasks.arithmetic import Arithmetic, ArithmeticSource

ROWS = 1600
FILES = (
    *("mixed", "half_a", "half_b", "sums", "products", "held_out_products", "worked", "bare"),
    "texts",
)
FIVE = Arithmetic(min_terms=5, max_terms=5, operators="+-*")


def problems(
    config: Arithmetic, seed: int, rows: int = ROWS, split: Literal["train", "eval"] = "train"
) -> list[dict[str, Any]]:
    """Return different problems of a split with their solutions."""
    source = ArithmeticSource(config, split, seed)
    found: dict[str, dict[str, Any]] = {}
    index = 0
    while len(found) < rows:
        row = source[index]
        concept = "products" if "*" in row["prompt"] else "sums"
        found[row["prompt"]] = {**row, "completion": row["solution"], "concept": concept}
        index += 1
    return list(found.values())


def files() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file, by its name."""
    mixed = problems(Arithmetic(min_terms=2, max_terms=5, operators="+-*"), seed=20)
    sums = problems(Arithmetic(min_terms=5, max_terms=5, operators="+-"), seed=21)
    products, held_out = (
        [row for row in problems(FIVE, 22, 2 * ROWS, split) if row["concept"] == "products"]
        for split in ("train", "eval")
    )
    worked = problems(FIVE, seed=23)
    bare = [row | {"completion": f"#{row['answer']}"} for row in worked]
    # Rows are drawn one after the other, so that every second one is a random half.
    halves = (mixed[::2], mixed[1::2])
    texts = [{"text": row["prompt"] + row["solution"]} for row in products[ROWS:]]
    parts = (mixed, *halves, sums, products[:ROWS], held_out[:500], worked, bare, texts)
    return dict(zip(FILES, parts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="folder for the rows")
    folder = parser.parse_args().to
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
