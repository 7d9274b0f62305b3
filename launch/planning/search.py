"""What would make a run fit, and which division of the devices is the fastest that does."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from typing import Any, Literal, NamedTuple

from launch import build, divisions, requirements
from launch.config import ExperimentConfig, MeshConfig
from launch.planning.figures import Line, Target, line_of
from launch.planning.memory import state_bytes
from launch.planning.sampling import for_drawing, samples, sampling_steps
from launch.planning.steps import Compile, Planned, compile_step, learning_steps, plan_stage
from tpu_rl import sharding
from tpu_rl.errors import InputError
from tpu_rl.types import Model

NEAR = 1.25
"""State of up to so many times the memory is still tried: estimates of it are without the compiler's reuse."""


Part = Literal["sampling", "learning"]


class Plan(NamedTuple):
    """The steps of all stages of one configuration."""

    config: ExperimentConfig
    mesh: MeshConfig
    lines: list[tuple[str, Line]]
    """(name of the stage, step)."""

    def fits(self, target: Target) -> bool:
        return all(line.fits(target) for _, line in self.lines)

    @property
    def seconds(self) -> float:
        """Of a step of the run at best, the last stage's."""
        last = self.lines[-1][0] if self.lines else None
        return sum(line.step.times * line.step.loops * line.seconds for name, line in self.lines if name == last)


def make_plan(
    config: ExperimentConfig,
    target: Target,
    model: Model,
    parts: tuple[Part, ...] = ("sampling", "learning"),
    say: Callable[[str], None] = lambda line: None,
    compile_with: Compile = compile_step,
) -> Plan:
    """Compiles every step of every stage for the target, or only such parts of them. `say` is told of each."""
    mesh = build.make_mesh(config.mesh, target.devices)
    config = divisions.fitted(config, mesh)
    lines = []
    for stage in config.stages:
        planned = plan_stage(config, stage, mesh, model)
        name = type(stage.algorithm).__name__.removesuffix("Config")
        if len(config.stages) > 1:
            name = f"{stage.index + 1} {name}"
        for line in _lines(planned, target, parts, compile_with):
            say(f"{name}: {line.step.name} compiled in {line.step.compiled.seconds:.0f} s")
            lines.append((name, line))
    return Plan(config, MeshConfig(**{axis: mesh.shape[axis] for axis in sharding.MESH_AXES}), lines)


def _lines(planned: Planned, target: Target, parts: tuple[Part, ...], compile_with: Compile) -> Iterator[Line]:
    if samples(planned.stage) and "sampling" in parts:
        drawing = for_drawing(planned)
        yield from (line_of(drawing, step, target) for step in sampling_steps(drawing, compile_with))
    if "learning" in parts:
        yield from (line_of(planned, step, target) for step in learning_steps(planned, compile_with))


# --- what would make it fit --------------------------------------------------------------------------------------


class Change(NamedTuple):
    """Another configuration, and what the fullest step would then take."""

    flags: str
    config: ExperimentConfig
    total: float
    """Estimated bytes of one chip."""


def changes(plan: Plan, target: Target, most: int = 3) -> list[Change]:
    """The changes that would lower the fullest step the most, by rough estimate: what scales with what. `--search`
    compiles what it proposes."""
    line = max((line for _, line in plan.lines), key=lambda line: line.memory.total)
    parts = dict(line.memory.parts)
    if line.step.name == "update":
        # Whatever its rows: gradients, summed, as large as one of two moments; a micro-batch's, and narrowed weights.
        moments = parts.get("optimizer", 0) + line.memory.on_host
        parts["gradients"] = min(parts["temporaries"], moments // 2 + parts["parameters"])
        parts["temporaries"] -= parts["gradients"]

    def total(scales: dict[str, float]) -> float:
        return sum(size * scales.get(name, 1.0) for name, size in parts.items())

    found = []
    for flags, changed, scales in _candidates(plan, line, len(target.devices)):
        with contextlib.suppress(InputError):  # a row that cannot be cut so, a pair that no longer fits one
            config = replace(plan.config, **changed)
            requirements.learning(config)
            found.append(Change(flags, config, total(scales)))
    found = [change for change in found if change.total < 0.98 * line.memory.total]
    return sorted(found, key=lambda change: change.total)[:most]


def _candidates(plan: Plan, line: Line, devices: int) -> Iterator[tuple[str, dict[str, Any], dict[str, float]]]:
    """(flags, what they change in the configuration, part of the memory -> what it is multiplied by)."""
    config, mesh, learns = plan.config, plan.mesh, line.step.name in ("make_batch", "update")
    batch, sampling, width = config.batch, config.sampling, mesh.data * mesh.fsdp * mesh.expert
    if mesh.data > 1:
        cut = {name: 1 / mesh.data for name in ("parameters", "frozen", "optimizer", "other", "gradients")}
        other = replace(mesh, data=1, fsdp=mesh.data * mesh.fsdp)
        yield f"--mesh.data 1 --mesh.fsdp {other.fsdp}", {"mesh": other}, cut
    if mesh.fsdp % 2 == 0:
        # As many rows a device, and its heads, MLP and vocabulary halved; the residual stream is not.
        other = replace(mesh, fsdp=mesh.fsdp // 2, tensor=2 * mesh.tensor)
        rows = max(1, batch.micro_batch_rows // 2)
        flags = f"--mesh.fsdp {other.fsdp} --mesh.tensor {other.tensor} --batch.micro-batch-rows {rows}"
        changed = {"mesh": other, "batch": replace(batch, micro_batch_rows=rows)}
        yield flags, changed, {"temporaries": 0.7} if learns else {}
    if learns and batch.micro_batch_rows >= 2 * width:
        rows = max(width, batch.micro_batch_rows // 2)
        smaller = {"batch": replace(batch, micro_batch_rows=rows)}
        yield f"--batch.micro-batch-rows {rows}", smaller, {"temporaries": rows / batch.micro_batch_rows}
    shortest = sampling.max_prompt_tokens + sampling.max_new_tokens
    if learns and batch.row_length >= 2 * shortest:
        length = max(shortest, batch.row_length // 2)
        smaller = {"batch": replace(batch, row_length=length)}
        yield f"--batch.row-length {length}", smaller, {"temporaries": length / batch.row_length}
    if not learns and sampling.max_rows > batch.completions:
        rows = max(sampling.max_rows // 2, batch.completions)
        share = rows / sampling.max_rows
        smaller = {"sampling": replace(sampling, max_rows=rows)}
        yield f"--sampling.max-rows {rows}", smaller, {"cache": share, "temporaries": share}
    if not learns and sampling.tensor is None and devices % 2 == 0:
        tensor = math.gcd(devices, 8)
        apart = {"sampling": replace(sampling, tensor=tensor)}
        # A whole layout of the weights for so many devices, and nothing that is gathered token by token. Most weights
        # of a mixture are experts, which are not copied.
        copies = 1.0 if mesh.expert > 1 else mesh.fsdp * mesh.tensor * mesh.context / tensor
        yield f"--sampling.tensor {tensor}", apart, {"decoding weights": copies, "temporaries": 0.1}
    if learns and batch.micro_batch_rows <= width and mesh.fsdp % 2 == 0:
        # A device has a row at most: it can only have a part of one.
        other, rows = replace(mesh, fsdp=mesh.fsdp // 2, context=2 * mesh.context), max(1, batch.micro_batch_rows // 2)
        flags = f"--mesh.fsdp {other.fsdp} --mesh.context {other.context} --batch.micro-batch-rows {rows}"
        changed = {"mesh": other, "batch": replace(batch, micro_batch_rows=rows)}
        yield flags, changed, {"temporaries": 0.5}
    if not config.optimizer.offload and "optimizer" in line.memory.parts:
        # The update fetches them: it has been seen to keep three quarters of what they took as temporaries.
        moved = {"optimizer": replace(config.optimizer, offload=True)}
        yield "--optimizer.offload", moved, {"optimizer": 0.75 if line.step.name == "update" else 0.0}
    if config.model.lora.rank and config.model.param_dtype == "float32":  # weights that learn lose small updates in it
        half = {"model": replace(config.model, param_dtype="bfloat16")}
        frozen = 0.5 if config.model.dtype == "float32" else 1.0
        yield "--model.param-dtype bfloat16", half, {"parameters": 0.5, "frozen": frozen, "gradients": 0.75}
    if not config.model.lora.rank and "optimizer" in line.memory.parts:
        adapted = {"model": replace(config.model, lora=replace(config.model.lora, rank=16))}
        # One frozen copy serves policy and reference, and only adapters have gradients and moments.
        yield "--model.lora.rank 16", adapted, {"optimizer": 0.02, "frozen": 0.0, "gradients": 0.2}


# --- search ------------------------------------------------------------------------------------------------------


def search(config: ExperimentConfig, target: Target, model: Model, say: Callable[[str], None]) -> Plan | None:
    """The fastest configuration, by estimate, of those that fit: other meshes and micro-batches of the same run.

    The update decides first; for the fastest that fits, whether memory is left to keep products in, and how completions
    are drawn, is then tried, too. Heads and widths are cut further only as long as that does not make it slower: what
    tensor parallelism sends between devices grows with every halving.
    """
    tried: list[Plan] = []
    for tensor, group in itertools.groupby(candidates(config, target, model), lambda each: each.mesh.tensor):
        fitting = [plan for plan in _learning_plans(group, target, model, say) if plan.fits(target)]
        is_slower = bool(tried and fitting) and _least(fitting) > _least(tried)
        tried += fitting
        if is_slower:
            say(f"--mesh.tensor {tensor} is slower: more of it is not tried while others draw")
            best = _best_that_draws(tried, target, model, say)
            if best is not None:
                return best
            tried = []
    return _best_that_draws(tried, target, model, say)


def _best_that_draws(tried: list[Plan], target: Target, model: Model, say: Callable[[str], None]) -> Plan | None:
    """The fastest to learn of those whose completions can be drawn, too."""
    for plan in sorted(tried, key=lambda plan: plan.seconds):
        drawing = search_sampling(plan.config, target, model, say)
        if drawing is not None:
            learning = _with_products_kept(plan, target, model, say)
            config = replace(drawing.config, model=learning.config.model)
            return Plan(config, plan.mesh, drawing.lines + learning.lines)
    return None


def _least(plans: list[Plan]) -> float:
    return min(plan.seconds for plan in plans)


def _learning_plans(
    group: Iterable[ExperimentConfig], target: Target, model: Model, say: Callable[[str], None]
) -> Iterator[Plan]:
    too_full: set[MeshConfig] = set()
    for candidate in group:
        mesh = candidate.mesh
        if mesh in too_full:  # with fewer rows it was
            continue
        plan = make_plan(candidate, target, model, ("learning",))
        verdict = f"{plan.seconds:.3g} s" if plan.fits(target) else "does not fit"
        rows = candidate.batch.micro_batch_rows
        say(f"mesh {' x '.join(map(str, astuple(mesh)))}, {rows} rows a micro-batch: {verdict}")
        if not plan.fits(target):
            too_full.add(mesh)
        yield plan


def _with_products_kept(plan: Plan, target: Target, model: Model, say: Callable[[str], None]) -> Plan:
    """The plan of learning with `--model.remat products` where that fits and is faster."""
    config = plan.config
    if config.model.remat != "full":
        return plan
    kept = make_plan(replace(config, model=replace(config.model, remat="products")), target, model, ("learning",))
    say(f"--model.remat products: {f'{kept.seconds:.3g} s' if kept.fits(target) else 'does not fit'}")
    return kept if kept.fits(target) and kept.seconds < plan.seconds else plan


def search_sampling(config: ExperimentConfig, target: Target, model: Model, say: Callable[[str], None]) -> Plan | None:
    """The fastest way that fits to draw completions on the run's mesh, or on one of their own."""
    tried = []
    for tensor in (None, *((1,) if model.config.experts else ()), 2, 4, 8):
        if tensor is not None and (len(target.devices) % tensor or model.config.attention.heads % tensor):
            continue
        drawing = replace(config, sampling=replace(config.sampling, tensor=tensor))
        plan = make_plan(drawing, target, model, ("sampling",))
        if not plan.lines:
            return plan
        say(f"--sampling.tensor {tensor}: {f'{plan.seconds:.3g} s' if plan.fits(target) else 'does not fit'}")
        tried += [plan] if plan.fits(target) else []
    return min(tried, key=lambda plan: plan.seconds, default=None)


def candidates(config: ExperimentConfig, target: Target, model: Model) -> Iterator[ExperimentConfig]:
    """Meshes of all devices whose train state may fit, with one to four packed rows a device in a micro-batch. Devices
    share a row's tokens as in `config`."""
    count = len(target.devices) // config.mesh.context
    heads, mixture = model.config.attention.heads, model.config.experts
    axes = (1, 2, 4, 8)
    experts = (1, 2, 4, 8, 16) if mixture else (1,)
    for tensor, data, expert in itertools.product(axes, axes, experts):
        if count % (tensor * data * expert) or heads % tensor or (mixture and mixture.count % expert):
            continue
        fsdp = count // (tensor * data * expert)
        meshed = replace(config, mesh=MeshConfig(data, fsdp, tensor, expert, config.mesh.context))
        mesh = build.make_mesh(meshed.mesh, target.devices)
        state = state_bytes(plan_stage(meshed, config.stages[-1], mesh, model))
        if target.memory is not None and sum(state.values()) > NEAR * target.memory:
            continue
        for rows in (1, 2, 4):
            wanted = rows * count // tensor
            yield replace(meshed, batch=replace(config.batch, micro_batch_rows=wanted))
