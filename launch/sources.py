"""Where a run's experience comes from: data rows, and what is sampled from them. The other half of `build`."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from launch.config import ArithmeticData, ExperimentConfig, FileData, Stage, StarGraphData
from launch.roles import Language
from tpu_rl import data, environments, models, packing, rewards, rollouts, sampler, sharding
from tpu_rl.algos import AlgorithmConfig, DistillConfig, SftConfig
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


def make_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """Where the kind of experience comes from that the stage's algorithm learns from.

    `params` is the whole tree when the stage begins. A run that is resumed inside the stage has others by then, so
    whoever derives anything from them keeps it in the run folder.
    """
    return SOURCES[stage.algorithm.experience](setup, stage, params)


RollOut = Callable[[int, TrainState, list[data.Row], int], rollouts.Scored]
"""(step of the run, state, rows, id of the first completion in it) -> completions of the rows' prompts, scored."""


def roller(setup: Setup, role: str = "policy") -> RollOut:
    """What completes prompts with a role's model: the group of each prompt, at the run's sampling settings."""
    config, lang = setup.config, setup.language
    policy = models.policy(setup.models[role], POLICY_PARAMS if role == "policy" else operator.itemgetter(role))
    functions = reward_functions(config)
    how = sampler_config(config, lang.tokenizer, config.batch.completions)

    def roll_out(step: int, state: TrainState, rows: list[data.Row], first: int) -> rollouts.Scored:
        key = sampler.run_key(config.seed, Purpose.ROLLOUT, step)
        updates = int(state.step)

        def generate(prompts: list[list[int]], row_ids: np.ndarray) -> Rollout:
            return sampler.sample(
                policy, state.params, prompts, key, how, row_ids=row_ids, policy_step=updates, mesh=setup.mesh
            )

        row_ids = first + np.arange(len(rows) * config.batch.completions)
        longest = config.sampling.max_prompt_tokens
        return rollouts.roll_out(rows, row_ids, generate, lang.tokenizer, functions, longest)

    return roll_out


def rollout_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """Completions of the stream's prompts by the current policy, scored."""
    del params
    config = setup.config
    stream = make_stream(config, stage, setup.language)
    roll_out = roller(setup)
    size = config.batch.prompts * config.batch.completions

    def draw(step: int, state: TrainState) -> Drawn:
        def roll(rows: list[data.Row], round_: int) -> rollouts.Scored:
            return roll_out(step, state, rows, round_ * size)

        scored = rollouts.collect(lambda: next(stream)[1], roll, config.batch.refill_rounds)
        return Drawn(
            scored.rollout, rollouts.metrics(scored), rollouts.records(scored, step), rollouts.warnings(scored)
        )

    return Source(draw, stream.get_state, stream.set_state)


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
    if isinstance(rows, list) and stage.algorithm.experience in (Rollout, Completions) and "prompt" in rows[0]:
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
    return rewards.BUILTIN[name] if name in rewards.BUILTIN else rewards.from_path(name)


def train_rows(config: ExperimentConfig, experience: type) -> data.Source:
    match config.data:
        case ArithmeticData() as task if experience in (Demonstrations, Completions):
            return environments.ArithmeticDemonstrations(task.train, config.seed, task.written_share)
        case ArithmeticData() as task:
            return environments.ArithmeticSource(task.train, "train", seed=config.seed)
        case StarGraphData() as task:
            return environments.StarGraphSource(task.graph, task.split, task.rows, config.seed)
        case FileData() as files:
            return file_rows(config, files)[0]


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


def file_rows(config: ExperimentConfig, files: FileData) -> tuple[list[data.Row], list[data.Row]]:
    """(training rows, held-out rows) of --data.path and --data.evaluation-path."""
    if files.path is None:
        raise InputError("no data given", where="--data.path", fix="give a JSONL or Parquet file")
    rows = read_rows(config, files, files.path)
    if files.evaluation_path is not None:
        return rows, read_rows(config, files, files.evaluation_path)
    held_out = min(config.evaluation.rows, len(rows) // 10)
    return rows[: len(rows) - held_out], rows[len(rows) - held_out :]


def read_rows(config: ExperimentConfig, files: FileData, path: str) -> list[data.Row]:
    """A file's rows with the instruction appended to their prompts."""
    if files.format == "gsm8k":
        rows = [data.gsm8k(row) for row in data.read(path, ("question", "answer"))]
    elif not reads_completions(config.algorithm):
        rows = data.read(path, ("prompt",))
    else:
        samples_too = isinstance(config.algorithm, DistillConfig) and config.algorithm.on_policy > 0
        has_messages = "messages" in data.read(path, ())[0] and not samples_too
        rows = data.read(path, ("messages",) if has_messages else ("prompt", "completion"))
    return [row | {"prompt": instructed(row["prompt"], files.instruction)} if "prompt" in row else row for row in rows]


def reads_completions(algorithm: AlgorithmConfig) -> bool:
    """Whether it learns from the data's completions, not from prompts alone."""
    if isinstance(algorithm, DistillConfig):
        return algorithm.on_policy < 1 and algorithm.off_policy == "data"
    return algorithm.experience not in (Rollout, Completions)


def instructed(prompt: Any, instruction: str) -> Any:
    if not instruction:
        return prompt
    if isinstance(prompt, str):
        return prompt + instruction
    return [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + instruction}]
