"""The likelihood of the reference answer as the reward (RLPR), against GRPO's verifier.

    python research/2026_11/likelihood.py --to runs/likelihood [--seeds 0 1 2]

The default run for 50 steps, whose reward is how much likelier the right answer is after the
completion than without one. No step compares answers; held-out problems are judged by the verifier.
Differences are paired over 500 problems, one sampled answer of each saved model.
"""

from __future__ import annotations

from pathlib import Path

import arms
import demos
import numpy as np
from mismatch import right_answers

from tpu_rl.commands import roles

COMMON = ("--steps", "50", "--checkpoint.interval", "50", "--evaluation.interval", "10")
ARMS = {
    "verifier": (),
    "gain": (
        *("--reward", "0*arithmetic", "--evaluation.reward", "arithmetic"),
        *("--rollout.likelihood.coef", "1", "--rollout.likelihood.mark", "#"),
    ),
}


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    answers = {}
    heading = (
        "sampled before",
        "after 10, 20, 30, 40, 50 steps",
        "greedy after",
        "reward of likelihood",
    )
    arms.print_heading("reward", "seed", *heading)
    for arm in options.arms:
        for seed in options.seeds:
            folder = options.to / f"{arm}_{seed}"
            flags = ["arithmetic_grpo", *COMMON, *ARMS[arm], "--seed", seed]
            summary = demos.train(folder, flags)
            rows = arms.read_metrics(folder)
            over = [f"{100 * row['eval/accuracy']:.1f}" for row in rows if "eval/accuracy" in row]
            reward = [
                row["reward/likelihood/mean"] for row in rows if "reward/likelihood/mean" in row
            ]
            moved = f"{np.mean(reward[:5]):.3f}, {np.mean(reward[-5:]):.3f}" if reward else "-"
            before, after = summary["eval"]["before"], summary["eval"]["after"]
            greedy = arms.percent(after["greedy"])
            arms.print_row(arm, seed, arms.percent(before), ", ".join(over[1:]), greedy, moved)
    start = right_answers(str(roles.model_path("builtin:arithmetic")))
    for arm in options.arms:
        folders = [options.to / f"{arm}_{seed}" / "model" for seed in options.seeds]
        answers[arm] = np.array([right_answers(str(folder)) for folder in folders])
        each = ", ".join(f"{100 * value:+.1f}" for value in (answers[arm] - start).mean(-1))
        print(f"{arm} - start: {demos.paired(answers[arm] - start)}; seeds {each}")
    for arm in options.arms[1:]:
        difference = answers[arm] - answers[options.arms[0]]
        each = ", ".join(f"{100 * value:+.1f}" for value in difference.mean(-1))
        shares = [
            (mine - start).mean() / (verifier - start).mean()
            for mine, verifier in zip(answers[arm], answers[options.arms[0]], strict=True)
        ]
        total = (answers[arm] - start).mean() / (answers[options.arms[0]] - start).mean()
        print(f"{arm} - {options.arms[0]}: {demos.paired(difference)}; seeds {each}")
        print(f"share of the gain: {total:.2f}; seeds {', '.join(f'{s:.2f}' for s in shares)}")


if __name__ == "__main__":
    main()
