"""Preference pairs as experience: those of the data, and sampled ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from tpu_rl import data
from tpu_rl.checkpoint import digests
from tpu_rl.commands import compose
from tpu_rl.commands.config import ExperimentConfig, FileData, Stage
from tpu_rl.commands.roles import RunContext
from tpu_rl.data import Row
from tpu_rl.errors import InputError
from tpu_rl.experience import reference_log_probs
from tpu_rl.experience.rows import dataset_identity, tasks
from tpu_rl.experience.source import Source
from tpu_rl.experience.sources import (
    pairs,
)
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Params


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
        return pairs.sampled_pair_source(
            compose.rollout_engine(context, spec.sampled_by),
            compose.row_stream(context, stage, compose.rows_at_once(config)),
            config.batch,
            spec.graded,
            config.rollout.dynamic_sampling_rounds,
            config.rollout.dynamic_sampling_size == "needed",
        )
    given = require_pairs(config, context.language.tokenizer)
    stream = dataset_identity.make_stream(
        given.train,
        spec,
        batch_size=config.batch.prompts,
        seed=config.seed,
        run_dir=context.run_dir,
        data_path=config.data.path,
        accept_change=config.accept_dataset_change,
        weights=config.data.weights,
    )
    return pairs.given_pair_source(stream, to_pairs(context, stage, params, given.usable))


def given_pairs(config: ExperimentConfig, tokenizer: Tokenizer) -> pairs.GivenPairs:
    """Return the pairs of the data that can be trained on, and those that cannot.

    Raises:
        InputError: if the data hold no pairs.
    """
    if not isinstance(config.data, FileData):
        raise InputError(
            "these data hold no pairs",
            where="--algorithm.pairs",
            fix="give --data.path with columns prompt, chosen, rejected, "
            "or sample them: --algorithm.pairs reference",
        )
    train, held_out = tasks.file_rows(
        config.data, config.algorithm.experience, config.evaluation.rows
    )
    return pairs.usable_pairs(train, held_out, tokenizer, config.sampling, config.batch)


def require_pairs(config: ExperimentConfig, tokenizer: Tokenizer) -> pairs.GivenPairs:
    """Return `given_pairs`, and print how many were dropped.

    Raises:
        InputError: if no training pair is left.
    """
    given = given_pairs(config, tokenizer)
    for reason in given.reasons:
        count = sum(other == reason for _, other in given.dropped)
        print(f"warning: {count} of {given.num_given} pairs dropped: {reason}", file=sys.stderr)
    if not given.train:
        raise InputError(
            "no pair is left",
            where="--data.path, --sampling.max-new-tokens, --batch.row-length",
            why="; ".join(given.reasons),
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
    wanted.

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
        accept_dataset_change=context.config.accept_dataset_change,
    )
    log_probs = reference_log_probs.read_or_compute(cache, reference, rows, plain)
    return reference_log_probs.with_log_probs(plain, rows, log_probs)


def trained_pairs(context: RunContext, stage: Stage, rows: Sequence[Row]) -> pairs.ToPairs:
    """Return `to_pairs` of a stage that has ended, from what it kept in the run folder."""
    plain = plain_pairs(context)
    if not stage.algorithm.experience.reference_log_probs:
        return plain
    path = reference_log_probs.path_of(context.run_dir, stage.index)
    return reference_log_probs.with_log_probs(plain, rows, reference_log_probs.read(path)[1])
