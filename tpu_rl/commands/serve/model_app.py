"""A model of a run folder or directory as an application that answers requests.

`serve` puts it behind a socket, and `chat` talks to it in its own process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
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
from tpu_rl.sampler import ConversationSampler, SamplerConfig, SegmentConfig, text_scorer
from tpu_rl.sampler.conversation_sampler import STEPS_PER_SEGMENT
from tpu_rl.serving.app import Account, App, Limits
from tpu_rl.serving.pump import Distribution, Pump
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
    find_account: Callable[[str | None], Account | None],
    is_open: bool = False,
    requires_name: bool = False,
) -> App:
    """Return the application of a model that is loaded. For the arguments see `App`."""
    length = sizes.max_model_len
    language.model.config.require_length(length, "--max-model-len")
    mesh = compose.make_mesh(MeshConfig())
    score = text_scorer(models.role(language.model, lambda tree: tree), mesh)
    features = image_prompts.with_images(language.model)
    images = features and ImageTable(language.tokenizer, features, MOST_IMAGES)
    return App(
        Pump(sampler_factory(language, params, sizes, images)),
        language.tokenizer,
        name,
        Limits(length, length, language.model.config.vocab.size),
        default,
        find_account,
        is_open=is_open,
        score=functools.partial(score, params),
        images=images,
        has_page=True,
        requires_name=requires_name,
    )


def sampler_factory(
    language: roles.Language, params: Params, sizes: Sizes, images: ImageTable | None = None
) -> Callable[[Distribution], ConversationSampler]:
    """Return a function that makes the sampler of a distribution."""
    mesh = compose.make_mesh(MeshConfig())
    policy = models.policy(language.model)
    tokenizer = language.tokenizer
    length = sizes.max_model_len
    # Rows of the embedding that no token has are never sampled.
    unused = range(tokenizer.vocab_size, language.model.config.vocab.size)

    def make(distribution: Distribution) -> ConversationSampler:
        config = SamplerConfig(
            max_new_tokens=length,
            temperature=distribution.temperature,
            top_k=distribution.top_k,
            top_p=distribution.top_p,
            min_p=distribution.min_p,
            logit_bias=tuple((token_id, -math.inf) for token_id in unused),
            stop_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
            segments=SegmentConfig(steps=sizes.steps),
        )
        with jax.set_mesh(mesh):
            return ConversationSampler(
                policy,
                params,
                config,
                num_slots=sizes.num_slots,
                max_length=length,
                prompt_length=min(64, length),
                mesh=mesh,
                whole_images=tokenizer.images and tokenizer.images.whole_images,
                images=images,
            )

    return make
