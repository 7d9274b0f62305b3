"""A reward model on its held-out pairs, and a policy trained on it judged by the true reward -> tables in Markdown.

    python bench/reward_model.py --to runs/bench [--seeds 0 1 2] [--steps 80] [--gsm8k example_model_solutions.jsonl]

The policy's reward is the model's score alone; beside it stands the share of right answers at the same step, so that
over-optimisation (the score rises, the truth falls) is seen where there is any. A finished run is not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import arms


def rows_of(flags: list[str], run_dir: Path) -> list[dict]:
    """The metrics rows of one run."""
    arms.run(run_dir, flags)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def percent(row: dict, name: str = "") -> str:
    return arms.percent(arms.estimate(row, f"eval/{name}"))


def print_judgements(title: str, rows: list[dict]) -> None:
    """One line a slice, before and after."""
    before, after = rows[0], rows[-1]
    names = [key.removeprefix("eval/").removesuffix("accuracy") for key in after if key.endswith("accuracy")]
    for name in (name for name in names if not name.startswith("preference")):
        label = name.replace("_", " ").strip() or "all"
        print(
            f"| {title} | {label} | {int(after[f'eval/{name}n'])} | {percent(before, name)} | {percent(after, name)} |"
        )


def print_policy(title: str, rows: list[dict], reward: str) -> None:
    """One line an evaluation: the model's score of that step's answers, the truth about held-out problems."""
    for row in rows:
        if "eval/accuracy" in row and row["step"] > 0:
            score = row.get(f"reward/{reward}/mean", row["reward/mean"])
            print(f"| {title} | {row['step']} | {score:.3f} | {percent(row)} | {row['rollout/length_mean']:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80, help="of the policy on the reward model")
    parser.add_argument("--gsm8k", help="example_model_solutions.jsonl; without it the GSM8K table is left out")
    parser.add_argument("--policy", default="arithmetic_grpo", help="preset of the policy; arithmetic_ppo is another")
    flags = parser.parse_args()
    judged, policies = [], []
    for seed in map(str, flags.seeds):
        reward_dir = flags.to / f"reward_{seed}"
        judged.append((f"arithmetic, seed {seed}", rows_of(["arithmetic_reward_model", "--seed", seed], reward_dir)))
        on_model = [
            flags.policy, "--reward", str(reward_dir / "model"), "--evaluation.reward", "arithmetic", "--seed", seed,
            "--steps", str(flags.steps),
        ]  # fmt: skip
        policies.append((f"{flags.policy}, seed {seed}", rows_of(on_model, flags.to / f"policy_{seed}")))
        if flags.gsm8k:
            on_file = ["gsm8k_reward_model", "--data.path", flags.gsm8k, "--seed", seed]
            judged.append((f"GSM8K, seed {seed}", rows_of(on_file, flags.to / f"gsm8k_{seed}")))
    print("| reward model | held-out pairs | problems | before | after |\n|---|---|---|---|---|")
    for title, rows in judged:
        print_judgements(title, rows)
    print("\n| policy | step | score of the model | right answers | length |\n|---|---|---|---|---|")
    for title, rows in policies:
        print_policy(title, rows, "model")


if __name__ == "__main__":
    main()
