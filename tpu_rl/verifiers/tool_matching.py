"""Calls of tools against the calls of the data (ToolRL, arXiv 2504.13958)."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.rewards import spans
from tpu_rl.rewards.scoring import Reward
from tpu_rl.rewards.verifier import with_settings
from tpu_rl.tokenizers import tool_calls as formats
from tpu_rl.tokenizers.tool_calls import BadCall, ToolCall
from tpu_rl.verifiers import composed

_NAME = re.compile(
    r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|((?<!\w)[A-Za-z_][\w.\-/ ]{0,127})\("""
)
"""A text in quotes, or a name before its arguments. ToolACE's names have spaces."""

_NEXT_OBJECT = re.compile(r"\}[^\S\n]*\n\s*\{(?=\s*\"name\")")
"""The border of two calls in one mark, which ToolRL writes one a line."""
_HARMONY = re.compile(
    r"\bto=functions\.[^<]{0,200}(?:<\|(?:channel|constrain)\|>[^<]{0,80}){0,2}<\|message\|>"
)
_FUNCTOOLS = re.compile(r"\A\s{0,9}functools\[")
_GLM4 = re.compile(r"(?:\A|<\|assistant\|>)\s{0,9}([\w.\-]{1,128})[^\S\n]{0,9}\n\s{0,9}\{")
"""The name of a tool in a line of its own, and then an object."""
_LONGEST_CODE = 10_000


def tool_calls() -> Reward:
    """Score how well each completion's calls of tools match those of `answer`, from -3 to 3.

    S = J(names) + sum over gold calls of max over unused calls of the same name of [J(keys) + the
    number of equal values], with J(a, b) = |a and b| / |a or b| of multisets; R = 6 S / S_max - 3
    with S_max = 1 + sum (1 + number of keys). Equal calls in the same order get 3, unreadable ones
    -3 (ToolRL, arXiv 2504.13958). Calls are read in every format of chat templates, as JSON
    (xLAM) and as [name(key=value)] (ToolACE). Tags do not write types (Qwen3-Coder, GLM-4.5): the
    column `tools` has them, or else the gold values. `answer` is a list of {"name", "arguments"},
    or a text of these forms; an empty list where no call is right. Any other text is no call.
    """

    def score(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        answer: Sequence[Any],
        tools: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float]:
        schemas = composed.references(
            "tools",
            tools or [None] * len(answer),
            _tools_of,
            'a list of {"type": "function", "function": {"name": "f", "parameters": {...}}}',
        )
        of_row = iter(schemas)
        golds = composed.references(
            "answer",
            answer,
            lambda value: calls_of(value, next(of_row)),
            '[{"name": "f", "arguments": {"x": 1}}], or [f(x=1)]',
        )
        rewards = []
        for completion, gold, row_tools in zip(completions, golds, schemas, strict=True):
            try:
                rewards.append(match(_made(completion, _typed_by(gold, row_tools)), gold))
            except composed.NO_READING:
                rewards.append(-3.0)
        return rewards

    return score


def match(found: Sequence[ToolCall], gold: Sequence[ToolCall]) -> float:
    """Return ToolRL's reward of calls, from -3 to 3; see `tool_calls`."""
    found = [call._replace(arguments=_typed(call.arguments)) for call in found]
    gold = [call._replace(arguments=_typed(call.arguments)) for call in gold]
    if list(found) == list(gold):
        return 3.0
    total = _overlap([call.name for call in found], [call.name for call in gold])
    most = 1.0
    unused = list(range(len(found)))
    for call in gold:
        most += 1 + len(call.arguments)
        best, best_index = 0.0, None
        for index in unused:
            if found[index].name != call.name:
                continue
            arguments = found[index].arguments
            equal = [k in arguments and arguments[k] == v for k, v in call.arguments.items()]
            value = _overlap(arguments, call.arguments) + sum(equal)
            if value > best or best_index is None:
                best, best_index = value, index
        total += best
        unused = [index for index in unused if index != best_index]
    return 6 * total / most - 3


def _typed(value: Any) -> Any:
    """Return a value whose truth values are equal to no numbers."""
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return ("bool", value) if isinstance(value, bool) else value


def _tools_of(value: Any) -> formats.Tools:
    tools: Any = json.loads(value or "[]") if isinstance(value, str) else value
    tools = [tools] if isinstance(tools, dict) else tools or []
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("one of them is no object with the name of a function")
    return tools


def _typed_by(gold: Sequence[ToolCall], tools: formats.Tools) -> formats.Tools:
    """Return tools in which a parameter without a type has the type of its gold value, or text."""
    parameters = {name: dict(schemas) for name, schemas in formats.parameters_of(tools).items()}
    for call in gold:
        schemas = parameters.setdefault(call.name, {})
        for key, value in call.arguments.items():
            if not formats.kinds_of(schemas.get(key)):
                schemas[key] = {"type": [formats.kind_of(value), "string"]}
    return [{"name": n, "parameters": {"properties": p}} for n, p in parameters.items()]


def calls_of(value: Any, tools: formats.Tools = ()) -> list[ToolCall]:
    """Return the calls of a list, of an object, or of a text in any form; none for "[]".

    `tools` are schemas with the types of arguments that are written without quotation marks.

    Raises:
        ValueError: if they cannot be read.
    """
    if isinstance(value, str):
        return _read(value, tools)
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    calls = formats.from_message({"tool_calls": [value] if isinstance(value, dict) else value})
    if not isinstance(value, dict | list):
        raise ValueError("it is no list of calls")
    return _readable(calls.calls)


def _made(completion: Any, tools: formats.Tools) -> list[ToolCall]:
    """Return the calls of the model's last message; none for a text that begins none."""
    if not isinstance(completion, str):
        said = [message for message in completion if message.get("role") == "assistant"]
        if said and said[-1].get("tool_calls"):
            return calls_of(said[-1]["tool_calls"])
    text = text_of(completion)
    if not spans.without_thoughts(text).strip():
        raise ValueError("it says nothing")
    if spans.answer_of(text).startswith(("[", "{")) or _format_of(text) is not None:
        return _read(text, tools)
    try:
        return _read(text, tools)
    except ValueError:
        return []


def _format_of(text: str) -> str | None:
    """Return the format of which the text without thoughts has an opening mark."""
    text = spans.without_thoughts(text)
    rows = formats.FORMATS.items()
    found = next((name for name, row in rows if any(map(text.__contains__, row.openings))), None)
    # The others have no opening mark.
    if found is None:
        patterns = {"harmony": _HARMONY, "granite": _FUNCTOOLS, "glm4": _GLM4}
        found = next((name for name, pattern in patterns.items() if pattern.search(text)), None)
    return found


def _read(text: str, tools: formats.Tools) -> list[ToolCall]:
    format_name = _format_of(text)
    if format_name is not None:
        body = spans.without_thoughts(text)
        if format_name == "hermes":
            body = _NEXT_OBJECT.sub("}</tool_call><tool_call>{", body)
        if format_name == "glm4":
            # Without `tools`, every such name is a call.
            tools = [*({"name": name} for name in _GLM4.findall(body)), *tools]
        calls = formats.parse(body, format_name, tools).calls
        if not calls:
            raise ValueError("its mark of a call has no call")
        return _readable(calls)
    answer = spans.answer_of(text)
    try:
        value = spans.value_of(answer)
    except ValueError:
        return _read_python(answer)
    return calls_of(value)


def _readable(calls: Iterable[ToolCall | BadCall]) -> list[ToolCall]:
    readable = []
    for call in calls:
        if isinstance(call, BadCall):
            raise ValueError(call.reason)
        readable.append(call)
    return readable


def _read_python(code: str) -> list[ToolCall]:
    """Return the calls of `[name(key=value), ...]`, of which names may have spaces."""
    if len(code) > _LONGEST_CODE:
        raise ValueError(f"it has more than {_LONGEST_CODE} characters")
    names: list[str] = []

    def placeholder(match: re.Match[str]) -> str:
        if match[1]:
            return match[0]
        names.append(match[2].strip())
        return f"_{len(names) - 1}("

    try:
        body = ast.parse(_NAME.sub(placeholder, code.strip()), mode="eval").body
        nodes = body.elts if isinstance(body, ast.List | ast.Tuple) else [body]
        calls = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name):
                raise ValueError("it is no call like name(key=value)")
            arguments = {str(k.arg): formats.literal(k.value) for k in node.keywords}
            calls.append(ToolCall(names[int(node.func.id[1:])], arguments))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("it is neither JSON nor a call like name(key=value)") from error
    return calls


def _overlap(a: Iterable[str], b: Iterable[str]) -> float:
    """Return |a and b| / |a or b| of two multisets; 1 for two empty ones."""
    first, second = Counter(list(a)), Counter(list(b))
    either = (first | second).total()
    return (first & second).total() / either if either else 1.0


VERIFIERS = {"tool_calls": with_settings(tool_calls)}
