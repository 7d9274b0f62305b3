"""Speculative decoding: the step that verifies drafts, and the slots whose rows are drafted.

The policy reads a row's last token and its draft in one call of `extend`, which gives the logits of k + 1 positions;
each is drawn with its own uniform, the one that plain decoding draws it with. A token's logits are right if all drafted
tokens before it are those that were drawn; so the tokens up to the first that differs from the draft, that one
included, are what plain decoding draws, whatever the draft. (Accepting drafts by rejection, as arXiv 2211.17192 does,
keeps the distribution alone: here tokens are the same.) Logits of a wider `extend` may differ in their last bits: a
token is another only where its uniform lies that near a border of the cumulative distribution.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_rl.sampler.caches import with_lengths
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.drafts import Draft, Known
from tpu_rl.sampler.drawing import draw, uniforms
from tpu_rl.sampler.slots import NO_TOKEN, Drawn, Slots, each_device, spread, vocabulary_size, write
from tpu_rl.types import Array, Params, Policy


class Drafted(NamedTuple):
    """The cache of slots whose rows are drafted; its leaves are those of any policy's cache."""

    policy: Any
    """The policy's own."""
    text: Array
    """[1, B, S] int32: the row's tokens; what stands behind them is nobody's."""
    draft: Any
    """The draft's own."""


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
    others = of_the_group(config.samples_per_prompt, mesh, slots.row, drawn, text.shape[1])
    known = Known(text, slots.length, slots.length - slots.drawn, others, uniform[:, :-1])
    guess, of_draft = draft.propose(params, cache.draft, known, config)
    # What is no token would leave NaN in the cache, where no mask helps against it.
    guess = jnp.clip(guess, 0, vocabulary_size(policy, params) - 1)
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


def of_the_group(group: int, mesh: Mesh | None, row: Array, drawn: Drawn, most: int) -> Array:
    """[B, group, T]: what is drawn by now, at most so many tokens, of the completions of each row's prompt, of those
    that are on its device, without its own."""

    def on_a_device(row: Array, drawn: Drawn, number: Array) -> tuple[Array]:
        own = number[0] + row[:, None]
        others = own - own % group + jnp.arange(group)[None]
        here = (others != own) & (others >= number[0]) & (others <= number[-1])
        place = jnp.where(here, others - number[0], len(number))
        return (jnp.take(drawn.tokens[:, :most], place, axis=0, mode="fill", fill_value=NO_TOKEN),)

    return each_device(mesh, on_a_device, row, drawn, jnp.arange(len(drawn.tokens), dtype=jnp.int32))[0]


def _seen_at_each(seen: Array, guess: Array) -> Array:
    """seen [B, V], guess [B, k] -> [B, 1 + k, V]: what a row has before each next token, where the guess is right."""
    one_hot = jax.nn.one_hot(guess, seen.shape[1], dtype=jnp.int8)
    guessed = jnp.pad(jax.lax.cummax(one_hot, axis=1), ((0, 0), (1, 0), (0, 0)))
    return seen[:, None] | (guessed > 0)


def _seen_after(seen: Array, token: Array, reached: Array) -> Array:
    """seen [B, V] with tokens [B, T] where they are reached [B, T]."""
    one_hot = jax.nn.one_hot(token, seen.shape[1], dtype=bool)
    return seen | jnp.any(one_hot & reached[:, :, None], axis=1)
