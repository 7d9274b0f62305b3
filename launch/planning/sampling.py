"""The sampler's jitted steps: prefill, and decoding with caches of several lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launch import build, q_examples, sources
from launch.acting import Acting, lent
from launch.config import Stage
from launch.planning.steps import Compile, Planned, Step, chip_bytes, compile_step, placed, results
from tpu_rl import sampler
from tpu_rl.algos import QSharpConfig
from tpu_rl.sampler import segments, slots
from tpu_rl.types import Demonstrations, Params


def samples(stage: Stage) -> bool:
    """Whether the stage draws completions."""
    needs = stage.algorithm.needs
    return (needs.sampled_by is not None or needs.on_policy > 0) and needs.experience is not Demonstrations


def for_drawing(planned: Planned) -> Planned:
    """With weights where completions are drawn, as a run moves them there."""
    setup, state = planned.setup, planned.state
    params = lent(setup.config, build.drawn_from(setup, planned.stage), state.params, setup.mesh)
    return planned._replace(state=replace(state, params=params))


def cache_lengths(most: int) -> list[int]:
    """New tokens that caches have room for: a quarter of the most, to see what length costs, and the most."""
    return sorted({-(-most // 4), most}, reverse=True)


class Draw(NamedTuple):
    """A call of the sampler that the run makes again and again."""

    label: str
    """What the names of its steps end with."""
    acting: Acting
    how: sampler.SamplerConfig
    asked: int
    """Prompts."""
    width: int
    """Tokens that the longest of them may have."""
    begun: int
    """Those of the prompts whose completions are begun."""
    drawn: float
    """Tokens of a completion: the most, or where their limits differ the mean of them."""
    times: float
    """How often a step of the run does it."""


def draws(planned: Planned) -> list[Draw]:
    """What a stage draws: completions for each step, or Q#'s roll-ins and roll-outs once for all of them."""
    setup, stage = planned.setup, planned.stage
    batch, width = setup.config.batch, setup.config.sampling.max_prompt_tokens
    how = sources.sampler_config(setup.config, setup.language.tokenizer, batch.completions)
    if isinstance(stage.algorithm, QSharpConfig):
        once, rows = 1 / (stage.last - stage.first + 1), stage.algorithm.prompts * batch.completions
        answers, after = q_examples.rolls_in(setup, stage), q_examples.roll_out_config(setup)
        assert after.prompt_length is not None
        half = after.max_new_tokens / 2  # answers are cut where they may be, each place as likely as the others
        return [
            Draw(" of roll-ins", answers, how, stage.algorithm.prompts, width, 0, how.max_new_tokens, once),
            Draw(" of roll-outs", setup.acting("policy"), after, rows, after.prompt_length, 0, half, once),
        ]
    asked = stage.algorithm.needs.shares(batch.prompts + batch.carry_over)
    return [
        Draw(
            f" by {by}" if len(asked) > 1 else "",
            build.acting_policy(setup, stage.algorithm) if by == "policy" else setup.acting(by),
            how,
            prompts,
            width,
            batch.carry_over,
            how.max_new_tokens,
            1,
        )
        for by, prompts in asked.items()
    ]


def sampling_steps(planned: Planned, compile_with: Compile = compile_step) -> Iterator[Step]:
    """Prefill, and decoding by the longest cache first."""
    for draw in draws(planned):
        for new_tokens in cache_lengths(draw.how.max_new_tokens):
            yield from _steps_of(planned, draw, replace(draw.how, max_new_tokens=new_tokens), compile_with)


def copied(params: Params, read: Params) -> list[Any]:
    """The leaves of what is read that are no leaves of the params themselves."""
    own = {id(leaf) for leaf in jax.tree.leaves(params)}
    return [leaf for leaf in jax.tree.leaves(read) if id(leaf) not in own and leaf.ndim]


def _steps_of(planned: Planned, draw: Draw, how: sampler.SamplerConfig, compile_with: Compile) -> Iterator[Step]:
    """Those with a cache for as many new tokens as `how` says.

    A segment is the one in which no slot is filled anew: it takes as many steps as there are, and fills cost little.
    It has no drafts, which are made for few rows only: with them it is faster, and needs hardly more memory.
    """
    (policy, read, mesh), asked, width = draw.acting, draw.asked, draw.width
    params = read(planned.state.params)
    weights = {"decoding weights": chip_bytes(copied(planned.state.params, params))}
    devices = slots.device_count(mesh)
    rows = asked * how.samples_per_prompt
    rows, at_once = (-(-size // devices) * devices for size in (rows, min(how.max_rows, rows)))
    prompts = -(-min(asked, at_once) // devices) * devices
    array, name = partial(_array, mesh), f"prefill{draw.label}"
    arguments = (policy, mesh, params, array(prompts, width), array(prompts))
    made, times = compile_with(mesh, slots.prefill, *arguments), draw.times * asked / prompts
    if made.program is None:
        yield Step(name, made, weights, times, prompts * width, mesh=mesh)
        return
    pool = results(mesh, slots.prefill, arguments, made)
    if how == draw.how:
        own = weights | {"cache": chip_bytes(pool)}
        yield Step(name, made, own, times, prompts * width, mesh=mesh)
    if how == draw.how and draw.begun:
        longest, begun = _longest_begun(how, width), draw.begun * how.samples_per_prompt
        texts = max(1, prompts // devices * width // longest) * devices
        arguments = (policy, mesh, params, array(texts, longest), array(texts))
        again = compile_with(mesh, slots.prefill, *arguments)
        own = weights | ({"cache": chip_bytes(results(mesh, slots.prefill, arguments, again))} if again.program else {})
        times = draw.times * begun / texts
        yield Step(f"{name}, what was begun", again, own, times, texts * longest, mesh=mesh)

    cut = tuple(leaf.sharding for leaf in jax.tree.leaves(pool.cache))
    arguments = (policy, how, params, _keys(mesh, at_once), width + how.max_new_tokens, cut)
    made, steps = compile_step(mesh, slots.empty_slots, *arguments), how.borders.steps
    name = f"decode{draw.label}, cache of {width + how.max_new_tokens:,}"
    if made.program is None:
        yield Step(name, made, weights, 0, at_once * steps, steps, mesh)
        return
    free, most = results(mesh, slots.empty_slots, arguments, made), draw.how.max_new_tokens
    outputs = slots.Drawn(*(array(rows, most, dtype=kind) for kind in (jnp.int32, *2 * [jnp.float32])))
    arguments = (policy, how, mesh, params, None, None, free, array(devices), outputs)
    made = compile_with(mesh, segments.decode_segment, *arguments)
    times = draw.times * rows / at_once * draw.drawn / steps if how == draw.how else 0
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
