"""The host's part of the sampler: deals requests out, runs segments, and looks at rows at their borders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl import sharding
from tpu_rl.errors import InputError
from tpu_rl.sampler import segments, speculation
from tpu_rl.sampler import slots as device
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.drawing import row_keys
from tpu_rl.sampler.slots import BATCH_AXES, NO_TOKEN, Border, Drawn, Queue, Slots
from tpu_rl.sampler.speculation import Draft
from tpu_rl.types import Array, Params, Policy, Rollout

OnFinished = Callable[[dict[int, list[int]]], None]
"""What is told which rows have ended since the last border: row -> the tokens of its completion."""

StopAt = Callable[[list[int]], int | None]
"""(tokens of a completion so far) -> how many of them it ends with, None if it goes on. What it says must not depend on
how far the completion has come since."""

OnVerified = Callable[[int, int], None]
"""(drafts of rows that were verified since the last border, tokens that this drew)."""


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
    at_border: Callable[[], None] | None = None,
    drafter: Policy | None = None,
    on_verified: OnVerified | None = None,
) -> Rollout:
    """Draws `samples_per_prompt` completions of each prompt -> Rollout of numpy arrays.

    prompts: ragged lists of token ids. Rows of one prompt stand together, in the order of the prompts.
    key: the use and the step are folded in already (`run_key`).
    limits: [N], most new tokens of each row; None: `max_new_tokens` for all. Rows of high limits are begun first.
    row_ids: [N], what is folded into each row's key; None: 0 .. N-1.
    mesh: spreads rows over its "data", "fsdp" and "expert"; None: rows go where the params are.
    on_finished: called at the borders of segments, with each row once: the others are still being decoded.
    stop_at: called there too; what a row has drawn past its end is dropped, so that segments leave no trace.
    at_border: called there too; what it raises ends the sampling.
    drafter: the small model of `config.speculation`, which reads its part of the same params.
    on_verified: called there too, while rows are drafted.
    N is prompts times samples_per_prompt, T is prompt_length + max_new_tokens. Rewards are zero.
    Raises InputError for prompts, limits or biases that do not fit the configuration or the policy, and where
    speculation cannot be done.
    """
    asked = _ask(policy, params, prompts, key, config, limits, row_ids)
    draft = speculation.make_draft(policy, params, config, drafter, asked.tokens.shape[1] + config.max_new_tokens)
    look = _Look(asked.limits, config.stop_ids, on_finished, stop_at, at_border, on_verified)
    drawn = _decode(_Programs(policy, draft, config), params, asked, config, mesh, look)
    return _assemble(asked, config, look, drawn, policy_step)


def _assemble(asked: _Asked, config: SamplerConfig, look: _Look, drawn: Drawn, policy_step: int) -> Rollout:
    """Prompts and what was drawn [N, max_new_tokens], side by side."""
    begins, counts = np.repeat(asked.lengths, asked.group), look.counts
    columns = np.arange(asked.tokens.shape[1] + config.max_new_tokens)[None]
    mask = (columns >= begins[:, None]) & (columns < (begins + counts)[:, None])
    kept = np.arange(config.max_new_tokens)[None] < counts[:, None]

    def place(values: np.ndarray, around: np.ndarray) -> np.ndarray:
        around[mask] = values[kept]
        return around

    whole = np.pad(asked.tokens, ((0, 0), (0, config.max_new_tokens)), constant_values=config.pad_id)
    arrays: dict[str, Any] = {
        "tokens": place(drawn.tokens, np.repeat(whole, asked.group, axis=0)),
        "action_mask": mask,
        "log_probs": place(drawn.log_probs, np.zeros(mask.shape, np.float32)),
        "behaviour_log_probs": place(drawn.behaviour_log_probs, np.zeros(mask.shape, np.float32)),
        "rewards": np.zeros(mask.shape, np.float32),
        "group_id": np.repeat(np.arange(len(asked.tokens), dtype=np.int32), asked.group),
        "policy_step": np.full(len(mask), policy_step, np.int32),
        "birth_key": np.asarray(jax.random.key_data(asked.keys)),
        "truncated": ~look.stopped,
        "scored": np.ones(len(mask), bool),
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


# --- what is asked -------------------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """All that is to be decoded."""

    tokens: np.ndarray
    """[prompts, prompt_length] int32."""
    lengths: np.ndarray
    """[prompts] int32."""
    limits: np.ndarray
    """[N] int32."""
    keys: Array
    """[N] keys."""
    group: int


def _ask(
    policy: Policy,
    params: Params,
    prompts: Sequence[Sequence[int]],
    key: Array,
    config: SamplerConfig,
    limits: Sequence[int] | np.ndarray | None,
    row_ids: Sequence[int] | np.ndarray | None,
) -> _Asked:
    """The arguments of `sample` as arrays, checked."""
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
    if config.logit_bias and max(config.logit_bias)[0] >= (size := device.vocabulary_size(policy, params)):
        raise InputError(f"SamplerConfig.logit_bias names token {max(config.logit_bias)[0]}", why=f"there are {size}")
    return _Asked(tokens, lengths, limits, row_keys(key, row_ids), group)


class _Shares:
    """Which rows each of D devices decodes, in which order, and which of them wait.

    Rows stay in blocks, so that a group is on one device or few. A pool has no more prompts than there are slots, so
    that it takes less memory than they do.
    """

    def __init__(self, asked: _Asked, config: SamplerConfig, mesh: Mesh | None):
        rows = np.arange(len(asked.limits))
        self.asked, self.devices = asked, device.device_count(mesh)
        self.size = -(-len(rows) // self.devices)
        """Rows of a device's outputs."""
        blocks = [rows[i * self.size : (i + 1) * self.size] for i in range(self.devices)]
        self._orders = [block[np.argsort(-asked.limits[block], kind="stable")] for block in blocks]
        self.slots = -(-min(config.max_rows, len(rows)) // self.devices)
        """Of a device."""
        prompts = max(len(np.unique(block // asked.group)) for block in blocks)
        self._prompts = -(-prompts // -(-prompts // self.slots))
        # As many of a device in each pool, so that one program serves all.
        self._given, self._sizes = np.zeros((2, self.devices), np.int32)
        """Rows that earlier queues gave, and those in the one that is there."""

    def waiting(self, taken: np.ndarray) -> np.ndarray:
        """[D] int: rows without a slot yet, when so many of each queue are taken [D]."""
        return np.array([len(order) for order in self._orders]) - self._given - taken

    def rows(self, row: np.ndarray) -> np.ndarray:
        """Rows [B] of the devices' outputs -> which of all rows that are asked for."""
        block = np.repeat(np.arange(self.devices) * self.size, len(row) // self.devices)
        return np.minimum(block + row, len(self.asked.limits) - 1)

    def pool_is_over(self, taken: np.ndarray) -> bool:
        """Whether a device has taken all of its queue, of which so many are taken [D], and has more rows."""
        return bool(np.any((taken >= self._sizes) & (self.waiting(self._sizes) > 0)))

    def next_pool(self, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray, Queue]:
        """(tokens [D * prompts, prompt_length], lengths [D * prompts], queue) of what each device takes next."""
        asked, self._given = self.asked, self._given + taken
        places = min(self.size, self._prompts * asked.group)
        prompts = np.full((self.devices, self._prompts), -1)
        rows, prompt = np.zeros((2, self.devices, places), np.int32)
        for i, (order, given) in enumerate(zip(self._orders, self._given, strict=True)):
            ahead = order[given : given + places] // asked.group
            is_first = np.isin(np.arange(len(ahead)), np.unique(ahead, return_index=True)[1])
            count = int(np.sum(np.cumsum(is_first) <= self._prompts))
            unique, prompt[i, :count] = np.unique(ahead[:count], return_inverse=True)
            prompts[i, : len(unique)], rows[i, :count] = unique, order[given : given + count]
            self._sizes[i] = count
        flat, block = rows.reshape(-1), np.repeat(np.arange(self.devices) * self.size, places)
        queue = Queue(
            row=np.maximum(flat - block, 0).astype(np.int32),
            prompt=prompt.reshape(-1),
            limit=asked.limits[flat],
            key=asked.keys[flat],
            size=self._sizes.copy(),
            more=self.waiting(self._sizes) > 0,
        )
        chosen = np.maximum(prompts, 0).reshape(-1)
        return asked.tokens[chosen], np.where(prompts.reshape(-1) < 0, 1, asked.lengths[chosen]), queue


# --- what the host sees --------------------------------------------------------------------------------------------


class _Look:
    """What is known of each row, and who is told of it."""

    def __init__(
        self,
        limits: np.ndarray,
        stop_ids: tuple[int, ...],
        on_finished: OnFinished | None,
        stop_at: StopAt | None,
        at_border: Callable[[], None] | None,
        on_verified: OnVerified | None,
    ):
        self._at_border, self._on_verified = at_border, on_verified
        self._limits, self._stop_ids, self._on_finished, self._stop_at = limits, stop_ids, on_finished, stop_at
        self.each_border = on_finished is not None or stop_at is not None
        self.ended = np.zeros(len(limits), bool)
        self.stopped = np.zeros(len(limits), bool)
        """Ended by a stop token or by `stop_at`."""
        self.counts = np.zeros(len(limits), np.int64)
        """Tokens of each completion."""

    def at_border(self, border: Border) -> None:
        if border.tally is not None and self._on_verified is not None:
            self._on_verified(*border.tally.tolist())
        if self._at_border is not None:
            self._at_border()

    def __call__(self, tokens: np.ndarray) -> None:
        """tokens [N, max_new_tokens]: all that are drawn by now."""
        going = np.flatnonzero(~self.ended)
        counts = (tokens[going] != NO_TOKEN).sum(1)
        last = tokens[going, np.maximum(counts - 1, 0)]
        stopped = (counts > 0) & np.isin(last, self._stop_ids)
        ended = stopped | (counts >= self._limits[going])
        if self._stop_at is not None:
            for i, row in enumerate(going):
                end = self._stop_at(tokens[row, : counts[i]].tolist())
                if end is not None:
                    counts[i], ended[i], stopped[i] = end, True, True
        self.counts[going], self.ended[going], self.stopped[going] = counts, ended, stopped
        if self._on_finished is not None and ended.any():
            self._on_finished({int(row): tokens[row, : self.counts[row]].tolist() for row in going[ended]})


# --- segments ------------------------------------------------------------------------------------------------------


class _Program(NamedTuple):
    """How segments are decoded."""

    policy: Policy
    """What fills caches."""
    draft: Draft | None
    reach: int
    """Most tokens that a row draws in a segment."""


class _Programs:
    """Plain decoding; with a draft, speculation where no more rows are decoded than should be drafted.

    Rows that wait keep all slots busy: so it is either done from the first pool on, or begun when nothing waits.
    """

    def __init__(self, policy: Policy, draft: Draft | None, config: SamplerConfig):
        steps, how = config.borders.steps, config.speculation
        self.plain, self._most_rows = _Program(policy, None, steps), how.most_rows
        self._drafted = draft and _Program(speculation.together(policy, draft), draft, steps * (1 + how.tokens))

    def of(self, rows: int) -> _Program:
        return self._drafted if self._drafted and rows <= self._most_rows else self.plain


def _decode(
    programs: _Programs, params: Params, asked: _Asked, config: SamplerConfig, mesh: Mesh | None, look: _Look
) -> Drawn:
    """Segments until all rows have ended -> numpy outputs [N, max_new_tokens]."""
    shares, place = _Shares(asked, config, mesh), functools.partial(_place, mesh)
    at_once = shares.slots * shares.devices
    program = programs.of(at_once)
    drawn = device.empty_outputs(mesh, shares.size * shares.devices, config.max_new_tokens)
    none = np.zeros(shares.devices, np.int32)
    shape, pool, queue, border = (0, 0), None, None, Border(none > 0, none, none, none)
    slots: Any = None
    while True:
        while shares.pool_is_over(border.taken):
            tokens, lengths, queue = jax.tree.map(place, shares.next_pool(border.taken))
            pool = device.prefill(program.policy, mesh, params, tokens, lengths)
            if slots is None:
                shape = (at_once, _cache_length(0, True, program.reach, asked, config))
                keys, cut = place(asked.keys[np.zeros(at_once, int)]), device.cut(mesh, pool.cache)
                slots = device.empty_slots(program.policy, config, params, keys, shape[1], cut)
            slots, border = _read(device.pull(mesh, pool, queue, slots, place(none)))
        waits = bool(np.any(shares.waiting(border.taken) > 0))
        if not (waits or border.live.any()):
            break
        before = program
        if not waits:
            pool = queue = None
            program = before if before.draft else programs.of(int(border.live.sum()))
        if shape != (wanted := _shape(border, waits, shape, shares.devices, program.reach, asked, config)):
            cut, shape = device.cut(mesh, slots.cache), wanted
            slots = device.fit(before.policy, mesh, params, slots, *shape, cut)
        if program is not before:
            prompts = place(asked.tokens[shares.rows(sharding.to_host(slots.row)) // asked.group])
            slots = speculation.begin(program.draft, mesh, shape[1], params, slots, prompts, drawn)
        how = (config, mesh, params, pool, queue, slots, place(border.taken), drawn, program.draft)
        slots, drawn, border = segments.decode_segment(programs.plain.policy, *how)
        slots, border = _read((slots, border))
        look.at_border(border)
        if look.each_border:
            look(sharding.to_host(drawn.tokens)[: len(asked.limits)])
            slots, border = _release(slots, border, look.ended, shares, place)
            if pool is not None and not border.live.all():
                slots, border = _read(device.pull(mesh, pool, queue, slots, place(border.taken)))
    drawn = jax.tree.map(lambda part: part[: len(asked.limits)], sharding.to_host(drawn))
    if not look.each_border:
        look(drawn.tokens)
    return drawn


def _read(result: tuple[Slots, Border]) -> tuple[Slots, Border]:
    return result[0], Border(*jax.device_get(result[1]))


def _place(mesh: Mesh | None, rows: Any) -> Array:
    """An array of all devices' rows, one after the other, with each row on its device."""
    return jnp.asarray(rows) if mesh is None else sharding.put(rows, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))


def _release(
    slots: Slots, border: Border, ended: np.ndarray, shares: _Shares, place: Callable[[Any], Array]
) -> tuple[Slots, Border]:
    """Frees the slots whose rows `stop_at` ended."""
    stopped = border.live & ended[shares.rows(border.row)]
    if not stopped.any():
        return slots, border
    return device.release(slots, place(stopped)), border._replace(live=border.live & ~stopped)


def _shape(
    border: Border, waits: bool, now: tuple[int, int], devices: int, reach: int, asked: _Asked, config: SamplerConfig
) -> tuple[int, int]:
    """(slots, tokens of the cache) that the next segment needs."""
    longest = int(np.max(border.length, where=border.live, initial=0))
    live = int(border.live.reshape(devices, -1).sum(1).max())
    fewer = devices * max(1 << (live - 1).bit_length(), config.borders.smallest_batch)
    return fewer if not waits and 2 * fewer <= now[0] else now[0], _cache_length(longest, waits, reach, asked, config)


def _cache_length(longest: int, waits: bool, reach: int, asked: _Asked, config: SamplerConfig) -> int:
    """Tokens that a cache must have room for in the next segment, in which no row draws more than `reach`, rounded up
    to one of few sizes."""
    width = asked.tokens.shape[1]
    needed = max(longest, width if waits else 0) + reach - width
    new = config.borders.smallest_cache
    while new < needed:
        new *= 2
    return width + min(new, config.max_new_tokens)
