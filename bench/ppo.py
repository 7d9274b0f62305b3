"""PPO, VC-PPO and VAPO on the default problems, also with a lambda too small for the answers.

    python bench/ppo.py --to runs/bench [--seeds 0 1 2] [--arms ppo vc_ppo vapo long_ppo ...]

The long arms show what happens when answers are so long that lambda decays before their beginning
(arXiv 2503.01491). A written answer to 5 terms has 33 tokens, and the built-in model knows no
longer ones, so lambda is lowered instead: 0.8^33 = 0.95^144 = 0.0006. PPO uses it for advantages
and for the critic's targets, VC-PPO for advantages alone. VAPO's lambda follows the length, so its
long arm is `vapo` itself.

Prints one line per run: accuracy on held-out problems before and after; the variance of returns
that the critic explains at the policy's first update and in the last ten steps; tokens per answer
in the last ten steps.
"""

from __future__ import annotations

from pathlib import Path

import arms

SMALL_LAMBDA = ["--algorithm.lam", "0.8"]
ARMS = {
    "ppo": ["arithmetic_ppo"],
    "vc_ppo": ["arithmetic_vc_ppo"],
    "vapo": ["arithmetic_vapo"],
    "long_ppo": ["arithmetic_ppo", *SMALL_LAMBDA, "--algorithm.critic.lam", "0.8"],
    "long_vc_ppo": ["arithmetic_vc_ppo", *SMALL_LAMBDA],
}
COLUMNS = ("explained at first, %", "explained at last, %", "tokens per answer")
LAST_STEPS = 10


def critic_cells(run_dir: Path) -> list[str]:
    """Return the cells about the critic and the length of answers."""
    rows = arms.read_metrics(run_dir)[1:]
    first = next(row for row in rows if "policy/loss" in row)
    last = rows[-LAST_STEPS:]

    def mean(name: str) -> float:
        return sum(row[name] for row in last) / len(last)

    return [
        f"{100 * first['value/explained_variance']:.0f}",
        f"{100 * mean('value/explained_variance'):.0f}",
        f"{mean('rollout/length_mean'):.1f}",
    ]


if __name__ == "__main__":
    arms.main(__doc__, ARMS, COLUMNS, critic_cells)
