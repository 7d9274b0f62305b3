"""The plan on the terminal and as JSON."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.planning.figures import Line, Target
from launch.planning.search import Change, Plan

MIB, GIB = 2**20, 2**30


def show(plan: Plan, target: Target, changes: list[Change]) -> None:
    """Two tables, bytes and speed; what is large where it does not fit, and what would help."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    mesh = plan.mesh
    have = "" if target.memory is None else f", {target.memory / GIB:.2f} GiB each"
    shape = " x ".join(f"{axis} {size}" for axis, size in asdict(mesh).items())
    console.print(f"{target.name}: {len(target.devices)} devices{have}, mesh {shape}")
    console.print(memory_table(plan, target))
    console.print(speed_table(plan, target))
    _show_what_is_large(console, plan, target)
    if plan.seconds and plan.fits(target):
        console.print(f"a step of the run: at least {plan.seconds:,.3g} s, besides rewards and what waits for the host")
    for name, line in plan.lines:
        if line.memory.on_host:
            console.print(f"{name}: {line.step.name}: {host_traffic(line, target)}", markup=False)
    uncounted = sorted({name for _, line in plan.lines if line.estimate for name in line.estimate.uncounted})
    if uncounted:
        console.print(f"kernels whose products are not counted: {', '.join(uncounted)}", markup=False)
    if changes:
        console.print("changes that would lower the fullest step the most (estimated; --search compiles others):")
        for change in changes:
            console.print(f"  {change.flags}: {change.total / GIB:.2f} GiB", markup=False)


def memory_table(plan: Plan, target: Target) -> Table:
    columns = ("parameters", "frozen", "optimizer", "cache", "batch", "temporaries")
    unit, size_of = ("GiB", GIB) if max(line.memory.total for _, line in plan.lines) > GIB else ("MiB", MIB)
    table = Table(f"{unit} a device", "fits", "total", *columns, "other", box=None)
    for name, line in plan.lines:
        parts = line.memory.parts
        other = sum(size for part, size in parts.items() if part not in columns)
        sizes = [line.memory.total, *(parts.get(column, 0) for column in columns), other]
        fits = "yes" if line.fits(target) else "NO"
        table.add_row(f"{name}: {line.step.name}", fits, *(f"{size / size_of:.2f}" if size else "-" for size in sizes))
    return table


def speed_table(plan: Plan, target: Target) -> Table:
    table = Table(
        "a device, each time",
        "times",
        "TFLOP",
        "HBM GB",
        "links GB",
        "seconds",
        "bound by",
        "tokens/s",
        "MFU",
        box=None,
    )
    for name, line in plan.lines:
        if line.step.compiled.program is None:
            table.add_row(f"{name}: {line.step.name}", how_often(line.step.times), *"------")
            continue
        step, found = line.step, line.estimate
        label, loops = (f"{name}: {step.name}, a token", step.loops) if step.loops > 1 else (f"{name}: {step.name}", 1)
        figures = [how_often(step.times * loops), f"{line.flops / loops / 1e12:,.3g}"]
        if found is None:
            links = sum(line.links.values()) / loops / 1e9
            table.add_row(label, *figures, "-", f"{links:,.3g}", *"---", "-")
            continue
        figures += [
            f"{found.bytes / loops / 1e9:,.3g}",
            f"{found.link_bytes / loops / 1e9:,.3g}",
            f"{line.seconds:,.3g}",
        ]
        mfu = "-" if line.mfu is None else f"at most {line.mfu:.0%}"
        table.add_row(label, *figures, bound_by(line), f"{line.tokens_per_second:,.0f}", mfu)
    return table


def how_often(times: float) -> str:
    """In a step of the run; what is done once for many of them has a part of one."""
    return f"{times:,.0f}" if times >= 10 or times == int(times) else f"{times:.2g}"


def bound_by(line: Line) -> str:
    """What most of the estimated time goes to."""
    found = line.estimate
    if found is None:
        return "-"
    return max(
        ("compute", found.compute_seconds), ("memory", found.memory_seconds), ("links", found.exposed_seconds),
        key=lambda pair: pair[1],
    )[0]  # fmt: skip


def host_traffic(line: Line, target: Target) -> str:
    """What of a step lies in the host's memory, and how long it takes to the chip and back."""
    size = line.memory.on_host
    seconds = f", {2 * size / target.chip.host_rate:,.3g} s if nothing hides it" if target.chip else ""
    return f"{size / GIB:.2f} GiB a device in the host's memory, {2 * size / 1e9:,.3g} GB to and fro{seconds}"


def _show_what_is_large(console: Console, plan: Plan, target: Target) -> None:
    for name, line in plan.lines:
        if line.fits(target):
            continue
        console.print(
            f"{name}: {line.step.name} does not fit: {line.memory.total / GIB:.2f} GiB; the largest temporaries"
        )
        for size, label in line.memory.largest:
            console.print(f"  {size / GIB:.2f} GiB  {label}", markup=False)
        if not line.memory.largest:
            console.print(f"  {line.step.compiled.refused.splitlines()[0][:300]}", markup=False)


def as_json(plan: Plan, target: Target, changes: list[Change]) -> dict[str, Any]:
    """The same as plain values."""
    mesh = plan.mesh
    return {
        "target": {"name": target.name, "devices": len(target.devices), "bytes": target.memory},
        "mesh": asdict(mesh),
        "micro_batch_rows": plan.config.batch.micro_batch_rows,
        "fits": plan.fits(target),
        "seconds": plan.seconds,
        "steps": [step_json(name, line, target) for name, line in plan.lines],
        "changes": [{"flags": change.flags, "bytes": round(change.total)} for change in changes],
    }


def step_json(name: str, line: Line, target: Target) -> dict[str, Any]:
    step, found = line.step, line.estimate
    return {
        "stage": name,
        "step": step.name,
        "fits": line.fits(target),
        "bytes": line.memory.parts | {"total": line.memory.total},
        "on_host": line.memory.on_host,
        "largest": [{"bytes": size, "what": label} for size, label in line.memory.largest],
        "times": step.times,
        "loops": step.loops,
        "tokens": step.tokens,
        "flops": line.flops,
        "links": line.links,
        "estimate": None if found is None else found._asdict(),
        "seconds": line.seconds,
        "bound_by": bound_by(line),
        "tokens_per_second": line.tokens_per_second,
        "mfu": line.mfu,
        "compile_seconds": round(step.compiled.seconds, 1),
        "refused": step.compiled.refused[:2000],
    }
