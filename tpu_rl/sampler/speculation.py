"""Speculative decoding: drafts, and the step that verifies them.

A draft is a guess of a row's next k tokens. The policy reads the row's last token and the draft in one call of
`extend`, which gives the logits of k + 1 positions; each is drawn with its own uniform, the one that plain decoding
draws it with. A token's logits are right if all drafted tokens before it are those that were drawn; so the tokens up to
the first that differs from the draft, that one included, are what plain decoding draws, whatever the draft. (Accepting
drafts by rejection, as arXiv 2211.17192 does, keeps the distribution alone: here tokens are the same.) Logits of a
wider `extend` may differ in their last bits: a token is another only where its uniform lies that near a border of the
cumulative distribution.

A small model draws its draft with these uniforms, too: where its distribution is near the policy's, it mostly draws the
very token, at any temperature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_rl.errors import InputError
from tpu_rl.sampler.caches import forgets, with_lengths
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.drawing import draw, uniforms
from tpu_rl.sampler.slots import Drawn, Slots, each_device, spread, write
from tpu_rl.types import Array, Params, Policy


class Draft(NamedTuple):
    """What guesses a row's next tokens."""

    tokens: int
    """k."""
    init_cache: Callable[[Params, int, int], Any]
    """As of `Policy`."""
    extend: Callable[[Params, Any, Array, Array, Array, Array], tuple[Any, Any]]
    """As of `Policy`, but for what stands in place of the logits: reads tokens before the first draft."""
    propose: Callable[[Params, Any, Array, Array, Array, SamplerConfig], tuple[Array, Any]]
    """(params, cache, text [B, S], lengths [B], uniforms [B, k], config) -> (draft [B, k], cache).

    The row's tokens are the first lengths[b] of its text. Of these the cache holds all but the last, or the last two if
    all of the draft before came true; it may hold more, which no longer are the row's. The uniforms are those that the
    policy will draw the drafted positions with.
    """


class Drafted(NamedTuple):
    """The cache of slots whose rows are drafted; its leaves are those of any policy's cache."""

    policy: Any
    """The policy's own."""
    text: Array
    """[1, B, S] int32: the row's tokens; what stands behind them is nobody's."""
    draft: Any
    """The draft's own."""


# --- drafts --------------------------------------------------------------------------------------------------------


@functools.cache
def look_up(tokens: int, ngram: int) -> Draft:
    """What followed where the row's last tokens, at most `ngram`, stood before: the longest match, of equal ones the
    latest. Behind the row's end its draft goes on as the text from there does. No match: the last token once more."""

    def init_cache(params: Params, rows: int, length: int) -> Any:
        del params, rows, length
        return ()

    def extend(params: Params, cache: Any, *new: Array) -> tuple[None, Any]:
        del params, new
        return None, cache

    def propose(
        params: Params, cache: Any, text: Array, lengths: Array, uniform: Array, config: SamplerConfig
    ) -> tuple[Array, Any]:
        del params, uniform, config
        return _what_followed(text, lengths, tokens, ngram), cache

    return Draft(tokens, init_cache, extend, propose)


def _what_followed(text: Array, lengths: Array, tokens: int, ngram: int) -> Array:
    """text [B, S], lengths [B] -> [B, tokens]."""
    ends = jnp.arange(text.shape[1])[None]
    last = lengths[:, None] - 1
    going = ends < last
    matched = jnp.zeros_like(text)
    for back in range(ngram):
        before = jnp.pad(text, ((0, 0), (back, 0)), constant_values=-1)[:, : text.shape[1]]
        going &= before == jnp.take_along_axis(text, jnp.maximum(last - back, 0), axis=1)
        matched += going
    score = jnp.where(matched > 0, matched * text.shape[1] + ends, 0)
    end = jnp.where(jnp.any(matched > 0, axis=1), jnp.argmax(score, axis=1), jnp.maximum(lengths - 2, 0))
    period = jnp.maximum(last - end[:, None], 1)
    return jnp.take_along_axis(text, last + 1 - period + jnp.arange(tokens)[None] % period, axis=1)


@functools.cache
def small_model(policy: Policy, tokens: int) -> Draft:
    """What another policy draws, one token after the other, with the uniforms of the positions."""

    def propose(
        params: Params, cache: Any, text: Array, lengths: Array, uniform: Array, config: SamplerConfig
    ) -> tuple[Array, Any]:
        how = replace(config, repetition_penalty=1.0)
        # The last token but one is read again: where all of the draft before came true, it was not read yet.
        count = jnp.minimum(lengths, 2)
        places = (lengths - count)[:, None] + jnp.arange(2)[None]
        pair = jnp.take_along_axis(text, places, axis=1)
        cache = with_lengths(cache, lengths - count)
        logits, cache = policy.extend(params, cache, pair, places, jnp.zeros_like(pair), count)
        last = jnp.take_along_axis(logits, (count - 1)[:, None, None], axis=1)[:, 0]
        first = draw(last.astype(jnp.float32), uniform[:, 0], how)[0]

        def one(carry: tuple[Any, Array, Array], uniform: Array) -> tuple[tuple[Any, Array, Array], Array]:
            cache, token, place = carry
            column = token[:, None]
            new = (column, place[:, None], jnp.zeros_like(column), jnp.ones_like(token))
            logits, cache = policy.extend(params, cache, *new)
            token = draw(logits[:, 0].astype(jnp.float32), uniform, how)[0]
            return (cache, token, place + 1), token

        (cache, *_), rest = jax.lax.scan(one, (cache, first, lengths), uniform[:, 1:].T)
        return jnp.concatenate([first[:, None], rest.T], axis=1), cache

    return Draft(tokens, policy.init_cache, policy.extend, propose)


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


# --- slots ---------------------------------------------------------------------------------------------------------


@functools.cache
def together(policy: Policy, draft: Draft) -> Policy:
    """The policy, with the draft reading along: what makes and fills caches that are `Drafted`."""

    def init_cache(params: Params, rows: int, length: int) -> Drafted:
        text = jnp.zeros((1, rows, length), jnp.int32)
        return Drafted(policy.init_cache(params, rows, length), text, draft.init_cache(params, rows, length))

    def extend(
        params: Params, cache: Drafted, tokens: Array, positions: Array, branch_ids: Array, commit: Array
    ) -> tuple[Array, Drafted]:
        new = (tokens, positions, branch_ids, commit)
        logits, of_policy = policy.extend(params, cache.policy, *new)
        text = _with_tokens(cache.text[0], positions[:, 0], tokens)[None]
        return logits, Drafted(of_policy, text, draft.extend(params, cache.draft, *new)[1])

    return Policy(init_cache, extend)


def _with_tokens(text: Array, start: Array, tokens: Array) -> Array:
    """text [B, S] with tokens [B, T] from start [B] on. No scatter, which would move rows between devices."""
    at = jnp.arange(text.shape[1])[None] - start[:, None]
    width = tokens.shape[1]
    new = jnp.take_along_axis(tokens, jnp.clip(at, 0, width - 1), axis=1)
    return jnp.where((at >= 0) & (at < width), new, text)


@functools.partial(jax.jit, static_argnames=("draft", "mesh", "length"), donate_argnames=("slots",))
def begin(
    draft: Draft, mesh: Mesh | None, length: int, params: Params, slots: Slots, prompts: Array, drawn: Drawn
) -> Slots:
    """Slots of plain decoding, with a cache of so many tokens, as slots whose rows are drafted from now on.

    prompts [B, prompt_length]: of the rows in the slots.
    """

    def completions(row: Array, drawn: Drawn) -> tuple[Array]:
        return (drawn.tokens[row],)

    (drawn_by_now,) = each_device(mesh, completions, slots.row, drawn)
    text = jnp.zeros((len(prompts), length), jnp.int32)
    text = _with_tokens(text, jnp.zeros_like(slots.length), prompts)
    text = _with_tokens(text, slots.length - slots.drawn, jnp.maximum(drawn_by_now, 0))
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), text.shape)
    cache = draft.init_cache(params, *text.shape)
    _, cache = draft.extend(params, cache, text, positions, jnp.zeros_like(text), slots.length - 1)
    return slots._replace(cache=Drafted(slots.cache, text[None], spread(mesh, cache)))


# --- one step ------------------------------------------------------------------------------------------------------


def decode_step(
    policy: Policy, draft: Draft, config: SamplerConfig, mesh: Mesh | None, params: Params, slots: Slots, drawn: Drawn
) -> tuple[Slots, Drawn, Array]:
    """Every live row draws 1 to 1 + k tokens; the others stay as they are. With the tally of `Border`."""
    cache: Drafted = slots.cache
    width, text = 1 + draft.tokens, cache.text[0]
    ahead, live = jnp.arange(width)[None], slots.live[:, None]
    uniform = jax.vmap(uniforms, in_axes=(None, 1), out_axes=1)(slots.key, slots.length[:, None] + ahead)
    guess, of_draft = draft.propose(params, cache.draft, text, slots.length, uniform[:, :-1], config)
    read = jnp.concatenate([slots.token[:, None], guess], axis=1)
    new = (read, slots.length[:, None] - 1 + ahead, jnp.zeros_like(read), width * slots.live.astype(jnp.int32))
    logits, of_policy = policy.extend(params, cache.policy, *new)
    seen = None if slots.seen is None else _seen_at_each(slots.seen, guess).reshape(read.size, -1)
    flat = draw(logits.reshape(read.size, -1).astype(jnp.float32), uniform.reshape(-1), config, seen)
    token, *log_probs = (part.reshape(read.shape) for part in flat)

    stops = jnp.isin(token, jnp.asarray(config.stop_ids, jnp.int32))
    goes_on = (guess == token[:, :-1]) & ~stops[:, :-1]
    reached = jnp.cumprod(jnp.pad(goes_on, ((0, 0), (1, 0)), constant_values=True), axis=1, dtype=jnp.int32) > 0
    column = slots.drawn[:, None] + ahead
    reached &= live & (column < slots.limit[:, None])
    count = jnp.sum(reached, axis=1, dtype=jnp.int32)
    ended = jnp.any(reached & stops, axis=1) | (slots.drawn + count >= slots.limit)

    column = jnp.where(reached, column, drawn.tokens.shape[1])
    drawn = write(mesh, drawn, jnp.broadcast_to(slots.row[:, None], column.shape), column, (token, *log_probs))
    length = slots.length + count
    last = jnp.take_along_axis(token, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    text = jnp.where(live, _with_tokens(text, slots.length, token), text)
    after = slots._replace(
        cache=Drafted(with_lengths(of_policy, length - 1), text[None], of_draft),
        token=jnp.where(slots.live, last, slots.token),
        length=length,
        drawn=slots.drawn + count,
        live=slots.live & ~ended,
        seen=None if slots.seen is None else _seen_after(slots.seen, token, reached),
    )
    return after, drawn, jnp.stack([jnp.sum(slots.live, dtype=jnp.int32), jnp.sum(count)])


def _seen_at_each(seen: Array, guess: Array) -> Array:
    """seen [B, V], guess [B, k] -> [B, 1 + k, V]: what a row has before each next token, where the guess is right."""
    one_hot = jax.nn.one_hot(guess, seen.shape[1], dtype=jnp.int8)
    guessed = jnp.pad(jax.lax.cummax(one_hot, axis=1), ((0, 0), (1, 0), (0, 0)))
    return seen[:, None] | (guessed > 0)


def _seen_after(seen: Array, token: Array, reached: Array) -> Array:
    """seen [B, V] with tokens [B, T] where they are reached [B, T]."""
    one_hot = jax.nn.one_hot(token, seen.shape[1], dtype=bool)
    return seen | jnp.any(one_hot & reached[:, :, None], axis=1)
