"""Plan a run without an accelerator: does it fit, what does it communicate, how fast can it be?

    python launch/plan.py PRESET [--topology v5e:4x4 | --gpu t4] [--slices N]
    [--model.path DIR_OR_NAME] [--json FILE] [--search] [flags of run.py]

The plan compiles the steps of the run for shapes instead of arrays. With --topology the TPU
compiler does it, which needs no TPU (pip install -e ".[plan]"), and with --gpu XLA's compiler for
NVIDIA GPUs, which needs none either. Without both they are compiled for the local devices.
--model.path, a teacher, a critic or a drafter may be the name of a well-known model; its weights
are not needed. Times are lower bounds, computed from the chip's peak rates, and what the TPU
compiler expects.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

# `prepare` chooses the platform before jax is imported: modules that import jax are imported in
# functions.
from tpu_rl import ranges
from tpu_rl.cost_model import Topology, topologies
from tpu_rl.cost_model.cards import CARDS, Card
from tpu_rl.errors import InputError, MachineError, refused, reported, typed_command
from tpu_rl.ranges import Conflicts, Count, Needs

if TYPE_CHECKING:
    from tpu_rl.commands.config import ExperimentConfig
    from tpu_rl.commands.plan.plan_search import Candidate
    from tpu_rl.planner.estimates import Target
    from tpu_rl.train.sharding import SplitDevices

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables with which libtpu compiles on a machine without a TPU."""


@dataclass(frozen=True)
class Flags:
    topology: str | None = None
    """NAME:AxB or NAME:AxBxC with NAME one of v4, v5e, v5p, v6e, tpu7x, or a name of Google Cloud
    such as v5litepod-16, v6e-8 or v5p-512; N* before it stands for N slices. Or cpu for this
    machine; the default are the local devices."""
    slices: Annotated[
        Count | None,
        Needs("topology"),
        Conflicts("topology cpu", why="local devices have no slices"),
    ] = None
    """Slices of the topology, with the data-center network between them."""
    gpu: Annotated[
        Literal["t4", "4090", "a100", "h100"] | None,
        Conflicts("topology", why="a plan is for one kind of device"),
    ] = None
    """Plan for one NVIDIA GPU, which need not be here."""
    json: Path | None = None
    """Also write the plan to this file."""
    search: bool = False
    """Try other meshes and micro-batches, and print the fastest that fits."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags, run_flags = parse(argv)
    prepare(flags)
    return run(flags, run_flags)


def parse(argv: list[str]) -> tuple[Flags, list[str]]:
    """Return the flags of plan.py, and the other arguments, which are those of run.py."""
    about = f"{__doc__}\nFor all other flags see: {typed_command('run')} PRESET --help-all"
    return tyro.cli(
        Flags, args=argv, prog=typed_command("plan"), description=about, return_unknown_args=True
    )


def prepare(flags: Flags) -> None:
    """Set the environment variables that jax reads when it is imported.

    Raises:
        InputError: if a flag has an impossible value.
        MachineError: if the topology needs libtpu and it is not installed.
    """
    ranges.check(flags, "--")
    if flags.json and not flags.json.parent.is_dir():
        raise InputError(
            f"no folder {flags.json.parent}", where="--json", fix="make it, or name another"
        )
    if flags.gpu:
        _prepare_gpu()
        return
    if flags.topology == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    if flags.topology in (None, "cpu"):
        return
    topologies.parse(flags.topology, flags.slices)
    if importlib.util.find_spec("libtpu") is None:
        version = importlib.metadata.version("jax")
        raise MachineError(
            "the TPU compiler is not installed",
            where="--topology",
            fix=f'pip install "jax[tpu]=={version}" (libtpu, 0.7 GB)',
        )
    os.environ.update(ENVIRONMENT)


def _prepare_gpu() -> None:
    """Do the same for --gpu."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        version = importlib.metadata.version("jax")
        packages = f"jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version} nvidia-cuda-nvcc-cu12"
        raise MachineError(
            "XLA's compiler for NVIDIA GPUs is not installed",
            where="--gpu",
            fix=f"pip install {packages} (0.3 GB)",
        )
    # jax would look for a GPU.
    os.environ["JAX_PLATFORMS"] = "cpu"


def run(flags: Flags, run_flags: list[str]) -> int:
    """Print the plan, and write it where --json says. Returns the exit code."""
    from tpu_rl.commands import config as configuration
    from tpu_rl.commands.plan import plan_steps

    with plan_steps.known_by_name(configuration.parse(run_flags)) as config:
        report = plan(flags, config)
    if flags.json:
        flags.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def plan(flags: Flags, config: ExperimentConfig) -> dict[str, Any]:
    """Print the plan and, with --search, the best one. Returns both as --json writes them."""
    from tpu_rl.commands import compose, micro_batches
    from tpu_rl.commands.plan import plan_search, plan_steps, table

    target = find_gpu(flags.gpu) if flags.gpu else find_target(flags.topology, flags.slices)
    if flags.search and target.chip is None:
        raise InputError(
            "--search compares times, and the rates of these devices are not known",
            where="--topology",
            fix=topologies.HELP,
        )
    model = plan_steps.read_model(config)
    devices = compose.share_devices(config, target.devices, target.split, model=model)
    if config.environment or config.agent:
        _say(
            f"note: an episode is planned as one turn of {config.sampling.max_new_tokens} tokens: "
            "turns and what is read between them together, which is read faster than planned; the "
            "time of tools is not counted"
        )
        # Nothing of the user's runs for a plan.
        config = replace(config, environment="", agent="")
    if config.sampling.devices:
        _say("note: the copy of the weights to the sampler's devices is not planned")
    for note in micro_batches.notes(config, model, devices.mesh, len(devices.sampler)):
        _say(f"note: {note}")
    made = plan_search.make_plan(config, target, model, say=_say)
    table.show(made, target)
    report = table.as_json(made, target)
    if not flags.search:
        return report
    best = plan_search.search(config, target, model, _say)
    if best is None:
        print("--search: no mesh and micro-batch size of this run fits")
        return report
    print(f"the fastest settings that fit: {_search_flags(best)}")
    table.show(best.plan, target)
    return report | {"best": table.as_json(best.plan, target)}


def _search_flags(best: Candidate) -> str:
    """Return the flags of run.py that give the settings that --search chose."""
    config = best.config
    flags = [f"--mesh.{axis} {size}" for axis, size in asdict(config.mesh).items()]
    if config.sampling.devices:
        flags.append(f"--sampling.devices {config.sampling.devices}")
    if config.sampling.tensor_parallel is not None:
        flags.append(f"--sampling.tensor-parallel {config.sampling.tensor_parallel}")
    flags.append(f"--model.remat {config.model.remat}")
    if config.model.gradient_barrier:
        flags.append("--model.gradient-barrier")
    flags.append(f"--batch.micro-batch-rows {config.batch.micro_batch_rows}")
    return " ".join(flags)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def find_target(topology: str | None, slices: int | None = None) -> Target:
    """Return the chips of a TPU topology, or the local devices for None and "cpu".

    Raises InputError if the TPU compiler does not know the topology.
    """
    import jax

    from tpu_rl.cost_model import CHIPS, GPUS
    from tpu_rl.planner.estimates import Target, device_memory

    if topology in (None, "cpu"):
        devices = jax.devices()
        kind = devices[0].device_kind
        chips = (*CHIPS.values(), *GPUS.values())
        chip = next((chip for chip in chips if chip.kind == kind), None)
        return Target(kind, devices, chip, device_memory(devices[0]))
    named = topologies.parse(topology, slices)
    chip = CHIPS[named.chip]
    split = _split_topology(named)
    return Target(str(named), _compiler_devices(named), chip, chip.memory, split)


def find_gpu(name: str) -> Target:
    """Return one GPU of `cards.CARDS`, described to the compiler."""
    from tpu_rl.cost_model import GPUS
    from tpu_rl.planner.estimates import Target

    card = CARDS[name]
    label = f"{card.kind} (by its description, an estimate)"
    return Target(label, [compiler_gpu(card)], GPUS[card.kind], card.memory)


def compiler_gpu(card: Card) -> Any:
    """Return the device of XLA's compiler for a card."""
    from jax.experimental.topologies import get_topology_desc

    described: dict[str, Any] = {"topology": "1x1x1", "target_config": card.target_config}
    return get_topology_desc(topology_name=card.kind, platform="cuda", **described).devices[0]


def _split_topology(named: Topology) -> SplitDevices:
    """Return a function that cuts the devices of a topology in two topologies.

    The compiler compiles for whole topologies only, and so for each part as if it were alone.
    """
    from tpu_rl.train import sharding

    dimensions = named.shape.count("x") + 1

    # Programs are compiled for these objects: other ones of the same shape are other devices.
    @functools.cache
    def devices_of(part: str, shape: str) -> tuple[Any, ...]:
        return tuple(_compiler_devices(named._replace(shape=shape, slices=1)))

    def split(devices: Sequence[Any], count: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        learning, sampling = (
            devices_of(name, _shape_of(part, dimensions))
            for name, part in zip(
                ("learning", "sampling"), sharding.split_devices(devices, count), strict=True
            )
        )
        return learning, sampling

    return split


def _shape_of(devices: Sequence[Any], dimensions: int) -> str:
    extents = [len(set(values)) for values in zip(*(d.coords for d in devices), strict=True)]
    return "x".join(map(str, extents[:dimensions]))


def _compiler_devices(named: Topology) -> list[Any]:
    """Return the TPU compiler's devices of a topology."""
    import jax
    from jax.experimental.topologies import get_topology_desc

    from tpu_rl import jax_versions

    jax_versions.allow_absent_devices()
    options: dict[str, Any] = {}
    if named.slices > 1:
        options["num_slices"] = named.slices
    if named.chip == "v4":
        options["chip_config_name"] = "megacore"
    if any(int(size) % 2 for size in named.shape.split("x")[:2]):
        # By default a host has 2 x 2 chips, into which not every topology can be cut.
        options["chips_per_host_bounds"] = [1, 1, 1]
    with refused(
        jax.errors.JaxRuntimeError,
        f"the TPU compiler knows no {named}",
        where="--topology",
        fix="use a topology such as v5e:4x4",
    ):
        return list(get_topology_desc(topology_name=named.name, platform="tpu", **options).devices)
