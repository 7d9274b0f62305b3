"""DAPO's parts one after the other, Clip-Cov and KL-Cov, with eight updates a batch.

    python research/2026_11/dapo_ladder.py --to runs/dapo [--seeds 0 1 2] [--arms grpo kl_cov ...]

GRPO on arithmetic (DAPO: arXiv 2503.14476; Clip-Cov and KL-Cov: 2505.22617). Each of the first five
arms adds one part to the arm before it; the last four change the surrogate of the first. Prints
accuracy and entropy of each run, and the paired differences from the first arm.
"""

from __future__ import annotations

from pathlib import Path

import arms
import demos
import matplotlib.pyplot
import mismatch
import numpy as np

from tpu_rl.report import plots

COMMON = (
    *("--optimizer.learning-rate", "2e-4", "--batch.num-minibatches", "8"),
    *("--batch.prompts", "16", "--batch.micro-batch-rows", "1", "--model.remat", "none"),
    *("--steps", "30", "--evaluation.interval", "10", "--evaluation.no-greedy"),
    *("--checkpoint.interval", "30"),
)
GRPO = ("--algorithm.loss-aggregation", "sequence_mean")
HIGHER = ("--algorithm.clip-high", "0.28")
TOKENS = (*HIGHER, "--algorithm.loss-aggregation", "token_mean")
DYNAMIC = (*TOKENS, "--rollout.dynamic-sampling-rounds", "3")
CLIP_COV = (*GRPO, "--algorithm.surrogate", "clip_cov", "--algorithm.covariance-share")
KL_COV = (
    *(*GRPO, "--algorithm.surrogate", "kl_cov", "--algorithm.covariance-kl-coef", "1"),
    "--algorithm.covariance-share",
)
ARMS = {
    "grpo": GRPO,
    "clip_higher": (*HIGHER, *GRPO),
    "token_mean": TOKENS,
    "dynamic": DYNAMIC,
    "overlong": (*DYNAMIC, "--algorithm.overlong-buffer", "16"),
    "clip_cov": (*CLIP_COV, "0.002"),
    "kl_cov": (*KL_COV, "0.002"),
    "clip_cov_2%": (*CLIP_COV, "0.02"),
    "kl_cov_2%": (*KL_COV, "0.02"),
}
"""Name -> flags. Clip-Cov and KL-Cov take ten and a hundred times the papers' share of the tokens,
because a batch has 4,000 tokens here, of which the papers' share is one."""


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--pairs", action="store_true", help="also paired differences")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("flags", nargs="*", help="further flags of launch/run.py, after --")
    options = parser.parse_args()
    columns = ("accuracy at 10, 20, 30", "entropy, first 5", "11 to 15", "last 5", "reward")
    arms.print_heading("arm", "seed", *columns, "completions", "seconds")
    curves: dict[str, list] = {}
    for seed in options.seeds:
        for arm in options.arms:
            run_dir = options.to / f"{arm}_{seed}"
            surrogates = ["--algorithm", "surrogates"] * ("_cov" in arm)
            flags = ["arithmetic_grpo", *surrogates, *COMMON, *ARMS[arm], *options.flags]
            summary = demos.train(run_dir, [*flags, "--seed", seed])
            rows = arms.read_metrics(run_dir)
            accuracy = [100 * row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
            steps = [row for row in rows if row["step"] > 0]
            entropy = np.array([row["policy/entropy"] for row in steps])
            parts = (entropy[:5], entropy[10:15], entropy[-5:])
            arms.print_row(
                *(arm, seed, ", ".join(f"{value:.1f}" for value in accuracy[1:])),
                *(f"{part.mean():.3f}" for part in parts),
                f"{np.mean([row['reward/mean'] for row in steps[-10:]]):.3f}",
                f"{sum(row['rollout/tokens'] / row['rollout/length_mean'] for row in steps):.0f}",
                f"{summary['seconds']:.0f}",
            )
            curves.setdefault(arm, []).append((accuracy, entropy))
    if options.pairs:
        mismatch.pairs(options.to, options.seeds, options.arms)
    if options.svg:
        draw(curves, options.svg)


def draw(curves: dict[str, list], to: Path) -> None:
    """Draw accuracy and entropy over steps, means over seeds."""
    with matplotlib.rc_context({"svg.hashsalt": "dapo"}):
        figure, (left, right) = matplotlib.pyplot.subplots(1, 2, figsize=plots.WIDE)
        for name, runs in curves.items():
            accuracy = np.mean([run[0] for run in runs], 0)
            entropy = np.mean([run[1] for run in runs], 0)
            left.plot(np.linspace(0, len(entropy), len(accuracy)), accuracy, label=name)
            right.plot(np.convolve(entropy, np.full(5, 0.2), "valid"))
        left.set_ylabel("sampled accuracy, %")
        right.set_ylabel("entropy, nats, mean of 5 steps")
        for axes in (left, right):
            axes.set_xlabel("step")
        left.legend(frameon=False, fontsize=7)
        to.write_text(plots.as_svg(figure), encoding="utf-8")


if __name__ == "__main__":
    main()
