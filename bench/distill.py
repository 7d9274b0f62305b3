"""Distillation of arithmetic: what the arms reach, and how far they go from the model that they started as.

    python bench/distill.py gkd   --to FOLDER [--seeds 0 1 2]      students of one GRPO run
    python bench/distill.py align --to FOLDER [--seeds 0 1 2]      DPO, its reverse, and what AlignDistil makes of both

Prints a line a run: accuracy on the held-out problems before and after, sampled; then, on one completion of each of
them, the KL to the shipped model in nats a completion (each token's own, over the whole vocabulary) and the length.
"""

from __future__ import annotations

import argparse
import operator
from dataclasses import replace
from pathlib import Path

import arms
import jax
import numpy as np

from launch import config as configuration
from launch import dataset, roles, sources
from tpu_rl import masked, models, packing, sampler, teachers
from tpu_rl.tokenizers import load as load_tokenizer
from tpu_rl.types import Array, Params, Purpose, Rows

SHIPPED = "builtin:arithmetic"
GKD = {
    "on_policy": ["arithmetic_gkd"],
    "off_policy_data": ["arithmetic_gkd", "--algorithm.on-policy", "0"],
    "off_policy_teacher": ["arithmetic_gkd", "--algorithm.on-policy", "0", "--algorithm.off-policy", "teacher"],
    "mixed": ["arithmetic_gkd", "--algorithm.on-policy", "0.5", "--algorithm.off-policy", "teacher"],
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
        "arithmetic_align_distil", "--algorithm.no-adaptive", "--algorithm.target", "extrapolated",
        "--algorithm.alpha", "2",
    ],
    "gkd_of_dpo": ["arithmetic_gkd"],
}  # fmt: skip
DPO_STEPS = (20, 40, 80, 160)
"""DPO itself is run this long: a curve of accuracy over KL, to compare others with at the same KL."""


def distance(directory: str, rows: int) -> tuple[float, float]:
    """(KL to the shipped model in nats a completion, tokens a completion), on the first `rows` held-out problems."""
    preset = configuration.preset("arithmetic_gkd")
    preset = replace(preset, evaluation=replace(preset.evaluation, rows=rows))
    shipped = roles.model_path(SHIPPED)
    (model, policy), (_, reference) = models.load(directory), models.load(shipped)
    tokenizer = load_tokenizer(shipped)
    prompts = [tokenizer.encode_prompt(row["prompt"]) for row in dataset.evaluation_rows(preset)]
    rollout = sampler.sample(
        models.policy(model), policy, prompts, sampler.run_key(0, Purpose.EVALUATION, 1),
        sources.sampler_config(preset, tokenizer, 1),
    )  # fmt: skip
    params = {"policy": policy, "teacher": reference}
    cast = {name: models.role(model, operator.itemgetter(name)) for name in params}
    layout = packing.lay_out(rollout.action_mask, rollout.group_id, row_length=256, micro_batch_rows=8)
    mask = layout.pack(rollout.action_mask)

    @jax.jit
    def total(params: Params, rows: Rows) -> Array:
        def one(rows: Rows) -> Array:
            return teachers.compare(cast, params, rows, teachers.compose("teacher", 1.0), beta=1.0).divergence

        return masked.total(packing.over_micro_batches(one, rows), mask)

    completions = len(rollout.tokens)
    kl = float(total(params, layout.rows(rollout.tokens))) / completions
    return kl, float(np.sum(rollout.action_mask)) / completions


def line(folder: Path, name: str, seed: int, flags: list[str], rows: int) -> None:
    """Runs one arm, unless it has been, and prints its line."""
    run_dir = folder / f"{name}_{seed}"
    summary = arms.run(run_dir, [*flags, "--seed", str(seed)])
    kl, length = distance(str(run_dir / "model"), rows)
    before, after = arms.percent(summary["eval"]["before"]), arms.percent(summary["eval"]["after"])
    print(f"| {name} | {seed} | {before} | {after} | {kl:.2f} | {length:.1f} | {summary['seconds']:.0f} |", flush=True)


def gkd(folder: Path, seeds: list[int], chosen: list[str], rows: int, flags: list[str]) -> None:
    """One teacher for all students."""
    arms.run(folder / "teacher", ["arithmetic_grpo"])
    for name, arm in GKD.items():
        for seed in seeds:
            if not chosen or name in chosen:
                line(folder, name, seed, [*arm, "--algorithm.teacher", str(folder / "teacher/model"), *flags], rows)


def align(folder: Path, seeds: list[int], chosen: list[str], rows: int, flags: list[str]) -> None:
    """Every seed has its own two teachers."""
    for seed in seeds:
        for steps in DPO_STEPS:
            line(folder, f"dpo_{steps}", seed, ["arithmetic_dpo", "--steps", str(steps)], rows)
        line(folder, "dpo_reverse", seed, ["arithmetic_dpo", "--algorithm.reverse", "--steps", "80"], rows)
        for name, arm in ALIGN.items():
            paths = ["--algorithm.teacher", str(folder / f"dpo_80_{seed}/model")]
            if "arithmetic_gkd" not in arm:
                paths += ["--algorithm.teacher-reverse", str(folder / f"dpo_reverse_{seed}/model")]
            if not chosen or name in chosen:
                line(folder, name, seed, [*arm, *paths, *flags], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gkd", "align"])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=[], help="only these")
    parser.add_argument("--rows", type=int, default=500, help="problems whose completions the KL is measured on")
    parser.add_argument("flags", nargs="*", help="of launch/run.py, for every student, after --")
    chosen = parser.parse_args()
    print("| arm | seed | accuracy before | accuracy after | KL to the start | tokens | seconds |")
    print("|---|---|---|---|---|---|---|")
    what = {"gkd": gkd, "align": align}[chosen.what]
    what(chosen.to.resolve(), chosen.seeds, chosen.arms, chosen.rows, chosen.flags)


if __name__ == "__main__":
    main()
