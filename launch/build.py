"""From a configuration to the parts of a run. Nothing here loops."""

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
    Policy,
    Purpose,
    Roles,
    Rollout,
    Sampling,
    TrainState,
)


class Language(NamedTuple):
    """The policy's model and its tokenizer."""

    model: Model
    tokenizer: Tokenizer


class Drawn(NamedTuple):
    """One batch of experience, with its part of the metrics row and of samples.jsonl."""

    data: Rollout | Demonstrations
    metrics: dict[str, float]
    records: list[dict[str, Any]]
    warnings: list[str]
    """What people should read at once: reward functions that failed, with name and row."""


BUILTIN = "builtin:"

POLICY_PARAMS = operator.itemgetter("policy")
"""The policy's params in the whole tree; one function, so that what is compiled for it is compiled once."""

Source = Callable[[int, TrainState], Drawn]
"""(step of the run, state) -> experience. Offline sources ignore the state."""

Evaluate = Callable[[Params, bool], dict[str, float]]
"""(the whole params tree, also greedily?) -> metrics of the held-out problems."""


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh over all devices; fsdp -1 is what data and tensor leave."""
    fsdp = config.fsdp if config.fsdp > 0 else max(jax.device_count() // max(config.data * config.tensor, 1), 1)
    return sharding.make_mesh(config.data, fsdp, config.tensor)


# --- models ------------------------------------------------------------------------------------------------------


def language(config: ExperimentConfig, mesh: Mesh) -> tuple[Language, Params]:
    """The model of --model.path, and its weights on the mesh."""
    where = config.model
    tokenizer = load_tokenizer(model_path(config))
    if where.random_init:
        model = models.from_config(model_path(config), dtype=where.dtype, param_dtype=where.param_dtype)
        key = sampler.run_key(config.seed, Purpose.INIT, 0)
        places = sharding.shardings(model.axes, mesh, jax.eval_shape(model.init, key))
        params = jax.jit(model.init, out_shardings=places)(key)
    else:
        model, params = models.load(model_path(config), dtype=where.dtype, param_dtype=where.param_dtype, mesh=mesh)
    return Language(model, tokenizer), params


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
    """The configured algorithm over the roles that it names, each a subtree of the params tree."""
    roles = Roles(**{name: models.role(model, operator.itemgetter(name)) for name in config.algorithm.roles})
    sampling = Sampling(config.sampling.temperature, config.sampling.max_new_tokens)
    return ALGORITHMS[type(config.algorithm)](config.algorithm, roles, sampling)


def policy_of(lang: Language) -> Policy:
    """What samples and answers: the role "policy" of the whole params tree."""
    return models.policy(lang.model, POLICY_PARAMS)


def role_params(config: ExperimentConfig, loaded: Params) -> Params:
    """The whole params tree. A copy has buffers of its own: the policy's are donated step by step."""
    params = {name: loaded for name, spec in config.algorithm.roles.items() if spec.copy_of is None}
    copies = {name: spec.copy_of for name, spec in config.algorithm.roles.items() if spec.copy_of is not None}
    return params | {name: jax.tree.map(jnp.copy, params[source]) for name, source in copies.items()}


def learner(config: ExperimentConfig, algorithm: Algorithm, loaded: Params) -> tuple[TrainState, training.UpdateStep]:
    """The state before the first step, which takes over the loaded params, and the jitted step."""

    def trainable(path: str) -> bool:
        return config.algorithm.roles[path.partition("/")[0]].trainable

    optimizer_steps = config.steps * config.batch.minibatches * config.batch.epochs
    schedule = optimizers.learning_rate(config.optimizer, optimizer_steps)
    optimizer = optimizers.build(config.optimizer, schedule)
    state = training.init_train_state(role_params(config, loaded), algorithm, optimizer, trainable)
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
    """Where the kind of experience comes from that the algorithm learns from."""
    return SOURCES[config.algorithm.experience](config, lang, stream, mesh)


def rollout_source(config: ExperimentConfig, lang: Language, stream: data.RowStream, mesh: Mesh) -> Source:
    """Completions of the stream's prompts by the current policy, scored."""
    policy = policy_of(lang)
    functions = reward_functions(config)
    how = sampler_config(config, lang.tokenizer, config.batch.completions)
    size = config.batch.prompts * config.batch.completions
    longest = config.sampling.max_prompt_tokens

    def draw(step: int, state: TrainState) -> Drawn:
        key = sampler.run_key(config.seed, Purpose.ROLLOUT, step)
        updates = int(state.step)

        def generate(prompts: list[list[int]], row_ids: np.ndarray) -> Rollout:
            return sampler.sample(
                policy, state.params, prompts, key, how, row_ids=row_ids, policy_step=updates, mesh=mesh
            )

        def roll(rows: list[dict[str, Any]], round_: int) -> rollouts.Scored:
            row_ids = round_ * size + np.arange(size)
            return rollouts.roll_out(rows, row_ids, generate, lang.tokenizer, functions, longest)

        scored = rollouts.collect(lambda: next(stream)[1], roll, config.batch.refill_rounds)
        return Drawn(
            scored.rollout, rollouts.metrics(scored), rollouts.records(scored, step), rollouts.warnings(scored)
        )

    return draw


def demonstration_source(config: ExperimentConfig, lang: Language, stream: data.RowStream, mesh: Mesh) -> Source:
    """The stream's demonstrations as they are."""
    del mesh
    length = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens

    def draw(step: int, state: TrainState) -> Drawn:
        del step, state
        return Drawn(data.demonstrations(next(stream)[1], lang.tokenizer, length), {}, [], [])

    return draw


SOURCES = {Rollout: rollout_source, Demonstrations: demonstration_source}


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
    judge = config.evaluation.reward or next(iter(config.reward), None)
    if not rows or judge is None:
        print("note: nothing is evaluated: there are no held-out rows, or no reward that judges them", file=sys.stderr)
        return lambda params, greedy: {}
    if isinstance(config.data, FileData):
        rows = that_fit(config, lang, rows)
    reward = resolve_reward(judge)
    policy = policy_of(lang)
    # The same problems are answered with the same luck, whatever the step: differences are the model's.
    key = sampler.run_key(config.seed, Purpose.EVALUATION, 0)
    # Accuracy is the model's own: nothing of its distribution is cut off.
    plain = replace(sampler_config(config, lang.tokenizer, 1), top_k=None, top_p=None, min_p=None)

    def evaluate(params: Params, greedy: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        for prefix, temperature in (("eval/", 1.0), ("eval/greedy_", 0.0))[: 1 + (greedy and config.evaluation.greedy)]:
            how = replace(plain, temperature=temperature)
            result = evaluation.evaluate(policy, params, lang.tokenizer, rows, reward, how, key, mesh=mesh)
            found |= {
                f"{prefix}accuracy": result.accuracy,
                f"{prefix}accuracy_low": result.low,
                f"{prefix}accuracy_high": result.high,
                f"{prefix}well_formed": result.well_formed,
                f"{prefix}length_mean": result.mean_length,
                f"{prefix}n": result.n,
            }
        return found

    return evaluate


# --- data --------------------------------------------------------------------------------------------------------


def make_stream(config: ExperimentConfig, lang: Language) -> data.RowStream:
    """The training rows, batch by batch, for ever."""
    rows = train_rows(config)
    if isinstance(rows, list) and config.algorithm.experience is Rollout:
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


def train_rows(config: ExperimentConfig) -> data.Source:
    match config.data:
        case ArithmeticData() as task if config.algorithm.experience is Rollout:
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
    elif config.algorithm.experience is Rollout:
        rows = data.read(path, ("prompt",))
    else:
        has_messages = "messages" in data.read(path, ())[0]
        rows = data.read(path, ("messages",) if has_messages else ("prompt", "completion"))
    return [row | {"prompt": instructed(row["prompt"], files.instruction)} if "prompt" in row else row for row in rows]


def instructed(prompt: Any, instruction: str) -> Any:
    if not instruction:
        return prompt
    if isinstance(prompt, str):
        return prompt + instruction
    return [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + instruction}]
