"""Calls of tools against the calls of the data (ToolRL, arXiv 2504.13958)."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.rewards import composed, spans
from tpu_rl.rewards.scoring import Reward
from tpu_rl.tokenizers import tool_calls as formats
from tpu_rl.tokenizers.tool_calls import BadCall, ToolCall

_NAME = re.compile(
    r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|((?<!\w)[A-Za-z_][\w.\-/ ]{0,127})\("""
)
"""A text in quotes, or a name before its arguments. ToolACE's names have spaces."""

_NEXT_OBJECT = re.compile(r"\}[^\S\n]*\n\s*\{(?=\s*\"name\")")
"""The border of two calls in one mark, which ToolRL writes one a line."""
_LONGEST_CODE = 10_000


def tool_calls() -> Reward:
    """Score how well each completion's calls of tools match those of `answer`, from -3 to 3.

    S = J(names) + sum over gold calls of max over unused calls of the same name of [J(keys) + the
    number of equal values], with J(a, b) = |a and b| / |a or b| of multisets; R = 6 S / S_max - 3
    with S_max = 1 + sum (1 + number of keys). Equal calls in the same order get 3, unreadable ones
    -3 (ToolRL, arXiv 2504.13958). Calls are read in every format of chat templates, as JSON
    (xLAM) and as [name(key=value)] (ToolACE). `answer` is a list of {"name", "arguments"}, or a
    text of these forms; an empty list where no call is right.
    """

    def score(
        prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
    ) -> list[float]:
        del prompts
        golds = composed.references(
            "answer", answer, calls_of, '[{"name": "f", "arguments": {"x": 1}}], or [f(x=1)]'
        )
        rewards = []
        for completion, gold in zip(completions, golds, strict=True):
            try:
                rewards.append(match(_made(completion), gold))
            except composed.NO_READING:
                rewards.append(-3.0)
        return rewards

    return score


def match(found: Sequence[ToolCall], gold: Sequence[ToolCall]) -> float:
    """Return ToolRL's reward of calls, from -3 to 3; see `tool_calls`."""
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


def calls_of(value: Any) -> list[ToolCall]:
    """Return the calls of a list, of an object, or of a text in any form; none for "[]".

    Raises:
        ValueError: if they cannot be read.
    """
    if isinstance(value, str):
        return _read(value)
    calls = formats.from_message({"tool_calls": [value] if isinstance(value, dict) else value})
    if not isinstance(value, dict | list):
        raise ValueError("it is no list of calls")
    return _readable(calls.calls)


def _made(completion: Any) -> list[ToolCall]:
    """Return the calls of the model's last message; none for a text that begins none."""
    if not isinstance(completion, str):
        said = [message for message in completion if message.get("role") == "assistant"]
        if said and said[-1].get("tool_calls"):
            return calls_of(said[-1]["tool_calls"])
    text = text_of(completion)
    if not spans.without_thoughts(text).strip():
        raise ValueError("it says nothing")
    if spans.answer_of(text).startswith(("[", "{")) or _format_of(text) is not None:
        return _read(text)
    try:
        return _read(text)
    except ValueError:
        return []


def _format_of(text: str) -> str | None:
    """Return the format of which the text without thoughts has an opening mark."""
    text = spans.without_thoughts(text)
    rows = formats.FORMATS.items()
    found = next((name for name, row in rows if any(map(text.__contains__, row.openings))), None)
    # It has no opening mark.
    if found is None and re.search(
        r"\bto=functions\.[^<]{0,200}(?:<\|constrain\|>[^<]{0,80})?<\|message\|>", text
    ):
        return "harmony"
    return found


def _read(text: str) -> list[ToolCall]:
    format_name = _format_of(text)
    if format_name is not None:
        body = spans.without_thoughts(text)
        if format_name == "hermes":
            body = _NEXT_OBJECT.sub("}</tool_call><tool_call>{", body)
        calls = formats.parse(body, format_name, ()).calls
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
