"""Calls of tools in what a model wrote, by the format that its chat template teaches.

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>, several in a turn (Qwen,
              Hermes, SmolLM); also with <function=f><parameter=x>...</parameter></function> inside
              (Qwen3-Coder)
    llama     {"name": "f", "parameters": {...}}, also after <|python_tag|>; several with ";"
    mistral   [TOOL_CALLS] [{"name": "f", "arguments": {...}}]
    gemma     f(x=1) as Python, in a block that begins with ```tool_code
    plain     <tool>f({"x": 1})</tool>, or <tool>f: text</tool> for a tool with one parameter: the
              protocol of base models, whose prompt must explain it. Make </tool> a stop string.

A call that begins and cannot be read is a `BadCall`, and the model is told the reason.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PLAIN_STOP = "</tool>"
"""The end of a call in the plain protocol: a stop string for base models."""
RESULT = "<result>{}</result>"
"""What the model reads after a call in the plain protocol."""

Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools."""


class ToolCall(NamedTuple):
    """A call that the model made."""

    name: str
    arguments: dict[str, Any]


class BadCall(NamedTuple):
    """A call that cannot be read."""

    reason: str


class ParsedTurn(NamedTuple):
    """A turn of the model."""

    content: str
    """The text beside the calls."""
    calls: list[ToolCall | BadCall]

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message of a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
            if isinstance(call, ToolCall)
        ]
        return message | ({"tool_calls": calls} if calls else {})


def format_of(template: str | None) -> str:
    """Return the name of the format that a chat template teaches."""
    if template is None:
        return "plain"
    for mark, name in (
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>", "llama"),
        ("<start_of_turn>", "gemma"),
    ):
        if mark in template:
            return name
    return "hermes"


def parse(text: str, format_name: str, tools: Tools) -> ParsedTurn:
    """Return a turn and its calls.

    Args:
        text: what the model wrote, without the token that ends the turn.
        format_name: see `format_of`.
        tools: the schemas of the tools, for arguments without a name or a type.
    """
    parameters = {
        tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools
    }
    return PARSERS[format_name](text, parameters)


def from_message(message: Mapping[str, Any]) -> ParsedTurn:
    """Return a turn that the tokenizer's own parser has read."""
    calls = [_as_call(call.get("function", call)) for call in message.get("tool_calls") or []]
    return ParsedTurn(str(message.get("content") or ""), calls)


# --- formats ---

Parameters = Mapping[str, Mapping[str, Any]]
"""Tool -> the schemas of its parameters."""


def _parse_hermes(text: str, parameters: Parameters) -> ParsedTurn:
    calls: list[ToolCall | BadCall] = []
    content = ""
    position = 0
    while (start := text.find("<tool_call>", position)) >= 0:
        content += text[position:start]
        body = start + len("<tool_call>")
        body += len(text[body:]) - len(text[body:].lstrip())
        call, end = _read_object(text, body)
        close = text.find("</tool_call>", end)
        stop = len(text) if close < 0 else close
        if isinstance(call, BadCall) and text.startswith("<function=", body):
            call = _read_tags(text[body:stop], parameters)
        elif isinstance(call, ToolCall) and text[end:stop].strip():
            call = BadCall("there is text between the JSON and </tool_call>")
        calls.append(call)
        position = min(stop + len("</tool_call>"), len(text))
    return ParsedTurn((content + text[position:]).strip(), calls)


def _read_tags(text: str, parameters: Parameters) -> ToolCall | BadCall:
    """Return a call as Qwen3-Coder writes it."""
    function = re.fullmatch(r"<function=([^>\n]+)>(.*?)(</function>)?\s*", text, re.DOTALL)
    if function is None or function[3] is None:
        return BadCall("it does not end with </function>")
    name = function[1].strip()
    arguments = {}
    pattern = r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"
    for key, value in re.findall(pattern, function[2], re.DOTALL):
        schema = parameters.get(name, {}).get(key.strip(), {})
        arguments[key.strip()] = _as_typed(value, schema)
    return ToolCall(name, arguments)


def _as_typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of an argument that was written without quotation marks."""
    if schema.get("type", "string") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parse_llama(text: str, parameters: Parameters) -> ParsedTurn:
    before, tag, rest = text.partition("<|python_tag|>")
    body = rest if tag else before
    body = body.strip()
    if not tag and not re.match(r'\{\s*"(name|type)"', body):
        if body.startswith("[") and _python_calls(body) is not None:
            return ParsedTurn("", _read_python(body, parameters))
        return ParsedTurn(text.strip(), [])
    content = before.strip() if tag else ""
    if not body.startswith("{"):
        return ParsedTurn(content, _read_python(body.replace(".call(", "("), parameters))
    calls: list[ToolCall | BadCall] = []
    while body:
        call, end = _read_object(body, 0)
        calls.append(call)
        if isinstance(call, BadCall):
            break
        body = body[end:].lstrip(" \n;,")
    return ParsedTurn(content, calls)


def _parse_mistral(text: str, parameters: Parameters) -> ParsedTurn:
    del parameters
    content, tag, body = text.partition("[TOOL_CALLS]")
    if not tag:
        return ParsedTurn(text.strip(), [])
    try:
        values = json.loads(body.strip())
    except ValueError as error:
        return ParsedTurn(content.strip(), [BadCall(f"it is no JSON: {error}")])
    values = values if isinstance(values, list) else [values]
    return ParsedTurn(content.strip(), [_as_call(value) for value in values])


def _parse_gemma(text: str, parameters: Parameters) -> ParsedTurn:
    content, tag, rest = text.partition("```tool_code")
    if not tag:
        return ParsedTurn(text.strip(), [])
    code, _, after = rest.partition("```")
    return ParsedTurn((content + after).strip(), _read_python(code.strip(), parameters))


def _parse_plain(text: str, parameters: Parameters) -> ParsedTurn:
    calls: list[ToolCall | BadCall] = []
    content = ""
    position = 0
    while (start := text.find("<tool>", position)) >= 0:
        content += text[position:start]
        body = start + len("<tool>")
        close = text.find(PLAIN_STOP, body)
        if close < 0:
            calls.append(BadCall(f"it does not end with {PLAIN_STOP}"))
            return ParsedTurn(content.strip(), calls)
        calls.append(_read_plain(text[body:close].strip(), parameters))
        position = close + len(PLAIN_STOP)
    return ParsedTurn((content + text[position:]).strip(), calls)


def _read_plain(text: str, parameters: Parameters) -> ToolCall | BadCall:
    match = re.fullmatch(r"(\w+)\s*(?:\((.*)\)|:\s*(.*))", text, re.DOTALL)
    if match is None:
        return BadCall("it is neither name({...}) nor name: text")
    name = match[1]
    if match[3] is not None:
        names = list(parameters.get(name, {}))
        if len(names) != 1:
            return BadCall(f"{name} has {len(names)} parameters: write {name}({{...}}) with JSON")
        return ToolCall(name, {names[0]: _as_typed(match[3], parameters[name][names[0]])})
    if not match[2].strip():
        return ToolCall(name, {})
    return _as_call({"name": name, "arguments": match[2]})


PARSERS: dict[str, Callable[[str, Parameters], ParsedTurn]] = {
    "hermes": _parse_hermes,
    "llama": _parse_llama,
    "mistral": _parse_mistral,
    "gemma": _parse_gemma,
    "plain": _parse_plain,
}

# --- JSON ---


def _read_object(text: str, start: int) -> tuple[ToolCall | BadCall, int]:
    """Return the call that begins at a place, and where its JSON ends."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return BadCall(f"it is no JSON: {error}"), start
    return _as_call(value), end


def _as_call(value: Any) -> ToolCall | BadCall:
    """Return the call that a JSON value describes."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return BadCall('it is no JSON object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f"its arguments are no JSON: {error}")
    if not isinstance(arguments, Mapping):
        return BadCall("its arguments are no JSON object")
    return ToolCall(value["name"], {str(key): item for key, item in arguments.items()})


# --- Python ---


def _python_calls(code: str) -> list[ast.Call] | None:
    """Return the calls that are all that a piece of Python consists of, or None."""
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    values: list[ast.expr] = []
    for statement in statements:
        if not isinstance(statement, ast.Expr):
            return None
        value = statement.value
        values += value.elts if isinstance(value, ast.List) else [value]
    calls = []
    for value in values:
        # Models often print what a tool returns.
        if isinstance(value, ast.Call) and _called(value) == "print" and len(value.args) == 1:
            value = value.args[0]
        if not isinstance(value, ast.Call) or not _called(value):
            return None
        calls.append(value)
    return calls or None


def _read_python(code: str, parameters: Parameters) -> list[ToolCall | BadCall]:
    """Return the calls that a piece of Python makes. It is not run."""
    calls = _python_calls(code)
    if calls is None:
        return [BadCall("it is no call like name(parameter=value)")]
    return [_read_python_call(call, parameters) for call in calls]


def _read_python_call(call: ast.Call, parameters: Parameters) -> ToolCall | BadCall:
    name = _called(call)
    names = list(parameters.get(name, {}))
    if len(call.args) > len(names) or any(keyword.arg is None for keyword in call.keywords):
        return BadCall(f"{name} has {len(names)} parameters")
    given = dict(zip(names, call.args, strict=False))
    given |= {str(keyword.arg): keyword.value for keyword in call.keywords}
    try:
        return ToolCall(name, {key: ast.literal_eval(value) for key, value in given.items()})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return BadCall("its arguments are no plain values")


def _called(call: ast.Call) -> str:
    """Return the name of what is called: "f" of both f() and tools.f()."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""
