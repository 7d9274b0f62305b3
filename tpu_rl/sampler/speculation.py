"""Speculative decoding: the step that verifies drafts, and the cache of slots that are drafted.

The policy reads a row's last token and its draft of k tokens in one call of `extend`, which gives
the logits of k + 1 positions. Each position is sampled with its own uniform number, the same that
plain decoding would use. The logits of a position are right if all drafted tokens before it are the
tokens sampled. So the sampled tokens up to the first that differs from the draft, that one
included, are exactly those of plain decoding, whatever the draft was. (Rejection sampling, as in
arXiv 2211.17192, preserves only the distribution; here the tokens are the same.)

The logits of a wider `extend` may differ in their last bits. A token can then differ only if its
uniform number lies that close to the border between two tokens of the cumulative distribution.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_rl.sampler.cache_ops import with_lengths
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.drafts import Draft, DraftInputs
from tpu_rl.sampler.slots import (
    NO_TOKEN,
    Outputs,
    Slots,
    map_devices,
    shard_cache_rows,
    vocabulary_size,
    write_outputs,
)
from tpu_rl.sampler.token_sampling import sample_tokens, uniforms
from tpu_rl.types import Array, Params, Policy


class SpeculativeCache(NamedTuple):
    """The cache of slots that are drafted. Its leaves have rows where those of any cache do."""

    policy: Any
    """The policy's cache."""
    text: Array
    """[1, B, S] int32: tokens of each row. What follows its last token has no meaning."""
    draft: Any
    """The draft's cache."""


# --- slots ---


# Cached, so that equal calls return the same object: policies are static arguments of jit.
@functools.cache
def with_draft(policy: Policy, draft: Draft) -> Policy:
    """Return the policy with a `SpeculativeCache`: the draft reads every token that it reads."""

    def init_cache(params: Params, rows: int, length: int) -> SpeculativeCache:
        return SpeculativeCache(
            policy=policy.init_cache(params, rows, length),
            text=jnp.zeros((1, rows, length), jnp.int32),
            draft=draft.init_cache(params, rows, length),
        )

    def extend(
        params: Params,
        cache: SpeculativeCache,
        tokens: Array,
        positions: Array,
        branch_ids: Array,
        commit: Array,
    ) -> tuple[Array, SpeculativeCache]:
        logits, policy_cache = policy.extend(
            params, cache.policy, tokens, positions, branch_ids, commit
        )
        text = _with_tokens(cache.text[0], positions[:, 0], tokens)[None]
        _, draft_cache = draft.extend(params, cache.draft, tokens, positions, branch_ids, commit)
        return logits, SpeculativeCache(policy_cache, text, draft_cache)

    return Policy(init_cache, extend, exact=policy.exact)


def _with_tokens(text: Array, start: Array, tokens: Array) -> Array:
    """Write tokens [B, T] into text [B, S], from column `start` [B] on.

    Does not scatter, because that would move rows between devices.
    """
    column = jnp.arange(text.shape[1])[None] - start[:, None]
    width = tokens.shape[1]
    new = jnp.take_along_axis(tokens, jnp.clip(column, 0, width - 1), axis=1)
    return jnp.where((column >= 0) & (column < width), new, text)


@functools.partial(jax.jit, static_argnames=("draft", "mesh", "length"), donate_argnames=("slots",))
def start_speculation(
    draft: Draft,
    mesh: Mesh | None,
    length: int,
    params: Params,
    slots: Slots,
    contexts: Array,
    outputs: Outputs,
) -> Slots:
    """Turn slots of plain decoding into slots that are drafted.

    `length` is the number of tokens that their cache has room for, and `contexts` are the contexts
    of the slots' rows, [B, context_length].
    """

    def take(row: Array, outputs: Outputs) -> tuple[Array]:
        return (outputs.tokens[row],)

    (completions,) = map_devices(mesh, take, slots.row, outputs)
    text = jnp.zeros((len(contexts), length), jnp.int32)
    text = _with_tokens(text, jnp.zeros_like(slots.length), contexts)
    text = _with_tokens(text, slots.length - slots.num_sampled, jnp.maximum(completions, 0))
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), text.shape)
    draft_cache = draft.init_cache(params, *text.shape)
    _, draft_cache = draft.extend(
        params, draft_cache, text, positions, jnp.zeros_like(text), slots.length - 1
    )
    draft_cache = shard_cache_rows(mesh, draft_cache)
    return slots._replace(cache=SpeculativeCache(slots.cache, text[None], draft_cache))


# --- one step ---


def decode_step(
    policy: Policy,
    draft: Draft,
    config: SamplerConfig,
    mesh: Mesh | None,
    params: Params,
    slots: Slots,
    outputs: Outputs,
    greedy: Array | bool,
) -> tuple[Slots, Outputs, Array]:
    """Sample 1 to k + 1 tokens for every live row. Other rows do not change.

    The third result is `SegmentStatus.draft_counts` of this step.
    """
    cache: SpeculativeCache = slots.cache
    text = cache.text[0]
    width = 1 + draft.tokens
    ahead = jnp.arange(width)[None]
    live = slots.live[:, None]

    # Propose a draft.
    uniform = jax.vmap(uniforms, in_axes=(None, 1, None), out_axes=1)(
        slots.key, slots.length[:, None] + ahead, greedy
    )
    inputs = DraftInputs(
        text=text,
        lengths=slots.length,
        prompt_lengths=slots.length - slots.num_sampled,
        group_tokens=group_completions(
            config.samples_per_prompt, mesh, slots.row, outputs, text.shape[1]
        ),
        uniforms=uniform[:, :-1],
    )
    draft_tokens, draft_cache = draft.propose(params, cache.draft, inputs, config)
    # An id that is no token would leave NaN in the cache, which no mask removes.
    draft_tokens = jnp.clip(draft_tokens, 0, vocabulary_size(policy, params) - 1)

    # Sample all positions, as if the draft were right.
    read = jnp.concatenate([slots.token[:, None], draft_tokens], axis=1)
    logits, policy_cache = policy.extend(
        params,
        cache.policy,
        read,
        slots.length[:, None] - 1 + ahead,
        jnp.zeros_like(read),
        width * slots.live.astype(jnp.int32),
    )
    seen = None
    if slots.seen is not None:
        seen = _seen_at_each(slots.seen, draft_tokens).reshape(read.size, -1)
    flat_logits = logits.reshape(read.size, -1).astype(jnp.float32)
    sampled = sample_tokens(flat_logits, uniform.reshape(-1), config, seen, exact=policy.exact)
    token, log_probs, behaviour_log_probs = (part.reshape(read.shape) for part in sampled)

    is_stop = jnp.isin(token, jnp.asarray(config.stop_ids, jnp.int32))
    column = slots.num_sampled[:, None] + ahead
    is_kept = _kept(draft_tokens, token, is_stop) & live & (column < slots.limit[:, None])
    count = jnp.sum(is_kept, axis=1, dtype=jnp.int32)
    num_sampled = slots.num_sampled + count
    has_ended = jnp.any(is_kept & is_stop, axis=1) | (num_sampled >= slots.limit)

    # A column beyond the end is dropped.
    column = jnp.where(is_kept, column, outputs.tokens.shape[1])
    row = jnp.broadcast_to(slots.row[:, None], column.shape)
    outputs = write_outputs(mesh, outputs, row, column, (token, log_probs, behaviour_log_probs))
    length = slots.length + count
    last_token = jnp.take_along_axis(token, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    text = jnp.where(live, _with_tokens(text, slots.length, token), text)
    draft_counts = jnp.stack([jnp.sum(slots.live, dtype=jnp.int32), jnp.sum(count)])
    slots = slots._replace(
        cache=SpeculativeCache(with_lengths(policy_cache, length - 1), text[None], draft_cache),
        token=jnp.where(slots.live, last_token, slots.token),
        length=length,
        num_sampled=num_sampled,
        live=slots.live & ~has_ended,
        seen=None if slots.seen is None else _seen_after(slots.seen, token, is_kept),
    )
    return slots, outputs, draft_counts


def _kept(draft_tokens: Array, token: Array, is_stop: Array) -> Array:
    """Mark the tokens up to the first that differs from the draft or ends the row, [n, k + 1]."""
    continues = (draft_tokens == token[:, :-1]) & ~is_stop[:, :-1]
    continues = jnp.pad(continues, ((0, 0), (1, 0)), constant_values=True)
    return jnp.cumprod(continues, axis=1, dtype=jnp.int32) > 0


def group_completions(
    group_size: int, mesh: Mesh | None, row: Array, outputs: Outputs, max_tokens: int
) -> Array:
    """Return the first tokens of the other completions in each row's group, [B, group_size, T].

    T is at most `max_tokens`. The row's own completion, and completions on other devices, are
    NO_TOKEN. `row` [B] is the index of each row in its device's outputs.
    """

    def on_device(row: Array, outputs: Outputs, row_number: Array) -> tuple[Array]:
        own = row_number[0] + row[:, None]
        group = own - own % group_size + jnp.arange(group_size)[None]
        is_on_device = (group >= row_number[0]) & (group <= row_number[-1])
        index = jnp.where((group != own) & is_on_device, group - row_number[0], len(row_number))
        tokens = outputs.tokens[:, :max_tokens]
        return (jnp.take(tokens, index, axis=0, mode="fill", fill_value=NO_TOKEN),)

    row_numbers = jnp.arange(len(outputs.tokens), dtype=jnp.int32)
    (completions,) = map_devices(mesh, on_device, row, outputs, row_numbers)
    return completions


def _seen_at_each(seen: Array, draft_tokens: Array) -> Array:
    """Return [B, 1 + k, V]: tokens in the row before each position, if the draft is right.

    `seen` is [B, V] and `draft_tokens` is [B, k].
    """
    one_hot = jax.nn.one_hot(draft_tokens, seen.shape[1], dtype=jnp.int8)
    in_draft = jnp.pad(jax.lax.cummax(one_hot, axis=1), ((0, 0), (1, 0), (0, 0)))
    return seen[:, None] | (in_draft > 0)


def _seen_after(seen: Array, token: Array, is_kept: Array) -> Array:
    """Add tokens [B, T] to `seen` [B, V] where they are kept [B, T]."""
    one_hot = jax.nn.one_hot(token, seen.shape[1], dtype=bool)
    return seen | jnp.any(one_hot & is_kept[:, :, None], axis=1)
