"""`--dry-run`: check a run and print what it would do, without an accelerator.

It reads all that a run reads before its first step, except for the weights of models of the hub,
and fails with the error that the run would end with. Then it prints the configuration, the sizes
of a batch, the models, and an example of each kind of row as the model reads it.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tpu_rl import data, jax_versions, models, rewards
from tpu_rl.commands import compose, continued, roles
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.config import ExperimentConfig, FileData, Stage, to_dict
from tpu_rl.commands.sources import of_pairs
from tpu_rl.commands.tools import gold
from tpu_rl.data import Row, Rows
from tpu_rl.errors import InputError, printable
from tpu_rl.experience.rows import tasks
from tpu_rl.experience.sources import examples, step_labels
from tpu_rl.experience.sources.examples import Example, Span
from tpu_rl.rollout import scoring
from tpu_rl.rollout.conversations.episodes import Episodes
from tpu_rl.rollout.group_selection import num_kept
from tpu_rl.tokenizers import Tokenizer, images
from tpu_rl.train import optimizers

MIB = 2**20
MAX_ENCODED_ROWS = 10_000
"""Demonstrations that are encoded. A run encodes them step by step, not before it begins."""
MAX_CHARACTERS = 10_000
"""Characters of an example that are printed."""
MAX_OPENED_ROWS = 200
"""Rows whose pictures are measured."""


def inspect(config: ExperimentConfig) -> None:
    """Check the run, then print its plan and its examples.

    Raises InputError if the run would end with it.
    """
    if config.optimizer.continued:
        continued.run_of(config)
    warnings = preflight.check(config, needs_weights=False)
    directory = models.find_configuration(roles.model_path(config.model.path))
    tokenizer = roles.load_tokenizer(config, directory)
    shown: list[Example] = []
    rewarded: Rows | None = None
    pictures: Table | None = None
    for stage in config.stages:
        rows = usable_rows(config, stage, tokenizer)
        warnings += check_encoding(config, stage, rows, tokenizer)
        pictures = pictures or image_table(rows, tokenizer)
        sampling = config.sampling
        limits = (sampling.max_prompt_tokens, sampling.max_new_tokens)
        texts = examples.of_row(rows[0], stage.algorithm.experience, tokenizer, *limits)
        shown += [example for example in texts if example not in shown]
        if stage.algorithm.experience.source in preflight.CONVERSING and config.environment:
            shown.append(first_prompt(config, rows[0], tokenizer))
        if stage.algorithm.experience.source in preflight.REWARDED:
            rewarded = rows
    held_out = check_held_out(config, tokenizer)
    judged = rewarded or held_out
    gold_table, gold_warnings, with_gold = gold.check(config, judged, tokenizer)
    # A task has 2^31 rows.
    numbers = itertools.islice(itertools.chain(with_gold, range(len(judged))), 2)
    trial_rows = [judged[index] for index in numbers]
    trial, trial_warnings = try_rewards(config, trial_rows, tokenizer)
    warnings += [*gold_warnings, *trial_warnings]
    for warning in dict.fromkeys(warnings):
        print(f"warning: {printable(warning)}", file=sys.stderr)
    print_plan(config)
    console = Console(highlight=False)
    if pictures is not None:
        console.print(pictures)
    for example in shown:
        print_example(console, example)
    for table in (gold_table, trial):
        if table is not None:
            console.print(table)


def first_prompt(config: ExperimentConfig, row: Row, tokenizer: Tokenizer) -> Example:
    """Reset the environment with a row, and return the prompt that the policy then reads.

    Raises InputError if the reset fails, or the prompt is too long.
    """
    environment = compose.environment(config)
    assert environment is not None
    with Episodes(
        rows=[row],
        environment=environment,
        tokenizer=tokenizer,
        max_prompt_tokens=config.sampling.max_prompt_tokens,
        step=1,
        seed=config.seed,
    ) as episodes:
        token_ids = episodes.begin()[0]
        fault = episodes.by_row[0].fault
    description = environment.pool.description(row)
    if fault:
        raise InputError(
            f"the environment {description.name} cannot begin with the first row",
            where="--environment, --data.path",
            why=fault,
            fix="repair `reset`, or the row",
        )
    names = [tool["function"]["name"] for tool in description.tools]
    tools = f" with the tools {', '.join(names)}" if names else ""
    text = tokenizer.decode(token_ids, skip_special=False)
    return Example(f"its prompt in {description.name}{tools}", [Span(text, "")])


# --- what a run reads before its first step ---


def usable_rows(config: ExperimentConfig, stage: Stage, tokenizer: Tokenizer) -> Rows:
    """Return the training rows of a stage. Raises InputError as `compose.make_source` does."""
    spec = stage.algorithm.experience
    if spec.source == "step_labels":
        algorithm: Any = stage.algorithm
        step_labels.require_steps(
            config.data, spec.sampled_by, algorithm.steps, bool(config.reward_names)
        )
    if compose.learns_from_given_pairs(stage):
        return of_pairs.require_pairs(config, tokenizer).train
    return compose.usable_rows(config, stage, tokenizer)


def check_encoding(
    config: ExperimentConfig, stage: Stage, rows: Rows, tokenizer: Tokenizer
) -> list[str]:
    """Encode the texts that a run encodes step by step; return warnings about their lengths.

    Raises InputError if a row cannot be encoded.
    """
    spec = stage.algorithm.experience
    encode: Any = {"demonstrations": data.demonstrations, "step_labels": data.steps}.get(
        spec.source
    )
    if not isinstance(config.data, FileData) or encode is None or spec.sampled_by is not None:
        return []
    max_length = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    num_rows = min(len(rows), MAX_ENCODED_ROWS)
    num_cut = num_empty = 0
    for index in range(num_rows):
        # One column more shows which texts are cut. Their next token may be of the user, or may be
        # the one that also serves as padding.
        with data.naming_row(rows, index):
            texts = encode([rows[index]], tokenizer, max_length + 1)
        learned = texts.action_mask[0]
        num_cut += bool(learned[max_length] or texts.tokens[0, max_length] != tokenizer.pad_id)
        num_empty += not learned[:max_length].any()
    flags = "--sampling.max-prompt-tokens and --sampling.max-new-tokens"
    limit = f"{max_length} tokens, the sum of {flags}"
    of_rows = f"of {num_rows:,} rows" if num_rows == len(rows) else f"of {num_rows:,} checked rows"
    counts = {
        f"{of_rows} are longer than {limit}, and are cut": num_cut,
        f"{of_rows} have nothing to learn within {limit}": num_empty,
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def check_held_out(config: ExperimentConfig, tokenizer: Tokenizer) -> list[Row]:
    """Return the problems that evaluations answer.

    Raises InputError if no prompt is short enough, or the reward needs a column that they lack.
    """
    stage = config.stages[-1]
    is_answered = (
        not compose.learns_from_given_pairs(stage) and roles.reading(stage.algorithm) is None
    )
    name = config.evaluation_reward
    if not (isinstance(config.data, FileData) and is_answered and config.evaluation.rows and name):
        return []
    spec = config.algorithm.experience
    rows = tasks.problems(tasks.evaluation_rows(config.data, spec, config.evaluation.rows))
    if not rows:
        return []
    rows = list(tasks.drop_misfits(rows, tokenizer, config.sampling.max_prompt_tokens))
    names = [
        name
        for name in dict.fromkeys((name, *config.evaluation.metrics))
        if not preflight.is_directory(name)
    ]
    with preflight.open_rewards(config, names) as functions:
        columns = scoring.repeat_rows(rows, 1)[1]
        for display_name, function in functions.items():
            rewards.require_columns(display_name, function, columns, rewards.ROLLOUT_COLUMNS)
    return rows


# --- rewards ---


def try_rewards(
    config: ExperimentConfig, rows: Sequence[Row], tokenizer: Tokenizer
) -> tuple[Table | None, list[str]]:
    """Return (a table of rewards of trial completions, warnings about those that failed).

    Nobody knows what the model will write. So a function may fail on some of the completions, which
    are nothing, a sentence, and what the row has as its answer. Raises InputError if a function
    fails on all of them.
    """
    untrained = preflight.untrained_rewards(config)
    if not rows or not untrained:
        return None, []
    answers = ("completion", "solution", "answer")
    texts = [
        ["", "The answer is 42.", *[str(row[name]) for name in answers if row.get(name)]][:3]
        for row in rows
    ]
    num_texts = min(map(len, texts))
    texts = [row_texts[:num_texts] for row_texts in texts]
    prompts, columns = scoring.repeat_rows(list(rows), num_texts)
    flat = [text for row_texts in texts for text in row_texts]
    ids = [tokenizer.encode(text)[: config.sampling.max_new_tokens - 1] for text in flat]
    of_rollout = gold.rollout_columns(
        [(index // num_texts, [*row, tokenizer.eos_ids[0]]) for index, row in enumerate(ids)]
    )
    completions = rewards.as_answers(prompts, flat, config.converses)
    with preflight.open_rewards(config, untrained) as functions:
        scores = rewards.score(
            functions, prompts, completions, columns, 1.0, rollout_columns=of_rollout
        )
    warnings = [
        warning
        for name in functions
        if (warning := require_some(name, scores, completions)) is not None
    ]
    table = Table("reward", *[f"{text[:24]!r}" for text in texts[0]], box=None)
    for name, values in scores.parts.items():
        table.add_row(name, *[f"{value:g}" for value in values[:num_texts]])
    return (table if functions else None), warnings


def require_some(name: str, scores: rewards.Scores, completions: Sequence[Any]) -> str | None:
    """Return a warning if a reward function fails on some completions, or None.

    Raises InputError if it fails on all.
    """
    faults = [f for f in scores.faults if f.function == name and not f.is_scored]
    if not faults and np.isnan(scores.parts[name]).all():
        return (
            f"{name} scores none of {len(completions)} trial completions: it returns None for all"
        )
    if len(faults) == len(completions):
        rewards.require_few_faults(replace(scores, faults=faults), completions, 0.0)
    if not faults:
        return None
    return f"{name} fails on {len(faults)} of {len(completions)} trial completions: " + (
        f"{faults[0].message}"
    )


# --- what is printed ---


def print_example(console: Console, example: Example) -> None:
    """Print a text as the model reads it.

    What is learned is green in a terminal, and between [[ and ]] elsewhere.
    """
    text = Text()
    for span in example.spans:
        visible = "".join(
            character if character.isprintable() or character in "\n\t" else repr(character)[1:-1]
            for character in span.text
        )
        if not span.note:
            text.append(visible)
        elif console.is_terminal:
            text.append(visible, style="bold green")
        else:
            text.append(f"[[{visible}]]")
        if span.note not in ("", examples.LEARNED):
            text.append(f"({span.note})", style="dim")
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS].append(f" ... ({len(text):,} characters)", style="dim")
    mark = "green" if console.is_terminal else "in [[ ]]"
    title = f"\nthe first row, {example.title}; learned is what is {mark}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(text, soft_wrap=True)


def print_plan(config: ExperimentConfig) -> None:
    """Print the resolved configuration, the sizes of a batch and the parameters of each model."""
    console = Console(highlight=False)
    console.print(yaml.safe_dump(to_dict(config), sort_keys=False).rstrip(), markup=False)
    console.print(batch_table(config))
    console.print(model_table(config))


def model_table(config: ExperimentConfig) -> Table:
    """Return a table of the run's models: parameters, bytes of weights and of optimizer state."""
    directory = models.find_configuration(roles.model_path(config.model.path))
    base = roles.from_config(config, directory)
    trained = {
        name
        for stage in config.stages
        for name, spec in stage.algorithm.roles.items()
        if spec.trainable
    }
    table = Table("model", "parameters", "weights, MiB", "optimizer state, MiB", box=None)
    for name, shapes in roles.param_shapes(config, base).items():
        leaves = jax.tree.leaves(shapes)
        count = sum(math.prod(leaf.shape) for leaf in leaves)
        bits = sum(
            math.prod(leaf.shape) * jax_versions.itemsize_bits(leaf.dtype) for leaf in leaves
        )
        state = "frozen"
        if name in trained:
            state_size = optimizers.state_bytes(config.optimizer, shapes, models.matrix_axes)
            state = f"{state_size / MIB:,.1f}"
        table.add_row(name, f"{count:,}", f"{bits / 8 / MIB:,.1f}", state)
    return table


def image_table(rows: Rows, tokenizer: Tokenizer) -> Table | None:
    """Return a table of the images of the first rows: their sizes, their features, and how many a
    row has; None if there are none."""
    reader = tokenizer.images
    checked = min(len(rows), MAX_OPENED_ROWS)
    sources = [images.sources_of(rows[index]) for index in range(checked)]
    if reader is None or not any(sources):
        return None
    sizes = []
    features = []
    for index, of_row in enumerate(sources):
        with data.naming_row(rows, index):
            for image in reader.opened(of_row):
                sizes.append(image.size)
                features.append(
                    len(tokenizer.with_images({"images": [image]}, [reader.token_id]).ids)
                )
    counts = [len(of_row) for of_row in sources if of_row]
    table = Table(f"images of the first {checked} rows", "least", "mean", "most", box=None)
    for name, values in {
        f"images of a row, {len(counts)} rows with images": counts,
        "width, pixels": [width for width, _ in sizes],
        "height, pixels": [height for _, height in sizes],
        "tokens of an image": features,
    }.items():
        mean = sum(values) / len(values)
        table.add_row(name, f"{min(values):,}", f"{mean:,.1f}", f"{max(values):,}")
    return table


def batch_table(config: ExperimentConfig) -> Table:
    """Return a table of the sizes of one step. Tokens and rows are upper bounds."""
    batch = config.batch
    sampling = config.sampling
    rollouts = batch.prompts * batch.group_size
    added = max(stage.algorithm.experience.rows_added for stage in config.stages)
    rows_of_group = batch.group_size + added
    prompts_of_group = 1 if batch.share_prefixes else rows_of_group
    group_tokens = prompts_of_group * sampling.max_prompt_tokens
    group_tokens += rows_of_group * sampling.max_new_tokens
    prompts_learned = num_kept(batch.prompts, config.rollout.keep_variance_share)
    tokens = prompts_learned * group_tokens // batch.num_minibatches
    rows = math.ceil(tokens / batch.row_length)
    micro_batches = math.ceil(rows / batch.rows_at_once)
    sizes = {
        "prompts": f"{batch.prompts}",
        "completions per prompt (group size)": f"{batch.group_size}",
        "rollouts": f"{rollouts}",
        **({"rows added to each group": f"{added}"} if added else {}),
        "sampled tokens, at most": f"{rollouts * sampling.max_new_tokens:,}",
        "optimizer steps": f"{batch.num_minibatches} minibatches x {batch.ppo_epochs} epochs",
        "tokens per optimizer step, at most": f"{tokens:,}",
        "packed rows per optimizer step, at most": f"{rows} of {batch.row_length} tokens",
        "micro-batches, at most": f"{micro_batches} of {batch.rows_at_once} rows",
    }
    table = Table("one step of the run", "", box=None)
    for name, value in sizes.items():
        table.add_row(name, value)
    return table
