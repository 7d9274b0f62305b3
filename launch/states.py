"""What of a run's state is in its checkpoints: all but the frozen weights under adapters.

Every start reads those from their model directory anyway, so a checkpoint of a LoRA run is as small as what trains.
It holds their digest, and a model that is no longer the same is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from launch.roles import BASE
from tpu_rl import checkpoint, digests
from tpu_rl.errors import InputError
from tpu_rl.types import Params, TrainState

DIGEST = "digest_under_adapters"


def save(checkpoints: checkpoint.Checkpoints, step: int, state: TrainState, extra: dict[str, Any], wait: bool) -> None:
    """As `Checkpoints.save`."""
    kept, under = apart(state)
    checkpoints.save(step, kept, extra | ({DIGEST: digests.of_tree(under)} if under else {}), wait)


def abstract(state: TrainState) -> TrainState:
    """What `restore` needs to know of a state; the weights under adapters are still arrays in it."""
    kept, under = apart(state)
    kept = checkpoint.abstract(kept)
    return replace(kept, params=kept.params | under)


def restore(checkpoints: checkpoint.Checkpoints, step: int, wanted: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """As `Checkpoints.restore`, of a state that is `wanted`. Raises InputError where the weights under its adapters are
    not those that the adapters were trained on."""
    kept, under = apart(wanted)
    state, extra = checkpoints.restore(step, kept)
    if under and extra.get(DIGEST) != digests.of_tree(under):
        raise InputError(
            "the model under the adapters is not the one that the run began with",
            where=f"checkpoint {step}",
            why="its digest differs: the files of --model.path have changed",
            fix="restore them, or start a new run in another --run-dir",
        )
    return replace(state, params=state.params | under), extra


def let_go(state: TrainState) -> None:
    """Free what a checkpoint has of the state, whoever still knows of it."""
    kept, _ = apart(state)
    for leaf in jax.tree.leaves(kept):
        leaf.delete()


def apart(state: TrainState) -> tuple[TrainState, Params]:
    """(the state without the weights under adapters, those weights)."""
    under = {name: leaves for name, leaves in state.params.items() if name.endswith(BASE)}
    own = {name: leaves for name, leaves in state.params.items() if name not in under}
    return replace(state, params=own), under
