"""How well a model answers held-out problems: pass@1, greedy accuracy, pass@k and majority votes, with intervals.

    python launch/evaluate.py MODEL_OR_RUN_DIR [--preset PRESET | --data.path FILE] [--samples K]
    python launch/evaluate.py MODEL_OR_RUN_DIR --guide Q_RUN_DIR [--kl-coef 1 0.1 ...] [--baseline cd]

A run folder is judged at its newest checkpoint, on its own held-out problems unless told otherwise. A model is a
directory, a hub id or builtin:arithmetic. Intervals are of 95 %, over problems. With --guide the model is guided by a
run of Q#, at each coefficient; the KL is over the whole vocabulary, before any truncation.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launch import build, compilation_cache, dataset, guide, phases, reward_runs, roles, sources, stored_runs
from launch import config as configuration
from launch.config import DEFAULT_PRESET, ExperimentConfig, FileData, MeshConfig, ModelConfig
from launch.export import load_run
from tpu_rl import evaluation, models, rewards, sampler, stores
from tpu_rl.errors import InputError, TpuRlError
from tpu_rl.evaluation import Estimate, Evaluation
from tpu_rl.types import Params, Purpose

FILE_PRESET = "gsm8k_grpo"
"""Whose settings go with a model and --data.path, where no preset is named."""


@dataclass(frozen=True)
class DataFlags:
    path: str | None = None
    """Problems to answer, JSONL or Parquet, in the format of the preset or run; else its own held-out ones."""


@dataclass(frozen=True)
class Flags:
    model: tyro.conf.Positional[str]
    """A run folder, a model directory, or a hub id."""
    preset: str | None = None
    """Whose problems, reward and lengths; else the run's own, or arithmetic_grpo, or gsm8k_grpo with --data.path."""
    data: DataFlags = DataFlags()
    reward: str | None = None
    """A built-in reward or FILE.py:function; above 0.5 is correct. Else the preset's or run's first."""
    rows: int | None = None
    """At most so many problems; else all of --data.path, or as many as the preset or run evaluates."""
    samples: int = 1
    """Completions of each problem at --temperature."""
    temperature: float = 1.0
    greedy: bool = False
    """Only the most likely completion of each problem."""
    max_new_tokens: int | None = None
    """Most tokens of a completion; else the preset's or run's."""
    seed: int = 0
    guide: str | None = None
    """A run of Q#, whose q guides the model at every --kl-coef, and judges the model's own completions."""
    kl_coef: tuple[float, ...] = ()
    """eta, return a nat: small is strong guidance; else the run's."""
    baseline: tuple[Literal["cd", "fudge"], ...] = ()
    """Also guided in other ways by the same q: controlled decoding by its mean, FUDGE."""


def main(argv: list[str]) -> int:
    flags = tyro.cli(Flags, args=argv, prog="launch/evaluate.py", description=__doc__)
    try:
        check(flags)
        config = settings(flags)
        compilation_cache.use()
        if reward_runs.reading(config.algorithm) is not None:
            report_reward_model(flags)
            return 0
        problems = held_out(config, flags)
        reward = sources.resolve_reward(reward_name(config, flags), config.reward_limits, config.allow_unsandboxed_code)
        language, params = load_language(config, flags)
        if flags.guide is not None:
            report_guided(config, language, params, problems, reward, flags)
            return 0
        report(flags, answer(config, language, params, problems, reward, flags))
    except TpuRlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


def check(flags: Flags) -> None:
    for name, value, least in (("--samples", flags.samples, 1), ("--rows", flags.rows, 1)):
        if value is not None and value < least:
            raise InputError(f"{name} is {value}", where=name, fix=f"use at least {least}")
    if flags.temperature <= 0:
        fix = "use --greedy for the most likely completion"
        raise InputError(f"--temperature is {flags.temperature}", where="--temperature", fix=fix)
    if any(not kl_coef > 0 for kl_coef in flags.kl_coef):
        raise InputError(
            f"--kl-coef {flags.kl_coef}", where="--kl-coef", fix="use numbers above 0; inf is the model alone"
        )


def settings(flags: Flags) -> ExperimentConfig:
    """What to judge by: the preset's data, reward and lengths, or the run's."""
    for run_dir in filter(None, (flags.model, flags.guide)):
        if flags.preset is None and stored_runs.is_run(run_dir):
            return configuration.load(stored_runs.fetched(run_dir) / "config.yaml")
    return configuration.preset(flags.preset or (FILE_PRESET if flags.data.path else DEFAULT_PRESET))


def load_language(config: ExperimentConfig, flags: Flags) -> tuple[roles.Language, Params]:
    """The model to judge: a run's at its newest checkpoint; any other in float32, whatever its training would use."""
    if stores.is_address(flags.model) or stored_runs.is_run(flags.model):
        setup, params, step = load_run(flags.model)
        print(f"{flags.model}, step {step}")
        language = setup.language._replace(model=setup.models["policy"])
        return language, setup.params_of("policy")(params)
    config = replace(config, model=ModelConfig(path=flags.model, attention=config.model.attention))
    mesh = build.make_mesh(MeshConfig())
    language, params = roles.language(config, mesh)
    return language._replace(model=roles.fast_model(config, language.model, mesh)), params


def held_out(config: ExperimentConfig, flags: Flags) -> list[dict[str, Any]]:
    """The problems."""
    if flags.data.path is not None:
        files = config.data if isinstance(config.data, FileData) else FileData()
        return dataset.read_rows(files, flags.data.path, config.algorithm.needs)[: flags.rows]
    is_split = isinstance(config.data, FileData) and config.data.evaluation_path is None
    if flags.rows is not None and not is_split:  # a file's own last rows were held out as the run has it, and no others
        config = replace(config, evaluation=replace(config.evaluation, rows=flags.rows))
    rows = dataset.evaluation_rows(config)[: flags.rows]
    if not rows:
        raise InputError("there are no held-out problems", where="--rows, --data.path", fix="give --data.path")
    if len(rows) < (flags.rows or 0):
        print(f"note: {len(rows)} problems are held out, not {flags.rows}", file=sys.stderr)
    return rows


def reward_name(config: ExperimentConfig, flags: Flags) -> str:
    """What judges: as the run's own evaluations do, where nothing else is said."""
    judge = flags.reward or sources.judge(config)
    if not judge:
        raise InputError("no reward says what is correct", where="--reward", fix="name one or FILE.py:function")
    return judge


def answer(
    config: ExperimentConfig,
    language: roles.Language,
    params: Params,
    problems: list[dict[str, Any]],
    reward: rewards.Reward,
    flags: Flags,
) -> dict[str, Evaluation]:
    """ "sampled" and "greedy" -> what was found; with --greedy only the latter."""
    policy = models.policy(language.model)
    key = sampler.run_key(flags.seed, Purpose.EVALUATION, 0)
    greedy = sampler.SamplerConfig(
        max_new_tokens=flags.max_new_tokens or config.sampling.max_new_tokens,
        temperature=0,
        stop_ids=language.tokenizer.eos_ids,
        pad_id=language.tokenizer.pad_id,
        max_rows=max(config.sampling.max_rows, flags.samples),
    )
    ways = {"greedy": greedy}
    if not flags.greedy:
        ways["sampled"] = replace(greedy, temperature=flags.temperature, samples_per_prompt=flags.samples)
    mesh = build.make_mesh(MeshConfig())
    more: dict[str, Any] = {"mesh": mesh, "stop_at": sources.stop_at(config, language.tokenizer)}
    more |= {"reward_name": sources.shown(reward_name(config, flags))}
    more |= {"max_fault_share": config.reward_limits.fault_share}
    with jax.set_mesh(mesh):
        return {
            name: evaluation.evaluate(policy, params, language.tokenizer, problems, reward, how, key, **more)
            for name, how in ways.items()
        }


def report_guided(
    config: ExperimentConfig,
    language: roles.Language,
    params: Params,
    problems: list[dict[str, Any]],
    reward: rewards.Reward,
    flags: Flags,
) -> None:
    """The model alone, guided at each coefficient, and judged by q."""
    assert flags.guide is not None
    guided = guide.load(flags.guide, language, params)
    how = sources.sampler_config(config, language.tokenizer, flags.samples)
    how = replace(
        how,
        max_new_tokens=flags.max_new_tokens or how.max_new_tokens,
        temperature=flags.temperature,
        max_rows=max(how.max_rows, flags.samples),
    )
    mesh = build.make_mesh(MeshConfig())
    key, name = sampler.run_key(flags.seed, Purpose.EVALUATION, 0), sources.shown(reward_name(config, flags))
    task = guide.Task(language, problems, reward, name, config.reward_limits.fault_share, how, key, mesh)
    with jax.set_mesh(mesh):
        lines, judged = guide.sweep(guided, task, flags.kl_coef or (guided.algorithm.kl_coef,), flags.baseline)
    guide.record(flags.guide, lines, judged)
    guide.report(f"{flags.model} guided by {flags.guide}", lines, judged, flags.samples)


def report(flags: Flags, found: dict[str, Evaluation]) -> None:
    """A table of all measures, and what else one should know."""
    table = Table("", "value", "95 % interval", "problems", title=escape(flags.model))
    for name, measure in measures(flags, found):
        value, low, high = (f"{100 * share:.1f}" for share in measure[:3])
        table.add_row(name, f"{value} %", f"{low} to {high}", str(measure.n))
    console = Console()
    console.print(table)
    for name, result in found.items():
        formed = "well formed" if result.reads_answers else "ended"
        console.print(f"{name}: {100 * result.well_formed:.1f} % {formed}, {result.mean_length:.1f} tokens on average")
        for error in result.errors[:3]:
            console.print(f"{name}, not scored: {error}", style="yellow", markup=False)


def report_reward_model(flags: Flags) -> None:
    """The table of a run that trains a reward model: how it judges what was held out, beside simple rules."""
    setup, params, step = load_run(flags.model)
    print(f"{flags.model}, step {step}")
    stages = phases.stages(setup.config, setup.run_dir, step)
    stage = next(stage for stage in stages if step <= stage.last)
    with jax.set_mesh(setup.mesh):
        lines = reward_runs.held_out_judge(setup, stage, params)(params, True)
    table = Table("", "accuracy", "95 % interval", "problems", title=escape(flags.model))
    for name, (value, low, high, n) in lines:
        table.add_row(name.replace("_", " ") or "reward model", f"{100 * value:.1f} %",
                      f"{100 * low:.1f} to {100 * high:.1f}", str(n))  # fmt: skip
    Console().print(table)


def measures(flags: Flags, found: dict[str, Evaluation]) -> list[tuple[str, Estimate]]:
    """(name, estimate) for each line of the table."""
    lines = []
    if "sampled" in found:
        problems = found["sampled"].problems
        sizes = sorted({1, flags.samples, *(2**i for i in range(flags.samples.bit_length()))})
        lines += [(f"pass@{k}, temperature {flags.temperature:g}", evaluation.pass_at(problems, k)) for k in sizes]
        if flags.samples > 1 and found["sampled"].reads_answers:
            lines.append((f"maj@{flags.samples}", evaluation.majority_vote(problems)))
    result = found["greedy"]
    return [*lines, ("greedy", Estimate(result.accuracy, result.low, result.high, result.n))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
