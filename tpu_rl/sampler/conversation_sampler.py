"""Conversations whose turns arrive while others are decoded; each keeps its cache between turns.

`sample` knows all its rows from the start, and a row that ends is gone. A `ConversationSampler` is
given one turn of a conversation at a time, by environments or by programs that call a server:

    live.submit([TurnRequest(...)])         new turns, of new conversations or of known ones
    turns = live.step()                     one decode segment; the turns that ended in it
    live.grown([conversation])              what turns that go on have so far
    live.close(conversation)                its slot is free

The next turn of a conversation continues its cache: only the tokens that are new, such as what a
tool answered, are read. A turn that changes what came before continues the longest common prefix.
A conversation that waits keeps its slot. If another needs the slot, the cache moves to the host's
memory, and comes back.

**Bits.** What a turn draws depends on its conversation's key and logits alone. The programs have
fixed shapes, whatever arrives when: slots and caches do not shrink or grow, and which chunks a
context is read in depends on that conversation only. So a tool that answers later changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl.errors import InputError
from tpu_rl.sampler import decode_loop
from tpu_rl.sampler import slots as slot_ops
from tpu_rl.sampler.cache_ops import can_roll_back, put_row, row_axis, take_rows, with_lengths
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.slots import Outputs, Pool, Slots, map_devices
from tpu_rl.train import sharding
from tpu_rl.types import Array, Params, Policy

CHUNKS = (256, 64, 16)
"""How many tokens are read at once when a conversation continues, largest first."""
STEPS_PER_SEGMENT = 16
"""Decode steps between two visits of the host, at most. A turn that ends, and one that arrives,
wait for the end of a segment."""
ROWS_AT_ONCE = 8
"""Conversations of a device whose new tokens are read together."""

StopAt = Callable[[list[int]], int | None]
"""See `batch_sampler.StopAt`; it is given the tokens of the turn."""

Weights = Callable[[tuple[Hashable, ...]], tuple[Policy, Params]]
"""Names of weights, one for each row -> a policy that reads them, and its params. The name None
means that the row is not read. All policies have caches of one form."""


class Images(Protocol):
    """The images that conversations show (`rollout.image_prompts.ImageTable`)."""

    @property
    def first_id(self) -> int:
        """The id of the first feature. Smaller ones are words."""
        ...

    def read(self, params: Params, tokens: np.ndarray) -> tuple[Params, np.ndarray]:
        """Return the params with the features of images that tokens [R, C] refer to, and the tokens
        with ids that count these features."""
        ...


class TurnRequest(NamedTuple):
    """The next turn of a conversation."""

    conversation: int
    """Any number that names it."""
    token_ids: list[int]
    """Everything that the turn continues: the prompt, and all that came before."""
    key: np.ndarray
    """[2] uint32: the conversation's random key. The token at position p of the conversation is
    drawn with `fold_in(key, p)`."""
    max_new_tokens: int
    """Length limit of the turn."""
    weights: Hashable = None
    """The name of the weights that read the conversation (see `Weights`), the same in all turns."""


class Turn(NamedTuple):
    """What the policy wrote in a turn of n tokens."""

    conversation: int
    tokens: list[int]
    log_probs: np.ndarray
    """[n] float32; see `Rollout`."""
    behaviour_log_probs: np.ndarray
    """[n] float32."""
    stopped: bool
    """True if it ended with a stop token or where `stop_at` said, False at its limit."""


class _Place(NamedTuple):
    """Rows of each of D devices that a program reads or writes: E of them, of which `count` are."""

    slot: Any
    """[D * E] int32: index of the slot on its device."""
    row: Any
    """[D * E] int32: index of the row of the other cache on its device."""
    count: Any
    """[D] int32."""


def part_length(tokens: list[int], chunk: int, whole_images: tuple[int, int] | None) -> int:
    """Return the number of tokens to read at once, at most `chunk`, so that no image is split.

    For `whole_images` see `ConversationSampler`. No image is longer than the chunk.
    """
    length = min(chunk, len(tokens))
    if whole_images is None or length == len(tokens):
        return length
    # Texts stand between images.
    while tokens[length] >= whole_images[0] and tokens[length - 1] >= whole_images[0]:
        length -= 1
    return length


class ConversationSampler:
    """Decodes turns of conversations in slots. One thread uses it.

    With several processes, all make the same calls with the same arguments.
    """

    def __init__(
        self,
        policy: Policy,
        params: Params,
        config: SamplerConfig,
        *,
        num_slots: int,
        max_length: int,
        prompt_length: int,
        contexts_at_once: int = 1,
        mesh: Mesh | None = None,
        stop_at: StopAt | None = None,
        on_segment: Callable[[], None] | None = None,
        weights: Weights | None = None,
        whole_images: tuple[int, int] | None = None,
        images: Images | None = None,
    ):
        """Prepare empty slots.

        Args:
            config: the distribution of tokens, and `max_new_tokens`, the longest turn. Slots,
                groups and speculation of the config are not used. Segments have at most
                `STEPS_PER_SEGMENT` steps.
            num_slots: conversations that are decoded at once, over all devices. It is rounded up
                to a number that the devices can share.
            max_length: tokens of the longest conversation.
            prompt_length: columns in which a new conversation's context is read; doubled until it
                fits.
            contexts_at_once: new contexts of a device that are read together.
            mesh: mesh over which slots are sharded.
            stop_at: finds the end of a turn in its tokens.
            on_segment: called after each segment.
            weights: finds the weights that turns name. Without it, all turns read `params`.
            whole_images: the first id of images and the most tokens of one, if tokens of an image
                see the later ones, so that it must be read at once (`ImageReader.whole_images`).
            images: those that conversations show, for a policy that reads them. A turn may not
                begin right after an image.

        Raises:
            InputError: for a repetition penalty, which needs counts that turns do not keep.
        """
        if config.repetition_penalty != 1:
            raise InputError(
                f"the repetition penalty is {config.repetition_penalty}",
                where="--sampling.repetition-penalty",
                why="conversations of several turns are sampled without one",
                fix="leave it out",
            )
        self._policy = policy
        self._params = params
        segments = replace(config.segments, steps=min(config.segments.steps, STEPS_PER_SEGMENT))
        self._config = replace(config, segments=segments)
        self._mesh = mesh
        self._stop_at = stop_at
        self._on_segment = on_segment
        self._weights = weights
        self._whole_images = whole_images
        least = 0 if whole_images is None else whole_images[1]
        self._chunks = tuple(chunk for chunk in CHUNKS if chunk >= least) or (least,)
        self._images = images
        self._max_length = max_length
        self._prompt_length = prompt_length
        self._devices = slot_ops.device_count(mesh)
        self._slots_per_device = -(-num_slots // self._devices)
        self._num_slots = self._slots_per_device * self._devices
        self._contexts_at_once = min(contexts_at_once, self._slots_per_device)
        self._rows_at_once = min(ROWS_AT_ONCE, self._slots_per_device)
        self._slots: Slots | None = None
        self._outputs: Outputs | None = None
        self._lengths = np.zeros(self._num_slots, np.int32)
        """By slot: the tokens of the conversation after the last segment."""
        self._waiting: list[TurnRequest] = []
        self._requests: dict[int, TurnRequest] = {}
        """By slot: the turns that are being decoded."""
        self._owner: list[int | None] = [None] * self._num_slots
        self._slot_of: dict[int, int] = {}
        self._cached: dict[int, list[int]] = {}
        """By conversation: the tokens that its cache holds, in its slot or on the host."""
        self._parked: dict[int, Any] = {}
        """By conversation: its cache, moved to the host."""
        self._idle: dict[int, None] = {}
        """The conversations that have a slot and wait for their next turn, the longest first."""

    @property
    def is_idle(self) -> bool:
        """True if there is no turn to decode."""
        return not (self._waiting or self._requests)

    def submit(self, requests: Sequence[TurnRequest]) -> None:
        """Add turns to be decoded.

        Raises InputError for a turn that does not fit into `max_length`, or has no tokens.
        """
        for request in requests:
            length = len(request.token_ids) + request.max_new_tokens
            if not request.token_ids or not request.max_new_tokens >= 1:
                raise InputError(
                    "a turn has nothing to continue, or no token to write",
                    where=f"{len(request.token_ids)} tokens, max_new_tokens "
                    f"{request.max_new_tokens}",
                    why="a model continues one token or more by one or more",
                    fix="begin with the beginning-of-sequence token",
                )
            if length > self._max_length or request.max_new_tokens > self._config.max_new_tokens:
                raise InputError(
                    f"a turn of up to {request.max_new_tokens} tokens after "
                    f"{len(request.token_ids)} does not fit",
                    why=f"conversations have at most {self._max_length} tokens, and turns "
                    f"{self._config.max_new_tokens}",
                    fix="end the conversation, or ask for fewer tokens",
                )
            self._idle.pop(request.conversation, None)
        self._waiting += requests

    def close(self, conversation: int) -> None:
        """Forget a conversation, and free its slot. A turn of it that goes on is never reported."""
        self._cached.pop(conversation, None)
        self._parked.pop(conversation, None)
        self._idle.pop(conversation, None)
        self._waiting = [turn for turn in self._waiting if turn.conversation != conversation]
        slot = self._slot_of.pop(conversation, None)
        if slot is None:
            return
        self._owner[slot] = None
        if self._requests.pop(slot, None) is not None:
            is_freed = np.arange(self._num_slots) == slot
            self._slots = slot_ops.free_slots(self._slots, self._place(is_freed))

    def step(self) -> list[Turn]:
        """Begin the turns that wait, decode one segment, and return the turns that ended."""
        self._begin_turns()
        if not self._requests:
            return []
        names = [
            self._requests[slot].weights if slot in self._requests else None
            for slot in range(self._num_slots)
        ]
        policy, params = self._weights_of(names)
        self._slots, self._outputs, status = decode_loop.decode_segment(
            policy,
            self._config.of_programs(),
            self._mesh,
            params,
            None,
            None,
            self._slots,
            self._place(np.zeros(self._devices, np.int32)),
            self._outputs,
            greedy=np.bool_(self._config.greedy),
        )
        length, live = jax.device_get((status.length, status.live))
        if self._on_segment is not None:
            self._on_segment()
        self._lengths = length
        return self._ended_turns(length, live)

    def grown(self, conversations: Collection[int]) -> list[Turn]:
        """Return the unfinished turns of these conversations, with their tokens so far.

        With several processes, all call it together.
        """
        slots = [
            slot
            for slot, request in sorted(self._requests.items())
            if request.conversation in conversations
        ]
        if not slots or self._outputs is None:
            return []
        outputs = Outputs(*sharding.to_host(self._outputs))
        turns = []
        for slot in slots:
            request = self._requests[slot]
            count = int(self._lengths[slot]) - len(request.token_ids)
            turns.append(_turn(outputs, slot, request, count, False))
        return turns

    # --- the end of turns ---

    def _ended_turns(self, length: np.ndarray, live: np.ndarray) -> list[Turn]:
        slots = sorted(self._requests)
        if self._stop_at is None and live[slots].all():
            return []
        outputs = Outputs(*sharding.to_host(self._outputs))
        turns = []
        is_freed = np.zeros(self._num_slots, bool)
        for slot in slots:
            request = self._requests[slot]
            count = int(length[slot]) - len(request.token_ids)
            tokens = outputs.tokens[slot, :count].tolist()
            end = self._stop_at(tokens) if self._stop_at is not None else None
            if live[slot] and end is None:
                continue
            stopped = end is not None or tokens[-1] in self._config.stop_ids
            is_freed[slot] = live[slot]
            # The cache holds all tokens but the last.
            self._cached[request.conversation] = request.token_ids + tokens[:-1]
            self._idle[request.conversation] = None
            del self._requests[slot]
            taken = count if end is None else end
            turns.append(_turn(outputs, slot, request, taken, stopped))
        if is_freed.any():
            self._slots = slot_ops.free_slots(self._slots, self._place(is_freed))
        return turns

    # --- the beginning of turns ---

    def _begin_turns(self) -> None:
        """Give slots to the turns that wait, and read what their caches lack."""
        new: list[tuple[int, TurnRequest]] = []
        known: list[tuple[int, TurnRequest]] = []
        rest: list[TurnRequest] = []
        # Conversations that have a slot go first, because they need no other.
        for request in sorted(self._waiting, key=lambda r: r.conversation not in self._slot_of):
            slot = self._slot_of.get(request.conversation)
            if slot is None:
                slot = self._free_slot()
                if slot is None:
                    rest.append(request)
                    continue
                self._owner[slot] = request.conversation
                self._slot_of[request.conversation] = slot
            elif slot in self._requests:
                raise ValueError(f"conversation {request.conversation} has a turn already")
            self._requests[slot] = request
            is_known = self._can_continue(request)
            (known if is_known else new).append((slot, request))
        self._waiting = rest
        self._read_contexts(new)
        self._continue_caches(known)
        self._start([*new, *known])

    def _free_slot(self) -> int | None:
        """Return a slot without a conversation; if there is none, one whose conversation waits."""
        if None in self._owner:
            return self._owner.index(None)
        conversation = next(iter(self._idle), None)
        if conversation is None:
            return None
        del self._idle[conversation]
        slot = self._slot_of.pop(conversation)
        self._parked[conversation] = self._take(slot)
        self._owner[slot] = None
        return slot

    def _can_continue(self, request: TurnRequest) -> bool:
        """Return True if the conversation's cache can be continued, and not only read again."""
        cached = self._cached.get(request.conversation)
        if cached is None:
            return False
        common = common_prefix(cached, request.token_ids[:-1])
        dropped = len(cached) - common
        if self._images is not None and max(cached[common:], default=0) >= self._images.first_id:
            return False  # The cache counts the positions that its images take.
        return dropped < len(cached) and (
            dropped == 0 or can_roll_back(self._policy, self._params, self._max_length, dropped)
        )

    def _read_contexts(self, new: list[tuple[int, TurnRequest]]) -> None:
        """Prefill the contexts of new conversations; those that are equal only once a device."""
        by_width: dict[int, list[tuple[int, TurnRequest]]] = {}
        for slot, request in new:
            self._parked.pop(request.conversation, None)
            width = self._prompt_length
            while width < len(request.token_ids):
                width *= 2
            by_width.setdefault(min(width, self._max_length), []).append((slot, request))
        for width, group in sorted(by_width.items()):
            waiting = self._by_device(group)
            while any(waiting):
                self._read_pool(waiting, width)

    def _read_pool(self, waiting: list[list[tuple[int, TurnRequest]]], width: int) -> None:
        """Prefill one pool, and copy its contexts to slots. Removes from `waiting` what it did."""
        num_contexts = self._contexts_at_once
        tokens = np.full((self._devices, num_contexts, width), self._config.pad_id, np.int32)
        lengths = np.ones((self._devices, num_contexts), np.int32)
        places: list[list[tuple[int, int]]] = [[] for _ in range(self._devices)]
        names: list[Hashable] = [None] * (self._devices * num_contexts)
        for device, turns in enumerate(waiting):
            index: dict[tuple[Hashable, tuple[int, ...]], int] = {}
            rest = []
            for slot, request in turns:
                context = tuple(request.token_ids)
                if (request.weights, context) not in index and len(index) == num_contexts:
                    rest.append((slot, request))
                    continue
                number = index.setdefault((request.weights, context), len(index))
                names[device * num_contexts + number] = request.weights
                tokens[device, number, : len(context)] = context
                lengths[device, number] = len(context)
                places[device].append((slot % self._slots_per_device, number))
            waiting[device] = rest
        policy, params = self._weights_of(names)
        params, read_tokens = self._with_images(params, tokens.reshape(-1, width))
        pool = slot_ops.prefill(
            policy, self._mesh, params, self._place(read_tokens), self._place(lengths.reshape(-1))
        )
        self._make_slots(pool.cache)
        self._put(pool, places)

    def _make_slots(self, like: Any) -> None:
        """Make the empty slots, with a cache that is sharded like another one."""
        if self._slots is not None:
            return
        keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), self._num_slots)
        self._slots = slot_ops.empty_slots(
            self._policy,
            self._config.of_programs(),
            self._params,
            self._place(keys),
            self._max_length,
            slot_ops.cache_shardings(self._mesh, like),
        )
        self._outputs = slot_ops.empty_outputs(
            self._mesh, self._num_slots, self._config.max_new_tokens
        )

    def _put(self, pool: Pool, places: list[list[tuple[int, int]]]) -> None:
        """Copy rows of a pool to slots; `places` has pairs (slot, row) of each device."""
        place = self._places(places, self._slots_per_device)
        self._slots = _put_rows(self._mesh, self._slots, pool, place)

    def _places(self, pairs: list[list[tuple[int, int]]], most: int) -> _Place:
        slot = np.zeros((self._devices, most), np.int32)
        row = np.zeros((self._devices, most), np.int32)
        for device, device_pairs in enumerate(pairs):
            for number, (device_slot, device_row) in enumerate(device_pairs):
                slot[device, number] = device_slot
                row[device, number] = device_row
        count = np.array([len(device_pairs) for device_pairs in pairs], np.int32)
        return _Place(self._place(slot.ravel()), self._place(row.ravel()), self._place(count))

    def _take(self, slot: int) -> Any:
        """Return the cache of a slot, on the host."""
        device = slot // self._slots_per_device
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(self._devices)]
        pairs[device].append((slot % self._slots_per_device, 0))
        rows = _take_rows(
            self._policy,
            self._mesh,
            self._params,
            self._slots,
            self._places(pairs, 1),
            self._max_length,
        )
        cache = sharding.to_host(rows.cache)
        return jax.tree.map(lambda leaf: leaf.take([device], row_axis(leaf)), cache)

    def _continue_caches(self, known: list[tuple[int, TurnRequest]]) -> None:
        """Read the tokens that are new in conversations whose caches are known."""
        pending: dict[int, tuple[int, list[int]]] = {}
        """By slot: the number of tokens that its cache keeps, and the tokens that follow."""
        for slot, request in known:
            parked = self._parked.pop(request.conversation, None)
            if parked is not None:
                self._put_parked(parked, slot)
            context = request.token_ids[:-1]
            start = common_prefix(self._cached[request.conversation], context)
            pending[slot] = (start, context[start:])
        for chunk in self._chunks:
            smallest = chunk == self._chunks[-1]
            while True:
                # A cache that must drop tokens is written by a chunk, maybe an empty one.
                ready = [
                    slot
                    for slot, (_, tokens) in pending.items()
                    if len(tokens) >= chunk or smallest
                ]
                if not ready:
                    break
                self._read_chunk(chunk, ready, pending)

    def _put_parked(self, parked: Any, slot: int) -> None:
        rows = jax.tree.map(
            lambda leaf: self._place_rows(np.repeat(leaf, self._devices, axis=row_axis(leaf))),
            parked,
        )
        places: list[list[tuple[int, int]]] = [[] for _ in range(self._devices)]
        places[slot // self._slots_per_device].append((slot % self._slots_per_device, 0))
        ones = self._place(np.ones(self._devices, np.int32))
        self._put(Pool(rows, ones[:, None], ones), places)

    def _read_chunk(
        self, chunk: int, ready: list[int], pending: dict[int, tuple[int, list[int]]]
    ) -> None:
        """Read one chunk of some of the ready slots, and take it from `pending`."""
        rows = self._rows_at_once
        lengths = np.zeros((self._devices, rows), np.int32)
        commit = np.zeros((self._devices, rows), np.int32)
        tokens = np.full((self._devices, rows, chunk), self._config.pad_id, np.int32)
        places: list[list[tuple[int, int]]] = [[] for _ in range(self._devices)]
        names: list[Hashable] = [None] * (self._devices * rows)
        for slot in ready:
            device, device_slot = divmod(slot, self._slots_per_device)
            number = len(places[device])
            if number == rows:
                continue
            start, rest = pending[slot]
            part = rest[: part_length(rest, chunk, self._whole_images)]
            lengths[device, number] = start
            commit[device, number] = len(part)
            tokens[device, number, : len(part)] = part
            places[device].append((device_slot, number))
            names[device * rows + number] = self._requests[slot].weights
            pending[slot] = (start + len(part), rest[len(part) :])
            if len(part) == len(rest):
                del pending[slot]
        policy, params = self._weights_of(names)
        params, read_tokens = self._with_images(params, tokens.reshape(-1, chunk))
        self._slots = _extend_rows(
            policy,
            self._mesh,
            params,
            self._slots,
            self._places(places, rows),
            self._place(lengths.ravel()),
            self._place(read_tokens),
            self._place(commit.ravel()),
            self._max_length,
        )

    def _start(self, begun: list[tuple[int, TurnRequest]]) -> None:
        """Set the slots whose turns begin."""
        if not begun:
            return
        is_begun = np.zeros(self._num_slots, bool)
        token = np.zeros(self._num_slots, np.int32)
        length = np.ones(self._num_slots, np.int32)
        limit = np.ones(self._num_slots, np.int32)
        key = np.zeros((self._num_slots, 2), np.uint32)
        for slot, request in begun:
            is_begun[slot] = True
            token[slot] = request.token_ids[-1]
            length[slot] = len(request.token_ids)
            limit[slot] = request.max_new_tokens
            key[slot] = request.key
            self._cached[request.conversation] = request.token_ids[:-1]
        row = np.tile(np.arange(self._slots_per_device, dtype=np.int32), self._devices)
        keys = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
        self._slots = _start_turns(
            self._slots, *map(self._place, (is_begun, token, length, limit, keys, row))
        )

    # --- devices ---

    def _with_images(self, params: Params, tokens: np.ndarray) -> tuple[Params, np.ndarray]:
        """Return the params and tokens [R, C] that a program reads."""
        return (params, tokens) if self._images is None else self._images.read(params, tokens)

    def _weights_of(self, names: Sequence[Hashable]) -> tuple[Policy, Params]:
        """Return the policy that reads rows with weights of these names, and its params."""
        if self._weights is None:
            return self._policy, self._params
        return self._weights(tuple(names))

    def _by_device(
        self, turns: list[tuple[int, TurnRequest]]
    ) -> list[list[tuple[int, TurnRequest]]]:
        by_device: list[list[tuple[int, TurnRequest]]] = [[] for _ in range(self._devices)]
        for slot, request in turns:
            by_device[slot // self._slots_per_device].append((slot, request))
        return by_device

    def _place(self, rows: Any) -> Array:
        """Put rows, on axis 0, on the devices."""
        if self._mesh is None:
            return jnp.asarray(rows)
        spec = PartitionSpec(slot_ops.slot_axes(self._mesh))
        return sharding.put(rows, NamedSharding(self._mesh, spec))

    def _place_rows(self, leaf: Any) -> Array:
        """Put a cache's leaf, with one row for each device, on the devices."""
        if self._mesh is None:
            return jnp.asarray(leaf)
        axes: list[Any] = [None] * leaf.ndim
        axes[row_axis(leaf)] = slot_ops.slot_axes(self._mesh)
        return sharding.put(leaf, NamedSharding(self._mesh, PartitionSpec(*axes)))


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that two sequences have in common at their beginning."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(i for i in range(length) if first[i] != second[i])


def _turn(outputs: Outputs, slot: int, request: TurnRequest, count: int, stopped: bool) -> Turn:
    """Return the first `count` tokens of a slot, on the host, as a turn."""
    return Turn(
        request.conversation,
        outputs.tokens[slot, :count].tolist(),
        outputs.log_probs[slot, :count].copy(),
        outputs.behaviour_log_probs[slot, :count].copy(),
        stopped,
    )


# --- programs ---


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("slots",))
def _put_rows(mesh: Mesh | None, slots: Slots, pool: Pool, place: _Place) -> Slots:
    """Copy rows of the pool's cache to slots."""
    (slots,) = map_devices(mesh, _put_on_device, slots, pool, place)
    return slots


def _put_on_device(slots: Slots, pool: Pool, place: _Place) -> tuple[Slots]:
    def copy(number: Array, cache: Any) -> Any:
        return put_row(cache, place.slot[number], pool.cache, place.row[number])

    return (slots._replace(cache=jax.lax.fori_loop(0, place.count[0], copy, slots.cache)),)


@functools.partial(jax.jit, static_argnames=("policy", "mesh", "length"))
def _take_rows(
    policy: Policy, mesh: Mesh | None, params: Params, slots: Slots, place: _Place, length: int
) -> Pool:
    """Return a pool with the caches of some slots: one row for each entry of `place`."""
    rows = jnp.zeros_like(place.slot)
    empty = Pool(policy.init_cache(params, len(rows), length), rows[:, None], rows)
    (taken,) = map_devices(mesh, _take_on_device, empty, slots, place)
    return taken


def _take_on_device(pool: Pool, slots: Slots, place: _Place) -> tuple[Pool]:
    return (pool._replace(cache=take_rows(slots.cache, place.slot)),)


@functools.partial(
    jax.jit, static_argnames=("policy", "mesh", "length"), donate_argnames=("slots",)
)
def _extend_rows(
    policy: Policy,
    mesh: Mesh | None,
    params: Params,
    slots: Slots,
    place: _Place,
    lengths: Array,
    tokens: Array,
    commit: Array,
    length: int,
) -> Slots:
    """Continue the caches of some slots.

    The entries of `place` keep `lengths` tokens of their caches. Then the first `commit` of their
    `tokens` [D * E, C] follow.
    """
    rows = _take_rows(policy, mesh, params, slots, place, length)
    cache = with_lengths(rows.cache, lengths)
    positions = lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    _, cache = policy.extend(params, cache, tokens, positions, jnp.zeros_like(tokens), commit)
    cache = slot_ops.shard_cache_rows(mesh, cache)
    return _put_rows(mesh, slots, rows._replace(cache=cache), place)


@functools.partial(jax.jit, donate_argnames=("slots",))
def _start_turns(
    slots: Slots, is_begun: Array, token: Array, length: Array, limit: Array, key: Array, row: Array
) -> Slots:
    """Return the slots with new turns where `is_begun` [B]."""
    return slots._replace(
        token=jnp.where(is_begun, token, slots.token),
        length=jnp.where(is_begun, length, slots.length),
        num_sampled=jnp.where(is_begun, 0, slots.num_sampled),
        limit=jnp.where(is_begun, limit, slots.limit),
        key=jnp.where(is_begun, key, slots.key),
        row=row,
        live=slots.live | is_begun,
    )
