"""Q# on arithmetic: reference, CD and Q# over coefficients, and the ablations, over seeds -> tables.

    python bench/q_sharp.py --to runs/q_sharp [--seeds 0 1 2] [--arms all_v single q_type ...] [--samples 8]
    python bench/q_sharp.py --speed

Each run is `launch/run.py arithmetic_q_sharp` with what the arm changes, then its q guides builtin:arithmetic on the
held-out problems; the picture is in the run's report. A run that is finished is not run again. --speed compares
guided with plain decoding.
"""

from __future__ import annotations

import argparse
import json
import operator
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from launch import build, config, dataset, evaluate, guide, run, sources
from launch.config import ExperimentConfig, MeshConfig, Phase
from tpu_rl import guidance, models, sampler
from tpu_rl.report import GUIDED_FILE
from tpu_rl.types import Purpose

COEFFICIENTS = (1.0, 0.5, 0.2, 0.1, 0.05)
ARMS = {
    "all_v": {},
    "single": {"prefixes": "single"},
    "token_mean": {"weights": "token_mean"},
    "q_type": {"q_type": "q", "candidates": None},
    "squared_error": {"distribution": "squared_error"},
    "histogram": {"distribution": "histogram"},
    "whole_trunk": {"layers": None},
    "five_candidates": {"candidates": 5},
}
ROUNDS = {"one_round": 1, "three_rounds": 3}


def configured(arm: str, seed: int, folder: Path) -> ExperimentConfig:
    """The preset as the arm changes it. With more or fewer rounds each takes as many steps as in the preset."""
    one = config.preset("arithmetic_q_sharp")
    algorithm = replace(one.algorithm, **ARMS.get(arm, {}))
    first, last = one.phases[0].until, one.steps - one.phases[-1].until
    rounds = ROUNDS.get(arm, 1 + len(one.phases))
    ends = [first + last * k for k in range(rounds)]
    phases = tuple(Phase(algorithm, until=end, forget=("q",)) for end in ends[:-1])
    run_dir = str(folder / f"{arm}_{seed}")
    return replace(one, algorithm=algorithm, phases=phases, steps=ends[-1], seed=seed, run_dir=run_dir)


def trained(one: ExperimentConfig) -> dict:
    """summary.json of the run."""
    start = Path(one.run_dir).with_suffix(".yaml")
    start.parent.mkdir(parents=True, exist_ok=True)
    config.save(one, start)
    code = run.main([str(start), "--run-dir", one.run_dir])
    if code:
        raise SystemExit(code)
    return json.loads((Path(one.run_dir) / "summary.json").read_text(encoding="utf-8"))


def swept(
    one: ExperimentConfig,
    samples: int,
    baselines: Sequence[guidance.Method],
    coefficients: Sequence[float] = COEFFICIENTS,
) -> dict:
    """Lines of the sweep and of q as a judge; kept beside the run."""
    file = Path(one.run_dir) / GUIDED_FILE
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    mesh = build.make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        flags = evaluate.Flags(model=one.model.path or "")
        language, params = evaluate.load_language(one, flags)
        guided = guide.load(one.run_dir, language, params)
        how = replace(sources.sampler_config(one, language.tokenizer, samples), max_rows=512)
        key = sampler.run_key(one.seed, Purpose.EVALUATION, 0)
        rows, reward = dataset.evaluation_rows(one), sources.resolve_reward(one.reward[0])
        task = guide.Task(
            language, rows, reward, sources.shown(one.reward[0]), one.reward_limits.fault_share, how, key, mesh
        )
        lines, judged = guide.sweep(guided, task, coefficients, baselines)
    guide.record(one.run_dir, lines, judged)
    return json.loads(file.read_text(encoding="utf-8"))


def show(found: dict, samples: int) -> None:
    """A sweep as a table, then what q is worth as a judge."""
    print(f"| way | kl_coef | pass@1, % | maj@{samples}, % | KL, nats | tokens |\n|---|---|---|---|---|---|")
    for x in found["lines"]:
        kl_coef = "" if x["kl_coef"] is None else f"{x['kl_coef']:g}"
        cells = [x["name"], kl_coef, percent(x["accuracy"]), percent(x["majority"])]
        print(f"| {' | '.join(cells)} | {x['kl']:.3f} | {x['length']:.1f} |", flush=True)
    for name, value in found["judge"]:
        print(f"\n{name}: {percent(value)}")


def at_kl(lines: list[dict], name: str, kl: float) -> float:
    """Accuracy of a method at that KL, between its coefficients by straight lines; the reference is KL 0."""
    points = sorted((x["kl"], x["accuracy"][0]) for x in lines if x["name"] in (name, "reference"))
    return float(np.interp(kl, *zip(*points, strict=True)))


def matched(lines: list[dict]) -> list[tuple[float, float, float]]:
    """(KL, Q#'s accuracy, CD's) at the KL of each of CD's coefficients that Q# reaches too."""
    most = max(x["kl"] for x in lines if x["name"] == "Q#")
    levels = [x["kl"] for x in lines if x["name"] == "CD" and x["kl"] <= most]
    return [(kl, at_kl(lines, "Q#", kl), at_kl(lines, "CD", kl)) for kl in levels]


def percent(value: list | None) -> str:
    return "" if value is None else f"{100 * value[0]:.1f} ({100 * value[1]:.1f} to {100 * value[2]:.1f})"


def speed(batches: list[int], repeats: int = 3, new_tokens: int = 64) -> None:
    """Time to decode the same number of tokens: plain, and guided by a trunk of a quarter with 20 candidates.

    Seconds of the clock and of all cores: the latter hardly feel what else the machine does.
    """
    layers, width = 8, 256
    source = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
    }  # fmt: skip
    model = models.from_config(source)
    q = models.with_head(models.first_layers(model, layers // 4), 1)
    params = {"policy": jax.jit(model.init)(jax.random.key(0)), "q": jax.jit(q.init)(jax.random.key(1))}
    params = guidance.with_kl_coef(params, 0.1)
    reference = models.policy(model, guide.POLICY_PARAMS)
    ways = {"plain": reference}
    q_policy = models.policy(q, guide.Q_PARAMS)
    ways["V-type, 20 candidates"] = guidance.guide(reference, q_policy, guidance.offset("q_sharp"), 20, "own")
    by_token = models.with_head(models.first_layers(model, layers // 4), model.config.vocab.size)
    params["q_type"] = jax.jit(by_token.init)(jax.random.key(1))
    q_type = models.policy(by_token, operator.itemgetter("q_type"))
    ways["Q-type, all tokens"] = guidance.guide(reference, q_type, guidance.offset("q_sharp"), None, "previous")
    print("| rows | way | seconds, median | ratio | core seconds, median | ratio |\n|---|---|---|---|---|---|")
    for rows in batches:
        how = sampler.SamplerConfig(max_new_tokens=new_tokens, samples_per_prompt=rows, max_rows=rows, prompt_length=32)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for repeat in range(repeats + 1):  # the first compiles; ways take turns, so that load falls on all
            for name, policy in ways.items():
                began = time.perf_counter(), time.process_time()
                sampler.sample(policy, params, [[1] * 32], sampler.run_key(0, Purpose.ROLLOUT, repeat), how)
                if repeat:
                    times[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
        middle = {name: np.median(np.array(measured), axis=0) for name, measured in times.items()}
        for name, (clock, cores) in middle.items():
            ratios = middle[name] / middle["plain"]
            print(f"| {rows} | {name} | {clock:.3f} | {ratios[0]:.2f} | {cores:.3f} | {ratios[1]:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("runs/q_sharp"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *ROUNDS], default=[*ARMS, *ROUNDS])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--problems", type=int, default=500, help="held out, that the sweep answers")
    parser.add_argument("--coefficients", type=float, nargs="+", default=COEFFICIENTS)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="rows decoded at once, for --speed")
    flags = parser.parse_args()
    if flags.speed:
        speed(flags.rows)
        return
    for arm in flags.arms:
        for seed in flags.seeds:
            one = configured(arm, seed, flags.to)
            summary, found = (
                trained(one),
                swept(
                    replace(one, evaluation=replace(one.evaluation, rows=flags.problems)),
                    flags.samples,
                    ["cd"],
                    flags.coefficients,
                ),
            )
            print(f"\n{arm}, seed {seed}, {summary['seconds']:.0f} s\n")
            show(found, flags.samples)
            pairs = ", ".join(f"{kl:.2f}: {100 * q:.1f} / {100 * cd:.1f}" for kl, q, cd in matched(found["lines"]))
            print(f"\nat KL, Q# / CD: {pairs}", flush=True)


if __name__ == "__main__":
    main()
