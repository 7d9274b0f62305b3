"""A reward model on its held-out pairs, and a policy that trains on its score alone.

    python research/2026_11/reward_model.py --to runs/bench [--seeds 0 1 2] [--steps 80]
        [--gsm8k example_model_solutions.jsonl]

For the policy, the table has the model's score beside the share of right answers at the same step:
over-optimization shows where the score rises and the share falls. Finished runs are not repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import arms

Rows = list[dict[str, Any]]
"""The metrics of one run."""


def metrics_of(flags: list[str], run_dir: Path) -> Rows:
    """Run launch/run.py and return its metrics."""
    arms.run(run_dir, flags)
    return arms.read_metrics(run_dir)


def percent(row: dict[str, Any], name: str = "") -> str:
    return arms.percent(arms.estimate(row, f"eval/{name}"))


def print_judgments(title: str, rows: Rows) -> None:
    """Print one line per slice of the pairs, before and after."""
    before, after = rows[0], rows[-1]
    slices = [
        metric.removeprefix("eval/").removesuffix("accuracy")
        for metric in after
        if metric.endswith("accuracy")
    ]
    for name in slices:
        if name.startswith("preference"):
            continue
        label = name.replace("_", " ").strip() or "all"
        problems = int(after[f"eval/{name}n"])
        arms.print_row(title, label, problems, percent(before, name), percent(after, name))


def print_policy(title: str, rows: Rows, reward: str) -> None:
    """Print one line per evaluation: the score of the step's answers, and held-out accuracy."""
    for row in rows:
        if "eval/accuracy" in row and row["step"] > 0:
            score = row.get(f"reward/{reward}/mean", row["reward/mean"])
            length = row["rollout/length_mean"]
            arms.print_row(title, row["step"], f"{score:.3f}", percent(row), f"{length:.1f}")


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80, help="steps of the policy")
    parser.add_argument(
        "--gsm8k", help="example_model_solutions.jsonl; without it there is no GSM8K model"
    )
    parser.add_argument(
        "--policy", default="arithmetic_grpo", help="preset of the policy, or arithmetic_ppo"
    )
    flags = parser.parse_args()
    judges: list[tuple[str, Rows]] = []
    policies: list[tuple[str, Rows]] = []
    for seed in map(str, flags.seeds):
        reward_dir = flags.to / f"reward_{seed}"
        rows = metrics_of(["arithmetic_reward_model", "--seed", seed], reward_dir)
        judges.append((f"arithmetic, seed {seed}", rows))
        policy_flags = [
            flags.policy,
            *("--reward", str(reward_dir / "model")),
            *("--evaluation.reward", "arithmetic"),
            *("--seed", seed),
            *("--steps", str(flags.steps)),
        ]
        rows = metrics_of(policy_flags, flags.to / f"policy_{seed}")
        policies.append((f"{flags.policy}, seed {seed}", rows))
        if flags.gsm8k:
            gsm8k_flags = ["gsm8k_reward_model", "--data.path", flags.gsm8k, "--seed", seed]
            rows = metrics_of(gsm8k_flags, flags.to / f"gsm8k_{seed}")
            judges.append((f"GSM8K, seed {seed}", rows))
    arms.print_heading("reward model", "held-out pairs", "problems", "before", "after")
    for title, rows in judges:
        print_judgments(title, rows)
    print()
    arms.print_heading("policy", "step", "score of the model", "right answers", "length")
    for title, rows in policies:
        print_policy(title, rows, "model")


if __name__ == "__main__":
    main()
