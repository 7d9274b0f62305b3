"""Write train.jsonl and held_out.jsonl, whose prompts ask for facts of a sentence as JSON:

    python recipes/json_keys/make_rows.py [--to DIR]

pairs.jsonl has the prompts of train.jsonl with two answers each: the chosen one is JSON alone, and
the rejected one has the same facts in a Markdown block.

train.jsonl and held_out.jsonl share no name. The files come with the repository; run this again
after you change it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRAIN_ROWS = 320
HELD_OUT_ROWS = 50
NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack"),
    *("Kate", "Leo", "Maria", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor"),
    *("Wendy", "Adam", "Bella", "Carl", "Diana", "Eric", "Fiona", "George", "Helen", "Ivan"),
    *("Julia", "Kevin", "Laura", "Mark", "Nina", "Oscar", "Petra", "Robert", "Sara", "Thomas"),
)
HELD_OUT_NAMES = 8
CITIES = (
    *("Rome", "Paris", "Berlin", "Madrid", "London", "Oslo", "Vienna", "Athens", "Lisbon"),
    *("Dublin", "Prague", "Warsaw", "Tokyo", "Cairo", "Lima", "Boston", "Chicago", "Denver"),
)
JOBS = ("baker", "nurse", "teacher", "driver", "farmer", "painter", "lawyer", "pilot", "writer")
SENTENCES = (
    "{name} is {age} years old, lives in {city} and works as a {job}.",
    "At the age of {age}, {name} is a {job} in {city}.",
    "{name}, a {job} from {city}, is {age}.",
)
PROMPT = "{sentence} Write this as JSON with the keys name, age, city and job."


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows for training and those that are held out, in an order that stays."""
    rng = random.Random(0)
    names = rng.sample(NAMES, len(NAMES))
    train, held_out = names[HELD_OUT_NAMES:], names[:HELD_OUT_NAMES]
    return (
        [row(rng, train) for _ in range(TRAIN_ROWS)],
        [row(rng, held_out) for _ in range(HELD_OUT_ROWS)],
    )


def row(rng: random.Random, names: Sequence[str]) -> dict[str, Any]:
    facts = {
        "name": rng.choice(names),
        "age": rng.randrange(18, 80),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
    }
    sentence = rng.choice(SENTENCES).format(**facts)
    prompt = [{"role": "user", "content": PROMPT.format(sentence=sentence)}]
    return {"prompt": prompt, "answer": json.dumps(facts)}


def pair(values: dict[str, Any]) -> dict[str, Any]:
    """Return the pair of a row: the facts as JSON alone, and in a Markdown block."""
    pretty = json.dumps(json.loads(values["answer"]), indent=2)
    return {
        "prompt": values["prompt"],
        "chosen": values["answer"],
        "rejected": f"```json\n{pretty}\n```",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=HERE, help="the directory to write")
    directory = parser.parse_args().to
    directory.mkdir(parents=True, exist_ok=True)
    train, held_out = rows()
    files = {"train": train, "held_out": held_out, "pairs": [pair(values) for values in train]}
    for name, part in files.items():
        path = directory / f"{name}.jsonl"
        text = "".join(json.dumps(values) + "\n" for values in part)
        path.write_text(text, encoding="utf-8")
        print(f"{len(part)} rows written to {path}")


if __name__ == "__main__":
    main()
