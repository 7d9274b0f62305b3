"""Will a run fit, what does it communicate, and how fast can it be? Answered without an accelerator.

    python launch/plan.py PRESET [--topology v5e:4x4] [--model.path DIR_OR_NAME] [--json FILE] [--search] [...]

... are the flags of run.py.

The very steps of the run are compiled, for shapes in place of arrays: with --topology by the TPU compiler, which
needs no TPU (pip install -e ".[plan]"), and without it for the devices that are here. --model.path, a teacher, a
critic or a drafter may be the name of a well-known model, none of whose weights are needed. Times are bounds: what the
chip needs at its peak rates.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Nothing here imports jax before `prepare` has chosen its platform.
from tpu_rl.errors import InputError, MachineError, TpuRlError

if TYPE_CHECKING:
    from launch.config import ExperimentConfig

TOPOLOGIES = ("v4", "v5e", "v5p", "v6e")
NAMES = f"NAME:AxB or NAME:AxBxC with NAME one of {', '.join(TOPOLOGIES)}"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What lets libtpu compile on a machine without a TPU."""


def main(argv: list[str]) -> int:
    try:
        flags, others = parse(argv)
        prepare(flags)
        return run(flags, others)
    except TpuRlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(plan.py's own flags, those of run.py)."""
    parser = argparse.ArgumentParser(
        prog="launch/plan.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="All other flags are those of launch/run.py: python launch/run.py PRESET --help",
    )
    parser.add_argument("--topology", help=f"{NAMES}; cpu: this machine")
    parser.add_argument("--json", type=Path, help="also write the plan here")
    parser.add_argument("--search", action="store_true", help="try other meshes and micro-batches; propose the best")
    return parser.parse_known_args(argv)


def prepare(flags: argparse.Namespace) -> None:
    """Sets what jax reads when it is imported. Raises InputError for flags that cannot be, MachineError without libtpu
    where that is needed."""
    if flags.json and not flags.json.parent.is_dir():
        raise InputError(f"no folder {flags.json.parent}", where="--json", fix="make it, or name another")
    if flags.topology == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    if flags.topology in (None, "cpu"):
        return
    if flags.topology.partition(":")[0] not in TOPOLOGIES or not flags.topology.partition(":")[2]:
        fix = f"{NAMES}, such as v5e:4x4 or v5p:2x2x4"
        raise InputError(f"no such topology: {flags.topology!r}", where="--topology", fix=fix)
    if importlib.util.find_spec("libtpu") is None:
        raise MachineError(
            "the TPU compiler is not installed", where="--topology", fix='pip install -e ".[plan]" (libtpu, 0.7 GB)'
        )
    os.environ.update(ENVIRONMENT)


def run(flags: argparse.Namespace, others: list[str]) -> int:
    from launch import config as configuration
    from launch.planning import steps

    with steps.known_by_name(configuration.parse(others)) as config:
        report = plan(flags, config)
    if flags.json:
        flags.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def plan(flags: argparse.Namespace, config: ExperimentConfig) -> dict[str, Any]:
    """Prints the plan, and with --search the best; both as --json writes them."""
    from launch import build, divisions
    from launch.planning import search, steps, table

    target = target_of(flags.topology)
    if flags.search and target.chip is None:
        what = "--search compares times, and the rates of these devices are not known"
        raise InputError(what, where="--topology", fix=NAMES)
    model = steps.read_model(config)
    for note in divisions.doubts(config, model, build.make_mesh(config.mesh, target.devices)):
        _say(f"note: {note}")
    made = search.make_plan(config, target, model, say=_say)
    changes = [] if made.fits(target) else search.changes(made, target)
    table.show(made, target, changes)
    report: dict[str, Any] = table.as_json(made, target, changes)
    if flags.search:
        best = search.search(config, target, model, _say)
        if best is None:
            print("--search: no mesh and micro-batch of this run fits")
        else:
            mesh, rows = best.mesh, best.config.batch.micro_batch_rows
            chosen = " ".join(f"--mesh.{axis} {size}" for axis, size in asdict(mesh).items())
            if best.config.sampling.tensor is not None:
                chosen += f" --sampling.tensor {best.config.sampling.tensor}"
            chosen += f" --model.remat {best.config.model.remat} --batch.micro-batch-rows {rows}"
            print(f"the best that fits: {chosen}")
            table.show(best, target, [])
            report["best"] = table.as_json(best, target, [])
    return report


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def target_of(topology: str | None) -> Any:
    """A `figures.Target`: the chips of a TPU topology, or the devices that are here."""
    import jax
    from jax.experimental import topologies

    from launch.planning.figures import Target, device_memory
    from tpu_rl.compiled import CHIPS

    if topology in (None, "cpu"):
        devices = jax.devices()
        chip = next((chip for chip in CHIPS.values() if chip.kind == devices[0].device_kind), None)
        return Target(devices[0].device_kind, devices, chip, device_memory(devices[0]))
    kind = topology.partition(":")[0]
    how: dict[str, Any] = {"chip_config_name": "megacore"} if kind == "v4" else {}
    if set(topology.partition(":")[2].split("x")) == {"1"}:  # one chip is not a part of a host's four by itself
        how["chips_per_host_bounds"] = [1, 1, 1]
    try:
        devices = topologies.get_topology_desc(topology_name=topology, platform="tpu", **how).devices
    except jax.errors.JaxRuntimeError as error:
        why = str(error).splitlines()[0][:200]
        raise InputError(f"the TPU compiler knows no {topology}", where="--topology", why=why, fix="v5e:4x4") from error
    return Target(topology, devices, CHIPS[kind], CHIPS[kind].memory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
