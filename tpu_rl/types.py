"""The shared pytrees and function types: read this file and you know the library.

Letters in array shapes:

    N  completions               T  tokens of a prompt with its completion
    G  completions per prompt    M  optimizer steps per batch
    K  micro-batches per step    R  packed rows per micro-batch
    S  slots per packed row      V  vocabulary
    D  model width               L  layers
    H  attention heads           B  rows that the sampler decodes at once

**Alignment.** Every array is aligned to *tokens*: `log_probs[n, t]` is the log-probability of
`tokens[n, t]` given the tokens before it, and zero for a token with nothing before it. The shift
between a token and the hidden state that predicts it happens in one function only,
`losses.log_probs.predicting`, through `PackedRows.previous`.

**Data flow.**

1. A source of experience turns prompts into a `Rollout`: one completion per row, [N, T].
2. `train.packing.assign_slots` decides on the host where each completion goes: which packed row of
   which micro-batch of which optimizer step. The result is a `Layout`.
3. `Algorithm.make_batch` computes advantages and targets in [N, T] and moves them into packed rows
   [M, K, R, S].
4. The step built by `train.update_step.make_update_step` takes one [K, R, S] slice of that batch:
   one optimizer step, which scans K micro-batches.
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
"""A pytree of weights. Algorithms receive a dict with one entry per role: {"policy": ...,
"reference": ..., "value": ...}."""


# Models.


class Model(NamedTuple):
    """A language model as pure functions of its own params.

    Attention in `hidden`: token i sees token j if both have the same segment id, j is not later in
    the row, and j is either prompt (branch 0) or of i's own branch. Segments and branches are
    contiguous. In rows that hold deeper trees `visible_until` decides in place of segments and
    branches (see `PackedRows`). Sliding windows and rotary angles depend on `positions`, not on
    slots.
    """

    config: Any
    """Hashable description of the architecture."""
    init: Callable[[Array], Params]
    """key -> random params."""
    hidden: Callable[..., Array]
    """(params, tokens, positions, segment_ids, branch_ids, key_tiles=None, visible_until=None,
    paths=None, routing=None, images=None) -> [R, S, D].

    All inputs are [R, S] int32, except `key_tiles`, `paths`, `routing` and `images` (see
    `PackedRows`). The first two change no result: `key_tiles` says which attention scores need not
    be computed, and `paths` in which order to sum. `routing` replaces the router's choice of
    experts.
    """
    logits: Callable[[Params, Array], Array]
    """(params, hidden [..., D]) -> [..., V] float32."""
    init_cache: Callable[[Params, int, int], Any]
    """(params, rows, length) -> an empty cache (see `Policy`)."""
    extend: Callable[[Params, Any, Array, Array, Array, Array], tuple[Array, Any]]
    """(params, cache, tokens [B, T], positions [B, T], branch_ids [B, T], commit [B]) -> (logits
    [B, T, V], cache).

    See `Policy`. The logits equal those of `hidden` followed by `logits`, so a function that wraps
    a model must wrap all three.
    """
    axes: Any
    """A tree like params. Each leaf is a tuple with one logical axis name per dimension (see
    `train.sharding`)."""
    max_rollback: int | None = None
    """See `Policy`."""
    exact: bool = False
    """See `Role`."""


ROUTING = "routing"
"""Entry of the cache of a model that records its routing: [mixture layers, B, k, S] uint8 or
uint16. The first T places have the k experts of each of the T tokens that the latest call of
`extend` read, as their numbers plus 1."""

SHARED_PROMPT = "shared_prompt"
"""Entry of the cache of a model whose kernel reads a prompt once for several rows: [2, B] int32,
the number of the prompt that each row continues, and how many of its first tokens all rows of this
prompt have in their caches when a decode step reads them, which first writes its own token. 0
tokens: the row shares nothing."""

FEATURES = "image_features"
"""Entry of the params of a model that reads images, while it samples: the features of the images
that token ids from the vocabulary's size on refer to (`models.vision.features.Features`)."""

MIXED_INPUTS = "mixed_inputs"
"""Entry of the params of a model while it reads packed rows: {"tokens": [R, S] int32, "share": []}.
The model reads (1 - share) e(token) + share e(other token) in place of the embedding e(token)."""

MISSING_POSITIONS = "missing_positions"
"""Entry of the cache of a model whose images take fewer positions than tokens: [1, B] int32, the
position of each row's next token less the number of its tokens, which is negative."""

UNREAD = -1
"""Branch of a token whose logits nobody reads. It is not committed. See `Policy.extend`."""


class Policy(NamedTuple):
    """A function that continues token sequences: a model, a guided reference, or a draft model.

    This is the only interface that the sampler uses. A cache is a pytree of arrays. One of them is
    `lengths [B]`, the number of tokens that the cache holds for each row. Rows are on axis 0 of 1-D
    leaves and on axis 1 of all other leaves, so `sampler.take_rows` can gather rows of any cache.

    All 1-D leaves are lengths. If every token has its own place in the cache, writing smaller
    lengths drops the last tokens of a row.
    """

    init_cache: Callable[[Params, int, int], Any]
    """(params, rows, length) -> an empty cache for `rows` sequences of at most `length` tokens."""
    extend: Callable[[Params, Any, Array, Array, Array, Array], tuple[Array, Any]]
    """(params, cache, tokens [B, T], positions [B, T], branch_ids [B, T], commit [B]) -> (logits
    [B, T, V], cache).

    Each token sees the cache and, among these T tokens, the earlier ones that are trunk (branch 0)
    or of its own branch; tokens of a branch are neighbors. The first commit[b] tokens of row b stay
    in the cache and must be trunk. The remaining tokens get logits but leave no trace in the cache.
    A row whose only token is of branch `UNREAD` gets logits that nobody reads, and may therefore
    look at less of its cache. This one call covers:

        prefill of ragged prompts    T = longest prompt, commit = prompt lengths
        decoding                     T = 1, commit = 1 (commit = 0, branch = UNREAD: a free slot)
        verification of a draft      T = 1 + draft length
        the k candidates of Q#       k branches of one token each, commit = 0
    """
    max_rollback: int | None = None
    """Number of the most recently committed tokens that smaller `lengths` can take back.

    None: decided by the shapes of caches. All tokens can be taken back if each has its own place,
    and none otherwise.
    """
    exact: bool = False
    """See `Role`."""


class Role(NamedTuple):
    """A model's place in the full params tree.

    A role is a function of the full tree, so roles can share leaves. With LoRA, for example, the
    reference is the policy with its adapters off.
    """

    hidden: Callable[[Params, PackedRows], Array]
    """(full params tree, rows) -> [R, S, D]."""
    logits: Callable[[Params, Array], Array]
    """(full params tree, hidden [..., D]) -> [..., V] float32; for a head, its outputs [..., K]."""
    exact: bool = False
    """True if log-probs of sampler and trainer have equal bits (see `models.exact`)."""
    whole_logits: bool = False
    """True if the logits of a micro-batch's actions are computed at once (see
    `losses.log_probs.log_probs_of_hidden`)."""


Roles = Mapping[str, Role]
"""The models that an algorithm may call, by name: those that its config's `roles` asks for."""


class Sampling(NamedTuple):
    """The sampling settings that algorithms depend on."""

    temperature: float = 1.0
    """Divides the logits of policy, old policy and reference alike."""
    max_new_tokens: int = 1
    """Length limit of a completion."""


# Experience: one completion per row.


class RowSource(IntEnum):
    """Whose completion a row is."""

    POLICY = 0
    EXPERT = 1
    HINT = 2
    REPLAY = 3
    TEXT = 4


@struct.dataclass
class Rollout:
    """Completions sampled from a policy, with their rewards.

    Each row holds a prompt, then one completion, then padding. `action_mask` is True where the
    policy chose the token, the end-of-sequence token included. It is False on prompts, tool output
    and padding. A row ends with its last action: no loss depends on anything after it. A row that
    no reward function judged is not `scored`: it counts in no baseline and is not learned from.
    """

    tokens: Array
    """[N, T] int32."""
    action_mask: Array
    """[N, T] bool."""
    log_probs: Array
    """[N, T] float32: log-probs under the policy at the sampling temperature over the full
    vocabulary. They are the old log-probs of the policy ratio, unless an algorithm recomputes
    them."""
    behaviour_log_probs: Array
    """[N, T] float32: log-probs under the distribution actually sampled from (top-k, top-p, min-p,
    guidance)."""
    rewards: Array
    """[N, T] float32. A reward for the completion is on the last action token."""
    group_id: Array
    """[N] int32. Rows of one group continue the same prompt and are adjacent."""
    policy_step: Array
    """[N] int32: the optimizer step whose parameters sampled the first token of the row."""
    birth_key: Array
    """[N, 2] uint32: the row's own random key (see `sampler.row_keys`). A row that is continued in
    a later step keeps its key."""
    truncated: Array
    """[N] bool: True if the row reached its length limit."""
    scored: Array
    """[N] bool: True if `rewards` are valid. False if no reward function scored the row, or if one
    failed on it."""
    parent: Array | None = None
    """[N] int32: an earlier row of the same group whose first `shared` tokens this row repeats; a
    row without one names itself. None: the rows of a group share their prompt. A token that a row
    repeats is an action of its first row at most, so that nothing is learned twice."""
    shared: Array | None = None
    """[N] int32: how many leading tokens a row shares with its parent; 0 without one."""
    episode_id: Array | None = None
    """[N] int32: rows of one episode are neighbors and have one number: an episode whose history
    was rewritten has several rows, its branches. Each of them carries the rewards of its own
    actions, and the return of an episode is the sum over its rows. None: each row is an episode."""
    baseline: Array | None = None
    """[N] float32: value of the row's prompt, estimated from completions that are not learned from.
    Only for algorithms that ask for it (ReMax: reward of the greedy completion; A*-PO: optimal
    value)."""
    source: Array | None = None
    """[N] int8: `RowSource` of each row. Log-probs of rows that are not the policy's are zero where
    nobody knows them. Such rows are not `scored`, and no metric of the policy reads them. None: all
    rows are the policy's."""
    routing: Array | None = None
    """[N, T, L k] uint8 or uint16: for each token the k experts that the sampler's router chose in
    each of L mixture layers, as their numbers plus 1. 0 where the sampler did not read the token,
    as with the last one of a row. None: not recorded."""
    images: Array | None = None
    """[N, n, ...] float32: the pieces of each row's images, to whose features token ids from the
    vocabulary's size on refer (see `models.vision`); zeros behind the last. None: the rows are
    text. Once the data are packed, the layout has them."""


@struct.dataclass
class Demonstrations:
    """Texts to imitate."""

    tokens: Array
    """[N, T] int32."""
    action_mask: Array
    """[N, T] bool: True where a token is to be learned: the completion with its end-of-sequence
    token."""
    group_id: Array
    """[N] int32, all different: demonstrations do not share prompts in packed rows."""
    weights: Array | None = None
    """[N, T] float32: what each learned token counts, relative to the others; negative if it is to
    be forgotten, and 0 where `action_mask` is False. None: all count the same."""
    images: Array | None = None
    """[N, n, ...] float32: as in `Rollout`."""


@struct.dataclass
class Completions:
    """Completions to be judged token by token, written by the policy, a teacher or people."""

    tokens: Array
    """[N, T] int32."""
    action_mask: Array
    """[N, T] bool: True where a token was chosen, the end-of-sequence token included."""
    group_id: Array
    """[N] int32. Rows of one group continue the same prompt."""
    on_policy: Array
    """[N] bool: True if the policy itself sampled the row, at this step."""
    images: Array | None = None
    """[N, n, ...] float32: as in `Rollout`."""
    teacher_ids: Array | None = None
    """[N, T, k] int32: for each token, the likeliest ones in its place, of a served teacher."""
    teacher_log_probs: Array | None = None
    """[N, T, k] float32: theirs."""


@struct.dataclass
class Pairs:
    """Completions that were compared in pairs, or judged one by one.

    A group of two rows is a pair, and one of its rows is `preferred`. A group of one row is a
    completion judged good or bad.
    """

    tokens: Array
    """[N, T] int32."""
    action_mask: Array
    """[N, T] bool: True on the completion, the end-of-sequence token included."""
    group_id: Array
    """[N] int32."""
    preferred: Array
    """[N] bool."""
    margin: Array
    """[N] float32: how much better the preferred row is according to the data; 0 if the data do not
    say."""
    reference_log_probs: Array
    """[N, T] float32: log-probs under the reference at temperature 1. Computed once, when the data
    are read or sampled."""
    images: Array | None = None
    """[N, n, ...] float32: as in `Rollout`."""


@struct.dataclass
class ScoredCompletions:
    """Completions of prompts with a score each, given or sampled."""

    tokens: Array
    """[N, T] int32."""
    action_mask: Array
    """[N, T] bool: True on the completion, the end-of-sequence token included; False in a row
    without a score."""
    group_id: Array
    """[N] int32. Rows of one group continue the same prompt and are adjacent."""
    scores: Array
    """[N] float32: larger is better."""
    images: Array | None = None
    """[N, n, ...] float32: as in `Rollout`."""


@struct.dataclass
class QExamples:
    """Texts with labels on some of their tokens.

    A label is the return that followed the token (Q#), or whether a reasoning step is right
    (process rewards).
    """

    tokens: Array
    """[N, T] int32."""
    action_mask: Array
    """[N, T] bool: True on labeled tokens."""
    group_id: Array
    """[N] int32. Rows of one group continue the same prompt."""
    returns: Array
    """[N, T] float32: the sum of rewards from that token on."""
    images: Array | None = None
    """[N, n, ...] float32: as in `Rollout`."""


# Packed rows.


@struct.dataclass
class Paths:
    """The attention of packed rows [R, S], one sequence at a time (see `models.exact`)."""

    queries: Array
    """[..., R, n, t] int32: slots of the queries of each tile, then S as padding. The queries of a
    tile follow one another in a sequence."""
    keys: Array
    """[..., R, n, L] int32: slots of the sequence's tokens up to the tile's last query, by
    position, then S as padding."""


@struct.dataclass
class PackedRows:
    """Packed rows, the input of models and losses. All arrays are [..., R, S] int32 unless noted.

    A group (a prompt with its completions) is a segment of a packed row. The prompt is stored once,
    and the completions, its branches, follow it. In general a group is a tree of any depth, stored
    depth first: tokens that several completions share stand once, before everything that follows
    them in any completion.
    """

    tokens: Array
    positions: Array
    """Position in the sequence. Positions of every completion continue those of its prompt."""
    segment_ids: Array
    """Number of the group within this row, from 1; 0 is padding."""
    branch_ids: Array
    """Number of the completion within its group, from 1; 0 is the prompt. Where a group is a deeper
    tree, completions share tokens with branch numbers, and `visible_until` says who sees them."""
    sequence_ids: Array
    """Number of the completion within this row, from 1, over all its groups; 0 is prompt and
    padding. A token that several completions share has the number of the first one, the only one
    of which it may be an action. So a sum over a sequence is one over the completion's own
    actions."""
    previous: Array
    """Slot of the preceding token of the sequence, in the same row. The first token of each
    completion points to the last token of the prompt; where completions branch off later, to the
    last token before the branch."""
    actions: Array | None = None
    """[..., R, A] int32: slots of the row's action tokens, then S as padding. Log-probs are
    computed for these slots only. None: all slots."""
    key_tiles: Array | None = None
    """[..., R, S / t, n] int32: for each tile of t query slots, the tiles that hold every key that
    its tokens see, then -1 as padding. None: all tiles."""
    paths: Paths | None = None
    """The sequences of the row, for models with `DecoderConfig.exact`. None: attention goes by
    slots."""
    visible_until: Array | None = None
    """The slot after the last one whose token sees this one: the end of its subtree. Token i sees
    token j if j <= i < visible_until[j]. None: segments and branches say the same."""
    routing: Array | None = None
    """[..., R, S, L k] uint8 or uint16: the experts that process each token, as in
    `Rollout.routing`; where it is 0, the router chooses. Only models with
    `DecoderConfig.records_routing` read it. None: routers choose."""
    images: Array | None = None
    """[..., I, *piece] float32: the pieces of these rows' images, to whose features token ids from
    the vocabulary's size on refer. None: the rows are text."""


@struct.dataclass
class Layout:
    """Place of each token of [N, T] arrays in packed rows [M, K, R, S].

    Built by `train.packing.assign_slots`.
    """

    source: Array
    """[M, K, R, S] int32: flat index into [N, T] of the token in each slot; -1 is padding."""
    slot: Array
    """[N, T] int32: flat index into [M, K, R, S] of each token; -1 if it has no slot. Rows that
    share tokens share their slots."""
    minibatch: Array
    """[N] int32: index, below M, of the optimizer step that learns from this row; M if none
    does."""
    positions: Array
    """The remaining fields are those of `PackedRows`, with leading axes [M, K]."""
    segment_ids: Array
    branch_ids: Array
    sequence_ids: Array
    previous: Array
    visible_until: Array
    actions: Array | None = None
    key_tiles: Array | None = None
    paths: Paths | None = None
    routing: Array | None = None
    images: Array | None = None

    @property
    def minibatches(self) -> int:
        """M: the number of optimizer steps that the batch is split into."""
        return self.source.shape[0]

    def pack(self, array: Array, fill: Any = 0) -> Array:
        """[N, T] -> [M, K, R, S], with `fill` in padding.

        Slots that rows share hold the values of the first of these rows.
        """
        values = jnp.take(array.reshape(-1), jnp.maximum(self.source, 0))
        return jnp.where(self.source >= 0, values, jnp.asarray(fill, array.dtype))

    def unpack(self, array: Array, fill: Any = 0) -> Array:
        """[M, K, R, S] -> [N, T], with `fill` where a token has no slot."""
        values = jnp.take(array.reshape(-1), jnp.maximum(self.slot, 0))
        return jnp.where(self.slot >= 0, values, jnp.asarray(fill, array.dtype))

    def rows(self, tokens: Array) -> PackedRows:
        """[N, T] tokens -> the packed rows that models read."""
        return PackedRows(
            tokens=self.pack(tokens),
            positions=self.positions,
            segment_ids=self.segment_ids,
            branch_ids=self.branch_ids,
            sequence_ids=self.sequence_ids,
            previous=self.previous,
            actions=self.actions,
            key_tiles=self.key_tiles,
            paths=self.paths,
            visible_until=self.visible_until,
            routing=self.routing,
            images=self.images,
        )


class Experience(NamedTuple):
    """The data that an algorithm learns from at one step of the run."""

    data: Any
    """Rollout, Demonstrations, Completions, Pairs, ScoredCompletions or QExamples."""
    layout: Layout


# Metrics.


@struct.dataclass
class Sum:
    """A weighted mean, stored as the weighted sum of values and the sum of weights.

    Both add up over micro-batches and updates. Their quotient is reported.
    """

    value: Array
    weight: Array


@struct.dataclass
class Max:
    """The largest value over micro-batches and updates."""

    value: Array


@struct.dataclass
class Min:
    """The smallest value over micro-batches and updates."""

    value: Array


@struct.dataclass
class First:
    """A metric that only the first update of a batch reports.

    In later updates the policy is no longer the one that sampled the batch.
    """

    metric: Metric


@struct.dataclass
class PerToken:
    """A number of each token, [R, S], for the records of single completions.

    Nothing reduces it: those of micro-batches and updates stand side by side.
    """

    value: Array


Metric = Sum | Max | Min | First | PerToken
Metrics = dict[str, Metric]
"""Metrics by flat name with one slash, such as "policy/entropy".

`train.update_step.make_update_step` reduces them over micro-batches, each according to its kind,
and `train.update_step.reduce_updates` over the updates of a batch.
"""


# Algorithms.


def no_state(params: Params) -> Any:
    """Return the state of an algorithm that has none."""
    return ()


def unchanged(params: Params, state: Any, metrics: dict[str, Array]) -> tuple[Params, Any]:
    """Return params and state as they are: the `after_update` of an algorithm that needs none."""
    return params, state


class Algorithm(NamedTuple):
    """A learning rule as pure functions, built by a factory `name(config, roles, sampling)` in
    `algos/`."""

    make_batch: Callable[[Experience, Params, Any], tuple[Any, Any]]
    """(experience, params, state) -> (batch, state).

    Computes advantages, reference log-probs, targets and weights, without gradients. A batch is the
    algorithm's own dataclass; every leaf is [M, K, R, S]. `batch.weights` is a dict with one array
    per loss term: the weight of each token, normalized such that the weights of one optimizer step
    sum to the total weight of the term.
    """
    loss: Callable[[Params, Any], tuple[Array, Metrics]]
    """(params, batch of one micro-batch, leaves [R, S]) -> (scalar, metrics): a weighted sum over
    tokens."""
    init_state: Callable[[Params], Any] = no_state
    """params -> the state that the algorithm carries from step to step (adaptive coefficients,
    running means)."""
    after_update: Callable[[Params, Any, dict[str, Array]], tuple[Params, Any]] = unchanged
    """(params, state, reduced metrics) -> (params, state), after each optimizer step: controllers,
    EMA references."""
    stops_gradient: bool = False
    """The loss stops gradients on purpose, so that they are not its finite differences. Only the
    proofs read this: they fail such a loss whose gradient is its finite differences."""


class Probe(NamedTuple):
    """Measurements inside models during training, invisible to the algorithm.

    A probe adds leaves to the params that the loss is differentiated for. A model that finds its
    own leaves adds to the loss the product of the leaf and the measured quantity. The gradient of
    the leaf is then the measurement.
    """

    zeros: Params
    """Role -> name -> leaf. These leaves are placed beside the role's own."""
    metrics: Callable[[Params], Metrics]
    """Measurements of one optimizer step (a tree like `zeros`) -> metrics."""
    weights: Callable[[Params], Params] | None = None
    """Measurements of one optimizer step -> values of the leaves during that step, which weight
    each measured quantity in the loss. This takes an extra measuring pass before the step. None:
    the probe only measures."""


# The run.


class Purpose(IntEnum):
    """Purpose of a random key. It is folded into the seed's key before the step, so no two uses
    share a stream."""

    INIT = 0
    ROLLOUT = 1
    EVALUATION = 2
    DATA = 3
    BASELINE = 4


@struct.dataclass
class TrainState:
    """All state that an optimizer step reads and writes.

    The step donates it; checkpoints save it completely.
    """

    step: Array
    """[] int32: optimizer steps taken in this phase of the run."""
    params: Params
    """The params of every role, trainable and frozen."""
    opt_state: Any
    """Optimizer state of the trainable leaves only."""
    algorithm_state: Any
    """State of the algorithm (`Algorithm.init_state`)."""
