"""Write a model of a run's newest checkpoint as a Hugging Face directory, which transformers loads.

    python launch/export.py RUN_DIR --to DIR

A finished run has one already, RUN_DIR/model; this also serves a run that was interrupted.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import tyro

from launch import build, phases, reward_runs, roles, states, stored_runs
from launch import config as configuration
from launch.config import MeshConfig
from launch.sources import Setup
from tpu_rl import checkpoint, models, reward_models
from tpu_rl.errors import InputError, TpuRlError
from tpu_rl.types import Params


@dataclass(frozen=True)
class Flags:
    run_dir: tyro.conf.Positional[str]
    """A run folder: it holds config.yaml and checkpoints/."""
    to: str
    """The directory to write: new, empty, or a model directory, which is then replaced."""
    role: str | None = None
    """Which of the run's models, such as value or reward; else the one that the run was for."""
    adapter: bool = False
    """Of a run with LoRA: only the adapter, as a directory for PEFT, not merged into the model."""


def main(argv: list[str]) -> int:
    flags = tyro.cli(Flags, args=argv, prog="launch/export.py", description=__doc__)
    try:
        setup, params, step = load_run(flags.run_dir)
        name = flags.role or roles.product(setup.config.algorithm)
        cast = roles.specs(setup.config)
        whole = [one for one in setup.models if cast[one].trunk_of is None]
        if name not in whole:
            why = f"it is a head on the layers of {cast[name].trunk_of}" if name in cast else ""
            fix = f"it has {', '.join(whole)}"
            raise InputError(f"the run has no model {name!r} by itself", where="--role", why=why, fix=fix)
        write(setup, params, name, flags)
    except TpuRlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    print(f"wrote step {step} of {flags.run_dir} to {flags.to}")
    return 0


def write(setup: Setup, params: Params, name: str, flags: Flags) -> None:
    """One model; of a reward model also how its scores are read and, beside it, the other trunks of its ensemble.

    Raises InputError where the adapter is wanted of a model that has none, or none that could stand alone.
    """
    algorithm, target = setup.config.algorithm, Path(flags.to)
    reading = reward_runs.reading(algorithm) if name == roles.product(algorithm) else None
    if reading is None:
        write_one(setup, params, name, target, flags.adapter)
        return
    # Named after the model that they belong to: two exports may lie side by side.
    beside = {other: f"{target.absolute().name}_{other}" for other in reading.others}
    for other, folder in beside.items():
        write_one(setup, params, other, target.absolute().parent / folder, flags.adapter)
    write_one(setup, params, name, target, flags.adapter)
    reward_models.write_reading(target, replace(reading, others=tuple(beside.values())))


def write_one(setup: Setup, params: Params, name: str, target: Path, adapter: bool) -> None:
    """A role's model, or its adapter alone. Raises InputError where there is none."""
    own, tokenizer = setup.params_of(name)(params), setup.language.tokenizer
    if not adapter:
        models.save(target, setup.models[name], own, tokenizer)
        return
    base = roles.adapter_base(setup.config, name)
    if base is None:
        why = "it was trained whole, or began with weights that are no model's directory"
        raise InputError(f"{name} has no adapter to export", where="--adapter", why=why, fix="export it without")
    models.save_adapters(target, setup.models[name], own, base, tokenizer)


def load_run(address: str) -> tuple[Setup, Params, int]:
    """A run's setup, its whole params tree at the newest checkpoint, over all devices here, and that step.

    Raises InputError where there is no run or no checkpoint, DamagedDataError where the checkpoint is not as saved.
    """
    run_dir = stored_runs.fetched(address)
    if not (run_dir / "checkpoints").is_dir():
        raise InputError("the run has no checkpoints yet", where=address, fix="let it reach its first one")
    config = configuration.load(run_dir / "config.yaml")
    mesh = build.make_mesh(MeshConfig())
    # The run's machine may have been another one, and cuDNN is for rows that are learned from.
    attention = "auto" if mesh.devices.flat[0].platform == "tpu" else "tiles"
    config = replace(config, model=replace(config.model, attention=attention))
    if config.sampling.tensor is not None and mesh.size % config.sampling.tensor:  # nor as many devices
        config = replace(config, sampling=replace(config.sampling, tensor=None))
    with jax.set_mesh(mesh):
        setup, params = build.make_setup(config, run_dir, mesh)
    checkpoints = checkpoint.read_checkpoints(stored_runs.checkpoints_of(address))  # the run may still be going on
    newest = checkpoints.latest()
    if newest is None:
        raise InputError("the run has no whole checkpoint yet", where=address, fix="let it reach its first one")
    with jax.set_mesh(mesh):
        stage = next(stage for stage in phases.stages(config, run_dir, newest) if newest <= stage.last)
        state, _ = build.learner(setup, stage, build.build_algorithm(setup, stage), params)
    wanted = states.abstract(state)
    del state, params
    state, _ = states.restore(checkpoints, newest, wanted)
    checkpoints.close()
    return setup, state.params, newest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
