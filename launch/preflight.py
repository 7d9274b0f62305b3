"""What can be wrong with a run's input is said before an accelerator is claimed: flags, data, models, tokenizers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml

from launch import build, compilation_cache, dataset, divisions, hosts, roles, sources
from launch.config import ExperimentConfig, FileData, to_dict
from launch.machine import claim_devices, warn_of_unused_accelerators
from tpu_rl import data, metrics, models, processes, redaction, reward_models, rewards, row_files, tokenizers
from tpu_rl.errors import InputError
from tpu_rl.reward_workers import IsolatedReward
from tpu_rl.types import Model, QExamples, Rollout


def prepare(config: ExperimentConfig) -> None:
    """Checks the run's input, saying aloud what is doubtful, and then starts jax on the devices."""
    for note in check(config):
        print(f"warning: {note}", file=sys.stderr)
    compilation_cache.use()
    claim_devices()
    hosts.require_alike_devices()
    warn_of_unused_accelerators()
    base = models.from_config(roles.model_directory(config))
    for note in divisions.doubts(config, base, build.make_mesh(config.mesh)):
        print(f"note: {note}", file=sys.stderr)


def check(config: ExperimentConfig) -> list[str]:
    """What is doubtful, one line each. Raises InputError for what is wrong. No device is touched.

    What is quick comes first: to load a tokenizer takes seconds, to download a model minutes.
    """
    refuse_secrets(yaml.safe_dump(to_dict(config)).split(), "the configuration")
    if config.wandb and processes.index() == 0:  # which alone writes
        metrics.require_wandb()
    roles.model_path(config.model.path)  # whether there is one is told before data are read
    rows, notes = check_rows(config)
    check_rewards(config, rows)
    directory = roles.model_directory(config)
    model = check_models(config, directory)
    others = (spec.path for spec in roles.specs(config).values() if spec.path is not None)
    roles_own = [models.find_directory(roles.model_path(path)) for path in others]
    hosts.require_alike_models([directory, *roles_own, *reward_directories(config)])
    return notes + small_updates(config, model) + check_tokenizer(directory, model, rows)


def refuse_secrets(words: Sequence[str], where: str = "") -> None:
    """Raises InputError where one of the words is a secret, or a flag that would hold one, without repeating it."""
    for i, word in enumerate(words):
        name = word.partition("=")[0]
        is_flag = word.startswith("--")
        if (is_flag and redaction.NAMES.search(name)) or redaction.redact(word) != word:
            before = words[i - 1] if i and words[i - 1].startswith("--") else ""
            raise InputError(
                "a secret was given as a setting",
                where=where or (name if is_flag else before or f"argument {i + 1}"),
                why="settings are kept in config.yaml, in the shell's history and in lists of processes",
                fix="set an environment variable such as HF_TOKEN or WANDB_API_KEY, and revoke this secret",
            )


# --- models ------------------------------------------------------------------------------------------------------


def check_models(config: ExperimentConfig, directory: Path) -> Model:
    """The model of --model.path. It and those of the roles are looked at by headers and configurations alone."""
    model = models.from_config(directory, dtype=config.model.dtype, param_dtype=config.model.param_dtype)
    check_context(config, directory, json.loads(model.config.source).get("max_position_embeddings"))
    if not config.model.random_init:
        models.check(directory, model)
    for spec in roles.specs(config).values():
        if spec.path is not None:
            other = models.find_directory(roles.model_path(spec.path))
            models.check(other, models.from_config(other))
    cast = roles.role_models(config, model)
    if config.model.router_balance and not any(
        trained.config.experts for stage in config.stages for trained in build.trained(cast, stage).values()
    ):
        fix = "leave it out, or train a mixture"
        raise InputError("no model that learns is a mixture of experts", where="--model.router-balance", fix=fix)
    return model


def small_updates(config: ExperimentConfig, model: Model) -> list[str]:
    """What is doubtful of roles whose weights, or whose heads beside adapters, learn in bfloat16's 8 bits."""
    if config.model.param_dtype != "bfloat16":
        return []
    learning = {name for stage in config.stages for name, spec in stage.algorithm.roles.items() if spec.trainable}
    shapes, found = roles.param_shapes(config, model), {}
    for name in sorted(learning):
        narrow = [path[-1].key for path, leaf in jax.tree.leaves_with_path(shapes[name]) if leaf.dtype == jnp.bfloat16]
        if narrow:
            found[name] = f"the head of {name}" if narrow == ["score"] else name
    if not found:
        return []
    can_be_adapted = not config.model.lora.rank and set(found) <= roles.adaptable(config)
    adapters = ", or adapters, which are float32 (--model.lora.rank 16)" if can_be_adapted else ""
    names = " and ".join(found.values())
    return [
        f"{names} would learn in bfloat16, which loses updates smaller than about a 256th of a weight: "
        "at a learning rate of 1e-6 about 2 % of a model's weights change at all; train float32 masters "
        f"(--model.param-dtype float32){adapters}"
    ]


def check_tokenizer(directory: Path, model: Model, rows: list[data.Row]) -> list[str]:
    """What is doubtful. Raises InputError where the chat template is missing, broken or a bomb, and a row needs it."""
    tokenizer = tokenizers.load(models.tokenizer_directory(directory))
    for row in rows:
        if isinstance(row.get("prompt"), list):
            tokenizer.encode_prompt(row["prompt"])
        if isinstance(row.get("messages"), list):
            tokenizer.render(row["messages"], add_generation_prompt=False)
    beyond = [literal for literal, i in tokenizer.control.items() if i >= model.config.vocab.size]
    return [f"control tokens beyond the embedding: {', '.join(beyond[:5])}"] if beyond else []


def check_context(config: ExperimentConfig, directory: Path, context: Any) -> None:
    """Raises InputError where a prompt with its completion may be longer than the model's context."""
    how = config.sampling
    if isinstance(context, int) and how.max_prompt_tokens + how.max_new_tokens > context:
        raise InputError(
            f"a prompt with its completion may have {how.max_prompt_tokens} + {how.max_new_tokens} tokens",
            where="--sampling.max-prompt-tokens, --sampling.max-new-tokens",
            why=f"the model's context is {context} (max_position_embeddings in {directory / 'config.json'})",
            fix=f"lower one of them, so that together they are at most {context}",
        )


# --- data --------------------------------------------------------------------------------------------------------


def check_rows(config: ExperimentConfig) -> tuple[list[data.Row], list[str]]:
    """(the first row of each kind that the stages read of files, what is doubtful about all of them)."""
    first: list[data.Row] = []
    notes: list[str] = []
    read: set[Any] = set()
    if not isinstance(config.data, FileData):
        return first, notes
    for stage in config.stages:
        needs = stage.algorithm.needs
        kind = (needs.columns, needs.experience, needs.judged)
        if kind in read:
            continue
        read.add(kind)
        train, held_out = dataset.file_rows(config, config.data, needs)
        if needs.experience is not QExamples:
            require_a_batch(config, train)
        notes += row_files.doubts(train, held_out)
        first += train[:1]
    return first, notes


def require_a_batch(config: ExperimentConfig, rows: list[data.Row]) -> None:
    """Raises InputError where a batch would hold a row twice."""
    if len(rows) < config.batch.prompts:
        raise InputError(
            f"{len(rows)} training rows are fewer than a batch of {config.batch.prompts}",
            where="--data.path, --batch.prompts",
            why="a batch would hold rows twice",
            fix=f"give more rows, or --batch.prompts {len(rows)} or less" if rows else "give more rows",
        )


# --- rewards -----------------------------------------------------------------------------------------------------


def check_rewards(config: ExperimentConfig, rows: list[data.Row]) -> None:
    """Raises InputError where a reward function does not load, needs a column that the rows of a file lack, may take
    longer than the watchdog waits, or is another one on another process.

    Trained reward models are left alone: to load one takes a device.
    """
    seconds = 2 * config.reward_limits.batch_seconds * sum(".py:" in name for name in config.reward)
    if 0 < 60 * config.watchdog.minutes <= seconds:
        raise InputError(
            f"the rewards of a batch may take {seconds:g} s, and a run that stands still for so long is ended",
            where="--reward-limits.batch-seconds, --watchdog.minutes",
            why=f"the watchdog waits {60 * config.watchdog.minutes:g} s",
            fix=f"--watchdog.minutes {math.ceil(2 * seconds / 60)}, or lower --reward-limits.batch-seconds",
        )
    untrained = tuple(name for name in reward_names(config) if not Path(name).expanduser().is_dir())
    functions = sources.reward_functions(replace(config, reward=untrained))
    if rows and any(stage.algorithm.needs.experience is Rollout for stage in config.stages):
        # Of no completions at all, only the columns are looked at.
        rewards.score(functions, [], [], {column: [] for column in rows[0] if column != "prompt"})
    for function in functions.values():
        if isinstance(function, IsolatedReward):
            function.stop()
    hosts.require_alike_rewards(untrained)


def reward_names(config: ExperimentConfig) -> list[str]:
    """All that a run scores with, once each."""
    return list(dict.fromkeys(filter(None, (*config.reward, config.evaluation.reward))))


def reward_directories(config: ExperimentConfig) -> list[Path]:
    """Those of trained reward models."""
    trained = (name for name in reward_names(config) if Path(name).expanduser().is_dir())
    return [folder for name in trained for folder in reward_models.directories(name)]
