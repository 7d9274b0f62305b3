"""A model of a run folder or directory as an application that answers requests.

`serve` puts it behind a socket, and `chat` talks to it in its own process.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, NamedTuple

import jax

from tpu_rl import models
from tpu_rl.checkpoint import remote_run
from tpu_rl.commands import compose, roles
from tpu_rl.commands import config as configuration
from tpu_rl.commands.config import ExperimentConfig, FileData, MeshConfig
from tpu_rl.ranges import In
from tpu_rl.rollout import image_prompts
from tpu_rl.rollout.image_prompts import ImageTable
from tpu_rl.sampler import ConversationSampler, SegmentConfig, text_scorer
from tpu_rl.sampler.conversation_sampler import STEPS_PER_SEGMENT
from tpu_rl.serving.app import Account, App, Limits
from tpu_rl.serving.pump import Distribution, Pump, sampler_config
from tpu_rl.tokenizers import TokenizerConfig
from tpu_rl.tokenizers.images import Pixels
from tpu_rl.types import Params

MOST_IMAGES = 256
"""Images that a server keeps. A conversation sends its own with each request."""


ModelLength = Annotated[int, In("[2, inf)")]
"""Tokens of a conversation: one of the prompt, and one of the answer, at least."""


class Sizes(NamedTuple):
    """The shapes for which programs are compiled."""

    max_model_len: int
    """Tokens of a conversation."""
    num_slots: int
    """Completions that are decoded at once."""
    steps: int = STEPS_PER_SEGMENT
    """Tokens that are drawn before anybody sees them."""


def settings(
    model: str, tokenizer: TokenizerConfig, images: bool = False, pixels: Pixels = (None, None)
) -> ExperimentConfig:
    """Return the configuration of a run; for a model, that of a preset with `ModelConfig.images`.

    The settings of the tokenizer, and the least and the most pixels of images, replace those of the
    run, unless they are the defaults.
    """
    if remote_run.is_run(model):
        config = configuration.load(remote_run.fetch(model) / remote_run.CONFIG)
    else:
        config = configuration.preset("grpo")
        config = replace(config, model=replace(config.model, images=images))
    if pixels != (None, None):
        files = config.data if isinstance(config.data, FileData) else FileData()
        least, most = pixels
        files = replace(
            files,
            min_pixels=files.min_pixels if least is None else least,
            max_pixels=files.max_pixels if most is None else most,
        )
        config = replace(config, data=files)
    return replace(config, tokenizer=tokenizer) if tokenizer != TokenizerConfig() else config


def make(
    sizes: Sizes,
    language: roles.Language,
    params: Params,
    name: str,
    default: Distribution,
    accounts: Mapping[str | None, Account],
    **settings: bool,
) -> App:
    """Return the application of a model that is loaded. For the arguments see `App`."""
    length = sizes.max_model_len
    model = language.model
    tokenizer = language.tokenizer
    model.config.require_length(length, "--max-model-len")
    mesh = compose.make_mesh(MeshConfig())
    score = text_scorer(models.role(model, lambda tree: tree), mesh)
    features = image_prompts.with_images(model)
    images = features and ImageTable(tokenizer, features, MOST_IMAGES)
    vocab_size = model.config.vocab.size

    def make_sampler(distribution: Distribution) -> ConversationSampler:
        config = sampler_config(
            distribution,
            tokenizer,
            vocab_size,
            length,
            stop_ids=tokenizer.eos_ids,
            segments=SegmentConfig(steps=sizes.steps),
        )
        with jax.set_mesh(mesh):
            return ConversationSampler(
                models.policy(model),
                params,
                config,
                num_slots=sizes.num_slots,
                max_length=length,
                prompt_length=min(64, length),
                mesh=mesh,
                whole_images=tokenizer.images and tokenizer.images.whole_images,
                images=images,
            )

    return App(
        Pump(make_sampler),
        tokenizer,
        name,
        Limits(length, length, vocab_size),
        default,
        accounts,
        score=functools.partial(score, params),
        images=images,
        has_page=True,
        **settings,
    )
