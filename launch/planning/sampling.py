"""The sampler's jitted steps: prefill, and decoding with caches of several lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launch import build, sources
from launch.config import Stage
from launch.planning.steps import Compile, Planned, Step, chip_bytes, compile_step, placed, results
from tpu_rl import sampler
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
    rows, prompt_length = rows_at_once(how, config.batch.prompts, mesh), config.sampling.max_prompt_tokens
    groups, waves = rows // how.samples_per_prompt, config.batch.prompts * how.samples_per_prompt / rows
    over = NamedSharding(mesh, PartitionSpec(sampler.BATCH_AXES))
    prompts, lengths, ends = (
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=over) for shape in ((groups, prompt_length), (groups,), (rows,))
    )
    keys = placed(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows)), over)
    arguments = (policy, how, params, prompts, lengths, ends)
    made = compile_with(mesh, sampler._prefill, *arguments)
    if made.program is None:
        yield Step("prefill", made, {}, waves, groups * prompt_length)
        return
    state = results(mesh, sampler._prefill, arguments, made)
    own = {"cache": chip_bytes(state)}
    if how == whole:
        yield Step("prefill", made, own, waves, groups * prompt_length)
    made = compile_with(mesh, sampler._decode_segment, policy, how, params, keys, ends, state)
    times = waves * how.max_new_tokens / sampler.SEGMENT if how == whole else 0
    name = f"decode, cache of {prompt_length + how.max_new_tokens:,}"
    yield Step(name, made, own, times, rows * sampler.SEGMENT, sampler.SEGMENT)


def rows_at_once(how: sampler.SamplerConfig, prompts: int, mesh: Mesh) -> int:
    """Rows of a wave, over all devices."""
    devices = math.prod(mesh.shape[axis] for axis in sampler.BATCH_AXES)
    unit = devices // math.gcd(devices, how.samples_per_prompt)
    waves = math.ceil(prompts / (how.max_rows // how.samples_per_prompt))
    return math.ceil(math.ceil(prompts / waves) / unit) * unit * how.samples_per_prompt
