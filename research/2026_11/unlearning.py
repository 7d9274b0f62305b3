"""Forget 10 of 200 memorized texts: CE-U against gradient ascent.

    python research/2026_11/unlearning.py --to runs/unlearning

Each seed makes 200 prompts of four digits with answers of six random digits, which the shipped
model learns by heart. Then it forgets the first 10, while the other 190 stay in the data. A text is
recalled if the most likely completion is the answer.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import arms

LENGTHS = [
    *("--sampling.max-prompt-tokens", "8", "--sampling.max-new-tokens", "8"),
    *("--batch.prompts", "40", "--batch.row-length", "512", "--batch.micro-batch-rows", "1"),
]
EXACT = """
def exact(completions, answer, **_):
    return [float(text.strip() == known) for text, known in zip(completions, answer)]
"""


def write(path: Path, rows: Sequence[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def recalled(folder: Path, model: Path, rows: Sequence[dict]) -> str:
    """Return the share of the rows that the model recalls, as "n of N"."""
    problems = [{"prompt": row["prompt"], "answer": row["completion"]} for row in rows]
    data = write(folder / "problems.jsonl", problems)
    (folder / "exact.py").write_text(EXACT, encoding="utf-8")
    command = [sys.executable, str(arms.ROOT / "launch/evaluate.py"), str(model), "--greedy"]
    command += ["--data.path", data, "--reward", f"{folder / 'exact.py'}:exact"]
    command += ["--max-new-tokens", "8"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    percent = re.search(r"greedy +│ +([\d.]+) %", result.stdout)
    assert percent is not None, result.stdout
    return f"{round(float(percent[1]) * len(rows) / 100)} of {len(rows)}"


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags = parser.parse_args()
    arms.print_heading("seed", "model", "recalled of those to forget", "recalled of the others")
    for seed in flags.seeds:
        folder = flags.to / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        digits = random.Random(seed)
        prompts = digits.sample(range(10_000), 200)
        rows = [
            {"prompt": f"{n:04}*", "completion": f"{digits.randrange(10**6):06}"} for n in prompts
        ]
        marked = [row | {"forget": number < 10} for number, row in enumerate(rows)]
        start = [
            "--model.path",
            "builtin:arithmetic",
            "--data.path",
            write(folder / "a.jsonl", rows),
        ]
        rate = ["--optimizer.learning-rate", "1e-3", "--evaluation.rows", "0"]
        arms.run(folder / "memorized", ["sft", *start, *LENGTHS, *rate, "--steps", "400"])
        models = {"memorized": folder / "memorized/model"}
        data = ["--data.path", write(folder / "b.jsonl", marked), "--evaluation.rows", "0"]
        for loss in ("ce_u", "gradient_ascent"):
            model = ["--model.path", str(models["memorized"]), "--algorithm.loss", loss]
            rate = ["--optimizer.learning-rate", "1e-4", "--steps", "100", "--seed", str(seed)]
            arms.run(folder / loss, ["unlearn", *model, *data, *LENGTHS, *rate])
            models[loss] = folder / loss / "model"
        for name, model in models.items():
            arms.print_row(
                seed, name, recalled(folder, model, rows[:10]), recalled(folder, model, rows[10:])
            )


if __name__ == "__main__":
    main()
