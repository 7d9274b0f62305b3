"""Sampler-trainer mismatch and its cures: GRPO whose sampler rounds its weights.

    python research/2026_11/mismatch.py --to runs/mismatch [--seeds 0 1 2] [--arms fp8 ...]

GRPO on arithmetic with a high learning rate and two updates a batch. The sampler rounds its
weights to eight bits, or computes in bfloat16 as the trainer does, or computes the trainer's very
bits in bfloat16. The eight-bit sampler runs with each of the corrections.
"""

from __future__ import annotations

from pathlib import Path

import arms
import demos
import numpy as np

from tpu_rl import models
from tpu_rl.environments import arithmetic
from tpu_rl.report import plots
from tpu_rl.report.series import Series
from tpu_rl.tokenizers import load as load_tokenizer

COMMON = (
    "arithmetic_grpo",
    *("--optimizer.learning-rate", "3e-4", "--batch.num-minibatches", "2"),
    *("--batch.prompts", "16", "--batch.micro-batch-rows", "2", "--model.remat", "none"),
    *("--steps", "40", "--evaluation.interval", "20", "--checkpoint.interval", "40"),
)
FP8 = ("--sampling.weight-dtype", "float8_e4m3fn")
CAP = ("--algorithm.importance-sampling-cap", "2")
MASK = (*CAP, "--algorithm.importance-sampling-mode", "sequence_mask")
ARMS = {
    "float32": (),
    "fp8": FP8,
    "fp8_recomputed": (*FP8, "--algorithm.old-log-probs", "recomputed"),
    "fp8_cap_2": (*FP8, *CAP),
    "fp8_sequence_mask": (*FP8, *MASK),
    "bf16": ("--model.dtype", "bfloat16"),
    "bf16_exact": ("--model.dtype", "bfloat16", "--model.exact-sampling"),
    "int8": ("--sampling.weight-dtype", "int8"),
}


def right_answers(directory: str) -> np.ndarray:
    """Return 1 for each right answer of a model to 500 held-out problems."""
    model, params = models.load(directory)
    tokenizer = load_tokenizer(directory)
    long = arithmetic.Arithmetic(min_terms=5, max_terms=5, operators="+-*")
    source = arithmetic.ArithmeticSource(long, "eval", 0)
    rows = [source[index] for index in range(500)]
    rollout = demos.sample(model, params, tokenizer, [row["prompt"] for row in rows], 1)
    answers = [row["answer"] for row in rows]
    return np.array(arithmetic.correct([], demos.texts(tokenizer, rollout), answer=answers))


def pairs(to: Path, seeds: list[int], chosen: list[str]) -> None:
    """Print the paired differences of the chosen arms from the first of them, and from "fp8"."""
    answers = {
        arm: np.array([right_answers(str(to / f"{arm}_{seed}/model")) for seed in seeds])
        for arm in chosen
    }
    arms.print_heading("difference", "mean", "seeds")
    for base in dict.fromkeys([chosen[0], *(arm for arm in ("fp8",) if arm in answers)]):
        for arm in chosen:
            if arm != base:
                difference = answers[arm] - answers[base]
                each = ", ".join(f"{100 * value:+.1f}" for value in difference.mean(-1))
                arms.print_row(f"{arm} - {base}", demos.paired(difference), each)


def report(to: Path, seeds: list[int], svg: Path | None) -> None:
    """Print the last accuracy of each arm, and draw accuracies over steps."""
    columns = [f"seed {seed}" for seed in seeds]
    arms.print_heading("arm", *columns, "best", "gap", "largest", "reward < 0.1")
    lines = []
    for arm in ARMS:
        folders = [to / f"{arm}_{seed}" for seed in seeds]
        folders = [folder for folder in folders if (folder / "summary.json").exists()]
        if not folders:
            continue
        rows = [arms.read_metrics(folder) for folder in folders]
        evaluated = [[row for row in run if "eval/accuracy" in row] for run in rows]
        values = np.array([[row["eval/accuracy"] for row in run] for run in evaluated])
        gaps = [
            np.mean([row["policy/log_prob_gap_mean"] for row in run if row["step"] > 0])
            for run in rows
        ]
        largest = np.max([[row.get("policy/log_prob_gap_max", 0) for row in run] for run in rows])
        low = [
            next((row["step"] for row in run if row.get("reward/mean", 1.0) < 0.1), "-")
            for run in rows
        ]
        last = [f"{100 * value:.1f}" for value in values[:, -1]]
        last += ["-"] * (len(seeds) - len(last))
        best = ", ".join(f"{100 * value:.1f}" for value in values.max(-1))
        gap = f"{np.mean(gaps):.1e}"
        arms.print_row(arm, *last, best, gap, f"{largest:.1e}", ", ".join(map(str, low)))
        steps = np.array([row["step"] for row in evaluated[0]])
        lines.append(Series(arm, steps, values.mean(0), values.min(0), values.max(0)))
    if svg:
        svg.write_text(plots.as_svg(plots.line_chart(lines, size=plots.WIDE, percent=True)))


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--report", action="store_true", help="only the runs that are finished")
    parser.add_argument("--pairs", action="store_true", help="also paired differences")
    parser.add_argument("flags", nargs="*", help="further flags of launch/run.py, after --")
    options = parser.parse_args()
    if not options.report:
        for seed in options.seeds:
            for arm in options.arms:
                flags = [*COMMON, *ARMS[arm], "--seed", seed, *options.flags]
                demos.train(options.to / f"{arm}_{seed}", flags)
    report(options.to, options.seeds, options.svg)
    if options.pairs:
        pairs(options.to, options.seeds, options.arms)


if __name__ == "__main__":
    main()
