"""Rounds of Q# examples as experience."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tpu_rl.commands import compose
from tpu_rl.commands.config import ExperimentConfig, Stage, fixed_settings
from tpu_rl.commands.roles import RunContext
from tpu_rl.data import Row
from tpu_rl.experience.source import Source
from tpu_rl.experience.sources import q_examples
from tpu_rl.rewards import registry
from tpu_rl.rollout.engine import Decoding
from tpu_rl.types import Params


def make_q_examples(context: RunContext, stage: Stage, params: Params) -> Source:
    config = context.config
    algorithm: Any = stage.algorithm
    number = q_round(config, stage)
    stream = compose.row_stream(context, stage, algorithm.prompts)
    for _ in range(number - 1):
        next(stream)  # Each round has the next rows of the stream.
    rows = next(stream)[1]
    spec = q_examples.RoundSpec(
        number,
        stage.first,
        config.seed,
        config.batch.prompts * config.batch.group_size,
        algorithm.return_range,
        q_round_identity(config, rows),
        algorithm.drop_equal_returns,
        config.batch.group_size if algorithm.roll_in == "none" else 1,
    )
    continues = roll_out(context, stage)
    engine = q_examples.q_engine(roll_in(context, stage), continues, compose.scorer(context))
    decode = context.language.tokenizer.decode
    return q_examples.q_example_source(engine, rows, params, spec, context.run_dir, decode)


def q_round_identity(config: ExperimentConfig, rows: list[Row]) -> str:
    """Return `q_examples.round_identity` of the rows and of the settings that examples depend on.

    The size of a micro-batch is not among them, because it depends on the devices.
    """
    settings = {k: v for k, v in fixed_settings(config).items() if k != "batch.micro_batch_rows"}
    return q_examples.round_identity(rows, settings, registry.files(config.reward_names))


def q_round(config: ExperimentConfig, stage: Stage) -> int:
    """Return the number of the stage's round of Q# examples, from 1."""
    earlier = config.stages[: stage.index]
    return 1 + sum(other.algorithm.experience.source == "q_examples" for other in earlier)


def roll_in(context: RunContext, stage: Stage) -> Decoding:
    """Return the decoding that samples the prefixes of Q# examples.

    They come from the guided policy; in the first round from the reference, because nothing has
    learned to guide it. With `roll_in="none"` the reference writes whole answers.
    """
    algorithm: Any = stage.algorithm
    policy = context.rollout_policy("policy")
    if algorithm.roll_in == "guided" and q_round(context.config, stage) > 1:
        policy = context.guided_policy(stage.algorithm)
    return compose.plain_decoding(context, policy, context.config.batch.group_size)


def roll_out(context: RunContext, stage: Stage) -> Decoding | None:
    """Return the decoding with which the reference continues prefixes of Q# examples, once each.

    None with `roll_in="none"`: nothing is continued.
    """
    algorithm: Any = stage.algorithm
    if algorithm.roll_in == "none":
        return None
    plain = compose.plain_decoding(context, context.rollout_policy("policy"), 1)
    return replace(plain, config=replace(plain.config, prompt_length=context.max_length))
