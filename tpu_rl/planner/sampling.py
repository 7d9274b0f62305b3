"""The sampler's jitted steps compiled for shapes: prefill, and decoding with two cache lengths.

Speculative drafts are left out. They are made for few rows only: with them decoding is faster and
needs hardly more memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl import sampler
from tpu_rl.planner.steps import (
    Compile,
    Compiled,
    Step,
    chip_bytes,
    compile_step,
    output_shapes,
    with_shardings,
)
from tpu_rl.sampler import decode_loop, slots
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
    """Calls per step of the run."""


def sampling_steps(
    calls: Sequence[SamplerCall], params: Params, compile_with: Compile = compile_step
) -> Iterator[Step]:
    """Compile the steps of sampler calls: prefill, then decoding, by the longest cache first.

    `params` are the shapes of the train state. What a call reads beyond them is a copy of weights.
    """
    for call in calls:
        copies = copied_weights(params, call.params)
        yield from _call_steps(call, {"decoding weights": chip_bytes(copies)}, compile_with)


def cache_lengths(max_new_tokens: int) -> list[int]:
    """Return how many new tokens the planned caches have room for.

    These are the maximum, and a quarter of it, to show what length costs.
    """
    return sorted({_ceil_div(max_new_tokens, 4), max_new_tokens}, reverse=True)


def copied_weights(params: Params, read: Params) -> list[Any]:
    """Return the leaves of `read` that are not leaves of `params`, scalars left out."""
    shared = {id(leaf) for leaf in jax.tree.leaves(params)}
    return [leaf for leaf in jax.tree.leaves(read) if id(leaf) not in shared and leaf.ndim]


def _call_steps(
    call: SamplerCall, weight_bytes: dict[str, int], compile_with: Compile
) -> Iterator[Step]:
    config = call.config
    devices = slots.device_count(call.mesh)
    rows = call.prompts * config.samples_per_prompt
    slot_count = _round_up(min(config.max_num_seqs, rows), devices)
    rows = _round_up(rows, devices)

    prompts = _round_up(min(call.prompts, slot_count), devices)
    prefill, pool = _prefill(call, prompts, call.prompt_tokens, compile_with)
    yield Step(
        f"prefill{call.label}",
        prefill,
        weight_bytes | _cache_bytes(pool),
        call.times * call.prompts / prompts,
        prompts * call.prompt_tokens,
        call.mesh,
    )
    if pool is None:
        return
    if call.partial_prompts:
        length = _longest_partial(config, call.prompt_tokens)
        texts = max(1, prompts // devices * call.prompt_tokens // length) * devices
        prefill, partial_pool = _prefill(call, texts, length, compile_with)
        yield Step(
            f"prefill{call.label}, partial completions",
            prefill,
            weight_bytes | _cache_bytes(partial_pool),
            call.times * (call.partial_prompts * config.samples_per_prompt) / texts,
            texts * length,
            call.mesh,
        )
    for new_tokens in cache_lengths(config.max_new_tokens):
        yield _decode_step(call, rows, slot_count, new_tokens, pool, weight_bytes, compile_with)


def _decode_step(
    call: SamplerCall,
    rows: int,
    slot_count: int,
    new_tokens: int,
    pool: Any,
    weight_bytes: dict[str, int],
    compile_with: Compile,
) -> Step:
    """Compile a decode segment whose cache has room for `new_tokens` new tokens.

    No slot is refilled in it, so it takes as many decode steps as a segment can have. Refills cost
    little beside them.
    """
    config = replace(call.config, max_new_tokens=new_tokens)
    length = call.prompt_tokens + new_tokens
    name = f"decode{call.label}, cache of {length:,}"
    decode_steps = config.segments.steps
    tokens = slot_count * decode_steps
    cache_shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(pool.cache))
    keys = _key_shapes(call.mesh, slot_count)
    arguments = (call.policy, config, call.params, keys, length, cache_shardings)
    # Not `compile_with`: this program is no step of the plan, only the shapes it returns matter.
    compiled = compile_step(call.mesh, slots.empty_slots, *arguments)
    if compiled.program is None:
        return Step(name, compiled, weight_bytes, 0, tokens, call.mesh, loops=decode_steps)
    empty = output_shapes(call.mesh, slots.empty_slots, arguments, compiled)
    outputs = slots.Outputs(
        *(
            _row_shape(call.mesh, rows, call.config.max_new_tokens, dtype=dtype)
            for dtype in (jnp.int32, jnp.float32, jnp.float32)
        )
    )
    taken = _row_shape(call.mesh, slots.device_count(call.mesh))
    pool_and_queue = (None, None)
    compiled = compile_with(
        call.mesh,
        decode_loop.decode_segment,
        call.policy,
        config,
        call.mesh,
        call.params,
        *pool_and_queue,
        empty,
        taken,
        outputs,
    )
    # With more rows than slots, the prompts of the waiting rows are in memory too.
    waiting_bytes = chip_bytes(pool) if rows > slot_count else 0
    cache_bytes = {"cache": chip_bytes((empty, outputs)) + waiting_bytes}
    times = 0.0
    if config == call.config:
        times = call.times * rows / slot_count * call.mean_new_tokens / decode_steps
    return Step(
        name, compiled, weight_bytes | cache_bytes, times, tokens, call.mesh, loops=decode_steps
    )


def _prefill(
    call: SamplerCall, texts: int, length: int, compile_with: Compile
) -> tuple[Compiled, Any]:
    """Compile prefill for `texts` texts of `length` tokens. Returns the shapes of its result too.

    The shapes are None if the program does not fit.
    """
    tokens = _row_shape(call.mesh, texts, length)
    lengths = _row_shape(call.mesh, texts)
    arguments = (call.policy, call.mesh, call.params, tokens, lengths)
    compiled = compile_with(call.mesh, slots.prefill, *arguments)
    if compiled.program is None:
        return compiled, None
    return compiled, output_shapes(call.mesh, slots.prefill, arguments, compiled)


def _cache_bytes(pool: Any) -> dict[str, int]:
    return {} if pool is None else {"cache": chip_bytes(pool)}


def _longest_partial(config: sampler.SamplerConfig, prompt_tokens: int) -> int:
    """Return the largest length in which a partial completion is read with its prompt.

    Most are shorter. `sampler.requests` chooses the lengths.
    """
    total = prompt_tokens + config.max_new_tokens
    return _round_up(total, 128) if prompt_tokens % 128 == 0 else total


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
