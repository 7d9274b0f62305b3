"""Plans of a run's configuration, and the search for settings that fit and are fast.

`make_plan` compiles every step of a configuration. `changes` proposes settings that lower memory,
by rough estimates. `search` compiles other meshes and micro-batches and returns the fastest that
fits.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from typing import Any, Literal, NamedTuple

from tpu_rl.algos import plugins
from tpu_rl.commands import compose, micro_batches
from tpu_rl.commands.config import ExperimentConfig, MeshConfig, require_trainable
from tpu_rl.commands.plan import meshes
from tpu_rl.commands.plan.plan_steps import (
    StagePlan,
    learning_lines,
    plan_stage,
    sampling_lines,
    state_bytes,
)
from tpu_rl.errors import InputError
from tpu_rl.planner.estimates import Change, Line, Plan, Target
from tpu_rl.planner.steps import Compile, compile_step
from tpu_rl.sampler.config import TensorParallel
from tpu_rl.train import sharding, update_step
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
    compile_with: Compile = compile_step,
) -> Plan:
    """Compile every step of every stage for the target, or only some parts of the stages."""
    mesh, sampler_devices = compose.share_devices(config, target.devices, target.split, model=model)
    config, rows = meshes.choose_rows(config, model, mesh, target.memory)
    if rows:
        say(rows)
    config = micro_batches.fit_micro_batch(config, mesh)
    config, model, precision = meshes.choose_precision(config, model, mesh, target.memory)
    if precision:
        say(precision)
    config = meshes.choose_logits(config, model, mesh, target.memory)
    config, products = meshes.choose_products(config, model, mesh, target.memory)
    if products:
        say(products)
    if "sampling" in parts:
        config, decoding = meshes.choose_sampling(
            config, model, mesh, target.memory, sampler_devices
        )
        if decoding:
            say(decoding)
    lines = []
    for stage in config.stages:
        planned = plan_stage(config, stage, mesh, model, sampler_devices)
        name = plugins.display_name(stage.algorithm)
        if len(config.stages) > 1:
            name = f"{stage.index + 1} {name}"
        for line in _stage_lines(planned, target, parts, compile_with):
            say(f"{name}: {line.step.name} compiled in {line.step.compiled.seconds:.0f} s")
            lines.append((name, line))
    sizes = {axis: mesh.shape[axis] for axis in sharding.MESH_AXES}
    return Plan(sizes, config.batch.micro_batch_rows, lines)


def _stage_lines(
    planned: StagePlan, target: Target, parts: tuple[Part, ...], compile_with: Compile
) -> Iterator[Line]:
    if "sampling" in parts:
        yield from sampling_lines(planned, target, compile_with)
    if "learning" in parts:
        yield from learning_lines(planned, target, compile_with)


# --- changes that lower memory ---


class _Proposal(NamedTuple):
    """Other settings, with their effect on memory by a rough estimate."""

    flags: str
    fields: dict[str, Any]
    """Fields of the configuration that they replace."""
    scales: dict[str, float]
    """Part of the memory -> factor."""


def changes(config: ExperimentConfig, plan: Plan, target: Target, count: int = 3) -> list[Change]:
    """Return the changes that lower the memory of the fullest step the most.

    These are rough estimates of what scales with what; `search` compiles what it proposes.
    """
    line = max((line for _, line in plan.lines), key=lambda line: line.memory.total)
    config = replace(config, batch=replace(config.batch, micro_batch_rows=plan.micro_batch_rows))
    parts = dict(line.memory.parts)
    if line.step.name == "update":
        # Some temporaries do not shrink with the rows: the summed gradients, which are float32,
        # those of a micro-batch, and the weights in the compute dtype.
        narrow = config.model.param_dtype != "float32" and not config.model.lora.rank
        gradients = parts["parameters"] * (2 if narrow else 1)
        parts["gradients"] = min(parts["temporaries"], gradients + parts["parameters"])
        parts["temporaries"] -= parts["gradients"]

    proposed = []
    for proposal in _proposals(config, plan, line, len(target.devices)):
        # Some do not work with the other settings: a row that cannot be cut so, pairs that no
        # longer fit a row.
        with contextlib.suppress(InputError):
            require_trainable(replace(config, **proposal.fields))
            total = sum(size * proposal.scales.get(name, 1.0) for name, size in parts.items())
            proposed.append(Change(proposal.flags, total))
    helpful = [change for change in proposed if change.total < 0.98 * line.memory.total]
    return sorted(helpful, key=lambda change: change.total)[:count]


def _proposals(
    config: ExperimentConfig, plan: Plan, line: Line, devices: int
) -> Iterator[_Proposal]:
    mesh = MeshConfig(**plan.mesh)
    batch = config.batch
    sampling = config.sampling
    lora = config.model.lora
    learns = line.step.name in ("make_batch", "update")
    row_devices = mesh.data * mesh.fsdp * mesh.expert
    if mesh.data > 1:
        sharded = replace(mesh, data=1, fsdp=mesh.data * mesh.fsdp)
        state = ("parameters", "frozen", "optimizer", "other", "gradients")
        yield _Proposal(
            f"--mesh.data 1 --mesh.fsdp {sharded.fsdp}",
            {"mesh": sharded},
            dict.fromkeys(state, 1 / mesh.data),
        )
    if mesh.fsdp % 2 == 0:
        # As many rows per device as before. Its heads, MLP and vocabulary are halved, the residual
        # stream is not.
        split = replace(mesh, fsdp=mesh.fsdp // 2, tensor=2 * mesh.tensor)
        rows = max(1, batch.micro_batch_rows // 2)
        yield _Proposal(
            f"--mesh.fsdp {split.fsdp} --mesh.tensor {split.tensor}"
            f" --batch.micro-batch-rows {rows}",
            {"mesh": split, "batch": replace(batch, micro_batch_rows=rows)},
            {"temporaries": 0.7} if learns else {},
        )
    if learns and batch.micro_batch_rows >= 2 * row_devices:
        rows = max(row_devices, batch.micro_batch_rows // 2)
        yield _Proposal(
            f"--batch.micro-batch-rows {rows}",
            {"batch": replace(batch, micro_batch_rows=rows)},
            {"temporaries": rows / batch.micro_batch_rows},
        )
    if learns and batch.has_whole_products and update_step.takes_windows(line.step.mesh):
        yield _Proposal(
            "--batch.whole-products off",
            {"batch": replace(batch, whole_products="off")},
            {"temporaries": 0.85},
        )
    shortest = sampling.max_prompt_tokens + sampling.max_new_tokens
    if learns and batch.row_length >= 2 * shortest:
        length = max(shortest, batch.row_length // 2)
        yield _Proposal(
            f"--batch.row-length {length}",
            {"batch": replace(batch, row_length=length)},
            {"temporaries": length / batch.row_length},
        )
    if not learns and sampling.slots > batch.group_size:
        rows = max(sampling.slots // 2, batch.group_size)
        share = rows / sampling.slots
        yield _Proposal(
            f"--sampling.max-num-seqs {rows}",
            {"sampling": replace(sampling, max_num_seqs=rows)},
            {"cache": share, "temporaries": share},
        )
    if not learns and sampling.tensor_parallel == meshes.TRAIN_MESH and devices % 2 == 0:
        tensor = math.gcd(devices, 8)
        # One whole copy of the weights per `tensor` devices, and nothing gathered token by token.
        # Most weights of a mixture are experts, which are not copied.
        copies = 1.0 if mesh.expert > 1 else mesh.fsdp * mesh.tensor * mesh.context / tensor
        yield _Proposal(
            f"--sampling.tensor-parallel {tensor}",
            {"sampling": replace(sampling, tensor_parallel=tensor)},
            {"decoding weights": copies, "temporaries": 0.1},
        )
    if learns and batch.micro_batch_rows <= row_devices and mesh.fsdp % 2 == 0:
        # A device has one row at most: only a part of a row is less.
        split = replace(mesh, fsdp=mesh.fsdp // 2, context=2 * mesh.context)
        rows = max(1, batch.micro_batch_rows // 2)
        yield _Proposal(
            f"--mesh.fsdp {split.fsdp} --mesh.context {split.context}"
            f" --batch.micro-batch-rows {rows}",
            {"mesh": split, "batch": replace(batch, micro_batch_rows=rows)},
            {"temporaries": 0.5},
        )
    if not config.optimizer.offload and "optimizer" in line.memory.parts:
        # The update fetches the optimizer's state. In measurements with AdamW its temporaries then
        # grew by three quarters of what the moments took.
        yield _Proposal(
            "--optimizer.offload",
            {"optimizer": replace(config.optimizer, offload=True)},
            {"optimizer": 0.75 if line.step.name == "update" else 0.0},
        )
    if lora.rank and config.model.param_dtype == "float32":
        # Only with LoRA: weights that train in bfloat16 lose small updates.
        frozen = 0.5 if config.model.dtype == "float32" else 1.0
        yield _Proposal(
            "--model.param-dtype bfloat16",
            {"model": replace(config.model, param_dtype="bfloat16")},
            {"parameters": 0.5, "frozen": frozen, "gradients": 0.75},
        )
    if not lora.rank and "optimizer" in line.memory.parts:
        # One frozen copy serves policy and reference. Only adapters have gradients and moments.
        yield _Proposal(
            "--model.lora.rank 16",
            {"model": replace(config.model, lora=replace(lora, rank=16))},
            {"optimizer": 0.02, "frozen": 0.0, "gradients": 0.2},
        )


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
