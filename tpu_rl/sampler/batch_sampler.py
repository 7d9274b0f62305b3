"""The host's part of the sampler: it runs decode segments and looks at rows between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl.sampler import cache_ops, decode_loop, drafts, speculation
from tpu_rl.sampler import slots as slot_ops
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.drafts import Draft
from tpu_rl.sampler.partial import PartialCompletion
from tpu_rl.sampler.queues import DeviceQueues
from tpu_rl.sampler.requests import DecodeRequest, make_request
from tpu_rl.sampler.slots import NO_TOKEN, Outputs, SegmentStatus, Slots, slot_axes
from tpu_rl.train import sharding
from tpu_rl.types import Array, Params, Policy, Rollout

OnFinished = Callable[[dict[int, list[int]]], None]
"""{row: tokens of its completion} -> None, for the rows that ended in the last segment."""

StopAt = Callable[[list[int]], int | None]
"""Tokens of a completion so far -> the number of tokens with which it ends, or None if it
continues. Must give the same result however many tokens follow the end."""

OnVerified = Callable[[int, int], None]
"""(drafts verified in the last segment, tokens that they yielded) -> None."""


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
    on_finished: OnFinished | None = None,
    stop_at: StopAt | None = None,
    on_segment: Callable[[], None] | None = None,
    drafter: Policy | None = None,
    on_verified: OnVerified | None = None,
    resumed: Sequence[PartialCompletion | None] | None = None,
    stop_when: Callable[[np.ndarray], bool] | None = None,
) -> Rollout:
    """Sample completions of prompts from a policy.

    Each prompt gets `config.samples_per_prompt` completions. They are the rows of the result: N
    rows in all, those of one prompt next to each other, in the order of the prompts.

    A row's tokens depend on its key, its prompt and the policy, not on other rows, their number or
    their order. The key of a row is `fold_in(key, row_id)`, and each token is sampled with
    `fold_in(row key, position of the token)`.

    Callbacks are called on the host after each segment of `config.segments.steps` decode steps. If
    a callback raises an exception, sampling ends with it.

    Args:
        prompts: lists of token ids, not empty and not necessarily of equal length.
        key: random key of this call; see `run_key`.
        config: lengths, the distribution of tokens, the number of slots, speculation.
        limits: [N] int, length limit of each completion in tokens, at most
            `config.max_new_tokens`, which is the default for all. Rows with high limits are decoded
            first.
        row_ids: [N] int, ids that distinguish the keys of rows. The default is 0 to N - 1.
        policy_step: optimizer step of the params, which the rollout records.
        mesh: mesh over which rows are sharded. Without it, they are where the params are.
        on_finished: called with the completions that ended. Each row is reported once, while others
            are still being decoded.
        stop_at: finds the end of a completion, for example at a stop string. Tokens that were
            sampled after the end are dropped, so the result does not depend on segments.
        on_segment: called without arguments.
        drafter: the small model that `config.speculation.model` names, as a policy that reads the
            same params.
        on_verified: called with counts of drafts and their tokens, in segments with drafts.
        resumed: [N], completions of an earlier call, partial or entire, and None for new rows.
            Completions keep their keys, so with the same policy their tokens are those that a
            single call would have sampled.
        stop_when: called with [N] bool, True for the rows that have ended. If it returns True, this
            call ends and leaves the other rows unfinished; see `partial_completions`.

    Returns:
        A Rollout of numpy arrays, with T = prompt columns + `config.max_new_tokens` columns.
        Rewards are zero. Rows that `stop_when` left unfinished are marked as truncated.

    Raises:
        InputError: prompts, limits, biases or resumed completions that do not fit the config or the
            policy, or a policy that cannot verify drafts.
    """
    group_size = config.samples_per_prompt
    most = max(len(prompts), 1)
    if config.shapes_of is not None and len(prompts) > 1:
        most = max(math.prod(config.shapes_of) // group_size, 1)
        row_ids = np.arange(len(prompts) * group_size) if row_ids is None else row_ids
    parts = []
    for first in range(0, max(len(prompts), 1), most):
        is_last = first + most >= len(prompts)
        rows = slice(first * group_size, None if is_last else (first + most) * group_size)
        of_rows: Any = (x if x is None else x[rows] for x in (limits, row_ids, resumed))
        part = prompts[first : first + most]
        request = make_request(policy, params, part, key, config, *of_rows)
        draft = drafts.make_draft(policy, params, config, drafter, request.max_length)
        report = None
        if on_finished is not None:
            report = functools.partial(_report_rows, on_finished, rows.start)
        tracker = RowTracker(
            request, config.stop_ids, report, stop_at, on_segment, on_verified, stop_when
        )
        modes = _DecodeModes(policy, draft, config)
        outputs, prompt_routing = _decode(modes, params, request, config, mesh, tracker)
        rollout = _make_rollout(request, config, tracker, outputs, policy_step)
        if prompt_routing is not None:
            routing = _rows_of_routing(request, tracker, outputs, prompt_routing)
            rollout = replace(rollout, routing=routing)
        parts.append(replace(rollout, group_id=rollout.group_id + np.int32(first)))
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _report_rows(on_finished: OnFinished, first: int, finished: dict[int, list[int]]) -> None:
    """Report rows of a part whose first row is row `first` of the call."""
    on_finished({first + row: tokens for row, tokens in finished.items()})


def _make_rollout(
    request: DecodeRequest,
    config: SamplerConfig,
    tracker: RowTracker,
    outputs: Outputs,
    policy_step: int,
) -> Rollout:
    """Return the rollout of prompts and outputs [N, max_new_tokens]."""
    start = np.repeat(request.prompts.lengths, request.group_size)[:, None]
    count = tracker.counts[:, None]
    columns = np.arange(request.max_length)[None]
    action_mask = (columns >= start) & (columns < start + count)
    is_output = np.arange(config.max_new_tokens)[None] < count

    def with_actions(array: np.ndarray, values: np.ndarray) -> np.ndarray:
        array[action_mask] = values[is_output]
        return array

    prompts = np.pad(
        request.prompts.tokens, ((0, 0), (0, config.max_new_tokens)), constant_values=config.pad_id
    )
    zeros = np.zeros(action_mask.shape, np.float32)
    was_resumed = request.num_sampled > 0
    # Rollout's fields are declared as jax arrays; these numpy arrays are placed on devices later.
    fields: dict[str, Any] = {
        "tokens": with_actions(np.repeat(prompts, request.group_size, axis=0), outputs.tokens),
        "action_mask": action_mask,
        "log_probs": with_actions(zeros.copy(), outputs.log_probs),
        "behaviour_log_probs": with_actions(zeros.copy(), outputs.behaviour_log_probs),
        "rewards": zeros,
        "group_id": np.repeat(np.arange(len(prompts), dtype=np.int32), request.group_size),
        "policy_step": np.where(was_resumed, request.policy_step, policy_step).astype(np.int32),
        "birth_key": request.key_data,
        "truncated": ~tracker.stopped,
        "scored": np.ones(len(action_mask), bool),
    }
    return Rollout(**fields)


def _rows_of_routing(
    request: DecodeRequest, tracker: RowTracker, outputs: Outputs, prompt_routing: np.ndarray
) -> Any:
    """Return `Rollout.routing` of prompts [prompts, prompt columns, L k] and outputs.

    The last token of a prompt is read in the first decode step, and the last one of a row never.
    """
    size = prompt_routing.shape[2]
    of_outputs: Any = outputs.routing
    routing = np.zeros((len(tracker.counts), request.max_length, size), prompt_routing.dtype)
    for row, count in enumerate(tracker.counts):
        prompt = row // request.group_size
        last = request.prompts.lengths[prompt] - 1
        routing[row, :last] = prompt_routing[prompt, :last]
        routing[row, last : last + count] = of_outputs[row, :count]
    return routing


# --- the state of rows, on the host ---


class RowTracker:
    """Tracks which rows have ended, and calls the callbacks of `sample`."""

    def __init__(
        self,
        request: DecodeRequest,
        stop_ids: tuple[int, ...],
        on_finished: OnFinished | None,
        stop_at: StopAt | None,
        on_segment: Callable[[], None] | None,
        on_verified: OnVerified | None,
        stop_when: Callable[[np.ndarray], bool] | None,
    ):
        self._limits = request.limits
        self._stop_ids = stop_ids
        self._on_finished = on_finished
        self._stop_at = stop_at
        self._on_segment = on_segment
        self._on_verified = on_verified
        self._stop_when = stop_when
        self.needs_tokens = any(
            callback is not None for callback in (on_finished, stop_at, stop_when)
        )
        """True if `update` must be called after each segment, not only after the last."""
        self.ended = request.ended.copy()
        """[N] bool."""
        self.stopped = request.stopped.copy()
        """[N] bool: True if the row ended with a stop token or where `stop_at` said."""
        self.counts = request.num_sampled.astype(np.int64)
        """[N] int: tokens of each completion."""
        self._tokens = None
        if self.needs_tokens:
            max_new_tokens = request.max_length - request.prompts.tokens.shape[1]
            # Of a row, as many columns as it has tokens are set.
            self._tokens = np.empty((len(self.counts), max_new_tokens), np.int32)
            if request.outputs is not None:
                self._tokens[:] = request.outputs.tokens

    def report(self, status: SegmentStatus) -> None:
        """Call the callbacks that need no tokens."""
        if status.draft_counts is not None and self._on_verified is not None:
            self._on_verified(*status.draft_counts.tolist())
        if self._on_segment is not None:
            self._on_segment()

    def update(self, new_tokens: np.ndarray) -> None:
        """Find the rows that have ended, and report them.

        `new_tokens` is [N, n], the tokens of each row after its first `counts`, with `NO_TOKEN`
        where none is sampled yet.
        """
        rows = np.flatnonzero(~self.ended)
        num_new = (new_tokens[rows] != NO_TOKEN).sum(1)
        last_tokens = new_tokens[rows, np.maximum(num_new - 1, 0)]
        counts = self.counts[rows] + num_new
        stopped = (num_new > 0) & np.isin(last_tokens, self._stop_ids)
        ended = stopped | (counts >= self._limits[rows])
        with_new = np.flatnonzero(num_new)
        if self._tokens is not None:
            for i in with_new:
                row = rows[i]
                self._tokens[row, self.counts[row] : counts[i]] = new_tokens[row, : num_new[i]]
        if self._stop_at is not None:
            for i in with_new:
                end = self._stop_at(self._row(int(rows[i]), int(counts[i])))
                if end is not None:
                    counts[i] = end
                    ended[i] = True
                    stopped[i] = True
        self.counts[rows] = counts
        self.ended[rows] = ended
        self.stopped[rows] = stopped
        if self._on_finished is not None and ended.any():
            finished = rows[ended].tolist()
            self._on_finished({row: self._row(row, int(self.counts[row])) for row in finished})

    def _row(self, row: int, count: int) -> list[int]:
        assert self._tokens is not None
        return self._tokens[row, :count].tolist()

    def should_stop(self) -> bool:
        """Return True if the caller does not wait for the other rows."""
        return self._stop_when is not None and self._stop_when(self.ended.copy())


# --- segments ---


class _DecodeMode(NamedTuple):
    """Plain decoding, or decoding with drafts."""

    policy: Policy
    """The policy that fills caches."""
    draft: Draft | None
    max_segment_tokens: int
    """Largest number of tokens that a row samples in a segment."""


class _DecodeModes:
    """Chooses between plain decoding and, with few rows, decoding with drafts.

    While rows wait, all slots are busy. Drafts therefore start with the first pool or, once no row
    waits, when few enough rows remain.
    """

    def __init__(self, policy: Policy, draft: Draft | None, config: SamplerConfig):
        steps = config.segments.steps
        self._speculation = config.speculation
        self.plain = _DecodeMode(policy, None, steps)
        self._drafted = None
        if draft is not None:
            self._drafted = _DecodeMode(
                speculation.with_draft(policy, draft), draft, steps * (1 + draft.tokens)
            )

    def choose(self, rows: int) -> _DecodeMode:
        """Return the mode in which to decode this number of rows."""
        if self._drafted is not None and self._speculation.drafts(rows):
            return self._drafted
        return self.plain


def _decode(
    modes: _DecodeModes,
    params: Params,
    request: DecodeRequest,
    config: SamplerConfig,
    mesh: Mesh | None,
    tracker: RowTracker,
) -> tuple[Outputs, np.ndarray | None]:
    """Decode segments until all rows have ended, or enough have.

    Returns numpy outputs [N, max_new_tokens], and the routing of all prompts [prompts, prompt
    columns, L k] if it is recorded.
    """
    # Rows wait in queues, one per device, and take the slots that ended rows free. A pool holds the
    # prefilled prompts of the next rows; `status` is what the host knows of the slots.
    queues = DeviceQueues(request, config, mesh)
    routing = cache_ops.routing_shape(modes.plain.policy, params) if config.record_routing else None
    prompt_routing = None
    if routing is not None:
        size, dtype = routing
        prompt_routing = np.zeros((*request.prompts.tokens.shape, size), dtype)
    place = functools.partial(_place, mesh)
    num_slots = queues.slots_per_device * queues.devices
    mode = modes.choose(num_slots)
    outputs = _first_outputs(request, queues, config, mesh, routing)
    no_rows = np.zeros(queues.devices, np.int32)
    status = SegmentStatus(live=no_rows > 0, length=no_rows, row=no_rows, num_taken=no_rows)
    shape = _SlotsShape(0, 0)
    pool = None
    queue = None
    slots: Any = None
    while True:
        # 1. Prefill the prompts of the next rows, and let rows take the slots that are free.
        while queues.needs_next_pool(status.num_taken):
            contexts, host_queue = queues.next_pool(status.num_taken)
            tokens, lengths, prompts = map(place, contexts)
            pool = None  # Freed before the next takes memory.
            queue = jax.tree.map(place, host_queue)
            pool = slot_ops.prefill(mode.policy, mesh, params, tokens, lengths, prompts)
            if prompt_routing is not None:
                read = sharding.to_host(slot_ops.pool_routing(pool))
                prompt_routing[queues.contexts[queues.is_context]] = read[queues.is_context]
            if slots is None:
                cache_length = _cache_length(0, True, mode, request, config)
                shape = _SlotsShape(num_slots, cache_length)
                keys = place(request.keys(np.zeros(num_slots, int)))
                shardings = slot_ops.cache_shardings(mesh, pool.cache)
                slots = slot_ops.empty_slots(
                    mode.policy, config.of_programs(), params, keys, cache_length, shardings
                )
            slots, status = _fetch(slot_ops.refill(mesh, pool, queue, slots, place(no_rows)))
        # 2. Once no row waits, the pool is dropped, and few enough live rows decode by drafts.
        is_waiting = bool(np.any(queues.num_waiting(status.num_taken) > 0))
        if not (is_waiting or status.live.any()):
            break
        previous_mode = mode
        if not is_waiting:
            pool = None
            queue = None
            if mode.draft is None:
                mode = modes.choose(int(status.live.sum()))
        # 3. Fit slots and cache to what live rows need: fewer slots at the end, longer caches as
        # rows grow. Entering speculation fills the drafter's own cache from the texts so far.
        new_shape = _next_shape(status, is_waiting, shape, queues.devices, mode, request, config)
        if shape != new_shape:
            shape = new_shape
            shardings = slot_ops.cache_shardings(mesh, slots.cache)
            slots = slot_ops.resize_slots(
                previous_mode.policy, mesh, params, slots, *shape, shardings
            )
        if mode is not previous_mode:
            rows = queues.global_rows(sharding.to_host(slots.row))
            contexts = place(request.contexts.tokens[request.context[rows]])
            slots = speculation.start_speculation(
                mode.draft, mesh, shape.cache_length, params, slots, contexts, outputs
            )
        # 4. Decode a segment on the device. Rows of the pool replace those that end in it.
        slots, outputs, status = decode_loop.decode_segment(
            modes.plain.policy,
            config.of_programs(),
            mesh,
            params,
            pool,
            queue,
            slots,
            place(status.num_taken),
            outputs,
            mode.draft,
            np.bool_(config.greedy),
        )
        slots, status = _fetch((slots, status))
        # 5. Hand the new tokens to a tracker that reads along: it rewards complete groups while
        # others decode, and may end rows, whose slots are then free.
        tracker.report(status)
        if tracker.needs_tokens:
            counts = np.zeros(len(outputs.tokens), np.int32)
            counts[queues.places] = tracker.counts
            new_tokens = slot_ops.tokens_after(
                mesh, outputs.tokens, place(counts), mode.max_segment_tokens
            )
            tracker.update(sharding.to_host(new_tokens)[queues.places])
            if tracker.should_stop():
                break
            slots, status = _free_ended(slots, status, tracker.ended, queues, place)
            if pool is not None and not status.live.all():
                refilled = slot_ops.refill(mesh, pool, queue, slots, place(status.num_taken))
                slots, status = _fetch(refilled)
    # Without a reader, all tokens are handed over at once.
    outputs = jax.tree.map(lambda part: part[queues.places], sharding.to_host(outputs))
    if not tracker.needs_tokens:
        new_tokens = np.full_like(outputs.tokens, NO_TOKEN)
        for row, count in enumerate(tracker.counts):
            new_tokens[row, : new_tokens.shape[1] - count] = outputs.tokens[row, count:]
        tracker.update(new_tokens)
    return outputs, prompt_routing


def _first_outputs(
    request: DecodeRequest,
    queues: DeviceQueues,
    config: SamplerConfig,
    mesh: Mesh | None,
    routing: tuple[int, Any] | None,
) -> Outputs:
    """Return outputs with the tokens of resumed rows. For `routing` see `empty_outputs`."""
    rows = queues.rows_per_device * queues.devices
    outputs = slot_ops.empty_outputs(mesh, rows, config.max_new_tokens, routing)
    if request.outputs is None:
        return outputs

    def placed(part: Any) -> Array:
        padded = np.zeros((rows, *part.shape[1:]), part.dtype)
        padded[queues.places] = part
        return _place(mesh, padded)

    return Outputs(*(placed(part) for part in request.outputs if part is not None))


def _fetch(result: tuple[Slots, SegmentStatus]) -> tuple[Slots, SegmentStatus]:
    """Copy the status, but not the slots, to the host."""
    slots, status = result
    return slots, SegmentStatus(*jax.device_get(status))


def _place(mesh: Mesh | None, rows: Any) -> Array:
    """Put rows on the devices. `rows` has the rows of all devices, one device after the other."""
    if mesh is None:
        return jnp.asarray(rows)
    return sharding.put(rows, NamedSharding(mesh, PartitionSpec(slot_axes(mesh))))


def _free_ended(
    slots: Slots,
    status: SegmentStatus,
    ended: np.ndarray,
    queues: DeviceQueues,
    place: Callable[[Any], Array],
) -> tuple[Slots, SegmentStatus]:
    """Free the slots of rows that `stop_at` ended. `ended` is [N] bool."""
    is_freed = status.live & ended[queues.global_rows(status.row)]
    if not is_freed.any():
        return slots, status
    slots = slot_ops.free_slots(slots, place(is_freed))
    return slots, status._replace(live=status.live & ~is_freed)


class _SlotsShape(NamedTuple):
    slots: int
    cache_length: int
    """Tokens that the cache has room for."""


def _next_shape(
    status: SegmentStatus,
    is_waiting: bool,
    shape: _SlotsShape,
    devices: int,
    mode: _DecodeMode,
    request: DecodeRequest,
    config: SamplerConfig,
) -> _SlotsShape:
    """Return the shape of the slots for the next segment.

    Once no row waits, slots shrink to powers of two, by at least half.
    """
    longest = int(np.max(status.length, where=status.live, initial=0))
    most_live = int(status.live.reshape(devices, -1).sum(1).max())
    slots_per_device = max(1 << (most_live - 1).bit_length(), config.segments.min_slots_per_device)
    slots = devices * slots_per_device
    if is_waiting or 2 * slots > shape.slots:
        slots = shape.slots
    return _SlotsShape(slots, _cache_length(longest, is_waiting, mode, request, config))


def _cache_length(
    longest: int, is_waiting: bool, mode: _DecodeMode, request: DecodeRequest, config: SamplerConfig
) -> int:
    """Return the number of tokens that the cache must have room for in the next segment.

    It is rounded up to one of few numbers, so that few programs are compiled. `longest` is the
    number of tokens of the longest row in a slot.
    """
    prompt_width = request.prompts.tokens.shape[1]
    context_width = request.contexts.tokens.shape[1]
    if is_waiting:
        longest = max(longest, context_width)
    needed = longest + mode.max_segment_tokens - prompt_width
    new_tokens = config.segments.initial_cache_tokens
    while new_tokens < needed:
        new_tokens *= 2
    return min(prompt_width + new_tokens, request.max_cache_length)
