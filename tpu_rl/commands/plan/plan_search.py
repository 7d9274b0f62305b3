"""Plans of a run's configuration, and the search for settings that fit and are fast.

`make_plan` compiles every step of a configuration. `search` compiles other meshes and micro-batches
and returns the fastest that fits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from typing import Literal, NamedTuple

from tpu_rl.algos import plugins
from tpu_rl.commands import compose, micro_batches
from tpu_rl.commands.config import ExperimentConfig, MeshConfig
from tpu_rl.commands.plan import meshes
from tpu_rl.commands.plan.plan_steps import (
    StagePlan,
    learning_lines,
    plan_stage,
    sampling_lines,
    state_bytes,
)
from tpu_rl.errors import InputError
from tpu_rl.planner.estimates import Line, Plan, Target
from tpu_rl.sampler.config import TensorParallel
from tpu_rl.train import sharding
from tpu_rl.types import Model

STATE_MARGIN = 1.25
"""The search still compiles meshes whose train state is this many times the memory: the estimate of
the state ignores that the compiler reuses memory."""

Part = Literal["sampling", "learning"]
Say = Callable[[str], None]
"""Receives one line of progress."""


class Candidate(NamedTuple):
    """A configuration and its plan."""

    config: ExperimentConfig
    plan: Plan


def make_plan(
    config: ExperimentConfig,
    target: Target,
    model: Model,
    parts: tuple[Part, ...] = ("sampling", "learning"),
    say: Say = lambda line: None,
) -> Plan:
    """Compile every step of every stage for the target, or only some parts of the stages."""
    mesh, sampler_devices = compose.share_devices(config, target.devices, target.split, model=model)
    config, rows = meshes.choose_rows(config, model, mesh, target.memory)
    config = micro_batches.fit_micro_batch(config, mesh)
    config, model, chosen = meshes.choose(
        config, model, mesh, target.memory, sampler_devices, "sampling" in parts
    )
    for line in filter(None, (rows, *chosen)):
        say(line)
    lines = []
    for stage in config.stages:
        planned = plan_stage(config, stage, mesh, model, sampler_devices)
        name = plugins.display_name(stage.algorithm)
        if len(config.stages) > 1:
            name = f"{stage.index + 1} {name}"
        for line in _stage_lines(planned, target, parts):
            say(f"{name}: {line.step.name} compiled in {line.step.compiled.seconds:.0f} s")
            lines.append((name, line))
    sizes = {axis: mesh.shape[axis] for axis in sharding.MESH_AXES}
    return Plan(sizes, config.batch.micro_batch_rows, lines)


def _stage_lines(planned: StagePlan, target: Target, parts: tuple[Part, ...]) -> Iterator[Line]:
    if "sampling" in parts:
        yield from sampling_lines(planned, target)
    if "learning" in parts:
        yield from learning_lines(planned, target)


# --- search ---


def search(config: ExperimentConfig, target: Target, model: Model, say: Say) -> Candidate | None:
    """Return the fastest configuration, by estimate, of those that fit; None if none does.

    If some devices only sample, it tries other numbers of them. For the rest see `_search_shared`.
    """
    if not config.sampling.devices:
        return _search_shared(config, target, model, say)
    fitting = []
    for count in _sampler_counts(target):
        say(f"--sampling.devices {count}:")
        sampling = replace(config.sampling, devices=count)
        best = _search_shared(replace(config, sampling=sampling), target, model, say)
        if best is not None:
            fitting.append(best)
    return min(fitting, key=lambda candidate: _seconds(candidate.plan), default=None)


def _sampler_counts(target: Target) -> list[int]:
    """Return an eighth, a quarter, half and three quarters of the devices, if they can be cut."""
    counts = []
    for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4):
        count = int(share * len(target.devices))
        with contextlib.suppress(InputError):
            sharding.split_devices(target.devices, count)
            counts.append(count)
    return counts


def _search_shared(
    config: ExperimentConfig, target: Target, model: Model, say: Say
) -> Candidate | None:
    """Return the fastest configuration, by estimate, of those that fit; None if none does.

    Candidates are other meshes and micro-batches of the same run, ranked by the time of learning.
    For the fastest that fits, the search then tries to keep matrix products in memory, and other
    ways to sample. Tensor parallelism grows only as long as it does not make learning slower: what
    it sends between devices grows with every halving.
    """
    fitting: list[Candidate] = []
    for tensor, group in itertools.groupby(
        candidates(config, target, model), lambda candidate: candidate.mesh.tensor
    ):
        new = [
            candidate
            for candidate in _learning_plans(group, target, model, say)
            if candidate.plan.fits(target)
        ]
        is_slower = bool(fitting and new) and _least_seconds(new) > _least_seconds(fitting)
        fitting += new
        if is_slower:
            say(f"--mesh.tensor {tensor} is slower; larger ones are tried only if no sampling fits")
            best = _best_that_samples(fitting, target, model, say)
            if best is not None:
                return best
            fitting = []
    return _best_that_samples(fitting, target, model, say)


def _best_that_samples(
    fitting: list[Candidate], target: Target, model: Model, say: Say
) -> Candidate | None:
    """Return the fastest candidate whose sampling fits too."""
    for candidate in sorted(fitting, key=lambda candidate: _seconds(candidate.plan)):
        sampling = search_sampling(candidate.config, target, model, say)
        if sampling is not None:
            learning = _with_fastest_backward_pass(candidate, target, model, say)
            lines = sampling.plan.lines + learning.plan.lines
            return Candidate(
                replace(sampling.config, model=learning.config.model),
                candidate.plan._replace(lines=lines),
            )
    return None


def _least_seconds(fitting: list[Candidate]) -> float:
    return min(_seconds(candidate.plan) for candidate in fitting)


def _seconds(plan: Plan) -> float:
    """Return the expected time of a step or, where nothing is expected, its lower bound."""
    return plan.expected_seconds or plan.seconds


def _learning_plans(
    configs: Iterable[ExperimentConfig], target: Target, model: Model, say: Say
) -> Iterator[Candidate]:
    too_full: set[MeshConfig] = set()
    for config in configs:
        mesh = config.mesh
        if mesh in too_full:  # It did not fit with fewer rows.
            continue
        plan = make_plan(config, target, model, ("learning",))
        if not plan.fits(target):
            too_full.add(mesh)
        sizes = " x ".join(map(str, astuple(mesh)))
        rows = config.batch.micro_batch_rows
        say(f"mesh {sizes}, {rows} rows per micro-batch: {_verdict(plan, target)}")
        yield Candidate(config, plan)


BACKWARD_PASSES = ({"remat": "save-dots"}, {"gradient_barrier": True})
"""Settings of --model that change the time and memory of the backward pass, and no value."""


def _with_fastest_backward_pass(
    candidate: Candidate, target: Target, model: Model, say: Say
) -> Candidate:
    """Return the candidate with those of BACKWARD_PASSES that fit and are faster."""
    for settings in BACKWARD_PASSES:
        config = candidate.config
        config = replace(config, model=replace(config.model, **settings))
        if config == candidate.config or candidate.config.model.remat == "none":
            continue
        plan = make_plan(config, target, model, ("learning",))
        [(name, value)] = settings.items()
        say(f"--model.{name.replace('_', '-')} {value}: {_verdict(plan, target)}")
        if plan.fits(target) and _seconds(plan) < _seconds(candidate.plan):
            candidate = Candidate(config, plan)
    return candidate


def search_sampling(
    config: ExperimentConfig, target: Target, model: Model, say: Say
) -> Candidate | None:
    """Return the fastest way to sample that fits: on the run's mesh, or on a mesh for sampling."""
    fitting = []
    train_mesh: TensorParallel = meshes.TRAIN_MESH
    num_devices = config.sampling.devices or len(target.devices)
    tensor_sizes = (train_mesh, 1, 2, 4, 8) if num_devices > 1 else (train_mesh,)
    if config.sampling.devices:
        tensor_sizes = (1, 2, 4, 8)
    for tensor in tensor_sizes:
        if isinstance(tensor, int) and (
            num_devices % tensor or model.config.attention.num_heads % tensor
        ):
            continue
        changed = replace(config, sampling=replace(config.sampling, tensor_parallel=tensor))
        plan = make_plan(changed, target, model, ("sampling",))
        if not plan.lines:  # The run samples nothing.
            return Candidate(changed, plan)
        say(f"--sampling.tensor-parallel {tensor}: {_verdict(plan, target)}")
        if plan.fits(target):
            fitting.append(Candidate(changed, plan))
    return min(fitting, key=lambda candidate: _seconds(candidate.plan), default=None)


def _verdict(plan: Plan, target: Target) -> str:
    return f"{_seconds(plan):.3g} s" if plan.fits(target) else "does not fit"


def candidates(
    config: ExperimentConfig, target: Target, model: Model
) -> Iterator[ExperimentConfig]:
    """Return configurations with other meshes of all devices whose train state may fit.

    A micro-batch has one, two or four packed rows per device. The context axis stays as it is.
    """
    count = (len(target.devices) - config.sampling.devices) // config.mesh.context
    heads = model.config.attention.num_heads
    mixture = model.config.moe
    tensor_sizes = data_sizes = (1, 2, 4, 8)
    expert_sizes = (1, 2, 4, 8, 16) if mixture else (1,)
    for tensor, data, expert in itertools.product(tensor_sizes, data_sizes, expert_sizes):
        if count % (tensor * data * expert) or heads % tensor:
            continue
        if mixture and mixture.num_experts % expert:
            continue
        fsdp = count // (tensor * data * expert)
        meshed = replace(config, mesh=MeshConfig(data, fsdp, tensor, expert, config.mesh.context))
        mesh = compose.share_devices(meshed, target.devices, target.split, model=model).mesh
        size = sum(state_bytes(plan_stage(meshed, config.stages[-1], mesh, model)).values())
        if target.memory is not None and size > STATE_MARGIN * target.memory:
            continue
        for rows_per_device in (1, 2, 4):
            rows = rows_per_device * count // tensor
            yield replace(meshed, batch=replace(config.batch, micro_batch_rows=rows))
