"""Messages, tools and calls of tools of published data, in the form that chat templates read.

Datasets write the same conversation in many ways: ShareGPT's `from` and `value`, parts in place of
texts, OpenAI's arguments as JSON text, calls as JSON text of a role of their own.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from typing import Any

from tpu_rl.data import span_weights
from tpu_rl.data.values import shown

Message = dict[str, Any]

CALL_ROLES = ("function_call", "tool_call")
"""Roles of messages whose text is one call or a list of calls, as JSON."""

ROLE_NAMES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bot", "ai", "model", "assistant"), "assistant"),
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(CALL_ROLES, "assistant"),
}
"""Names of roles in published data -> our role."""

IMAGE_MARK = "\ufffc"
"""The object replacement character: an image in a text."""
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of the parts of a message that are images."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts that are texts."""


def is_image_part(part: Any) -> bool:
    """Return True if a part of a message is an image. Qwen's parts may have no type."""
    is_part = isinstance(part, dict)
    return is_part and part.get("type", "image" if "image" in part else "") in IMAGE_PARTS


def canonical(value: Any, place: str) -> Any:
    """Return a list of messages with `role` and `content`; any other value as it is.

    Further keys stay. What is no message is left for the check of the row to name.

    Raises:
        ValueError: if a message is clear in its form, but cannot be used.
    """
    if isinstance(value, dict) and ("role" in value or "from" in value):
        value = [value]
    if not isinstance(value, list):
        return value
    messages = []
    for number, message in enumerate(value, start=1):
        is_message = isinstance(message, dict)
        messages.append(
            _message(message, f"message {number} of `{place}`") if is_message else message
        )
    return messages


def parsed_list(value: Any) -> Any:
    """Return the list of messages that a text holds as JSON; any other value as it is.

    Messages of different keys do not fit in one Arrow column, so some are published as text.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    with contextlib.suppress(ValueError):
        items = json.loads(value)
        if items and all(
            isinstance(item, dict) and {"role", "from"} & item.keys() for item in items
        ):
            return items
    return value


def _message(message: Message, place: str) -> Message:
    """Return a message with our names of keys and roles."""
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message and "from" not in message:
        return message
    name = message.pop("role", None) if "role" in message else message.pop("from")
    for key in ("value", "text"):
        if "content" not in message and key in message:
            message["content"] = message.pop(key)
    result: Message = {"role": _role(name, place)}
    content = message.pop("content", None)
    calls = message.pop("tool_calls", None)
    if name in CALL_ROLES:
        calls = content
        content = None
    legacy = message.get("function_call")
    if not calls and isinstance(legacy, dict | str) and name not in CALL_ROLES:
        calls = [message.pop("function_call")]
    calls = _calls(calls, place)
    if content is not None:
        result["content"] = "".join(_texts(content, place))
        message = _with_spans(message, result, place)
    elif not calls:
        raise ValueError(f"{place} has no content; it has `role` and `content`, or calls of tools")
    if calls:
        result["tool_calls"] = calls
    return result | _with_weight(message, result["role"], place)


def _role(name: Any, place: str) -> Any:
    """Return our name of a role. Raises ValueError for an unknown name of ShareGPT's form."""
    if not isinstance(name, str) or name in ("function", "ipython"):
        return name
    if name in ROLE_NAMES:
        return ROLE_NAMES[name]
    nearest = difflib.get_close_matches(name, ROLE_NAMES, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(
        f"{place} has the unknown role {name[:40]!r}; roles are {', '.join(ROLE_NAMES)}{hint}"
    )


def _with_spans(message: Message, result: Message, place: str) -> Message:
    """Return the further keys of a message, with the weights of its parts in one form."""
    key = span_weights.KEY
    if key not in message:
        return message
    weights = span_weights.checked(message[key], result["content"], place)
    if result["role"] != "assistant" and any(span["weight"] > 0 for span in weights):
        raise ValueError(f"{place} has parts to learn, and only the assistant's are learned")
    others = {name: value for name, value in message.items() if name != key}
    is_learned = result["role"] == "assistant" and weights
    return ({key: weights} | others) if is_learned else others


def _texts(content: Any, place: str) -> list[str]:
    """Return the texts of a content's parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise ValueError(f"the content of {place} is no text, but {shown(content)}")
    texts = []
    for part in content:
        text = part
        if is_image_part(part):
            text = IMAGE_MARK
        elif isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS:
            text = part.get("text")
        if not isinstance(text, str):
            raise ValueError(f"{place} has a part that is no text: {shown(part)}")
        keys = part if isinstance(part, dict) else {}
        flags = [key for key in keys if key in span_weights.FLAGS and part[key] is not None]
        if flags:
            raise ValueError(
                f"`{flags[0]}` of a part of {place} is not read; give the message one text, and "
                f"`{span_weights.KEY}`, the weights of its parts"
            )
        texts.append(text)
    return texts


def text_of(content: Any, place: str) -> str:
    """Return the text of a content, also of one in parts. Raises ValueError if it is none."""
    parts = [content] if isinstance(content, dict) else content
    return "".join(_texts(parts, place))


def _with_weight(message: Message, role: Any, place: str) -> Message:
    """Return the further keys, with a flag of training as the `weight`."""
    for mask in span_weights.OTHER_MASKS:
        if mask in message:
            raise ValueError(
                f"`{mask}` of {place} has no meaning that libraries agree on; write `train` (true "
                "or false: whether the message is learned), `weight` (a number), or "
                f"`{span_weights.KEY}` for parts of it"
            )
    for flag in span_weights.LEARNED_FLAGS:
        if flag not in message:
            continue
        value = message[flag]
        if not isinstance(value, bool):
            raise ValueError(
                f"`{flag}` of {place} is {shown(value)}: true and false say whether the message "
                "is learned, and `weight` is a number"
            )
        if value and role != "assistant":
            raise ValueError(
                f"`{flag}` of {place} is true, and only the assistant's messages are learned"
            )
        others = {key: item for key, item in message.items() if key != flag}
        message = {"weight": float(value)} | others if not value else others
    return message


def _calls(calls: Any, place: str) -> list[Any]:
    """Return calls of tools as {"type": "function", "function": {"name", "arguments"}}."""
    if calls is None or calls == "":
        return []
    if isinstance(calls, str):
        calls = _parsed(calls, f"the calls of {place}")
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise ValueError(f"the calls of {place} are no list, but {shown(calls)}")
    return [_call(call, place) for call in calls]


def _call(call: Any, place: str) -> dict[str, Any]:
    if isinstance(call, str):
        call = _parsed(call, f"a call of {place}")
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"a call of {place} has no name of a function: {shown(call)}; "
            'as in {"function": {"name": "...", "arguments": {...}}}'
        )
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        # OpenAI's form. A template would write the text once more as a JSON string.
        arguments = _parsed(arguments, f"`arguments` of {place}") if arguments.strip() else {}
    if not isinstance(arguments, dict | None):
        raise ValueError(f"`arguments` of {place} are no object, but {shown(arguments)}")
    others = {key: value for key, value in call.items() if key == "id"}
    whole = {"name": function["name"], "arguments": arguments or {}}
    return others | {"type": "function", "function": whole}


def canonical_tools(tools: Any) -> list[Any] | None:
    """Return descriptions of functions as a list of {"type": "function", "function": ...}.

    Raises ValueError if they are neither objects nor the JSON text of objects.
    """
    original = tools
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            tools = tools.strip()
    if not tools and not isinstance(tools, int):
        return None
    if not isinstance(tools, list | dict):
        raise ValueError(
            f"`tools` is a list of objects, or such a list as JSON text, not {shown(original)}"
        )
    result = []
    for tool in [tools] if isinstance(tools, dict) else tools:
        tool = _parsed(tool, "one of `tools`") if isinstance(tool, str) else tool
        if not isinstance(tool, dict):
            raise ValueError(f"one of `tools` is no object, but {shown(tool)}")
        if "function" not in tool and isinstance(tool.get("name"), str):
            tool = {"type": "function", "function": tool}
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("parameters"), str):
            parameters = _parsed(function["parameters"], "`parameters` of one of `tools`")
            tool = tool | {"function": function | {"parameters": parameters}}
        result.append(tool)
    return result


def without_nulls(value: Any) -> Any:
    """Return a value without keys that are null, at every depth.

    Arrow gives each struct the fields of all structs of its column.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} is text, but not JSON: {text[:60]!r} ({error})") from None
