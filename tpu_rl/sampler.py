"""Completions from a policy, on token ids: prefill each prompt once, then decode all rows in jitted segments.

What a row draws depends on its own key and its logits alone, never on its slot, the order, the batch size, the waves
or the other rows:

    key       = fold_in(fold_in(seed key, purpose), step)      `run_key`
    row key   = fold_in(key, row id)                           `row_keys`
    token key = fold_in(row key, position of the token in its sequence)

A token takes one uniform number and inverts the cumulative distribution in two levels, blocks of the vocabulary and
then the tokens of one block: many times faster than Gumbel noise over the vocabulary, and the log-probability comes
with it as logit minus log-sum-exp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl import sharding
from tpu_rl.errors import InputError
from tpu_rl.types import Array, Params, Policy, Purpose, Rollout

SEGMENT = 128
"""Decode steps between two looks of the host."""

BLOCK = 128
"""Tokens in one block of the two-level cumulative distribution."""

BATCH_AXES = ("data", "fsdp")
"""Mesh axes that rows are spread over."""


@dataclass(frozen=True)
class SamplerConfig:
    """How completions are drawn. Truncation goes by temperature-scaled probabilities: top-k, then top-p, then min-p."""

    max_new_tokens: int
    """Most tokens of a completion, its stop token included."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int | None = None
    """Keep the k most likely tokens (and those equal to the last of them)."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens whose probability is at least this; always one token or more."""
    min_p: float | None = None
    """Keep tokens at least this fraction as likely as the most likely one."""
    stop_ids: tuple[int, ...] = ()
    """A completion ends with the first of these that it draws, and holds it."""
    samples_per_prompt: int = 1
    """Completions of each prompt: the size of a group."""
    pad_id: int = 0
    """What stands after a row's last token."""
    max_rows: int = 256
    """Rows decoded at once; more are decoded in waves of whole groups."""
    prompt_length: int | None = None
    """Columns reserved for prompts; None: the next power of two of the longest. Fix it to compile once."""

    def __post_init__(self):
        def check(good: bool, name: str, needs: str) -> None:
            if not good:
                value = self.__dict__[name]
                raise InputError(f"SamplerConfig.{name} is {value!r}", why=f"it must be {needs}", fix=f"set {name}")

        for name in ("max_new_tokens", "samples_per_prompt", "max_rows"):
            check(self.__dict__[name] >= 1, name, "at least 1")
        for name in ("top_k", "prompt_length"):
            check(self.__dict__[name] is None or self.__dict__[name] >= 1, name, "at least 1, or None")
        check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "a finite number, 0 or more")
        check(self.top_p is None or 0 < self.top_p <= 1, "top_p", "above 0 and at most 1, or None")
        check(self.min_p is None or 0 <= self.min_p <= 1, "min_p", "between 0 and 1, or None")
        check(all(stop >= 0 for stop in self.stop_ids), "stop_ids", "a tuple of token ids")
        check(self.max_rows >= self.samples_per_prompt, "max_rows", "at least samples_per_prompt: groups stay whole")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


# --- keys --------------------------------------------------------------------------------------------------------


def run_key(seed: int, purpose: Purpose, step: int) -> Array:
    """The key of one use of randomness at one step of the run."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), purpose), step)


def row_keys(key: Array, row_ids: Any) -> Array:
    """key, row ids [N] -> [N] keys. Row ids are never reused under one key."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.asarray(row_ids, jnp.uint32))


# --- caches ------------------------------------------------------------------------------------------------------


def take_rows(cache: Any, rows: Array) -> Any:
    """Gathers rows of any policy's cache: 1-D leaves (lengths) have rows in front, all others behind the layer axis."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0 if leaf.ndim == 1 else 1), cache)


# --- one token ---------------------------------------------------------------------------------------------------


def draw(logits: Array, uniform: Array, config: SamplerConfig) -> tuple[Array, Array, Array]:
    """logits [B, V] float32, uniform [B] in [0, 1) -> (token, log_prob, behaviour_log_prob), each [B].

    `log_prob` is over the full vocabulary at the sampling temperature (greedy: of the unscaled logits).
    `behaviour_log_prob` is under the truncated, renormalised distribution that was drawn from (greedy: 0).
    """
    scaled = logits if config.greedy else logits / config.temperature
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    mass = jnp.exp(scaled - peak)
    log_total = jnp.log(jnp.sum(mass, axis=-1))
    if config.greedy:
        # The first largest; jnp.argmax is slower on a CPU. NaN equals nothing: stay in the vocabulary.
        size = scaled.shape[-1]
        ids = jnp.arange(size, dtype=jnp.int32)[None]
        token = jnp.min(jnp.where(scaled == peak, ids, size - 1), axis=-1)
        return token, -log_total, jnp.zeros_like(log_total)
    kept = truncate(mass, config)
    token = invert_cdf(kept, uniform)
    below_peak = _at(scaled - peak, token)
    log_prob = below_peak - log_total
    if kept is mass:
        return token, log_prob, log_prob
    return token, log_prob, below_peak - jnp.log(jnp.sum(kept, axis=-1))


def _at(values: Array, index: Array) -> Array:
    """values [B, K], index [B] -> values[b, index[b]]."""
    return jnp.take_along_axis(values, index[:, None], axis=-1)[:, 0]


def truncate(mass: Array, config: SamplerConfig) -> Array:
    """mass exp(scaled logits - max) [B, V], the largest 1 in each row -> the mass with dropped tokens at zero.

    Tokens equal to the last one kept are kept too, so that the result does not depend on their order.
    """
    if config.top_k is not None:
        k = config.top_k
        mass = _keep_fewest(mass, lambda kept: jnp.sum(kept > 0, axis=-1, keepdims=True) >= k)
    if config.top_p is not None and config.top_p < 1:
        needed = config.top_p * jnp.sum(mass, axis=-1, keepdims=True)
        mass = _keep_fewest(mass, lambda kept: jnp.sum(kept, axis=-1, keepdims=True) >= needed)
    if config.min_p is not None:
        mass = jnp.where(mass >= config.min_p, mass, 0.0)
    return mass


def _keep_fewest(mass: Array, enough: Callable[[Array], Array]) -> Array:
    """mass [B, V] in [0, 1] -> its largest values only, as few as `enough` (kept mass [B, V] -> [B, 1]) allows.

    Bisects the bits of the threshold, which order as non-negative floats do: exact, and with a vocabulary of 150,000
    ten times faster on a CPU than `lax.top_k`.
    """
    low = jnp.zeros((mass.shape[0], 1), jnp.int32)
    high = jnp.full_like(low, np.float32(1).view(np.int32) + 1)

    def keep(bits: Array) -> Array:
        return jnp.where(mass >= jax.lax.bitcast_convert_type(bits, jnp.float32), mass, 0.0)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        holds = enough(keep(middle))
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

    low, _ = jax.lax.fori_loop(0, 30, halve, (low, high))  # there are just under 2**30 floats from 0 to 1
    return keep(low)


def invert_cdf(mass: Array, uniform: Array) -> Array:
    """mass [B, V] >= 0, not all zero, and uniform [B] in [0, 1) -> token [B] int32; never one whose mass is zero.

    Mass below float32's normal range counts as zero, as some devices flush it and others do not.
    """
    mass = jnp.where(mass >= jnp.finfo(jnp.float32).tiny, mass, 0.0)
    blocks = jnp.pad(mass, ((0, 0), (0, -mass.shape[-1] % BLOCK))).reshape(mass.shape[0], -1, BLOCK)
    of_blocks = jnp.sum(blocks, axis=-1)
    block, rest = _invert_level(of_blocks, uniform * jnp.sum(of_blocks, axis=-1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _invert_level(inside, rest)[0]


def _invert_level(mass: Array, target: Array) -> tuple[Array, Array]:
    """mass [B, K], target [B] -> (index, target less the mass before it), each [B].

    It is the first index with mass whose cumulative mass exceeds the target. Rounding can leave the target at or above
    the total: then the last index with mass.
    """
    cumulative = jnp.cumsum(mass, axis=-1)
    has_mass = mass > 0
    above = has_mass & (cumulative > target[:, None])
    last = mass.shape[-1] - 1 - jnp.argmax(has_mass[:, ::-1], axis=-1)
    index = jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last).astype(jnp.int32)
    before = jnp.where(index > 0, _at(cumulative, jnp.maximum(index - 1, 0)), 0.0)
    return index, target - before


# --- prefill and decode ------------------------------------------------------------------------------------------


class _State(NamedTuple):
    """Rows in the making; donated from segment to segment."""

    cache: Any
    """Holds each row's tokens but the last."""
    tokens: Array
    """[B, T] int32."""
    log_probs: Array
    """[B, T] float32."""
    behaviour_log_probs: Array
    """[B, T] float32."""
    lengths: Array
    """[B] int32: tokens that each row has so far."""
    done: Array
    """[B] bool."""


@functools.partial(jax.jit, static_argnames=("policy", "config"))
def _prefill(
    policy: Policy, config: SamplerConfig, params: Params, prompts: Array, lengths: Array, ends: Array
) -> _State:
    """prompts [B / G, prompt_length], lengths [B / G], ends [B] -> the state of B rows before their first token."""
    groups, prompt_length = prompts.shape
    total = prompt_length + config.max_new_tokens
    positions = jnp.broadcast_to(jnp.arange(prompt_length, dtype=jnp.int32), prompts.shape)
    cache = policy.init_cache(params, groups, total)
    _, cache = policy.extend(params, cache, prompts, positions, jnp.zeros_like(prompts), lengths - 1)
    rows = jnp.repeat(jnp.arange(groups), config.samples_per_prompt)
    tokens = jnp.pad(prompts, ((0, 0), (0, config.max_new_tokens)), constant_values=config.pad_id)[rows]
    zeros = jnp.zeros(tokens.shape, jnp.float32)
    return _State(take_rows(cache, rows), tokens, zeros, jnp.zeros_like(zeros), lengths[rows], lengths[rows] >= ends)


@functools.partial(jax.jit, static_argnames=("policy", "config"), donate_argnames=("state",))
def _decode_segment(
    policy: Policy, config: SamplerConfig, params: Params, keys: Array, ends: Array, state: _State
) -> tuple[_State, Array]:
    """At most `SEGMENT` steps, fewer when all rows are done -> (state, are all done)."""

    def unfinished(carry: tuple[Array, _State]) -> Array:
        return (carry[0] < SEGMENT) & ~jnp.all(carry[1].done)

    def step(carry: tuple[Array, _State]) -> tuple[Array, _State]:
        return carry[0] + 1, _decode_step(policy, config, params, keys, ends, carry[1])

    _, state = jax.lax.while_loop(unfinished, step, (jnp.int32(0), state))
    return state, jnp.all(state.done)


def _decode_step(
    policy: Policy, config: SamplerConfig, params: Params, keys: Array, ends: Array, state: _State
) -> _State:
    """Every live row reads its last token and draws the next; done rows stay as they are."""
    live = ~state.done
    position = state.lengths[:, None] - 1
    current = jnp.take_along_axis(state.tokens, position, axis=1)
    logits, cache = policy.extend(
        params, state.cache, current, position, jnp.zeros_like(current), live.astype(jnp.int32)
    )
    uniform = jax.vmap(lambda key, place: jax.random.uniform(jax.random.fold_in(key, place)))(keys, state.lengths)
    token, log_prob, behaviour_log_prob = draw(logits[:, 0].astype(jnp.float32), uniform, config)

    rows, outside = jnp.arange(token.shape[0]), state.tokens.shape[1]
    column = jnp.where(live, state.lengths, outside)

    def write(array: Array, value: Array) -> Array:
        return array.at[rows, column].set(value, mode="drop")

    lengths = state.lengths + live.astype(jnp.int32)
    stopped = jnp.isin(token, jnp.asarray(config.stop_ids, jnp.int32))
    return _State(
        cache,
        write(state.tokens, token),
        write(state.log_probs, log_prob),
        write(state.behaviour_log_probs, behaviour_log_prob),
        lengths,
        state.done | stopped | (lengths >= ends),
    )


# --- many prompts ------------------------------------------------------------------------------------------------


def sample(
    policy: Policy,
    params: Params,
    prompts: Sequence[Sequence[int]],
    key: Array,
    config: SamplerConfig,
    *,
    limits: Sequence[int] | np.ndarray | None = None,
    row_ids: Sequence[int] | np.ndarray | None = None,
    policy_step: int = 0,
    mesh: Mesh | None = None,
) -> Rollout:
    """Draws `samples_per_prompt` completions of each prompt -> Rollout of numpy arrays.

    prompts: ragged lists of token ids. Rows of one prompt stand together, in the order of the prompts.
    key: the use and the step are folded in already (`run_key`).
    limits: [N], most new tokens of each row; None: `max_new_tokens` for all.
    row_ids: [N], what is folded into each row's key; None: 0 .. N-1.
    mesh: spreads rows over its `BATCH_AXES`; None: rows go where the params are.
    N is prompts times samples_per_prompt, T is prompt_length + max_new_tokens. Rewards are zero.
    Raises InputError for prompts or limits that do not fit the configuration.
    """
    group = config.samples_per_prompt
    rows = len(prompts) * group
    tokens, lengths = _pad_prompts(prompts, config)
    limits = np.full(rows, config.max_new_tokens, np.int32) if limits is None else np.asarray(limits, np.int32)
    row_ids = np.arange(rows) if row_ids is None else np.asarray(row_ids)
    for name, array in (("limits", limits), ("row_ids", row_ids)):
        if array.shape != (rows,):
            why = f"{len(prompts)} prompts with {group} completions each are {rows} rows"
            raise InputError(f"sample: {name} has shape {array.shape}", why=why, fix="give one value a row")
    if np.any((limits < 1) | (limits > config.max_new_tokens)):
        why = f"each row may draw 1 to max_new_tokens = {config.max_new_tokens} tokens"
        raise InputError(f"sample: limits go from {limits.min()} to {limits.max()}", why=why, fix="change the limits")
    keys = row_keys(key, row_ids)
    begins = np.repeat(lengths, group)

    drawn, log_probs, behaviour_log_probs, ends = _decode(
        policy, params, tokens, lengths, begins + limits, keys, config, mesh
    )
    columns = np.arange(drawn.shape[1])[None]
    last = drawn[np.arange(rows), ends - 1]
    arrays: dict[str, Any] = {
        "tokens": drawn,
        "action_mask": (columns >= begins[:, None]) & (columns < ends[:, None]),
        "log_probs": log_probs,
        "behaviour_log_probs": behaviour_log_probs,
        "rewards": np.zeros(drawn.shape, np.float32),
        "group_id": np.repeat(np.arange(len(prompts), dtype=np.int32), group),
        "policy_step": np.full(rows, policy_step, np.int32),
        "birth_key": np.asarray(jax.random.key_data(keys)),
        "truncated": (ends - begins == limits) & ~np.isin(last, config.stop_ids),
        "scored": np.ones(rows, bool),
    }
    return Rollout(**arrays)


def _pad_prompts(prompts: Sequence[Sequence[int]], config: SamplerConfig) -> tuple[np.ndarray, np.ndarray]:
    """-> (tokens [prompts, prompt_length] int32, lengths [prompts] int32)."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if lengths.size == 0:
        raise InputError("sample: there are no prompts", fix="give a list with one list of token ids a prompt")
    if lengths.min() == 0:
        where = f"prompt {int(lengths.argmin())}"
        raise InputError("sample: a prompt is empty", where=where, fix="begin it with the beginning-of-sequence token")
    width = config.prompt_length or 1 << (int(lengths.max()) - 1).bit_length()
    if lengths.max() > width:
        where = f"prompt {int(lengths.argmax())} has {lengths.max()} tokens"
        raise InputError(
            f"sample: a prompt is longer than prompt_length = {width}", where=where, fix="raise prompt_length or cut it"
        )
    tokens = np.full((len(prompts), width), config.pad_id, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def _decode(
    policy: Policy,
    params: Params,
    prompts: np.ndarray,
    lengths: np.ndarray,
    ends: np.ndarray,
    keys: Array,
    config: SamplerConfig,
    mesh: Mesh | None,
) -> tuple[np.ndarray, ...]:
    """-> tokens, log_probs, behaviour_log_probs [N, T] and the length of each row [N].

    Goes in waves of equal size, so that one program serves all; the rows of each divide evenly over the mesh. What is
    missing in the last is filled with one-token prompts that may draw nothing.
    """
    group, rows = config.samples_per_prompt, len(ends)
    devices = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    unit = devices // math.gcd(devices, group)
    waves = math.ceil(len(prompts) / (config.max_rows // group))
    size = math.ceil(math.ceil(len(prompts) / waves) / unit) * unit
    missing = -len(prompts) % size
    prompts = np.pad(prompts, ((0, missing), (0, 0)), constant_values=config.pad_id)
    lengths = np.pad(lengths, (0, missing), constant_values=1)
    ends = np.pad(ends, (0, missing * group), constant_values=1)
    keys = keys[np.minimum(np.arange(len(ends)), rows - 1)]

    parts = []
    for start in range(0, len(prompts), size):
        of_prompts = (prompts[start : start + size], lengths[start : start + size])
        of_rows = (ends[start * group : (start + size) * group], keys[start * group : (start + size) * group])
        if mesh is not None:
            over_rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
            of_rows = sharding.put(of_rows, over_rows)
            even = size % devices == 0
            of_prompts = sharding.put(of_prompts, over_rows if even else NamedSharding(mesh, PartitionSpec()))
        parts.append(_decode_wave(policy, params, of_prompts, of_rows, config, mesh))
    return tuple(np.concatenate(part)[:rows] for part in zip(*parts, strict=True))


def _decode_wave(
    policy: Policy, params: Params, of_prompts: Any, of_rows: Any, config: SamplerConfig, mesh: Mesh | None
) -> tuple[np.ndarray, ...]:
    """Segments until all rows are done; the host reads one flag a segment."""
    ends, keys = of_rows
    state = _prefill(policy, config, params, *of_prompts, ends)
    finished = False
    while not finished:
        state, all_done = _decode_segment(policy, config, params, keys, ends, state)
        finished = bool(all_done)
    result = (state.tokens, state.log_probs, state.behaviour_log_probs, state.lengths)
    if mesh is not None:
        result = _replicate(mesh)(result)
    return tuple(np.asarray(array) for array in result)


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[Any], Any]:
    """A jitted identity whose result every process can read."""
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
