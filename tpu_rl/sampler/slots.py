"""Arrays and programs on the devices: the pool of prefilled contexts, the slots, the outputs.

Each device along the mesh's `slot_axes` has its own part of all of these: contexts of the pool, a
queue of rows that continue them, slots, and outputs. Its slots take rows from its own queue and
write to its own outputs. Refilling slots therefore moves nothing between devices but a few flags.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl.sampler.cache_ops import (
    latest_routing,
    put_row,
    resize,
    row_axis,
    take_rows,
    with_shared_prompts,
)
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.train import sharding
from tpu_rl.types import Array, Params, Policy

NO_TOKEN = -1
"""Token id in the outputs where no token is sampled yet."""

HostOrDeviceArray = Any


class Pool(NamedTuple):
    """Prefilled contexts.

    A context is what rows continue: a prompt, or a prompt with the first tokens of a completion.
    """

    cache: Any
    """Cache of each context without its last token."""
    tokens: Array
    """[contexts, context_length] int32."""
    lengths: Array
    """[contexts] int32."""


class Queue(NamedTuple):
    """Rows that continue the pool's contexts, in the order in which they take slots.

    There are D devices with E entries each, of which the first `size` are rows.
    """

    row: HostOrDeviceArray
    """[D * E] int32: index of the row in the device's outputs."""
    context: HostOrDeviceArray
    """[D * E] int32: index of its context in the device's pool."""
    num_sampled: HostOrDeviceArray
    """[D * E] int32: tokens of the completion that the context holds already."""
    limit: HostOrDeviceArray
    """[D * E] int32: length limit of the completion."""
    key: HostOrDeviceArray
    """[D * E] keys."""
    size: HostOrDeviceArray
    """[D] int32."""
    has_more: HostOrDeviceArray
    """[D] bool: True if the device has rows for another pool."""


class Slots(NamedTuple):
    """The rows that are being decoded, one in each of B slots.

    Each segment donates its slots to the next.
    """

    cache: Any
    """Cache of each row without its last token."""
    token: Array
    """[B] int32: the row's last token."""
    length: Array
    """[B] int32: tokens of the row, prompt included."""
    num_sampled: Array
    """[B] int32: tokens of its completion."""
    limit: Array
    """[B] int32: length limit of its completion."""
    key: Array
    """[B] keys."""
    row: Array
    """[B] int32: index of the row in the device's outputs."""
    live: Array
    """[B] bool: False if the slot is free."""
    seen: Array | None
    """[B, V] bool: tokens that are in the row. None if there is no repetition penalty."""


class Outputs(NamedTuple):
    """Sampled tokens of all rows, [N, max_new_tokens] each."""

    tokens: HostOrDeviceArray
    """int32, `NO_TOKEN` where none is sampled yet."""
    log_probs: HostOrDeviceArray
    """float32."""
    behaviour_log_probs: HostOrDeviceArray
    """float32."""
    routing: HostOrDeviceArray | None = None
    """[N, max_new_tokens, L k]: the routing of the token before each, whose logits it was sampled
    from. None if it is not recorded."""


class SegmentStatus(NamedTuple):
    """Results of a segment for the host, replicated so that every process can read them."""

    live: HostOrDeviceArray
    """[B] bool, of `Slots`."""
    length: HostOrDeviceArray
    """[B] int32, of `Slots`."""
    row: HostOrDeviceArray
    """[B] int32, of `Slots`."""
    num_taken: HostOrDeviceArray
    """[D] int32: entries of each queue that have taken a slot."""
    draft_counts: HostOrDeviceArray | None = None
    """[2] int32: drafts verified in the segment, and tokens that they yielded. None without
    drafts."""


# --- devices ---


def slot_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that slots are sharded over."""
    return sharding.rules(mesh)["slots"]


def device_count(mesh: Mesh | None) -> int:
    """Return D, the number of shards of the slots."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in slot_axes(mesh))


def map_devices(
    mesh: Mesh | None, function: Callable[..., Any], *arguments: Any, num_results: int = 1
) -> Any:
    """Apply a function to each device's own part of the arguments.

    Args:
        function: returns a tuple of `num_results` results. They have the same structure as the
            first `num_results` arguments, and are sharded like them.
        arguments: Slots, Pool, Queue, Outputs or arrays with rows on axis 0.

    The compiler alone would gather entire caches to move rows within them, because it cannot know
    that each row stays on its device. Mesh axes other than `slot_axes` are left to it.
    """
    if mesh is None or device_count(mesh) == 1:
        return function(*arguments)
    axes = slot_axes(mesh)
    specs = tuple(_specs(axes, argument) for argument in arguments)
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=specs,
        out_specs=specs[:num_results],
        axis_names={*axes},
        check_vma=False,
    )
    return mapped(*arguments)


def _specs(axes: tuple[str, ...], argument: Any) -> Any:
    """Return a tree like `argument` of the PartitionSpecs that shard its rows over mesh axes."""
    by_row_axis = (PartitionSpec(axes), PartitionSpec(None, axes))
    specs = jax.tree.map(lambda leaf: by_row_axis[0], argument)
    if isinstance(argument, Slots | Pool):
        cache = jax.tree.map(lambda leaf: by_row_axis[row_axis(leaf)], argument.cache)
        specs = specs._replace(cache=cache)
    return specs


def shard_cache_rows(mesh: Mesh | None, cache: Any) -> Any:
    """Constrain the rows of a cache to be sharded over the mesh.

    The compiler chooses how other axes are sharded.
    """
    if mesh is None:
        return cache

    def constrain(leaf: Array) -> Array:
        axes: list[Any] = [PartitionSpec.UNCONSTRAINED] * leaf.ndim
        axes[row_axis(leaf)] = slot_axes(mesh)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(constrain, cache)


def cache_shardings(mesh: Mesh | None, cache: Any) -> tuple[Any, ...] | None:
    """Return the shardings of a cache's leaves, for new caches that will be used like it.

    From an empty cache, the compiler cannot tell how it will be used.
    """
    return None if mesh is None else tuple(leaf.sharding for leaf in jax.tree.leaves(cache))


def _empty_cache(
    policy: Policy, params: Params, rows: int, length: int, shardings: tuple[Any, ...] | None
) -> Any:
    cache = policy.init_cache(params, rows, length)
    if shardings is None:
        return cache
    tree = jax.tree.unflatten(jax.tree.structure(cache), shardings)
    return jax.lax.with_sharding_constraint(cache, tree)


# --- programs ---


@functools.partial(jax.jit, static_argnames=("policy", "mesh"))
def prefill(
    policy: Policy,
    mesh: Mesh | None,
    params: Params,
    tokens: Array,
    lengths: Array,
    prompts: Array | None = None,
) -> Pool:
    """Read contexts into a new pool.

    `tokens` is [contexts, context_length] int32, and `lengths` is [contexts] int32. `prompts` are
    those of `requests.PoolContexts`; without them, rows share no reads of their prompts.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    cache = policy.init_cache(params, *tokens.shape)
    _, cache = policy.extend(params, cache, tokens, positions, jnp.zeros_like(tokens), lengths - 1)
    if prompts is not None:
        cache = with_shared_prompts(cache, prompts.T)
    return Pool(shard_cache_rows(mesh, cache), tokens, lengths)


@functools.partial(jax.jit, static_argnames=("policy", "config", "length", "shardings"))
def empty_slots(
    policy: Policy,
    config: SamplerConfig,
    params: Params,
    keys: Array,
    length: int,
    shardings: tuple[Any, ...] | None,
) -> Slots:
    """Return free slots, with a cache of `length` tokens per slot.

    There are as many as `keys` [B], whose values do not matter. `shardings` are those of the
    cache's leaves (see `cache_shardings`).
    """
    rows = len(keys)
    zeros = jnp.zeros(rows, jnp.int32)
    seen = None
    if config.repetition_penalty != 1:
        seen = jnp.zeros((rows, vocabulary_size(policy, params)), bool)
    return Slots(
        cache=_empty_cache(policy, params, rows, length, shardings),
        token=zeros,
        length=zeros + 1,
        num_sampled=zeros,
        limit=zeros,
        key=keys,
        row=zeros,
        live=zeros > 0,
        seen=seen,
    )


def vocabulary_size(policy: Policy, params: Params) -> int:
    """Return V, the length of the policy's logits."""

    def one_token_logits(params: Params) -> Array:
        column = jnp.zeros((1, 1), jnp.int32)
        cache = policy.init_cache(params, 1, 2)
        logits, _ = policy.extend(params, cache, column, column, column, column[0])
        return logits

    return jax.eval_shape(one_token_logits, params).shape[-1]


@jax.jit
def pool_routing(pool: Pool) -> Array:
    """Return the routing [contexts, context_length, L k] of a pool's contexts.

    It is right up to the last but one token of each.
    """
    return latest_routing(pool.cache, pool.tokens.shape[1])


@functools.partial(jax.jit, static_argnames=("mesh", "rows", "columns", "routing"))
def empty_outputs(
    mesh: Mesh | None, rows: int, columns: int, routing: tuple[int, Any] | None = None
) -> Outputs:
    """Return outputs [rows, columns] without any token.

    `routing` is what `cache_ops.routing_shape` returns, or None to record none.
    """
    zeros = jnp.zeros((rows, columns), jnp.float32)
    outputs = Outputs(jnp.full(zeros.shape, NO_TOKEN, jnp.int32), zeros, zeros)
    if routing is not None:
        size, dtype = routing
        outputs = outputs._replace(routing=jnp.zeros((rows, columns, size), dtype))
    if mesh is None:
        return outputs
    by_row = NamedSharding(mesh, PartitionSpec(slot_axes(mesh)))
    return jax.lax.with_sharding_constraint(outputs, by_row)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("slots",))
def refill(
    mesh: Mesh | None, pool: Pool, queue: Queue, slots: Slots, num_taken: Array
) -> tuple[Slots, SegmentStatus]:
    """Move the next rows of each device's queue into its free slots.

    The first `num_taken` [D] entries of the queues have taken slots before.
    """
    slots, num_taken = map_devices(
        mesh, refill_on_device, slots, num_taken, pool, queue, num_results=2
    )
    return slots, segment_status(mesh, slots, num_taken)


def resize_slots(
    policy: Policy,
    mesh: Mesh | None,
    params: Params,
    slots: Slots,
    rows: int,
    length: int,
    shardings: tuple[Any, ...] | None,
) -> Slots:
    """Return `rows` of the slots, each device's live ones first, with a cache of `length` tokens.

    `shardings` are those of the cache's leaves (see `cache_shardings`). The slots are donated. Each
    leaf of the cache is freed before the next is copied, so that two whole caches are never in
    memory together.
    """
    cache = slots.cache
    order = None
    if rows < len(slots.live):
        slots, order = live_first(mesh, slots._replace(cache=None), rows)
    leaves, structure = jax.tree.flatten(cache)
    empty = jax.eval_shape(lambda params: policy.init_cache(params, rows, length), params)
    resized = []
    for number, (leaf, shape) in enumerate(zip(leaves, jax.tree.leaves(empty), strict=True)):
        if leaf.shape == shape.shape:
            resized.append(leaf)
            continue
        placement = None if shardings is None else shardings[number]
        copied = resize_leaf(policy, mesh, params, leaf, order, rows, length, number, placement)
        # Programs are queued: without waiting, the next leaf may get memory before this one is
        # given back.
        resized.append(jax.block_until_ready(copied))
        leaf.delete()
    return slots._replace(cache=jax.tree.unflatten(structure, resized))


@functools.partial(jax.jit, static_argnames=("mesh", "rows"))
def live_first(mesh: Mesh | None, slots: Slots, rows: int) -> tuple[Slots, Array]:
    """Return `rows` slots, each device's live ones first, and their numbers on their device.

    The slots have no cache.
    """

    def on_device(slots: Slots, live: Array) -> tuple[Slots, Array]:
        order = jnp.argsort(~live, stable=True)[: rows // device_count(mesh)]
        return jax.tree.map(lambda leaf: leaf[order], slots), order

    return map_devices(mesh, on_device, slots, slots.live, num_results=2)


@functools.partial(
    jax.jit, static_argnames=("policy", "mesh", "rows", "length", "number", "placement")
)
def resize_leaf(
    policy: Policy,
    mesh: Mesh | None,
    params: Params,
    leaf: Array,
    order: Array | None,
    rows: int,
    length: int,
    number: int,
    placement: Any,
) -> Array:
    """Return leaf `number` of a cache of `rows` rows and `length` tokens, filled from `leaf`.

    Its rows are those of `order`, numbered on each device, or the same as before if that is None.
    """
    if order is not None:
        no_slots = Slots._make((leaf, *(None for _ in Slots._fields[1:])))

        def take(slots: Slots, order: Array) -> tuple[Slots]:
            return (slots._replace(cache=take_rows(slots.cache, order)),)

        (taken,) = map_devices(mesh, take, no_slots, order)
        leaf = taken.cache
    empty = jax.tree.leaves(policy.init_cache(params, rows, length))[number]
    if placement is not None:
        empty = jax.lax.with_sharding_constraint(empty, placement)
    return resize(leaf, empty)


@functools.partial(jax.jit, donate_argnames=("slots",))
def free_slots(slots: Slots, is_freed: Array) -> Slots:
    """Free the slots where `is_freed` [B] is True, because the host found that their rows ended."""
    return slots._replace(live=slots.live & ~is_freed)


# --- parts of programs ---


def segment_status(
    mesh: Mesh | None, slots: Slots, num_taken: Array, draft_counts: Array | None = None
) -> SegmentStatus:
    """Return the status of a segment, replicated over the mesh."""
    # These are copies, because the slots are donated to the next segment, which may start before
    # the host has read the status.
    status = SegmentStatus(
        live=slots.live | False,
        length=slots.length + 0,
        row=slots.row + 0,
        num_taken=num_taken + 0,
        draft_counts=draft_counts,
    )
    if mesh is None:
        return status
    return jax.lax.with_sharding_constraint(status, NamedSharding(mesh, PartitionSpec()))


def write_outputs(
    mesh: Mesh | None, outputs: Outputs, row: Array, column: Array, values: tuple[Array, ...]
) -> Outputs:
    """Write values to (row, column) of the outputs.

    `row`, `column` and each of the `values` have one shape [B, ...], except that the routing, which
    comes last if it is recorded, is [B, L k]. Where `column` is beyond the end, nothing is written.
    """

    def write(outputs: Outputs, row: Array, column: Array, *values: Array) -> tuple[Outputs]:
        parts = (part for part in outputs if part is not None)
        pairs = zip(parts, values, strict=True)
        written = (part.at[row, column].set(value, mode="drop") for part, value in pairs)
        return (Outputs(*written),)

    (outputs,) = map_devices(mesh, write, outputs, row, column, *values)
    return outputs


@functools.partial(jax.jit, static_argnums=(0, 3))
def tokens_after(mesh: Mesh | None, tokens: Array, counts: Array, number: int) -> Array:
    """Return the `number` tokens of each row [N, T] after its first `counts` [N].

    They are [N, number], with `NO_TOKEN` after the last column.
    """

    def on_device(tokens: Array, counts: Array) -> tuple[Array]:
        columns = counts[:, None] + jnp.arange(number)[None]
        return (jnp.take_along_axis(tokens, columns, axis=1, mode="fill", fill_value=NO_TOKEN),)

    (after,) = map_devices(mesh, on_device, tokens, counts)
    return after


def refill_on_device(
    slots: Slots, num_taken: Array, pool: Pool, queue: Queue
) -> tuple[Slots, Array]:
    """Move the next rows of one device's queue into its free slots, in the order of the slots.

    Returns the slots and the new `num_taken` [1].
    """
    is_free = ~slots.live
    entry = num_taken + jnp.cumsum(is_free) - 1
    is_filled = is_free & (entry < queue.size)
    entry = jnp.minimum(entry, len(queue.row) - 1)
    context = queue.context[entry]

    def where_filled(new: Array, old: Array) -> Array:
        return jnp.where(is_filled, new, old)

    def copy_next(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        to_fill, cache = carry
        slot = jnp.argmax(to_fill)
        return to_fill.at[slot].set(False), put_row(cache, slot, pool.cache, context[slot])

    # Row by row, so that only what is new is copied.
    _, cache = jax.lax.while_loop(
        lambda carry: jnp.any(carry[0]), copy_next, (is_filled, slots.cache)
    )
    length = pool.lengths[context]
    seen = None
    if slots.seen is not None:
        seen = _seen_in_contexts(slots.seen, is_filled, pool, context)
    slots = Slots(
        cache=cache,
        token=where_filled(pool.tokens[context, length - 1], slots.token),
        length=where_filled(length, slots.length),
        num_sampled=where_filled(queue.num_sampled[entry], slots.num_sampled),
        limit=where_filled(queue.limit[entry], slots.limit),
        key=where_filled(queue.key[entry], slots.key),
        row=where_filled(queue.row[entry], slots.row),
        live=slots.live | is_filled,
        seen=seen,
    )
    return slots, num_taken + jnp.sum(is_filled, dtype=jnp.int32)


def _seen_in_contexts(seen: Array, is_filled: Array, pool: Pool, context: Array) -> Array:
    """Replace rows of `seen` [B, V], where slots are filled, by the tokens of their contexts."""
    rows, vocabulary = seen.shape
    in_context = jnp.arange(pool.tokens.shape[1])[None] < pool.lengths[context][:, None]
    tokens = jnp.where(in_context, pool.tokens[context], vocabulary)
    new_seen = jnp.zeros_like(seen).at[jnp.arange(rows)[:, None], tokens].set(True, mode="drop")
    return jnp.where(is_filled[:, None], new_seen, seen)
