"""A plan as tables on the terminal and as JSON."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from tpu_rl.planner.estimates import DECODE_SHARE, Line, Plan, Target

MIB = 2**20
GIB = 2**30
MEMORY_COLUMNS = ("parameters", "frozen", "optimizer", "cache", "batch", "temporaries")
SPEED_COLUMNS = (
    "per device and call",
    "calls",
    "TFLOP",
    "HBM GB",
    "links GB",
    "at least, s",
    "expected, s",
    "bound by",
    "tokens/s",
    "MFU",
)


def show(plan: Plan, target: Target) -> None:
    """Print the memory and the speed of each step, and the largest arrays of those that do not
    fit."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    memory = "" if target.memory is None else f", {target.memory / GIB:.2f} GiB each"
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    console.print(f"{target.name}: {len(target.devices)} devices{memory}, mesh {mesh}")
    console.print(memory_table(plan, target))
    console.print(speed_table(plan))
    for line in basis(plan):
        console.print(line)
    _show_largest(console, plan, target)
    if plan.seconds and plan.fits(target):
        expected = plan.expected_seconds
        likely = "" if expected is None else f", expected {expected:,.3g} s"
        console.print(
            f"one step of the run takes at least {plan.seconds:,.3g} s{likely},"
            " without rewards and waiting for the host"
        )
        sides = plan.side_seconds()
        if len(sides) > 1:
            console.print(
                f"some devices only sample, {sides[0]:,.3g} s, while the others learn,"
                f" {sides[1]:,.3g} s"
            )
    if target.chip is not None and not target.chip.clock:
        console.print("nothing is expected: no cycles of the compiler, or no public clock")
    for stage, line in plan.lines:
        if line.memory.on_host:
            console.print(f"{stage}: {line.step.name}: {host_traffic(line, target)}", markup=False)
    estimates = [line.estimate for _, line in plan.lines if line.estimate]
    uncounted = sorted({name for estimate in estimates for name in estimate.uncounted})
    if uncounted:
        console.print(f"kernels whose FLOPs are not counted: {', '.join(uncounted)}", markup=False)
    if not plan.fits(target):
        console.print(
            "flags that need less memory: docs/how-to/large_models.md; --search tries other meshes"
        )


def basis(plan: Plan) -> list[str]:
    """Return the basis of the times of a plan, in lines; empty without times."""
    lines = [line for _, line in plan.lines if line.estimate is not None]
    if not lines:
        return []
    texts = ["at least: products and bytes at the peak rates, and exposed links"]
    if any(line.expected_seconds for line in lines):
        texts.append("expected: the compiler's cycles and exposed links, which no chip measured")
    if any(line.expected_seconds and line.step.decodes for line in lines):
        texts.append(
            f"expected of decode steps: {DECODE_SHARE:g} of that, or the bound if it is more; this "
            "fits two published steps (Llama-3.1-70B, int8, v5e:4x4)"
        )
    return texts


def memory_table(plan: Plan, target: Target) -> Table:
    """Return a table of the bytes of each step on one device, by purpose."""
    is_large = max(line.memory.total for _, line in plan.lines) > GIB
    unit, unit_bytes = ("GiB", GIB) if is_large else ("MiB", MIB)
    table = Table(f"{unit} per device", "fits", "total", *MEMORY_COLUMNS, "other", box=None)
    for stage, line in plan.lines:
        parts = line.memory.parts
        other = sum(size for part, size in parts.items() if part not in MEMORY_COLUMNS)
        sizes = [line.memory.total, *(parts.get(column, 0) for column in MEMORY_COLUMNS), other]
        table.add_row(
            f"{stage}: {line.step.name}",
            "yes" if line.fits(target) else "NO",
            *(f"{size / unit_bytes:.2f}" if size else "-" for size in sizes),
        )
    return table


def speed_table(plan: Plan) -> Table:
    """Return a table of what each step computes and moves on one device, and how long it takes."""
    table = Table(*SPEED_COLUMNS, box=None)
    for stage, line in plan.lines:
        table.add_row(*_speed_row(stage, line))
    return table


def _speed_row(stage: str, line: Line) -> list[str]:
    step, estimate = line.step, line.estimate
    label = f"{stage}: {step.name}"
    if step.compiled.program is None:
        return [label, format_times(step.times), *"--------"]
    if step.loops > 1:
        label += ", per token"
    row = [label, format_times(step.times * step.loops), f"{line.flops / step.loops / 1e12:,.3g}"]
    if estimate is None:
        return [*row, *"-------"]
    return [
        *row,
        f"{estimate.bytes / step.loops / 1e9:,.3g}",
        f"{estimate.link_bytes / step.loops / 1e9:,.3g}",
        f"{line.seconds:,.3g}",
        "-" if line.expected_seconds is None else f"{line.expected_seconds:,.3g}",
        bound_by(line),
        f"{line.tokens_per_second:,.0f}" if step.tokens else "-",
        format_mfu(line),
    ]


def format_mfu(line: Line) -> str:
    """Format the MFU of a line: what is expected, if that is known, and the bound."""
    if line.mfu is None:
        return "-"
    expected = line.expected_mfu
    likely = "" if expected is None else f"{expected:.0%}, "
    return f"{likely}at most {line.mfu:.0%}"


def format_times(times: float) -> str:
    """Format calls per step of the run; below 1 for a call that serves several steps."""
    return f"{times:,.0f}" if times >= 10 or times == int(times) else f"{times:.2g}"


def bound_by(line: Line) -> str:
    """Name the largest part of the estimated time: compute, memory or links; "-" if unknown."""
    estimate = line.estimate
    if estimate is None:
        return "-"
    seconds = {
        "compute": estimate.compute_seconds,
        "memory": estimate.memory_seconds,
        "links": estimate.exposed_seconds,
    }
    return max(seconds, key=lambda name: seconds[name])


def host_traffic(line: Line, target: Target) -> str:
    """Describe the optimizer state in host memory, and the time of moving it there and back."""
    size = line.memory.on_host
    text = f"{size / GIB:.2f} GiB per device in host memory, {2 * size / 1e9:,.3g} GB both ways"
    if target.chip is None:
        return text
    return f"{text}, {2 * size / target.chip.host_rate:,.3g} s if not overlapped"


def _show_largest(console: Console, plan: Plan, target: Target) -> None:
    for stage, line in plan.lines:
        if line.fits(target):
            continue
        console.print(
            f"{stage}: {line.step.name} does not fit: {line.memory.total / GIB:.2f} GiB;"
            " its largest temporaries:"
        )
        for size, label in line.memory.largest:
            console.print(f"  {size / GIB:.2f} GiB  {label}", markup=False)
        if not line.memory.largest:
            message = line.step.compiled.memory_error
            console.print(f"  {message.splitlines()[0][:300]}", markup=False)


def as_json(plan: Plan, target: Target) -> dict[str, Any]:
    """Return the plan as plain values, for --json."""
    return {
        "target": {"name": target.name, "devices": len(target.devices), "bytes": target.memory},
        "mesh": dict(plan.mesh),
        "micro_batch_rows": plan.micro_batch_rows,
        "fits": plan.fits(target),
        "seconds": plan.seconds,
        "expected_seconds": plan.expected_seconds,
        "basis": basis(plan),
        "steps": [_step_json(stage, line, target) for stage, line in plan.lines],
    }


def _step_json(stage: str, line: Line, target: Target) -> dict[str, Any]:
    step = line.step
    return {
        "stage": stage,
        "step": step.name,
        "fits": line.fits(target),
        "bytes": line.memory.parts | {"total": line.memory.total},
        "on_host": line.memory.on_host,
        "largest": [{"bytes": size, "what": label} for size, label in line.memory.largest],
        "times": step.times,
        "loops": step.loops,
        "tokens": step.tokens,
        "flops": line.flops,
        "estimate": None if line.estimate is None else line.estimate._asdict(),
        "seconds": line.seconds,
        "expected_seconds": line.expected_seconds,
        "bound_by": bound_by(line),
        "tokens_per_second": line.tokens_per_second,
        "mfu": line.mfu,
        "expected_mfu": line.expected_mfu,
        "compile_seconds": round(step.compiled.seconds, 1),
        "refused": step.compiled.memory_error[:2000],
    }
