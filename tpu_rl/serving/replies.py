"""A completion on its way to a client, which each route writes in its protocol.

A route reads a request as a `ChatRequest` or `TextRequest`. What answers it is a stream of items:
one `Accepted`, a `Piece` for each token as it is drawn, and one `Reply`, which has the whole.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from tpu_rl.sampler import Turn
from tpu_rl.serving.chat import Message
from tpu_rl.serving.protocol import ChatRequest, Options
from tpu_rl.tokenizers import Tokenizer, tool_calls

BROKEN = "\ufffd"
"""The end of a text whose last character has not all its bytes yet."""
WINDOW = 8
"""Tokens before a new one with which it is decoded."""


class Accepted(NamedTuple):
    """The request is accepted."""

    prompt: list[int]


class Piece(NamedTuple):
    """A token, and the part of the message that it completes."""

    token_id: int
    log_prob: float
    text: str


class Reply(NamedTuple):
    """The whole completion."""

    prompt: list[int]
    turn: Turn
    message: Message
    rest: str
    """The end of the text, which no piece has."""
    stop: str | None
    """The stop string that ended it."""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of tools, with their arguments as objects."""
        return self.message.get("tool_calls", [])

    @property
    def text(self) -> str:
        """The text beside the calls."""
        return self.message.get("content", "")

    @property
    def finish(self) -> str:
        """The reason of the end, in the words of chat completions."""
        if self.calls:
            return "tool_calls"
        return "stop" if self.turn.stopped else "length"


Item = Accepted | Piece | Reply
Items = AsyncIterator[Item]


class Envelope(NamedTuple):
    """The data that a protocol writes around a completion."""

    number: int
    """Of the request, for names."""
    created: int
    """Seconds since 1970."""
    model: str
    options: Options
    tokenizer: Tokenizer

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """Return the keys with which OpenAI's completions begin."""
        head = {"id": f"{prefix}-{self.number}", "object": kind}
        return head | {"created": self.created, "model": self.model}


class Protocol(NamedTuple):
    """A route for conversations."""

    parse: Callable[[Any], ChatRequest]
    answer: Callable[[Envelope, Reply], dict[str, Any]]
    events: Callable[[Envelope, Items], AsyncIterator[bytes]]
    """The events of a stream, of which the first follows `Accepted`."""


def event(data: Any, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def arguments_of(call: dict[str, Any]) -> str:
    """Return the arguments of a call as a text, as clients expect them."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


class _Growing:
    """The text of tokens that are added one by one."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._tokens: list[int] = []
        self._decoded = 0
        """The tokens that `text` is of."""
        self.text = ""
        """The text so far, without a last character that has not all its bytes yet."""

    def add(self, token: int) -> None:
        self._tokens.append(token)
        # The first token of a text may be written in another way than a later one.
        start = max(self._decoded - WINDOW, 0)
        before, after = (
            self._tokenizer.decode(self._tokens[start:end], self._skip_special)
            for end in (self._decoded, None)
        )
        if not after.endswith(BROKEN):
            self.text += after[len(before) :]
            self._decoded = len(self._tokens)


class TextStream:
    """Makes pieces of the tokens of a growing turn."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], call_format: str | None):
        """Start without tokens.

        Args:
            tokenizer: decodes them.
            stop: stop strings, which are no part of the text.
            call_format: the format of calls of tools, which are none either; None without tools.
        """
        self._stop = stop
        self._call_format = call_format
        self._text = _Growing(tokenizer, skip_special=True)
        # Marks of calls may be control tokens.
        self._raw = _Growing(tokenizer, skip_special=False)
        # A tokenizer whose files define how turns are parsed may change any part of the text.
        is_own = call_format and tokenizer.backend.parse_response("a", "", []) is not None
        self._is_held = bool(is_own)
        self._count = 0
        self._sent = 0

    def pieces(self, turn: Turn) -> list[Piece]:
        """Return a piece for each token that the turn has more than before."""
        first = self._count
        self._count = len(turn.tokens)
        added = zip(turn.tokens[first:], turn.log_probs[first:].tolist(), strict=True)
        return [Piece(token, log_prob, self._add(token)) for token, log_prob in added]

    def rest(self, text: str) -> str:
        """Return the end of the whole text, which no piece has."""
        return text[self._sent :] if text.startswith(self._text.text[: self._sent]) else ""

    def _add(self, token: int) -> str:
        """Return the part of the message that one more token completes."""
        self._text.add(token)
        text = self._text.text
        end = tool_calls.first_mark(text, self._stop)
        if self._call_format is not None:
            self._raw.add(token)
            raw = self._raw.text
            certain = tool_calls.content_length(raw, self._call_format)
            end = min(end, certain if text.startswith(raw[:certain]) else 0)
        if self._is_held or end <= self._sent:
            return ""
        piece = text[self._sent : end]
        self._sent = end
        return piece
