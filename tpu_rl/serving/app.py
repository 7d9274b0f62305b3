"""The routes of the server, as an ASGI application.

    GET  /health
    GET  /v1/models
    POST /v1/chat/completions      messages, with token ids and log-probs in the answer
    POST /v1/completions           a text, or token ids
    POST /inference/v1/generate    token ids in, token ids out

Each request belongs to an account, which its API key names. Accounts share nothing: training has
one for each episode.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tpu_rl.errors import TpuRlError
from tpu_rl.rollout.prompts import stop_at
from tpu_rl.sampler import Turn, TurnRequest
from tpu_rl.serving import chat, protocol
from tpu_rl.serving.protocol import ApiError, Options
from tpu_rl.serving.pump import Closed, Conversations, Distribution, Pump
from tpu_rl.serving.record import Call, Record, call_key
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

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


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

    def __post_init__(self):
        self._created = int(time.time())
        self._ids = itertools.count(1)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http"
        await respond(self._answer(scope, receive), send)

    async def _answer(
        self, scope: Mapping[str, Any], receive: Receive
    ) -> dict[str, Any] | list[bytes]:
        headers = headers_of(scope)
        method, path = scope["method"], scope["path"]
        # Also of a request that is refused: who sends while the connection closes reads no answer.
        body = await receive_body(receive) if method == "POST" else b""
        require_loopback_name(headers, self.is_open)
        routes: dict[str, tuple[str, Callable[..., Any]]] = {
            "/health": ("GET", self._health),
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._complete),
            "/inference/v1/generate": ("POST", self._generate),
        }
        if path not in routes:
            raise ApiError(404, f"there is no {path}; there is {', '.join(routes)}")
        expected, handler = routes[path]
        if method != expected:
            raise ApiError(405, f"{path} is asked by {expected}")
        if path == "/health":
            return handler()
        account = self.find_account(api_key(headers))
        if account is None:
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        if method == "GET":
            return handler()
        return await handler(account, read_json(headers, body))

    # --- routes ---

    def _health(self) -> dict[str, Any]:
        return {"status": "ok"}

    def _models(self) -> dict[str, Any]:
        model = {"id": self.model, "object": "model", "created": self._created}
        model |= {"owned_by": "tpu_rl", "max_model_len": self.limits.max_model_len}
        return {"object": "list", "data": [model]}

    async def _chat(self, account: Account, body: Any) -> dict[str, Any] | list[bytes]:
        request = protocol.parse_chat(body)
        options = request.options
        texts = conversations.strings([request.messages, request.tools or []], roles=True)
        prompt = await self._encoded(
            sum(map(len, texts)),
            functools.partial(account.history.encode, request.messages, request.tools),
        )
        call_format = self.tokenizer.tool_format(prompt) if request.tools else None
        turn = await self._turn(account, prompt, options)
        message = chat.as_message(
            self.tokenizer, turn.tokens, options.stop, request.tools, call_format
        )
        account.history.add(request.messages, request.tools, message, prompt + turn.tokens)
        finish = _finish_reason(turn)
        shown = {"content": None, "tool_calls": None, **message}
        if message.get("tool_calls"):
            finish = "tool_calls"
            shown["tool_calls"] = [_as_json_text(call) for call in message["tool_calls"]]
        else:
            del shown["tool_calls"]
        choice = {"index": 0, "message": shown, "finish_reason": finish}
        choice["token_ids"] = turn.tokens
        choice["logprobs"] = protocol.log_probs(self.tokenizer, turn) if options.logprobs else None
        answer = self._envelope("chatcmpl", "chat.completion", prompt, turn)
        answer |= {"prompt_token_ids": prompt, "choices": [choice]}
        return protocol.as_events(answer, options.stream_usage) if options.stream else answer

    async def _complete(self, account: Account, body: Any) -> dict[str, Any]:
        request = protocol.parse_completion(body)
        if request.options.stream:
            raise ApiError(400, "completions of texts are not streamed", "stream")
        prompt = request.prompt
        if isinstance(prompt, str):
            encode = functools.partial(self.tokenizer.encode, prompt)
            prompt = [*self.tokenizer.prefix_ids, *await self._encoded(len(prompt), encode)]
        turn = await self._turn(account, prompt, request.options)
        message = chat.as_message(self.tokenizer, turn.tokens, request.options.stop, None)
        choice = {"index": 0, "text": message["content"], "finish_reason": _finish_reason(turn)}
        choice |= {"token_ids": turn.tokens, "logprobs": None}
        if request.options.logprobs:
            shown = protocol.log_probs(self.tokenizer, turn)["content"]
            choice["logprobs"] = {
                "tokens": [token["token"] for token in shown],
                "token_logprobs": [token["logprob"] for token in shown],
                "top_logprobs": None,
                "text_offset": None,
            }
        answer = self._envelope("cmpl", "text_completion", prompt, turn)
        return answer | {"prompt_token_ids": prompt, "choices": [choice]}

    async def _generate(self, account: Account, body: Any) -> dict[str, Any]:
        request = protocol.parse_generate(body)
        assert isinstance(request.prompt, list)
        turn = await self._turn(account, request.prompt, request.options)
        choice = {"index": 0, "token_ids": turn.tokens, "finish_reason": _finish_reason(turn)}
        choice["logprobs"] = protocol.id_log_probs(turn) if request.options.logprobs else None
        return {
            "request_id": f"generate-{next(self._ids)}",
            "choices": [choice],
            "usage": protocol.usage(request.prompt, turn),
        }

    def _envelope(self, prefix: str, kind: str, prompt: list[int], turn: Turn) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{next(self._ids)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "usage": protocol.usage(prompt, turn),
        }

    async def _encoded(self, characters: int, encode: Callable[[], list[int]]) -> list[int]:
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
        if characters < LONG_TEXT:
            return encode()
        return await asyncio.to_thread(encode)

    # --- turns ---

    async def _turn(self, account: Account, prompt: list[int], options: Options) -> Turn:
        """Let the policy continue a prompt, and note it in the account."""
        distribution = account.distribution(options, self.default)
        self._check_prompt(prompt)
        room = min(self.limits.max_model_len - len(prompt), self.limits.max_new_tokens)
        call = account.begin(prompt, options)
        conversation = account.conversations.take(prompt)
        request = TurnRequest(conversation, prompt, call.key, min(options.max_tokens or room, room))
        try:
            future = self.pump.ask(distribution, request)
            turn = await asyncio.wrap_future(future)
        except BaseException:
            account.end(call, None)
            account.conversations.drop(conversation)
            self.pump.close(conversation)
            raise
        for closed in account.conversations.give_back(conversation, prompt + turn.tokens):
            self.pump.close(closed)
        turn = _cut(turn, self._find_end(options))
        account.end(call, turn)
        return turn

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


def _finish_reason(turn: Turn) -> str:
    return "stop" if turn.stopped else "length"


def _as_json_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a tool with its arguments as a text, as clients expect them."""
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {"name": function["name"], "arguments": text}}


async def respond(answer: Awaitable[Any], send: Send) -> None:
    """Send an answer: a JSON value, the events of a stream, or bytes in protocol buffers.

    An exception is sent as an error.
    """
    try:
        status, content = 200, await answer
    except ApiError as error:
        status, content = error.status, error.body
    except TpuRlError as error:
        status, content = 400, ApiError(400, str(error)).body
    except Closed:
        status, content = 410, ApiError(410, "the episode is over", code="closed").body
    # No request may end the server, whatever it makes a library raise.
    except Exception as error:
        logging.getLogger(__name__).exception("a request failed")
        name = type(error).__name__
        status = 500
        content = ApiError(500, f"the request failed: {name}").body
    if isinstance(content, list):
        kind, parts = b"text/event-stream", content
    elif isinstance(content, bytes):
        kind, parts = b"application/x-protobuf", [content]
    else:
        kind, parts = b"application/json", [json.dumps(content).encode()]
    size = sum(map(len, parts))
    headers = [(b"content-type", kind), (b"content-length", str(size).encode())]
    if status == 408:
        # The rest of the body is not read.
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of a request, by their names in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def require_loopback_name(headers: Mapping[str, str], is_open: bool) -> None:
    """Raise ApiError if a request to a server without a key has another name for this machine."""
    host = re.sub(r":\d+$", "", headers.get("host", ""))
    if is_open and host not in LOOPBACK_NAMES:
        raise ApiError(403, "a server without a key answers requests to a loopback name only")


def api_key(headers: Mapping[str, str]) -> str | None:
    """Return the key of the header Authorization: Bearer KEY, or None without one."""
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
