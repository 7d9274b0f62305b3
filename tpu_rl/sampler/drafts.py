"""Drafts of a row's next tokens: looked up in text of its group, or sampled from a small model.

Both kinds use the uniform numbers with which the policy will sample the same positions. If the
draft's distribution is close to the policy's, they therefore mostly choose the very same token, at
any temperature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.errors import InputError
from tpu_rl.sampler.cache_ops import can_roll_back, with_lengths
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.slots import NO_TOKEN
from tpu_rl.sampler.token_sampling import sample_tokens
from tpu_rl.types import Array, Params, Policy


class DraftInputs(NamedTuple):
    """Inputs of a draft of k tokens."""

    text: Array
    """[B, S] int32: tokens of each row. What follows its last token has no meaning."""
    lengths: Array
    """[B] int32: number of the row's tokens."""
    prompt_lengths: Array
    """[B] int32: how many of them are the prompt's."""
    group_tokens: Array
    """[B, G, n] int32: tokens of the other completions of the row's prompt on its device; NO_TOKEN
    elsewhere."""
    uniforms: Array
    """[B, k] float32 in [0, 1): numbers with which the policy will sample the k positions."""


class Draft(NamedTuple):
    """A function that proposes a row's next tokens."""

    tokens: int
    """k, the length of a draft."""
    init_cache: Callable[[Params, int, int], Any]
    """See `Policy`."""
    extend: Callable[[Params, Any, Array, Array, Array, Array], tuple[Any, Any]]
    """See `Policy`. Reads the tokens that precede the first draft; the first result is ignored."""
    propose: Callable[[Params, Any, DraftInputs, SamplerConfig], tuple[Array, Any]]
    """(params, cache, inputs, config) -> (draft [B, k] int32, cache).

    The cache holds all tokens of a row but the last, or all but the last two if the entire previous
    draft was right. It may also hold tokens that no longer belong to the row.
    """


def make_draft(
    policy: Policy, params: Params, config: SamplerConfig, drafter: Policy | None, length: int
) -> Draft | None:
    """Return the draft of `config.speculation`, or None without speculation.

    Args:
        drafter: the small model that `config.speculation.model` names, or None.
        length: largest number of tokens in a row.

    Raises:
        InputError: only one of `drafter` and its name is given, or a cache cannot take tokens back.
    """
    speculation = config.speculation
    if not speculation.tokens:
        return None
    if (speculation.model is None) != (drafter is None):
        raise InputError(
            "sample: the draft model is ambiguous",
            why=f"speculation.model is {speculation.model!r}, and `drafter` is "
            + ("missing" if drafter is None else "given"),
            fix="give both `drafter` and its name, or neither",
        )
    for policy_or_drafter in (policy, drafter):
        # A drafter commits one token more than it drafts, and reads two tokens again.
        rollback = speculation.tokens + 3
        if policy_or_drafter is None or can_roll_back(policy_or_drafter, params, length, rollback):
            continue
        most_tokens = max((policy_or_drafter.max_rollback or 0) - 3, 0)
        raise InputError(
            "speculative decoding needs caches that can take tokens back",
            why="a part of this policy's cache has no place of its own for each token, for example "
            "a ring or a recurrent state",
            fix=f"set speculation.tokens to {most_tokens}",
        )
    if drafter is None:
        return lookup_draft(speculation.tokens, speculation.ngram)
    return model_draft(drafter, speculation.tokens)


# --- look-up ---


# Cached, so that equal calls return the same object: drafts are static arguments of jit.
@functools.cache
def lookup_draft(tokens: int, ngram: int) -> Draft:
    """Return a draft of the tokens that followed earlier occurrences of the row's last tokens.

    At most `ngram` last tokens are matched, in the row's own text and in each of the other
    completions of its prompt (as SuffixDecoding matches a server's answers, arXiv 2411.04975).

    Each text contributes its longest match and, of equally long ones, the match nearest to the
    position at which the row continues. The texts with the longest match of all vote on each token
    of the draft. A match in the row's own text that reaches its end is continued periodically. If
    no text matches, the last token is repeated.
    """

    def init_cache(params: Params, rows: int, length: int) -> Any:
        return ()

    def extend(params: Params, cache: Any, *token_arrays: Array) -> tuple[None, Any]:
        return None, cache

    def propose(
        params: Params, cache: Any, inputs: DraftInputs, config: SamplerConfig
    ) -> tuple[Array, Any]:
        group_matched, group_continuation = _match_group(inputs, tokens, ngram)
        own_matched, own_continuation = _match_own_text(inputs, tokens, ngram)
        matched = jnp.concatenate([group_matched, own_matched], axis=1)
        continuation = jnp.concatenate([group_continuation, own_continuation], axis=1)
        return _sample_from_votes(matched, continuation, inputs.uniforms), cache

    return Draft(tokens, init_cache, extend, propose)


def _match_own_text(inputs: DraftInputs, tokens: int, ngram: int) -> tuple[Array, Array]:
    """Return (matched [B, 1], continuation [B, 1, tokens]) of each row's own text.

    `matched` is the length of the longest match.
    """
    lengths = inputs.lengths[:, None]
    is_text = jnp.arange(inputs.text.shape[1])[None] < lengths
    text = jnp.where(is_text, inputs.text, NO_TOKEN)[:, None]
    before_text = jnp.full((len(text), ngram), NO_TOKEN)
    matched, start = _longest_match(inputs, text, before_text, inputs.lengths)
    start = jnp.where(matched > 0, start, lengths - 1)
    period = jnp.maximum(lengths - start, 1)
    positions = start + jnp.arange(tokens)[None] % period
    continuation = jnp.take_along_axis(inputs.text, positions, axis=1)
    return matched, continuation[:, None]


def _match_group(inputs: DraftInputs, tokens: int, ngram: int) -> tuple[Array, Array]:
    """Return (matched [B, G], continuation [B, G, tokens]) of the other completions of the group.

    `matched` is the length of the longest match, or -1 if there is none. The continuation is
    NO_TOKEN beyond the end of a completion.
    """
    group_tokens = inputs.group_tokens
    prompt_end = _last_tokens(inputs.text, inputs.prompt_lengths, ngram)
    column = inputs.lengths - inputs.prompt_lengths
    matched, start = _longest_match(inputs, group_tokens, prompt_end, column)
    columns = start[:, :, None] + jnp.arange(tokens)[None, None]
    width = group_tokens.shape[2]
    continuation = jnp.take_along_axis(group_tokens, jnp.minimum(columns, width - 1), axis=2)
    return jnp.where(matched > 0, matched, -1), jnp.where(columns < width, continuation, NO_TOKEN)


def _last_tokens(text: Array, ends: Array, count: int) -> Array:
    """text [B, S], ends [B] -> the `count` tokens before each end, [B, count].

    NO_TOKEN before the first token.
    """
    positions = ends[:, None] - count + jnp.arange(count)[None]
    tokens = jnp.take_along_axis(text, jnp.maximum(positions, 0), axis=1)
    return jnp.where(positions >= 0, tokens, NO_TOKEN)


def _longest_match(
    inputs: DraftInputs, texts: Array, before_texts: Array, column: Array
) -> tuple[Array, Array]:
    """Find the longest occurrence of each row's last tokens in each of its texts.

    NO_TOKEN before the first token of a text matches NO_TOKEN before the first token of the row.
    Behind a short prompt, the other completions are therefore read from their beginning.

    Args:
        texts: [B, G, n] int32, NO_TOKEN where there is no token.
        before_texts: [B, ngram] int32, the tokens before the texts.
        column: [B] int32, the column at which the row continues. Of equally long matches, the one
            nearest to it is chosen.

    Returns:
        (matched [B, G], the number of last tokens that match; start [B, G], the column of the token
        after the match).
    """
    rows, group, width = texts.shape
    ngram = before_texts.shape[1]
    last_tokens = _last_tokens(inputs.text, inputs.lengths, ngram)
    before_each = jnp.broadcast_to(before_texts[:, None], (rows, group, ngram))
    extended = jnp.concatenate([before_each, texts], axis=2)
    is_match = texts != NO_TOKEN
    lengths = jnp.zeros(texts.shape, jnp.int32)
    for i in reversed(range(ngram)):
        is_match &= extended[:, :, i : i + width] == last_tokens[:, i, None, None]
        lengths += is_match
    # Length and nearness are packed into one number, whose maximum is unpacked again; jnp.argmax is
    # slower on a CPU.
    distance = jnp.arange(width)[None] - column[:, None]
    base = 2 * width + 2
    nearness = base - 1 - 2 * jnp.abs(distance) - (distance > 0)
    best = jnp.max(lengths * base + nearness[:, None], axis=2)
    farness = base - 1 - best % base
    offset = jnp.where(farness % 2 == 1, farness // 2, -(farness // 2))
    return best // base, column[:, None] + offset


def _sample_from_votes(matched: Array, continuation: Array, uniforms: Array) -> Array:
    """Sample each token of a draft from the votes of the texts with the longest match.

    The cumulative distribution of votes is inverted as the sampler inverts the policy's. A text
    votes as long as the draft follows it. If none votes, the last text, which is the row's own,
    decides.

    Args:
        matched: [B, G + 1] int32, length of each text's longest match.
        continuation: [B, G + 1, k] int32, tokens that follow it.
        uniforms: [B, k] float32.

    Returns:
        The draft, [B, k] int32.
    """
    votes = matched == jnp.max(matched, axis=1, keepdims=True)
    draft = []
    for i in range(continuation.shape[2]):
        token = continuation[:, :, i]
        votes &= token != NO_TOKEN
        count = jnp.sum(votes, axis=1, keepdims=True)
        in_order = jnp.sort(jnp.where(votes, token, jnp.iinfo(jnp.int32).max), axis=1)
        index = jnp.minimum((uniforms[:, i, None] * count).astype(jnp.int32), count - 1)
        chosen = jnp.take_along_axis(in_order, jnp.maximum(index, 0), axis=1)
        chosen = jnp.where(count > 0, chosen, token[:, -1:])
        votes &= token == chosen
        draft.append(chosen[:, 0])
    return jnp.stack(draft, axis=1)


# --- a small model ---


@functools.cache
def model_draft(policy: Policy, tokens: int) -> Draft:
    """Return a draft that another policy samples, one token after the other.

    It samples with the uniform numbers of the positions, and without a repetition penalty.
    """

    def propose(
        params: Params, cache: Any, inputs: DraftInputs, config: SamplerConfig
    ) -> tuple[Array, Any]:
        draft_config = replace(config, repetition_penalty=1.0)
        # The last token but one is read again: if the entire previous draft was right, it has not
        # been read yet.
        count = jnp.minimum(inputs.lengths, 2)
        positions = (inputs.lengths - count)[:, None] + jnp.arange(2)[None]
        last_two = jnp.take_along_axis(inputs.text, positions, axis=1)
        cache = with_lengths(cache, inputs.lengths - count)
        logits, cache = policy.extend(
            params, cache, last_two, positions, jnp.zeros_like(last_two), count
        )
        logits = jnp.take_along_axis(logits, (count - 1)[:, None, None], axis=1)[:, 0]
        logits = logits.astype(jnp.float32)
        first_token = sample_tokens(logits, inputs.uniforms[:, 0], draft_config)[0]

        def sample_next(
            carry: tuple[Any, Array, Array], uniform: Array
        ) -> tuple[tuple[Any, Array, Array], Array]:
            cache, token, position = carry
            column = token[:, None]
            logits, cache = policy.extend(
                params,
                cache,
                column,
                position[:, None],
                jnp.zeros_like(column),
                jnp.ones_like(token),
            )
            token = sample_tokens(logits[:, 0].astype(jnp.float32), uniform, draft_config)[0]
            return (cache, token, position + 1), token

        carry = (cache, first_token, inputs.lengths)
        (cache, *_), later_tokens = jax.lax.scan(sample_next, carry, inputs.uniforms[:, 1:].T)
        return jnp.concatenate([first_token[:, None], later_tokens.T], axis=1), cache

    return Draft(tokens, policy.init_cache, policy.extend, propose)
