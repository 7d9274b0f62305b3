"""Where a run's experience comes from: data rows, and what is sampled from them. The other half of `build`."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from launch.config import ArithmeticData, ExperimentConfig, FileData, Stage, StarGraphData
from launch.roles import Language
from tpu_rl import (
    advantages,
    data,
    environments,
    models,
    packing,
    reward_models,
    rewards,
    rollouts,
    sampler,
    sharding,
)
from tpu_rl.algos import (
    AlgorithmConfig,
    AStarPoConfig,
    DistillConfig,
    DpoConfig,
    KtoConfig,
    ProcessRewardConfig,
    QSharpConfig,
    ReinforceConfig,
    RewardModelConfig,
    SentenceRewardConfig,
    SftConfig,
)
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Completions, Demonstrations, Experience, Model, Pairs, Params, Purpose, Rollout, TrainState

POLICY_PARAMS = operator.itemgetter("policy")
"""The policy's params in the whole tree; one function, so that what is compiled for it is compiled once."""


class Setup(NamedTuple):
    """What all stages of a run share."""

    config: ExperimentConfig
    language: Language
    models: dict[str, Model]
    """The model of each role."""
    mesh: Mesh
    run_dir: Path


class Drawn(NamedTuple):
    """One batch of experience, with its part of the metrics row and of samples.jsonl."""

    data: Any
    """Rollout, Demonstrations, Completions, Pairs or QExamples."""
    metrics: dict[str, float]
    records: list[dict[str, Any]]
    warnings: list[str]
    """What people should read at once: reward functions that failed, with name and row."""


class Source(NamedTuple):
    """Experience, step by step. Its state is JSON values and goes into checkpoints."""

    draw: Callable[[int, TrainState], Drawn]
    """(step of the run, state) -> experience. Offline sources ignore the state."""
    get_state: Callable[[], dict[str, Any]]
    set_state: Callable[[dict[str, Any]], None]


def sampler_config(config: ExperimentConfig, tokenizer: Tokenizer, samples_per_prompt: int) -> sampler.SamplerConfig:
    how = config.sampling
    return sampler.SamplerConfig(
        max_new_tokens=how.max_new_tokens,
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
        min_p=how.min_p,
        stop_ids=tokenizer.eos_ids,
        samples_per_prompt=samples_per_prompt,
        pad_id=tokenizer.pad_id,
        max_rows=how.max_rows,
        prompt_length=how.max_prompt_tokens,
    )


RollOut = Callable[[int, TrainState, list[data.Row], int], rollouts.Scored]
"""(step of the run, state, rows, id of the first completion in it) -> completions of the rows' prompts, scored."""


def roller(
    setup: Setup,
    role: str = "policy",
    completions: int | None = None,
    temperature: float | None = None,
    purpose: Purpose = Purpose.ROLLOUT,
) -> RollOut:
    """What completes prompts with a role's model: the group of each prompt, at the run's sampling settings but for
    those given."""
    config, lang = setup.config, setup.language
    policy = models.policy(setup.models[role], POLICY_PARAMS if role == "policy" else operator.itemgetter(role))
    functions = reward_functions(config)
    group = config.batch.completions if completions is None else completions
    how = sampler_config(config, lang.tokenizer, group)
    if temperature is not None:
        how = replace(how, temperature=temperature)

    def roll_out(step: int, state: TrainState, rows: list[data.Row], first: int) -> rollouts.Scored:
        key = sampler.run_key(config.seed, purpose, step)
        updates = int(state.step)

        def generate(prompts: list[list[int]], row_ids: np.ndarray) -> Rollout:
            return sampler.sample(
                policy, state.params, prompts, key, how, row_ids=row_ids, policy_step=updates, mesh=setup.mesh
            )

        row_ids = first + np.arange(len(rows) * group)
        longest = config.sampling.max_prompt_tokens
        return rollouts.roll_out(rows, row_ids, generate, lang.tokenizer, functions, longest)

    return roll_out


def rollout_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """Completions of the stream's prompts by the current policy, scored."""
    del params
    config = setup.config
    stream = make_stream(config, stage, setup.language)
    roll_out, worth = roller(setup), prompt_values(setup, stage)
    size = config.batch.prompts * config.batch.completions

    def draw(step: int, state: TrainState) -> Drawn:
        def roll(rows: list[data.Row], round_: int) -> rollouts.Scored:
            scored = roll_out(step, state, rows, round_ * size)
            return scored if worth is None else with_baseline(scored, worth(step, state, rows, round_))

        scored = rollouts.collect(lambda: next(stream)[1], roll, config.batch.refill_rounds)
        return Drawn(
            scored.rollout, rollouts.metrics(scored), rollouts.records(scored, step), rollouts.warnings(scored)
        )

    return Source(draw, stream.get_state, stream.set_state)


def prompt_values(setup: Setup, stage: Stage) -> Callable[[int, TrainState, list[data.Row], int], np.ndarray] | None:
    """What tells how much prompts are worth, (step, state, rows, round) -> one number a row, NaN where nothing judged
    it; None where the stage's algorithm asks for none."""
    match stage.algorithm:
        case ReinforceConfig(baseline="greedy"):
            role, count, temperature, beta = "policy", 1, 0.0, 1.0
        case AStarPoConfig(reference_samples=count, value_beta=beta):
            role, temperature = "reference", None
        case _:
            return None
    roll_out = roller(setup, role, count, temperature, Purpose.BASELINE)

    def worth(step: int, state: TrainState, rows: list[data.Row], round_: int) -> np.ndarray:
        earned = roll_out(step, state, rows, round_ * len(rows) * count).rewards.reshape(-1, count)
        # Of one completion it is the reward itself.
        return np.asarray(advantages.optimal_value(jnp.asarray(earned), jnp.isfinite(earned), beta))

    return worth


def with_baseline(scored: rollouts.Scored, values: np.ndarray) -> rollouts.Scored:
    """The completions with what their prompts are worth; those of a prompt without a value are not learned from."""
    baseline = np.repeat(values, len(scored.rewards) // len(values)).astype(np.float32)
    rollout, known = scored.rollout, np.isfinite(baseline)
    baseline = np.where(known, baseline, np.float32(0.0))
    return replace(scored, rollout=replace(rollout, baseline=baseline, scored=rollout.scored & known))


def demonstration_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """The stream's demonstrations as they are."""
    del params
    config, lang = setup.config, setup.language
    stream = make_stream(config, stage, lang)
    length = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens

    def draw(step: int, state: TrainState) -> Drawn:
        del step, state
        return Drawn(data.demonstrations(next(stream)[1], lang.tokenizer, length), {}, [], [])

    return Source(draw, stream.get_state, stream.set_state)


def completion_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """The stream's prompts, a share completed by the policy, the others by a teacher or as the data have them."""
    del params
    algorithm, config, lang = stage.algorithm, setup.config, setup.language
    assert isinstance(algorithm, DistillConfig | SftConfig)
    stream = make_stream(config, stage, lang)
    own = round(algorithm.on_policy * config.batch.prompts)
    by_policy, by_teacher = roller(setup, "policy"), roller(setup, "teacher")
    length = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens

    def draw(step: int, state: TrainState) -> Drawn:
        rows = next(stream)[1]
        drawn, parts = Drawn(None, {}, [], []), []
        if own:
            scored = by_policy(step, state, rows[:own], 0)
            parts.append((scored.rollout, True))
            found = rollouts.metrics(scored)
            drawn = Drawn(None, found, rollouts.records(scored, step), rollouts.warnings(scored))
        if own < len(rows) and algorithm.off_policy == "teacher":
            scored = by_teacher(step, state, rows[own:], own * config.batch.completions)
            parts.append((scored.rollout, False))
            drawn.metrics["distill/teacher_reward"] = rollouts.metrics(scored)["reward/mean"]
            drawn.records.extend(record | {"by": "teacher"} for record in rollouts.records(scored, step))
            drawn.warnings.extend(rollouts.warnings(scored))
        elif own < len(rows):
            parts.append((data.demonstrations(rows[own:], lang.tokenizer, length), False))
        return drawn._replace(data=together(parts))

    return Source(draw, stream.get_state, stream.set_state)


def together(parts: list[tuple[Rollout | Demonstrations, bool]]) -> Completions:
    """Texts and whether they are the policy's own, as one batch; groups are numbered anew."""
    length = max(texts.tokens.shape[1] for texts, _ in parts)
    groups, columns = 0, []
    for texts, on_policy in parts:
        wider = ((0, 0), (0, length - texts.tokens.shape[1]))
        group_id = groups + np.unique(np.asarray(texts.group_id), return_inverse=True)[1]
        groups = int(group_id.max()) + 1
        tokens, mask = np.pad(np.asarray(texts.tokens), wider), np.pad(np.asarray(texts.action_mask), wider)
        columns.append((tokens, mask, group_id.astype(np.int32), np.full(len(tokens), on_policy)))
    arrays: list[Any] = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    return Completions(*arrays)


SOURCES: dict[type, Callable[[Setup, Stage, Params], Source]] = {
    Rollout: rollout_source,
    Demonstrations: demonstration_source,
    Completions: completion_source,
}


def lay_out(config: ExperimentConfig, experience: Any, mesh: Mesh) -> Experience:
    """The experience with its place in packed rows, rows spread over the mesh."""
    layout = packing.lay_out(
        np.asarray(experience.action_mask),
        np.asarray(experience.group_id),
        row_length=config.batch.row_length,
        micro_batch_rows=config.batch.micro_batch_rows,
        minibatches=config.batch.minibatches,
        whole_groups=isinstance(experience, Pairs),
    )

    def place(array: Any) -> jax.Array:
        rows = 2 if np.ndim(array) == 4 else 0
        return jax.device_put(array, sharding.batch_sharding(mesh, np.shape(array), rows))

    return jax.tree.map(place, Experience(experience, layout))


# --- data --------------------------------------------------------------------------------------------------------


def make_stream(config: ExperimentConfig, stage: Stage, lang: Language) -> data.RowStream:
    """The training rows, batch by batch, for ever."""
    rows = train_rows(config, stage.algorithm.experience)
    if isinstance(rows, list) and stage.algorithm.experience in (Rollout, Completions, Pairs) and "prompt" in rows[0]:
        rows = that_fit(config, lang, rows)
    return data.stream(rows, config.seed, config.batch.prompts)


def that_fit(config: ExperimentConfig, lang: Language, rows: list[data.Row]) -> list[data.Row]:
    """The rows whose prompts are not too long; how many were, is said."""
    kept, message = rollouts.check_prompts(rows, lang.tokenizer, config.sampling.max_prompt_tokens)
    if message:
        print(f"warning: {message}", file=sys.stderr)
    return kept


def reward_functions(config: ExperimentConfig) -> dict[str, rewards.Reward]:
    """Name -> function, in the order of --reward."""
    return {Path(name).name.replace(".py:", "."): resolve_reward(name) for name in config.reward}


def resolve_reward(name: str) -> rewards.Reward:
    """A built-in reward, a function of FILE.py:function, or a trained reward model: its directory or its run's."""
    if name in rewards.BUILTIN:
        return rewards.BUILTIN[name]
    if Path(name).expanduser().is_dir():
        return reward_models.load(name)
    return rewards.from_path(name)


def train_rows(config: ExperimentConfig, experience: type) -> data.Source:
    match config.data:
        case ArithmeticData() as task if experience in (Demonstrations, Completions):
            return environments.ArithmeticDemonstrations(task.train, config.seed, task.written_share)
        case ArithmeticData() as task:
            return environments.ArithmeticSource(task.train, "train", seed=config.seed)
        case StarGraphData() as task:
            return environments.StarGraphSource(task.graph, task.split, task.rows, config.seed)
        case FileData() as files:
            return file_rows(config, files, experience)[0]


def evaluation_rows(config: ExperimentConfig) -> list[dict[str, Any]]:
    """The fixed held-out problems: the same for every seed and every step."""
    count = config.evaluation.rows
    match config.data:
        case ArithmeticData() as task:
            source = environments.ArithmeticSource(task.evaluation, "eval", seed=0)
            return [source[i] for i in range(count)]
        case StarGraphData() as task:
            source = environments.StarGraphSource(task.graph, "eval", count)
            return [source[i] for i in range(count)]
        case FileData() as files:
            return file_rows(config, files)[1][:count]


def file_rows(
    config: ExperimentConfig, files: FileData, experience: type | None = None
) -> tuple[list[data.Row], list[data.Row]]:
    """(training rows, held-out rows) of --data.path and --data.evaluation-path."""
    if files.path is None:
        raise InputError("no data given", where="--data.path", fix="give a JSONL or Parquet file")
    if files.format == "gsm8k_solutions":
        return solution_rows(config, files, experience or config.algorithm.experience)
    rows = read_rows(config, files, files.path)
    if files.evaluation_path is not None:
        return rows, read_rows(config, files, files.evaluation_path)
    held_out = min(config.evaluation.rows, len(rows) // 10)
    return rows[: len(rows) - held_out], rows[len(rows) - held_out :]


def solution_rows(config: ExperimentConfig, files: FileData, experience: type) -> tuple[list[data.Row], list[data.Row]]:
    """(training rows, held-out rows) from judged solutions, of different problems; one problem in four is held out.

    Right against wrong solutions of a problem as pairs; for algorithms of judged completions each by itself; for
    demonstrations those that are right.
    """

    def read(path: str) -> list[list[data.Row]]:
        problems = data.read(path, ("question",))
        return [data.gsm8k_solutions(row, number) for number, row in enumerate(problems)]

    def rows_of(problems: list[list[data.Row]]) -> list[data.Row]:
        if experience is Pairs and not learns_from_judged(config.algorithm):
            problems = [data.right_against_wrong(solutions) for solutions in problems]
        rows = [row for solutions in problems for row in solutions if experience is Pairs or row["label"]]
        return [row | {"prompt": instructed(row["prompt"], files.instruction)} for row in rows]

    problems = read(str(files.path))
    if files.evaluation_path is not None:
        return rows_of(problems), rows_of(read(files.evaluation_path))
    last = len(problems) - min(config.evaluation.rows, len(problems) // 4)
    return rows_of(problems[:last]), rows_of(problems[last:])


def read_rows(config: ExperimentConfig, files: FileData, path: str) -> list[data.Row]:
    """A file's rows with the instruction appended to their prompts."""
    if files.format == "gsm8k":
        rows = [data.gsm8k(row) for row in data.read(path, ("question", "answer"))]
    elif config.algorithm.experience is Pairs and who_samples(config.algorithm) is None:
        judged = learns_from_judged(config.algorithm)
        rows = data.read(path, ("prompt", "completion", "label") if judged else ("prompt", "chosen", "rejected"))
    elif isinstance(config.algorithm, ProcessRewardConfig) and who_samples(config.algorithm) is None:
        rows = data.read(path, ("prompt", "completions", "labels"))
    elif not reads_completions(config.algorithm):
        rows = data.read(path, ("prompt",))
    else:
        samples_too = isinstance(config.algorithm, DistillConfig) and config.algorithm.on_policy > 0
        has_messages = "messages" in data.read(path, ())[0] and not samples_too
        rows = data.read(path, ("messages",) if has_messages else ("prompt", "completion"))
    return [row | {"prompt": instructed(row["prompt"], files.instruction)} if "prompt" in row else row for row in rows]


def who_samples(algorithm: AlgorithmConfig) -> str | None:
    """The role whose completions an algorithm of pairs learns from; None where the data bring them."""
    match algorithm:
        case DpoConfig(pairs=role) | KtoConfig(pairs=role):
            return None if role == "given" else role
        case RewardModelConfig(pairs=role) | SentenceRewardConfig(pairs=role) | ProcessRewardConfig(steps=role):
            return None if role == "given" else role
    return None


def learns_from_judged(algorithm: AlgorithmConfig) -> bool:
    """Whether it takes completions one by one, and not in pairs."""
    return isinstance(algorithm, KtoConfig)


def wants_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether it wants the data's completions with the reference's log-probs."""
    match algorithm:
        case DpoConfig():
            return algorithm.reference == "data"
        case KtoConfig():
            return True
    return False


def reads_completions(algorithm: AlgorithmConfig) -> bool:
    """Whether it learns from the data's completions, not from prompts alone."""
    if isinstance(algorithm, DistillConfig):
        return algorithm.on_policy < 1 and algorithm.off_policy == "data"
    if isinstance(algorithm, QSharpConfig):
        return False
    return algorithm.experience not in (Rollout, Completions) and who_samples(algorithm) is None


def instructed(prompt: Any, instruction: str) -> Any:
    if not instruction:
        return prompt
    if isinstance(prompt, str):
        return prompt + instruction
    return [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + instruction}]
