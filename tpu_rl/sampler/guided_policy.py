"""A reference guided by a model of returns, as a `Policy` like any other.

The logits are the reference's plus an offset for each token, computed from the return distribution
that q predicts for it: see `losses.return_distributions` for the offsets of Q# and its baselines.
The coefficient `kl_coef` is an array in the params (`with_kl_coef`), so one compiled program serves
every coefficient.

A V-type q reads each candidate, which can cost more than the reference itself. With
`candidate_mass` below 1 it reads, in each row, only as many of the likeliest as have this share of
the reference's probability. The rest counts as what was never a candidate: it surely earns the
lowest return. Let c be the probability that the reference gives to the rest, V the mean return that
q predicts for a token of the reference, and w = E exp(z / eta) for returns in [0, 1]. In one step
the guided distribution then moves, in total variation, by at most what it had given to the rest:

    E[w; rest] / E[w]  <=  c exp(1 / eta) / (1 + V (exp(1 / eta) - 1))  <=  c / V

The temperature is the sampler's. It divides the guided logits, so the distribution sampled at
temperature T is the guided policy to the power 1 / T, as in the paper's code. At temperature 1 it
is the optimum itself, if transitions and rewards are deterministic.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tpu_rl.errors import InputError
from tpu_rl.losses.return_distributions import Offset, Support, mean_return
from tpu_rl.sampler.cache_ops import take_rows
from tpu_rl.train import sharding
from tpu_rl.types import UNREAD, Array, Params, Policy

Reads = Literal["own", "previous"]
"""Hidden state at which q scores a token: the token's own (V-type), or that of the token before it
(Q-type)."""


def with_kl_coef(params: Params, kl_coef: float | Array) -> Params:
    """Return the whole params tree with the coefficient where a guided policy reads it."""
    return params | {"guidance": {"kl_coef": jnp.asarray(kl_coef, jnp.float32)}}


GROUPS = 4
"""Groups of rows that read their further candidates after one another, those that need most
first."""

SIZES = (2, 8, 32, 128)
"""Numbers of further candidates that a group can read, if it need not read all of them."""


# Cached, so that equal calls return the same object: policies are static arguments of jit.
@functools.cache
def guide(
    reference: Policy,
    q: Policy,
    offset: Offset,
    candidates: int | None,
    reads: Reads,
    candidate_mass: float = 1.0,
) -> Policy:
    """Return the reference guided by q.

    Its params are `with_kl_coef` of a tree that both policies read; its cache is {"reference": ...,
    "q": ...}.

    Args:
      reference: policy whose logits are guided.
      q: model of the return of a token.
      offset: term added to the logits, a function of q's outputs.
      candidates: number of the reference's likeliest tokens to score; None scores all of them.
      reads: "own": q gives K numbers at a token's own hidden state. The candidates are branches of
        one token, in the same call that reads the last token. "previous": q gives V x K numbers for
        the tokens that may follow.
      candidate_mass: share of the reference's probability (at temperature 1) that the candidates
        need in a row; likelier ones come first. 1 scores all of them. Below 1 ("own" only), q
        scores the top candidate of every row. Rows are then sorted by how many more they need and
        processed in groups, each padded to its largest need (see `SIZES`). If that saves less than
        a third, all candidates are scored in one call. Each row uses only the candidates that it
        needs itself: its result does not depend on the other rows.

    If `extend` gets more than one token, all of them must be trunk (branch 0). A q that reads "own"
    then goes through the tokens one by one, to score the tokens that may follow each. Only a
    caller that uses those logits pays for it.

    Raises InputError if `reads` is "own" and `candidates` is None or q has a recurrent state, or
    "previous" and `candidate_mass` is below 1.
    """
    if reads == "own" and candidates is None:
        raise InputError(
            "a V-type q needs a number of candidates",
            why="it reads one more token for each",
            fix="use e.g. 20",
        )
    if reads == "own" and q.max_rollback == 0:
        raise InputError(
            "a V-type q cannot have linear attention",
            why="it goes back to the state before each candidate, and a recurrent state has only "
            "the latest",
            fix="train q from a model without linear attention",
        )
    if reads == "previous" and candidate_mass < 1:
        raise InputError(
            "a Q-type q has no use for a candidate mass",
            why="it scores all candidates at once",
            fix="leave the mass at 1",
        )
    # The candidates need room in q's cache while they are looked at.
    room = candidates if reads == "own" and candidates is not None else 0

    def init_cache(params: Params, rows: int, length: int) -> Any:
        return {
            "reference": reference.init_cache(params, rows, length),
            "q": q.init_cache(params, rows, length + room),
        }

    def extend(
        params: Params,
        cache: Any,
        tokens: Array,
        positions: Array,
        branch_ids: Array,
        commit: Array,
    ) -> tuple[Array, Any]:
        # log pi(a) = log pi_ref(a) + offset(q(s, a), kl_coef), up to normalization: the reference
        # gives the logits, and q's outputs at the candidates a give the offsets.
        new = (tokens, positions, branch_ids, commit)
        logits, reference_cache = reference.extend(params, cache["reference"], *new)
        if reads == "previous":
            outputs, q_cache = q.extend(params, cache["q"], *new)
            outputs = outputs.reshape(*logits.shape, offset.outputs)
            guided = _add_offsets(offset, params, logits, outputs, candidates)
        elif tokens.shape[1] == 1:
            is_read = branch_ids[:, 0] != UNREAD
            guided, q_cache = extend_by_one(
                params, cache["q"], tokens, positions, commit, logits, is_read
            )
        else:
            _, q_cache = q.extend(params, cache["q"], *new)
            guided = guide_each(params, cache["q"], tokens, positions, logits)
        return guided, {"reference": reference_cache, "q": q_cache}

    def extend_by_one(
        params: Params,
        cache: Any,
        token: Array,
        position: Array,
        commit: Array,
        logits: Array,
        is_read: Array,
    ) -> tuple[Array, Any]:
        """Read one token and its candidates.

        `token` and `position` are [B, 1], `commit` and `is_read` [B], `logits` [B, 1, V]. Returns
        the guided logits, which say nothing where `is_read` is False, and the cache.
        """
        # scores [B, k, K]: q's K outputs at each of the k candidates `ids` [B, k].
        if candidate_mass == 1:
            ids = _likeliest(logits[:, 0], candidates)
            scores, cache = read(params, cache, token, position, commit, ids)
            is_scored = jnp.ones(ids.shape, bool)
        else:
            assert candidates is not None
            ids = jax.lax.top_k(logits[:, 0], min(candidates, logits.shape[-1]))[1]
            needed = jnp.where(is_read, _needed(logits[:, 0], ids, candidate_mass), 0)
            scores, cache = read_needed(params, cache, token, position, commit, ids, needed)
            is_scored = jnp.arange(ids.shape[1])[None] < needed[:, None]
        # Tokens that are no candidates count as those that surely earn the lowest return.
        offsets = offset.function(scores.astype(jnp.float32), params["guidance"]["kl_coef"])
        offsets = jnp.where(is_scored, offsets, offset.unscored)
        rows = jnp.arange(len(ids))[:, None]
        added = jnp.full_like(logits[:, 0], offset.unscored).at[rows, ids].set(offsets)
        return logits + added[:, None], cache

    def read(
        params: Params, cache: Any, token: Array, position: Array, commit: Array, ids: Array
    ) -> tuple[Array, Any]:
        """Read one token [B, 1] and candidates [B, k] for the next: (scores [B, k, K], cache)."""
        # Branch 0 is the token itself, branch i its i-th candidate, one position later.
        branches = jnp.broadcast_to(jnp.arange(1 + ids.shape[1]), (len(ids), 1 + ids.shape[1]))
        positions = jnp.concatenate([position, jnp.broadcast_to(position + 1, ids.shape)], axis=1)
        tokens = jnp.concatenate([token, ids], axis=1)
        outputs, cache = q.extend(params, cache, tokens, positions, branches, commit)
        return outputs[:, 1:], cache

    def read_needed(
        params: Params,
        cache: Any,
        token: Array,
        position: Array,
        commit: Array,
        ids: Array,
        needed: Array,
    ) -> tuple[Array, Any]:
        """Do the same, but read no more than needed: each row's first `needed` [B] candidates.

        Scores of candidates that are not needed may be 0.
        """
        rows, most = ids.shape
        rest = most - 1
        if rest == 0:
            return read(params, cache, token, position, commit, ids)
        # Sort the rows by need, cut them into GROUPS groups, and round the largest need of each
        # group up to one of the static sizes, for which programs exist.
        # Rows that lie on several devices stay together: a group would gather them from all.
        is_whole = sharding.spread("slots", rows) > 1
        group_rows = rows if is_whole else -(-rows // GROUPS)
        groups = -(-rows // group_rows)
        order = jnp.arange(rows) if is_whole else jnp.argsort(-needed, stable=True)
        # The last group may repeat a row.
        order = order[jnp.minimum(jnp.arange(groups * group_rows), rows - 1)]
        members = order.reshape(groups, group_rows)
        most_needed = jnp.max(needed[members], axis=1)
        static_sizes = [*itertools.takewhile(lambda size: size < rest, SIZES), rest]
        sizes = jnp.array(static_sizes)
        size_index = jnp.searchsorted(sizes, most_needed - 1)

        # Groups are in order of need, so the loop ends at the first that needs nothing more.
        def is_next_needed(carry: tuple[Array, Array]) -> Array:
            return jnp.append(most_needed, 0)[carry[0]] > 1

        def read_group(cache: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            """Read the further candidates of one group; the cache stays as it is."""
            # The first candidate was read with the token itself; these are its branches 2, 3, ...
            group, scores = carry
            group_ids = ids[members[group]]
            group_positions = position[members[group]] + 1
            group_cache = cache if is_whole else take_rows(cache, members[group])

            def read_rest(size: int) -> Array:
                tokens = group_ids[:, 1 : 1 + size]
                positions = jnp.broadcast_to(group_positions, tokens.shape)
                branches = jnp.broadcast_to(1 + jnp.arange(size), tokens.shape)
                none = jnp.zeros(group_rows, jnp.int32)
                outputs, _ = q.extend(params, group_cache, tokens, positions, branches, none)
                return jnp.pad(outputs, ((0, 0), (0, rest - size), (0, 0)))

            readers = [functools.partial(read_rest, size) for size in static_sizes]
            outputs = jax.lax.switch(size_index[group], readers)
            return group + 1, scores.at[members[group]].set(outputs)

        def read_by_group(cache: Any) -> tuple[Array, Any]:
            first, cache = read(params, cache, token, position, commit, ids[:, :1])
            scores = jnp.zeros((rows, rest, first.shape[-1]), first.dtype)
            _, scores = jax.lax.while_loop(
                is_next_needed, functools.partial(read_group, cache), (jnp.int32(0), scores)
            )
            return jnp.concatenate([first, scores], axis=1), cache

        def read_all(cache: Any) -> tuple[Array, Any]:
            return read(params, cache, token, position, commit, ids)

        # Every call of q has a cost of its own, so groups must save a third of the tokens.
        in_groups = group_rows * jnp.sum(jnp.where(most_needed > 1, sizes[size_index], 0))
        is_worth_it = 3 * (2 * rows + in_groups) < 2 * rows * (1 + most)
        return jax.lax.cond(is_worth_it, read_by_group, read_all, cache)

    def guide_each(
        params: Params, cache: Any, tokens: Array, positions: Array, logits: Array
    ) -> Array:
        """Guide the logits after each of several trunk tokens, one token at a time."""

        def step(cache: Any, column: tuple[Array, Array, Array]) -> tuple[Any, Array]:
            token, position, token_logits = (x[:, None] for x in column)
            commit = jnp.ones_like(column[0])
            is_read = jnp.ones_like(commit, dtype=bool)
            guided, cache = extend_by_one(
                params, cache, token, position, commit, token_logits, is_read
            )
            return cache, guided[:, 0]

        columns = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, positions, logits))
        return jnp.moveaxis(jax.lax.scan(step, cache, columns)[1], 0, 1)

    max_rollback = None
    if reference.max_rollback is not None and q.max_rollback is not None:
        max_rollback = min(reference.max_rollback, q.max_rollback)
    return Policy(init_cache, extend, max_rollback)


def _likeliest(logits: Array, candidates: int | None) -> Array:
    """Return the ids [B, k] of the largest of logits [B, V], or all ids if there are at most k."""
    vocabulary = logits.shape[-1]
    if candidates is None or candidates >= vocabulary:
        return jnp.broadcast_to(jnp.arange(vocabulary), logits.shape)
    return jax.lax.top_k(logits, candidates)[1]


def _needed(logits: Array, ids: Array, mass: float) -> Array:
    """Count the likeliest tokens that have this mass together, at most all: [B] int32.

    `ids` [B, k] are the likeliest of logits [B, V], in order.
    """
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    probabilities = jnp.exp(jnp.take_along_axis(log_probs, ids, axis=1))
    before = jnp.cumsum(probabilities, axis=1) - probabilities
    return jnp.sum(before < mass, axis=1, dtype=jnp.int32)


def _add_offsets(
    offset: Offset, params: Params, logits: Array, outputs: Array, candidates: int | None
) -> Array:
    """Add the offsets of outputs [B, T, V, K] to logits [B, T, V], at the candidates."""
    offsets = offset.function(outputs.astype(jnp.float32), params["guidance"]["kl_coef"])
    if candidates is None or candidates >= logits.shape[-1]:
        return logits + offsets
    lowest = jax.lax.top_k(logits, candidates)[0][..., -1:]
    return logits + jnp.where(logits >= lowest, offsets, offset.unscored)


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
    """Return the KL(policy || reference), in nats, of the distribution of each completion token.

    The KL is over the whole vocabulary, at the temperature, before any truncation.

    Args:
      tokens: [B, T], laid out as the sampler does.
      begins: [B], first token of each completion, at most `prompt_length`.
      ends: [B], end of each completion, with ends - begins <= T - prompt_length.
      prompt_length: columns that are read in one call.

    Returns:
      [B, T], zero outside completions.
    """
    total = tokens.shape[1]
    prompts = tokens[:, :prompt_length]
    positions = jnp.broadcast_to(jnp.arange(prompt_length, dtype=jnp.int32), prompts.shape)

    def prefill(model: Policy) -> Any:
        """Read each prompt except its last token, which the first step reads."""
        cache = model.init_cache(params, len(tokens), total)
        branches = jnp.zeros_like(prompts)
        return model.extend(params, cache, prompts, positions, branches, begins - 1)[1]

    def step(caches: tuple[Any, Any], index: Array) -> tuple[tuple[Any, Any], Array]:
        """Compute the KL of the completion token number `index` of each row."""
        column = begins[:, None] - 1 + index
        live = column[:, 0] + 1 < ends
        token = jnp.take_along_axis(tokens, jnp.minimum(column, total - 1), axis=1)
        log_probs = []
        new_caches = []
        for model, cache in zip((policy, reference), caches, strict=True):
            logits, cache = model.extend(
                params, cache, token, column, jnp.zeros_like(token), live.astype(jnp.int32)
            )
            log_probs.append(jax.nn.log_softmax(logits[:, 0].astype(jnp.float32) / temperature))
            new_caches.append(cache)
        kl = jnp.sum(jnp.exp(log_probs[0]) * (log_probs[0] - log_probs[1]), axis=-1)
        return (new_caches[0], new_caches[1]), jnp.where(live, kl, 0.0)

    steps = jnp.arange(total - prompt_length)
    _, kl = jax.lax.scan(step, (prefill(policy), prefill(reference)), steps)
    # kl [steps, B] counts from each completion's begin; move it to the columns of the tokens.
    index = jnp.arange(total)[None] - begins[:, None]
    by_column = jnp.take_along_axis(kl.T, jnp.clip(index, 0, total - prompt_length - 1), axis=1)
    inside = (index >= 0) & (index < (ends - begins)[:, None])
    return jnp.where(inside, by_column, 0.0)


@functools.partial(jax.jit, static_argnames=("q", "support", "reads"))
def last_return(
    q: Policy, support: Support | None, reads: Reads, params: Params, tokens: Array, ends: Array
) -> Array:
    """Return q's mean return [B] at the last token of each row: q as a reward model.

    `tokens` are [B, T] and the last token of a row is at ends - 1. Nothing can follow an
    end-of-sequence token, so the mean return there says how likely the text is right.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    cache = q.init_cache(params, *tokens.shape)
    outputs, _ = q.extend(params, cache, tokens, positions, jnp.zeros_like(tokens), ends)
    rows = jnp.arange(len(tokens))
    if reads == "own":
        return mean_return(outputs[rows, ends - 1], support)
    # The state before the last token scores every token that may follow; take the one that did.
    size = 1 if support is None else support.atoms
    by_token = outputs[rows, ends - 2].reshape(len(tokens), -1, size)
    return mean_return(by_token[rows, tokens[rows, ends - 1]], support)
