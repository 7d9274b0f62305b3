"""Distributions of returns: how a model outputs them, how they are fitted, and how they guide a
reference (Q#, arXiv 2502.20548, and its baselines).

With deterministic transitions and rewards, the optimum of reward minus eta KL(policy || reference)
has a closed form. (Of a random reward the optimum knows the mean alone, while E exp(z / eta) also
counts the chance of a lucky draw.) It needs the distribution Z(x, y) of the return that follows
token y in context x *under the reference* (theorem 2.2, equation 5):

    policy(y | x)  proportional to  reference(y | x) E_{z ~ Z(x, y)} exp(z / eta)

So the logit of every token is the reference's plus an offset, log E exp(z / eta). eta is `kl_coef`,
in units of return per nat: a small eta is strong guidance, an infinite one is the reference. Z does
not depend on eta, so one trained model serves every coefficient. The offsets are

    Q#      log E exp(z / eta)
    CD      E z / eta           controlled decoding (arXiv 2310.17022): the mean instead of the
                                soft maximum
    FUDGE   log E z             (arXiv 2104.05218): no coefficient; for returns in [0, 1]

Offsets measure returns from the lowest possible return, which shifts all logits alike. A token that
is not scored is treated as one that surely earns the lowest return: its offset is 0 (FUDGE: the
token is excluded).

A distribution is given by a model's outputs [..., K]. Without a Support it is Bernoulli: K = 1, the
logit of return 1 against return 0. With a Support it is a histogram: K logits, one per atom.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.losses.shapes import Floats, FloatsV
from tpu_rl.types import Array

EXCLUDED = -1e30
"""Added to the logit of a token that must not be sampled: exp of it is exactly 0, and nothing
becomes NaN."""

SURE = 50.0
"""A logit of probability 1, in float64 too. Beyond it, differences of logits only lose digits."""


class Support(NamedTuple):
    """Returns that a histogram tells apart: `atoms` returns, evenly spaced from `low` to `high`."""

    low: float = 0.0
    high: float = 1.0
    atoms: int = 11

    @property
    def step(self) -> float:
        """Distance of two neighboring atoms."""
        return (self.high - self.low) / (self.atoms - 1)


def above_lowest(support: Support, dtype: Any = jnp.float32) -> Array:
    """Compute the atoms minus the lowest atom, [m]."""
    return support.step * jnp.arange(support.atoms, dtype=dtype)


def nearest_atom(returns: Floats, support: Support) -> FloatsV:
    """Label returns [...] with 1 at the nearest atom -> [..., m].

    Of two equally near atoms it takes the even one, as the paper's code does.
    """
    index = jnp.clip(jnp.round((returns - support.low) / support.step), 0, support.atoms - 1)
    return (index[..., None] == _atom_indices(returns, support)).astype(returns.dtype)


def two_hot(returns: Floats, support: Support) -> FloatsV:
    """Label returns [...] by sharing 1 between the two atoms around each -> [..., m].

    The mean of the label is the return itself (as in C51).
    """
    index = jnp.clip((returns - support.low) / support.step, 0, support.atoms - 1)
    atoms = _atom_indices(returns, support, returns.dtype)
    return jnp.maximum(1 - jnp.abs(index[..., None] - atoms), 0)


def _atom_indices(returns: Array, support: Support, dtype: Any = None) -> Array:
    """Compute 0, 1, ..., m - 1 in a shape that broadcasts against returns[..., None]."""
    return jnp.arange(support.atoms, dtype=dtype).reshape((1,) * returns.ndim + (-1,))


def mean_return(outputs: FloatsV, support: Support | None) -> Floats:
    """Compute the mean of a distribution given by outputs [..., K] -> [...]."""
    if support is None:
        return jax.nn.sigmoid(outputs[..., 0])
    return support.low + _mean_above_lowest(outputs, support)


def _mean_above_lowest(outputs: Array, support: Support) -> Array:
    return jnp.einsum("...k,k->...", jax.nn.softmax(outputs), above_lowest(support, outputs.dtype))


def negative_log_likelihood(
    outputs: FloatsV,
    returns: Floats,
    support: Support | None,
    labels: Callable[[Array, Support], Array] = nearest_atom,
) -> Floats:
    """Compute the negative log-likelihood of returns [...] under outputs [..., K] -> [...].

    Bernoulli: binary cross-entropy, -R log p - (1 - R) log(1 - p), also for R between 0 and 1.
    Histogram: cross-entropy with the `labels` of the returns.
    """
    if support is None:
        return jax.nn.softplus(outputs[..., 0]) - returns * outputs[..., 0]
    return -jnp.sum(labels(returns, support) * jax.nn.log_softmax(outputs), axis=-1)


def bernoulli_offset(logit: Floats, kl_coef: Array | float) -> Floats:
    """Compute log(1 - p + p exp(1 / eta)) for p = sigmoid(logit), of the same shape.

    It is computed as softplus(logit + 1 / eta) - softplus(logit): finite for every logit, infinite
    ones too, however small eta is, and exactly 0 where eta is infinite. Where 1 / eta is far above
    -log p of all candidates it is 1 / eta + log p. That is the reference on condition of success,
    and a smaller eta changes nothing more.
    """
    logit = jnp.minimum(logit, SURE)
    return jax.nn.softplus(logit + 1 / kl_coef) - jax.nn.softplus(logit)


def histogram_offset(logits: FloatsV, kl_coef: Array | float, support: Support) -> Floats:
    """Compute log sum_i z_i exp((a_i - low) / eta) for z = softmax(logits), [..., m] -> [...]."""
    exponents = above_lowest(support, logits.dtype) / kl_coef
    tilted = logits + exponents.reshape((1,) * (logits.ndim - 1) + (-1,))
    return jax.nn.logsumexp(tilted, axis=-1) - jax.nn.logsumexp(logits, axis=-1)


def soft_offset(outputs: FloatsV, kl_coef: Array | float, support: Support | None) -> Floats:
    """Compute Q#'s offset of outputs [..., K] -> [...]: one of the two functions above."""
    if support is None:
        return bernoulli_offset(outputs[..., 0], kl_coef)
    return histogram_offset(outputs, kl_coef, support)


def mean_offset(outputs: FloatsV, kl_coef: Array | float, support: Support | None) -> Floats:
    """Compute CD's offset of outputs [..., K] -> [...]: (mean return - lowest return) / eta."""
    if support is None:
        mean = jax.nn.sigmoid(outputs[..., 0])
    else:
        mean = _mean_above_lowest(outputs, support)
    return mean / kl_coef


def log_offset(outputs: FloatsV, kl_coef: Array | float, support: Support | None) -> Floats:
    """Compute FUDGE's offset of outputs [..., K] -> [...].

    It is the log of the mean return as a share of the highest return. eta does not matter.
    """
    if support is None:
        return jax.nn.log_sigmoid(outputs[..., 0])
    share = _mean_above_lowest(outputs, support) / (support.high - support.low)
    return jnp.log(jnp.maximum(share, jnp.finfo(share.dtype).tiny))


class Offset(NamedTuple):
    """A term that guidance adds to logits."""

    function: Callable[[Array, Array], Array]
    """(outputs [..., K], kl_coef []) -> [...]."""
    outputs: int
    """K, the number of outputs that describe the return of a token."""
    unscored: float
    """Term of a token that is not scored."""


Method = Literal["q_sharp", "cd", "fudge"]


# Cached, so that equal calls return the same object: a guided policy is a static argument of jit.
@functools.cache
def offset(method: Method, support: Support | None = None) -> Offset:
    """Look up the method's offset, for Bernoulli returns or for a histogram over `support`."""
    functions = {"q_sharp": soft_offset, "cd": mean_offset, "fudge": log_offset}
    return Offset(
        function=functools.partial(functions[method], support=support),
        outputs=1 if support is None else support.atoms,
        unscored=EXCLUDED if method == "fudge" else 0.0,
    )
