"""OpenAI's Responses: POST /v1/responses. Nothing is stored: each request has the whole input."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

from tpu_rl.serving import protocol, replies
from tpu_rl.serving.chat_completions import log_prob
from tpu_rl.serving.protocol import ApiError, ChatRequest, Fields
from tpu_rl.serving.replies import Accepted, Envelope, Items, Piece, Protocol, Reply, event

TEXTS = ("input_text", "output_text", "text")
LOG_PROBS = "message.output_text.logprobs"


def parse(body: Any) -> ChatRequest:
    """Return the request of a body."""
    fields = Fields(body)
    images: protocol.Images = {}
    messages = _messages(fields.require("input", (str, list)), images)
    if not messages:
        raise ApiError(400, "input is empty", "input")
    instructions = fields.take("instructions", str)
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    tools = fields.items("tools", _tool)
    choice = fields.take("tool_choice", str, lambda choice: choice in ("auto", "none"))
    include = fields.take("include", list) or []
    for name in include:
        # Nothing here has reasoning, whose encrypted form would be empty.
        if name not in (LOG_PROBS, "reasoning.encrypted_content"):
            raise ApiError(400, f"include {str(name)[: protocol.MAX_TEXT]!r} is not supported here")
    text = Fields(fields.take("text", dict) or {}, "text")
    text.only("format", {"type": "text"})
    text.only("verbosity", "medium")
    text.finish()
    for name, value in (("parallel_tool_calls", True), ("background", False)):
        fields.only(name, value)
    fields.only("truncation", "disabled")
    fields.only("service_tier", "auto", "default")
    # Nothing here has reasoning of its own, of which a summary would say something.
    reasoning = Fields(fields.take("reasoning", dict) or {}, "reasoning")
    reasoning.finish("summary")
    fields.only("top_logprobs", 0)
    fields.ignore("client_metadata", "prompt_cache_key", "prompt_cache_retention")
    limits = ("max_output_tokens", *protocol.TOKEN_LIMITS)
    options = protocol.options(fields, logprobs=LOG_PROBS in include, limits=limits)
    return ChatRequest(messages, (tools or None) if choice != "none" else None, options, images)


def _tool(value: Any, place: str) -> dict[str, Any]:
    fields = Fields(value, place)
    kind = fields.require("type", str)
    if kind != "function":
        kind = f"a {kind[: protocol.MAX_TEXT]!r}"
        raise ApiError(
            400, f"{place} is {kind} and no function, and no other tools are here", place
        )
    fields.only("defer_loading", False)
    schema = protocol.tool(fields, fields.take("parameters", dict))
    fields.finish("strict")
    return schema


def _messages(value: str | list[Any], images: protocol.Images) -> list[dict[str, Any]]:
    """Return the messages of an input. Calls belong to the assistant's message before them."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        place = f"input[{index}]"
        fields = Fields(item, place)
        kind = fields.take("type", str) or "message"
        fields.ignore("id", "status")
        match kind:
            case "message":
                role = fields.require("role", str)
                content = fields.require("content", (str, list))
                content = protocol.content_of(content, TEXTS, place, images)
                # Templates know the older name.
                role = "system" if role == "developer" else role
                messages.append({"role": role, **content})
                fields.ignore("phase")
            case "function_call":
                name = fields.require("name", str)
                text = fields.require("arguments", str)
                arguments = protocol.arguments(text, f"{place}.arguments")
                call = protocol.call(name, arguments, fields.require("call_id", str))
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                messages[-1].setdefault("tool_calls", []).append(call)
                fields.ignore("caller", "namespace")
            case "function_call_output":
                content = fields.require("output", (str, list))
                content = protocol.content_of(content, TEXTS, place, images)
                call_id = fields.require("call_id", str)
                messages.append({"role": "tool", **content, "tool_call_id": call_id})
                fields.ignore("caller")
            case _:
                shown = kind[: protocol.MAX_TEXT]
                raise ApiError(400, f"{place} has the type {shown!r}, which is not supported here")
        fields.finish()
    return messages


def _text_item(envelope: Envelope, reply: Reply | None) -> dict[str, Any]:
    """Return the message, or its beginning."""
    content = [] if reply is None else [_part(envelope, reply)]
    status = "in_progress" if reply is None else _status(reply)
    item = {"type": "message", "id": f"msg_{envelope.number}", "status": status}
    return item | {"role": "assistant", "content": content}


def _part(envelope: Envelope, reply: Reply | None) -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    if reply is None:
        return part
    pairs = zip(reply.turn.tokens, reply.turn.log_probs.tolist(), strict=True)
    is_shown = envelope.options.logprobs
    shown = [log_prob(envelope.tokenizer, *pair) for pair in pairs] if is_shown else []
    return part | {"text": reply.text, "logprobs": shown}


def _call_item(call: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]}
    item |= {"name": call["function"]["name"], "status": status}
    return item | {"arguments": replies.arguments_of(call) if status == "completed" else ""}


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish == "length" else "completed"


def _response(envelope: Envelope, reply: Reply | None) -> dict[str, Any]:
    options = envelope.options
    response = {
        "id": f"resp_{envelope.number}",
        "object": "response",
        "created_at": envelope.created,
        "model": envelope.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_output_tokens": options.max_tokens,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }
    if reply is None:
        return response
    output = [_text_item(envelope, reply)] if reply.text or not reply.calls else []
    output += [_call_item(call) for call in reply.calls]
    read, written = len(reply.prompt), len(reply.turn.tokens)
    counts = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    counts |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    counts |= {"output_tokens_details": {"reasoning_tokens": 0}}
    status = _status(reply)
    why = {"reason": "max_output_tokens"} if status == "incomplete" else None
    response |= {"status": status, "incomplete_details": why, "output": output, "usage": counts}
    return response


def answer(envelope: Envelope, reply: Reply) -> dict[str, Any]:
    """Return the body of an answer, with the token ids of prompt and completion."""
    ids = {"prompt_token_ids": reply.prompt, "token_ids": reply.turn.tokens}
    return _response(envelope, reply) | ids


async def events(envelope: Envelope, items: Items) -> AsyncIterator[bytes]:
    """Yield the events of a stream: one for each token, then the calls and the end."""
    numbers = itertools.count()

    def write(ending: str, /, **values: Any) -> bytes:
        kind = f"response.{ending}"
        return event({"type": kind, "sequence_number": next(numbers), **values}, kind)

    where = {"item_id": f"msg_{envelope.number}", "output_index": 0, "content_index": 0}
    has_text = False

    def open_text() -> list[bytes]:
        item = _text_item(envelope, None)
        part = _part(envelope, None)
        return [
            write("output_item.added", output_index=0, item=item),
            write("content_part.added", part=part, **where),
        ]

    async for item in items:
        match item:
            case Accepted():
                yield write("created", response=_response(envelope, None))
                yield write("in_progress", response=_response(envelope, None))
            case Piece(token, value, text):
                # A token of a call has no text, and the message may have none at all.
                if not has_text and not text:
                    continue
                for opening in () if has_text else open_text():
                    yield opening
                has_text = True
                shown = [log_prob(envelope.tokenizer, token, value)]
                shown = shown if envelope.options.logprobs else []
                yield write("output_text.delta", delta=text, logprobs=shown, **where)
            case Reply():
                response = _response(envelope, item)
                output = response["output"]
                if output[0]["type"] == "message":
                    for opening in () if has_text else open_text():
                        yield opening
                    if item.rest:
                        yield write("output_text.delta", delta=item.rest, logprobs=[], **where)
                    part = output[0]["content"][0]
                    shown = part["logprobs"]
                    yield write("output_text.done", text=item.text, logprobs=shown, **where)
                    yield write("content_part.done", part=part, **where)
                    yield write("output_item.done", output_index=0, item=output[0])
                first = len(output) - len(item.calls)
                for index, (call, done) in enumerate(
                    zip(item.calls, output[first:], strict=True), start=first
                ):
                    place = {"item_id": done["id"], "output_index": index}
                    begun = _call_item(call, "in_progress")
                    text = done["arguments"]
                    yield write("output_item.added", output_index=index, item=begun)
                    yield write("function_call_arguments.delta", delta=text, **place)
                    yield write(
                        "function_call_arguments.done", arguments=text, name=done["name"], **place
                    )
                    yield write("output_item.done", output_index=index, item=done)
                yield write(response["status"], response=response)


PROTOCOL = Protocol(parse, answer, events)
