"""`--debug-nans`: end the run at a step that is not finite, and name the operation that made it so.

Such a step changes nothing (see `tpu_rl.train.update_step`), so it can be computed once more from
the same batch and the same state, operation by operation. Until then the run is bit-identical to
one without the flag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_rl.errors import InputError
from tpu_rl.runtime import nan_tracer
from tpu_rl.runtime.nan_tracer import BadOperation, Finding
from tpu_rl.train import sharding, update_step
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, TrainState

MAX_NAMES = 6
"""The number of names that a message lists."""
FIX = (
    "guard that operation, or lower --optimizer.learning-rate; without --debug-nans such steps are "
    "skipped"
)

MakeBatch = Callable[[Experience, Params, Any], tuple[Any, Any]]
"""(experience, params, algorithm state) -> (batch, new algorithm state)."""


class _Computed(NamedTuple):
    """The values of an update that must be finite."""

    loss: Array
    gradient: Params
    gradient_norm: Array
    metrics: Metrics
    """They tell the terms of a loss apart."""


def watch_batches(
    algorithm: Algorithm, trainable: update_step.Trainable, make_batch: MakeBatch
) -> MakeBatch:
    """Wrap `make_batch` to raise InputError if the experience or the batch is not finite."""
    is_finite = jax.jit(update_step.all_finite)

    def watched(experience: Experience, params: Params, state: Any) -> tuple[Any, Any]:
        batch, new_state = make_batch(experience, params, state)
        if not is_finite(batch):
            raise _batch_error(algorithm, trainable, experience, params, state)
        return batch, new_state

    return watched


def watch_updates(
    algorithm: Algorithm, trainable: update_step.Trainable, update: update_step.UpdateStep
) -> update_step.UpdateStep:
    """Wrap an update step to raise InputError if the update is skipped."""

    def watched(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state, metrics = update(state, batch)
        if update_step.reduce_metrics(metrics)["optim/skipped"]:
            # The donated state is gone, but a skipped update returns the same one.
            finding = _trace_update(algorithm, trainable, state.params, batch)
            raise _error(f"the update after {state.step}", finding)
        return state, metrics

    return watched


def _trace_update(
    algorithm: Algorithm, trainable: update_step.Trainable, params: Params, batch: Any
) -> Finding | None:
    def compute(chosen: Params, frozen: Params, batch: Any) -> _Computed:
        loss, metrics, gradient = update_step.accumulate(algorithm, chosen, frozen, batch)
        return _Computed(loss, gradient, optax.tree.norm(gradient), metrics)

    return nan_tracer.find(compute, *update_step.partition(params, trainable), batch)


def _batch_error(
    algorithm: Algorithm,
    trainable: update_step.Trainable,
    experience: Experience,
    params: Params,
    state: Any,
) -> InputError:
    """Return the error for a batch that is not finite.

    Bad values of the experience are replaced, to see whether the model makes new ones: NaNs among
    the sampler's log-probs come from the forward pass that the update repeats.
    """
    bad_experience = list(bad_rows(experience.data))
    data = jax.tree.map(lambda x: jnp.nan_to_num(x, posinf=0.0, neginf=0.0), experience.data)
    repaired = experience._replace(data=data)

    def compute(experience: Experience, params: Params, state: Any) -> Any:
        return algorithm.make_batch(experience, params, state)[0]

    finding = nan_tracer.find(compute, repaired, params, state)
    if finding is None:
        batch, _ = jax.jit(algorithm.make_batch)(repaired, params, state)
        for number in range(jax.tree.leaves(batch)[0].shape[0]):
            minibatch = update_step.minibatch(batch, number)
            finding = _trace_update(algorithm, trainable, params, minibatch)
            if finding is not None:
                break
    return _error("the batch of this step", finding, bad_experience)


def bad_rows(data: Any) -> Iterable[str]:
    """Yield "log_probs of rows 3, 5" for each array of experience that is not finite."""
    arrays = jax.tree.leaves(sharding.to_host(data))
    for name, values in zip(nan_tracer.names(data), arrays, strict=True):
        if np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values).all():
            rows = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))
            yield f"{name} of row{'s' * (len(rows) > 1)} {_join(rows)}"


def _error(what: str, finding: Finding | None, bad_experience: Iterable[str] = ()) -> InputError:
    """Return the error for `what`, which is not finite.

    Args:
      what: the batch or the update.
      finding: what the tracer found.
      bad_experience: the arrays of the experience that were not finite.
    """
    outputs = finding.outputs if finding is not None else ()
    what_is_bad = _join([*bad_experience, *outputs])
    if finding is not None and finding.operations:
        first, *later = finding.operations
        sentences = [_describe("first", first)]
        sentences += [_describe("then", operation) for operation in later]
        return InputError(
            f"{what} is not finite: {what_is_bad}",
            where="\n    called from ".join(first.frames),
            why="; ".join([*sentences, *first.loops]),
            fix=FIX,
        )
    if finding is not None and finding.argument:
        return InputError(
            f"{what} is not finite: {what_is_bad}",
            where=finding.argument,
            why="it came in so",
            fix=FIX,
        )
    if bad_experience:
        return InputError(
            f"{what} is not finite: {what_is_bad}",
            where="the experience itself",
            why="it came in with these rows",
            fix="look at those rows and at what scored them",
        )
    return InputError(
        f"{what} is not finite: {what_is_bad or 'a number in it'}",
        why="computed alone, operation by operation, all is finite",
        fix="lower --optimizer.learning-rate",
    )


def _describe(when: str, operation: BadOperation) -> str:
    line = operation.frames[0] if operation.frames else "an unknown line"
    place = "in the gradient of" if operation.is_backward else "at"
    return f"{when} `{operation.operation}` makes {operation.kind} {place} {line}"


def _join(names: Iterable[Any]) -> str:
    texts = [str(name) for name in names]
    more = f" and {len(texts) - MAX_NAMES} more" if len(texts) > MAX_NAMES else ""
    return ", ".join(texts[:MAX_NAMES]) + more
