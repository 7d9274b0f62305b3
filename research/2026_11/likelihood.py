"""The likelihood of the reference answer as the reward (RLPR), against GRPO's verifier.

    python research/2026_11/likelihood.py --to runs/likelihood [--seeds 0 1 2]

The default run, whose reward is how much likelier the right answer is after the completion than
without one. No step compares answers; held-out problems are judged by the verifier.
"""

from __future__ import annotations

from pathlib import Path

import arms
import demos

COMMON = ("--steps", "50", "--checkpoint.interval", "50", "--evaluation.interval", "50")
ARMS = {
    "verifier": (),
    "likelihood": (
        *("--reward", "0*arithmetic", "--evaluation.reward", "arithmetic"),
        *("--rollout.likelihood.coef", "1", "--rollout.likelihood.mark", "#"),
    ),
}


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    arms.print_heading("reward", "seed", "sampled before", "sampled after", "greedy after")
    for seed in options.seeds:
        for arm, flags in ARMS.items():
            folder = options.to / f"{arm}_{seed}"
            summary = demos.train(folder, ["arithmetic_grpo", *COMMON, *flags, "--seed", seed])
            before, after = summary["eval"]["before"], summary["eval"]["after"]
            arms.print_row(arm, seed, *map(arms.percent, (before, after, after["greedy"])))


if __name__ == "__main__":
    main()
