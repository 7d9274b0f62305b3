"""The sampler's jitted steps: prefill, and decoding with caches of several lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launch import build, sources
from launch.acting import Acting
from launch.config import Stage
from launch.planning.steps import Compile, Planned, Step, chip_bytes, compile_step, placed, results
from tpu_rl import sampler
from tpu_rl.algos import QSharpConfig
from tpu_rl.sampler import segments, slots
from tpu_rl.types import Demonstrations, Params


def samples(stage: Stage) -> bool:
    """Whether the stage draws completions."""
    return stage.algorithm.needs.sampled_by is not None and stage.algorithm.needs.experience is not Demonstrations


def cache_lengths(most: int) -> list[int]:
    """New tokens that caches have room for: a quarter of the most, to see what length costs, and the most."""
    return sorted({-(-most // 4), most}, reverse=True)


def sampling_steps(planned: Planned, compile_with: Compile = compile_step) -> Iterator[Step]:
    """Prefill, and decoding by the longest cache first."""
    setup, config = planned.setup, planned.setup.config
    how = sources.sampler_config(config, setup.language.tokenizer, config.batch.completions)
    is_round = isinstance(planned.stage.algorithm, QSharpConfig)  # drawn before the first step, for all of them
    for new_tokens in cache_lengths(how.max_new_tokens):
        for step in _steps_of(planned, replace(how, max_new_tokens=new_tokens), how, compile_with):
            yield step._replace(times=0) if is_round else step


def _acting(planned: Planned) -> Acting:
    by = planned.stage.algorithm.needs.sampled_by or "policy"
    return build.acting_policy(planned.setup, planned.stage.algorithm) if by == "policy" else planned.setup.acting(by)


def copied(params: Params, read: Params) -> list[Any]:
    """The leaves of what is read that are no leaves of the params themselves."""
    own = {id(leaf) for leaf in jax.tree.leaves(params)}
    return [leaf for leaf in jax.tree.leaves(read) if id(leaf) not in own and leaf.ndim]


def _steps_of(
    planned: Planned, how: sampler.SamplerConfig, whole: sampler.SamplerConfig, compile_with: Compile
) -> Iterator[Step]:
    """Those with a cache for as many new tokens as `how` says; `whole` are the run's settings.

    A segment is the one in which no slot is filled anew: it takes as many steps as there are, and fills cost little.
    It has no drafts, which are made for few rows only: with them it is faster, and needs hardly more memory.
    """
    config, (policy, read, mesh) = planned.setup.config, _acting(planned)
    params = read(planned.state.params)
    weights = {"decoding weights": chip_bytes(copied(planned.state.params, params))}
    asked, width = config.batch.prompts + config.batch.carry_over, config.sampling.max_prompt_tokens
    devices = slots.device_count(mesh)
    rows = asked * how.samples_per_prompt
    rows, at_once = (-(-size // devices) * devices for size in (rows, min(how.max_rows, rows)))
    prompts = -(-min(asked, at_once) // devices) * devices
    array = partial(_array, mesh)
    arguments = (policy, mesh, params, array(prompts, width), array(prompts))
    made = compile_with(mesh, slots.prefill, *arguments)
    if made.program is None:
        yield Step("prefill", made, weights, asked / prompts, prompts * width, mesh=mesh)
        return
    pool = results(mesh, slots.prefill, arguments, made)
    if how == whole:
        own = weights | {"cache": chip_bytes(pool)}
        yield Step("prefill", made, own, asked / prompts, prompts * width, mesh=mesh)
    if how == whole and config.batch.carry_over:
        longest, begun = _longest_begun(whole, width), config.batch.carry_over * how.samples_per_prompt
        texts = max(1, prompts // devices * width // longest) * devices
        arguments = (policy, mesh, params, array(texts, longest), array(texts))
        again = compile_with(mesh, slots.prefill, *arguments)
        own = weights | ({"cache": chip_bytes(results(mesh, slots.prefill, arguments, again))} if again.program else {})
        yield Step("prefill, what was begun", again, own, begun / texts, texts * longest, mesh=mesh)

    cut = tuple(leaf.sharding for leaf in jax.tree.leaves(pool.cache))
    arguments = (policy, how, params, _keys(mesh, at_once), width + how.max_new_tokens, cut)
    made, name = compile_step(mesh, slots.empty_slots, *arguments), f"decode, cache of {width + how.max_new_tokens:,}"
    steps = how.borders.steps
    if made.program is None:
        yield Step(name, made, weights, 0, at_once * steps, steps, mesh)
        return
    free = results(mesh, slots.empty_slots, arguments, made)
    outputs = slots.Drawn(*(array(rows, whole.max_new_tokens, dtype=kind) for kind in (jnp.int32, *2 * [jnp.float32])))
    arguments = (policy, how, mesh, params, None, None, free, array(devices), outputs)
    made = compile_with(mesh, segments.decode_segment, *arguments)
    times = rows / at_once * how.max_new_tokens / steps if how == whole else 0
    # Where more rows are asked than there are slots, the prompts of those that wait are there, too.
    own = weights | {"cache": chip_bytes((free, outputs)) + (chip_bytes(pool) if rows > at_once else 0)}
    yield Step(name, made, own, times, at_once * steps, steps, mesh)


def _longest_begun(how: sampler.SamplerConfig, width: int) -> int:
    """Tokens of the greatest width that unfinished completions are read in with their prompts (see `sampler.requests`),
    which most are not as long as."""
    total = width + how.max_new_tokens
    return -(-total // 128) * 128 if width % 128 == 0 else total


def _array(mesh: Mesh, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """With rows in front, spread over the mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(slots.slot_axes(mesh))))


def _keys(mesh: Mesh, count: int) -> jax.ShapeDtypeStruct:
    return placed(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count)), _array(mesh, 1).sharding)
