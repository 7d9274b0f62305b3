"""Anthropic's Messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from tpu_rl.serving import protocol, replies
from tpu_rl.serving.protocol import ApiError, ChatRequest, Fields
from tpu_rl.serving.replies import Accepted, Envelope, Items, Piece, Protocol, Reply, event

ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error in the form of this protocol."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    about = {"type": ERRORS.get(error.status, kind), "message": error.message}
    return {"type": "error", "error": about, "request_id": None}


def parse(body: Any) -> ChatRequest:
    """Return the request of a body."""
    fields = Fields(body)
    request = _conversation(fields)
    stops = protocol.stop_strings(fields, "stop_sequences", (list,))
    fields.only("service_tier", "auto", "standard_only")
    if not fields.has("max_tokens"):
        raise ApiError(400, "max_tokens is missing", "max_tokens")
    options = protocol.options(fields, limits=protocol.TOKEN_LIMITS[::-1])
    return replace(request, options=replace(options, stop=stops or options.stop))


def parse_count(body: Any) -> ChatRequest:
    """Return the request of a body whose tokens are counted."""
    fields = Fields(body)
    request = _conversation(fields)
    fields.finish("model")
    return request


def _conversation(fields: Fields) -> ChatRequest:
    """Return the messages and the tools."""
    messages: list[dict[str, Any]] = []
    images: protocol.Images = {}
    system = fields.take("system", (str, list))
    if system:
        content = protocol.content_of(system, ("text",), "system", None)
        messages.append({"role": "system", **content})
    parts = fields.items(
        "messages", lambda value, place: _message(value, place, images), may_be_empty=False
    )
    messages += itertools.chain(*parts)
    if messages[-1]["role"] == "assistant":
        raise ApiError(400, "the last message is the assistant's, and is not continued here")
    tools = fields.items("tools", _tool)
    choice = Fields(fields.take("tool_choice", dict) or {"type": "auto"}, "tool_choice")
    choice.only("disable_parallel_tool_use", False)
    kind = choice.take("type", str, lambda kind: kind in ("auto", "none"))
    choice.finish()
    # What the model writes is text here, so that there are no thoughts to ask for or to clear.
    fields.only("thinking", {"type": "disabled"}, {"type": "adaptive"})
    cleared = {"type": "clear_thinking_20251015", "keep": "all"}
    fields.only("context_management", {"edits": [cleared]}, {"edits": []})
    fields.only("output_config", {}, {"effort": "high"})  # That of requests which say nothing.
    fields.ignore("cache_control")
    shown = (tools or None) if kind != "none" else None
    return ChatRequest(messages, shown, protocol.Options(), images)


def _tool(value: Any, place: str) -> dict[str, Any]:
    fields = Fields(value, place)
    fields.only("type", "custom")
    fields.only("defer_loading", False)
    schema = protocol.tool(fields, fields.require("input_schema", dict))
    fields.finish("cache_control", "strict", "eager_input_streaming")
    return schema


def _message(value: Any, place: str, images: protocol.Images) -> list[dict[str, Any]]:
    """Split a message of this protocol: each result of a tool becomes a message."""
    fields = Fields(value, place)
    role = fields.require("role", str)
    content = fields.require("content", (str, list))
    fields.finish()
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{place}.role is neither user nor assistant", f"{place}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not content:
        raise ApiError(400, f"{place}.content is empty", f"{place}.content")
    place = f"{place}.content"
    messages: list[dict[str, Any]] = []
    for block in content:
        kind = Fields(block, place).require("type", str)
        if kind == "tool_result" and role == "user":
            messages.append(_result(block, place, images))
            continue
        # Texts and calls that follow each other are one message.
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role})
        if kind == "tool_use" and role == "assistant":
            messages[-1].setdefault("tool_calls", []).append(_call(block, place))
        else:
            last = messages[-1]
            added = protocol.content_of([block], ("text",), place, images)
            last["content"] = last.get("content", "") + added["content"]
            if "images" in added:
                last["images"] = [*last.get("images", []), *added["images"]]
    return messages


def _result(block: Any, place: str, images: protocol.Images) -> dict[str, Any]:
    fields = Fields(block, place)
    value = fields.take("content", (str, list)) or ""
    content = protocol.content_of(value, ("text",), place, images)
    if fields.flag("is_error"):
        content["content"] = f"Error: {content['content']}"
    call_id = fields.require("tool_use_id", str)
    fields.finish("type", "cache_control")
    return {"role": "tool", **content, "tool_call_id": call_id}


def _call(block: Any, place: str) -> dict[str, Any]:
    fields = Fields(block, place)
    call = protocol.call(
        fields.require("name", str), fields.require("input", dict), fields.require("id", str)
    )
    fields.finish("type", "cache_control", "caller")
    return call


def _reason(reply: Reply) -> dict[str, Any]:
    reason = "stop_sequence" if reply.stop is not None else STOP_REASONS[reply.finish]
    return {"stop_reason": reason, "stop_sequence": reply.stop}


def _head(envelope: Envelope, prompt: list[int]) -> dict[str, Any]:
    head = {"id": f"msg_{envelope.number}", "type": "message", "role": "assistant"}
    usage = {"input_tokens": len(prompt), "output_tokens": 0}
    head |= {"model": envelope.model, "content": [], "usage": usage}
    return head | {"stop_reason": None, "stop_sequence": None}


def _use(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    name = call["function"]["name"]
    return {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}


def answer(envelope: Envelope, reply: Reply) -> dict[str, Any]:
    """Return the body of an answer, with the token ids of prompt and completion."""
    content: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        content.append({"type": "text", "text": reply.text})
    content += [_use(call, call["function"]["arguments"]) for call in reply.calls]
    usage = {"input_tokens": len(reply.prompt), "output_tokens": len(reply.turn.tokens)}
    message = _head(envelope, reply.prompt) | _reason(reply) | {"content": content, "usage": usage}
    return message | {"prompt_token_ids": reply.prompt, "token_ids": reply.turn.tokens}


async def events(envelope: Envelope, items: Items) -> AsyncIterator[bytes]:
    """Yield the events of a stream: one for each token with text, then the calls and the end."""

    def write(name: str, **values: Any) -> bytes:
        return event({"type": name, **values}, name)

    def start(index: int, block: dict[str, Any]) -> bytes:
        return write("content_block_start", index=index, content_block=block)

    def delta(index: int, kind: str, **values: Any) -> bytes:
        return write("content_block_delta", index=index, delta={"type": kind, **values})

    empty = {"type": "text", "text": ""}
    blocks = 0
    async for item in items:
        match item:
            case Accepted(prompt):
                yield write("message_start", message=_head(envelope, prompt))
            case Piece(_, _, text):
                if not blocks and not text:
                    continue
                if not blocks:
                    yield start(0, empty)
                blocks = 1
                yield delta(0, "text_delta", text=text)
            case Reply():
                if not blocks and (item.text or not item.calls):
                    yield start(0, empty)
                    blocks = 1
                if item.rest:
                    yield delta(0, "text_delta", text=item.rest)
                if blocks:
                    yield write("content_block_stop", index=0)
                for index, call in enumerate(item.calls, start=blocks):
                    yield start(index, _use(call, {}))
                    text = replies.arguments_of(call)
                    yield delta(index, "input_json_delta", partial_json=text)
                    yield write("content_block_stop", index=index)
                usage = {"output_tokens": len(item.turn.tokens)}
                yield write("message_delta", delta=_reason(item), usage=usage)
                yield write("message_stop")


PROTOCOL = Protocol(parse, answer, events)
