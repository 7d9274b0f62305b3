"""Distillation of arithmetic: the accuracy of each arm, and its distance from the first model.

    python research/2026_11/distill.py gkd --to FOLDER [--seeds 0 1 2]      students of one GRPO run
    python research/2026_11/distill.py align --to FOLDER [--seeds 0 1 2]    DPO, reverse DPO and AlignDistil

Prints one line per run: sampled accuracy on the held-out problems, before and after; then, for one
completion of each problem, the KL divergence from the built-in model in nats per completion (summed
over tokens, each over the whole vocabulary) and the number of tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path

import arms
import jax
import numpy as np

from tpu_rl import models, sampler
from tpu_rl.commands import config as configuration
from tpu_rl.commands import roles
from tpu_rl.experience import tasks
from tpu_rl.experience.config import sampler_config
from tpu_rl.losses import masked, teachers
from tpu_rl.tokenizers import load as load_tokenizer
from tpu_rl.train import packing
from tpu_rl.types import Array, Params, Purpose, Rows

BUILTIN = "builtin:arithmetic"
TEACHER_COMPLETES = ["--algorithm.off-policy", "teacher"]
GKD = {
    "on_policy": ["arithmetic_gkd"],
    "off_policy_data": ["arithmetic_gkd", "--algorithm.on-policy", "0"],
    "off_policy_teacher": ["arithmetic_gkd", "--algorithm.on-policy", "0", *TEACHER_COMPLETES],
    "mixed": ["arithmetic_gkd", "--algorithm.on-policy", "0.5", *TEACHER_COMPLETES],
    "forward_kl": ["arithmetic_gkd", "--algorithm.beta", "0"],
    "sequence": ["arithmetic_sequence_distil"],
    "mini_llm": ["arithmetic_mini_llm"],
}
ALIGN = {
    "adaptive": ["arithmetic_align_distil"],
    "adaptive_off_policy": ["arithmetic_align_distil", "--algorithm.on-policy", "0"],
    "adaptive_no_half": ["arithmetic_align_distil", "--algorithm.no-tvd-half"],
    "adaptive_same_weights": ["arithmetic_align_distil", "--algorithm.beta0", "None"],
    "contrast_constant": ["arithmetic_align_distil", "--algorithm.no-adaptive"],
    "extrapolated": [
        "arithmetic_align_distil",
        "--algorithm.no-adaptive",
        *("--algorithm.target", "extrapolated"),
        *("--algorithm.alpha", "2"),
    ],
    "gkd_of_dpo": ["arithmetic_gkd"],
}
DPO_STEPS = (20, 40, 80, 160)
"""Steps of the DPO runs. They give a curve of accuracy over KL, to compare the other arms with at
the same KL."""


def distance(directory: str, rows: int) -> tuple[float, float]:
    """Return (KL from the built-in model in nats, tokens), both per completion.

    The completions are those of the first `rows` held-out problems.
    """
    preset = configuration.preset("arithmetic_gkd")
    first_directory = roles.model_path(BUILTIN)
    model, policy = models.load(directory)
    _, reference = models.load(first_directory)
    tokenizer = load_tokenizer(first_directory)
    problems = tasks.evaluation_rows(preset.data, preset.algorithm.experience, rows)
    rollout = sampler.sample(
        models.policy(model),
        policy,
        [tokenizer.encode_prompt(problem["prompt"]) for problem in problems],
        sampler.run_key(0, Purpose.EVALUATION, 1),
        sampler_config(preset.sampling, tokenizer, 1),
    )
    params = {"policy": policy, "teacher": reference}
    roles_by_name = {name: models.role(model, operator.itemgetter(name)) for name in params}
    layout = packing.assign_slots(
        rollout.action_mask, rollout.group_id, row_length=256, micro_batch_rows=8
    )
    mask = layout.pack(rollout.action_mask)
    target = teachers.compose("teacher", 1.0)

    @jax.jit
    def total_kl(params: Params, rows: Rows) -> Array:
        def token_kl(rows: Rows) -> Array:
            return teachers.compare(roles_by_name, params, rows, target, beta=1.0).divergence

        return masked.total(packing.over_micro_batches(token_kl, rows), mask)

    completions = len(rollout.tokens)
    kl = float(total_kl(params, layout.rows(rollout.tokens))) / completions
    return kl, float(np.sum(rollout.action_mask)) / completions


def run_arm(folder: Path, name: str, seed: int, flags: Sequence[str], rows: int) -> None:
    """Run one arm, unless it is finished, and print its line."""
    run_dir = folder / f"{name}_{seed}"
    summary = arms.run(run_dir, [*flags, "--seed", str(seed)])
    kl, length = distance(str(run_dir / "model"), rows)
    before = arms.percent(summary["eval"]["before"])
    after = arms.percent(summary["eval"]["after"])
    seconds = f"{summary['seconds']:.0f}"
    arms.print_row(name, seed, before, after, f"{kl:.2f}", f"{length:.1f}", seconds)


def gkd(folder: Path, seeds: list[int], chosen: list[str], rows: int, flags: list[str]) -> None:
    """Train all students of one teacher."""
    arms.run(folder / "teacher", ["arithmetic_grpo"])
    teacher = ["--algorithm.teacher", str(folder / "teacher/model")]
    for name, arm in GKD.items():
        for seed in seeds:
            if not chosen or name in chosen:
                run_arm(folder, name, seed, [*arm, *teacher, *flags], rows)


def align(folder: Path, seeds: list[int], chosen: list[str], rows: int, flags: list[str]) -> None:
    """Train two teachers for each seed, and their students."""
    for seed in seeds:
        for steps in DPO_STEPS:
            run_arm(folder, f"dpo_{steps}", seed, ["arithmetic_dpo", "--steps", str(steps)], rows)
        reverse = ["arithmetic_dpo", "--algorithm.reverse", "--steps", "80"]
        run_arm(folder, "dpo_reverse", seed, reverse, rows)
        for name, arm in ALIGN.items():
            teacher_flags = ["--algorithm.teacher", str(folder / f"dpo_80_{seed}/model")]
            if "arithmetic_gkd" not in arm:
                directory = str(folder / f"dpo_reverse_{seed}/model")
                teacher_flags += ["--algorithm.teacher-reverse", directory]
            if not chosen or name in chosen:
                run_arm(folder, name, seed, [*arm, *teacher_flags, *flags], rows)


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("experiment", choices=["gkd", "align"])
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=[], help="only these arms")
    parser.add_argument(
        "--rows", type=int, default=500, help="problems on whose completions the KL is measured"
    )
    parser.add_argument(
        "flags", nargs="*", help="flags of launch/run.py for every student, after --"
    )
    chosen = parser.parse_args()
    arms.print_heading(
        "arm", "seed", "accuracy before", "accuracy after", "KL to the start", "tokens", "seconds"
    )
    experiment = {"gkd": gkd, "align": align}[chosen.experiment]
    experiment(chosen.to.resolve(), chosen.seeds, chosen.arms, chosen.rows, chosen.flags)


if __name__ == "__main__":
    main()
