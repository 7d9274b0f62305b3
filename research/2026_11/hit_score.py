"""F-beta against the hit score (SoRFT, arXiv 2502.20127): which one makes lists grow?

    python research/2026_11/hit_score.py --to runs/hit [--seeds 0 1 2]

A prompt is a number from 10 to 999, and the answer is the list of its divisors from 2 to 30, such
as "2;3;6" for "102=". The shipped model learns some of it from lists (SFT), then GRPO trains it on
F-beta, and on the hit score: 1 if one item of the list is right.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import arms
import demos
import numpy as np

from tpu_rl.report import plots
from tpu_rl.report.series import Series
from tpu_rl.rewards import sets

LENGTHS = (
    *("--sampling.max-prompt-tokens", "8", "--sampling.max-new-tokens", "64"),
    *("--batch.row-length", "256", "--batch.micro-batch-rows", "4", "--model.remat", "none"),
    "--reward-limits.no-isolate",
)


def with_commas(completions: Any) -> list[str]:
    """Return lists as the library reads them: the model's alphabet has no comma."""
    return [text.replace(";", ",") for text in completions]


def f_beta(prompts: Any, completions: Any, *, answer: Any, **_: Any) -> list[float]:
    return list(sets.f_beta()(prompts, with_commas(completions), answer=answer))


def hit(prompts: Any, completions: Any, *, answer: Any, **_: Any) -> list[float]:
    return list(sets.hit_score()(prompts, with_commas(completions), answer=answer))


def items(prompts: Any, completions: Any, **_: Any) -> list[float]:
    return list(sets.listed_items()(prompts, with_commas(completions)))


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Write the training and the held-out rows."""
    numbers = [(n, [d for d in range(2, 31) if n % d == 0]) for n in range(10, 1000)]
    numbers = [(n, divisors) for n, divisors in numbers if divisors]
    random.Random(0).shuffle(numbers)
    rows = [
        {
            "prompt": f"{n}=",
            "completion": ";".join(map(str, divisors)),
            "answer": [str(each) for each in divisors],
        }
        for n, divisors in numbers
    ]
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    for file, part in zip(files, (rows[150:], rows[:150]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return files


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    train, held_out = write_rows(options.to)
    data = ("--data.path", train, "--data.evaluation-path", held_out, *LENGTHS)
    start = options.to / "start"
    demos.train(
        start,
        [
            *("sft", "--model.path", "builtin:arithmetic", *data, "--batch.prompts", "64"),
            *("--optimizer.learning-rate", "5e-4", "--steps", "100", "--evaluation.rows", "0"),
        ],
    )
    here = Path(__file__).resolve()
    arms.print_heading("reward", "seed", "step", "items listed", "F-beta", "hit score")
    curves: dict[str, list[dict[int, float]]] = {}
    for seed in options.seeds:
        for arm, other in (("f_beta", "hit"), ("hit", "f_beta")):
            run_dir = options.to / f"{arm}_{seed}"
            demos.train(
                run_dir,
                [
                    *("grpo", "--model.path", start / "model", *data, "--seed", seed),
                    *("--reward", f"{here}:{arm}", f"0*{here}:{other}", f"0*{here}:items"),
                    *("--batch.prompts", "8", "--batch.group-size", "8", "--steps", "40"),
                    *("--optimizer.learning-rate", "2e-4", "--optimizer.warmup-steps", "5"),
                    *("--evaluation.rows", "0", "--checkpoint.interval", "50"),
                ],
            )
            rows = arms.read_metrics(run_dir)
            curves.setdefault(arm, []).append(
                {r["step"]: r["reward/hit_score.items/mean"] for r in rows if r["step"] > 0}
            )
            # Means over the training batches of five steps: 320 completions.
            for step in (5, 40):
                some = [row for row in rows if step - 5 < row["step"] <= step]
                cells = [
                    f"{np.mean([row[f'reward/hit_score.{name}/mean'] for row in some]):.2f}"
                    for name in ("items", "f_beta", "hit")
                ]
                arms.print_row(arm, seed, f"{step - 4} to {step}", *cells)
    if options.svg:
        lines = []
        for arm, runs in curves.items():
            values = np.array([list(run.values()) for run in runs])
            steps = np.array(list(runs[0]))
            lines.append(Series(arm, steps, values.mean(0), values.min(0), values.max(0)))
        options.svg.write_text(plots.as_svg(plots.line_chart(lines, size=plots.WIDE)))


if __name__ == "__main__":
    main()
