"""The sampler's jitted steps: prefill, and decoding with caches of several lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from launch import build, sources
from launch.config import Stage
from launch.planning.steps import Compile, Planned, Step, chip_bytes, compile_step, placed, results
from tpu_rl import sampler
from tpu_rl.sampler import slots
from tpu_rl.types import Demonstrations, Params, Policy


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
    for new_tokens in cache_lengths(how.max_new_tokens):
        yield from _steps_of(planned, replace(how, max_new_tokens=new_tokens), how, compile_with)


def _acting(planned: Planned) -> tuple[Policy, Params]:
    by = planned.stage.algorithm.needs.sampled_by
    if by == "policy":
        acting = build.acting_policy(planned.setup, planned.stage.algorithm)
        return acting.policy, acting.params(planned.state.params)
    return planned.setup.policy(by or "policy"), planned.state.params


def _steps_of(
    planned: Planned, how: sampler.SamplerConfig, whole: sampler.SamplerConfig, compile_with: Compile
) -> Iterator[Step]:
    """Those with a cache for as many new tokens as `how` says; `whole` are the run's settings."""
    config, mesh = planned.setup.config, planned.setup.mesh
    policy, params = _acting(planned)
    prompts, devices = config.batch.prompts, slots.device_count(mesh)
    rows = min(how.max_rows, prompts * how.samples_per_prompt)
    rows, pool_size = (-(-size // devices) * devices for size in (rows, min(prompts, rows)))
    over = NamedSharding(mesh, PartitionSpec(slots.BATCH_AXES))

    def numbers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=over)

    width, waves = config.sampling.max_prompt_tokens, prompts * how.samples_per_prompt / rows
    arguments = (policy, mesh, params, numbers(pool_size, width), numbers(pool_size))
    made = compile_with(mesh, slots.prefill, *arguments)
    if made.program is None:
        yield Step("prefill", made, {}, prompts / pool_size, pool_size * width)
        return
    pool = results(mesh, slots.prefill, arguments, made)
    keys = placed(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows)), over)
    cut = tuple(leaf.sharding for leaf in jax.tree.leaves(pool.cache))
    arguments = (policy, how, params, keys, width + how.max_new_tokens, cut)
    free = results(mesh, slots.empty_slots, arguments, compile_step(mesh, slots.empty_slots, *arguments))
    outputs = placed(jax.eval_shape(lambda: slots.empty_outputs(None, rows, how.max_new_tokens)), over)
    own = {"cache": chip_bytes(free) + chip_bytes(outputs)}
    if how == whole:
        yield Step("prefill", made, {"cache": chip_bytes(pool)}, prompts / pool_size, pool_size * width)
    arguments = (policy, how, mesh, params, None, None, free, numbers(devices), outputs)
    made = compile_with(mesh, slots.decode_segment, *arguments)
    steps = how.borders.steps
    times = waves * how.max_new_tokens / steps if how == whole else 0
    yield Step(f"decode, cache of {width + how.max_new_tokens:,}", made, own, times, rows * steps, steps)
