"""A reference guided by what may follow: Q# (arXiv 2502.20548) and its baselines, as a `Policy` like any other.

With deterministic transitions the optimum of reward minus eta KL(policy || reference) is known in closed form from the
law Z(x, y) of the return that follows token y in context x *under the reference* (theorem 2.2, equation 5):

    policy(y | x)  proportional to  reference(y | x) E_{z ~ Z(x, y)} exp(z / eta)

so every token's logit is the reference's plus an offset, log E exp(z / eta). eta is `kl_coef`, return a nat: small is
strong guidance, infinite is the reference. Z does not depend on it: one trained model serves every coefficient, and
one compiled program too, as it is an array in the params (`with_kl_coef`).

    Q#      log E exp(z / eta)
    CD      E z / eta           controlled decoding (arXiv 2310.17022): the mean in place of the soft maximum
    FUDGE   log E z             (arXiv 2104.05218): no coefficient; for returns in [0, 1]

Returns are measured from the lowest there can be, which moves all logits alike. A token that is not scored is treated
as one that surely earns the lowest return: its offset is 0 (FUDGE: it is excluded).

Temperature is the sampler's: it divides the guided logits, so what is drawn at temperature T is the guided policy to
the power 1 / T, as in the paper's code. The optimum above is what is drawn at 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tpu_rl.errors import InputError
from tpu_rl.types import Array, Params, Policy

EXCLUDED = -1e30
"""What is added to the logit of a token that must not be drawn: exp gives exactly 0, and nothing becomes NaN."""

SURE = 50.0
"""A logit of probability 1, in float64 too; beyond it differences of logits would only lose digits."""


# --- distributions of returns ------------------------------------------------------------------------------------


class Support(NamedTuple):
    """Returns that a histogram tells apart: `atoms` of them, evenly spaced from `low` to `high`."""

    low: float = 0.0
    high: float = 1.0
    atoms: int = 11

    @property
    def step(self) -> float:
        """Between two neighbours."""
        return (self.high - self.low) / (self.atoms - 1)


def above_lowest(support: Support, dtype: Any = jnp.float32) -> Array:
    """The atoms less the lowest, [m]."""
    return support.step * jnp.arange(support.atoms, dtype=dtype)


def nearest_atom(returns: Array, support: Support) -> Array:
    """returns [...] -> [..., m]: 1 at the nearest atom (of two equally near the even one), as the paper's code does."""
    place = jnp.clip(jnp.round((returns - support.low) / support.step), 0, support.atoms - 1)
    return (place[..., None] == jnp.arange(support.atoms).reshape((1,) * returns.ndim + (-1,))).astype(returns.dtype)


def two_hot(returns: Array, support: Support) -> Array:
    """returns [...] -> [..., m]: shared between the two atoms around it so that the mean is the return itself (C51)."""
    place = jnp.clip((returns - support.low) / support.step, 0, support.atoms - 1)
    atoms = jnp.arange(support.atoms, dtype=returns.dtype).reshape((1,) * returns.ndim + (-1,))
    return jnp.maximum(1 - jnp.abs(place[..., None] - atoms), 0)


def mean_return(outputs: Array, support: Support | None) -> Array:
    """A distribution's outputs [..., K] -> its mean return [...].

    Without a support it is Bernoulli: K = 1, the logit of return 1 against 0. Else K = m logits of a histogram.
    """
    if support is None:
        return jax.nn.sigmoid(outputs[..., 0])
    return support.low + _mean_above_lowest(outputs, support)


def _mean_above_lowest(outputs: Array, support: Support) -> Array:
    return jnp.einsum("...k,k->...", jax.nn.softmax(outputs), above_lowest(support, outputs.dtype))


def negative_log_likelihood(
    outputs: Array, returns: Array, support: Support | None, labels: Callable[[Array, Support], Array] = nearest_atom
) -> Array:
    """Of returns [...] under a distribution's outputs [..., K] (see `mean_return`) -> [...].

    Bernoulli: binary cross-entropy, -R log p - (1 - R) log(1 - p), also for R in between. Histogram: cross-entropy with
    the returns' labels.
    """
    if support is None:
        return jax.nn.softplus(outputs[..., 0]) - returns * outputs[..., 0]
    return -jnp.sum(labels(returns, support) * jax.nn.log_softmax(outputs), axis=-1)


# --- offsets -----------------------------------------------------------------------------------------------------


def bernoulli_offset(logit: Array, kl_coef: Array | float) -> Array:
    """log(1 - p + p exp(1 / eta)) for p = sigmoid(logit), same shape: log1p_exp(1 / eta + l) - log1p_exp(l).

    Finite for every logit, infinite ones too, however small eta; exactly 0 where eta is infinite. Where 1 / eta is far
    above -log p of all candidates it is 1 / eta + log p: the reference on condition of success, and a smaller eta
    changes nothing more.
    """
    logit = jnp.minimum(logit, SURE)
    return jax.nn.softplus(logit + 1 / kl_coef) - jax.nn.softplus(logit)


def histogram_offset(logits: Array, kl_coef: Array | float, support: Support) -> Array:
    """log sum_i z_i exp((a_i - low) / eta) for z = softmax(logits) [..., m] -> [...]."""
    tilted = logits + (above_lowest(support, logits.dtype) / kl_coef).reshape((1,) * (logits.ndim - 1) + (-1,))
    return jax.nn.logsumexp(tilted, axis=-1) - jax.nn.logsumexp(logits, axis=-1)


def soft_offset(outputs: Array, kl_coef: Array | float, support: Support | None) -> Array:
    """Q#'s: one of the two above. outputs [..., K] -> [...]."""
    if support is None:
        return bernoulli_offset(outputs[..., 0], kl_coef)
    return histogram_offset(outputs, kl_coef, support)


def mean_offset(outputs: Array, kl_coef: Array | float, support: Support | None) -> Array:
    """CD's: the mean return above the lowest, over eta. outputs [..., K] -> [...]."""
    mean = jax.nn.sigmoid(outputs[..., 0]) if support is None else _mean_above_lowest(outputs, support)
    return mean / kl_coef


def log_offset(outputs: Array, kl_coef: Array | float, support: Support | None) -> Array:
    """FUDGE's: the log of the mean return as a share of the highest. outputs [..., K] -> [...]; eta has no say."""
    del kl_coef
    if support is None:
        return jax.nn.log_sigmoid(outputs[..., 0])
    share = _mean_above_lowest(outputs, support) / (support.high - support.low)
    return jnp.log(jnp.maximum(share, jnp.finfo(share.dtype).tiny))


class Offset(NamedTuple):
    """What guidance adds to logits."""

    of: Callable[[Array, Array], Array]
    """(q's outputs [..., K], kl_coef []) -> [...]."""
    outputs: int
    """K, numbers that describe a token's return."""
    unscored: float
    """What is added to a token that q was not asked about."""


Method = Literal["q_sharp", "cd", "fudge"]


@functools.cache
def offset(method: Method, support: Support | None = None) -> Offset:
    """The method's offset for Bernoulli returns, or for a histogram over `support`. Equal calls give the same one."""
    outputs, unscored = 1 if support is None else support.atoms, 0.0
    match method:
        case "cd":
            of = functools.partial(mean_offset, support=support)
        case "fudge":
            of, unscored = functools.partial(log_offset, support=support), EXCLUDED
        case "q_sharp":
            of = functools.partial(soft_offset, support=support)
    return Offset(of, outputs, unscored)


def with_kl_coef(params: Params, kl_coef: float | Array) -> Params:
    """The whole params tree as a guided policy reads it."""
    return params | {"guidance": {"kl_coef": jnp.asarray(kl_coef, jnp.float32)}}


# --- the guided policy -------------------------------------------------------------------------------------------


@functools.cache
def guide(
    reference: Policy, q: Policy, how: Offset, candidates: int | None, reads: Literal["own", "previous"]
) -> Policy:
    """The reference with `how.of(q's outputs)` added to its logits; its params are `with_kl_coef` of both models'.

    candidates: only so many of the reference's likeliest tokens are scored; None, all.
    reads: "own", q gives K numbers at a token's own hidden state (V-type): the candidates are branches of one token in
    the same call that reads the last token. "previous", q gives V x K numbers for the tokens that may follow (Q-type).
    The cache is {"reference", "q"}. Of more than one token at once all must be trunk (branch 0). A V-type q then goes
    through them one by one to score what may follow each: only whoever uses those logits pays for it.
    """
    if reads == "own" and candidates is None:
        raise InputError(
            "how many candidates a V-type q scores is not given",
            why="each is one more token for it to read",
            fix="use e.g. 20",
        )
    room = candidates if reads == "own" and candidates is not None else 0

    def init_cache(params: Params, rows: int, length: int) -> Any:
        return {"reference": reference.init_cache(params, rows, length), "q": q.init_cache(params, rows, length + room)}

    def extend(
        params: Params, cache: Any, tokens: Array, positions: Array, branch_ids: Array, commit: Array
    ) -> tuple[Array, Any]:
        new = (tokens, positions, branch_ids, commit)
        logits, reference_cache = reference.extend(params, cache["reference"], *new)
        if reads == "previous":
            outputs, q_cache = q.extend(params, cache["q"], *new)
            guided = _add(how, params, logits, outputs.reshape(*logits.shape, how.outputs), candidates)
        elif tokens.shape[1] == 1:
            guided, q_cache = score_one(params, cache["q"], tokens, positions, commit, logits)
        else:
            _, q_cache = q.extend(params, cache["q"], *new)
            guided = score_each(params, cache["q"], tokens, positions, logits)
        return guided, {"reference": reference_cache, "q": q_cache}

    def score_one(
        params: Params, cache: Any, token: Array, position: Array, commit: Array, logits: Array
    ) -> tuple[Array, Any]:
        """token, position [B, 1], logits [B, 1, V] -> guided logits, q's cache."""
        ids = _likeliest(logits[:, 0], candidates)
        branches = jnp.broadcast_to(jnp.arange(1 + ids.shape[1]), (len(ids), 1 + ids.shape[1]))
        places = jnp.concatenate([position, jnp.broadcast_to(position + 1, ids.shape)], axis=1)
        outputs, cache = q.extend(params, cache, jnp.concatenate([token, ids], axis=1), places, branches, commit)
        added = how.of(outputs[:, 1:].astype(jnp.float32), params["guidance"]["kl_coef"])
        rows = jnp.arange(len(ids))[:, None]
        return logits + jnp.full_like(logits[:, 0], how.unscored).at[rows, ids].set(added)[:, None], cache

    def score_each(params: Params, cache: Any, tokens: Array, positions: Array, logits: Array) -> Array:
        def one(cache: Any, column: tuple[Array, Array, Array]) -> tuple[Any, Array]:
            token, position, at = (x[:, None] for x in column)
            guided, cache = score_one(params, cache, token, position, jnp.ones_like(column[0]), at)
            return cache, guided[:, 0]

        columns = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, positions, logits))
        return jnp.moveaxis(jax.lax.scan(one, cache, columns)[1], 0, 1)

    forgets = None if reference.forgets is None or q.forgets is None else min(reference.forgets, q.forgets)
    return Policy(init_cache, extend, forgets)


def _likeliest(logits: Array, candidates: int | None) -> Array:
    """[B, V] -> ids [B, k] of the largest, every id where there are no more than k."""
    vocabulary = logits.shape[-1]
    if candidates is None or candidates >= vocabulary:
        return jnp.broadcast_to(jnp.arange(vocabulary), logits.shape)
    return jax.lax.top_k(logits, candidates)[1]


def _add(how: Offset, params: Params, logits: Array, outputs: Array, candidates: int | None) -> Array:
    """logits [B, T, V] with the offsets of outputs [B, T, V, K] at the candidates."""
    added = how.of(outputs.astype(jnp.float32), params["guidance"]["kl_coef"])
    if candidates is None or candidates >= logits.shape[-1]:
        return logits + added
    last = jax.lax.top_k(logits, candidates)[0][..., -1:]
    return logits + jnp.where(logits >= last, added, how.unscored)


# --- how far it went ---------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("policy", "reference", "prompt_length"))
def token_kl(
    policy: Policy,
    reference: Policy,
    params: Params,
    tokens: Array,
    begins: Array,
    ends: Array,
    prompt_length: int,
    temperature: float = 1.0,
) -> Array:
    """KL(policy || reference) [B, T], nats, of the distribution that each completion token was drawn from, else 0.

    tokens [B, T], laid out as the sampler does: completions stand at begins <= t < ends [B], begins <= prompt_length
    and ends - begins <= T - prompt_length. Over the whole vocabulary, at the temperature, before any truncation.
    """
    total = tokens.shape[1]
    prompts = tokens[:, :prompt_length]
    positions = jnp.broadcast_to(jnp.arange(prompt_length, dtype=jnp.int32), prompts.shape)

    def prefill(one: Policy) -> Any:
        cache = one.init_cache(params, len(tokens), total)
        return one.extend(params, cache, prompts, positions, jnp.zeros_like(prompts), begins - 1)[1]

    def step(caches: tuple[Any, Any], back: Array) -> tuple[tuple[Any, Any], Array]:
        column = begins[:, None] - 1 + back
        live = column[:, 0] + 1 < ends
        token = jnp.take_along_axis(tokens, jnp.minimum(column, total - 1), axis=1)
        log_probs, after = [], []
        for one, cache in zip((policy, reference), caches, strict=True):
            logits, cache = one.extend(params, cache, token, column, jnp.zeros_like(token), live.astype(jnp.int32))
            log_probs.append(jax.nn.log_softmax(logits[:, 0].astype(jnp.float32) / temperature))
            after.append(cache)
        kl = jnp.sum(jnp.exp(log_probs[0]) * (log_probs[0] - log_probs[1]), axis=-1)
        return (after[0], after[1]), jnp.where(live, kl, 0.0)

    steps = jnp.arange(total - prompt_length)
    _, found = jax.lax.scan(step, (prefill(policy), prefill(reference)), steps)
    at = jnp.arange(total)[None] - begins[:, None]
    taken = jnp.take_along_axis(found.T, jnp.clip(at, 0, total - prompt_length - 1), axis=1)
    return jnp.where((at >= 0) & (at < (ends - begins)[:, None]), taken, 0.0)


@functools.partial(jax.jit, static_argnames=("q", "support", "reads"))
def last_return(
    q: Policy,
    support: Support | None,
    reads: Literal["own", "previous"],
    params: Params,
    tokens: Array,
    ends: Array,
) -> Array:
    """q's mean return [B] at each row's last token, ends - 1, of tokens [B, T]: q as a reward model.

    At the end-of-sequence token nothing can follow, so it says how likely the text is right.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    cache = q.init_cache(params, *tokens.shape)
    outputs, _ = q.extend(params, cache, tokens, positions, jnp.zeros_like(tokens), ends)
    rows = jnp.arange(len(tokens))
    if reads == "own":
        return mean_return(outputs[rows, ends - 1], support)
    size = 1 if support is None else support.atoms
    every = outputs[rows, ends - 2].reshape(len(tokens), -1, size)
    return mean_return(every[rows, tokens[rows, ends - 1]], support)
