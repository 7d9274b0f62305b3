"""The sampler's side of a server: the turns of many calls are decoded together.

Calls come from the threads of a server. One thread, which owns the devices, decodes them: it calls
`Pump.step` again and again.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from tpu_rl.sampler import ConversationSampler, SamplerConfig, Turn, TurnRequest
from tpu_rl.sampler.conversation_sampler import common_prefix
from tpu_rl.tokenizers import Tokenizer

MOST_SAMPLERS = 4
"""Distributions for which caches and programs are kept."""


class Distribution(NamedTuple):
    """The distribution of tokens; see `SamplerConfig`. Each has compiled programs of its own."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def sampler_config(
    distribution: Distribution, tokenizer: Tokenizer, vocab_size: int, length: int, **settings: Any
) -> SamplerConfig:
    """Return the settings of a sampler of conversations of up to `length` tokens.

    Rows of the embedding, `vocab_size` of them, that no token has are never sampled.
    """
    unused = range(tokenizer.vocab_size, vocab_size)
    return SamplerConfig(
        max_new_tokens=length,
        logit_bias=tuple((token_id, -math.inf) for token_id in unused),
        pad_id=tokenizer.pad_id,
        **distribution._asdict(),
        **settings,
    )


class Closed(Exception):
    """The conversation was closed before its turn ended."""


class PendingTurn(NamedTuple):
    """A turn to decode."""

    distribution: Any
    """A `Distribution`, or whatever else `make_sampler` makes a sampler of."""
    request: TurnRequest
    is_watched: bool = False
    """True if the call wants the tokens as they are drawn."""


class Caller(NamedTuple):
    """A caller of this process that waits for a turn."""

    turn: PendingTurn
    future: Future[Turn]
    on_grown: OnGrown | None


class Work(NamedTuple):
    """Another computation for the thread that owns the devices."""

    function: Callable[[], Any]
    future: Future[Any]


Item = PendingTurn | int
"""A turn to decode, or a conversation to close."""
OnGrown = Callable[[Turn], None]
"""Called after each segment with the beginning of a turn that is not finished."""
Share = Callable[[list[Item]], list[list[Item]]]
"""The items of this process -> those of all processes, by index. All processes call it together."""


class Pump:
    """Decodes the turns of calls."""

    def __init__(
        self,
        make_sampler: Callable[[Any], ConversationSampler],
        share: Share = lambda items: [items],
    ):
        """Start without samplers.

        Args:
            make_sampler: makes the sampler of a distribution.
            share: gathers the items of all processes, which decode together.
        """
        self._make_sampler = make_sampler
        self._share = share
        self._samplers: dict[Hashable, ConversationSampler] = {}
        """Those that were used last come last."""
        self._decoding: dict[int, PendingTurn] = {}
        """By conversation: the turns that are being decoded, of all processes."""
        self._callers: dict[int, Caller] = {}
        """Conversation -> who waits for it."""
        self._sampler_of: dict[int, ConversationSampler] = {}
        self._work: list[Work] = []
        self.idle_seconds = 0.0
        """Time in which `step` waited for calls, and decoded nothing."""
        self._incoming: queue.SimpleQueue[Caller | Work | int | None] = queue.SimpleQueue()
        """None only wakes the thread."""
        self._lock = threading.Lock()
        self._error: Exception | None = None
        """The answer to all calls after the end."""

    # --- any thread ---

    def submit(
        self, distribution: Hashable, request: TurnRequest, on_grown: OnGrown | None = None
    ) -> Future[Turn]:
        """PendingTurn for the next turn of a conversation. It has one turn at a time.

        `on_grown` is called in the thread that owns the devices.
        """
        future: Future[Turn] = Future()
        turn = PendingTurn(distribution, request, on_grown is not None)
        self._put(Caller(turn, future, on_grown), future)
        return future

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Let the thread that owns the devices call a function. This is for one process alone."""
        future: Future[Any] = Future()
        self._put(Work(function, future), future)
        return future

    def _put(self, item: Any, future: Future[Any]) -> None:
        with self._lock:
            if self._error is None:
                self._incoming.put(item)
            else:
                future.set_exception(self._error)

    def close(self, conversation: int) -> None:
        """Forget a conversation. A turn of it that is being decoded fails with `Closed`."""
        self._incoming.put(conversation)

    def wake(self) -> None:
        """Let `step` return soon."""
        self._incoming.put(None)

    # --- the thread that owns the devices ---

    def step(self, wait_seconds: float) -> None:
        """Decode one segment, and answer the turns that ended in it.

        If there is nothing to decode, wait so long for a call.
        """
        began = time.perf_counter()
        shared = self._share(self._drain(wait_seconds if self.is_idle else 0.0))
        if self.is_idle:
            self.idle_seconds += time.perf_counter() - began
        for items in shared:
            for item in items:
                if isinstance(item, int):
                    self._close(item)
                else:
                    self._begin(item)
        while self._work:
            _do(self._work.pop(0))
        for sampler in list(self._samplers.values()):
            if sampler.is_idle:
                continue
            for turn in sampler.step():
                del self._decoding[turn.conversation]
                self._answer(turn.conversation, turn)
            watched = [
                conversation
                for conversation, turn in self._decoding.items()
                if turn.is_watched and self._sampler_of.get(conversation) is sampler
            ]
            for turn in sampler.grown(watched) if watched else ():
                caller = self._callers.get(turn.conversation)
                if caller is not None and caller.on_grown is not None:
                    caller.on_grown(turn)

    def end(self, error: Exception) -> None:
        """Answer all calls with an error, also those to come, and free the caches."""
        with self._lock:
            self._error = error
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """Answer all calls so far with an error, after a failure of `step`, and free the caches."""
        self._drain(0.0)
        for conversation in list(self._callers):
            self._answer(conversation, error)
        for work in self._work:
            work.future.set_exception(error)
        self._work.clear()
        self._decoding.clear()
        self._samplers.clear()
        self._sampler_of.clear()

    @property
    def is_idle(self) -> bool:
        """True if no turn is being decoded."""
        return not self._decoding

    def _drain(self, wait_seconds: float) -> list[Item]:
        """Return the new items, and register the futures and watchers of their calls."""
        items: list[Item] = []
        timeout = wait_seconds
        while True:
            try:
                item = self._incoming.get(timeout=timeout) if timeout else self._incoming.get(False)
            except queue.Empty:
                return items
            timeout = 0.0
            if item is None:
                continue
            if isinstance(item, Work):
                if item.future.set_running_or_notify_cancel():
                    self._work.append(item)
                continue
            if isinstance(item, Caller):
                if not item.future.set_running_or_notify_cancel():
                    continue
                self._callers[item.turn.request.conversation] = item
                item = item.turn
            items.append(item)

    def _answer(self, conversation: int, answer: Turn | Exception) -> None:
        """Answer the caller of a conversation, if it is one of this process."""
        caller = self._callers.pop(conversation, None)
        if caller is None:
            return
        if isinstance(answer, Exception):
            caller.future.set_exception(answer)
        else:
            caller.future.set_result(answer)

    def _begin(self, turn: PendingTurn) -> None:
        conversation = turn.request.conversation
        try:
            self._sampler(turn).submit([turn.request])
        # A request must not end the server, such as one for which no program compiles.
        except Exception as error:
            self._answer(conversation, error)
            return
        self._decoding[conversation] = turn

    def _sampler(self, turn: PendingTurn) -> ConversationSampler:
        """Return the sampler of a distribution. The conversation's cache may be in another one."""
        sampler = self._samplers.pop(turn.distribution, None)
        if sampler is None:
            idle = [key for key, other in self._samplers.items() if other.is_idle]
            for key in idle[: max(len(self._samplers) - MOST_SAMPLERS + 1, 0)]:
                dropped = self._samplers.pop(key)
                rest = self._sampler_of.items()
                self._sampler_of = {key: other for key, other in rest if other is not dropped}
            sampler = self._make_sampler(turn.distribution)
        self._samplers[turn.distribution] = sampler
        conversation = turn.request.conversation
        before = self._sampler_of.get(conversation)
        if before is not None and before is not sampler:
            before.close(conversation)
        self._sampler_of[conversation] = sampler
        return sampler

    def _close(self, conversation: int) -> None:
        sampler = self._sampler_of.pop(conversation, None)
        if sampler is not None:
            sampler.close(conversation)
        self._decoding.pop(conversation, None)
        self._answer(conversation, Closed())


def _do(work: Work) -> None:
    """Compute a piece of work. Its failure must not end the server."""
    try:
        work.future.set_result(work.function())
    except Exception as error:
        work.future.set_exception(error)


class Conversations:
    """The conversations of one user of the server, whose caches may be continued."""

    def __init__(self, numbers: Iterator[int], most_idle: int):
        """Start without conversations.

        Args:
            numbers: yields a new number for each conversation; all users share it.
            most_idle: conversations that are kept although no call uses them.
        """
        self._numbers = numbers
        self._most_idle = most_idle
        self._idle: dict[int, list[int]] = {}
        """Conversation -> its tokens, in the order of use."""
        self._busy: set[int] = set()

    @property
    def open(self) -> list[int]:
        """All conversations."""
        return [*self._idle, *self._busy]

    def take(self, token_ids: list[int]) -> int:
        """Return the conversation that has the most tokens in common with these.

        It is a new one if none has half of the tokens or more in common.
        """
        common = {number: common_prefix(tokens, token_ids) for number, tokens in self._idle.items()}
        best = max(common, key=lambda number: common[number], default=None)
        if best is None or 2 * common[best] < len(token_ids):
            best = next(self._numbers)
        self._idle.pop(best, None)
        self._busy.add(best)
        return best

    def give_back(self, conversation: int, token_ids: list[int]) -> list[int]:
        """End a call of a conversation, which has these tokens now; return those to be closed."""
        self._busy.discard(conversation)
        self._idle[conversation] = token_ids
        closed = list(self._idle)[: max(len(self._idle) - self._most_idle, 0)]
        for number in closed:
            del self._idle[number]
        return closed

    def drop(self, conversation: int) -> None:
        """Forget a conversation whose call failed."""
        self._busy.discard(conversation)
