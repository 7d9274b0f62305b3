"""PPO, VC-PPO and VAPO on the default problems, and where lambda forgets the end of an answer; several seeds each.

    python bench/ppo.py --to runs/bench [--seeds 0 1 2] [--arms ppo vc_ppo vapo long_ppo long_vc_ppo]

The long arms ask what becomes of answers so long that lambda decays before their beginning (arXiv 2503.01491). A
written answer to 5 terms has 33 tokens, and the shipped model knows no longer ones, so lambda is lowered instead:
0.8^33 = 0.95^144 = 0.0006. Plain PPO has it in advantages and in the critic's targets, VC-PPO in advantages alone;
VAPO's lambda follows the length, so its long arm is `vapo` itself.

Prints a line a run: accuracy on the held-out problems before and after; the variance of returns that the critic
explains when the policy first moves and in the last ten steps; tokens of an answer in the last ten steps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import arms

SHORT_SIGHT = ["--algorithm.lam", "0.8"]
ARMS = {
    "ppo": ["arithmetic_ppo"],
    "vc_ppo": ["arithmetic_vc_ppo"],
    "vapo": ["arithmetic_vapo"],
    "long_ppo": ["arithmetic_ppo", *SHORT_SIGHT, "--algorithm.critic.lam", "0.8"],
    "long_vc_ppo": ["arithmetic_vc_ppo", *SHORT_SIGHT],
}
COLUMNS = ["arm", "seed", "sampled before", "sampled after", "greedy before", "greedy after"]
COLUMNS += ["explained at first, %", "explained at last, %", "tokens an answer", "seconds"]


def learned(run_dir: Path) -> list[str]:
    """The cells about critic and length."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][1:]
    first, last = next(row for row in rows if "policy/loss" in row), rows[-10:]

    def mean(name: str) -> float:
        return sum(row[name] for row in last) / len(last)

    explained = [first["value/explained_variance"], mean("value/explained_variance")]
    return [*(f"{100 * share:.0f}" for share in explained), f"{mean('rollout/length_mean'):.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    flags = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for arm in flags.arms:
        for seed in flags.seeds:
            run_dir = flags.to / f"{arm}_{seed}"
            summary = arms.run(run_dir, [*ARMS[arm], "--seed", str(seed)])
            before, after = summary["eval"]["before"], summary["eval"]["after"]
            cells = map(arms.percent, (before, after, before["greedy"], after["greedy"]))
            print(
                f"| {arm} | {seed} | {' | '.join([*cells, *learned(run_dir)])} | {summary['seconds']:.0f} |", flush=True
            )


if __name__ == "__main__":
    main()
