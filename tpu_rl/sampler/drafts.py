"""What guesses a row's next tokens: look-up in what its group has written, or a small model.

Both take the uniforms that the policy will draw the guessed positions with. Where a draft's distribution is near the
policy's, it mostly draws the very token, at any temperature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.errors import InputError
from tpu_rl.sampler.caches import forgets, with_lengths
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.drawing import draw
from tpu_rl.sampler.slots import NO_TOKEN
from tpu_rl.types import Array, Params, Policy


class Known(NamedTuple):
    """What a draft of k tokens is made from."""

    text: Array
    """[B, S] int32: each row's tokens; what stands behind them is nobody's."""
    lengths: Array
    """[B] int32: how many there are."""
    prompts: Array
    """[B] int32: how many of them are the prompt's."""
    others: Array
    """[B, G, n] int32: of the other completions of the prompt on the row's device what is drawn; NO_TOKEN elsewhere."""
    uniforms: Array
    """[B, k] float32 in [0, 1): what the policy will draw the positions with."""


class Draft(NamedTuple):
    """What guesses a row's next tokens."""

    tokens: int
    """k."""
    init_cache: Callable[[Params, int, int], Any]
    """As of `Policy`."""
    extend: Callable[[Params, Any, Array, Array, Array, Array], tuple[Any, Any]]
    """As of `Policy`, but for what stands in place of the logits: reads tokens before the first draft."""
    propose: Callable[[Params, Any, Known, SamplerConfig], tuple[Array, Any]]
    """(params, cache, known, config) -> (draft [B, k], cache).

    Of a row's tokens the cache holds all but the last, or the last two if all of the draft before came true; it may
    hold more, which no longer are the row's.
    """


def make_draft(
    policy: Policy, params: Params, config: SamplerConfig, drafter: Policy | None, length: int
) -> Draft | None:
    """What the settings ask for; None without speculation. `length`: most tokens of a row.

    Raises InputError where a small model is asked for and there is none, or the other way round, and where a cache
    cannot forget tokens.
    """
    how = config.speculation
    if not how.tokens:
        return None
    if (how.model is None) != (drafter is None):
        why = f"speculation.model is {how.model!r}"
        raise InputError(
            "sample: it is not clear what drafts", why=why, fix="give both `drafter` and its name, or none"
        )
    for one in (policy, drafter):
        # What reads along commits a token more than it drafts, and reads two again.
        if one is not None and not forgets(one, params, length, how.tokens + 3):
            raise InputError(
                "speculative decoding needs caches that can forget tokens",
                why="a part of this policy's cache has no place of its own for each token: a ring, or a running state",
                fix=f"set speculation.tokens to {max((one.forgets or 0) - 3, 0)}",
            )
    return look_up(how.tokens, how.ngram) if drafter is None else small_model(drafter, how.tokens)


# --- look-up -------------------------------------------------------------------------------------------------------


@functools.cache
def look_up(tokens: int, ngram: int) -> Draft:
    """What followed where the row's last tokens, at most `ngram`, stood before: in its own text, and in each of the
    other completions of its prompt (as SuffixDecoding does with a server's answers, arXiv 2411.04975).

    Each text names the longest match that it has, of equal ones that nearest to where the row goes on; those with the
    longest of all vote, and the draft is drawn from their votes. Behind the row's end its own text goes on as it did
    from the match on. No match anywhere: the last token once more.
    """

    def init_cache(params: Params, rows: int, length: int) -> Any:
        del params, rows, length
        return ()

    def extend(params: Params, cache: Any, *new: Array) -> tuple[None, Any]:
        del params, new
        return None, cache

    def propose(params: Params, cache: Any, known: Known, config: SamplerConfig) -> tuple[Array, Any]:
        del params, config
        matched, follow = (
            jnp.concatenate(both, axis=1)
            for both in zip(_in_the_others(known, tokens, ngram), _in_own_text(known, tokens, ngram), strict=True)
        )
        return _drawn_from_votes(matched, follow, known.uniforms), cache

    return Draft(tokens, init_cache, extend, propose)


def _in_own_text(known: Known, tokens: int, ngram: int) -> tuple[Array, Array]:
    """matched [B, 1], tokens of its longest match, and what follows it [B, 1, tokens]."""
    lengths, places = known.lengths[:, None], jnp.arange(known.text.shape[1])[None]
    text = jnp.where(places < lengths, known.text, NO_TOKEN)[:, None]
    matched, begin = _longest_match(known, text, jnp.full((len(text), ngram), NO_TOKEN), known.lengths)
    begin = jnp.where(matched > 0, begin, lengths - 1)
    period = jnp.maximum(lengths - begin, 1)
    follow = jnp.take_along_axis(known.text, begin + jnp.arange(tokens)[None] % period, axis=1)
    return matched, follow[:, None]


def _in_the_others(known: Known, tokens: int, ngram: int) -> tuple[Array, Array]:
    """matched [B, G], -1 where nothing is matched, and what follows [B, G, tokens]; NO_TOKEN behind their ends."""
    front = _before(known.text, known.prompts, ngram)
    matched, begin = _longest_match(known, known.others, front, known.lengths - known.prompts)
    places, width = begin[:, :, None] + jnp.arange(tokens)[None, None], known.others.shape[2]
    follow = jnp.take_along_axis(known.others, jnp.minimum(places, width - 1), axis=2)
    return jnp.where(matched > 0, matched, -1), jnp.where(places < width, follow, NO_TOKEN)


def _before(text: Array, ends: Array, count: int) -> Array:
    """The last so many tokens before the ends [B] of texts [B, S] -> [B, count]; NO_TOKEN before the first."""
    places = ends[:, None] - count + jnp.arange(count)[None]
    return jnp.where(places >= 0, jnp.take_along_axis(text, jnp.maximum(places, 0), axis=1), NO_TOKEN)


def _longest_match(known: Known, texts: Array, front: Array, here: Array) -> tuple[Array, Array]:
    """texts [B, G, n], NO_TOKEN where there is nothing, and what stands before them [B, ngram] -> (matched [B, G],
    how many of the row's last tokens; begin [B, G], where what followed them begins).

    Of equal ones that nearest to `here` [B], where the row goes on. What stands before the first token of a text counts
    as equal, too: so behind a short prompt the others are read from their beginning.
    """
    (rows, group, width), ngram = texts.shape, front.shape[1]
    last = _before(known.text, known.lengths, ngram)
    whole = jnp.concatenate([jnp.broadcast_to(front[:, None], (rows, group, ngram)), texts], axis=2)
    going, matched = texts != NO_TOKEN, jnp.zeros(texts.shape, jnp.int32)
    for begin in reversed(range(ngram)):
        going &= whole[:, :, begin : begin + width] == last[:, begin, None, None]
        matched += going
    # The largest of one number each, from which match and place are read again; jnp.argmax is slower on a CPU.
    away, numbers = jnp.arange(width)[None] - here[:, None], 2 * width + 2
    nearness = numbers - 1 - 2 * jnp.abs(away) - (away > 0)
    best = jnp.max(matched * numbers + nearness[:, None], axis=2)
    farness = numbers - 1 - best % numbers
    return best // numbers, here[:, None] + jnp.where(farness % 2 == 1, farness // 2, -(farness // 2))


def _drawn_from_votes(matched: Array, follow: Array, uniforms: Array) -> Array:
    """matched [B, G + 1], follow [B, G + 1, k], uniforms [B, k] -> draft [B, k].

    Inverts the cumulative distribution of the votes as the sampler inverts the policy's. Where none is left, the last
    text's, the row's own, counts.
    """
    votes, draft = matched == jnp.max(matched, axis=1, keepdims=True), []
    for i in range(follow.shape[2]):
        token = follow[:, :, i]
        votes &= token != NO_TOKEN
        count = jnp.sum(votes, axis=1, keepdims=True)
        in_order = jnp.sort(jnp.where(votes, token, jnp.iinfo(jnp.int32).max), axis=1)
        place = jnp.minimum((uniforms[:, i, None] * count).astype(jnp.int32), count - 1)
        chosen = jnp.take_along_axis(in_order, jnp.maximum(place, 0), axis=1)
        chosen = jnp.where(count > 0, chosen, token[:, -1:])
        votes &= token == chosen
        draft.append(chosen[:, 0])
    return jnp.stack(draft, axis=1)


# --- a small model -------------------------------------------------------------------------------------------------


@functools.cache
def small_model(policy: Policy, tokens: int) -> Draft:
    """What another policy draws, one token after the other, with the uniforms of the positions."""

    def propose(params: Params, cache: Any, known: Known, config: SamplerConfig) -> tuple[Array, Any]:
        how = replace(config, repetition_penalty=1.0)
        # The last token but one is read again: where all of the draft before came true, it was not read yet.
        count = jnp.minimum(known.lengths, 2)
        places = (known.lengths - count)[:, None] + jnp.arange(2)[None]
        pair = jnp.take_along_axis(known.text, places, axis=1)
        cache = with_lengths(cache, known.lengths - count)
        logits, cache = policy.extend(params, cache, pair, places, jnp.zeros_like(pair), count)
        last = jnp.take_along_axis(logits, (count - 1)[:, None, None], axis=1)[:, 0]
        first = draw(last.astype(jnp.float32), known.uniforms[:, 0], how)[0]

        def one(carry: tuple[Any, Array, Array], uniform: Array) -> tuple[tuple[Any, Array, Array], Array]:
            cache, token, place = carry
            column = token[:, None]
            new = (column, place[:, None], jnp.zeros_like(column), jnp.ones_like(token))
            logits, cache = policy.extend(params, cache, *new)
            token = draw(logits[:, 0].astype(jnp.float32), uniform, how)[0]
            return (cache, token, place + 1), token

        (cache, *_), rest = jax.lax.scan(one, (cache, first, known.lengths), known.uniforms[:, 1:].T)
        return jnp.concatenate([first[:, None], rest.T], axis=1), cache

    return Draft(tokens, policy.init_cache, policy.extend, propose)
