"""Checks of a run's input before an accelerator is claimed: flags, data, models, tokenizers.

Checks raise InputError for what is wrong, and return warnings, one line each, about what is only
doubtful. Fast checks come first: to load a tokenizer takes seconds, to download a model minutes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml

from tpu_rl import data, metrics, models, ranges, rewards, tokenizers, untrusted_files, wings
from tpu_rl.algorithm_spec import SourceName
from tpu_rl.algos.grpo import GrpoConfig
from tpu_rl.commands import compose, micro_batches, roles
from tpu_rl.commands.checks import config_checks, row_checks
from tpu_rl.commands.config import ExperimentConfig, FileData, SamplingConfig, Stage, to_dict
from tpu_rl.diagnosis import host_agreement
from tpu_rl.diagnosis.secret_settings import refuse_secrets
from tpu_rl.errors import InputError, located, printable
from tpu_rl.experience.config import DataConfig
from tpu_rl.experience.rows import tasks
from tpu_rl.experience.transforms import text_of_column
from tpu_rl.rewards import registry
from tpu_rl.rewards.worker_pool import IsolatedReward
from tpu_rl.rollout import scoring
from tpu_rl.rollout.scoring import ENVIRONMENT
from tpu_rl.runtime import compilation_cache, processes
from tpu_rl.runtime.host import (
    claim_devices,
    exact_settings,
    forbid_tensor_float32,
    warn_of_unused_accelerators,
)
from tpu_rl.sampler.config import check_logit_bias
from tpu_rl.tokenizers import end_of_sequence
from tpu_rl.types import Model, QExamples


def prepare(config: ExperimentConfig) -> None:
    """Check the run's input, print warnings, and then start JAX on the devices."""
    for warning in check(config):
        print(f"warning: {printable(warning)}", file=sys.stderr)
    compilation_cache.enable()
    if config.model.exact_sampling:
        os.environ |= exact_settings(os.environ)
    claim_devices()
    compilation_cache.fit_processes()
    if config.model.dtype == "float32":
        forbid_tensor_float32()
    host_agreement.require_same_devices()
    warn_of_unused_accelerators()
    base = roles.from_config(config, roles.model_directory(config))
    devices = compose.share_devices(config, model=base)
    for note in micro_batches.notes(config, base, devices.mesh, len(devices.sampler)):
        print(f"note: {note}", file=sys.stderr)


def check(config: ExperimentConfig, needs_weights: bool = True) -> list[str]:
    """Return warnings about a run's input, or raise InputError. Touches no device.

    Weights of a model of the hub are downloaded only if they are needed.
    """
    from tpu_rl.commands import continued

    refuse_secrets(yaml.safe_dump(to_dict(config)).split(), "the configuration")
    if processes.index() == 0:  # The only process that writes.
        for dashboard in metrics.DASHBOARDS:
            if ranges.is_on(config, dashboard):
                metrics.require(dashboard)
    roles.model_path(config.model.path)  # Report a missing model before reading data.
    rows, warnings = check_rows(config)
    check_processes(config)
    check_environment(config, rows)
    if config.agent:
        compose.agent(config)  # It loads.
    if config.evaluation.tasks:
        wings.MODULES["harness"].load_tasks(config.evaluation.tasks)
    warnings += check_warmup(config)
    require_reward(config)
    check_rewards(config, rows)
    if config.optimizer.continued and needs_weights:
        continued.run_of(config)
    directory, role_directories = find_models(config, needs_weights)
    model = check_models(config, directory, list(role_directories.values()), needs_weights)
    host_agreement.require_same_models(
        [directory, *role_directories.values(), *reward_directories(config)]
    )
    warnings += check_param_dtype(config, model)
    tokenizer = roles.load_tokenizer(config, directory)
    if config.evaluation.apply_chat_template:
        wings.MODULES["harness"].require_chat_template(tokenizer)
    if config.agent and not tokenizer.has_chat_template:
        require_texts(config.data)
    if config.agent and config.rollout.partial:
        wings.MODULES["agents"].refuse_images(tokenizer)
    check_thoughts(config, tokenizer)
    for name, role_directory in role_directories.items():
        tokenizers.require_same_tokens(tokenizer, role_directory, name)
    if any(stage.algorithm.experience.sampled_by for stage in config.stages):
        note = ignored_generation_settings(directory, config.sampling)
        if note:
            print(f"note: {note}", file=sys.stderr)
    warnings += row_checks.check(config, tokenizer, model.config.vocab.size)
    warnings += check_tokenizer(config, tokenizer, model, rows)
    check_sets(config, tokenizer)
    environment = compose.environment(config)
    prompts = [row["prompt"] for row in rows if "prompt" in row]
    if environment is not None and not prompts:
        require_fit = wings.MODULES["episodes"].require_fit
        require_fit(tokenizer, environment.pool, tokenizer.has_chat_template)
    if environment is not None and prompts:
        is_chat = not isinstance(prompts[0], str) or tokenizer.wraps(prompts[0])
        require_fit = wings.MODULES["episodes"].require_fit
        require_fit(tokenizer, environment.pool, is_chat, prompts[0])
        has_tools = any(known.tools for known in environment.pool.descriptions.values())
        if is_chat and has_tools and compose.tool_tokens(environment, tokenizer) == 0:
            warnings.append(
                "the chat template does not show tools, so the model does not know them; describe "
                "them in --data.system, or give a template that shows them "
                "(--tokenizer.chat-template)"
            )
    return warnings


def check_warmup(config: ExperimentConfig) -> list[str]:
    """Return a warning if the learning rate of a stage never reaches its peak."""
    warmup = config.optimizer.warmup_steps
    updates = min(compose.optimizer_steps(config, stage) for stage in config.stages)
    if warmup <= updates:
        return []
    part = "the run" if len(config.stages) == 1 else "the shortest phase"
    return [
        f"the warm-up has {warmup} updates and {part} {updates}, so the learning rate ends at "
        f"{updates / warmup:.0%} of --optimizer.learning-rate; lower --optimizer.warmup-steps"
    ]


WITHOUT_EFFECT = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Setting of generation_config.json, which a flag of the same name sets -> value that changes
nothing."""
WITHOUT_FLAG = ("suppress_tokens", "bad_words_ids", "no_repeat_ngram_size", "min_new_tokens")
"""Settings of generation_config.json that nothing here follows."""


def ignored_generation_settings(directory: Path, sampling: SamplingConfig) -> str:
    """Return a note about what a model's generation_config.json asks of a sampler and no flag sets.

    The policy gradient is that of the distribution that is sampled, so completions are sampled as
    flags say. vLLM, and trainers that use it, follow the file by default.
    """
    file = directory / end_of_sequence.FILE
    source = untrusted_files.read_json(file) if file.is_file() else {}
    by_flag = [
        name
        for name, neutral in WITHOUT_EFFECT.items()
        if source.get(name) not in (None, neutral) and not ranges.is_set(sampling, name)
    ]
    if source.get("do_sample") is False:
        by_flag = [name for name in by_flag if name == "repetition_penalty"]
    others = [name for name in WITHOUT_FLAG if source.get(name)]
    if not by_flag and not others:
        return ""
    settings = ", ".join([*(f"{name} {source[name]}" for name in by_flag), *others])
    flags = ", ".join(f"--sampling.{name.replace('_', '-')}" for name in by_flag)
    remedy = f"; to follow it: {flags}" if flags else ""
    return f"completions are sampled without what {file.name} says ({settings}){remedy}"


def find_models(
    config: ExperimentConfig, needs_weights: bool = True
) -> tuple[Path, dict[str, Path]]:
    """Return the directory of --model.path, and those of the roles that start as other models.

    Raises InputError if one is neither a directory nor a model of the hub.
    """
    find = models.find_directory if needs_weights else models.find_configuration
    find_base = models.find_configuration if config.model.random_init else find
    directory = find_base(roles.model_path(config.model.path))
    role_directories = {
        name: find(roles.model_path(spec.path))
        for name, spec in roles.specs(config).items()
        if spec.path is not None
    }
    return directory, role_directories


def check_models(
    config: ExperimentConfig,
    directory: Path,
    role_directories: Sequence[Path],
    needs_weights: bool = True,
) -> Model:
    """Return the model of --model.path after checking it and the models of the roles.

    Only configurations and the headers of weight files are read. For `needs_weights` see `check`.
    """
    model = roles.from_config(config, directory)
    context = json.loads(model.config.source).get("max_position_embeddings")
    check_context(config.sampling, context, directory / "config.json")
    if not config.model.random_init:
        check_weights(directory, model, needs_weights)
    for role_directory in role_directories:
        check_weights(role_directory, models.from_config(role_directory), needs_weights)
    role_models = roles.role_models(config, model)
    for role_model in role_models.values():
        role_model.config.require_length(config.batch.row_length, "--batch.row-length")
    trains_mixture = any(
        trained.config.moe
        for stage in config.stages
        for trained in compose.trained_models(role_models, stage).values()
    )
    if config.model.router_balance and not trains_mixture:
        raise InputError(
            "no model that learns is a mixture of experts",
            where="--model.router-balance",
            fix="leave it out, or train a mixture",
        )
    return model


def check_weights(directory: Path, model: Model, needs_weights: bool) -> None:
    """Raise InputError if the weights of a model are missing, or do not fit it.

    The snapshot of a model of the hub may be without them unless they are needed.
    """
    is_snapshot = directory.parent.name == "snapshots"
    if needs_weights or not is_snapshot or any(directory.glob("*.safetensors")):
        models.check(directory, model)


def check_context(sampling: SamplingConfig, context: Any, config_path: Path) -> None:
    """Raise InputError if a prompt with its completion may exceed the model's context.

    Args:
      context: the model's context in tokens; anything but an int means that it is unknown.
      config_path: the file that states the context.
    """
    prompt_tokens = sampling.max_prompt_tokens
    new_tokens = sampling.max_new_tokens
    if isinstance(context, int) and prompt_tokens + new_tokens > context:
        raise InputError(
            f"a prompt with its completion may have {prompt_tokens} + {new_tokens} tokens",
            where="--sampling.max-prompt-tokens, --sampling.max-new-tokens",
            why=f"the model's context is {context} (max_position_embeddings in {config_path})",
            fix=f"lower one of them, so that together they are at most {context}, such as "
            f"--sampling.max-prompt-tokens {context // 2} --sampling.max-new-tokens {context // 2}",
        )


def check_param_dtype(config: ExperimentConfig, model: Model) -> list[str]:
    """Warn about trainable weights in bfloat16, whose 8 bits lose small updates."""
    if config.model.param_dtype != "bfloat16":
        return []
    trainable = {
        name
        for stage in config.stages
        for name, spec in stage.algorithm.roles.items()
        if spec.trainable
    }
    shapes = roles.param_shapes(config, model)
    affected: dict[str, str] = {}  # Role -> its description.
    for name in sorted(trainable):
        leaves = jax.tree.leaves_with_path(shapes[name])
        bfloat16_names = [path[-1].key for path, leaf in leaves if leaf.dtype == jnp.bfloat16]
        if bfloat16_names:
            affected[name] = f"the head of {name}" if bfloat16_names == ["score"] else name
    if not affected:
        return []
    adapters = ""
    if not config.model.lora.rank and set(affected) <= roles.adaptable(config):
        adapters = ", or adapters, which are float32 (--model.lora.rank 16)"
    return [
        f"{' and '.join(affected.values())} would learn in bfloat16, which loses updates smaller "
        "than about a 256th of a weight: at a learning rate of 1e-6 about 2 % of a model's weights "
        "change at all; train float32 masters (--model.param-dtype float32)" + adapters
    ]


def check_tokenizer(
    config: ExperimentConfig, tokenizer: tokenizers.Tokenizer, model: Model, rows: list[data.Row]
) -> list[str]:
    """Return warnings about the tokenizer.

    Raises InputError if a row needs a chat template, and the template is missing, broken, takes too
    long, or does not show what the assistant wrote.
    """
    learns_messages = any(_learns_messages(stage) for stage in config.stages)
    prompt_rows = []
    for row in rows:
        if learns_messages and "messages" in row:
            tokenizer.encode_demonstration(row["messages"], tools=row.get("tools"))
        elif "prompt" in row:
            tokenizer.encode_prompt(row["prompt"], row.get("tools"))
            prompt_rows.append(row)
    vocab_size = model.config.vocab.size
    with located("--sampling.logit-bias"):
        check_logit_bias(config.sampling.logit_bias, vocab_size)
    warnings = check_embedding(tokenizer, vocab_size)
    if note_wrapped_prompts(tokenizer, prompt_rows):
        refuse_raw_prompts(config)
        return warnings
    is_plain = any(isinstance(row["prompt"], str) and row["prompt"] for row in prompt_rows)
    if is_plain and tokenizer.has_chat_template:
        warnings.append(
            "prompts are plain text to continue, but the model has a chat template, so it expects "
            "conversations; --data.chat auto wraps prompts"
        )
    return warnings


def check_embedding(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> list[str]:
    """Return warnings about control tokens without a row in the embedding.

    Raises InputError if one of them ends a completion, or if the chat template writes one.
    """
    beyond = {i: text for text, i in tokenizer.control.items() if i >= vocab_size}
    if not beyond:
        return []
    written = [tokenizer.eos_ids[0], tokenizer.turn_end]
    if tokenizer.has_chat_template:
        question, answer = ({"role": role, "content": "a"} for role in ("user", "assistant"))
        for messages in ([question], [question, answer]):
            with suppress(InputError):
                written += tokenizer.render(messages)
    needed = [beyond[i] for i in dict.fromkeys(written) if i in beyond]
    if needed:
        raise row_checks.embedding_error(needed, vocab_size)
    return [f"control tokens beyond the embedding: {', '.join([*beyond.values()][:5])}"]


def note_wrapped_prompts(tokenizer: tokenizers.Tokenizer, rows: list[data.Row]) -> bool:
    """Print a note if the chat template wraps plain prompts; return whether it does."""
    is_wrapped = any(tokenizer.wraps(row.get("prompt")) for row in rows)
    if is_wrapped:
        print(
            "note: prompts are wrapped by the model's chat template; --data.chat never turns it "
            "off",
            file=sys.stderr,
        )
    return is_wrapped


def refuse_raw_prompts(config: ExperimentConfig) -> None:
    """Raise InputError for a reward whose models read plain prompts as they are."""
    names = (*config.reward_names, *config.evaluation_rewards)
    parts = [part for name in names for part in registry.parts_of(name)]
    if any(registry.settings_of(part)[0] == "implicit" for part in parts):
        raise InputError(
            "the policy reads prompts in its chat template, and the models of `implicit` do not",
            where="--reward implicit(...), --data.path",
            why="log-probs of one text after two prompts have no meaning as a ratio",
            fix="write `prompt` as messages, which each model reads in its own template, or say "
            "--data.chat never",
        )


def _learns_messages(stage: Stage) -> bool:
    return stage.algorithm.experience.columns[0] == "messages"


def check_thoughts(config: ExperimentConfig, tokenizer: tokenizers.Tokenizer) -> None:
    """Print what ends a thought, where an algorithm weighs thoughts.

    Raises InputError if nothing ends them, or the tokenizer lacks an id of the end.
    """
    algorithms = [stage.algorithm for stage in config.stages]
    for algorithm in (a for a in algorithms if isinstance(a, GrpoConfig) and a.thought_weight != 1):
        if not algorithm.thought_end:
            close = config.sampling.thinking.close
            ids = " ".join(map(str, tokenizer.encode(close, special=True)))
            raise InputError(
                "nothing says where a thought ends",
                where="--algorithm.thought-weight",
                fix=f"give the ids of its end: {close} is --algorithm.thought-end {ids}",
            )
        if max(algorithm.thought_end) >= tokenizer.vocab_size:
            raise InputError(
                f"no token has the id {max(algorithm.thought_end)}",
                where="--algorithm.thought-end",
                why=f"the tokenizer has the ids 0 to {tokenizer.vocab_size - 1}",
            )
        text = tokenizer.decode(list(algorithm.thought_end), skip_special=False)
        print(f"note: thoughts end with {text!r} (--algorithm.thought-end)", file=sys.stderr)


# --- data ---


def check_rows(config: ExperimentConfig) -> tuple[list[data.Row], list[str]]:
    """Check the rows of --data.path.

    Returns:
      (the first row of each kind that the stages read, warnings about all rows).
    """
    from tpu_rl.data import files

    first_rows: list[data.Row] = []
    warnings: list[str] = []
    if not isinstance(config.data, FileData):
        return first_rows, warnings
    checked: set[Any] = set()
    check_shares(config.data)
    for stage in config.stages:
        spec = stage.algorithm.experience
        kind = (spec.columns, spec.kind, spec.graded)
        if kind in checked:
            continue
        checked.add(kind)
        train, held_out = tasks.file_rows(config.data, spec, config.evaluation.rows)
        if config.data.weights:
            data.rows_of_parts(train, len(config.data.weights))
        if 0 < len(held_out) < config.evaluation.rows and config.data.evaluation_path is None:
            warnings.append(
                f"{len(held_out)} of {len(train) + len(held_out)} rows are held out, not "
                f"{config.evaluation.rows}: the end of the file, a small share of it at most; "
                "--data.evaluation-path gives others"
            )
        if spec.kind is not QExamples:
            require_full_batch(train, config.batch.prompts)
        sample = data.sample(train)
        if sample is not train:
            print(
                f"note: of {len(train):,} training rows, {len(sample):,} are checked now, and "
                "each of the others when it is drawn",
                file=sys.stderr,
            )
        environment = compose.environment(config)
        if environment is not None:
            require_values = wings.MODULES["episodes"].require_values
            require_values(environment.pool, [*sample, *held_out])
        is_prompt_all = not config.converses
        warnings += files.warnings(train, held_out, compares_prompts=is_prompt_all)
        first_rows += train[:1]
        if _learns_messages(stage):
            # Only conversations of several turns show whether a template rewrites earlier ones.
            several = (row for row in data.sample(train)[1:] if _has_several_answers(row))
            first_rows += itertools.islice(several, 1)
    return first_rows, warnings


def require_texts(data_config: DataConfig) -> None:
    """Raise InputError unless an agent's rows are plain texts, so that it asks for completions."""
    if isinstance(data_config, FileData) and data_config.chat != "never":
        raise InputError(
            "the model has no chat template, so that every chat of the agent would fail",
            where="--agent, --model.path",
            fix="use a chat model, give --tokenizer.chat-template FILE, or say --data.chat never: "
            "the agent asks for completions of texts only",
        )


def check_shares(files: FileData) -> None:
    """Raise InputError unless --data.weights has a number above 0 for each part of --data.path."""
    parts = data.names_of(files.path or "")
    is_valid = all(0 < weight < math.inf for weight in files.weights)
    if files.weights and not (is_valid and len(files.weights) == len(parts)):
        raise InputError(
            f"--data.weights {' '.join(f'{weight:g}' for weight in files.weights)}",
            where="--data.weights",
            why=f"--data.path has {len(parts)} part(s): {', '.join(parts)[:200]}",
            fix="give a number above 0 for each, as in --data.path a.jsonl,b.jsonl "
            "--data.weights 0.7 0.3",
        )


def _has_several_answers(row: data.Row) -> bool:
    messages = row.get("messages")
    return (
        isinstance(messages, list)
        and sum(message.get("role") == "assistant" for message in messages) > 1
    )


def require_full_batch(rows: Sequence[data.Row], batch_size: int) -> None:
    """Raise InputError if there are fewer rows than a batch holds."""
    if len(rows) >= batch_size:
        return
    fix = f"give more rows, or --batch.prompts {len(rows)} or less" if rows else "give more rows"
    raise InputError(
        f"{len(rows)} training rows are fewer than a batch of {batch_size}",
        where="--data.path, --batch.prompts",
        why="a batch would hold rows twice",
        fix=fix,
    )


# --- rewards ---

REWARDED: set[SourceName] = {"rollouts", "accepted", "q_examples"}
"""Sources whose experience depends on rewards."""


def require_reward(config: ExperimentConfig) -> None:
    """Raise InputError if a stage learns from rewards and none is given."""
    sources = {stage.algorithm.experience.source for stage in config.stages}
    environment = compose.environment(config)
    has_hints = all(stage.algorithm.experience.hint is not None for stage in config.stages)
    if compose.is_judged(config) or config.rollout.likelihood.coef or has_hints:
        return
    if ENVIRONMENT in config.reward_names:
        raise scoring.without_environment()
    if not config.reward and sources & REWARDED:
        raise InputError(
            "no reward given",
            where="--reward",
            why="the algorithm learns from the rewards of completions",
            fix="give a built-in reward, FILE.py:function or the model folder of a reward model"
            + (", or an environment with get_reward" if environment else ""),
        )


CONVERSING: set[SourceName] = {"rollouts", "accepted", "pairs", "completions"}
"""Sources whose completions may be conversations."""


def check_processes(config: ExperimentConfig) -> None:
    """Raise InputError if a setting does not fit a run of several processes."""
    if processes.count() > 1:
        others = {"--sampling.devices": "a thread would decide by itself what runs next"}
        if config.converses:
            others["--rollout.partial"] = "episodes live in the process that began them"
        config_checks.refuse_with("a run of several processes", config, others)


def check_environment(config: ExperimentConfig, rows: list[data.Row]) -> None:
    """Check the environment of a run.

    Raises InputError if it does not load, needs a column that the rows lack, or does not go
    together with other settings.
    """
    environment = compose.environment(config)
    if environment is None:
        return
    sources = {stage.algorithm.experience.source for stage in config.stages}
    others = sorted(sources - CONVERSING)
    only_evaluates = sources == {"demonstrations"} and config.evaluation.rows > 0
    if not sources & CONVERSING and not only_evaluates:
        raise InputError(
            "the algorithm holds no conversations",
            where="--environment",
            why=f"its experience is {' and '.join(others)}",
            fix="choose one that samples, such as grpo, or leave out --environment",
        )
    if config.rollout.partial:
        environment.pool.require_resumable()
    # With several classes, each has its own rows, and rows may lack the columns of other classes.
    if rows and len(environment.pool.descriptions) == 1:
        environment.pool.require_columns(rows[0])


def check_rewards(config: ExperimentConfig, rows: list[data.Row]) -> None:
    """Check the reward functions of a run.

    Raises InputError if a function does not load, needs a column that the rows lack, may take
    longer than the watchdog waits, or is another one on another process. Trained reward models are
    not checked, because loading one takes a device.
    """
    likelihood = config.rollout.likelihood
    if likelihood.coef and rows:
        text_of_column(rows[0], likelihood.column)
    # Groups that are scored as they end may take twice as long in sum.
    num_files = len(registry.files(config.reward_names))
    seconds = 2 * config.reward_limits.batch_seconds * num_files
    watchdog_seconds = 60 * config.watchdog.minutes
    if 0 < watchdog_seconds <= seconds:
        raise InputError(
            f"the rewards of a batch may take {seconds:g} s, and a run without progress for so "
            "long is ended",
            where="--reward-limits.batch-seconds, --watchdog.minutes",
            why=f"the watchdog waits {watchdog_seconds:g} s",
            fix=f"--watchdog.minutes {math.ceil(2 * seconds / 60)}, or lower "
            "--reward-limits.batch-seconds",
        )
    registry.displayed(config.reward_terms)
    registry.displayed([rewards.RewardTerm(name) for name in reward_names(config)])
    for step in (1, config.steps):
        rewards.at_step(config.reward_terms, step)
    untrained = untrained_rewards(config)
    with open_rewards(config, untrained) as functions:
        if rows and any(stage.algorithm.experience.source in REWARDED for stage in config.stages):
            # Scoring no completions checks the columns only.
            columns = {column: [] for column in rows[0] if column != "prompt"}
            of_rollout = {column: [] for column in rewards.ROLLOUT_COLUMNS}
            rewards.score(functions, [], [], columns, rollout_columns=of_rollout)
    host_agreement.require_same_reward_files(tuple(untrained))


def check_sets(config: ExperimentConfig, tokenizer: tokenizers.Tokenizer) -> None:
    """Check the further sets of held-out rows of a run.

    Raises InputError if the run would not measure one of them: it evaluates nothing, or ranks
    pairs; the rows cannot be read, or have no prompt that is short enough; no reward judges them,
    or the one that says what is correct needs a column that they lack.
    """
    stage = config.stages[-1]
    ranks = compose.learns_from_given_pairs(stage) or roles.reading(stage.algorithm) is not None
    if config.evaluation.sets and (ranks or not config.evaluation.rows):
        raise InputError(
            "nothing measures further sets of held-out rows",
            where="--evaluation.sets",
            why="the method is evaluated by its ranking of pairs, or by labeled steps"
            if ranks
            else "--evaluation.rows 0 turns evaluation off",
            fix="leave them out; evaluate.py --data.path measures them by themselves",
        )
    for name, path in config.evaluation.named_sets.items():
        try:
            rows = tasks.rows_of_set(config.data, path, config.evaluation.rows)
            problems = tasks.problems(rows) if is_answered(config) else []
            if problems:
                check_problems(config, problems, tokenizer)
        except InputError as error:
            raise error.within(f"--evaluation.sets {name}={path}") from None
        imitates = stage.algorithm.experience.imitates is not None
        if not problems and not (imitates and any(map(tasks.brings_text, rows))):
            raise InputError(
                "nothing measures the rows",
                where=f"--evaluation.sets {name}={path}",
                why="no reward judges answers to them, and the run does not imitate such rows",
                fix="name a reward: --evaluation.reward",
            )


def is_answered(config: ExperimentConfig) -> bool:
    """Return True if something judges answers to held-out problems."""
    return config.evaluation_reward is not None or compose.is_judged(config)


def check_problems(
    config: ExperimentConfig, problems: list[data.Row], tokenizer: tokenizers.Tokenizer
) -> None:
    """Raise InputError if no prompt is short enough, or no reward judges the problems, or the one
    that says what is correct needs a column that they lack."""
    limit = config.sampling.max_prompt_tokens
    problems = list(tasks.drop_misfits(problems, tokenizer, limit))
    names = [name for name in config.evaluation_rewards if not is_directory(name)]
    with open_rewards(config, names) as functions:
        judging = rewards.of_rows(functions, problems)
        if functions and not judging and len(names) == len(config.evaluation_rewards):
            raise InputError(
                "no reward judges the rows",
                why=f"for rows of other kinds: {', '.join(functions)}",
                fix="add a reward for them, as for_rows(of=...,column=...,values=...)",
            )
        if judging and config.evaluation_reward in names:
            correct = next(iter(judging))
            columns = scoring.repeat_rows(problems, 1)[1]
            rewards.require_columns(correct, judging[correct], columns, rewards.ROLLOUT_COLUMNS)


@contextmanager
def open_rewards(
    config: ExperimentConfig, names: Sequence[str]
) -> Iterator[dict[str, rewards.Reward]]:
    """Give display name -> function in this context, and end their processes after it."""
    functions = registry.reward_functions(
        names, config.reward_limits, config.allow_unsandboxed_code
    )
    try:
        yield functions
    finally:
        for function in functions.values():
            if isinstance(function, IsolatedReward):
                function.stop()


def untrained_rewards(config: ExperimentConfig) -> list[str]:
    """Return the names of the run's rewards that are no reward models."""
    return [name for name in reward_names(config) if not is_directory(name)]


def reward_names(config: ExperimentConfig) -> list[str]:
    """Return the names of all rewards of a run, each once."""
    return list(dict.fromkeys((*config.reward_names, *config.evaluation_rewards)))


def reward_directories(config: ExperimentConfig) -> list[Path]:
    """Return the directories of the trained reward models of a run."""
    from tpu_rl.rewards import reward_model

    parts = [part for name in reward_names(config) for part in registry.parts_of(name)]
    return [reward_model.directory_of(part) for part in parts if is_directory(part)]


def is_directory(name: str) -> bool:
    """Return True if a reward is, or reads, the directory of a trained reward model."""
    return any(Path(part).expanduser().is_dir() for part in registry.parts_of(name))
