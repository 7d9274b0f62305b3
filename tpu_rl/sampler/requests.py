"""The arguments of `sample` as checked arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_rl.errors import InputError
from tpu_rl.sampler import cache_ops, slots
from tpu_rl.sampler.config import SamplerConfig, check_logit_bias
from tpu_rl.sampler.partial import PartialCompletion
from tpu_rl.sampler.slots import NO_TOKEN, Outputs
from tpu_rl.sampler.token_sampling import row_keys
from tpu_rl.types import Array, Params, Policy


class PaddedTokens(NamedTuple):
    """Token sequences of different lengths."""

    tokens: np.ndarray
    """[sequences, longest] int32."""
    lengths: np.ndarray
    """[sequences] int32."""


class PoolContexts(NamedTuple):
    """The contexts of a pool."""

    tokens: np.ndarray
    """[contexts, longest] int32."""
    lengths: np.ndarray
    """[contexts] int32."""
    prompts: np.ndarray
    """[contexts, 2] int32: the number of the prompt with which each begins, and how many first
    tokens the caches of all rows of this prompt have in a decode step."""


class DecodeRequest(NamedTuple):
    """N rows to decode.

    The context of a row is what it continues: its prompt, or its prompt with the tokens of a
    completion that is resumed.
    """

    prompts: PaddedTokens
    group_size: int
    """Completions of each prompt."""
    contexts: PaddedTokens
    """The prompts, then the contexts of resumed rows."""
    context: np.ndarray
    """[N] int: index of each row's context."""
    limits: np.ndarray
    """[N] int32: length limit of each completion."""
    key_data: np.ndarray
    """[N, n] uint32: the data of the rows' keys."""
    key_impl: Any
    """Their kind."""
    max_length: int
    """Largest number of tokens in a row: prompt columns and `max_new_tokens`."""
    max_cache_length: int
    """Tokens of the largest cache: `max_length`, rounded up to a multiple of 128 if rows are
    resumed and the number of prompt columns is such a multiple."""
    num_sampled: np.ndarray
    """[N] int32: tokens of each completion that an earlier call sampled."""
    ended: np.ndarray
    """[N] bool: True if that is the entire completion."""
    stopped: np.ndarray
    """[N] bool: True if it is, and did not end at its limit."""
    policy_step: np.ndarray
    """[N] int32: of resumed rows, the optimizer step of their first token."""
    outputs: Outputs | None
    """[N, max_new_tokens]: the resumed completions. None if all rows are new."""

    def keys(self, rows: np.ndarray) -> Array:
        """Return the [B] keys of rows [B]."""
        data: Any = self.key_data[rows]
        return jax.random.wrap_key_data(data, impl=self.key_impl)


def make_request(
    policy: Policy,
    params: Params,
    prompts: Sequence[Sequence[int]],
    key: Array,
    config: SamplerConfig,
    limits: Sequence[int] | np.ndarray | None,
    row_ids: Sequence[int] | np.ndarray | None,
    resumed: Sequence[PartialCompletion | None] | None,
) -> DecodeRequest:
    """Return the request for these arguments of `sample`.

    Raises:
        InputError: arguments that do not fit each other, the config or the policy.
    """
    group_size = config.samples_per_prompt
    rows = len(prompts) * group_size
    padded_prompts = _pad_prompts(prompts, config)
    if limits is None:
        limits = np.full(rows, config.max_new_tokens, np.int32)
    limits = np.asarray(limits, np.int32)
    row_ids = np.arange(rows) if row_ids is None else np.asarray(row_ids)
    resumed = [None] * rows if resumed is None else list(resumed)
    shapes = {"limits": limits.shape, "row_ids": row_ids.shape, "resumed": (len(resumed),)}
    for name, shape in shapes.items():
        if shape != (rows,):
            raise InputError(
                f"sample: {name} has shape {shape}",
                why=f"{len(prompts)} prompts with {group_size} completions each are {rows} rows",
                fix="give one value per row",
            )
    if np.any((limits < 1) | (limits > config.max_new_tokens)):
        raise InputError(
            f"sample: limits go from {limits.min()} to {limits.max()}",
            why=f"each must be from 1 to max_new_tokens = {config.max_new_tokens}",
            fix="change the limits",
        )
    if config.logit_bias:
        check_logit_bias(config.logit_bias, slots.vocabulary_size(policy, params))
    _check_routing(policy, params, config, is_resumed=any(resumed))
    max_length = padded_prompts.tokens.shape[1] + config.max_new_tokens
    # As many keys as the programs have rows, so that one program makes those of every part.
    keys = row_keys(key, np.resize(row_ids, config.rows_of_programs(rows)))
    request = DecodeRequest(
        prompts=padded_prompts,
        group_size=group_size,
        contexts=padded_prompts,
        context=np.repeat(np.arange(len(prompts)), group_size),
        limits=limits,
        key_data=np.array(jax.random.key_data(keys))[:rows],
        key_impl=jax.random.key_impl(keys),
        max_length=max_length,
        max_cache_length=max_length,
        num_sampled=np.zeros(rows, np.int32),
        ended=np.zeros(rows, bool),
        stopped=np.zeros(rows, bool),
        policy_step=np.zeros(rows, np.int32),
        outputs=None,
    )
    return _with_resumed(request, resumed, config) if any(resumed) else request


def _check_routing(policy: Policy, params: Params, config: SamplerConfig, is_resumed: bool) -> None:
    if not config.record_routing:
        return
    where = "SamplerConfig.record_routing"
    if cache_ops.routing_shape(policy, params) is None:
        raise InputError(
            "sample: the policy records no routing",
            where=where,
            why="it is no mixture of experts, or was not asked to",
            fix="use models.variant(model, records_routing=True), or leave it out",
        )
    if is_resumed or config.speculation.tokens:
        raise InputError(
            "sample: routing is recorded neither of resumed rows nor with drafts",
            where=where,
            why="a resumed row is read anew, and drafts are read beside the row's own tokens",
            fix="leave one of them out",
        )


def _pad_prompts(prompts: Sequence[Sequence[int]], config: SamplerConfig) -> PaddedTokens:
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if lengths.size == 0:
        raise InputError(
            "sample: there are no prompts", fix="give a list with a list of token ids per prompt"
        )
    if lengths.min() == 0:
        raise InputError(
            "sample: a prompt is empty",
            where=f"prompt {int(lengths.argmin())}",
            fix="begin it with the beginning-of-sequence token",
        )
    width = config.prompt_length or 1 << (int(lengths.max()) - 1).bit_length()
    if lengths.max() > width:
        raise InputError(
            f"sample: a prompt is longer than prompt_length = {width}",
            where=f"prompt {int(lengths.argmax())} has {lengths.max()} tokens",
            fix="raise prompt_length or cut the prompt",
        )
    return _pad(prompts, width, config.pad_id)


def _pad(sequences: Sequence[Sequence[int]], width: int, pad_id: int) -> PaddedTokens:
    tokens = np.full((len(sequences), width), pad_id, np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return PaddedTokens(tokens, np.array([len(sequence) for sequence in sequences], np.int32))


def _with_resumed(
    request: DecodeRequest, resumed: Sequence[PartialCompletion | None], config: SamplerConfig
) -> DecodeRequest:
    """Return the request with completions that an earlier call sampled.

    Their tokens go to the outputs. Those that have not ended also get contexts, whose width is that
    of prompts, doubled until the longest fits.
    """
    shape = (len(resumed), config.max_new_tokens)
    outputs = Outputs(
        tokens=np.full(shape, NO_TOKEN, np.int32),
        log_probs=np.zeros(shape, np.float32),
        behaviour_log_probs=np.zeros(shape, np.float32),
    )
    prompts = [row[:length].tolist() for row, length in zip(*request.prompts, strict=True)]
    contexts = list(prompts)
    for row, completion in enumerate(resumed):
        if completion is None:
            continue
        count = len(completion.tokens)
        # A completion that continues needs room for one more token.
        if count + (not completion.ended) > request.limits[row]:
            raise InputError(
                "sample: a resumed completion is too long",
                where=f"row {row}",
                why=f"it has {count} tokens already, and its limit is {request.limits[row]}",
                fix="raise the limit, or sample the row anew",
            )
        outputs.tokens[row, :count] = completion.tokens
        outputs.log_probs[row, :count] = completion.log_probs
        outputs.behaviour_log_probs[row, :count] = completion.behaviour_log_probs
        request.key_data[row] = completion.birth_key
        request.policy_step[row] = completion.policy_step
        request.num_sampled[row] = count
        request.ended[row] = completion.ended
        request.stopped[row] = completion.ended and not completion.truncated
        if count and not completion.ended:
            request.context[row] = len(contexts)
            prompt = prompts[row // request.group_size]
            contexts.append(prompt + np.asarray(completion.tokens).tolist())
    prompt_width = request.prompts.tokens.shape[1]
    max_cache_length = request.max_cache_length
    if prompt_width % 128 == 0:
        max_cache_length = -(-max_cache_length // 128) * 128
    width = prompt_width
    while width < max(map(len, contexts)):
        width *= 2
    return request._replace(
        contexts=_pad(contexts, min(width, max_cache_length), config.pad_id),
        max_cache_length=max_cache_length,
        outputs=outputs,
    )
