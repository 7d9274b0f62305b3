"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from tpu_rl.serving import protocol, replies
from tpu_rl.serving.protocol import ApiError, ChatRequest, Fields
from tpu_rl.serving.replies import Accepted, Envelope, Items, Piece, Protocol, Reply, event
from tpu_rl.tokenizers import Tokenizer


def parse(body: Any) -> ChatRequest:
    """Return the request of a body."""
    fields = Fields(body)
    images: protocol.Images = {}
    messages = fields.items(
        "messages", lambda value, place: _message(value, place, images), may_be_empty=False
    )
    tools = fields.take("tools", list, lambda tools: all(map(protocol.is_tool, tools)))
    choice = fields.take("tool_choice", str, lambda choice: choice in ("auto", "none"))
    fields.only("parallel_tool_calls", True)
    fields.only("response_format", {"type": "text"})
    fields.only("top_logprobs", 0)
    options = protocol.options(fields)
    return ChatRequest(messages, (tools or None) if choice != "none" else None, options, images)


def _message(value: Any, place: str, images: protocol.Images) -> dict[str, Any]:
    """Return a message in the form in which messages are compared and rendered."""
    fields = Fields(value, place)
    message: dict[str, Any] = {"role": fields.require("role", str)}
    content = fields.take("content", (str, list))
    calls = fields.items("tool_calls", _call)
    if content is None and not calls:
        raise ApiError(400, f"{place}.content is missing", f"{place}.content")
    if content is not None:
        message |= protocol.content_of(content, ("text",), f"{place}.content", images)
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "tool_call_id", "reasoning_content"):
        text = fields.take(name, str)
        if text is not None and (text or name != "reasoning_content"):
            message[name] = text
    # Clients send back the messages that they got, with all keys of their own types.
    for name in ("refusal", "audio", "function_call", "annotations"):
        fields.only(name, "", [])
    fields.finish()
    return message


def _call(value: Any, place: str) -> dict[str, Any]:
    """Return a call of a tool."""
    fields = Fields(value, place)
    function = Fields(fields.require("function", dict), f"{place}.function")
    name = function.require("name", str)
    arguments = function.take("arguments", (str, dict)) or {}
    function.finish()
    if isinstance(arguments, str):
        arguments = protocol.arguments(arguments, f"{place}.function.arguments")
    fields.only("type", "function")
    fields.only("name", name)  # tau2 says it twice.
    call_id = fields.take("id", str)
    fields.finish("index")
    return protocol.call(name, arguments, call_id)


def log_prob(tokenizer: Tokenizer, token_id: int, value: float) -> dict[str, Any]:
    """Return the log-prob of a token under the full distribution."""
    text = tokenizer.decode([token_id], skip_special=False)
    data = list(text.encode("utf-8", errors="replace"))
    return {"token": text, "logprob": value, "bytes": data, "top_logprobs": []}


def usage(reply: Reply) -> dict[str, int]:
    """Return the numbers of tokens."""
    counts = {"prompt_tokens": len(reply.prompt), "completion_tokens": len(reply.turn.tokens)}
    return counts | {"total_tokens": sum(counts.values())}


def _calls(reply: Reply) -> list[dict[str, Any]]:
    """Return the calls with their arguments as texts."""
    return [
        {
            **call,
            "function": {"name": call["function"]["name"], "arguments": replies.arguments_of(call)},
        }
        for call in reply.calls
    ]


def _shown(envelope: Envelope, tokens: list[tuple[int, float]]) -> dict[str, Any] | None:
    """Return the log-probs of tokens, if the request wants them."""
    if not envelope.options.logprobs:
        return None
    shown = [log_prob(envelope.tokenizer, token, value) for token, value in tokens]
    return {"content": shown, "refusal": None}


def answer(envelope: Envelope, reply: Reply) -> dict[str, Any]:
    """Return the body of an answer."""
    turn = reply.turn
    message = {"role": "assistant", "content": reply.message.get("content")}
    if reply.calls:
        message["tool_calls"] = _calls(reply)
    choice = {"index": 0, "message": message, "finish_reason": reply.finish}
    pairs = list(zip(turn.tokens, turn.log_probs.tolist(), strict=True))
    choice |= {"token_ids": turn.tokens, "logprobs": _shown(envelope, pairs)}
    return envelope.head("chatcmpl", "chat.completion") | {
        "usage": usage(reply),
        "prompt_token_ids": reply.prompt,
        "choices": [choice],
    }


async def events(envelope: Envelope, items: Items) -> AsyncIterator[bytes]:
    """Yield the events of a stream: one for each token, then the calls and the end."""

    head = envelope.head("chatcmpl", "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None, **further: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, **further}
        return event({**head, "choices": [choice]})

    async for item in items:
        match item:
            case Accepted(prompt):
                first = {"index": 0, "delta": {"role": "assistant", "content": ""}}
                choices = [first | {"finish_reason": None}]
                yield event({**head, "choices": choices, "prompt_token_ids": prompt})
            case Piece(token, value, text):
                shown = _shown(envelope, [(token, value)])
                yield chunk({"content": text}, token_ids=[token], logprobs=shown)
            case Reply():
                if item.rest:
                    yield chunk({"content": item.rest})
                for index, call in enumerate(_calls(item)):
                    yield chunk({"tool_calls": [{"index": index, **call}]})
                yield chunk({}, item.finish)
                if envelope.options.stream_usage:
                    yield event({**head, "choices": [], "usage": usage(item)})
                yield b"data: [DONE]\n\n"


PROTOCOL = Protocol(parse, answer, events)
