"""What is asked of the sampler, and which part of it each device does."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_rl.errors import InputError
from tpu_rl.sampler import slots as device
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.drawing import row_keys
from tpu_rl.sampler.slots import NO_TOKEN, Drawn, Queue
from tpu_rl.types import Array, Params, Policy, Rollout


class Begun(NamedTuple):
    """A completion that is there up to some token."""

    tokens: np.ndarray
    """[n] int32."""
    log_probs: np.ndarray
    """[n] float32, of each token; as the next, under the policy that drew it."""
    behaviour_log_probs: np.ndarray
    """[n] float32."""
    birth_key: np.ndarray
    """[2] uint32."""
    policy_step: int
    ended: bool
    truncated: bool
    """It ended at its limit."""


def begun(rollout: Rollout, ended: np.ndarray) -> list[Begun]:
    """The rows of a rollout, of which those that have ended [N] are whole, to be given to a later call."""
    found = []
    for row, mask in enumerate(np.asarray(rollout.action_mask)):
        parts = (rollout.tokens, rollout.log_probs, rollout.behaviour_log_probs)
        tokens, log_probs, behaviour = (np.asarray(part)[row, mask] for part in parts)
        key, step, is_whole = np.asarray(rollout.birth_key)[row], int(rollout.policy_step[row]), bool(ended[row])
        found.append(
            Begun(tokens, log_probs, behaviour, key, step, is_whole, is_whole and bool(rollout.truncated[row]))
        )
    return found


_PACKED = {  # the fields of `Begun`, in their order
    "tokens": np.int32,
    "log_probs": np.float32,
    "behaviour_log_probs": np.float32,
    "birth_key": np.uint32,
    "policy_step": np.int32,
    "ended": np.bool_,
    "truncated": np.bool_,
}


def pack(completions: Sequence[Begun]) -> dict[str, Any]:
    """JSON values: how many tokens each has, and of each field the bytes of all, in base 64."""
    packed: dict[str, Any] = {"counts": [len(one.tokens) for one in completions]}
    for place, (name, kind) in enumerate(_PACKED.items()):
        values = [np.atleast_1d(np.asarray(one[place], kind)) for one in completions]
        packed[name] = base64.b64encode(np.concatenate([np.zeros(0, kind), *values]).tobytes()).decode()
    return packed


def unpack(packed: dict[str, Any]) -> list[Begun]:
    """What `pack` was given."""
    ends = np.cumsum(packed["counts"], dtype=np.int64)[:-1]
    columns = {name: np.frombuffer(base64.b64decode(packed[name]), kind) for name, kind in _PACKED.items()}
    by_token = [np.split(columns[name], ends) for name in ("tokens", "log_probs", "behaviour_log_probs")]
    rows = zip(*by_token, columns["birth_key"].reshape(len(packed["counts"]), -1), strict=True)
    flags = zip(*(columns[name].tolist() for name in ("policy_step", "ended", "truncated")), strict=True)
    return [Begun(*row, *rest) for row, rest in zip(rows, flags, strict=True)]


class Texts(NamedTuple):
    """Token sequences, padded."""

    tokens: np.ndarray
    """[texts, longest] int32."""
    lengths: np.ndarray
    """[texts] int32."""


class Asked(NamedTuple):
    """All that is to be decoded."""

    prompts: Texts
    group: int
    """Completions of each prompt, N in all."""
    texts: Texts
    """What is to be prefilled: the prompts, and behind them prompts with what is begun of a completion."""
    text: np.ndarray
    """[N] int: which of them the row continues."""
    limits: np.ndarray
    """[N] int32: most tokens of each completion."""
    keys: Array
    """[N] keys."""
    most_tokens: int
    """Of a prompt with its completion."""
    room: int
    """Tokens of the largest cache: as many, rounded up to whole blocks of 128 where prompts are such blocks."""
    counts: np.ndarray
    """[N] int32: tokens that the completion has."""
    ended: np.ndarray
    """[N] bool: it has all."""
    stopped: np.ndarray
    """[N] bool: and did not run into its limit."""
    policy_step: np.ndarray
    """[N] int32: when it was begun."""
    drawn: Drawn | None
    """[N, max_new_tokens]: what is begun; None where all rows are new."""


def ask(
    policy: Policy,
    params: Params,
    prompts: Sequence[Sequence[int]],
    key: Array,
    config: SamplerConfig,
    limits: Sequence[int] | np.ndarray | None,
    row_ids: Sequence[int] | np.ndarray | None,
    begun: Sequence[Begun | None] | None,
) -> Asked:
    """The arguments of `sample` as arrays, checked."""
    group = config.samples_per_prompt
    rows = len(prompts) * group
    padded = _pad_prompts(prompts, config)
    limits = np.full(rows, config.max_new_tokens, np.int32) if limits is None else np.asarray(limits, np.int32)
    row_ids = np.arange(rows) if row_ids is None else np.asarray(row_ids)
    before: list[Begun | None] = [None] * rows if begun is None else list(begun)
    for name, length in (("limits", limits.shape), ("row_ids", row_ids.shape), ("begun", (len(before),))):
        if length != (rows,):
            why = f"{len(prompts)} prompts with {group} completions each are {rows} rows"
            raise InputError(f"sample: {name} has shape {length}", why=why, fix="give one value a row")
    if np.any((limits < 1) | (limits > config.max_new_tokens)):
        why = f"each row may draw 1 to max_new_tokens = {config.max_new_tokens} tokens"
        raise InputError(f"sample: limits go from {limits.min()} to {limits.max()}", why=why, fix="change the limits")
    if config.logit_bias and max(config.logit_bias)[0] >= (size := device.vocabulary_size(policy, params)):
        raise InputError(f"SamplerConfig.logit_bias names token {max(config.logit_bias)[0]}", why=f"there are {size}")
    width = padded.tokens.shape[1]
    new = Asked(
        prompts=padded,
        group=group,
        texts=padded,
        text=np.repeat(np.arange(len(prompts)), group),
        limits=limits,
        keys=row_keys(key, row_ids),
        most_tokens=width + config.max_new_tokens,
        room=width + config.max_new_tokens,
        counts=np.zeros(rows, np.int32),
        ended=np.zeros(rows, bool),
        stopped=np.zeros(rows, bool),
        policy_step=np.zeros(rows, np.int32),
        drawn=None,
    )
    return new if not any(before) else _with_begun(new, before, config)


def _pad_prompts(prompts: Sequence[Sequence[int]], config: SamplerConfig) -> Texts:
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
    return _pad(prompts, width, config.pad_id)


def _pad(texts: Sequence[Sequence[int]], width: int, pad_id: int) -> Texts:
    tokens = np.full((len(texts), width), pad_id, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return Texts(tokens, np.array([len(text) for text in texts], np.int32))


def _with_begun(asked: Asked, before: Sequence[Begun | None], config: SamplerConfig) -> Asked:
    """What is begun stands in the outputs; what is not at its end is read with its prompt, and continued.

    The width of what is read is the prompts', doubled as often as the longest needs.
    """
    shape = (len(before), config.max_new_tokens)
    drawn = Drawn(np.full(shape, NO_TOKEN, np.int32), *np.zeros((2, *shape), np.float32))
    texts = [row[:length].tolist() for row, length in zip(*asked.prompts, strict=True)]
    key_data = np.array(jax.random.key_data(asked.keys))
    asked = asked._replace(text=asked.text.copy(), drawn=drawn)
    for row, one in enumerate(before):
        if one is None:
            continue
        count = len(one.tokens)
        if count + (not one.ended) > asked.limits[row]:
            why = f"{count} tokens are there, and {asked.limits[row]} is their limit"
            raise InputError("sample: a completion that is to go on is too long", where=f"row {row}", why=why)
        for part, values in zip(drawn, (one.tokens, one.log_probs, one.behaviour_log_probs), strict=True):
            part[row, :count] = values
        key_data[row], asked.policy_step[row] = one.birth_key, one.policy_step
        asked.counts[row], asked.ended[row], asked.stopped[row] = count, one.ended, one.ended and not one.truncated
        if count and not one.ended:
            texts.append(texts[row // asked.group] + np.asarray(one.tokens).tolist())
            asked.text[row] = len(texts) - 1
    width, longest = asked.prompts.tokens.shape[1], max(map(len, texts))
    while width < longest:
        width *= 2
    room = -(-asked.room // 128) * 128 if asked.prompts.tokens.shape[1] % 128 == 0 else asked.room
    keys = jax.random.wrap_key_data(jnp.asarray(key_data), impl=jax.random.key_impl(asked.keys))
    return asked._replace(texts=_pad(texts, min(width, room), config.pad_id), keys=keys, room=room)


class Shares:
    """Which rows each of D devices decodes, in which order, and which of them wait.

    Rows stay in blocks, so that a group is on one device or few. A pool has no more prompts than there are slots, so
    that it takes less memory than they do. What was begun earlier goes first, then what may become longest; it has
    pools of its own, so that it alone is read in its greater width, and no more tokens at once than of prompts. Where
    few rows are looked up in one another from the start, those of a prompt go one after another.
    """

    def __init__(self, asked: Asked, config: SamplerConfig, mesh: Mesh | None):
        rows = np.arange(len(asked.limits))
        self.asked, self.devices = asked, device.device_count(mesh)
        self.size = -(-len(rows) // self.devices)
        """Rows of a device's outputs."""
        blocks = [rows[i * self.size : (i + 1) * self.size] for i in range(self.devices)]
        orders = [block[np.lexsort((-asked.limits[block], asked.counts[block] == 0))] for block in blocks]
        self._orders = [order[~asked.ended[order]] for order in orders]
        self.slots = -(-min(config.max_rows, len(rows)) // self.devices)
        """Of a device."""
        self._is_begun = asked.counts > 0
        width, wider = asked.prompts.tokens.shape[1], asked.texts.tokens.shape[1]
        # As many of a device in each pool of a kind, so that one program serves all.
        self._new = self._most_texts(~self._is_begun, self.slots)
        prompts = min(self.slots, -(-len(asked.prompts.lengths) // self.devices))
        self._begun = self._most_texts(self._is_begun, max(1, prompts * width // wider))
        looks_up = config.speculation.model is None and config.speculation.drafts(self.slots * self.devices)
        if looks_up and asked.drawn is None:
            self._orders = [self._apart(order) for order in self._orders]
        self._given, self._sizes = np.zeros((2, self.devices), np.int32)
        """Rows that earlier queues gave, and those in the one that is there."""

    def _most_texts(self, which: np.ndarray, most: int) -> int:
        """Of a device's rows of that kind in one pool, no more than `most`."""
        text = self.asked.text
        texts = max(1, *(len(np.unique(text[order[which[order]]])) for order in self._orders))
        if self.asked.drawn is not None:  # in each step others: one of few numbers, at most a quarter more
            step = max(1, 1 << (texts.bit_length() - 3)) if texts > 4 else 1
            texts = -(-texts // step) * step
        return -(-texts // -(-texts // most))

    def _apart(self, order: np.ndarray) -> np.ndarray:
        """The same, but of rows with one limit those of one prompt not at once: so each finds what those before it have
        written. The prompts of a pool stay together."""
        group = self.asked.group
        _, first, prompt = np.unique(order // group, return_index=True, return_inverse=True)
        pool = np.argsort(np.argsort(first))[prompt] // self._new
        return order[np.lexsort((order % group, pool, -self.asked.limits[order]))]

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
        """(tokens [D * texts, longest], lengths [D * texts], queue) of what each device takes next."""
        asked, self._given = self.asked, self._given + taken
        ahead_of = [order[given:] for order, given in zip(self._orders, self._given, strict=True)]
        begun = [bool(self._is_begun[order[0]]) for order in ahead_of if len(order)]
        if all(begun):  # where one device has only new ones left, they are read in the greater width
            ahead_of = [order[self._is_begun[order]] for order in ahead_of]
        most, table = (self._begun, asked.texts) if any(begun) else (self._new, asked.prompts)
        places = min(self.size, most * asked.group)
        texts = np.full((self.devices, most), -1)
        rows, text = np.zeros((2, self.devices, places), np.int32)
        for i, order in enumerate(ahead_of):
            ahead = asked.text[order[:places]]
            is_first = np.isin(np.arange(len(ahead)), np.unique(ahead, return_index=True)[1])
            count = int(np.sum(np.cumsum(is_first) <= most))
            unique, text[i, :count] = np.unique(ahead[:count], return_inverse=True)
            texts[i, : len(unique)], rows[i, :count] = unique, order[:count]
            self._sizes[i] = count
        flat, block = rows.reshape(-1), np.repeat(np.arange(self.devices) * self.size, places)
        queue = Queue(
            row=np.maximum(flat - block, 0).astype(np.int32),
            prompt=text.reshape(-1),
            drawn=asked.counts[flat],
            limit=asked.limits[flat],
            key=asked.keys[flat],
            size=self._sizes.copy(),
            more=self.waiting(self._sizes) > 0,
        )
        chosen = np.maximum(texts, 0).reshape(-1)
        return table.tokens[chosen], np.where(texts.reshape(-1) < 0, 1, table.lengths[chosen]), queue
