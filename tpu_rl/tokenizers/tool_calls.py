"""Calls of tools in what a model wrote, by the format that its chat template teaches.

`FORMATS` has a row for each format. In most, a call stands between two marks:

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call> (Qwen, Hermes, Granite 4)
              with <function=f><parameter=x>...</parameter></function> inside (Qwen3-Coder, Qwen3.5)
              or f<arg_key>x</arg_key><arg_value>...</arg_value> (GLM-4.5)
    granite   <|tool_call|>[{"name": "f", "arguments": {...}}] (Granite 3, Phi-4-mini)
    olmo      <function_calls>f(x=1)</function_calls>, one a line
    gemma4    <|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>
    gemma     f(x=1) as Python, in a block that begins with ```tool_code (Gemma 3)
    mistral   [TOOL_CALLS] [{"name": "f", "arguments": {...}}], or [TOOL_CALLS]f[ARGS]{...},
              also without [ARGS]
    deepseek  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜> (V3.1; in V3 and R1 the
              name is followed by a block of JSON)
    function  <function=f>{...}</function> (Llama 3.1's own tools), or Qwen3-Coder's tags without
              <tool_call>
    plain     <tool>f({"x": 1})</tool>, or <tool>f: text</tool> for a tool with one parameter: the
              protocol of base models, whose prompt must explain it. Make </tool> a stop string.

In others, a whole turn is a call:

    llama     {"name": "f", "parameters": {...}}, also after <|python_tag|>; several with ";"
    glm4      f, and {...} in the next line
    harmony   <|channel|>commentary to=functions.f<|message|>{...} (gpt-oss)

What stands in thoughts, as between <think> and </think>, is no call. A call that begins and cannot
be read, or has values that JSON cannot write, is a `BadCall`, and the model is told the reason.
Texts are read in linear time.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PLAIN_STOP = "</tool>"
"""The end of a call in the plain protocol: a stop string for base models."""
RESULT = "<result>{}</result>"
"""What the model reads after a call in the plain protocol."""
MAX_DEPTH = 64
"""The deepest nesting of arguments."""
MAX_BITS = 4096
"""The longest integer."""
MAX_REASON = 200
"""Characters of the reason of a bad call."""

THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "◁think▷": "◁/think▷",
}
"""Beginning of a thought -> its end."""
THOUGHT_ENDS = frozenset(THOUGHTS.values())

Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools."""


class ToolCall(NamedTuple):
    """A call that the model made."""

    name: str
    arguments: dict[str, Any]


class BadCall(NamedTuple):
    """A call that cannot be read."""

    reason: str


Calls = list[ToolCall | BadCall]


class ParsedTurn(NamedTuple):
    """A turn of the model."""

    content: str
    """The text beside the calls."""
    calls: Calls

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


def format_of(template: str | None) -> str | None:
    """Return the first format of which a chat template has a mark, which only suggests it; "plain"
    without a template, and None without a mark."""
    return "plain" if template is None else next(iter(formats_of(template)), None)


def formats_of(template: str) -> list[str]:
    """Return the formats of which a chat template has a mark."""
    return [name for name, row in FORMATS.items() if row.is_in(template, row.template_marks)]


def explained_in(prompt: str) -> str | None:
    """Return the format that a prompt explains by an example or by its marks; None for none."""
    formats = (name for name, row in FORMATS.items() if row.is_in(prompt, row.prompt_marks))
    return next(formats, None)


def begins_thought(prompt: str) -> bool:
    """Return True if a prompt ends inside a thought, as one that ends with "<think>"."""
    return prompt.rstrip().endswith(tuple(THOUGHTS))


def parse(text: str, format_name: str, tools: Tools, in_thought: bool = False) -> ParsedTurn:
    """Return a turn and its calls.

    Args:
        text: what the model wrote, without the token that ends the turn.
        format_name: a key of `FORMATS`.
        tools: the schemas of the tools, for arguments without a name or a type.
        in_thought: whether the prompt has begun a thought.
    """
    row = FORMATS[format_name]
    turn = row.read(text, row, parameters_of(tools), in_thought)
    return turn._replace(calls=[_checked(call) for call in turn.calls])


def content_length(text: str, format_name: str) -> int:
    """Count the characters of a turn that still goes on which are content, whatever follows."""
    row = FORMATS[format_name]
    # `parse` strips the content of a turn with calls.
    if row.read is not _read_blocks or text[:1].isspace():
        return 0
    return len(text[: first_mark(text, (*row.openings, *row.brackets))].rstrip())


def first_mark(text: str, marks: Sequence[str]) -> int:
    """Return where the first of some marks begins, or may begin at the end of the text."""
    places = [text.find(mark) for mark in marks]
    end = min([place for place in places if place >= 0], default=len(text))
    for start in range(max(0, len(text) - max(map(len, marks), default=0)), end):
        if any(mark.startswith(text[start:]) for mark in marks):
            return start
    return end


def from_message(message: Mapping[str, Any]) -> ParsedTurn:
    """Return a turn that the tokenizer's own parser has read."""
    values = message.get("tool_calls")
    calls = [_as_call(value) for value in values] if isinstance(values, list) else []
    return ParsedTurn(str(message.get("content") or ""), [_checked(call) for call in calls])


Parameters = Mapping[str, Mapping[str, Any]]
"""Tool -> the schemas of its parameters."""


class Body(NamedTuple):
    """A place behind the opening mark of a block."""

    text: str
    start: int
    closing: str | None
    """The mark that ends the block."""
    parameters: Parameters

    @property
    def stop(self) -> int:
        """The end of the block if it has no quotation marks."""
        end = -1 if self.closing is None else self.text.find(self.closing, self.start)
        return len(self.text) if end < 0 else end


def parameters_of(tools: Tools) -> Parameters:
    """Return the schemas of the parameters of tools."""
    properties = {}
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters")
        names = schema.get("properties") if isinstance(schema, Mapping) else None
        properties[function["name"]] = names if isinstance(names, Mapping) else {}
    return properties


def _checked(call: ToolCall | BadCall) -> ToolCall | BadCall:
    """Return a call, which is bad if JSON cannot write its name and values as text in UTF-8."""
    if isinstance(call, ToolCall):
        reason = _reason_against([call.name, call.arguments])
        if not reason:
            return call
        call = BadCall(reason)
    shown = call.reason.encode("utf-8", "replace").decode("utf-8")
    return BadCall(shown if len(shown) <= MAX_REASON else f"{shown[: MAX_REASON - 3]}...")


def _reason_against(value: Any) -> str:
    """Return the reason for which JSON cannot write a value, or ""."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            match item:
                case None | bool():
                    pass
                case int() if item.bit_length() > MAX_BITS:
                    return "a number in it is too long"
                case float() if not math.isfinite(item):
                    return "a number in it is not finite"
                case int() | float():
                    pass
                case str():
                    try:
                        item.encode("utf-8")
                    except UnicodeEncodeError:
                        return "a text in it has half of a surrogate pair"
                case list():
                    below += item
                case dict():
                    below += [*item, *item.values()]
                    if not all(isinstance(key, str) for key in item):
                        return "a key in it is no text"
                case _:
                    return f"a value in it is of the type {type(item).__name__}, which JSON lacks"
        if not below:
            return ""
        level = below
    return f"its arguments are nested more than {MAX_DEPTH} deep"


# --- calls between marks ---


def _read_blocks(text: str, row: Format, parameters: Parameters, in_thought: bool) -> ParsedTurn:
    """Return a turn whose calls stand between marks."""
    calls: Calls = []
    parts: list[str] = []
    thought_end = 0
    position = 0
    if in_thought:
        position = thought_end = _end_of_thought(text, 0, THOUGHT_ENDS)
    pattern = _marks(row.openings)
    while match := pattern.search(text, position):
        parts.append(text[position : match.start()])
        mark = match[0]
        position = match.end()
        if mark in THOUGHTS:
            position = _end_of_thought(text, position, {THOUGHTS[mark]})
            parts.append(text[match.start() : position])
        elif mark in THOUGHT_ENDS:
            # The thought began before the turn, or without its mark.
            calls.clear()
            parts.clear()
            thought_end = position
        else:
            of_block, position = _read_block(text, position, row, parameters)
            calls += of_block
    content = "".join([text[:thought_end], *parts, text[position:]])
    for mark in row.brackets:
        content = content.replace(mark, "")
    return ParsedTurn(content.strip(), calls)


def _marks(openings: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of what begins a call or a thought, or ends a thought."""
    marks = sorted([*openings, *THOUGHTS, *THOUGHT_ENDS], key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks)))


def _end_of_thought(text: str, start: int, ends: Sequence[str] | frozenset[str] | set[str]) -> int:
    """Return where a thought ends: at the end of the text if it has no end."""
    match = re.compile("|".join(map(re.escape, ends))).search(text, start)
    return match.end() if match else len(text)


def _read_block(text: str, start: int, row: Format, parameters: Parameters) -> tuple[Calls, int]:
    """Return the calls of a block, and where it ends.

    JSON and texts in quotation marks may spell the closing mark.
    """
    # Without a closing mark, a call ends where the next one begins.
    closing = row.closing or row.openings[0]
    calls, end = row.read_body(Body(text, _skip_space(text, start), closing, parameters))
    if row.closing is None:
        return calls, end
    close = text.find(row.closing, end)
    stop = len(text) if close < 0 else close
    is_good = all(isinstance(call, ToolCall) for call in calls)
    if is_good and text[end:stop].strip():
        calls[:] = [BadCall(f"there is text between the JSON and {row.closing}")]
    return calls, min(stop + len(row.closing), len(text))


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _after(text: str, position: int) -> str:
    """Return the next character that is no space; "" at the end."""
    begin = _skip_space(text, position)
    return text[begin : begin + 1]


def _read_any(body: Body) -> tuple[Calls, int]:
    """Return the calls that begin at a place, in the form in which they are written."""
    text, start, _, parameters = body
    if text.startswith("<function=", start):
        return _read_functions(body)
    if text.startswith("call:", start):
        return _read_gemma4(text, start)
    if text.startswith("{", start):
        return _read_json(text, start)
    stop = body.stop
    key = text.find("<arg_key>", start, stop)
    name = text[start : stop if key < 0 else key].strip()
    if re.fullmatch(r"[\w.\-]+", name):
        pairs = text[stop if key < 0 else key : stop]
        return [_read_pairs(name, pairs, _PAIR, parameters)], stop
    if re.match(r"\[?\s*[A-Za-z_][\w.]*\(", text[start : start + 200]):
        return _read_code(body)
    return _read_json(text, start)


# --- tags ---

_PARAMETER = re.compile(r"\s*<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
"""A parameter of Qwen3-Coder and Qwen3.5. One line break at each end belongs to the tags."""
_PAIR = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
"""One of GLM-4.5."""


def _read_functions(body: Body) -> tuple[Calls, int]:
    """Return the calls <function=f>...</function> of a block, and where the last one ends."""
    text, position, *_ = body
    stop = body.stop
    calls: Calls = []
    while text.startswith("<function=", position) and position < stop:
        begin = position + len("<function=")
        call, end = _function(text, begin, stop, body.parameters)
        calls.append(call)
        position = _skip_space(text, min(end + len("</function>"), stop))
    return calls, position


def _read_function(body: Body) -> tuple[Calls, int]:
    """Return the call of a block that begins behind <function=, and where it ends."""
    call, end = _function(body.text, body.start, len(body.text), body.parameters)
    return [call], end


def _function(
    text: str, start: int, stop: int, parameters: Parameters
) -> tuple[ToolCall | BadCall, int]:
    """Return the call that begins behind <function=, and where its end stands."""
    end = text.find("</function>", start, stop)
    if end < 0:
        return BadCall("it does not end with </function>"), stop
    name, _, rest = text[start:end].partition(">")
    name = name.strip()
    if rest.lstrip().startswith("{"):
        return _read_all_arguments(name, rest, _skip_space(rest, 0)), end
    return _read_pairs(name, rest, _PARAMETER, parameters), end


def _read_pairs(
    name: str, rest: str, pattern: re.Pattern[str], parameters: Parameters
) -> ToolCall | BadCall:
    """Return the call of a tool with the keys and values that a pattern finds."""
    arguments: dict[str, Any] = {}
    position = 0
    while match := pattern.match(rest, position):
        key, value = match[1].strip(), match[2]
        try:
            arguments[key] = _as_typed(value, parameters.get(name, {}).get(key))
        except ValueError as error:
            return BadCall(f"the parameter {key} {error}")
        position = match.end()
    if rest[position:].strip():
        form = "pairs of <arg_key> and <arg_value>"
        if pattern is _PARAMETER:
            form = "<parameter=...>...</parameter>"
        return BadCall(f"its parameters are not all {form}")
    return ToolCall(name, arguments)


# --- values without quotation marks ---


def kinds_of(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    names = _type_names(schema)
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else []:
            # One level: schemas come from requests, and may be nested without end.
            if isinstance(alternative, Mapping):
                names |= _type_names(alternative)
    if not names:
        values = schema.get("enum")
        values = values if isinstance(values, list) else []
        names = {
            kind_of(value) for value in [*values, *([schema["const"]] if "const" in schema else [])]
        }
    return names | ({"null"} if schema.get("nullable") is True and names else set())


_ALIASES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
"""Names of types in Python -> in JSON schemas."""


def _type_names(schema: Mapping[str, Any]) -> set[str]:
    """Return the names that a schema has as its type."""
    named = schema.get("type")
    values = named if isinstance(named, list) else [named]
    names = [value.lower() for value in values if isinstance(value, str)]
    return {_ALIASES.get(name, name) for name in names}


def kind_of(value: Any) -> str:
    """Return the name of a value's type in JSON schemas."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case list() | tuple():
            return "array"
        case dict():
            return "object"
    return "string"


def _as_typed(text: str, schema: Any) -> Any:
    """Return the value of an argument that was written without quotation marks.

    The schema says which of the types that it may have is meant. Words of JSON and of Python are
    read alike: templates write both.

    Raises:
        ValueError: if the text is no value of these types.
    """
    kinds = kinds_of(schema)
    word = text.strip()
    if "null" in kinds and word in ("null", "None"):
        return None
    if kinds <= {"string", "null"} and not (not kinds and word[:1] in ("{", "[")):
        return text
    if "boolean" in kinds and word.lower() in ("true", "false"):
        return word.lower() == "true"
    value: Any = text
    is_read = False
    for read in (_DECODER.decode, ast.literal_eval):
        try:
            value = read(word)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        is_read = True
        break
    kind = kind_of(value)
    if is_read and (kind in kinds or (kind == "integer" and "number" in kinds)):
        return value
    if is_read and isinstance(value, float) and "integer" in kinds and value.is_integer():
        return int(value)
    if not kinds:
        return value if kind in ("array", "object") else text
    if "string" in kinds:
        return text
    if not kinds <= {"null", "boolean", "integer", "number", "array", "object"}:
        return text
    raise ValueError(f"is not of the type {' or '.join(sorted(kinds))}")


# --- Gemma 4 ---

_QUOTES = ('<|"|>', "<escape>")
"""The marks at both ends of a text: Gemma 4, FunctionGemma."""


class _Unreadable(Exception):
    """The reason why a value cannot be read."""


def _read_gemma4(text: str, start: int) -> tuple[Calls, int]:
    """Return the call that begins at a place as call:NAME{...}, and where it ends."""
    brace = text.find("{", start)
    if brace < 0:
        return [BadCall("it is no call:NAME{...}")], len(text)
    try:
        arguments, end = _gemma4_value(text, brace, MAX_DEPTH)
    except _Unreadable as error:
        return [BadCall(str(error))], start
    return [ToolCall(text[start + len("call:") : brace].strip(), arguments)], end


def _gemma4_value(text: str, position: int, depth: int) -> tuple[Any, int]:
    """Return the value at a place, and where it ends.

    Raises:
        _Unreadable: if there is none.
    """
    if not depth:
        raise _Unreadable(f"its arguments are nested more than {MAX_DEPTH} deep")
    position = _skip_space(text, position)
    closing = {"{": "}", "[": "]"}.get(text[position : position + 1])
    if closing is None:
        return _gemma4_word(text, position)
    items: list[Any] = []
    pairs: dict[str, Any] = {}
    position = _skip_space(text, position + 1)
    while not text.startswith(closing, position):
        if closing == "}":
            key, position = _gemma4_key(text, position)
            pairs[key], position = _gemma4_value(text, position, depth - 1)
        else:
            item, position = _gemma4_value(text, position, depth - 1)
            items.append(item)
        position = _skip_space(text, position)
        if text.startswith(",", position):
            position = _skip_space(text, position + 1)
        elif not text.startswith(closing, position):
            raise _Unreadable(f"a value does not end with {closing}")
    return (pairs if closing == "}" else items), position + 1


def _gemma4_key(text: str, position: int) -> tuple[str, int]:
    """Return the key at a place, and where its value begins."""
    if text.startswith((*_QUOTES, '"'), position):
        key, position = _gemma4_word(text, position)
        colon = _skip_space(text, position)
        if text.startswith(":", colon):
            return str(key), colon + 1
    elif match := re.compile(r"[^:{}<]{0,200}(?=:)").match(text, position):
        return match[0].strip(), match.end() + 1
    raise _Unreadable("a key does not end with a colon")


def _gemma4_word(text: str, position: int) -> tuple[Any, int]:
    """Return the text, number or word at a place, and where it ends."""
    for quote in _QUOTES:
        if text.startswith(quote, position):
            begin = position + len(quote)
            end = text.find(quote, begin)
            # Models write the same mark for quotation marks inside: the last one has an end after.
            while end >= 0 and _after(text, end + len(quote)) not in ",:]}":
                end = text.find(quote, end + len(quote))
            if end < 0:
                raise _Unreadable(f"a text does not end with {quote}")
            return text[begin:end].replace(quote, '"'), end + len(quote)
    if text.startswith('"', position):
        try:
            return _DECODER.raw_decode(text, position)
        except ValueError as error:
            raise _Unreadable(f"it is no JSON: {error}") from None
    match = re.compile(r"[,}\]]").search(text, position)
    if match is None or match.start() == position:
        raise _Unreadable("a value has no end")
    word = text[position : match.start()].strip()
    if word == "None":
        return None, match.start()
    if word in ("True", "False"):
        return word == "True", match.start()
    try:
        return _DECODER.decode(word), match.start()
    except (ValueError, RecursionError):
        return word, match.start()


# --- other marks ---


def _read_mistral(body: Body) -> tuple[Calls, int]:
    """Return the calls after [TOOL_CALLS], and where they end: a list, or name[ARGS]{...}."""
    text, start, *_ = body
    following = text.find("[TOOL_CALLS]", start)
    arguments = text.find("[ARGS]", start, None if following < 0 else following)
    bare = re.compile(r"([\w.\-]{1,200})\s*(?=\{)").match(text, start)
    if bare is not None:
        calls, end = _read_arguments(bare[1], text, bare.end())
    elif text.startswith(("[", "{"), start) or not start <= arguments:
        calls, end = _read_json(text, start)
    else:
        name = text[start:arguments].partition("[CALL_ID]")[0].strip()
        calls, end = _read_arguments(name, text, _skip_space(text, arguments + len("[ARGS]")))
    # JSON may spell the mark of the next call.
    if following < end:
        following = text.find("[TOOL_CALLS]", end)
    stop = len(text) if following < 0 else following
    if text[end:stop].strip(" \n;") and all(isinstance(call, ToolCall) for call in calls):
        calls[:] = [BadCall("it is no JSON: there is text after it")]
    return calls, stop


def _read_named(body: Body) -> tuple[Calls, int]:
    """Return the call of DeepSeek or Kimi, and where it ends: name, mark, arguments."""
    text, start, *_ = body
    stop = body.stop
    mark = re.compile(r"<｜tool▁sep｜>|<\|tool_call_argument_begin\|>").search(text, start, stop)
    if mark is None:
        return [BadCall("no arguments follow its name")], stop
    name = text[start : mark.start()].strip()
    begin = _skip_space(text, mark.end())
    if name == "function" and not text.startswith("{", begin):
        # V3 and R1: the type, then the name, then a block of JSON.
        line_end = text.find("\n", begin)
        name = text[begin : max(line_end, begin)].strip()
        begin = _skip_space(text, max(line_end, begin))
        if text.startswith("```json", begin):
            begin = _skip_space(text, begin + len("```json"))
    if mark[0] == "<|tool_call_argument_begin|>":
        name = re.sub(r":\d+$", "", name.removeprefix("functions."))
    calls, end = _read_arguments(name, text, begin)
    after = _skip_space(text, end)
    return calls, after + 3 if text.startswith("```", after) else end


def _read_code(body: Body) -> tuple[Calls, int]:
    """Return the calls of a piece of Python, and where it ends."""
    return _read_python(body.text[body.start : body.stop].strip(), body.parameters), body.stop


def _read_tool_line(body: Body) -> tuple[Calls, int]:
    """Return the call of the plain protocol, and where it ends."""
    assert body.closing is not None
    stop = body.text.find(body.closing, body.start)
    if stop < 0:
        return [BadCall(f"it does not end with {body.closing}")], len(body.text)
    return [_read_plain(body.text[body.start : stop].strip(), body.parameters)], stop


def _read_plain(text: str, parameters: Parameters) -> ToolCall | BadCall:
    name = re.match(r"\w+", text)
    rest = text[name.end() :].lstrip() if name else ""
    if name is None or not (rest[:1] == ":" or (rest[:1] == "(" and rest[-1:] == ")")):
        return BadCall("it is neither name({...}) nor name: text")
    if rest[0] == ":":
        names = list(parameters.get(name[0], {}))
        if len(names) != 1:
            return BadCall(
                f"{name[0]} has {len(names)} parameters: write {name[0]}({{...}}) with JSON"
            )
        try:
            value = _as_typed(rest[1:].lstrip(), parameters[name[0]][names[0]])
        except ValueError as error:
            return BadCall(f"the parameter {names[0]} {error}")
        return ToolCall(name[0], {names[0]: value})
    if not rest[1:-1].strip():
        return ToolCall(name[0], {})
    return _as_call({"name": name[0], "arguments": rest[1:-1]})


# --- a whole turn ---


def _read_granite(text: str, row: Format, parameters: Parameters, in_thought: bool) -> ParsedTurn:
    """Return a turn of Granite or Phi-4-mini, which also begins calls with `functools`."""
    begin = _after_thoughts(text, in_thought)
    if text.startswith("functools[", _skip_space(text, begin)):
        opening = _skip_space(text, begin)
        text = text[:opening] + row.openings[0] + text[opening + len("functools") :]
    return _read_blocks(text, row, parameters, in_thought)


def _read_llama(text: str, row: Format, parameters: Parameters, in_thought: bool) -> ParsedTurn:
    begin = _after_thoughts(text, in_thought)
    before = text[:begin]
    marked, mark, body = next(
        (parts for opening in row.openings if (parts := text[begin:].partition(opening))[1]),
        ("", "", text[begin:]),
    )
    body = body.strip().removesuffix("<|python_end|>").rstrip()
    if not mark and not re.match(r'\{\s*"(name|type|function)"', body):
        if body.startswith("[") and _python_calls(body) is not None:
            return ParsedTurn(before.strip(), _read_python(body, parameters))
        return ParsedTurn(text.strip(), [])
    content = (before + marked).strip()
    if not body.startswith("{"):
        return ParsedTurn(content, _read_python(body.replace(".call(", "("), parameters))
    calls: Calls = []
    position = 0
    while position < len(body):
        of_json, end = _read_json(body, position)
        calls += of_json
        if isinstance(of_json[-1], BadCall):
            break
        separator = re.compile(r"[ \n;,]*").match(body, end)
        assert separator is not None
        position = separator.end()
    return ParsedTurn(content, calls)


def _read_glm4(text: str, row: Format, parameters: Parameters, in_thought: bool) -> ParsedTurn:
    """Return a turn in which a line with the name of a tool is followed by its arguments."""
    begin = _after_thoughts(text, in_thought)
    content = [text[:begin]]
    calls: Calls = []
    for piece in text[begin:].split("<|assistant|>"):
        name, line_break, rest = piece.strip().partition("\n")
        if not line_break or name.strip() not in parameters:
            content.append(piece)
            continue
        rest = rest.strip().removesuffix("<|observation|>").rstrip()
        calls.append(_read_all_arguments(name.strip(), rest, 0))
    return ParsedTurn("".join(content).strip(), calls)


def _read_harmony(text: str, row: Format, parameters: Parameters, in_thought: bool) -> ParsedTurn:
    """Return a turn of gpt-oss: messages, each with a channel, and a tool as the recipient."""
    calls: Calls = []
    thoughts: list[str] = []
    texts: list[str] = []
    for message in re.split(r"<\|(?:end|call|return)\|>|<\|start\|>(?:assistant)?", text):
        header, mark, body = message.partition("<|message|>")
        if not mark:
            texts.append(message)
            continue
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"\bto=([^\s<]+)", header)
        if channel is not None and channel[1] == "analysis":
            thoughts.append(body)
        elif recipient is None:
            texts.append(body)
        else:
            name = recipient[1].removeprefix("functions.")
            calls.append(_read_all_arguments(name, body, _skip_space(body, 0)))
    # Its template writes the content of a turn with calls as a thought, and refuses marks in it.
    said = [*thoughts, *texts] if calls or not any(map(str.strip, texts)) else texts
    return ParsedTurn("\n".join(filter(None, map(str.strip, said))), calls)


def _after_thoughts(text: str, in_thought: bool) -> int:
    """Return where the text after the thoughts at the beginning of a turn begins."""
    begin = _end_of_thought(text, 0, THOUGHT_ENDS) if in_thought else 0
    while (start := _skip_space(text, begin)) < len(text):
        opening = next((mark for mark in THOUGHTS if text.startswith(mark, start)), None)
        if opening is None:
            break
        begin = _end_of_thought(text, start, {THOUGHTS[opening]})
    if not begin and not text.lstrip().startswith(("{", "[")):
        # A thought that began before the turn.
        ends = [match.end() for match in _marks(()).finditer(text) if match[0] in THOUGHT_ENDS]
        begin = max(ends, default=0)
    return begin


# --- JSON ---


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no value of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _read_json(text: str, start: int) -> tuple[Calls, int]:
    """Return the calls of the JSON object or list at a place, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return [BadCall(f"it is no JSON: {_message(error)}")], start
    values = value if isinstance(value, list) and value else [value]
    return [_as_call(value) for value in values], end


def _read_arguments(name: str, text: str, start: int) -> tuple[Calls, int]:
    """Return the call of a tool whose arguments are the JSON object at a place, and its end."""
    if not text[start:].strip():
        return [ToolCall(name, {})], start
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return [BadCall(f"its arguments are no JSON: {_message(error)}")], start
    return [_as_call({"name": name, "arguments": value})], end


def _read_all_arguments(name: str, text: str, start: int) -> ToolCall | BadCall:
    """Return the call of a tool whose arguments are all that follows a place."""
    (call,), end = _read_arguments(name, text, start)
    is_followed = isinstance(call, ToolCall) and bool(text[end:].strip())
    return BadCall("there is text after its arguments") if is_followed else call


def _message(error: Exception) -> str:
    """Return the fault of a JSON text, without its place if the text is long."""
    return error.msg if isinstance(error, json.JSONDecodeError) and error.pos > 9999 else str(error)


def _as_call(value: Any) -> ToolCall | BadCall:
    """Return the call that a JSON value describes."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    name = None
    if isinstance(value, Mapping):
        name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str):
        return BadCall('it is no JSON object with "name" and "arguments"')
    # The last two are of LangChain and Anthropic.
    names = ("arguments", "parameters", "args", "input")
    key = next((key for key in names if key in value), None)
    others = [key for key, item in value.items() if isinstance(item, Mapping)]
    if key is None and others:
        return BadCall(f"it has `{others[0]}` where a call has `arguments`")
    arguments = value.get(key)
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return BadCall(f"its arguments are no JSON: {_message(error)}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return BadCall("its arguments are no JSON object")
    return ToolCall(name, dict(arguments))


# --- Python ---

_WORDS = {"true": True, "false": False, "null": None}
"""Words of JSON, which stand in calls where a template writes values as JSON."""


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
        values += value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
    calls = []
    for value in values:
        # Models often print what a tool returns.
        if isinstance(value, ast.Call) and _called(value) == "print" and len(value.args) == 1:
            value = value.args[0]
        if not isinstance(value, ast.Call) or not _called(value):
            return None
        calls.append(value)
    return calls or None


def _read_python(code: str, parameters: Parameters) -> Calls:
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
    arguments = dict(zip(names, call.args, strict=False))
    arguments |= {str(keyword.arg): keyword.value for keyword in call.keywords}
    try:
        return ToolCall(name, {key: literal(value) for key, value in arguments.items()})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return BadCall("its arguments are no plain values")


class _Values(ast.NodeTransformer):
    """Puts values in the place of words of JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def literal(node: ast.expr) -> Any:
    """Return the value of an expression, of which words of JSON may be parts."""
    value = ast.literal_eval(_Values().visit(node))
    return list(value) if isinstance(value, tuple) else value


def _called(call: ast.Call) -> str:
    """Return the name of what is called: "f" of both f() and tools.f()."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


# --- the table ---


class Format(NamedTuple):
    """A format of calls."""

    openings: tuple[str, ...] = ()
    """Beginnings of a call. A template or prompt with one of them uses the format."""
    closing: str | None = None
    """Ends of a call."""
    read_body: Callable[[Body], tuple[Calls, int]] = _read_any
    """Returns the calls of a block, and where the last one ends."""
    read: Callable[[str, Format, Parameters, bool], ParsedTurn] = _read_blocks
    """(text, the row, parameters, whether it begins in a thought) -> the turn."""
    template_marks: tuple[str, ...] = ()
    """Further texts by which a template is known to use the format."""
    prompt_marks: tuple[str, ...] = ()
    """Further texts by which a prompt that shows tools is known to use the format."""
    brackets: tuple[str, ...] = ()
    """Marks around all calls of a turn, which are no content."""

    def is_in(self, text: str, marks: tuple[str, ...]) -> bool:
        """Return True if a text has a beginning of a call, or one of some further marks."""
        return any(mark in text for mark in (*self.openings, *marks))


FORMATS: dict[str, Format] = {
    "gemma4": Format(("<|tool_call>",), "<tool_call|>"),
    "function_gemma": Format(("<start_function_call>",), "<end_function_call>"),
    "mistral": Format(("[TOOL_CALLS]",), None, _read_mistral),
    "deepseek": Format(
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁call▁end｜>",
        _read_named,
        brackets=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi": Format(
        ("<|tool_call_begin|>",),
        "<|tool_call_end|>",
        _read_named,
        brackets=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "harmony": Format(read=_read_harmony, template_marks=("<|channel|>",)),
    "granite": Format(
        ("<|tool_call|>",),
        read=_read_granite,
        prompt_marks=("<|/tool|>",),
        brackets=("<|/tool_call|>",),
    ),
    "olmo": Format(("<function_calls>",), "</function_calls>"),
    "nemotron": Format(("<TOOLCALL>",), "</TOOLCALL>"),
    "apriel": Format(("<tool_calls>",), "</tool_calls>"),
    "hermes": Format(("<tool_call>",), "</tool_call>"),
    "function": Format(("<function=",), "</function>", _read_function),
    "function_call": Format(("<function_call>",), "</function_call>"),
    "llama": Format(
        ("<|python_tag|>", "<|python_start|>"),
        read=_read_llama,
        template_marks=("<|start_header_id|>", "<|header_start|>"),
    ),
    "gemma": Format(("```tool_code",), "```", _read_code, template_marks=("<start_of_turn>",)),
    "plain": Format(("<tool>",), PLAIN_STOP, _read_tool_line),
    "glm4": Format(read=_read_glm4, template_marks=("<|observation|>",)),
}
"""Every format by its name. In a template with marks of several, the one is taken that reads what
the template writes."""
