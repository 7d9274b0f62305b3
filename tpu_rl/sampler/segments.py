"""One segment of decoding: steps in which every live row draws a token or, with a draft, a few at once."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_rl.sampler import speculation
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.drafts import Draft
from tpu_rl.sampler.drawing import draw, uniforms
from tpu_rl.sampler.slots import Border, Drawn, Pool, Queue, Slots, border_of, each_device, pull_rows, write
from tpu_rl.types import Array, Params, Policy


class _Carry(NamedTuple):
    steps: Array
    slots: Slots
    drawn: Drawn
    tally: Array | None
    """[2] int32, of `Border`."""


@functools.partial(jax.jit, static_argnames=("policy", "config", "mesh", "draft"), donate_argnames=("slots", "drawn"))
def decode_segment(
    policy: Policy,
    config: SamplerConfig,
    mesh: Mesh | None,
    params: Params,
    pool: Pool | None,
    queue: Queue | None,
    slots: Slots,
    taken: Array,
    drawn: Drawn,
    draft: Draft | None = None,
) -> tuple[Slots, Drawn, Border]:
    """At most `config.borders.steps` steps. Without a pool nothing waits: fewer when all rows have ended.

    With a pool, free slots take the next rows of their queue, and the segment is over when all queues are empty, or one
    of a device that has more rows for the next pool. With a draft, the slots' cache is a `speculation.Drafted`.
    """

    def going(carry: _Carry) -> Array:
        return (carry.steps < config.borders.steps) & jnp.any(carry.slots.live)

    def step(carry: _Carry) -> _Carry:
        how = (config, mesh, params, carry.slots, carry.drawn)
        if draft is None:
            return _Carry(carry.steps + 1, *_decode_step(policy, *how), None)
        assert carry.tally is not None
        slots, drawn, tally = speculation.decode_step(policy, draft, *how)
        return _Carry(carry.steps + 1, slots, drawn, carry.tally + tally)

    begin = _Carry(jnp.int32(0), slots, drawn, None if draft is None else jnp.zeros(2, jnp.int32))
    if pool is None or queue is None:
        end = jax.lax.while_loop(going, step, begin)
        return end.slots, end.drawn, border_of(mesh, end.slots, taken, end.tally)

    def all_busy(slots: Slots, taken: Array) -> Array:
        free = jnp.any(~slots.live.reshape(len(taken), -1), axis=1)
        return ~jnp.any(free & (taken < queue.size))

    def served(carry: tuple[_Carry, Array]) -> Array:
        empty = carry[1] >= queue.size
        return going(carry[0]) & ~jnp.all(empty) & ~jnp.any(empty & queue.more)

    def serve(carry: tuple[_Carry, Array]) -> tuple[_Carry, Array]:
        rows, taken = carry
        rows = jax.lax.while_loop(lambda rows: going(rows) & all_busy(rows.slots, taken), step, rows)
        slots, taken = each_device(mesh, pull_rows, rows.slots, taken, pool, queue, results=2)
        return rows._replace(slots=slots), taken

    end, taken = jax.lax.while_loop(served, serve, (begin, taken))
    return end.slots, end.drawn, border_of(mesh, end.slots, taken, end.tally)


def _decode_step(
    policy: Policy, config: SamplerConfig, mesh: Mesh | None, params: Params, slots: Slots, drawn: Drawn
) -> tuple[Slots, Drawn]:
    """Every live row reads its last token and draws the next; the others stay as they are."""
    live = slots.live.astype(jnp.int32)
    current, position = slots.token[:, None], slots.length[:, None] - 1
    logits, cache = policy.extend(params, slots.cache, current, position, jnp.zeros_like(current), live)
    found = draw(logits[:, 0].astype(jnp.float32), uniforms(slots.key, slots.length), config, slots.seen)
    outside = drawn.tokens.shape[1]
    drawn = write(mesh, drawn, slots.row, jnp.where(slots.live, slots.drawn, outside), found)
    token = jnp.where(slots.live, found[0], slots.token)
    seen = slots.seen
    if seen is not None:
        seen = seen.at[jnp.arange(len(token)), token].set(True)
    ended = jnp.isin(token, jnp.asarray(config.stop_ids, jnp.int32)) | (slots.drawn + live >= slots.limit)
    after = slots._replace(
        cache=cache,
        token=token,
        length=slots.length + live,
        drawn=slots.drawn + live,
        live=slots.live & ~ended,
        seen=seen,
    )
    return after, drawn
