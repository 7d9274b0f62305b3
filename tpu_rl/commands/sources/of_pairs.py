"""Preference pairs as experience: those of the data, and sampled ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tpu_rl import data
from tpu_rl.checkpoint import digests
from tpu_rl.commands import compose
from tpu_rl.commands.config import ExperimentConfig, FileData, Stage
from tpu_rl.commands.roles import RunContext
from tpu_rl.data import Row
from tpu_rl.errors import InputError
from tpu_rl.experience import reference_log_probs, source
from tpu_rl.experience.rows import tasks
from tpu_rl.experience.source import Source
from tpu_rl.experience.sources import pairs, rollouts
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Params

_LAST: list[tuple[Tokenizer, tuple[Any, ...], pairs.GivenPairs]] = []
"""The tokenizer and the settings of the last `given_pairs`, and the pairs; or nothing."""


def make_pairs(context: RunContext, stage: Stage, params: Params) -> Source:
    config = context.config
    spec = stage.algorithm.experience
    if spec.opponent is not None:
        half = config.batch.group_size // 2
        return pairs.opposed_pair_source(
            compose.rollout_engine(context, group_size=half),
            compose.opponent_engine(context, spec.opponent, half),
            compose.row_stream(context, stage),
        )
    if spec.sampled_by is not None:
        return rollouts.rollout_source(
            compose.rollout_engine(context, spec.sampled_by),
            compose.row_stream(context, stage, compose.rows_at_once(config)),
            config.batch,
            config.rollout.dynamic_sampling_rounds,
            only_needed=config.rollout.dynamic_sampling_size == "needed",
            make=partial(pairs.sampled_pairs, graded=spec.graded),
        )
    given = require_pairs(config, context.language.tokenizer)
    stream = compose.row_stream(context, stage, rows=given.train)
    # What a later stage begins with is gone when it is resumed, so it keeps the values of all rows.
    rows: Sequence[Row] = data.join(given.train, given.held_out)
    if stage.first == 1:
        num_steps = stage.last - stage.first + 1
        drawn = pairs.draws(
            given.train, config.seed, config.batch.prompts, num_steps, config.data.weights
        )
        by_steps = data.take(given.train, pairs.new_batches(drawn).reshape(-1))
        rows = data.join(whole_batches(given.held_out, config.batch.prompts), by_steps)
    return source.of_data(stream, to_pairs(context, stage, params, rows))


def whole_batches(rows: Sequence[Row], batch_size: int) -> Sequence[Row]:
    """Return the rows, and rows from their beginning that fill up the last batch."""
    count = -(-len(rows) // batch_size) * batch_size
    return data.take(rows, np.arange(count) % max(len(rows), 1))


def given_pairs(config: ExperimentConfig, tokenizer: Tokenizer) -> pairs.GivenPairs:
    """Return the pairs of the data that can be trained on, and those that cannot.

    Raises InputError if the data hold no pairs.
    """
    if not isinstance(config.data, FileData):
        raise InputError(
            "these data hold no pairs",
            where="--algorithm.pairs",
            fix="give --data.path with columns prompt, chosen, rejected, "
            "or sample them: --algorithm.pairs reference",
        )
    spec = config.algorithm.experience
    settings = (config.data, spec, config.evaluation.rows, config.sampling, config.batch)
    # Training, evaluations and the audit of a run ask for the same pairs.
    for last_tokenizer, last_settings, given in _LAST:
        if last_tokenizer is tokenizer and last_settings == settings:
            return given
    given = pairs.usable_pairs(
        *tasks.file_rows(*settings[:3]), tokenizer, config.sampling, config.batch
    )
    _LAST[:] = [(tokenizer, settings, given)]
    return given


def require_pairs(config: ExperimentConfig, tokenizer: Tokenizer) -> pairs.GivenPairs:
    """Return `given_pairs`, and print how many were dropped.

    Raises InputError if no training pair is left.
    """
    given = given_pairs(config, tokenizer)
    for reason, numbers in given.dropped.items():
        print(
            f"warning: {len(numbers)} of {given.num_checked} pairs dropped: {reason}",
            file=sys.stderr,
        )
    if not given.train:
        raise InputError(
            "no pair is left",
            where="--data.path, --sampling.max-new-tokens, --batch.row-length",
            why="; ".join(given.dropped),
            fix="raise these, or give other pairs",
        )
    return given


def plain_pairs(context: RunContext) -> pairs.ToPairs:
    """Return a function that makes pairs of token ids of rows, without log-probs."""
    return partial(data.pairs, tokenizer=context.language.tokenizer, max_length=context.max_length)


def to_pairs(
    context: RunContext, stage: Stage, params: Params, rows: Sequence[Row]
) -> pairs.ToPairs:
    """Return a function that makes pairs of `rows`, with the reference's log-probs if they are
    wanted. A batch of rows is computed together, so that a run with more steps has equal values.

    The reference is the role of that name, or else the policy at the beginning of the stage.
    """
    plain = plain_pairs(context)
    if not stage.algorithm.experience.reference_log_probs:
        return plain
    role = "reference" if "reference" in stage.algorithm.roles else "policy"
    reference = reference_log_probs.Reference(
        compose.log_probs_of(context, role),
        params,
        digests.of_tree(context.params_of(role)(params)),
    )
    metrics_file = context.run_dir / "metrics.jsonl"
    cache = reference_log_probs.Cache(
        reference_log_probs.path_of(context.run_dir, stage.index),
        trusts_model=stage.first > 1,
        has_begun=metrics_file.exists() and metrics_file.stat().st_size > 0,
    )
    log_probs = reference_log_probs.read_or_compute(
        cache, reference, rows, context.config.batch.prompts, plain
    )
    return reference_log_probs.with_log_probs(plain, log_probs)


def trained_pairs(context: RunContext, stage: Stage) -> pairs.ToPairs:
    """Return `to_pairs` of a stage that has ended, of rows that it drew or held out."""
    plain = plain_pairs(context)
    if not stage.algorithm.experience.reference_log_probs:
        return plain
    path = reference_log_probs.path_of(context.run_dir, stage.index)
    return reference_log_probs.with_log_probs(plain, reference_log_probs.read(path)[1])
