"""Policies that train on reward models, with one number for an answer and with one for each step.

    python research/2026_11/dense_credit.py --to runs/dense [--seeds 0] [--steps 80]

Each arm is GRPO on arithmetic, judged by the true reward. Finished runs are not repeated.
"""

from __future__ import annotations

from pathlib import Path

import arms

from tpu_rl.tasks.arithmetic import ALPHABET

MODELS = {
    "outcome": "arithmetic_reward_model",
    "sentence": "arithmetic_sentence_reward",
    "process": "arithmetic_process_reward",
}
BY_STEP = ("--algorithm.credit", "reward", "--algorithm.separators", str(4 + ALPHABET.index(";")))
ARMS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "outcome model, one number": ("outcome", "{}", ()),
    "outcome model, change from step to step": ("outcome", "dense(of={}, separator=;)", BY_STEP),
    "sentence model, share of each sentence": ("sentence", "dense(of={})", BY_STEP),
    "process model, one number": ("process", "{}", ()),
    "process model, fall of its smallest log-probability": ("process", "dense(of={})", BY_STEP),
    "process model, change of its probability": ("process", "dense(of={}, values=true)", BY_STEP),
}
"""Name -> (model, reward with the model's folder, flags)."""


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=80, help="steps of the policy")
    flags = parser.parse_args()
    arms.print_heading("reward and credit", "seed", "step", "right answers", "length")
    for seed in flags.seeds:
        for number, (title, (model, reward, further)) in enumerate(ARMS.items()):
            model_dir = flags.to / f"{model}_{seed}"
            arms.run(model_dir, [MODELS[model], "--seed", str(seed)])
            policy_flags = [
                "arithmetic_grpo",
                *("--reward", reward.format(model_dir)),
                *("--evaluation.reward", "arithmetic"),
                *("--seed", str(seed)),
                *("--steps", str(flags.steps)),
                *further,
            ]
            run_dir = flags.to / f"policy_{number}_{seed}"
            arms.run(run_dir, policy_flags)
            for row in arms.read_metrics(run_dir):
                if "eval/accuracy" in row and row["step"] > 0:
                    accuracy = arms.percent(arms.estimate(row))
                    length = f"{row['rollout/length_mean']:.1f}"
                    arms.print_row(title, seed, row["step"], accuracy, length)


if __name__ == "__main__":
    main()
