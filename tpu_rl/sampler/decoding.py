"""The host's part of the sampler: runs segments, and looks at rows at their borders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl import sharding
from tpu_rl.sampler import drafts, segments, speculation
from tpu_rl.sampler import slots as device
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.drafts import Draft
from tpu_rl.sampler.requests import Asked, Begun, Shares, ask
from tpu_rl.sampler.slots import NO_TOKEN, Border, Drawn, Slots, slot_axes
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
    begun: Sequence[Begun | None] | None = None,
    enough: Callable[[np.ndarray], bool] | None = None,
) -> Rollout:
    """Draws `samples_per_prompt` completions of each prompt -> Rollout of numpy arrays.

    prompts: ragged lists of token ids. Rows of one prompt stand together, in the order of the prompts.
    key: the use and the step are folded in already (`run_key`).
    limits: [N], most new tokens of each row; None: `max_new_tokens` for all. Rows of high limits are begun first.
    row_ids: [N], what is folded into each row's key; None: 0 .. N-1.
    mesh: spreads rows over its `slot_axes`; None: rows go where the params are.
    on_finished: called at the borders of segments, with each row once: the others are still being decoded.
    stop_at: called there too; what a row has drawn past its end is dropped, so that segments leave no trace.
    at_border: called there too; what it raises ends the sampling.
    drafter: the small model of `config.speculation`, which reads its part of the same params.
    on_verified: called there too, while rows are drafted.
    begun: [N], completions that an earlier call left unfinished, or whole, in their rows; None where a row is new. They
        keep their keys, so under the same policy each draws what it would have drawn in one piece.
    enough: called there too, with the rows that have ended [N] bool: where it says so, the others stay unfinished.
    N is prompts times samples_per_prompt, T is prompt_length + max_new_tokens. Rewards are zero.
    Raises InputError for prompts, limits or biases that do not fit the configuration or the policy, and where
    speculation cannot be done.
    """
    asked = ask(policy, params, prompts, key, config, limits, row_ids, begun)
    draft = drafts.make_draft(policy, params, config, drafter, asked.most_tokens)
    look = _Look(asked, config.stop_ids, on_finished, stop_at, at_border, on_verified, enough)
    drawn = _decode(_Programs(policy, draft, config), params, asked, config, mesh, look)
    return _assemble(asked, config, look, drawn, policy_step)


def _assemble(asked: Asked, config: SamplerConfig, look: _Look, drawn: Drawn, policy_step: int) -> Rollout:
    """Prompts and what was drawn [N, max_new_tokens], side by side."""
    begins, counts = np.repeat(asked.prompts.lengths, asked.group), look.counts
    columns = np.arange(asked.most_tokens)[None]
    mask = (columns >= begins[:, None]) & (columns < (begins + counts)[:, None])
    kept = np.arange(config.max_new_tokens)[None] < counts[:, None]

    def place(values: np.ndarray, around: np.ndarray) -> np.ndarray:
        around[mask] = values[kept]
        return around

    whole = np.pad(asked.prompts.tokens, ((0, 0), (0, config.max_new_tokens)), constant_values=config.pad_id)
    arrays: dict[str, Any] = {
        "tokens": place(drawn.tokens, np.repeat(whole, asked.group, axis=0)),
        "action_mask": mask,
        "log_probs": place(drawn.log_probs, np.zeros(mask.shape, np.float32)),
        "behaviour_log_probs": place(drawn.behaviour_log_probs, np.zeros(mask.shape, np.float32)),
        "rewards": np.zeros(mask.shape, np.float32),
        "group_id": np.repeat(np.arange(len(whole), dtype=np.int32), asked.group),
        "policy_step": np.where(asked.counts > 0, asked.policy_step, policy_step).astype(np.int32),
        "birth_key": np.asarray(jax.random.key_data(asked.keys)),
        "truncated": ~look.stopped,
        "scored": np.ones(len(mask), bool),
    }
    return Rollout(**arrays)


# --- what the host sees --------------------------------------------------------------------------------------------


class _Look:
    """What is known of each row, and who is told of it."""

    def __init__(
        self,
        asked: Asked,
        stop_ids: tuple[int, ...],
        on_finished: OnFinished | None,
        stop_at: StopAt | None,
        at_border: Callable[[], None] | None,
        on_verified: OnVerified | None,
        enough: Callable[[np.ndarray], bool] | None,
    ):
        self._at_border, self._on_verified, self._enough = at_border, on_verified, enough
        self._limits, self._stop_ids, self._on_finished, self._stop_at = asked.limits, stop_ids, on_finished, stop_at
        self.each_border = on_finished is not None or stop_at is not None or enough is not None
        self.ended, self.stopped = asked.ended.copy(), asked.stopped.copy()
        """The latter: ended by a stop token or by `stop_at`."""
        self.counts = asked.counts.astype(np.int64)
        """Tokens of each completion."""

    def at_border(self, border: Border) -> None:
        if border.tally is not None and self._on_verified is not None:
            self._on_verified(*border.tally.tolist())
        if self._at_border is not None:
            self._at_border()

    @property
    def is_enough(self) -> bool:
        return self._enough is not None and self._enough(self.ended.copy())

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
        steps, self._how = config.borders.steps, config.speculation
        self.plain = _Program(policy, None, steps)
        self._drafted = draft and _Program(speculation.together(policy, draft), draft, steps * (1 + self._how.tokens))

    def of(self, rows: int) -> _Program:
        return self._drafted if self._drafted and self._how.drafts(rows) else self.plain


def _decode(
    programs: _Programs, params: Params, asked: Asked, config: SamplerConfig, mesh: Mesh | None, look: _Look
) -> Drawn:
    """Segments until all rows have ended, or enough have -> numpy outputs [N, max_new_tokens]."""
    shares, place = Shares(asked, config, mesh), functools.partial(_place, mesh)
    at_once = shares.slots * shares.devices
    program = programs.of(at_once)
    drawn = device.empty_outputs(mesh, shares.size * shares.devices, config.max_new_tokens)
    if asked.drawn is not None:
        more = shares.size * shares.devices - len(asked.limits)
        drawn = Drawn(*(place(np.pad(part, ((0, more), (0, 0)))) for part in asked.drawn))
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
            prompts = place(asked.texts.tokens[asked.text[shares.rows(sharding.to_host(slots.row))]])
            slots = speculation.begin(program.draft, mesh, shape[1], params, slots, prompts, drawn)
        how = (config, mesh, params, pool, queue, slots, place(border.taken), drawn, program.draft)
        slots, drawn, border = segments.decode_segment(programs.plain.policy, *how)
        slots, border = _read((slots, border))
        look.at_border(border)
        if look.each_border:
            look(sharding.to_host(drawn.tokens)[: len(asked.limits)])
            if look.is_enough:
                break
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
    if mesh is None:
        return jnp.asarray(rows)
    return sharding.put(rows, NamedSharding(mesh, PartitionSpec(slot_axes(mesh))))


def _release(
    slots: Slots, border: Border, ended: np.ndarray, shares: Shares, place: Callable[[Any], Array]
) -> tuple[Slots, Border]:
    """Frees the slots whose rows `stop_at` ended."""
    stopped = border.live & ended[shares.rows(border.row)]
    if not stopped.any():
        return slots, border
    return device.release(slots, place(stopped)), border._replace(live=border.live & ~stopped)


def _shape(
    border: Border, waits: bool, now: tuple[int, int], devices: int, reach: int, asked: Asked, config: SamplerConfig
) -> tuple[int, int]:
    """(slots, tokens of the cache) that the next segment needs."""
    longest = int(np.max(border.length, where=border.live, initial=0))
    live = int(border.live.reshape(devices, -1).sum(1).max())
    fewer = devices * max(1 << (live - 1).bit_length(), config.borders.smallest_batch)
    return fewer if not waits and 2 * fewer <= now[0] else now[0], _cache_length(longest, waits, reach, asked, config)


def _cache_length(longest: int, waits: bool, reach: int, asked: Asked, config: SamplerConfig) -> int:
    """Tokens that a cache must have room for in the next segment, in which no row draws more than `reach`, rounded up
    to one of few sizes."""
    width, widest = asked.prompts.tokens.shape[1], asked.texts.tokens.shape[1]
    needed = max(longest, widest if waits else 0) + reach - width
    new = config.borders.smallest_cache
    while new < needed:
        new *= 2
    return min(width + new, asked.room)
