"""Messages to token ids, such that nothing the model wrote is encoded again.

A conversation that continues an earlier exchange has the ids of that exchange, prompt and
completion, and then those that the chat template adds for the new messages. If messages were
changed, or if the template renders earlier turns in another way once others follow, the
conversation is rendered anew: the model reads another history, which it has not written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tpu_rl.tokenizers import Tokenizer

Message = dict[str, Any]


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

    def encode(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        """Return the ids that the assistant's next message continues.

        Raises:
            InputError: if the messages cannot be rendered.
        """
        known = [
            exchange
            for exchange in self._exchanges
            if exchange.tools == tools
            and len(exchange.messages) < len(messages)
            and messages[: len(exchange.messages)] == exchange.messages
        ]
        if known:
            # The last one that is as long as any.
            exchange = max(reversed(known), key=lambda exchange: len(exchange.messages))
            is_ended = exchange.ids[-1] in self._tokenizer.eos_ids
            added = following_ids(
                self._tokenizer, messages, len(exchange.messages), tools, is_ended
            )
            if added is not None:
                return exchange.ids + added
        return self._tokenizer.render(messages, tools=tools)

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


def following_ids(
    tokenizer: Tokenizer,
    messages: list[Message],
    count: int,
    tools: list[dict[str, Any]] | None,
    is_ended: bool,
) -> list[int] | None:
    """Return the ids that follow the first `count` messages, of which the last is the assistant's.

    None if the template renders these in another way once the others follow. `is_ended` says that
    the assistant's message has its end-of-sequence token already.
    """
    conversation = tokenizer._conversation(messages, tools)
    num_added = len(conversation.messages) - len(messages)
    before = conversation.render(count + num_added, False).text
    whole = conversation.render(len(conversation.messages), True).text
    ends = {text for text, token_id in tokenizer.control.items() if token_id in tokenizer.eos_ids}
    matches = [match for match in conversation.pattern.finditer(before) if match[0] in ends]
    start = end = len(before)
    if matches and not before[matches[-1].end() :].strip():
        start, end = matches[-1].span()
    if not whole.startswith(before[:end]):
        return None
    return tokenizer._encode_marked(
        whole[end if is_ended else start :], conversation.mark, follows=True
    )


# --- the assistant's message ---

_HERMES = re.compile(r"\s*<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def as_message(
    tokenizer: Tokenizer, token_ids: Sequence[int], stop: Sequence[str], has_tools: bool
) -> Message:
    """Return a completion as a message: text up to a stop string, and calls of tools."""
    text = tokenizer.decode(token_ids)
    places = [text.index(string) for string in stop if string in text]
    text = text[: min(places)] if places else text
    calls = _tool_calls(text) if has_tools else None
    if calls is None:
        return {"role": "assistant", "content": text}
    digest = hashlib.blake2b(json.dumps(list(token_ids)).encode(), digest_size=8).hexdigest()
    message: Message = {"role": "assistant"}
    content = _HERMES.sub("", text)
    if content:
        message["content"] = content
    message["tool_calls"] = [
        # The same text has the same ids in each run: some templates render them.
        {
            "id": f"call_{digest}{index}",
            "type": "function",
            "function": {"name": call["name"], "arguments": call.get("arguments", {})},
        }
        for index, call in enumerate(calls)
    ]
    return message


def _tool_calls(text: str) -> list[dict[str, Any]] | None:
    """Return the calls of tools in a text, or None without any, or if one is malformed."""
    calls = []
    for body in _HERMES.findall(text):
        try:
            call = json.loads(body)
        except ValueError:
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        if not isinstance(call.get("arguments", {}), dict):
            return None
        calls.append(call)
    return calls or None
