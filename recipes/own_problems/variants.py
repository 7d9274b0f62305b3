"""Rows for `recipes/own_problems.yaml`, and the verifier of the problems that its model writes:

    python recipes/own_problems/variants.py --to DIR

DIR then holds writer.jsonl, problems.jsonl and both with expressions of training alone. A prompt
that ends with "=#" asks for an easier variant of the expression before it: "3+8*2-4=#" may be
answered by "8*2=".
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

from tpu_rl.tasks import arithmetic
from tpu_rl.tasks.arithmetic import Arithmetic, ArithmeticSource

FIVE = Arithmetic(min_terms=5, max_terms=5, operators="+-*")
"""The expressions of the default run."""
WRITER = 2000
PROBLEMS = 500
ASK = "#"
"""What a prompt ends with that asks for a variant."""


def writer_rows() -> list[dict[str, Any]]:
    """Return demonstrations of writing: each problem with a part of it."""
    rng = random.Random(0)
    rows = []
    problems = ArithmeticSource(FIVE, "train", seed=1)
    for index in range(WRITER):
        problem = problems[index]
        prompts = [row["prompt"] for row in arithmetic.variants(problem)]
        of_training = [p for p in prompts if arithmetic.split_of(p[:-1]) == "train"]
        if of_training:
            rows.append({"prompt": problem["prompt"] + ASK, "completion": rng.choice(of_training)})
    return rows


def problem_rows() -> list[dict[str, Any]]:
    """Return other expressions of five terms."""
    problems = ArithmeticSource(FIVE, "train", seed=2)
    return [
        {name: problems[index][name] for name in ("prompt", "answer")} for index in range(PROBLEMS)
    ]


def answers(texts: list[str]) -> list[dict[str, str] | None]:
    """Return the answer of each text that is an expression of training, and None for others."""
    columns: list[dict[str, str] | None] = []
    for text in texts:
        expression = text.removesuffix("=")
        is_problem = re.fullmatch(r"[0-9]{1,2}([-+*][0-9]{1,2}){1,4}=", text) is not None
        if is_problem and arithmetic.split_of(expression) == "train":
            columns.append({"answer": str(arithmetic.evaluate(expression))})
        else:
            columns.append(None)
    return columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="the directory to write")
    directory = parser.parse_args().to
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in {"writer": writer_rows(), "problems": problem_rows()}.items():
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{len(rows)} rows written to {path}")


if __name__ == "__main__":
    main()
