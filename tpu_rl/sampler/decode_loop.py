"""A decode segment: steps in which every live row samples a token or, with drafts, several tokens.

A segment is one jitted program. Rows that end in it free their slots, which the next rows of the
queues take, without a visit of the host.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_rl.sampler import speculation
from tpu_rl.sampler.cache_ops import latest_routing
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.drafts import Draft
from tpu_rl.sampler.slots import (
    Outputs,
    Pool,
    Queue,
    SegmentStatus,
    Slots,
    map_devices,
    refill_on_device,
    segment_status,
    write_outputs,
)
from tpu_rl.sampler.token_sampling import sample_tokens, uniforms
from tpu_rl.types import UNREAD, Array, Params, Policy


class _Carry(NamedTuple):
    steps: Array
    slots: Slots
    outputs: Outputs
    draft_counts: Array | None
    """[2] int32, of `SegmentStatus`."""


@functools.partial(
    jax.jit,
    static_argnames=("policy", "config", "mesh", "draft"),
    donate_argnames=("slots", "outputs"),
)
def decode_segment(
    policy: Policy,
    config: SamplerConfig,
    mesh: Mesh | None,
    params: Params,
    pool: Pool | None,
    queue: Queue | None,
    slots: Slots,
    num_taken: Array,
    outputs: Outputs,
    draft: Draft | None = None,
    greedy: Array | bool = False,
) -> tuple[Slots, Outputs, SegmentStatus]:
    """Decode at most `config.segments.steps` steps.

    Without a pool and a queue, no row waits, and the segment also ends when all rows have ended.
    With them, free slots take the next rows of their device's queue, of which `num_taken` [D] have
    taken slots before. The segment then also ends when all queues are empty, or when the queue of a
    device is empty that has rows for another pool.

    With a draft, the cache of the slots is a `speculation.SpeculativeCache`. `config` is
    `SamplerConfig.of_programs`, and `greedy` [] bool takes the most likely tokens.
    """

    def should_decode(carry: _Carry) -> Array:
        return (carry.steps < config.segments.steps) & jnp.any(carry.slots.live)

    def decode_step(carry: _Carry) -> _Carry:
        if draft is None:
            slots, outputs = _decode_step(
                policy, config, mesh, params, carry.slots, carry.outputs, greedy
            )
            return _Carry(carry.steps + 1, slots, outputs, None)
        assert carry.draft_counts is not None
        slots, outputs, draft_counts = speculation.decode_step(
            policy, draft, config, mesh, params, carry.slots, carry.outputs, greedy
        )
        return _Carry(carry.steps + 1, slots, outputs, carry.draft_counts + draft_counts)

    draft_counts = None if draft is None else jnp.zeros(2, jnp.int32)
    carry = _Carry(jnp.int32(0), slots, outputs, draft_counts)
    if pool is None or queue is None:
        carry = jax.lax.while_loop(should_decode, decode_step, carry)
        status = segment_status(mesh, carry.slots, num_taken, carry.draft_counts)
        return carry.slots, carry.outputs, status

    def cannot_refill(slots: Slots, num_taken: Array) -> Array:
        has_free_slot = jnp.any(~slots.live.reshape(len(num_taken), -1), axis=1)
        return ~jnp.any(has_free_slot & (num_taken < queue.size))

    def should_continue(state: tuple[_Carry, Array]) -> Array:
        carry, num_taken = state
        is_empty = num_taken >= queue.size
        needs_next_pool = jnp.any(is_empty & queue.has_more)
        return should_decode(carry) & ~jnp.all(is_empty) & ~needs_next_pool

    def decode_and_refill(state: tuple[_Carry, Array]) -> tuple[_Carry, Array]:
        carry, num_taken = state
        carry = jax.lax.while_loop(
            lambda carry: should_decode(carry) & cannot_refill(carry.slots, num_taken),
            decode_step,
            carry,
        )
        slots, num_taken = map_devices(
            mesh, refill_on_device, carry.slots, num_taken, pool, queue, num_results=2
        )
        return carry._replace(slots=slots), num_taken

    carry, num_taken = jax.lax.while_loop(should_continue, decode_and_refill, (carry, num_taken))
    status = segment_status(mesh, carry.slots, num_taken, carry.draft_counts)
    return carry.slots, carry.outputs, status


def _decode_step(
    policy: Policy,
    config: SamplerConfig,
    mesh: Mesh | None,
    params: Params,
    slots: Slots,
    outputs: Outputs,
    greedy: Array | bool,
) -> tuple[Slots, Outputs]:
    """Read the last token of every live row and sample its next. Other rows do not change."""
    live = slots.live.astype(jnp.int32)
    last_token = slots.token[:, None]
    position = slots.length[:, None] - 1
    branch = jnp.where(slots.live, 0, UNREAD)[:, None]
    logits, cache = policy.extend(params, slots.cache, last_token, position, branch, live)
    logits = logits[:, 0].astype(jnp.float32)
    uniform = uniforms(slots.key, slots.length, greedy)
    sampled = sample_tokens(logits, uniform, config, slots.seen, exact=policy.exact)
    # A column beyond the end is dropped.
    columns = outputs.tokens.shape[1]
    column = jnp.where(slots.live, slots.num_sampled, columns)
    written = sampled
    if outputs.routing is not None:
        written = (*sampled, latest_routing(cache, 1)[:, 0])
    outputs = write_outputs(mesh, outputs, slots.row, column, written)
    token = jnp.where(slots.live, sampled[0], slots.token)
    seen = slots.seen
    if seen is not None:
        seen = seen.at[jnp.arange(len(token)), token].set(True)
    is_stop = jnp.isin(token, jnp.asarray(config.stop_ids, jnp.int32))
    has_ended = is_stop | (slots.num_sampled + live >= slots.limit)
    slots = slots._replace(
        cache=cache,
        token=token,
        length=slots.length + live,
        num_sampled=slots.num_sampled + live,
        live=slots.live & ~has_ended,
        seen=seen,
    )
    return slots, outputs
