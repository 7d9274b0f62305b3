"""Save and restore a `TrainState` without the frozen weights under LoRA adapters.

Every start reads those weights from their model directory anyway, so the checkpoint of a LoRA run
is as small as its trainable part. The checkpoint holds the digest of the weights under the
adapters, and `restore` refuses a model that has changed since.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from tpu_rl.checkpoint import digests, manager
from tpu_rl.errors import InputError
from tpu_rl.types import Params, TrainState

BASE = "base"
"""The name in the params tree of the frozen weights of --model.path, which all roles with adapters
over that model share. The frozen weights of a role with a model of its own are at "ROLE_base"."""

DIGEST = "digest_under_adapters"
"""The key of the digest in the checkpoint's JSON."""


def save(
    checkpoints: manager.Checkpoints,
    step: int,
    state: TrainState,
    extra: dict[str, Any],
    wait: bool,
) -> None:
    """Save a step like `Checkpoints.save`, with a digest in place of the weights under adapters."""
    saved_state, under_adapters = split_base(state)
    if under_adapters:
        extra = extra | {DIGEST: digests.of_tree(under_adapters)}
    checkpoints.save(step, saved_state, extra, wait)


def abstract(state: TrainState) -> TrainState:
    """Return shapes, dtypes and shardings for `restore`; weights under adapters stay arrays."""
    saved_state, under_adapters = split_base(state)
    shapes = manager.abstract(saved_state)
    return replace(shapes, params=shapes.params | under_adapters)


def restore(
    checkpoints: manager.Checkpoints, step: int, abstract_state: TrainState
) -> tuple[TrainState, dict[str, Any]]:
    """Read a step back like `Checkpoints.restore`, given the result of `abstract`.

    Raises InputError if the weights under the adapters are not the weights that the adapters were
    trained on.
    """
    saved_shapes, under_adapters = split_base(abstract_state)
    state, extra = checkpoints.restore(step, saved_shapes)
    if under_adapters and extra.get(DIGEST) != digests.of_tree(under_adapters):
        raise InputError(
            "the model under the adapters is not the one that the run began with",
            where=f"checkpoint {step}",
            why="its digest differs: the files of --model.path have changed",
            fix="restore them, or start a new run in another --run-dir",
        )
    return replace(state, params=state.params | under_adapters), extra


def free(state: TrainState) -> None:
    """Delete the buffers of everything that a checkpoint holds, even if other references exist."""
    saved_state, _ = split_base(state)
    for leaf in jax.tree.leaves(saved_state):
        leaf.delete()


def split_base(state: TrainState) -> tuple[TrainState, Params]:
    """Return (the state without the frozen weights under adapters, those weights)."""
    under_adapters = {name: leaves for name, leaves in state.params.items() if name.endswith(BASE)}
    saved = {name: leaves for name, leaves in state.params.items() if name not in under_adapters}
    return replace(state, params=saved), under_adapters
