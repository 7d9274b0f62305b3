"""The device's part of the sampler: a pool of prefilled prompts, slots that rows are decoded in, one segment of steps.

Each device along the mesh's `slot_axes` has its own part of everything here: prompts of the pool, the queue of rows
that continue them, slots, outputs. Its slots take rows of its own queue, and their tokens go to its own part of the
outputs; so nothing but a few flags crosses devices for the sake of refilling.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl import sharding
from tpu_rl.sampler.caches import put_row, resize, row_axis, take_rows
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.types import Array, Params, Policy

NO_TOKEN = -1
"""What stands in the outputs where nothing is drawn yet."""


Rows = Any
"""An array of numbers, keys or flags, on the device or on the host."""


class Pool(NamedTuple):
    """Unique prompts, prefilled."""

    cache: Any
    """Of each prompt's tokens but the last."""
    tokens: Array
    """[prompts, prompt_length] int32."""
    lengths: Array
    """[prompts] int32."""


class Queue(NamedTuple):
    """Rows to decode that continue the pool's prompts. D devices, with as many places each."""

    row: Rows
    """[D * places] int32: which row of the device's outputs."""
    prompt: Rows
    """[D * places] int32: which prompt of the device's pool."""
    drawn: Rows
    """[D * places] int32: tokens of the completion that the prompt ends with."""
    limit: Rows
    """[D * places] int32: most tokens of the completion."""
    key: Rows
    """[D * places] keys."""
    size: Rows
    """[D] int32: how many of the places are rows."""
    more: Rows
    """[D] bool: the device has rows for another pool."""


class Slots(NamedTuple):
    """Rows in the making, one a slot; donated from segment to segment."""

    cache: Any
    """Holds each row's tokens but the last."""
    token: Array
    """[B] int32: each row's last token."""
    length: Array
    """[B] int32: tokens that it has, the prompt's included."""
    drawn: Array
    """[B] int32: tokens drawn."""
    limit: Array
    """[B] int32."""
    key: Array
    """[B] keys."""
    row: Array
    """[B] int32: which row of the device's outputs."""
    live: Array
    """[B] bool; the other slots are free."""
    seen: Array | None
    """[B, V] bool: tokens that the row has; None where there is no repetition penalty."""


class Drawn(NamedTuple):
    """The outputs, [N, max_new_tokens] each."""

    tokens: Rows
    """int32, `NO_TOKEN` where there is none."""
    log_probs: Rows
    """float32."""
    behaviour_log_probs: Rows
    """float32."""


class Border(NamedTuple):
    """What the host must know to go on; every process can read it."""

    live: Rows
    """[B] bool, of `Slots`."""
    length: Rows
    """[B] int32, of `Slots`."""
    row: Rows
    """[B] int32, of `Slots`."""
    taken: Rows
    """[D] int32: how many places of each queue have been taken."""
    tally: Rows | None = None
    """[2] int32, of a segment with drafts: how many were verified, and how many tokens this drew."""


# --- devices -------------------------------------------------------------------------------------------------------


def slot_axes(mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes that rows are spread over."""
    return sharding.rules(mesh)["slots"]


def device_count(mesh: Mesh | None) -> int:
    """D, the parts that rows are cut into."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in slot_axes(mesh))


def each_device(mesh: Mesh | None, function: Callable[..., Any], *arguments: Any, results: int = 1) -> Any:
    """The function of each device's own rows of the arguments: Slots, Pool, Queue, Drawn or arrays.

    It returns a tuple of so many results, which have rows like as many of the first arguments. Left to itself the
    compiler would gather caches over devices to move rows in them, as it cannot know that each stays where it is. Other
    mesh axes are left to it.
    """
    if mesh is None or device_count(mesh) == 1:
        return function(*arguments)
    axes = slot_axes(mesh)
    specs = tuple(_specs(axes, argument) for argument in arguments)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=specs[:results], axis_names={*axes}, check_vma=False
    )
    return mapped(*arguments)


def _specs(axes: tuple[str, ...], argument: Any) -> Any:
    front, behind = PartitionSpec(axes), PartitionSpec(None, axes)
    specs = jax.tree.map(lambda leaf: front, argument)
    if isinstance(argument, Slots | Pool):
        specs = specs._replace(cache=jax.tree.map(lambda leaf: (front, behind)[row_axis(leaf)], argument.cache))
    return specs


# --- programs ------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("policy", "mesh"))
def prefill(policy: Policy, mesh: Mesh | None, params: Params, tokens: Array, lengths: Array) -> Pool:
    """tokens [prompts, prompt_length], lengths [prompts] -> Pool."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    cache = policy.init_cache(params, *tokens.shape)
    _, cache = policy.extend(params, cache, tokens, positions, jnp.zeros_like(tokens), lengths - 1)
    return Pool(spread(mesh, cache), tokens, lengths)


def spread(mesh: Mesh | None, cache: Any) -> Any:
    """The cache with its rows over the mesh, its other axes wherever the compiler wants them."""
    if mesh is None:
        return cache
    free = PartitionSpec.UNCONSTRAINED

    def place(leaf: Array) -> Array:
        axes: list[Any] = [free] * leaf.ndim
        axes[row_axis(leaf)] = slot_axes(mesh)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(place, cache)


def cut(mesh: Mesh | None, cache: Any) -> tuple[Any, ...] | None:
    """How the leaves of a cache lie over the mesh: an empty one does not tell the compiler how it will be used."""
    return None if mesh is None else tuple(leaf.sharding for leaf in jax.tree.leaves(cache))


def _empty_cache(policy: Policy, params: Params, rows: int, length: int, cut: tuple[Any, ...] | None) -> Any:
    cache = policy.init_cache(params, rows, length)
    if cut is None:
        return cache
    return jax.lax.with_sharding_constraint(cache, jax.tree.unflatten(jax.tree.structure(cache), cut))


@functools.partial(jax.jit, static_argnames=("policy", "config", "length", "cut"))
def empty_slots(
    policy: Policy,
    config: SamplerConfig,
    params: Params,
    keys: Array,
    length: int,
    cut: tuple[Any, ...] | None,
) -> Slots:
    """Free slots, with a cache of so many tokens; as many as there are keys [B], whichever."""
    rows = len(keys)
    zeros = jnp.zeros(rows, jnp.int32)
    seen = None
    if config.repetition_penalty != 1:
        seen = jnp.zeros((rows, vocabulary_size(policy, params)), bool)
    cache = _empty_cache(policy, params, rows, length, cut)
    return Slots(cache, zeros, zeros + 1, zeros, zeros, keys, zeros, zeros > 0, seen)


def vocabulary_size(policy: Policy, params: Params) -> int:
    """V, the length of the policy's logits."""

    def logits(params: Params) -> Array:
        column = jnp.zeros((1, 1), jnp.int32)
        return policy.extend(params, policy.init_cache(params, 1, 2), column, column, column, column[0])[0]

    return jax.eval_shape(logits, params).shape[-1]


@functools.partial(jax.jit, static_argnames=("mesh", "rows", "columns"))
def empty_outputs(mesh: Mesh | None, rows: int, columns: int) -> Drawn:
    """Of so many rows, none of them begun."""
    zeros = jnp.zeros((rows, columns), jnp.float32)
    drawn = Drawn(jnp.full(zeros.shape, NO_TOKEN, jnp.int32), zeros, zeros)
    if mesh is None:
        return drawn
    return jax.lax.with_sharding_constraint(drawn, NamedSharding(mesh, PartitionSpec(slot_axes(mesh))))


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("slots",))
def pull(mesh: Mesh | None, pool: Pool, queue: Queue, slots: Slots, taken: Array) -> tuple[Slots, Border]:
    """Free slots take the next rows of their queues, of which so many are taken [D]."""
    slots, taken = each_device(mesh, pull_rows, slots, taken, pool, queue, results=2)
    return slots, border_of(mesh, slots, taken)


@functools.partial(jax.jit, static_argnames=("policy", "mesh", "rows", "length", "cut"))
def fit(
    policy: Policy, mesh: Mesh | None, params: Params, slots: Slots, rows: int, length: int, cut: tuple[Any, ...] | None
) -> Slots:
    """So many slots, a device's live ones first, with a cache of so many tokens."""

    def first(slots: Slots) -> tuple[Slots]:
        order = jnp.argsort(~slots.live, stable=True)[: rows // device_count(mesh)]
        others = jax.tree.map(lambda leaf: leaf[order], slots._replace(cache=None))
        return (others._replace(cache=take_rows(slots.cache, order)),)

    if rows < len(slots.live):
        (slots,) = each_device(mesh, first, slots)
    return slots._replace(cache=resize(slots.cache, _empty_cache(policy, params, rows, length, cut)))


@functools.partial(jax.jit, donate_argnames=("slots",))
def release(slots: Slots, stopped: Array) -> Slots:
    """Frees slots [B] whose rows ended by what only the host knows."""
    return slots._replace(live=slots.live & ~stopped)


def border_of(mesh: Mesh | None, slots: Slots, taken: Array, tally: Array | None = None) -> Border:
    # Copies: the slots are donated to the next segment, which may begin before the host has read these.
    border = Border(slots.live | False, slots.length + 0, slots.row + 0, taken + 0, tally)
    if mesh is None:
        return border
    return jax.lax.with_sharding_constraint(border, NamedSharding(mesh, PartitionSpec()))


def write(mesh: Mesh | None, drawn: Drawn, row: Array, column: Array, values: tuple[Array, ...]) -> Drawn:
    """The outputs with values at (row, column), all of one shape [B, ...]; columns beyond the end are dropped."""

    def put(drawn: Drawn, row: Array, column: Array, *values: Array) -> tuple[Drawn]:
        parts = zip(drawn, values, strict=True)
        return (Drawn(*(part.at[row, column].set(value, mode="drop") for part, value in parts)),)

    return each_device(mesh, put, drawn, row, column, *values)[0]


def pull_rows(slots: Slots, taken: Array, pool: Pool, queue: Queue) -> tuple[Slots, Array]:
    """One device's free slots take the next rows of its queue, in the order of the slots."""
    free = ~slots.live
    place = taken + jnp.cumsum(free) - 1
    fill = free & (place < queue.size)
    place = jnp.minimum(place, len(queue.row) - 1)
    prompt = queue.prompt[place]

    def pick(new: Array, old: Array) -> Array:
        return jnp.where(fill, new, old)

    def load(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        waiting, cache = carry
        slot = jnp.argmax(waiting)
        return waiting.at[slot].set(False), put_row(cache, slot, pool.cache, prompt[slot])

    # Row by row: what is copied is what is new.
    _, cache = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), load, (fill, slots.cache))
    length = pool.lengths[prompt]
    slots = Slots(
        cache,
        pick(pool.tokens[prompt, length - 1], slots.token),
        pick(length, slots.length),
        pick(queue.drawn[place], slots.drawn),
        pick(queue.limit[place], slots.limit),
        pick(queue.key[place], slots.key),
        pick(queue.row[place], slots.row),
        slots.live | fill,
        None if slots.seen is None else _tokens_of_prompts(slots.seen, fill, pool, prompt),
    )
    return slots, taken + jnp.sum(fill, dtype=jnp.int32)


def _tokens_of_prompts(seen: Array, fill: Array, pool: Pool, prompt: Array) -> Array:
    """seen [B, V] with, in the rows to fill, which tokens their prompts have."""
    rows, vocabulary = seen.shape
    inside = jnp.arange(pool.tokens.shape[1])[None] < pool.lengths[prompt][:, None]
    tokens = jnp.where(inside, pool.tokens[prompt], vocabulary)
    fresh = jnp.zeros_like(seen).at[jnp.arange(rows)[:, None], tokens].set(True, mode="drop")
    return jnp.where(fill[:, None], fresh, seen)
