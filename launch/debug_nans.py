"""`--debug-nans`: a step whose numbers are not finite ends the run, with the operation that made them so.

Such a step changes nothing (see `training`), so it can be computed once more from the same batch and the same state,
operation by operation. Until then the run is the one without the flag, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_rl import not_finite, sharding, training
from tpu_rl.errors import InputError
from tpu_rl.not_finite import Finding, Made
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, TrainState

MOST_NAMES = 6
FIX = "guard that operation, or lower --optimizer.learning-rate; without --debug-nans such steps are skipped"


class Computed(NamedTuple):
    """What an update must find finite, and the metrics, which tell the terms of a loss apart."""

    loss: Array
    gradient: Params
    gradient_norm: Array
    metrics: Metrics


def watch_batches(
    algorithm: Algorithm, trainable: training.Trainable, make_batch: Callable[..., tuple[Any, Any]]
) -> Callable[..., tuple[Any, Any]]:
    """The same, but raises InputError where the experience, or the batch made of it, is not finite."""
    is_finite = jax.jit(training.all_finite)

    def watched(experience: Experience, params: Params, state: Any) -> tuple[Any, Any]:
        batch, new_state = make_batch(experience, params, state)
        if not is_finite(batch):
            raise _of_batch(algorithm, trainable, experience, params, state)
        return batch, new_state

    return watched


def watch_updates(
    algorithm: Algorithm, trainable: training.Trainable, update: training.UpdateStep
) -> training.UpdateStep:
    """The same, but raises InputError where the update is skipped."""

    def watched(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state, metrics = update(state, batch)
        if training.reduce_metrics(metrics)["optim/skipped"]:
            # The state that was donated is gone, but a skipped update gives back the same one.
            raise _error(f"the update after {state.step}", _of_update(algorithm, trainable, state.params, batch))
        return state, metrics

    return watched


def _of_update(algorithm: Algorithm, trainable: training.Trainable, params: Params, batch: Any) -> Finding | None:
    def compute(chosen: Params, frozen: Params, batch: Any) -> Computed:
        loss, metrics, gradient = training.accumulate(algorithm, chosen, frozen, batch)
        return Computed(loss, gradient, optax.tree.norm(gradient), metrics)

    return not_finite.find(compute, *training.partition(params, trainable), batch)


def _of_batch(
    algorithm: Algorithm, trainable: training.Trainable, experience: Experience, params: Params, state: Any
) -> InputError:
    """Experience that came in bad is made good where it is bad, to see whether the model makes the same of it: NaN
    among the sampler's log-probs come from the forward pass that the update repeats."""
    faults = list(bad_rows(experience.data))
    data = jax.tree.map(lambda x: jnp.nan_to_num(x, posinf=0.0, neginf=0.0), experience.data)
    repaired = experience._replace(data=data)
    found = not_finite.find(lambda *arguments: algorithm.make_batch(*arguments)[0], repaired, params, state)
    if found is None:
        batch, _ = jax.jit(algorithm.make_batch)(repaired, params, state)
        for number in range(jax.tree.leaves(batch)[0].shape[0]):
            found = found or _of_update(algorithm, trainable, params, training.minibatch(batch, number))
    return _error("the batch of this step", found, faults)


def bad_rows(data: Any) -> Iterable[str]:
    """ "log_probs of rows 3, 5" for each array of experience that is not finite."""
    for name, values in zip(not_finite.names(data), jax.tree.leaves(sharding.to_host(data)), strict=True):
        if np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values).all():
            rows = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))
            yield f"{name} of row{'s' * (len(rows) > 1)} {listed(rows)}"


def _error(what: str, found: Finding | None, faults: Iterable[str] = ()) -> InputError:
    bad = listed([*faults, *(found.outputs if found else ())])
    if found is None or not (found.made or found.argument):
        return InputError(
            f"{what} is not finite: {bad or 'a number in it'}",
            where="the experience itself" if faults else "",
            why="it came in with these rows" if faults else "computed alone, operation by operation, all is finite",
            fix="look at those rows and at what scored them" if faults else "lower --optimizer.learning-rate",
        )
    if not found.made:
        return InputError(f"{what} is not finite: {bad}", where=found.argument, why="it came in so", fix=FIX)
    first, *rest = found.made
    why = "; ".join([sentence("first", first), *(sentence("then", made) for made in rest), *first.loops])
    return InputError(f"{what} is not finite: {bad}", where="\n    called from ".join(first.frames), why=why, fix=FIX)


def sentence(when: str, made: Made) -> str:
    line = made.frames[0] if made.frames else "an unknown line"
    return f"{when} `{made.operation}` makes {made.kind} {'in the gradient of' if made.is_backward else 'at'} {line}"


def listed(names: Iterable[Any]) -> str:
    every = [str(name) for name in names]
    return ", ".join(every[:MOST_NAMES]) + (f" and {len(every) - MOST_NAMES} more" if len(every) > MOST_NAMES else "")
