"""`--debug-nans`: end the run at a step that is not finite, and name the line that made it so.

Such a step changes nothing (see `tpu_rl.train.update_step`), so it is computed once more from the
same batch and state: without jit, with `jax_debug_nans` and then also with `jax_debug_infs`, which
stop at the first operation that makes a NaN or an infinity. Until then the run is bit-identical to
one without the flag.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax

from tpu_rl.errors import InputError
from tpu_rl.train import sharding, update_step
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, TrainState

MAX_FRAMES = 4
"""The number of stack frames that a message shows."""
MAX_NAMES = 6
"""The number of rows or leaves that a message lists."""
HIDDEN = (
    *(str(Path(str(module.__file__)).parent) + "/" for module in (jax, jaxlib, flax, optax)),
    __file__,
    "<",
)
"""Beginnings of the files whose stack frames are not shown."""

MakeBatch = Callable[[Experience, Params, Any], tuple[Any, Any]]
"""(experience, params, algorithm state) -> (batch, new algorithm state)."""


def watch_batches(
    algorithm: Algorithm, trainable: update_step.Trainable, make_batch: MakeBatch
) -> MakeBatch:
    """Wrap `make_batch` to raise InputError if the experience or the batch is not finite.

    Bad numbers of the experience are replaced, to see whether the model makes new ones: NaNs among
    the sampler's log-probs come from the forward pass that the update repeats.
    """
    is_finite = jax.jit(update_step.all_finite)

    def watched(experience: Experience, params: Params, state: Any) -> tuple[Any, Any]:
        batch, new_state = make_batch(experience, params, state)
        if is_finite(batch):
            return batch, new_state
        bad_rows = _join(_bad_rows(experience.data))
        what = f"the batch of this step is not finite: {bad_rows or 'make_batch'}"
        data = jax.tree.map(lambda x: jnp.nan_to_num(x, posinf=0.0, neginf=0.0), experience.data)
        repaired = experience._replace(data=data)
        _require_finite(what, algorithm.make_batch, repaired, params, state)
        if not bad_rows:
            raise _unexplained(what)
        batch, _ = jax.jit(algorithm.make_batch)(repaired, params, state)
        for number in range(jax.tree.leaves(batch)[0].shape[0]):
            minibatch = update_step.minibatch(batch, number)
            _require_finite_update(what, algorithm, trainable, params, minibatch)
        raise InputError(
            what,
            where="the experience itself",
            why="it came in with these rows",
            fix="look at those rows and at what scored them",
        )

    return watched


def watch_updates(
    algorithm: Algorithm, trainable: update_step.Trainable, update: update_step.UpdateStep
) -> update_step.UpdateStep:
    """Wrap an update step to raise InputError if it is skipped, or makes params not finite."""
    finite_leaves = jax.jit(lambda params: jax.tree.map(update_step.all_finite, params))

    def watched(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state, metrics = update(state, batch)
        if update_step.reduce_metrics(metrics)["optim/skipped"]:
            # The donated state is gone, but a skipped update returns the same one.
            what = f"the update after {state.step} is not finite"
            _require_finite_update(what, algorithm, trainable, state.params, batch)
            raise _unexplained(what)
        bad_leaves = [name for name, finite in _named(finite_leaves(state.params)) if not finite]
        if bad_leaves:
            raise InputError(
                f"update {state.step} made params that are not finite",
                where=_join(bad_leaves),
                why="its loss and gradient were finite: the optimizer or the algorithm's "
                "after_update did it",
                fix="lower --optimizer.learning-rate, or look at after_update",
            )
        return state, metrics

    return watched


def _require_finite_update(
    what: str, algorithm: Algorithm, trainable: update_step.Trainable, params: Params, batch: Any
) -> None:
    """Compute loss and gradient of each micro-batch once more; see `_require_finite`."""
    trained, frozen = update_step.partition(params, trainable)

    def loss_of(trained: Params, micro_batch: Any) -> Array:
        loss, _ = algorithm.loss(update_step.combine(trained, frozen), micro_batch)
        return loss

    gradient = jax.value_and_grad(loss_of)
    for number in range(jax.tree.leaves(batch)[0].shape[0]):
        micro_batch = update_step.minibatch(batch, number)
        _require_finite(f"{what}, in micro-batch {number}", gradient, trained, micro_batch)


def _require_finite(what: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Raise InputError with the lines at which `function` makes its first NaN and infinity.

    It does nothing if all results are finite. The NaN comes first in the message, because masks
    hold infinities on purpose.
    """
    if update_step.all_finite(jax.jit(function)(*arguments)):
        return
    faults = []
    for stops_at_infinities in (False, True):
        try:
            with jax.disable_jit(), jax.debug_nans(True), jax.debug_infs(stops_at_infinities):
                function(*arguments)
        except FloatingPointError as error:
            faults.append(_Fault(error))
    if faults:
        first, *others = faults
        why = [str(first), *(f"the first infinity, maybe a mask's: {other}" for other in others)]
        raise InputError(
            what,
            where="\n    called from ".join(first.frames),
            why="; ".join(why),
            fix="guard that operation, or lower --optimizer.learning-rate; without --debug-nans "
            "such steps are skipped",
        )


class _Fault:
    """An operation at which jax stopped."""

    def __init__(self, error: FloatingPointError):
        # Of an operation of the backward pass, jax adds the stack of the forward pass as a cause.
        self.is_backward = error.__cause__ is not None
        stack = traceback.extract_tb((error.__cause__ or error).__traceback__)
        frames = [
            f"{frame.filename}:{frame.lineno} in {frame.name}"
            for frame in reversed(stack)
            if not frame.filename.startswith(HIDDEN)
        ]
        self.frames = frames[:MAX_FRAMES] or ["an unknown line"]
        self.text = str(error).splitlines()[0]

    def __str__(self) -> str:
        place = "in the gradient of" if self.is_backward else "at"
        return f"{self.text} {place} {self.frames[0]}"


def _unexplained(what: str) -> InputError:
    return InputError(
        what,
        why="computed once more, operation by operation, all is finite",
        fix="lower --optimizer.learning-rate",
    )


def _bad_rows(data: Any) -> Iterator[str]:
    """Yield "log_probs of rows 3, 5" for each array of experience that is not finite."""
    for name, values in _named(sharding.to_host(data)):
        if np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values).all():
            rows = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))
            yield f"{name} of row{'s' * (len(rows) > 1)} {_join(map(str, rows))}"


def _named(tree: Any) -> list[tuple[str, Any]]:
    """Return ("policy/embedding", leaf) for each leaf of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def _join(names: Iterable[str]) -> str:
    texts = list(names)
    more = f" and {len(texts) - MAX_NAMES} more" if len(texts) > MAX_NAMES else ""
    return ", ".join(texts[:MAX_NAMES]) + more
