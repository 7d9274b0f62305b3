"""Memorization scores: models that learn 200 problems by heart, and one that learned the task.

    python research/2026_11/memorized.py --to runs/memorized

200 expressions of five terms with right answers and no calculation, and a variant of each with
another last number. The shipped model without its weights learns the 200 by heart for 50 to 400
steps. The control is the shipped model, which learned fresh expressions.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import arms
import demos

from tpu_rl.commands import compare
from tpu_rl.environments import arithmetic

CONTROL = "builtin:arithmetic"
STEPS = (50, 100, 200, 400)
RATE = ("--optimizer.learning-rate", "1e-3", "--optimizer.warmup-steps", "20")
LENGTHS = ("--sampling.max-prompt-tokens", "24", "--sampling.max-new-tokens", "64")
BATCH = ("--batch.prompts", "64", "--batch.row-length", "512", "--batch.micro-batch-rows", "4")


def value(expression: str) -> int:
    """Return the value of an expression of integers with + - *."""
    assert re.fullmatch(r"[\d+*-]+", expression)
    return eval(expression)


def write(path: Path, prompts: list[str]) -> str:
    rows = [{"prompt": p, "completion": f"#{value(p[:-1])}"} for p in prompts]
    rows = [row | {"answer": row["completion"][1:]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def changed(prompt: str, numbers: random.Random) -> str:
    """Return an expression with another last number."""
    head, last = re.fullmatch(r"(.*[+*-])(\d+)=", prompt).groups()
    return f"{head}{numbers.choice([n for n in range(1, 10) if n != int(last)])}="


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        task = arithmetic.Arithmetic(min_terms=5, max_terms=5, operators="+-*")
        source = arithmetic.ArithmeticSource(task, "train", seed)
        originals = [source[index]["prompt"] for index in range(200)]
        numbers = random.Random(seed)
        data = write(options.to / f"originals_{seed}.jsonl", originals)
        variants = write(
            options.to / f"variants_{seed}.jsonl", [changed(p, numbers) for p in originals]
        )
        start = ("--model.path", CONTROL, "--model.random-init", "--seed", seed)
        common = (*start, *RATE, *LENGTHS, *BATCH, "--evaluation.rows", "0")
        folders = []
        for steps in STEPS:
            by_heart = options.to / f"by_heart_{steps}_{seed}"
            demos.train(by_heart, ["sft", *common, "--data.path", data, "--steps", steps])
            folders.append(by_heart)
        sets = []
        for path in (data, variants):
            flags = ["grpo", "--model.path", CONTROL, "--data.path", path]
            sets.append([*flags, "--reward", "arithmetic", "--evaluation.rows", "200", *LENGTHS])
        flags = compare.Flags(models=(*map(str, folders), CONTROL), temperature=0.0, memorized=True)
        print(compare.compare(flags, sets), flush=True)


if __name__ == "__main__":
    main()
