"""LoRA without regret (thinkingmachines.ai, 2025): the best learning rate of each rank.

    python research/2026_11/lora_rates.py --to runs/lora [--methods grpo sft] [--seeds 0 1 2]

First one run for each rank and rate with the first seed, then the best rate of each rank with the
others. GRPO earns rewards on expressions of 5 terms; SFT learns written solutions of them, which
hold far more bits. Accuracy is sampled, on 500 held-out problems.
"""

from __future__ import annotations

import json
from pathlib import Path

import arms
import demos
import numpy as np

from tpu_rl.environments import arithmetic

LONG = arithmetic.Arithmetic(min_terms=5, max_terms=5, operators="+-*")
RATES = {
    "full": ("1e-4", "3e-4", "1e-3"),
    "8": ("1e-3", "3e-3", "1e-2"),
    "1": ("1e-3", "3e-3", "1e-2"),
}
COMMON = ("--model.remat", "none", "--batch.micro-batch-rows", "4", "--optimizer.warmup-steps", "5")
METHODS = {
    "grpo": ("arithmetic_grpo", *COMMON, "--steps", "40", "--batch.prompts", "16"),
    "sft": (
        *("sft", "--model.path", "builtin:arithmetic", *COMMON, "--steps", "80"),
        *("--optimizer.schedule", "constant", "--batch.prompts", "64", "--batch.row-length", "256"),
        *("--sampling.max-prompt-tokens", "24", "--sampling.max-new-tokens", "64"),
    ),
}


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Write solved problems to learn from, and held-out ones."""
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    for file, split, count in zip(files, ("train", "eval"), (5120, 500), strict=True):
        source = arithmetic.ArithmeticSource(LONG, split, 0)
        rows = [source[index] for index in range(count)]
        lines = [json.dumps(row | {"completion": row["solution"]}) + "\n" for row in rows]
        file.write_text("".join(lines), encoding="utf-8")
    return files


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    train, held_out = write_rows(options.to)
    data = ("--data.path", train, "--data.evaluation-path", held_out, "--reward", "arithmetic")

    def accuracy(method: str, rank: str, rate: str, seed: int) -> float:
        folder = options.to / f"{method}_{rank}_{rate}_{seed}"
        flags = [*METHODS[method], *(data if method == "sft" else ())]
        flags += ["--evaluation.rows", "500", "--evaluation.interval", "100"]
        flags += ["--optimizer.learning-rate", rate, "--checkpoint.interval", "100"]
        flags += [] if rank == "full" else ["--model.lora.rank", rank]
        summary = demos.train(folder, [*flags, "--seed", seed])
        return 100 * summary["eval"]["after"]["accuracy"]

    arms.print_heading("method", "rank", "rate: accuracy", "best rate", "seeds at the best rate")
    for method in options.methods:
        for rank, rates in RATES.items():
            first = [accuracy(method, rank, rate, options.seeds[0]) for rate in rates]
            pairs = ", ".join(f"{r}: {a:.1f}" for r, a in zip(rates, first, strict=True))
            best = rates[int(np.argmax(first))]
            others = [accuracy(method, rank, best, seed) for seed in options.seeds]
            arms.print_row(method, rank, pairs, best, ", ".join(f"{a:.1f}" for a in others))


if __name__ == "__main__":
    main()
