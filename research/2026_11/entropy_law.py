"""Entropy and reward at eight updates a batch (arXiv 2505.22617), and the ladder of DAPO.

    python research/2026_11/entropy_law.py --to runs/entropy [--seeds 0 1 2] [--arms grpo ...]

GRPO as its paper weighs tokens, then with parts of DAPO (arXiv 2503.14476), and with Clip-Cov or
KL-Cov in place of them. The law R = -a exp(H) + b is fitted to the reward and the entropy of the
training steps of each run. DAPO's penalty of overlong answers is left out: answers here never reach
the limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import arms
import demos
import numpy as np

from tpu_rl.report import plots
from tpu_rl.report.series import Series

COMMON = (
    *("--batch.num-minibatches", "8", "--batch.prompts", "16", "--model.remat", "none"),
    *("--batch.micro-batch-rows", "2", "--optimizer.learning-rate", "2e-4"),
    *("--steps", "30", "--evaluation.interval", "30", "--checkpoint.interval", "30"),
)
SEQUENCE = ("arithmetic_grpo", "--algorithm.loss-aggregation", "sequence_mean")
HIGHER = ("--algorithm.clip-high", "0.28")
DYNAMIC = ("--rollout.dynamic-sampling-rounds", "2")
COVARIANCE = ("arithmetic_sapo", "--algorithm.loss-aggregation", "sequence_mean")
ARMS = {
    "grpo": SEQUENCE,
    "clip_higher": (*SEQUENCE, *HIGHER),
    "dapo": ("arithmetic_grpo", *HIGHER, *DYNAMIC),
    "clip_cov": (*COVARIANCE, "--algorithm.surrogate", "clip_cov"),
    "kl_cov": (*COVARIANCE, "--algorithm.surrogate", "kl_cov"),
}


def law(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return a, b and R^2 of R = -a exp(H) + b over the training steps of a run."""
    steps = [row for row in rows if row["step"] > 0]
    x = np.exp([row["policy/entropy"] for row in steps])
    y = np.array([row["reward/mean"] for row in steps])
    slope, b = np.polyfit(x, y, 1)
    residual = y - slope * x - b
    return -slope, b, 1 - (residual**2).sum() / ((y - y.mean()) ** 2).sum()


def report(to: Path, seeds: list[int], svg: Path | None) -> None:
    arms.print_heading(
        "arm", *(f"seed {seed}" for seed in seeds), "greedy", "entropy at the end", "a", "b", "R^2"
    )
    lines = []
    for arm in ARMS:
        folders = [to / f"{arm}_{seed}" for seed in seeds]
        folders = [folder for folder in folders if (folder / "summary.json").exists()]
        if not folders:
            continue
        runs = [arms.read_metrics(folder) for folder in folders]
        last = [f"{100 * rows[-1]['eval/accuracy']:.1f}" for rows in runs]
        last += ["-"] * (len(seeds) - len(last))
        greedy = np.mean([rows[-1]["eval/greedy_accuracy"] for rows in runs])
        entropies = np.array(
            [[row["policy/entropy"] for row in rows if row["step"] > 0] for rows in runs]
        )
        end = entropies[:, -5:].mean(-1)
        fits = np.array([law(rows) for rows in runs])
        cells = [
            f"{100 * greedy:.1f}",
            ", ".join(f"{value:.3f}" for value in end),
            *(f"{low:.2f} to {high:.2f}" for low, high in np.stack([fits.min(0), fits.max(0)], 1)),
        ]
        arms.print_row(arm, *last, *cells)
        steps = np.arange(1, entropies.shape[1] + 1)
        lines.append(Series(arm, steps, entropies.mean(0), entropies.min(0), entropies.max(0)))
    if svg:
        svg.write_text(plots.as_svg(plots.line_chart(lines, size=plots.WIDE)), encoding="utf-8")


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--report", action="store_true", help="only the runs that are finished")
    options = parser.parse_args()
    if not options.report:
        for seed in options.seeds:
            for arm in options.arms:
                flags = [*ARMS[arm], *COMMON, "--seed", seed]
                demos.train(options.to / f"{arm}_{seed}", flags)
    report(options.to, options.seeds, options.svg)


if __name__ == "__main__":
    main()
