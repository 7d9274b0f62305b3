"""The answers of the server: accounts, and the completions of their calls.

Each request belongs to an account, which its API key names. Accounts share nothing: training has
one for each episode. `routes` has the routes, as an ASGI application.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tpu_rl.rollout.conversations.episode_log import Call, LoggedTurn
from tpu_rl.rollout.image_prompts import ImageTable
from tpu_rl.rollout.prompts import stop_at
from tpu_rl.sampler import Score, Scores, Turn, TurnRequest
from tpu_rl.serving import chat, protocol
from tpu_rl.serving.protocol import ApiError, ChatRequest, Options, TextRequest
from tpu_rl.serving.pump import Conversations, Distribution, Pump
from tpu_rl.serving.record import call_key
from tpu_rl.serving.replies import Accepted, Item, Items, Reply, TextStream
from tpu_rl.tokenizers import Tokenizer, conversations

MAX_TOKEN_CHARACTERS = 128
"""Characters for each token of a conversation beyond which a text is not even encoded."""
LONG_TEXT = 20_000
"""A text with this many characters or more is encoded in another thread, so that other requests do
not wait for it."""
MOST_IDLE = 2
"""Conversations of an episode whose caches are kept although no call uses them."""
MOST_EXCHANGES = 256
"""Exchanges that a server without episodes remembers."""


class Account:
    """A user of the server: the exchanges so far, and the conversations with caches."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        numbers: itertools.count[int],
        *,
        most_idle: int,
        most_exchanges: int | None = MOST_EXCHANGES,
    ):
        self.history = chat.History(tokenizer, most_exchanges)
        self.conversations = Conversations(numbers, most_idle)
        self.overlong = 0
        """Tokens of the last prompt that left no room for a completion."""

    def distribution(self, options: Options, default: Distribution) -> Distribution:
        """Return the distribution of tokens for a request.

        Raises ApiError if this account may not ask for it.
        """
        return options.distribution(default)

    def share(self, left: int) -> int:
        """Return the most tokens of a completion that names no limit, of those that are left."""
        return left

    def begin(self, prompt: list[int], options: Options) -> Call | LoggedTurn:
        """Return the next call, or its turn, if the log of an earlier process has it.

        Raises ApiError if this account may make no further call.
        """
        seed = secrets.randbits(64) if options.seed is None else options.seed % 2**64
        return Call(prompt, np.array(divmod(seed, 2**32), np.uint32))

    async def admit(self, call: Call) -> None:
        """Wait until a call may be decoded."""

    def end(self, call: Call, turn: Turn | None) -> None:
        """Record the turn of the policy; None if the call failed."""


class EpisodeAccount(Account):
    """An episode of a run, all of whose calls are recorded.

    It is used in the thread of the server, until no call of it is answered any more.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        numbers: itertools.count[int],
        *,
        row_key: np.ndarray,
        first_prompt: list[int] | None,
        most_calls: int,
        is_strict: bool = True,
        log: Sequence[LoggedTurn] = (),
        wake: Callable[[], None] = lambda: None,
    ):
        """Start without calls.

        Args:
            numbers: yields a new number for each conversation.
            row_key: the random key of the episode.
            first_prompt: the ids of the data row's prompt. The first call with them has the
                episode's own key, so that it draws what a run without an agent draws.
            most_calls: further calls are refused.
            is_strict: refuse requests for another distribution than that of the run, which could
                not learn from them. Evaluations draw as they must, whatever a request says.
            log: the turns of an earlier process, whose calls are answered as they were.
            wake: called when a call waits for its round, and when a round ends.
        """
        super().__init__(tokenizer, numbers, most_idle=MOST_IDLE, most_exchanges=None)
        self.turns = list(log)
        """The answers to calls."""
        self.policy_step = 0
        """The optimizer steps of the policy that answers."""
        self.num_rounds = 0
        """Rounds of calls that were answered in this process; calls at the same time are one."""
        self.most_rounds = math.inf
        """Calls of later rounds wait."""
        self.does_not_repeat = False
        """True if a call came that the log has not, before all that it has were repeated."""
        self._unasked = {(tuple(turn.call.prompt), turn.call.repeats): turn for turn in log}
        self._wake = wake
        self._num_held = 0
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = numbers
        self._row_key = row_key
        self._first_prompt = first_prompt
        self._is_strict = is_strict
        self._most_calls = most_calls
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._num_running = 0
        self._when = max((turn.call.when for turn in log), default=0)
        self.is_over = False
        """True once the episode is over. Later turns are not recorded."""
        self.waits: list[tuple[str, float]] = []
        """(kind, seconds) so far: "policy" while calls were under way, and "agent"."""
        self._since = time.perf_counter()

    def has_waited_for(self, kind: str) -> None:
        """Note the time since the last call."""
        now = time.perf_counter()
        self.waits.append((kind, now - self._since))
        self._since = now

    def distribution(self, options: Options, default: Distribution) -> Distribution:
        if not self._is_strict:
            return default
        if options.seed is not None:
            raise ApiError(400, "the run's own seed decides what is drawn", "seed")
        distribution = options.distribution(default)
        for name, value, expected in zip(default._fields, distribution, default, strict=True):
            if value != expected:
                raise ApiError(
                    400, f"{name} is {value}, but the run samples with {name} = {expected}", name
                )
        return distribution

    def share(self, left: int) -> int:
        # A model that does not stop must not end the conversation with its first answer.
        return left if self._most_calls == 1 else -(-left // 2)

    def begin(self, prompt: list[int], options: Options) -> Call | LoggedTurn:
        if self._asked.total() >= self._most_calls:
            raise ApiError(
                403,  # Clients repeat what gets 429, and it would never succeed.
                f"the episode has had its {self._most_calls} calls (--sampling.max-turns)",
                code="too_many_calls",
            )
        repeats = self._asked[tuple(prompt)]
        logged = self._unasked.pop((tuple(prompt), repeats), None)
        if logged is None and self._unasked:
            self.does_not_repeat = True
            self._wake()
            raise ApiError(410, "the episode does not repeat its calls, and begins anew")
        self._asked[tuple(prompt)] += 1
        if logged is not None:
            return logged
        if not self._num_running:
            self._when += 1
            self.has_waited_for("agent")
        self._num_running += 1
        is_first = prompt == self._first_prompt and not repeats
        key = self._row_key if is_first else call_key(self._row_key, prompt, repeats)
        return Call(prompt, key, self._when, repeats)

    async def admit(self, call: Call) -> None:
        self._loop = asyncio.get_running_loop()
        while self.num_rounds >= self.most_rounds:
            self._changed.clear()
            self._num_held += 1
            self._wake()
            try:
                await self._changed.wait()
            except BaseException:
                # The client gave it up, and may send it once more.
                self._asked[tuple(call.prompt)] -= 1
                raise
            finally:
                self._num_held -= 1

    def end(self, call: Call, turn: Turn | None) -> None:
        if turn is not None and not self.is_over:
            self.turns.append(LoggedTurn(turn, self.policy_step, call))
        self._num_running -= 1
        if not self._num_running:
            self.has_waited_for("policy")
            if self.num_rounds < self.most_rounds:
                self.num_rounds += 1
                self._wake()

    # --- the thread that owns the devices ---

    @property
    def is_held(self) -> bool:
        """True if calls wait for their round."""
        return self._num_held > 0

    @property
    def has_repeated(self) -> bool:
        """True if all calls of the log were made again."""
        return not self._unasked

    def allow(self, most_rounds: int) -> None:
        """Let calls begin up to this number of rounds."""
        self.most_rounds = most_rounds
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)

    def next_step(self, policy_step: int) -> None:
        """Forget the caches of an earlier policy. No call is being decoded."""
        self.policy_step = policy_step
        self.conversations = Conversations(self._numbers, MOST_IDLE)


class Limits(NamedTuple):
    """How long conversations may be, in tokens."""

    max_model_len: int
    """Prompt and completion."""
    max_new_tokens: int
    """One completion."""
    vocab_size: int | None = None
    """Rows of the model's embedding, if they may be fewer than the tokenizer's ids."""


@dataclass
class App:
    """The application."""

    pump: Pump
    tokenizer: Tokenizer
    model: str
    """The name of the model."""
    limits: Limits
    default: Distribution
    accounts: Mapping[str | None, Account]
    """API key -> account. With the key None, no key is needed; see `http.application`."""
    score: Score | None = None
    """Computes log-probs of texts, in the thread that owns the devices."""
    images: ImageTable | None = None
    """Reads images. None: requests have texts only."""
    has_page: bool = False
    """True if people may talk to the model in a browser (`chat_page`)."""
    requires_name: bool = False
    """True if requests for another model than `model` are refused, as by OpenAI's servers."""

    async def texts(
        self, account: Account, request: TextRequest
    ) -> tuple[list[Reply], list[Scores | None]]:
        """Return the completion of each prompt, and the scores that the answer needs."""
        score = self.score
        top = request.top if request.prompt_top is None else request.prompt_top
        scores_prompt = request.echo or request.prompt_top is not None
        needs_scores = top is not None and (scores_prompt or top > 1)
        if needs_scores and score is None:
            raise ApiError(
                400,
                "log-probs of prompts and alternatives are not here: a run in training answers "
                "with those of the tokens that it draws",
                "logprobs",
            )
        prompts = await self.prompts_of(request)
        replies = await _all(
            *(last_reply(self.items(account, prompt, request.options)) for prompt in prompts)
        )
        if score is None or top is None or not needs_scores:
            return replies, [None] * len(replies)
        whole = [reply.prompt + reply.turn.tokens for reply in replies]
        # Programs always have an alternative.
        work = self.pump.call(functools.partial(score, whole, max(top, 1)))
        scores = await asyncio.wrap_future(work)
        return replies, [Scores(own, *(part[:, :top] for part in parts)) for own, *parts in scores]

    async def prompts_of(self, request: TextRequest) -> list[list[int]]:
        """Return the ids of each prompt."""
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                # Clients that render a template of their own write control tokens as literals.
                encode = functools.partial(self.tokenizer.encode, prompt, special=True)
                prompt = [*self.tokenizer.prefix_ids, *await self._encoded(len(prompt), encode)]
            # Ids of images mean something to the server alone.
            self._check_ids(prompt)
            prompts.append(prompt)
        return prompts

    async def _encoded(
        self, characters: int, encode: Callable[[], list[int]], is_slow: bool = False
    ) -> list[int]:
        """Return the ids of a text with this number of characters.

        Raises:
            ApiError: if it is longer than any text that could be read.
        """
        most = MAX_TOKEN_CHARACTERS * self.limits.max_model_len
        if characters > most:
            raise ApiError(
                400,
                f"the prompt has {characters} characters, but conversations have at most "
                f"{self.limits.max_model_len} tokens",
                code="context_length_exceeded",
            )
        if characters < LONG_TEXT and not is_slow:
            return encode()
        return await asyncio.to_thread(encode)

    # --- turns ---

    async def prompt_of(self, account: Account, request: ChatRequest) -> list[int]:
        """Return the ids of a conversation."""
        texts = conversations.strings([request.messages, request.tools or []], roles=True)
        table = self.images
        if request.images and table is None:
            raise ApiError(400, "the request has images, and texts only are read here")

        def place(ids: list[int], messages: Sequence[dict[str, Any]]) -> list[int]:
            names = [name for message in messages for name in message.get("images", ())]
            return ids if table is None else table.place(ids, [request.images[n] for n in names])

        def encode() -> list[int]:
            if table is not None:
                table.keep(request.images.values())
            return account.history.encode(request.messages, request.tools, place)

        return await self._encoded(sum(map(len, texts)), encode, bool(request.images))

    async def reply(self, account: Account, request: ChatRequest) -> AsyncGenerator[Item]:
        """Answer a conversation, and note the exchange in the account."""
        prompt = await self.prompt_of(account, request)
        items = self.items(account, prompt, request.options, request.tools)
        async with contextlib.aclosing(items):
            async for item in items:
                if isinstance(item, Reply):
                    ids = prompt + item.turn.tokens
                    account.history.add(
                        request.messages, request.tools, item.message, ids, item.stop or ""
                    )
                yield item

    async def items(
        self,
        account: Account,
        prompt: list[int],
        options: Options,
        tools: list[dict[str, Any]] | None = None,
    ) -> AsyncGenerator[Item]:
        """Let the policy continue a prompt."""
        call_format = self.tokenizer.tool_format(prompt) if tools else None
        text = TextStream(self.tokenizer, options.stop, call_format)
        turns = self._turns(account, prompt, options)
        turn: Turn | None = None
        async with contextlib.aclosing(turns):
            async for turn in turns:
                if turn is None:
                    yield Accepted(prompt)
                    continue
                for piece in text.pieces(turn) if options.stream else ():
                    yield piece
        assert turn is not None
        message = chat.as_message(self.tokenizer, turn.tokens, options.stop, tools, call_format)
        # A turn that ends with a stop string has it at its end.
        whole = self.tokenizer.decode(turn.tokens) if options.stop else ""
        ends = [(whole.index(stop), stop) for stop in options.stop if stop in whole]
        rest = text.rest(message.get("content", ""))
        yield Reply(prompt, turn, message, rest, min(ends)[1] if ends else None)

    async def _turns(
        self, account: Account, prompt: list[int], options: Options
    ) -> AsyncGenerator[Turn | None]:
        """Yield None when a call is accepted, then the turn as it grows; the last one is whole.

        The turn is noted in the account.
        """
        distribution = account.distribution(options, self.default)
        left = self.limits.max_model_len - len(prompt)
        if left <= 0:
            account.overlong = len(prompt)
        self._check_prompt(prompt)
        most = min(left if options.max_tokens else account.share(left), self.limits.max_new_tokens)
        if options.max_tokens == 0:
            nothing = np.zeros(0, np.float32)
            yield None
            yield Turn(-1, [], nothing, nothing, False)
            return
        call = account.begin(prompt, options)
        if isinstance(call, LoggedTurn):
            yield None
            yield call.turn
            return
        try:
            await account.admit(call)
        except BaseException:
            account.end(call, None)
            raise
        conversation = account.conversations.take(prompt)
        request = TurnRequest(conversation, prompt, call.key, min(options.max_tokens or most, most))
        find_end = self._find_end(options)
        is_watched = bool(options.stream or options.stop or options.stop_token_ids)
        loop = asyncio.get_running_loop()
        grown: asyncio.Queue[Turn | Future[Turn]] = asyncio.Queue()

        def put(item: Turn | Future[Turn]) -> None:
            with contextlib.suppress(RuntimeError):  # The server has ended.
                loop.call_soon_threadsafe(grown.put_nowait, item)

        try:
            future = self.pump.submit(distribution, request, put if is_watched else None)
            future.add_done_callback(put)
            yield None
            while True:
                item = await grown.get()
                has_ended = isinstance(item, Future)
                whole = item.result() if isinstance(item, Future) else item
                turn = _cut(whole, find_end)
                if has_ended or turn is not whole:
                    break
                yield turn
        except BaseException:
            account.end(call, None)
            account.conversations.drop(conversation)
            self.pump.close(conversation)
            raise
        if has_ended:
            closed = account.conversations.give_back(conversation, prompt + whole.tokens)
        else:
            # The turn has ended at a stop string, and the sampler would go on decoding.
            account.conversations.drop(conversation)
            closed = [conversation]
        for number in closed:
            self.pump.close(number)
        account.end(call, turn)
        yield turn

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise ApiError(400, "the prompt has no tokens")
        if len(prompt) >= self.limits.max_model_len:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens, which leaves no room for a completion: "
                f"conversations have at most {self.limits.max_model_len}",
                code="context_length_exceeded",
            )
        reader = self.tokenizer.images
        first_id = None if self.images is None or reader is None else reader.first_id
        self._check_ids([i for i in prompt if first_id is None or i < first_id])

    def _check_ids(self, prompt: list[int]) -> None:
        sizes = (self.tokenizer.vocab_size, self.limits.vocab_size)
        vocab_size = min(size for size in sizes if size is not None)
        unknown = [i for i in prompt if not 0 <= i < vocab_size]
        if unknown:
            shown = str(unknown[0])[: protocol.MAX_TEXT]
            raise ApiError(400, f"{shown} is no token id of the model")

    def _find_end(self, options: Options) -> Callable[[list[int]], int | None]:
        """Return a function from tokens to the length of the completion; None: all of them."""
        find_string = stop_at(self.tokenizer, options.stop)
        stop_ids = set(options.stop_token_ids)

        def find_end(tokens: list[int]) -> int | None:
            ends = [index + 1 for index, token in enumerate(tokens) if token in stop_ids][:1]
            if find_string is not None:
                ends.append(find_string(tokens) or len(tokens) + 1)
            return min(ends, default=None)

        return find_end


def _cut(turn: Turn, find_end: Callable[[list[int]], int | None]) -> Turn:
    """Return the turn up to its first stop string or stop token.

    The sampler would have drawn the same tokens up to there without a stop.
    """
    end = find_end(turn.tokens)
    if end is None or end > len(turn.tokens):
        return turn
    return Turn(
        turn.conversation,
        turn.tokens[:end],
        turn.log_probs[:end],
        turn.behaviour_log_probs[:end],
        True,
    )


async def last_reply(items: Items) -> Reply:
    """Return the reply at the end of a stream."""
    reply = [item async for item in items][-1]
    assert isinstance(reply, Reply)
    return reply


async def _all(*answers: Coroutine[Any, Any, Reply]) -> list[Reply]:
    """Wait for all answers. If one fails, cancel the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer) for answer in answers]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
