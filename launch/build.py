"""From a configuration to the parts of a run. Nothing here loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import tpu_rl
from launch.config import ArithmeticData, ExperimentConfig, FileData, MeshConfig
from tpu_rl import (
    data,
    environments,
    evaluation,
    models,
    optimizers,
    packing,
    rewards,
    rollouts,
    sampler,
    sharding,
    training,
)
from tpu_rl.algos import ALGORITHMS
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.tokenizers import load as load_tokenizer
from tpu_rl.types import (
    Algorithm,
    Demonstrations,
    Experience,
    Model,
    Params,
    Purpose,
    Roles,
    Rollout,
    Sampling,
    TrainState,
)


@dataclass(frozen=True)
class Language:
    """The policy model and its tokenizer."""

    model: Model
    params: Params
    """As loaded; a learner that is given them donates them at its first step."""
    tokenizer: Tokenizer


class Drawn(NamedTuple):
    """One batch of experience, with its part of the metrics row and of samples.jsonl."""

    data: Rollout | Demonstrations
    metrics: dict[str, float]
    records: list[dict[str, Any]]


BUILTIN = "builtin:"

Source = Callable[[int, Params], Drawn]
"""(step of the run, the policy's params) -> experience. Offline sources ignore the params."""

Evaluate = Callable[[Params, bool], dict[str, float]]
"""(the policy's params, also greedily?) -> metrics of the held-out problems."""


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh over all devices; fsdp -1 is what data and tensor leave."""
    fsdp = config.fsdp if config.fsdp > 0 else max(jax.device_count() // max(config.data * config.tensor, 1), 1)
    return sharding.make_mesh(config.data, fsdp, config.tensor)


# --- models ------------------------------------------------------------------------------------------------------


def language(config: ExperimentConfig, mesh: Mesh) -> Language:
    """The model of --model.path with its weights on the mesh."""
    where = config.model
    tokenizer = load_tokenizer(model_path(config))
    if where.random_init:
        model = models.from_config(model_path(config), dtype=where.dtype, param_dtype=where.param_dtype)
        key = sampler.run_key(config.seed, Purpose.INIT, 0)
        places = sharding.shardings(model.axes, mesh, jax.eval_shape(model.init, key))
        params = jax.jit(model.init, out_shardings=places)(key)
    else:
        model, params = models.load(model_path(config), dtype=where.dtype, param_dtype=where.param_dtype, mesh=mesh)
    return Language(model, params, tokenizer)


def model_path(config: ExperimentConfig) -> str:
    """Where the model is: a directory or hub id; builtin:NAME is one that ships with the package."""
    path = config.model.path
    if path is None:
        raise InputError("no model given", where="--model.path", fix="give a Hugging Face directory or hub id")
    if not path.startswith(BUILTIN):
        return path
    name, shipped = path.removeprefix(BUILTIN), Path(tpu_rl.__file__).parent / "pretrained"
    if not (shipped / name / "config.json").is_file():
        names = ", ".join(f"{BUILTIN}{child.name}" for child in sorted(shipped.iterdir()))
        raise InputError(f"no shipped model {path}", where="--model.path", fix=f"there is {names}")
    return str(shipped / name)


def build_algorithm(config: ExperimentConfig, model: Model) -> Algorithm:
    """The configured algorithm over roles of the params tree {"policy": ..., "reference": ...}."""
    roles = Roles(models.role(model, lambda params: params["policy"]))
    if config.algorithm.needs_reference:
        roles = roles._replace(reference=models.role(model, lambda params: params["reference"]))
    sampling = Sampling(config.sampling.temperature, config.sampling.max_new_tokens)
    return ALGORITHMS[type(config.algorithm)](config.algorithm, roles, sampling)


def role_params(config: ExperimentConfig, policy: Params) -> Params:
    """The whole params tree. The reference is a copy of its own: the policy's buffers are donated step by step."""
    if not config.algorithm.needs_reference:
        return {"policy": policy}
    return {"policy": policy, "reference": jax.tree.map(jnp.copy, policy)}


def trainable(path: str) -> bool:
    """Only the policy learns."""
    return path.startswith("policy/")


def learner(config: ExperimentConfig, algorithm: Algorithm, policy: Params) -> tuple[TrainState, training.UpdateStep]:
    """The state before the first step and the jitted step."""
    optimizer_steps = config.steps * config.batch.minibatches * config.batch.epochs
    schedule = optimizers.learning_rate(config.optimizer, optimizer_steps)
    optimizer = optimizers.build(config.optimizer, schedule)
    state = training.init_train_state(role_params(config, policy), algorithm, optimizer, trainable)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return state, training.make_update_step(algorithm, optimizer, schedule, trainable, shardings)


# --- experience --------------------------------------------------------------------------------------------------


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


def make_source(config: ExperimentConfig, lang: Language, stream: data.RowStream, mesh: Mesh) -> Source:
    if config.learns_from_rollouts:
        return rollout_source(config, lang, stream, mesh)
    return demonstration_source(config, lang, stream)


def rollout_source(config: ExperimentConfig, lang: Language, stream: data.RowStream, mesh: Mesh) -> Source:
    """Completions of the stream's prompts by the current policy, scored."""
    policy = models.policy(lang.model)
    functions = reward_functions(config)
    how = sampler_config(config, lang.tokenizer, config.batch.completions)
    size = config.batch.prompts * config.batch.completions

    def draw(step: int, params: Params) -> Drawn:
        key = sampler.run_key(config.seed, Purpose.ROLLOUT, step)

        def generate(prompts: list[list[int]], row_ids: np.ndarray) -> Rollout:
            return sampler.sample(policy, params, prompts, key, how, row_ids=row_ids, policy_step=step - 1, mesh=mesh)

        def roll(rows: list[dict[str, Any]], round_: int) -> rollouts.Scored:
            row_ids = round_ * size + np.arange(size)
            return rollouts.roll_out(rows, row_ids, generate, lang.tokenizer, functions, how.prompt_length)

        scored = rollouts.collect(lambda: next(stream)[1], roll, config.batch.refill_rounds)
        return Drawn(scored.rollout, rollouts.metrics(scored), rollouts.records(scored, step))

    return draw


def demonstration_source(config: ExperimentConfig, lang: Language, stream: data.RowStream) -> Source:
    """The stream's demonstrations as they are."""
    length = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens

    def draw(step: int, params: Params) -> Drawn:
        del step, params
        return Drawn(data.demonstrations(next(stream)[1], lang.tokenizer, length), {}, [])

    return draw


def lay_out(config: ExperimentConfig, experience: Rollout | Demonstrations, mesh: Mesh) -> Experience:
    """The experience with its place in packed rows, rows spread over the mesh."""
    layout = packing.lay_out(
        np.asarray(experience.action_mask),
        np.asarray(experience.group_id),
        row_length=config.batch.row_length,
        micro_batch_rows=config.batch.micro_batch_rows,
        minibatches=config.batch.minibatches,
    )

    def place(array: Any) -> jax.Array:
        rows = 2 if np.ndim(array) == 4 else 0
        return jax.device_put(array, sharding.batch_sharding(mesh, np.shape(array), rows))

    return jax.tree.map(place, Experience(experience, layout))


# --- evaluation --------------------------------------------------------------------------------------------------


def evaluator(config: ExperimentConfig, lang: Language, mesh: Mesh) -> Evaluate:
    """Answers the held-out problems at temperature 1 and, where wanted, greedily -> metrics named eval/..."""
    rows = evaluation_rows(config) if config.evaluation.rows else []
    reward = next(iter(reward_functions(config).values()), None)
    if not rows or reward is None:
        return lambda params, greedy: {}
    policy = models.policy(lang.model)
    # The same problems are answered with the same luck, whatever the step: differences are the model's.
    key = sampler.run_key(config.seed, Purpose.EVALUATION, 0)

    def evaluate(params: Params, greedy: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        for prefix, temperature in (("eval/", 1.0), ("eval/greedy_", 0.0))[: 1 + (greedy and config.evaluation.greedy)]:
            how = replace(sampler_config(config, lang.tokenizer, 1), temperature=temperature, top_k=None, top_p=None)
            result = evaluation.evaluate(policy, params, lang.tokenizer, rows, reward, how, key, mesh=mesh)
            found |= {
                f"{prefix}accuracy": result.accuracy,
                f"{prefix}accuracy_low": result.low,
                f"{prefix}accuracy_high": result.high,
                f"{prefix}well_formed": result.well_formed,
                f"{prefix}length_mean": result.mean_length,
            }
        return found

    return evaluate


# --- data --------------------------------------------------------------------------------------------------------


def make_stream(config: ExperimentConfig) -> data.RowStream:
    """The training rows, batch by batch, for ever."""
    return data.stream(train_rows(config), config.seed, config.batch.prompts)


def reward_functions(config: ExperimentConfig) -> dict[str, rewards.Reward]:
    """Name -> function, in the order of --reward."""
    return {Path(name).name.replace(".py:", "."): resolve_reward(name) for name in config.reward}


def resolve_reward(name: str) -> rewards.Reward:
    return rewards.BUILTIN[name] if name in rewards.BUILTIN else rewards.from_path(name)


def train_rows(config: ExperimentConfig) -> data.Source:
    match config.data:
        case ArithmeticData() as task if config.learns_from_rollouts:
            return environments.ArithmeticSource(task.train, "train", seed=config.seed)
        case ArithmeticData() as task:
            return environments.ArithmeticDemonstrations(task.train, config.seed, task.written_share)
        case FileData() as files:
            return file_rows(config, files)[0]


def evaluation_rows(config: ExperimentConfig) -> list[dict[str, Any]]:
    """The fixed held-out problems: the same for every seed and every step."""
    count = config.evaluation.rows
    match config.data:
        case ArithmeticData() as task:
            source = environments.ArithmeticSource(task.evaluation, "eval", seed=0)
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
    else:
        rows = data.read(path, ("prompt",) if config.learns_from_rollouts else ("prompt", "completion"))
    return [row | {"prompt": instructed(row["prompt"], files.instruction)} for row in rows]


def instructed(prompt: Any, instruction: str) -> Any:
    if not instruction:
        return prompt
    if isinstance(prompt, str):
        return prompt + instruction
    return [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + instruction}]
