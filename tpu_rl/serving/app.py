"""The routes of the server, as an ASGI application.

    GET  /                         a page to talk to the model, if the server has one
    GET  /health
    GET  /v1/models
    POST /v1/chat/completions      OpenAI's messages, with token ids and log-probs in the answer
    POST /v1/responses             OpenAI's Responses
    POST /v1/messages              Anthropic's messages
    POST /v1/messages/count_tokens
    POST /v1/completions           texts, or token ids
    POST /inference/v1/generate    token ids in, token ids out

All conversations take one path: `Protocol.parse` makes a `ChatRequest` of a body, `App.reply`
answers it, and `Protocol.answer` or `Protocol.events` writes the answer.

Each request belongs to an account, which its API key names. Accounts share nothing: training has
one for each episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tpu_rl.errors import TpuRlError
from tpu_rl.rollout.image_prompts import ImageTable
from tpu_rl.rollout.prompts import stop_at
from tpu_rl.sampler import Score, Scores, Turn, TurnRequest
from tpu_rl.serving import (
    chat,
    chat_completions,
    chat_page,
    completions,
    messages,
    protocol,
    responses,
)
from tpu_rl.serving.protocol import ApiError, ChatRequest, Options, TextRequest
from tpu_rl.serving.pump import Closed, Conversations, Distribution, Pump
from tpu_rl.serving.record import Call, Record, call_key
from tpu_rl.serving.replies import (
    Begun,
    Envelope,
    Item,
    Items,
    Protocol,
    Reply,
    TextStream,
    event,
)
from tpu_rl.tokenizers import Tokenizer, conversations

MAX_BODY_BYTES = 8 * 2**20
BODY_SECONDS = 30.0
"""Time in which a body must arrive."""
MAX_TOKEN_CHARACTERS = 128
"""Characters for each token of a conversation beyond which a text is not even encoded."""
LONG_TEXT = 20_000
"""Characters from which on a text is encoded in a thread of its own, so that nobody waits."""
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
MOST_EXCHANGES = 256
"""Exchanges that a server without episodes remembers."""

MESSAGES = "/v1/messages"
CONVERSATIONS: dict[str, Protocol] = {
    "/v1/chat/completions": chat_completions.PROTOCOL,
    "/v1/responses": responses.PROTOCOL,
    MESSAGES: messages.PROTOCOL,
}

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class Page(NamedTuple):
    """An answer for a browser."""

    html: str


class BegunCall(NamedTuple):
    """A call that is under way."""

    prompt: list[int]
    key: np.ndarray
    """[2] uint32: its random key."""
    when: int = 0
    """See `record.Call`, as for `repeats`."""
    repeats: int = 0


class Account:
    """A user of the server: what was said so far, and which conversations are kept."""

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

    def distribution(self, options: Options, default: Distribution) -> Distribution:
        """Return the distribution of tokens for a request.

        Raises:
            ApiError: if this account may not ask for it.
        """
        return options.distribution(default)

    def begin(self, prompt: list[int], options: Options) -> BegunCall:
        """Return the next call: its prompt and seed.

        Raises:
            ApiError: if this account may make no further call.
        """
        seed = secrets.randbits(64) if options.seed is None else options.seed % 2**64
        return BegunCall(prompt, np.array(divmod(seed, 2**32), np.uint32))

    def end(self, call: BegunCall, turn: Turn | None) -> None:
        """Note what the policy wrote; None if the call failed."""


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
    ):
        """Start without calls.

        Args:
            tokenizer: the tokenizer of the run.
            numbers: yields a new number for each conversation.
            row_key: the random key of the episode.
            first_prompt: the ids of the data row's prompt. The first call with them has the
                episode's own key, so that it draws what a run without an agent draws.
            most_calls: further calls are refused.
            is_strict: refuse requests for another distribution than that of the run, which could
                not learn from them. Evaluations draw as they must, whatever a request says.
        """
        super().__init__(tokenizer, numbers, most_idle=2, most_exchanges=None)
        self.record = Record()
        self._row_key = row_key
        self._first_prompt = first_prompt
        self._is_strict = is_strict
        self._most_calls = most_calls
        self._calls: Counter[tuple[int, ...]] = Counter()
        self._num_running = 0
        self._when = 0
        self.is_over = False
        """True once the episode is over: what is answered later is not recorded."""

    def distribution(self, options: Options, default: Distribution) -> Distribution:
        if not self._is_strict:
            return default
        if options.seed is not None:
            raise ApiError(400, "the run's own seed decides what is drawn", "seed")
        asked = options.distribution(default)
        for name, asked_value, value in zip(asked._fields, asked, default, strict=True):
            if asked_value != value:
                raise ApiError(
                    400,
                    f"{name} is {asked_value}, but the run samples with {name} = {value}",
                    name,
                )
        return asked

    def begin(self, prompt: list[int], options: Options) -> BegunCall:
        del options
        if self._calls.total() >= self._most_calls:
            raise ApiError(
                403,  # Clients repeat what gets 429, and it would never succeed.
                f"the episode has had its {self._most_calls} calls (--sampling.max-turns)",
                code="too_many_calls",
            )
        if not self._num_running:
            self._when += 1
        self._num_running += 1
        name = tuple(prompt)
        repeats = self._calls[name]
        self._calls[name] += 1
        is_first = prompt == self._first_prompt and not repeats
        key = self._row_key if is_first else call_key(self._row_key, prompt, repeats)
        return BegunCall(prompt, key, self._when, repeats)

    def end(self, call: BegunCall, turn: Turn | None) -> None:
        self._num_running -= 1
        if turn is not None and not self.is_over:
            self.record.calls.append(Call(call.when, call.prompt, call.repeats, turn))


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
    """The name of the model, for people."""
    limits: Limits
    default: Distribution
    find_account: Callable[[str | None], Account | None]
    """API key, or None without one -> account; None if the key is wrong."""
    is_open: bool = False
    """True if no key is needed. Then only requests to a loopback name are answered, so that no page
    in a browser reaches the server by a name of its own."""
    score: Score | None = None
    """Computes log-probs of texts, in the thread that owns the devices."""
    images: ImageTable | None = None
    """Reads images. None: requests have texts only."""
    has_page: bool = False
    """True if people may talk to the model in a browser (`chat_page`)."""

    def __post_init__(self):
        self._created = int(time.time())
        self._ids = itertools.count(1)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http"
        is_anthropic = scope["path"].startswith(MESSAGES)
        error_body = messages.error_body if is_anthropic else ApiError.as_body
        headers = headers_of(scope)
        further = chat_page.cross_origin(headers) if self.has_page else []
        await respond(self._answer(scope, receive), send, receive, error_body, further)

    async def _answer(self, scope: Mapping[str, Any], receive: Receive) -> Any:
        headers = headers_of(scope)
        method, path = scope["method"], scope["path"]
        # Also of a request that is refused: who sends while the connection closes reads no answer.
        body = await receive_body(receive) if method == "POST" else b""
        require_loopback_name(headers, self.is_open)
        routes: dict[str, tuple[str, Callable[..., Any]]] = {
            **({"/": ("GET", self._page)} if self.has_page else {}),
            "/health": ("GET", self._health),
            "/v1/models": ("GET", self._models),
            **{
                path: ("POST", functools.partial(self._chat, protocol))
                for path, protocol in CONVERSATIONS.items()
            },
            f"{MESSAGES}/count_tokens": ("POST", self._count),
            "/v1/completions": ("POST", self._complete),
            "/inference/v1/generate": ("POST", self._generate),
        }
        if path not in routes:
            raise ApiError(404, f"there is no {path}; there is {', '.join(routes)}")
        expected, handler = routes[path]
        if method == "OPTIONS" and self.has_page:
            return {}  # A browser asks which pages may ask; `cross_origin` answers.
        if method != expected:
            raise ApiError(405, f"{path} is asked by {expected}")
        if path in ("/", "/health"):
            return handler()
        account = self.find_account(api_key(headers))
        if account is None:
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        if method == "GET":
            return handler()
        return await handler(account, read_json(headers, body))

    # --- routes ---

    def _page(self) -> Page:
        return Page(chat_page.PAGE)

    def _health(self) -> dict[str, Any]:
        return {"status": "ok"}

    def _models(self) -> dict[str, Any]:
        model = {"id": self.model, "object": "model", "created": self._created}
        model |= {"owned_by": "tpu_rl", "max_model_len": self.limits.max_model_len}
        return {"object": "list", "data": [model]}

    async def _chat(self, protocol: Protocol, account: Account, body: Any) -> Any:
        request = protocol.parse(body)
        envelope = self._envelope(request.options)
        items = self.reply(account, request)
        if request.options.stream:
            return protocol.events(envelope, items)
        return protocol.answer(envelope, await _last(items))

    async def _count(self, account: Account, body: Any) -> dict[str, Any]:
        prompt = await self._prompt_of(account, messages.parse_count(body))
        return {"input_tokens": len(prompt)}

    async def _complete(self, account: Account, body: Any) -> Any:
        request = completions.parse(body)
        envelope = self._envelope(request.options)
        if request.options.stream:
            [prompt] = await self._prompts_of(request)
            return completions.events(envelope, self._items(account, prompt, request.options))
        found, scores = await self._texts(account, request, request.echo)
        choices = [
            completions.choice(self.tokenizer, request, index, *pair)
            for index, pair in enumerate(zip(found, scores, strict=True))
        ]
        return completions.answer(envelope, found, choices)

    async def _generate(self, account: Account, body: Any) -> dict[str, Any]:
        request = completions.parse_generate(body)
        [reply], [scores] = await self._texts(account, request, request.top is not None)
        return completions.generated(next(self._ids), request, reply, scores)

    async def _texts(
        self, account: Account, request: TextRequest, scores_prompt: bool
    ) -> tuple[list[Reply], list[Scores | None]]:
        """Return the completion of each prompt, and the scores that the answer needs."""
        top = request.top
        score = self.score
        needs_scores = top is not None and (scores_prompt or top > 1)
        if needs_scores and score is None:
            raise ApiError(
                400,
                "log-probs of prompts and alternatives are not here: a run in training answers "
                "with those of the tokens that it draws",
                "logprobs",
            )
        prompts = await self._prompts_of(request)
        replies = await _all(
            *(_last(self._items(account, prompt, request.options)) for prompt in prompts)
        )
        if score is None or top is None or not needs_scores:
            return replies, [None] * len(replies)
        texts = [reply.prompt + reply.turn.tokens for reply in replies]
        work = self.pump.call(functools.partial(score, texts, top))
        return replies, await asyncio.wrap_future(work)

    async def _prompts_of(self, request: TextRequest) -> list[list[int]]:
        """Return the ids of each prompt."""
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                encode = functools.partial(self.tokenizer.encode, prompt)
                prompt = [*self.tokenizer.prefix_ids, *await self._encoded(len(prompt), encode)]
            # Ids of images mean something to the server alone.
            self._check_ids(prompt)
            prompts.append(prompt)
        return prompts

    def _envelope(self, options: Options) -> Envelope:
        now = int(time.time())
        return Envelope(next(self._ids), now, self.model, options, self.tokenizer)

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

    async def _prompt_of(self, account: Account, request: ChatRequest) -> list[int]:
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
        prompt = await self._prompt_of(account, request)
        items = self._items(account, prompt, request.options, request.tools)
        async with contextlib.aclosing(items):
            async for item in items:
                if isinstance(item, Reply):
                    ids = prompt + item.turn.tokens
                    account.history.add(request.messages, request.tools, item.message, ids)
                yield item

    async def _items(
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
                    yield Begun(prompt)
                    continue
                for piece in text.pieces(turn) if options.stream else ():
                    yield piece
        assert turn is not None
        message = chat.as_message(self.tokenizer, turn.tokens, options.stop, tools, call_format)
        # A turn that ends with a stop string has it at its end.
        whole = self.tokenizer.decode(turn.tokens) if options.stop else ""
        found = [(whole.index(stop), stop) for stop in options.stop if stop in whole]
        rest = text.rest(message.get("content", ""))
        yield Reply(prompt, turn, message, rest, min(found)[1] if found else None)

    async def _turns(
        self, account: Account, prompt: list[int], options: Options
    ) -> AsyncGenerator[Turn | None]:
        """Yield None once a call is accepted, then the turn as it grows; the last one is whole.

        The turn is noted in the account.
        """
        distribution = account.distribution(options, self.default)
        self._check_prompt(prompt)
        room = min(self.limits.max_model_len - len(prompt), self.limits.max_new_tokens)
        if options.max_tokens == 0:
            nothing = np.zeros(0, np.float32)
            yield None
            yield Turn(-1, [], nothing, nothing, False)
            return
        call = account.begin(prompt, options)
        conversation = account.conversations.take(prompt)
        request = TurnRequest(conversation, prompt, call.key, min(options.max_tokens or room, room))
        find_end = self._find_end(options)
        is_watched = bool(options.stream or options.stop or options.stop_token_ids)
        loop = asyncio.get_running_loop()
        grown: asyncio.Queue[Turn | Future[Turn]] = asyncio.Queue()

        def put(item: Turn | Future[Turn]) -> None:
            with contextlib.suppress(RuntimeError):  # The server has ended.
                loop.call_soon_threadsafe(grown.put_nowait, item)

        try:
            future = self.pump.ask(distribution, request, put if is_watched else None)
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
            # Its end has come, so that what is decoded after it is for nobody.
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
        """Return a function that returns how many tokens a completion has, or None: all."""
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

    The tokens up to there are those that would have been drawn in any case.
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


async def _last(items: Items) -> Reply:
    """Return the reply at the end of a stream."""
    reply = [item async for item in items][-1]
    assert isinstance(reply, Reply)
    return reply


async def _all(*answers: Coroutine[Any, Any, Reply]) -> list[Reply]:
    """Return all answers. If one fails, the others are given up."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer) for answer in answers]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def respond(
    answer: Awaitable[Any],
    send: Send,
    receive: Receive | None = None,
    error_body: Callable[[ApiError], dict[str, Any]] = ApiError.as_body,
    further: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Send an answer: a JSON value, an iterator over events, bytes in protocol buffers, or a page.

    An exception is sent as an error; after the first event of a stream it is the last event. A
    stream whose client has gone is closed.

    Args:
        answer: the answer.
        send: sends a message of ASGI.
        receive: receives one, such as that the client has gone. The body has been read.
        error_body: the form of errors.
        further: headers of every answer.
    """
    events: AsyncGenerator[bytes] | None = None
    parts: list[bytes] = []
    status = 200
    try:
        content = await answer
        if isinstance(content, AsyncGenerator):
            events = content
            parts = [await anext(events)]
    except Exception as raised:
        error = as_api_error(raised)
        status = error.status
        content = error_body(error)
        events = None
    if events is not None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    else:
        match content:
            case bytes():
                content_type = b"application/x-protobuf"
                parts = [content]
            case Page(html):
                content_type = b"text/html; charset=utf-8"
                parts = [html.encode()]
            case _:
                content_type = b"application/json"
                parts = [json.dumps(content).encode()]
        size = str(len(parts[0])).encode()
        headers = [(b"content-type", content_type), (b"content-length", size)]
    headers += further
    if status == 408:
        # The rest of the body is not read.
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    if events is not None:
        await _send_events(events, send, receive, error_body)
    await send({"type": "http.response.body", "body": b""})


async def _send_events(
    events: AsyncGenerator[bytes],
    send: Send,
    receive: Receive | None,
    error_body: Callable[[ApiError], dict[str, Any]],
) -> None:
    """Send the events of a stream until it ends, fails, or the client has gone."""

    async def send_all() -> None:
        try:
            async with contextlib.aclosing(events):
                async for part in events:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except Exception as raised:
            part = event(error_body(as_api_error(raised)), "error")
            await send({"type": "http.response.body", "body": part, "more_body": True})

    sending = asyncio.ensure_future(send_all())
    gone = asyncio.ensure_future(receive()) if receive is not None else None
    try:
        tasks = [sending] if gone is None else [sending, gone]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in filter(None, (sending, gone)):
            task.cancel()
        await asyncio.wait([sending])


def as_api_error(error: Exception) -> ApiError:
    """Return an exception as an answer. No request may end the server."""
    match error:
        case ApiError():
            return error
        case TpuRlError():
            return ApiError(400, str(error))
        case Closed():
            return ApiError(410, "the episode is over", code="closed")
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    return ApiError(500, f"the request failed: {type(error).__name__}")


def headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of a request, by their names in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def require_loopback_name(headers: Mapping[str, str], is_open: bool) -> None:
    """Raise ApiError if a request to a server without a key has another name for this machine."""
    host = re.sub(r":\d+$", "", headers.get("host", ""))
    if is_open and host not in LOOPBACK_NAMES:
        raise ApiError(403, "a server without a key answers requests to a loopback name only")


def api_key(headers: Mapping[str, str]) -> str | None:
    """Return the key of the header Authorization: Bearer KEY, or of x-api-key; None without one."""
    if headers.get("x-api-key", "").strip():
        return headers["x-api-key"].strip()
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def read_json(headers: Mapping[str, str], body: bytes) -> Any:
    """Return the value of a body. Browsers send other kinds of content without asking first."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the content type is not application/json")
    return protocol.parse_json(body, "the body")


async def receive_body(receive: Receive) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: if it is too long, or does not arrive in time.
    """
    body = bytearray()
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the client has gone")
                piece = message.get("body", b"")
                size += len(piece)
                # The rest of a body that is too long is dropped as it comes.
                if size <= MAX_BODY_BYTES:
                    body += piece
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    if size > MAX_BODY_BYTES:
        raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)
