"""Messages to token ids, such that nothing the model wrote is encoded again.

A conversation that continues an earlier exchange has the ids of that exchange, prompt and
completion, and then those that the chat template writes for the messages that are new. If earlier
messages were changed, or if others than the user's and those of tools are new, the conversation is
rendered anew: the model reads a history that it has not written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tpu_rl.errors import InputError
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.tokenizers.tool_calls import ToolCall

Message = dict[str, Any]
Place = Callable[[list[int], Sequence[Message]], list[int]]
"""(ids of messages, the messages) -> the ids with those of the messages' images."""


class _Exchange(NamedTuple):
    messages: list[Message]
    """Those of the prompt, then the answer."""
    tools: list[dict[str, Any]] | None
    ids: list[int]
    """The ids of the prompt and of the completion."""


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
        """
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
        # Some templates fail for a message without content.
        filled = [{"content": "", **message} for message in _texts(messages)]
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
    ) -> None:
        """Add an exchange: the messages, the answer to them, and the ids of both."""
        self._exchanges.append(_Exchange([*messages, answer], tools, ids))
        if self._most is not None:
            del self._exchanges[: -self._most]


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
        {
            "id": f"call_{digest}{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]
    return message


def _with_properties(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool, in which a tool without parameters has an empty list of them."""
    function = tool.get("function", {})
    parameters = {"properties": {}, **(function.get("parameters") or {})}
    return {**tool, "function": {"name": "", **function, "parameters": parameters}}
