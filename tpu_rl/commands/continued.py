"""The optimizer's state of the run that wrote --model.path: `--optimizer.continued`.

The moments and their counts go over, as they are when a run continues with other data or another
schedule (mid-training in branches, arXiv 2506.20512). Counters of schedules begin at 0, and so do
steps, random keys and the state of the algorithm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from tpu_rl.checkpoint import manager, remote_run
from tpu_rl.commands import config as configuration
from tpu_rl.commands import saved_run
from tpu_rl.commands.config import ExperimentConfig
from tpu_rl.errors import InputError
from tpu_rl.train import optimizers
from tpu_rl.types import TrainState

FLAG = "--optimizer.continued"
PART = "opt_state"


def run_of(config: ExperimentConfig) -> str:
    """Return the address of the run that wrote the model.

    Raises InputError if no run did, or it had another optimizer.
    """
    address, _, name = str(config.model.path).rstrip("/").rpartition("/")
    if name != "model" or not remote_run.is_run(address) or config.model.random_init:
        raise InputError(
            "no run wrote the model",
            where=f"{FLAG}, --model.path {config.model.path}",
            why="the optimizer's state is in the checkpoints of a run",
            fix="give the folder RUN/model of a run that ended, or leave the flag out",
        )
    other = configuration.load(remote_run.fetch(address) / remote_run.CONFIG).optimizer
    ours = config.optimizer
    if (other.name, other.reset_every > 0) != (ours.name, ours.reset_every > 0):
        of_run, here = (
            f"--optimizer.name {settings.name} --optimizer.reset-every {settings.reset_every}"
            for settings in (other, ours)
        )
        raise InputError(
            f"the run had {of_run}",
            where=f"{FLAG}, {here}",
            why="the states of two optimizers are not the same, and one that begins anew counts "
            "its steps in its state",
            fix="use those of the run, or leave the flag out",
        )
    return address


def with_state(config: ExperimentConfig, state: TrainState) -> TrainState:
    """Return the state before the first step with the optimizer's state of the model's run.

    Raises InputError if that run trained other weights, or weights of other shapes.
    """
    address = run_of(config)
    checkpoints, step = saved_run.open_checkpoints(address, remote_run.fetch(address))
    shapes = manager.abstract({PART: state.opt_state})
    try:
        restored, _ = checkpoints.restore(step, shapes, part=f"{PART}.")
    except InputError as error:
        raise InputError(
            "the optimizer's state is that of other weights",
            where=f"{FLAG}, {address}",
            why=error.why,
            fix="train the same roles and layers, or leave the flag out",
        ) from error
    finally:
        checkpoints.close()
    print(f"the optimizer goes on as after step {step} of {address}")
    return replace(state, opt_state=_with_schedules_of(state.opt_state, restored[PART]))


def _with_schedules_of(fresh: Any, restored: Any) -> Any:
    """Return the restored state with the counters of the fresh one's schedules."""
    is_schedule = optimizers.is_schedule
    return jax.tree.map(
        lambda new, old: new if is_schedule(new) else old, fresh, restored, is_leaf=is_schedule
    )
