"""Messages to token ids, such that nothing the model wrote is encoded again.

A conversation that continues an earlier exchange has the ids of that exchange, prompt and
completion, and then those that the chat template writes for the messages that are new. If earlier
messages were changed, or if others than the user's and those of tools are new, the conversation is
rendered anew: the model reads a history that it has not written.

Clients do not always send an answer back letter by letter. A message is an earlier answer also if
it differs in the white space at its ends and around thoughts, has the thoughts in a key of their
own, or ends with the stop string that the answer ended with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tpu_rl.errors import InputError
from tpu_rl.serving import protocol
from tpu_rl.serving.protocol import ApiError
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.tokenizers.tool_calls import THOUGHT_ENDS, THOUGHTS, ToolCall

THOUGHT_KEY = "reasoning_content"
"""The key under which clients put the thoughts that they took out of a message's text."""
AROUND_MARKS = re.compile(rf"\s*({'|'.join(map(re.escape, {*THOUGHTS, *THOUGHT_ENDS}))})\s*")
Message = dict[str, Any]
Place = Callable[[list[int], Sequence[Message]], list[int]]
"""(ids of messages, the messages) -> the ids with those of the messages' images."""


class _Exchange(NamedTuple):
    messages: list[Message]
    """Those of the prompt, then the answer."""
    tools: list[dict[str, Any]] | None
    ids: list[int]
    """The ids of the prompt and of the completion."""
    stop: str
    """The stop string that ended the answer; empty for none. The ids have it, the text has not."""


class History:
    """The exchanges of one user of the server."""

    def __init__(self, tokenizer: Tokenizer, most: int | None = None):
        """Start without exchanges; keep the last `most` of them, or all."""
        self._tokenizer = tokenizer
        self._most = most
        self._exchanges: list[_Exchange] = []

    def encode(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        place: Place = lambda ids, messages: ids,
    ) -> list[int]:
        """Return the ids that the assistant's next message continues.

        `place` puts the ids of images in their places.

        Raises:
            InputError: if the messages cannot be rendered.
            ApiError: if a message has thoughts that no earlier answer has.
        """
        sent = messages
        messages = self._as_answered(sent)
        for index, message in enumerate(messages):
            if THOUGHT_KEY in message:
                key = f"messages[{index}].{THOUGHT_KEY}"
                why = "has thoughts that no answer to this conversation had"
                raise ApiError(400, f"{key} {why}", key)
        # A copy: this may run in a thread of its own.
        known = [
            exchange
            for exchange in list(self._exchanges)
            if exchange.tools == tools
            and len(exchange.messages) < len(messages)
            and messages[: len(exchange.messages)] == exchange.messages
        ]
        if known:
            # The latest of the longest ones.
            exchange = max(reversed(known), key=lambda exchange: len(exchange.messages))
            added = messages[len(exchange.messages) :]
            if all(message["role"] in ("user", "tool") for message in added):
                is_ended = exchange.ids[-1] in self._tokenizer.eos_ids
                with contextlib.suppress(InputError):  # The template rewrites earlier turns.
                    new = self._tokenizer.encode_observation(_texts(added), is_ended)
                    return exchange.ids + place(new, added)
        shown = [
            answer if THOUGHT_KEY in message else message
            for message, answer in zip(sent, messages, strict=True)
        ]
        # Some templates fail for a message without content.
        filled = [{"content": "", **message} for message in _texts(shown)]
        return place(self._tokenizer.render(filled, tools=tools), messages)

    def last_messages(self) -> list[Message]:
        """Return the messages of the last exchange, with its answer; none before the first."""
        return self._exchanges[-1].messages if self._exchanges else []

    def add(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        answer: Message,
        ids: list[int],
        stop: str = "",
    ) -> None:
        """Add an exchange: the messages, the answer to them, the ids of both, and the stop string
        that ended the answer."""
        self._exchanges.append(_Exchange([*self._as_answered(messages), answer], tools, ids, stop))
        if self._most is not None:
            del self._exchanges[: -self._most]

    def _as_answered(self, messages: list[Message]) -> list[Message]:
        """Return messages in which earlier answers are as they were given."""
        known = list(self._exchanges)
        result: list[Message] = []
        for message in messages:
            if message["role"] == "assistant":
                answers = [
                    exchange.messages[-1]
                    for exchange in known
                    if len(exchange.messages) == len(result) + 1
                    and _repeats(message, exchange.messages[-1], exchange.stop)
                    and exchange.messages[:-1] == result
                ]
                message = answers[-1] if answers else message
            result.append(message)
        return result


def _repeats(message: Message, answer: Message, stop: str) -> bool:
    """Return True if a client's message is an answer, up to what clients change without intent."""
    if message.get("tool_calls") != answer.get("tool_calls"):
        return False
    text = message.get("content", "")
    thoughts = message.get(THOUGHT_KEY)
    if thoughts is None:
        texts = [text]
    else:
        # The prompt may have the mark at the beginning of thoughts.
        marks = [(mark, end) for begin, end in THOUGHTS.items() for mark in (begin, "")]
        texts = [f"{mark}{thoughts}{end}{text}" for mark, end in marks]
    written = answer.get("content", "")
    return any(_trimmed(one) in (_trimmed(written), _trimmed(written + stop)) for one in texts)


def _trimmed(text: str) -> str:
    """Return a text without white space at its ends and around the marks of thoughts."""
    return AROUND_MARKS.sub(r"\1", text).strip()


def _texts(messages: Sequence[Message]) -> list[Message]:
    """Return messages without the names of their images, as templates read them."""
    return [
        {key: value for key, value in message.items() if key != "images"} for message in messages
    ]


def as_message(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    stop: Sequence[str],
    tools: Sequence[dict[str, Any]] | None,
    call_format: str | None = None,
) -> Message:
    """Return a completion as a message: text up to a stop string, and calls of tools.

    A call that cannot be read stays text. `call_format` is that of `Tokenizer.tool_format`.
    """
    text = tokenizer.decode(token_ids)
    places = [text.index(string) for string in stop if string in text]
    text = text[: min(places)] if places else text
    calls = []
    if tools:
        schemas = [_with_properties(tool) for tool in tools]
        turn = tokenizer.parse_turn(token_ids, schemas, True, call_format)
        calls = [call for call in turn.calls if isinstance(call, ToolCall)]
        if len(calls) == len(turn.calls) > 0:
            text = turn.content
        else:
            calls = []
    if not calls:
        return {"role": "assistant", "content": text}
    digest = hashlib.blake2b(json.dumps(list(token_ids)).encode(), digest_size=8).hexdigest()
    message: Message = {"role": "assistant"} | ({"content": text} if text else {})
    message["tool_calls"] = [
        # The same text has the same ids in each run: some templates render them.
        protocol.call(call.name, call.arguments, f"call_{digest}{index}")
        for index, call in enumerate(calls)
    ]
    return message


def _with_properties(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool, in which a tool without parameters has an empty list of them."""
    function = tool.get("function", {})
    parameters = {"properties": {}, **(function.get("parameters") or {})}
    return {**tool, "function": {"name": "", **function, "parameters": parameters}}
