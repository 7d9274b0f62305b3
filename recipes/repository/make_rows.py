"""Write small repositories with a fault each, demonstrations, and a small model without weights.

    python recipes/repository/make_rows.py --to DIR

A repository has two files with two functions each, and one function returns what another one
should. Its tests call all of them; the hidden tests have other numbers. DIR then holds
demonstrations.jsonl, train.jsonl and held_out.jsonl, whose prompts are in no other file, and
model/ with the configuration and the tokenizer of a Llama of 0.3 million weights.

The demonstrations are of a careless colleague: often no test is run, any function is edited, and
the new expression is a wrong one. About three of ten repair the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FUNCTIONS = {
    "add": ("a, b", "a + b"),
    "subtract": ("a, b", "a - b"),
    "multiply": ("a, b", "a * b"),
    "remainder": ("a, b", "a % b"),
    "larger": ("a, b", "max(a, b)"),
    "smaller": ("a, b", "min(a, b)"),
    "double": ("a", "a * 2"),
    "square": ("a", "a * a"),
    "half": ("a", "a // 2"),
    "following": ("a", "a + 1"),
    "previous": ("a", "a - 1"),
    "opposite": ("a", "-a"),
}
"""Name -> its parameters, and the expression that it returns."""
FILES = ("core", "sums", "tools", "units")
COMMANDS = ("repair", "test", "read", "edit", "done", "ls", "ok", "return", "def")
OTHERS = (
    "all",
    "tests",
    "pass",
    "no",
    "such",
    "file",
    "line",
    "bad",
    "command",
    "py",
    "max",
    "min",
)
MARKS = ("\n", *" $():,=+-*/%.!<>_", " " * 5, *"0123456789", "a", "b")
TOKENS = "[a-z]+| +|[^a-z ]"
HELD_OUT_SHARE = 8
"""One repository in so many is held out."""
TESTS_RUN, RIGHT = 0.3, 0.6
"""Demonstrations: how often tests are run before an edit, and the new expression is right."""


def value(name: str, expression: str, numbers: tuple[int, int]) -> int:
    """Return what a function with an expression returns."""
    parameters = FUNCTIONS[name][0].split(", ")
    known = dict(zip(parameters, numbers, strict=False))
    return eval(expression, {"max": max, "min": min}, known)


def call(name: str, numbers: tuple[int, int]) -> str:
    """Return the assert of a call that is right."""
    arguments = ", ".join(map(str, numbers[: len(FUNCTIONS[name][0].split(", "))]))
    return f"assert {name}({arguments}) == {value(name, FUNCTIONS[name][1], numbers)}"


def text_of(expressions: Mapping[str, str]) -> str:
    """Return a file of functions."""
    return "".join(
        f"def {name}({FUNCTIONS[name][0]}):\n    return {expression}\n"
        for name, expression in expressions.items()
    )


def repository(rng: random.Random) -> Row:
    """Return a repository with a fault, and the plan of its demonstration."""
    names = rng.sample(sorted(FUNCTIONS), 4)
    files: dict[str, list[str]] = dict(
        zip(rng.sample(FILES, 2), (names[:2], names[2:]), strict=True)
    )
    broken = rng.choice(names)
    numbers = {name: (rng.randint(5, 9), rng.randint(2, 4)) for name in names}
    wrong = [
        other
        for parameters, other in FUNCTIONS.values()
        if parameters == FUNCTIONS[broken][0]
        and value(broken, other, numbers[broken])
        != value(broken, FUNCTIONS[broken][1], numbers[broken])
    ]
    expressions = {name: FUNCTIONS[name][1] for name in names} | {broken: rng.choice(wrong)}
    hidden = [call(name, pair) for name in names for pair in ((7, 3), (4, 9), (6, 6))]
    listed = ", ".join(" ".join((file, *files[file])) for file in files)
    row: Row = {
        "prompt": f"repair {listed}\n$ ",
        "files": {
            f"{file}.py": text_of({name: expressions[name] for name in inside})
            for file, inside in files.items()
        },
        "tests": [call(name, numbers[name]) for name in names],
        "hidden_tests": hidden,
    }
    return row | {"completion": demonstration(row, files, broken, rng)}


def demonstration(row: Row, files: Mapping[str, list[str]], broken: str, rng: random.Random) -> str:
    """Return what the careless colleague types, and what is printed."""
    transcript = ""
    target = rng.choice([name for names in files.values() for name in names])
    if rng.random() < TESTS_RUN:
        target = broken
        failing = next(test for test in row["tests"] if f" {broken}(" in test)
        transcript += f"test\n{failing.removeprefix('assert ')}\n$ "
    for file in rng.sample(sorted(files), 2):
        lines = row["files"][f"{file}.py"].splitlines()
        listed = "\n".join(f"{number} {line}" for number, line in enumerate(lines, 1))
        transcript += f"read {file}\n{listed}\n$ "
        if target in files[file]:
            break
    parameters, expression = FUNCTIONS[target]
    if rng.random() > RIGHT:
        expression = rng.choice(
            [other for names, other in FUNCTIONS.values() if names == parameters]
        )
    line = 2 * files[file].index(target) + 2
    return f"{transcript}edit {file} {line} return {expression}\nok\n$ done\n"


def is_held_out(row: Row) -> bool:
    """Return True for repositories that are not for training."""
    return hashlib.sha256(row["prompt"].encode()).digest()[0] % HELD_OUT_SHARE == 0


def rows(counts: Mapping[str, int], seed: int = 0) -> dict[str, list[Row]]:
    """Return so many rows for each file. Only demonstrations have a completion."""
    rng = random.Random(seed)
    parts: dict[str, list[Row]] = {name: [] for name in counts}
    while any(len(parts[name]) < counts[name] for name in counts):
        row = repository(rng)
        name = "held_out"
        if not is_held_out(row):
            is_full = len(parts["train"]) == counts["train"]
            name = "demonstrations" if is_full else "train"
        if len(parts[name]) < counts[name]:
            if name != "demonstrations":
                del row["completion"]
            parts[name].append(row)
    return parts


def write_model(folder: Path) -> None:
    """Write the configuration and the tokenizer of a small Llama."""
    specials = ("<pad>", "<bos>", "<eos>", "<unk>")
    words = (*FUNCTIONS, *FILES, *COMMANDS, *OTHERS)
    vocabulary = list(dict.fromkeys((*specials, *MARKS, *words)))
    assert all(re.fullmatch(TOKENS, token) for token in vocabulary[len(specials) :])
    added = [
        {
            **{"id": index, "content": token, "special": True, "single_word": False},
            **{"lstrip": False, "rstrip": False, "normalized": False},
        }
        for index, token in enumerate(specials)
    ]
    tokenizer = {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": added},
        **{"normalizer": None, "post_processor": None, "decoder": {"type": "Fuse"}},
        "pre_tokenizer": {
            **{"type": "Split", "pattern": {"Regex": TOKENS}},
            **{"behavior": "Removed", "invert": True},
        },
        "model": {
            **{"type": "WordLevel", "unk_token": "<unk>"},
            "vocab": {token: index for index, token in enumerate(vocabulary)},
        },
    }
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        **{"vocab_size": len(vocabulary), "hidden_size": 96, "intermediate_size": 256},
        **{"num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3},
        **{"head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
        **{"max_position_embeddings": 512, "attention_bias": False, "mlp_bias": False},
        **{"tie_word_embeddings": True, "torch_dtype": "float32"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": names | kind,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="the directory to write")
    folder = parser.parse_args().to
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"demonstrations": 20_000, "train": 2_000, "held_out": 200}
    for name, part in rows(counts).items():
        lines = "".join(f"{json.dumps(row)}\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    write_model(folder / "model")


if __name__ == "__main__":
    main()
