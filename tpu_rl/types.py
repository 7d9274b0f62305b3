"""The shared pytrees and function types: read this file and you know the library.

Alphabet of shapes
    N completions   T tokens of prompt and completion   G completions a prompt (group)
    M optimizer steps a batch   K micro-batches a step   R packed rows a micro-batch   S slots a packed row
    V vocabulary   D model width   L layers   H heads   B rows of the sampler

Time. Every array is aligned to *tokens*: `log_probs[n, t]` is the log-probability of `tokens[n, t]` given what came
before it; where nothing came before, it is zero. The shift between a token and the hidden state that predicts it
happens in one function only, `log_probs.predicting`, through `Rows.previous`.

The data's way.  `rollouts` turn prompts into a `Rollout`, one completion a row, [N, T].  `packing.lay_out` decides on
the host which completion goes where in the packed rows of which micro-batch of which optimizer step: a `Layout`.
`Algorithm.make_batch` computes advantages and the like in [N, T] and moves them into packed rows [M, K, R, S].
`training.make_update_step` takes one [K, R, S] slice of that batch: one optimizer step, K micro-batches scanned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

Array = jax.Array
Params = Any
"""A pytree of weights. What an algorithm sees is a dict of roles: {"policy": ..., "reference": ..., "value": ...}."""


# --- models ------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """A language model as pure functions of its own params.

    Which tokens see each other (`hidden`): token i sees token j if both are of one segment, j is not later in the
    row, and j is prompt (branch 0) or of i's own branch. Sliding windows and rotary angles go by `positions`.
    """

    config: Any
    """Hashable description of the architecture."""
    init: Callable[[Array], Params]
    """key -> random params."""
    hidden: Callable[..., Array]
    """(params, tokens, positions, segment_ids, branch_ids, key_tiles=None) -> [R, S, D].

    All [R, S] int32 but `key_tiles` (see `Rows`), which changes no number: it only says what need not be computed.
    """
    logits: Callable[[Params, Array], Array]
    """(params, hidden [..., D]) -> [..., V] float32."""
    init_cache: Callable[[Params, int, int], Any]
    """(params, rows, length) -> an empty cache (see `Policy`)."""
    extend: Callable[[Params, Any, Array, Array, Array, Array], tuple[Array, Any]]
    """(params, cache, tokens [B, T], positions [B, T], branch_ids [B, T], commit [B]) -> (logits [B, T, V], cache).

    See `Policy`. These are the logits of `hidden` and `logits`: what wraps a model wraps all three.
    """
    axes: Any
    """A tree like params; each leaf is a tuple of logical axis names, one a dimension (see `sharding`)."""
    forgets: int | None = None
    """See `Policy`."""


class Policy(NamedTuple):
    """Something that continues token sequences: all that the sampler knows of a model, a guided reference, a draft.

    A cache is a pytree of arrays, among them `lengths [B]`, the number of tokens it holds a row. Rows are on axis 0 of
    1-D leaves and on axis 1 of all others, so that `sampler.take_rows` gathers rows of any such tree. 1-D leaves are
    lengths; where each token has a place of its own, smaller ones make it a cache of fewer tokens.
    """

    init_cache: Callable[[Params, int, int], Any]
    """(params, rows, length) -> an empty cache for `rows` sequences of at most `length` tokens."""
    extend: Callable[[Params, Any, Array, Array, Array, Array], tuple[Array, Any]]
    """(params, cache, tokens [B, T], positions [B, T], branch_ids [B, T], commit [B]) -> (logits [B, T, V], cache).

    Each token sees the cache, and of these T tokens the earlier ones that are trunk (branch 0) or of its own branch.
    The first commit[b] tokens of row b stay in the cache and must be trunk; the rest were only looked at. So prefill
    of ragged prompts is T = longest with commit = lengths, decoding is T = 1 with commit = 1 (0 freezes a row),
    verifying a draft is T = k, and Q#'s k candidates are k branches of one token with commit = 0.
    """
    forgets: int | None = None
    """How many of the tokens committed last smaller `lengths` can take back. None: all of them if each has a place of
    its own, by the shapes of caches, and none otherwise."""


class Role(NamedTuple):
    """A model's place in the whole params tree, so that roles can share leaves (LoRA: reference = adapters off)."""

    hidden: Callable[[Params, Rows], Array]
    """(the whole params tree, rows) -> [R, S, D]."""
    logits: Callable[[Params, Array], Array]
    """(the whole params tree, hidden [..., D]) -> [..., V] float32; of a head, its outputs [..., K]."""


Roles = Mapping[str, Role]
"""The models an algorithm may call, by name: those that its config's `roles` asks for."""


class Sampling(NamedTuple):
    """What an algorithm must know of how completions are sampled."""

    temperature: float = 1.0
    """Divides the logits of policy, old policy and reference alike."""
    max_new_tokens: int = 1
    """The length limit of a completion."""


# --- experience: one completion a row ----------------------------------------------------------------------------


@struct.dataclass
class Rollout:
    """Completions sampled from a policy, with what they earned. One completion a row, prompt first, padding last.

    `action_mask` is True where the policy chose the token, the end-of-sequence token included; prompt, tool output
    and padding are False. Nothing after a row's last action matters to any loss, so a row ends there. What nothing
    judged is not `scored`: it counts in no baseline and is not learned from.
    """

    tokens: Array
    """[N, T] int32."""
    action_mask: Array
    """[N, T] bool."""
    log_probs: Array
    """[N, T] float32, under the policy at the sampling temperature over the full vocabulary: the ratio's old ones."""
    behaviour_log_probs: Array
    """[N, T] float32, under the distribution actually sampled from (top-k, top-p, min-p, guidance)."""
    rewards: Array
    """[N, T] float32; a final reward sits on the last action token."""
    group_id: Array
    """[N] int32; rows of one group continue the same prompt and stand together."""
    policy_step: Array
    """[N] int32: the optimizer step whose parameters began this row."""
    birth_key: Array
    """[N, 2] uint32: the row's own random key (see `sampler.row_keys`); a carried-over row keeps it."""
    truncated: Array
    """[N] bool: it ran into its length limit."""
    scored: Array
    """[N] bool: its rewards are what it earned; False where no reward function scored it, or one failed on it."""
    baseline: Array | None = None
    """[N] float32: what the row's prompt is worth, told by completions that are not learned from; only for algorithms
    that ask for it (ReMax: the greedy one's reward, A*-PO: the optimal value)."""


@struct.dataclass
class Demonstrations:
    """Texts to imitate. `action_mask` is True where a token is to be learned (the completion with its end)."""

    tokens: Array
    """[N, T] int32."""
    action_mask: Array
    """[N, T] bool."""
    group_id: Array
    """[N] int32; all different: no two demonstrations share a prompt row."""


@struct.dataclass
class Completions:
    """Completions to be judged token by token, whoever wrote them: the policy itself, a teacher, people.

    `action_mask` is True where a token was chosen, the end included; rows of one group continue the same prompt.
    """

    tokens: Array
    """[N, T] int32."""
    action_mask: Array
    """[N, T] bool."""
    group_id: Array
    """[N] int32."""
    on_policy: Array
    """[N] bool: the policy itself sampled the row, at this step."""


@struct.dataclass
class Pairs:
    """Completions that were compared, or judged one by one.

    Two rows of one group are a pair, one of them `preferred`; a group of one row is a completion judged good or bad.
    `action_mask` is True on the completion with its end.
    """

    tokens: Array
    """[N, T] int32."""
    action_mask: Array
    """[N, T] bool."""
    group_id: Array
    """[N] int32."""
    preferred: Array
    """[N] bool."""
    margin: Array
    """[N] float32: how much better the preferred one of the pair is, as the data say; 0 where they do not."""
    reference_log_probs: Array
    """[N, T] float32, at temperature 1 under the reference; computed once, when the data were read or sampled."""


@struct.dataclass
class QExamples:
    """Texts with labels at some of their tokens: the return that followed (Q#), whether a step is right (process)."""

    tokens: Array
    """[N, T] int32."""
    action_mask: Array
    """[N, T] bool: True on the tokens that are labelled."""
    group_id: Array
    """[N] int32; rows of one group continue the same prompt."""
    returns: Array
    """[N, T] float32: the sum of rewards from that token on."""


# --- packed rows -------------------------------------------------------------------------------------------------


@struct.dataclass
class Rows:
    """Packed rows, what models and losses read. All [..., R, S] int32."""

    tokens: Array
    positions: Array
    """Position in the sequence; a completion's positions restart after its prompt's."""
    segment_ids: Array
    """Which group of this row, from 1; 0 is padding."""
    branch_ids: Array
    """0 prompt, 1..G which completion of the group."""
    sequence_ids: Array
    """Which completion of this row, from 1, over all its groups; 0 for prompt and padding."""
    previous: Array
    """Slot, in this row, of the token that a token follows: a branch's first token follows the prompt's last."""
    actions: Array | None = None
    """[..., R, A] int32: the slots of the row's actions, S behind the last of them; log-probs of others are not
    computed. None: all slots."""
    key_tiles: Array | None = None
    """[..., R, S / t, n] int32: for each tile of t slots, the tiles that hold all that its tokens see, -1 behind the
    last of them. None: all tiles."""


@struct.dataclass
class Layout:
    """Where each token of [N, T] arrays stands in packed rows [M, K, R, S] (built by `packing.lay_out`)."""

    source: Array
    """[M, K, R, S] int32: flat index into [N, T] of the token in that slot; -1 is padding."""
    slot: Array
    """[N, T] int32: flat index into [M, K, R, S] of that token; -1 if it is nowhere. A group shares its prompt's."""
    minibatch: Array
    """[N] int32: the optimizer step, of M, that learns from this row; M for a row that none does."""
    positions: Array
    segment_ids: Array
    branch_ids: Array
    sequence_ids: Array
    previous: Array
    actions: Array | None = None
    key_tiles: Array | None = None

    @property
    def minibatches(self) -> int:
        """M: the number of optimizer steps that the batch is cut into."""
        return self.source.shape[0]

    def pack(self, array: Array, fill: Any = 0) -> Array:
        """[N, T] -> [M, K, R, S], `fill` in padding. Prompt slots hold the value of the group's first row."""
        taken = jnp.take(array.reshape(-1), jnp.maximum(self.source, 0))
        return jnp.where(self.source >= 0, taken, jnp.asarray(fill, array.dtype))

    def unpack(self, array: Array, fill: Any = 0) -> Array:
        """[M, K, R, S] -> [N, T], `fill` where a token has no slot."""
        taken = jnp.take(array.reshape(-1), jnp.maximum(self.slot, 0))
        return jnp.where(self.slot >= 0, taken, jnp.asarray(fill, array.dtype))

    def rows(self, tokens: Array) -> Rows:
        """[N, T] tokens -> the packed rows that models read."""
        return Rows(
            self.pack(tokens),
            self.positions,
            self.segment_ids,
            self.branch_ids,
            self.sequence_ids,
            self.previous,
            self.actions,
            self.key_tiles,
        )


class Experience(NamedTuple):
    """What an algorithm learns from at one step of the run."""

    data: Any
    """Rollout, Demonstrations, Completions, Pairs or QExamples."""
    layout: Layout


# --- metrics -----------------------------------------------------------------------------------------------------


@struct.dataclass
class Sum:
    """A mean in two halves: values and weights add up over micro-batches and updates; the quotient is reported."""

    value: Array
    weight: Array


@struct.dataclass
class Max:
    value: Array


@struct.dataclass
class Min:
    value: Array


@struct.dataclass
class First:
    """Of the updates of one batch only the first reports it: later the policy is another than the sampler's."""

    metric: Metric


Metric = Sum | Max | Min | First
Metrics = dict[str, Metric]
"""Flat names with one slash, "policy/entropy". Reduced by kind: over micro-batches in `training.make_update_step`, over
a batch's updates by `training.reduce_updates`."""


# --- algorithms --------------------------------------------------------------------------------------------------


def no_state(params: Params) -> Any:
    """An algorithm without state of its own."""
    del params
    return ()


def unchanged(params: Params, state: Any, metrics: dict[str, Array]) -> tuple[Params, Any]:
    """An algorithm that does nothing after an update."""
    del metrics
    return params, state


class Algorithm(NamedTuple):
    """A learning rule: pure functions, built by a factory `name(config, roles, sampling)` in `algos/name.py`."""

    make_batch: Callable[[Experience, Params, Any], tuple[Any, Any]]
    """(experience, params, state) -> (Batch, state): advantages, reference log-probs, targets, weights; no gradient.

    A Batch is the algorithm's own dataclass; every leaf is [M, K, R, S]. `batch.weights` is a dict with one array a
    loss term: what each token counts, adding up over one optimizer step to what that term should weigh.
    """
    loss: Callable[[Params, Any], tuple[Array, Metrics]]
    """(params, batch of one micro-batch, leaves [R, S]) -> (scalar, metrics): a plain weighted sum."""
    init_state: Callable[[Params], Any] = no_state
    """params -> what the algorithm remembers from step to step (adaptive coefficients, running means)."""
    after_update: Callable[[Params, Any, dict[str, Array]], tuple[Params, Any]] = unchanged
    """(params, state, reduced metrics) -> (params, state) after each optimizer step: controllers, EMA references."""


class Probe(NamedTuple):
    """Measures inside models while they learn, without the algorithm knowing.

    It adds leaves to the params that the loss is differentiated for. A model that finds its own adds to that loss the
    product of the leaf and what it measures, so that the gradient of the leaf is the measurement.
    """

    zeros: Params
    """Role -> name -> leaf, beside the role's own leaves."""
    metrics: Callable[[Params], Metrics]
    """What was measured over one optimizer step (a tree like `zeros`) -> metrics."""
    weights: Callable[[Params], Params] | None = None
    """What was measured -> what the leaves hold while the step is learned from, the weight of each measured number in
    the loss; for this the step is measured first. None: it only measures."""


# --- the run -----------------------------------------------------------------------------------------------------


class Purpose(IntEnum):
    """What a random key is for: folded in right after the run key, so that no two uses share a stream."""

    INIT = 0
    ROLLOUT = 1
    EVALUATION = 2
    DATA = 3
    BASELINE = 4


@struct.dataclass
class TrainState:
    """All that an optimizer step reads and writes. Donated to the step, saved whole in checkpoints."""

    step: Array
    """[] int32: optimizer steps taken in this phase of the run."""
    params: Params
    """Every role, trainable and frozen."""
    opt_state: Any
    """Of the trainable leaves only."""
    algorithm_state: Any
