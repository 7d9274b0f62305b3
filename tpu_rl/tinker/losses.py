"""The losses of the protocol: sums over tokens of functions of their log-probs.

As Tinker documents them, with x_t the log-prob of target t under the model, q_t the one under which
it was sampled, A_t its advantage and r_t = exp(x_t - q_t):

    cross_entropy        -sum_t w_t x_t                  targets and weights may be [n, K]
    importance_sampling  -sum_t r_t A_t
    ppo                  -sum_t min(r_t A_t, clip(r_t, low, high) A_t)
    cispo                -sum_t stop_gradient(clip(r_t, low, high)) A_t x_t
    dro                  -sum_t (A_t x_t - beta / 2 (x_t - q_t)^2)
    gspo                 -sum_t min(s_t A_t, clip(s_t, low, high) A_t)

low and high are 0.8 and 1.2, the bounds themselves, and beta is 0.05, unless the request has its
own. Nothing is averaged. A token with A_t = 0 adds exactly 0 to the losses with a ratio, whatever
its ratio is: clients pad prompts so. In `dro` it keeps the second term, as in the formula.

Tinker does not document its `gspo`. Here s_t is the ratio of GSPO-token (arXiv 2507.18071, eq. 14):
its value is exp of the mean of x_t - q_t over the tokens of the datum with A_t != 0, its gradient
that of x_t times this. low and high are the paper's, 1 - 3e-4 and 1 + 4e-4. The paper averages over
the tokens of a completion: divide its advantages by their number.

Losses on the client (`forward_backward_custom`) arrive as `cross_entropy`: weights are what the
client's loss has as its gradient, with the opposite sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.algos.cispo import cispo_surrogate
from tpu_rl.algos.gspo import GspoConfig, gspo_surrogate
from tpu_rl.algos.surrogates.dro import dro
from tpu_rl.losses.policy_gradient import clipped_surrogate, unclipped
from tpu_rl.serving.protocol import ApiError
from tpu_rl.tinker.wire import Datum
from tpu_rl.types import Array


class Numbers(NamedTuple):
    """The numbers of each token that losses read."""

    targets: Any
    """[..., C] int32."""
    weights: Any
    """[..., C] float32, as all others; the rest has no last dimension."""
    old_log_probs: Any
    advantages: Any
    clip_low: Any
    """The lower bound of the ratio is 1 - clip_low."""
    clip_high: Any
    """The upper bound of the ratio is 1 + clip_high."""
    sequence_ids: Any
    """int32: the same number, above 0, at all tokens of a datum, in a row of numbers."""


NO_ROWS: Any = None
"""Surrogates of single tokens do not read the rows."""


class Loss(NamedTuple):
    """A loss of the protocol, with the inputs that it reads."""

    inputs: tuple[str, ...]
    """Numbers of each token that a datum must have."""
    optional: tuple[str, ...]
    """Numbers of each token that it may have."""
    settings: Mapping[str, float]
    """Settings of a request, with their defaults."""
    losses: Callable[[Array, Numbers, Array], Array]
    """(log-probs [R, L, C], numbers, beta []) -> losses [R, L]."""


def _cross_entropy(log_probs: Array, numbers: Numbers, beta: Array) -> Array:
    return -(numbers.weights * log_probs).sum(-1)


def _of_ratio(surrogate: Callable[..., Any], has_bounds: bool = True) -> Callable[..., Array]:
    """Return the losses of a surrogate of this library, 0 where the advantage is 0."""

    def losses(log_probs: Array, numbers: Numbers, beta: Array) -> Array:
        log_probs = log_probs[..., 0]
        counts = numbers.advantages != 0
        # Where nothing counts, numbers without a gradient: zero times infinity would be NaN.
        log_probs = jnp.where(counts, log_probs, 0.0)
        old = jnp.where(counts, numbers.old_log_probs, 0.0)
        bounds = {"clip_low": numbers.clip_low, "clip_high": numbers.clip_high}
        settings = bounds if has_bounds else {}
        rows = numbers._replace(sequence_ids=jnp.where(counts, numbers.sequence_ids, 0))
        return surrogate(log_probs, old, numbers.advantages, rows, **settings).losses

    return losses


def _dro(log_probs: Array, numbers: Numbers, beta: Array) -> Array:
    args = (log_probs[..., 0], numbers.old_log_probs, numbers.advantages, NO_ROWS)
    number: Any = beta
    return dro(*args, beta=number).losses


OF_SAMPLES = ("target_tokens", "logprobs", "advantages")
BOUNDS = ("clip_low_threshold", "clip_high_threshold")
CLIP: dict[str, float] = {BOUNDS[0]: 0.8, BOUNDS[1]: 1.2}
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(("target_tokens",), ("weights",), {}, _cross_entropy),
    "importance_sampling": Loss(OF_SAMPLES, (), {}, _of_ratio(unclipped, has_bounds=False)),
    "ppo": Loss(OF_SAMPLES, BOUNDS, CLIP, _of_ratio(clipped_surrogate)),
    "cispo": Loss(OF_SAMPLES, BOUNDS, CLIP, _of_ratio(cispo_surrogate)),
    "dro": Loss(OF_SAMPLES, (), {"beta": 0.05}, _dro),
    "gspo": Loss(
        OF_SAMPLES,
        BOUNDS,
        {BOUNDS[0]: 1 - GspoConfig.clip_low, BOUNDS[1]: 1 + GspoConfig.clip_high},
        _of_ratio(partial(gspo_surrogate, level="sequence_token")),
    ),
}
REFUSED = {
    "stable_reinforce": "it reads what Tinker's own sampler records; use importance_sampling",
    "custom": "losses run on the client here; pass the function to forward_backward_custom",
}
"""Losses of the protocol that this server does not have -> why."""


def losses_of(kind: Array, log_probs: Array, numbers: Numbers, beta: Array) -> Array:
    """Compute losses [R, L] by the loss with the number `kind` [] in `LOSSES`.

    One program serves all losses.
    """
    branches = [loss.losses for loss in LOSSES.values()]
    return jax.lax.switch(kind, branches, log_probs, numbers, beta)


def require(name: str) -> None:
    """Raise ApiError if there is no such loss."""
    if name not in LOSSES:
        why = REFUSED.get(name, f"there is {', '.join(LOSSES)}")
        raise ApiError(400, f"the loss {name[:80]!r} is refused: {why}", "loss_fn")


def check(name: str, settings: Mapping[str, float | str], data: list[Datum], vocab: int) -> float:
    """Check a request's loss and the numbers of its data; return beta, or 0 if it has none.

    Raises ApiError if the loss is not supported, or data and settings are not those that it reads.
    """
    require(name)
    loss = LOSSES[name]
    for key, value in settings.items():
        if key not in loss.settings:
            known = ", ".join(loss.settings) or "none"
            raise ApiError(400, f"{name} has no setting {key!r}; it has {known}", key)
        if isinstance(value, str) or not math.isfinite(value):
            raise ApiError(400, f"{key} = {value!r} is no finite number", key)
    for index, datum in enumerate(data):
        _check_datum(name, loss, datum, f"data[{index}]", vocab)
    return float(settings.get("beta", loss.settings.get("beta", 0.0)))


def _check_datum(name: str, loss: Loss, datum: Datum, place: str, vocab: int) -> None:
    length = len(datum.tokens)
    for key in loss.inputs:
        if key not in datum.inputs:
            raise ApiError(400, f"{place} has no {key}, which {name} reads", place)
    targets = datum.inputs["target_tokens"]
    for key, values in datum.inputs.items():
        if key not in (*loss.inputs, *loss.optional):
            known = ", ".join((*loss.inputs, *loss.optional))
            raise ApiError(400, f"{place} has {key!r}, but {name} reads {known}", place)
        expected = targets.shape if key == "weights" else (length,)
        if key == "target_tokens" and name == "cross_entropy" and values.ndim == 2:
            expected = (length, max(values.shape[1], 1))
        if values.shape != expected:
            shape = list(values.shape)
            raise ApiError(400, f"{place}.{key} is {shape}, not {list(expected)}", place)
        if key != "target_tokens" and not np.isfinite(values).all():
            raise ApiError(400, f"{place}.{key} has a number that is not finite", place)
    ids = np.concatenate([datum.tokens, targets.reshape(-1)])
    if targets.dtype.kind != "i" or not ((ids >= 0) & (ids < vocab)).all():
        raise ApiError(400, f"{place} has a number that is no token id below {vocab}", place)
    if not length:
        raise ApiError(400, f"{place} has no tokens", place)


def numbers_of(settings: Mapping[str, Any], datum: Datum, width: int) -> Numbers:
    """Return the numbers of a checked datum of n tokens, with `width` targets for each token.

    Targets that it does not have weigh nothing. Without other data all are of the sequence 1.
    """
    inputs = datum.inputs
    length = len(datum.tokens)
    targets = np.zeros((length, width), np.int32)
    weights = np.zeros((length, width), np.float32)
    token_ids = inputs["target_tokens"].reshape(length, -1)
    shape = token_ids.shape
    targets[:, : shape[1]] = token_ids
    weights[:, : shape[1]] = inputs.get("weights", np.ones(shape)).reshape(shape)
    bounds = []
    for key, default in CLIP.items():
        bound = inputs.get(key, np.full(length, settings.get(key, default)))
        bounds.append(bound.astype(np.float32))
    zeros = np.zeros(length, np.float32)
    return Numbers(
        targets,
        weights,
        inputs.get("logprobs", zeros).astype(np.float32),
        inputs.get("advantages", zeros).astype(np.float32),
        1.0 - bounds[0],
        bounds[1] - 1.0,
        np.ones(length, np.int32),
    )
