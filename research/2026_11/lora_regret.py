"""LoRA without regret: adapters of rank 1, 8 and 32 against all weights, over learning rates.

    python research/2026_11/lora_regret.py --to runs/lora [--seeds 0] [--arms sft_full_1e-3 ...]

The shipped model learns expressions of 5 terms, from written-out solutions (SFT) or from rewards
(GRPO), at a constant learning rate. SFT is measured by the held-out loss of the solutions, in nats
per completion, and GRPO by sampled accuracy, both on the same held-out problems for all arms. An
arm is METHOD_RANK_RATE, its rank "full" or that of the adapters on all matrices.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import arms
import demos
import jax
import matplotlib.pyplot
import mismatch
import numpy as np

from tpu_rl import models
from tpu_rl.commands import roles
from tpu_rl.environments import arithmetic
from tpu_rl.report import plots
from tpu_rl.tokenizers import load as load_tokenizer

START = roles.model_path("builtin:arithmetic")
LONG = arithmetic.Arithmetic(min_terms=5, max_terms=5, operators="+-*")
COMMON = (
    *("--model.path", "builtin:arithmetic", "--model.remat", "none", "--evaluation.rows", "0"),
    *("--optimizer.schedule", "constant", "--optimizer.warmup-steps", "5"),
    *("--checkpoint.interval", "60", "--steps", "60"),
)
METHODS = {
    "sft": (
        "sft",
        *("--batch.prompts", "64", "--batch.row-length", "256", "--batch.micro-batch-rows", "4"),
        *("--sampling.max-prompt-tokens", "24", "--sampling.max-new-tokens", "96"),
    ),
    "grpo": ("arithmetic_grpo", "--batch.prompts", "16", "--batch.micro-batch-rows", "2"),
}
RATES = {
    "sft_full": ("1e-4", "2.5e-4", "5e-4", "1e-3", "2e-3"),
    "sft_lora": ("5e-4", "1e-3", "2.5e-3", "5e-3", "1e-2"),
    "grpo_full": ("1e-4", "2e-4", "4e-4"),
    "grpo_lora": ("5e-4", "1e-3", "2e-3", "4e-3"),
}
RANKS = ("full", "32", "8", "1")
LADDER = [
    f"{method}_{rank}_{rate}"
    for method in METHODS
    for rank in RANKS
    for rate in RATES[f"{method}_{'full' if rank == 'full' else 'lora'}"]
]


def train(folder: Path, arm: str, seed: int) -> Path:
    """Train an arm and return its folder."""
    method, rank, rate = arm.split("_")
    flags = [*METHODS[method], *COMMON, "--optimizer.learning-rate", rate, "--seed", seed]
    if rank != "full":
        flags += ["--model.lora.rank", rank]
    if method == "sft":
        data = folder / f"written_{seed}.jsonl"
        if not data.exists():
            source = arithmetic.ArithmeticSource(LONG, "train", seed)
            problems = [source[index] for index in range(64 * 80)]
            rows = [row | {"completion": row["solution"]} for row in problems]
            folder.mkdir(parents=True, exist_ok=True)
            data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        flags += ["--data.path", data]
    began = time.time()
    demos.train(folder / f"{arm}_{seed}", flags)
    print(f"{arm}_{seed}: {time.time() - began:.0f} s", flush=True)
    return folder / f"{arm}_{seed}"


def losses(directory: str) -> np.ndarray:
    """Return the loss of the solution of each of 500 held-out problems, in nats."""
    model, params = models.load(directory)
    tokenizer = load_tokenizer(START)
    source = arithmetic.ArithmeticSource(LONG, "eval", 0)
    rows = [source[index] for index in range(500)]
    prompts = [tokenizer.encode_prompt(row["prompt"]) for row in rows]
    stop = tokenizer.eos_ids[0]
    texts = [
        [*tokenizer.encode_prompt(row["prompt"] + row["solution"]), stop] for row in rows
    ]
    tokens = demos.pad(texts, 120)
    mask = np.zeros((len(texts), 119), bool)
    for target, prompt, text in zip(mask, prompts, texts, strict=True):
        target[len(prompt) - 1 : len(text) - 1] = True
    log_probs_of = jax.jit(lambda rows: demos.chosen(demos.log_probs(model, params, rows), rows))
    return -(demos.in_batches(log_probs_of, tokens) * mask).sum(1)


def measure(folder: Path, run: str) -> np.ndarray:
    """Return the numbers of all held-out problems for a finished run, or for "METHOD_start"."""
    file = folder / f"{run}.npy"
    if not file.exists():
        directory = START if run.endswith("start") else str(folder / run / "model")
        of_sft = run.startswith("sft")
        values = losses(directory) if of_sft else mismatch.right_answers(directory)
        np.save(file, values)
    return np.load(file)


def report(folder: Path, seeds: list[int], svg: Path | None) -> None:
    """Print all arms that are finished, and each rank's best against full's best, paired."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for method in METHODS:
        print(f"\n{method}; start {measure(folder, f'{method}_start').mean():.3f}\n")
        arms.print_heading("rank", "rate", *(f"seed {seed}" for seed in seeds))
        best: dict[str, str] = {}
        curves[method] = {}
        for rank in RANKS:
            means = {}
            for arm in (arm for arm in LADDER if arm.startswith(f"{method}_{rank}_")):
                rate = arm.split("_")[2]
                files = [folder / f"{arm}_{seed}.npy" for seed in seeds]
                values = [float(np.load(file).mean()) if file.exists() else None for file in files]
                arms.print_row(rank, rate, *("-" if x is None else f"{x:.3f}" for x in values))
                if values[0] is not None:
                    means[arm] = values[0]
                    curves[method].setdefault(rank, []).append((float(rate), values[0]))
            if means:
                best[rank] = (min if method == "sft" else max)(means, key=lambda arm: means[arm])
        print()
        for rank in RANKS[1:]:
            both = [
                [folder / f"{best[name]}_{seed}.npy" for seed in seeds] for name in (rank, "full")
            ]
            done = [all(file.exists() for file in pair) for pair in zip(*both, strict=True)]
            numbers = [
                np.array([np.load(f) for f, use in zip(files, done, strict=True) if use], float)
                for files in both
            ]
            difference = numbers[0] - numbers[1]
            each = ", ".join(f"{100 * value:+.1f}" for value in difference.mean(-1))
            print(f"100 x ({best[rank]} - {best['full']}): {demos.paired(difference)}; {each}")
    if svg:
        draw(curves, svg)


def draw(curves: dict[str, dict[str, list[tuple[float, float]]]], to: Path) -> None:
    """Draw held-out loss and accuracy of seed 0 over learning rates."""
    with matplotlib.rc_context({"svg.hashsalt": "lora"}):
        figure, both = matplotlib.pyplot.subplots(1, 2, figsize=plots.WIDE)
        labels = {"sft": "held-out loss, nats per completion", "grpo": "sampled accuracy"}
        for axes, (method, lines) in zip(both, curves.items(), strict=True):
            for rank, points in lines.items():
                label = rank if rank == "full" else f"rank {rank}"
                axes.plot(*zip(*sorted(points), strict=True), "o-", label=label, markersize=3)
            axes.set_xscale("log")
            axes.set_xlabel(f"learning rate, {method.upper()}")
            axes.set_ylabel(labels[method])
        both[0].legend(frameon=False, fontsize=7)
        to.write_text(plots.as_svg(figure), encoding="utf-8")


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="*", default=LADDER)
    parser.add_argument("--report", action="store_true", help="only print what is finished")
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    for seed in () if options.report else options.seeds:
        for arm in options.arms:
            train(options.to, arm, seed)
            print(measure(options.to, f"{arm}_{seed}").mean(), flush=True)
    if options.report:
        report(options.to, options.seeds, options.svg)


if __name__ == "__main__":
    main()
