"""Accuracies of the arithmetic presets, with several seeds: one table of runs per study.

    python bench/learning.py STUDY --to runs/bench [--seeds 0 1 2] [--arms ARM ...]

grpo: the default run and its controls. `shuffled` gives the right rewards to the wrong completions.
`more_sft` trains the same model on the data that it was made from, for as many steps as fit into
the time of the default run.

ppo: PPO, VC-PPO and VAPO, also with a lambda too small for the answers. The long arms show what
happens when answers are so long that lambda decays before their beginning (arXiv 2503.01491). A
written answer to 5 terms has 33 tokens, and the built-in model knows no longer ones, so lambda is
lowered instead: 0.8^33 = 0.95^144 = 0.0006. PPO uses it for advantages and for the critic's
targets, VC-PPO for advantages alone. VAPO's lambda follows the length, so its long arm is `vapo`
itself. Further columns: the variance of returns that the critic explains at the policy's first
update and in the last ten steps; tokens per answer in the last ten steps.

rft: rejection-sampling fine-tuning against GRPO at equal numbers of sampled completions. In `rft`
the policy samples; in `expert_iteration` the policy of up to ten steps before does. Both imitate
one right answer per problem. `all` is `rft` with all different right answers. Further columns: the
share of the sampled completions that the policy learned from, in the first and last ten steps.

dpo: DPO and related losses, from the model's own right and wrong answers.

others: the arithmetic presets that no other study runs. The accuracy of the two reward models is
the share of held-out steps, or pairs, that they judge correctly.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import arms

STEPS = 10
"""The number of first and of last steps whose means are printed."""
SHUFFLED = arms.ROOT / "bench/shuffled_reward.py:score"


def critic_cells(run_dir: Path) -> list[str]:
    """Return the cells about the critic and the length of answers."""
    rows = arms.read_metrics(run_dir)[1:]
    first = next(row for row in rows if "policy/loss" in row)
    last = rows[-STEPS:]

    def mean(name: str) -> float:
        return sum(row[name] for row in last) / len(last)

    return [
        f"{100 * first['value/explained_variance']:.0f}",
        f"{100 * mean('value/explained_variance'):.0f}",
        f"{mean('rollout/length_mean'):.1f}",
    ]


def accepted_cells(run_dir: Path) -> list[str]:
    """Return the mean share of accepted completions in the first and in the last steps."""
    rows = arms.read_metrics(run_dir)
    shares = [row["rft/accepted"] for row in rows if "rft/accepted" in row]
    if not shares:
        return ["-", "-"]
    return [f"{100 * sum(part) / len(part):.0f}" for part in (shares[:STEPS], shares[-STEPS:])]


class Study(NamedTuple):
    arms: dict[str, str]
    """Name -> preset and flags of launch/run.py."""
    columns: tuple[str, ...] = ()
    """Further columns of the table."""
    cells: Callable[[Path], list[str]] = lambda run_dir: []
    """Run folder -> the cells of those columns."""


STUDIES = {
    "grpo": Study(
        {
            "grpo": "arithmetic_grpo",
            "shuffled": f"arithmetic_grpo --reward {SHUFFLED} --evaluation.reward arithmetic",
            "more_sft": "arithmetic_sft --model.no-random-init --optimizer.learning-rate 3e-4 "
            "--steps 400 --evaluation.rows 500",
        }
    ),
    "ppo": Study(
        {
            "ppo": "arithmetic_ppo",
            "vc_ppo": "arithmetic_vc_ppo",
            "vapo": "arithmetic_vapo",
            "long_ppo": "arithmetic_ppo --algorithm.lam 0.8 --algorithm.critic.lam 0.8",
            "long_vc_ppo": "arithmetic_vc_ppo --algorithm.lam 0.8",
        },
        ("explained at first, %", "explained at last, %", "tokens per answer"),
        critic_cells,
    ),
    "rft": Study(
        {
            "grpo": "arithmetic_grpo",
            "rft": "arithmetic_rft",
            "expert_iteration": "arithmetic_rft --algorithm.sampled-by reference "
            "--algorithm.round-steps 10",
            "all": "arithmetic_rft --algorithm.max-per-prompt None",
        },
        ("accepted at first, %", "accepted at last, %"),
        accepted_cells,
    ),
    "dpo": Study(
        {
            "dpo": "arithmetic_dpo",
            "rpo": "arithmetic_dpo --algorithm.rpo-coef 1",
            "online": "arithmetic_dpo --algorithm.pairs policy",
            "reverse": "arithmetic_dpo --algorithm.reverse",
            "ipo": "arithmetic_dpo --algorithm.loss ipo",
            "worst_case": "arithmetic_dpo --algorithm.robust-radius 0.2",
            "bco": "arithmetic_bco",
            "kto": "arithmetic_bco --algorithm.loss kto",
        }
    ),
    "others": Study(
        {
            "reinforce": "arithmetic_reinforce",
            "reinforce_baseline": "arithmetic_reinforce --algorithm.baseline group "
            "--batch.group-size 8 --batch.prompts 32",
            "remax": "arithmetic_reinforce --algorithm.baseline greedy --algorithm.no-whiten "
            "--algorithm.loss-aggregation constant_length",
            "a_star_po": "arithmetic_a_star_po",
            "process_reward": "arithmetic_process_reward",
            "sentence_reward": "arithmetic_sentence_reward",
        }
    ),
}


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", help="only these")
    flags = parser.parse_args()
    study = STUDIES[flags.study]
    unknown = set(flags.arms or ()) - set(study.arms)
    if unknown:
        parser.error(f"--arms: {', '.join(unknown)}; {flags.study} has {', '.join(study.arms)}")
    chosen = {arm: shlex.split(study.arms[arm]) for arm in flags.arms or study.arms}
    arms.table(flags.to, chosen, flags.seeds, study.columns, study.cells)


if __name__ == "__main__":
    main()
