"""Q# on arithmetic: reference, CD and Q# over coefficients, and ablations, over seeds.

    python research/2026_11/q_sharp.py --to runs/q_sharp [--seeds 0 1 2] [--arms all_v single q_type ...]
        [--samples 8]
    python research/2026_11/q_sharp.py --speed [--run RUN_DIR]

Each run is `launch/run.py arithmetic_q_sharp` with the changes of the arm. Its q then guides
builtin:arithmetic on the held-out problems; the run's report shows the curve. Then prints the gain
of Q# over CD at the same KL, paired over problems. Finished runs are not repeated. --speed compares
the time of guided and plain decoding: of a random model, or of the model and the q of a run.
"""

from __future__ import annotations

import functools
import json
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import arms
import fronts
import jax
import numpy as np

from tpu_rl import models, sampler
from tpu_rl.commands import compose, config, evaluate_q_sharp, evaluators, roles, run, saved_run
from tpu_rl.commands.config import ExperimentConfig, MeshConfig, Phase
from tpu_rl.evaluation import guided_accuracy
from tpu_rl.experience import tasks
from tpu_rl.experience.config import sampler_config
from tpu_rl.losses import return_distributions
from tpu_rl.report import GUIDED_FILE
from tpu_rl.rewards import answer_readers
from tpu_rl.rollout import prompts
from tpu_rl.sampler import guided_policy
from tpu_rl.types import Params, Policy, Purpose

COEFFICIENTS = (1.0, 0.5, 0.2, 0.1, 0.05)
UNBIASED: dict[str, Any] = {"loss_aggregation": "token_mean", "drop_equal_returns": False}
ARMS: dict[str, dict[str, Any]] = {
    "all_v": {},
    "single": {"prefixes": "single"},
    "token_mean": {"loss_aggregation": "token_mean"},
    "unbiased": UNBIASED,
    "unbiased_whole_trunk": {**UNBIASED, "layers": None},
    "q_type": {"q_type": "q", "candidates": None},
    "squared_error": {"distribution": "squared_error"},
    "histogram": {"distribution": "histogram"},
    "whole_trunk": {"layers": None},
    "five_candidates": {"candidates": 5},
}
"""Arm -> changes of the algorithm."""
ROUNDS = {"one_round": 1, "three_rounds": 3}
"""Arm -> rounds of examples."""
MAX_NUM_SEQS = 512


def make_config(arm: str, seed: int, folder: Path) -> ExperimentConfig:
    """Return the preset with the changes of an arm. Rounds have as many steps as in the preset."""
    preset = config.preset("arithmetic_q_sharp")
    base: Any = preset.algorithm
    algorithm = replace(base, **ARMS.get(arm, {}))
    first_steps = preset.phases[0].until
    later_steps = preset.steps - preset.phases[-1].until
    rounds = ROUNDS.get(arm, 1 + len(preset.phases))
    ends = [first_steps + later_steps * k for k in range(rounds)]
    phases = tuple(Phase(algorithm, until=end, reset_roles=("q",)) for end in ends[:-1])
    return replace(
        preset,
        algorithm=algorithm,
        phases=phases,
        steps=ends[-1],
        seed=seed,
        run_dir=str(folder / f"{arm}_{seed}"),
    )


def train(run_config: ExperimentConfig) -> dict[str, Any]:
    """Run the configuration, unless it is finished, and return its summary.json."""
    run_dir = Path(run_config.run_dir)
    start = run_dir.with_suffix(".yaml")
    start.parent.mkdir(parents=True, exist_ok=True)
    config.save(run_config, start)
    code = run.main([str(start), "--run-dir", run_config.run_dir])
    if code:
        raise SystemExit(code)
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def sweep(
    run_config: ExperimentConfig,
    samples: int,
    baselines: Sequence[return_distributions.Method],
    coefficients: Sequence[float] = COEFFICIENTS,
) -> dict[str, Any]:
    """Return the lines of the sweep, and the accuracy of q as a judge.

    They are computed once, and stored in the run folder.
    """
    file = Path(run_config.run_dir) / GUIDED_FILE
    if file.exists():
        stored = json.loads(file.read_text(encoding="utf-8"))
        # Files of earlier versions say nothing of single problems.
        if "problem_accuracy" in stored["lines"][0]:
            return stored
    problems = tasks.evaluation_rows(
        run_config.data, run_config.algorithm.experience, run_config.evaluation.rows
    )
    mesh = compose.make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        language, params = saved_run.load_language(run_config.model.path or "", run_config)
        guided, _ = evaluate_q_sharp.load(run_config.run_dir, language, params)
        settings = sampler_config(run_config.sampling, language.tokenizer, samples)
        task = guided_accuracy.Task(
            problems,
            evaluators.answer_scorer(run_config, language.tokenizer, problems),
            answer_readers(run_config.reward[0]),
            replace(settings, max_num_seqs=MAX_NUM_SEQS),
            run_config.seed,
            mesh,
        )
        lines, judged = guided_accuracy.sweep(guided, task, coefficients, baselines)
    evaluate_q_sharp.record(run_config.run_dir, lines, judged)
    return json.loads(file.read_text(encoding="utf-8"))


def show(result: dict[str, Any], samples: int) -> None:
    """Print a sweep as a table, then the accuracy of q as a judge."""
    arms.print_heading("method", "kl_coef", "pass@1, %", f"maj@{samples}, %", "KL, nats", "tokens")
    for line in result["lines"]:
        arms.print_row(
            line["name"],
            "" if line["kl_coef"] is None else f"{line['kl_coef']:g}",
            percent(line["accuracy"]),
            percent(line["majority"]),
            f"{line['kl']:.3f}",
            f"{line['length']:.1f}",
        )
    for name, estimate in result["judge"]:
        print(f"\n{name}: {percent(estimate)}")


def answers(lines: Sequence[Mapping[str, Any]]) -> list[fronts.Answers]:
    """Return the lines of a sweep by problem, for tests that are paired."""
    converted = []
    for line in lines:
        setting = "" if line["kl_coef"] is None else f"{line['kl_coef']:g}"
        # A completion is right or wrong, so a right one has the full reward.
        accuracy = np.array(line["problem_accuracy"])
        kl = np.array(line["problem_kl"])
        converted.append(fronts.Answers(line["name"], setting, accuracy, accuracy, kl))
    return converted


def percent(estimate: Sequence[float] | None) -> str:
    """Format [accuracy, low, high, ...] in percent; empty for None."""
    if estimate is None:
        return ""
    accuracy, low, high = (100 * value for value in estimate[:3])
    return f"{accuracy:.1f} ({low:.1f} to {high:.1f})"


MASSES = (0.99, 0.95, 0.9)
"""Values of `candidate_mass` below 1 that `--speed` times."""


def time_in_turns(
    policies: Mapping[str, Policy],
    params: Params,
    contexts: Sequence[Sequence[int]],
    settings: sampler.SamplerConfig,
    repeats: int,
) -> dict[str, np.ndarray]:
    """Return, for each policy, medians per token: wall and CPU milliseconds of all cores.

    Policies take turns, so that other work on the machine affects all. The first turn compiles.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in policies}
    for repeat in range(repeats + 1):
        for name, policy in policies.items():
            wall = time.perf_counter()
            cpu = time.process_time()
            key = sampler.run_key(0, Purpose.ROLLOUT, repeat)
            rollout = sampler.sample(policy, params, contexts, key, settings)
            measured = np.array([time.perf_counter() - wall, time.process_time() - cpu])
            if repeat:
                times[name].append(1000 * measured / np.asarray(rollout.action_mask).sum())
    return {name: np.median(measured, axis=0) for name, measured in times.items()}


def print_times(rows: int, times: Mapping[str, np.ndarray]) -> None:
    """Print the times of `time_in_turns` as rows of a table, with ratios to "plain"."""
    for name, (wall, cpu) in times.items():
        wall_ratio, cpu_ratio = times[name] / times["plain"]
        arms.print_row(
            rows, name, f"{wall:.3f}", f"{wall_ratio:.2f}", f"{cpu:.3f}", f"{cpu_ratio:.2f}"
        )


def print_heading_of_times() -> None:
    arms.print_heading(
        "rows", "method", "ms per token, median", "ratio", "core ms per token, median", "ratio"
    )


def trained_speed(
    run_dir: str,
    batches: Sequence[int],
    repeats: int = 3,
    num_prompts: int = 16,
    masses: Sequence[float] = (1.0, *MASSES),
) -> None:
    """Print the time per token of a run's model, plain and guided by the run's q.

    It answers held-out prompts 8 times, as many at once as `batches` say. The time of prompts is
    included.
    """
    context, params, _ = saved_run.load_run(run_dir)
    run_config = context.config
    algorithm: Any = run_config.algorithm
    reference = context.policy("policy")
    policies = {"plain": reference}
    for mass in masses:
        pruned = replace(algorithm, candidate_mass=mass)
        name = f"{algorithm.candidates} candidates, mass {mass:g}"
        policies[name] = roles.guide(reference, context.policy("q"), pruned)
    params = guided_policy.with_kl_coef(params, algorithm.kl_coef)
    tokenizer = context.language.tokenizer
    rows = tasks.evaluation_rows(run_config.data, algorithm.experience, num_prompts)
    encoded = prompts.encode(rows, tokenizer, run_config.sampling.max_prompt_tokens)
    settings = sampler_config(run_config.sampling, tokenizer, 8)
    print_heading_of_times()
    for batch in batches:
        sized = replace(settings, max_num_seqs=batch)
        print_times(batch, time_in_turns(policies, params, encoded, sized, repeats))


def speed(batches: Sequence[int], repeats: int = 3, new_tokens: int = 64) -> None:
    """Print the time per token, plain and guided, of a model with random weights.

    The guides have a quarter of the model's layers: a V-type q with 20 candidates, and a Q-type q
    over all tokens. Random weights make all tokens about as likely, so a mass of 0.99 needs all 20
    candidates; its line shows what it costs where it saves nothing. Fewer candidates show what it
    saves at best.
    """
    layers, width = 8, 256
    model = models.from_config(
        {
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        }
    )
    trunk = models.first_layers(model, layers // 4)
    v_type = models.variant(trunk, num_outputs=1)
    q_type = models.variant(trunk, num_outputs=model.config.vocab.size)
    params = {
        "policy": jax.jit(model.init)(jax.random.key(0)),
        "q": jax.jit(v_type.init)(jax.random.key(1)),
    }
    params = guided_policy.with_kl_coef(params, 0.1)
    params["q_type"] = jax.jit(q_type.init)(jax.random.key(1))
    reference = models.policy(model, evaluate_q_sharp.POLICY_PARAMS)
    v_policy = models.policy(v_type, evaluate_q_sharp.Q_PARAMS)
    q_policy = models.policy(q_type, operator.itemgetter("q_type"))
    offset = return_distributions.offset("q_sharp")
    guide = functools.partial(guided_policy.guide, reference, v_policy, offset)
    policies = {
        "plain": reference,
        "V-type, 20 candidates": guide(20, "own"),
        "V-type, 20 candidates, mass 0.99": guide(20, "own", 0.99),
        **{f"V-type, {count} candidates": guide(count, "own") for count in (8, 4, 2)},
        "Q-type, all tokens": guided_policy.guide(reference, q_policy, offset, None, "previous"),
    }
    print_heading_of_times()
    for rows in batches:
        settings = sampler.SamplerConfig(
            max_new_tokens=new_tokens, samples_per_prompt=rows, max_num_seqs=rows, prompt_length=32
        )
        print_times(rows, time_in_turns(policies, params, [[1] * 32], settings, repeats))


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, default=Path("runs/q_sharp"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *ROUNDS], default=[*ARMS, *ROUNDS])
    parser.add_argument("--samples", type=int, default=8, help="completions per problem")
    parser.add_argument(
        "--problems", type=int, default=500, help="held-out problems that the sweep answers"
    )
    parser.add_argument("--coefficients", type=float, nargs="+", default=COEFFICIENTS)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--run", help="a run of Q#, for --speed")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 64], help="rows decoded at once, for --speed"
    )
    flags = parser.parse_args()
    if flags.speed:
        if flags.run:
            trained_speed(flags.run, flags.rows)
        else:
            speed(flags.rows)
        return
    for arm in flags.arms:
        by_problem = {}
        for seed in flags.seeds:
            run_config = make_config(arm, seed, flags.to)
            summary = train(run_config)
            settings = replace(run_config.evaluation, rows=flags.problems)
            result = sweep(
                replace(run_config, evaluation=settings), flags.samples, ["cd"], flags.coefficients
            )
            print(f"\n{arm}, seed {seed}, {summary['seconds']:.0f} s\n")
            show(result, flags.samples)
            by_problem[seed] = answers(result["lines"])
        print(f"\n{arm}: gain of Q# at the same KL", flush=True)
        fronts.show_all_gains(by_problem)


if __name__ == "__main__":
    main()
