"""The sampler's jitted steps compiled for shapes.

These are the tower that reads images of prompts; prefill, of later pools beside full slots too;
decoding with the longest cache; refilling slots, between segments and within them; and the growth
of the cache. Where a run calls a program for several sizes, the largest is planned.

Speculative drafts are left out. They are made for few rows only: with them decoding is faster and
needs hardly more memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl import sampler
from tpu_rl.models.attention import decode_kernel
from tpu_rl.planner.steps import (
    Compiled,
    Step,
    chip_bytes,
    compile_step,
    output_shapes,
    with_shardings,
)
from tpu_rl.sampler import cache_ops, decode_loop, slots
from tpu_rl.types import Params, Policy


class SamplerCall(NamedTuple):
    """A call of the sampler that a run makes again and again."""

    label: str
    """Suffix of the names of its steps."""
    policy: Policy
    params: Params
    """Shapes of the tree that the policy reads, placed on `mesh`."""
    mesh: Mesh
    config: sampler.SamplerConfig
    prompts: int
    """Prompts of one call, over all devices."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    partial_prompts: int
    """The prompts among them whose completions continue from an earlier step."""
    mean_new_tokens: float
    """Expected tokens of a completion; the maximum where nothing better is known."""
    times: float
    """Calls per step of the run. 0: an evaluation, which is no part of a step."""
    tower: tuple[Any, Params, jax.ShapeDtypeStruct, int] | None = None
    """The function that computes the features of the prompts' images, the params and the pieces of
    images that it reads, and the number of features. None: prompts have no images."""

    @property
    def length(self) -> int:
        """Tokens of the longest cache of a row."""
        return self.prompt_tokens + self.config.max_new_tokens

    @property
    def slots(self) -> int:
        """Rows decoded at once, over all devices."""
        rows = self.prompts * self.config.samples_per_prompt
        return _round_up(min(self.config.max_num_seqs, rows), slots.device_count(self.mesh))

    @property
    def pools(self) -> int:
        """Pools of prompts that a device prefills one after the other."""
        devices = slots.device_count(self.mesh)
        return _ceil_div(_ceil_div(self.prompts, devices), self.slots // devices)

    @property
    def pool_prompts(self) -> int:
        """Prompts of a pool, over all devices."""
        devices = slots.device_count(self.mesh)
        return devices * _ceil_div(_ceil_div(self.prompts, devices), self.pools)

    def covers(self, other: SamplerCall) -> bool:
        """Return True if no program of another call needs more memory than this call's."""
        return (
            (self.policy, self.prompt_tokens, self.length)
            == (other.policy, other.prompt_tokens, other.length)
            and self.slots >= other.slots
            and self.pool_prompts >= other.pool_prompts
            and self.pools >= other.pools
            and self.prompts * self.config.samples_per_prompt
            >= other.prompts * other.config.samples_per_prompt
        )


def sampling_steps(calls: Sequence[SamplerCall], params: Params) -> Iterator[Step]:
    """Compile the steps of sampler calls: prefill, then decoding, by the longest cache first.

    `params` are the shapes of the train state. What a call reads beyond them is a copy of weights.
    Evaluations that another call covers are left out.
    """
    for call in calls:
        if not call.times and any(other.times and other.covers(call) for other in calls):
            continue
        copies = copied_weights(params, call.params)
        yield from _call_steps(call, {"decoding weights": chip_bytes(copies)})


def copied_weights(params: Params, read: Params) -> list[Any]:
    """Return the leaves of `read` that are not leaves of `params`, scalars left out."""
    shared = {id(leaf) for leaf in jax.tree.leaves(params)}
    return [leaf for leaf in jax.tree.leaves(read) if id(leaf) not in shared and leaf.ndim]


def _call_steps(call: SamplerCall, weight_bytes: dict[str, int]) -> Iterator[Step]:
    config = call.config
    devices = slots.device_count(call.mesh)
    rows = _round_up(call.prompts * config.samples_per_prompt, devices)
    waits = rows > call.slots
    prompts = call.pool_prompts
    outputs = _output_shapes(call, rows)
    if call.tower is not None:
        function, *arguments, features = call.tower
        yield Step(
            f"tower{call.label}",
            compile_step(call.mesh, function, *arguments),
            weight_bytes | {"images": chip_bytes(arguments[1])},
            call.times,
            features,
            call.mesh,
        )
    prefill, pool = _prefill(call, prompts, call.prompt_tokens)
    yield Step(
        f"prefill{call.label}",
        prefill,
        weight_bytes | _cache_bytes(pool, outputs),
        call.times * call.prompts / prompts,
        prompts * call.prompt_tokens,
        call.mesh,
    )
    if pool is None:
        return
    if call.partial_prompts:
        # Most are shorter. `sampler.requests` chooses the lengths.
        length = _round_up(call.length, 128) if call.prompt_tokens % 128 == 0 else call.length
        texts = max(1, prompts // devices * call.prompt_tokens // length) * devices
        partial, partial_pool = _prefill(call, texts, length)
        yield Step(
            f"prefill{call.label}, partial completions",
            partial,
            weight_bytes | _cache_bytes(partial_pool, outputs),
            call.times * (call.partial_prompts * config.samples_per_prompt) / texts,
            texts * length,
            call.mesh,
        )
    empty = _empty_slots(call, pool)
    # Of evaluations only the memory matters, and a segment that refills needs more.
    if call.times or not waits or isinstance(empty, Compiled):
        yield _decode_step(call, rows, empty, outputs, weight_bytes)
    if isinstance(empty, Compiled):
        return
    full = weight_bytes | _cache_bytes(pool, empty, outputs)
    if call.pools > 1:
        name = f"prefill{call.label}, beside full slots"
        yield Step(name, prefill, full, 0, prompts * call.prompt_tokens, call.mesh)
    taken = _row_shape(call.mesh, devices)
    refill = compile_step(
        call.mesh, slots.refill, call.mesh, pool, _queue_shapes(call), empty, taken
    )
    yield Step(f"refill{call.label}", refill, full, 0, 0, call.mesh)
    if waits:
        # How often it refills is not known to a compiler: the step counts one token and one refill.
        segment = _compile_segment(call, (pool, _queue_shapes(call)), empty, outputs)
        name = f"decode{call.label} with refills, per token"
        yield Step(name, segment, full, 0, call.slots, call.mesh, decodes=True)
    beside = (pool, outputs) if waits else (outputs,)
    yield from _growth_step(call, empty, beside, weight_bytes)


def _empty_slots(call: SamplerCall, pool: Any) -> slots.Slots | Compiled:
    """Return the shapes of slots with the longest cache, or the program if that is refused."""
    cache_shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(pool.cache))
    keys = _key_shapes(call.mesh, call.slots)
    arguments = (call.policy, call.config, call.params, keys, call.length, cache_shardings)
    # This program is no step of the plan: it writes what later programs hold, and holds less.
    compiled = compile_step(call.mesh, slots.empty_slots, *arguments)
    if compiled.program is None:
        return compiled
    return output_shapes(call.mesh, slots.empty_slots, arguments, compiled)


def _decode_step(
    call: SamplerCall,
    rows: int,
    empty: slots.Slots | Compiled,
    outputs: slots.Outputs,
    weight_bytes: dict[str, int],
) -> Step:
    """Compile a decode segment with the longest cache.

    No slot is refilled in it, so it takes as many decode steps as a segment can have. Refills cost
    little beside them.
    """
    name = f"decode{call.label}, cache of {call.length:,}"
    decode_steps = call.config.segments.steps
    tokens = call.slots * decode_steps
    if isinstance(empty, Compiled):
        return Step(name, empty, weight_bytes, 0, tokens, call.mesh, loops=decode_steps)
    # In the mean of its decode steps, a row has half of its new tokens.
    row_tokens = call.prompt_tokens + call.mean_new_tokens / 2
    # The kernel reads the whole blocks of a prompt once for the rows that continue it.
    members = min(call.config.samples_per_prompt, decode_kernel.MAX_MEMBERS)
    shared = call.prompt_tokens // decode_kernel.MAX_BLOCK * decode_kernel.MAX_BLOCK
    row_tokens -= shared * (1 - 1 / members)
    return Step(
        name,
        _compile_segment(call, (None, None), empty, outputs),
        weight_bytes | _cache_bytes(empty, outputs),
        call.times * rows / call.slots * call.mean_new_tokens / decode_steps,
        tokens,
        call.mesh,
        loops=decode_steps,
        cache_fill=row_tokens / call.length,
        decodes=True,
    )


def _compile_segment(
    call: SamplerCall, pool_and_queue: tuple[Any, Any], empty: slots.Slots, outputs: slots.Outputs
) -> Compiled:
    return compile_step(
        call.mesh,
        decode_loop.decode_segment,
        call.policy,
        call.config,
        call.mesh,
        call.params,
        *pool_and_queue,
        empty,
        _row_shape(call.mesh, slots.device_count(call.mesh)),
        outputs,
        None,
        jax.ShapeDtypeStruct((), bool),
    )


def _growth_step(
    call: SamplerCall,
    empty: slots.Slots,
    beside: Any,
    weight_bytes: dict[str, int],
) -> Iterator[Step]:
    """Compile the last growth of the cache, for the leaf whose copy needs the most memory.

    Leaves are copied one after the other: those before it are new and those after it old.
    """
    config = call.config
    old_tokens = config.segments.initial_cache_tokens
    if old_tokens >= config.max_new_tokens:
        return
    while 2 * old_tokens < config.max_new_tokens:
        old_tokens *= 2
    old_length = call.prompt_tokens + old_tokens
    new = jax.tree.leaves(empty.cache)
    shapes = jax.eval_shape(
        lambda params: call.policy.init_cache(params, call.slots, old_length), call.params
    )
    old = [
        leaf if leaf.shape == shape.shape else with_shardings(shape, leaf.sharding)
        for leaf, shape in zip(new, jax.tree.leaves(shapes), strict=True)
    ]
    peaks = {
        number: chip_bytes((new[: number + 1], old[number:]))
        for number in range(len(new))
        if new[number] is not old[number]
    }
    if not peaks:
        return
    number = max(peaks, key=lambda number: peaks[number])
    compiled = compile_step(
        call.mesh,
        slots.resize_leaf,
        call.policy,
        call.mesh,
        call.params,
        old[number],
        None,
        call.slots,
        call.length,
        number,
        new[number].sharding,
    )
    needed = {"cache": peaks[number] + chip_bytes((empty._replace(cache=None), beside))}
    yield Step(f"growth{call.label}", compiled, weight_bytes | needed, 0, 0, call.mesh)


def _output_shapes(call: SamplerCall, rows: int) -> slots.Outputs:
    columns = call.config.max_new_tokens
    dtypes = (jnp.int32, jnp.float32, jnp.float32)
    outputs = slots.Outputs(*(_row_shape(call.mesh, rows, columns, dtype=d) for d in dtypes))
    if not call.config.record_routing:
        return outputs
    routing = cache_ops.routing_shape(call.policy, call.params)
    assert routing is not None
    size, dtype = routing
    return outputs._replace(routing=_row_shape(call.mesh, rows, columns, size, dtype=dtype))


def _queue_shapes(call: SamplerCall) -> slots.Queue:
    devices = slots.device_count(call.mesh)
    group = call.config.samples_per_prompt
    rows = _ceil_div(call.prompts * group, devices)
    entries = devices * min(rows, call.pool_prompts // devices * group)
    row = _row_shape(call.mesh, entries)
    return slots.Queue(
        row=row,
        context=row,
        num_sampled=row,
        limit=row,
        key=_key_shapes(call.mesh, entries),
        size=_row_shape(call.mesh, devices),
        has_more=_row_shape(call.mesh, devices, dtype=jnp.bool),
    )


def _prefill(call: SamplerCall, texts: int, length: int) -> tuple[Compiled, Any]:
    """Compile prefill for `texts` texts of `length` tokens. Returns the shapes of its result too.

    The shapes are None if the program does not fit.
    """
    tokens = _row_shape(call.mesh, texts, length)
    lengths = _row_shape(call.mesh, texts)
    prompts = _row_shape(call.mesh, texts, 2)
    arguments = (call.policy, call.mesh, call.params, tokens, lengths, prompts)
    compiled = compile_step(call.mesh, slots.prefill, *arguments)
    if compiled.program is None:
        return compiled, None
    return compiled, output_shapes(call.mesh, slots.prefill, arguments, compiled)


def _cache_bytes(*trees: Any) -> dict[str, int]:
    return {"cache": chip_bytes(trees)}


def _row_shape(mesh: Mesh, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """Return the shape of an array whose first axis is spread over the mesh."""
    placement = NamedSharding(mesh, PartitionSpec(slots.slot_axes(mesh)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placement)


def _key_shapes(mesh: Mesh, count: int) -> jax.ShapeDtypeStruct:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
    return with_shardings(keys, _row_shape(mesh, 1).sharding)


def _ceil_div(size: int, divisor: int) -> int:
    return -(-size // divisor)


def _round_up(size: int, multiple: int) -> int:
    return _ceil_div(size, multiple) * multiple
