"""Conversations as text, and the turns of the assistant in it.

Contents may spell control tokens. These literals are put between two marks, a character that no
content has, so that the tokenizer does not see them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tpu_rl.errors import InputError
from tpu_rl.tokenizers import chat_templates

Message = dict[str, Any]
"""One turn of a conversation: {"role": "user", "content": "..."} and any other keys that the chat
template reads."""

Tools = Sequence[Mapping[str, Any]] | str
"""Descriptions of the functions that the assistant may call: JSON schemas, or their JSON text."""


@dataclass(frozen=True)
class Conversation:
    """Messages to render by a chat template. `hide` makes it."""

    template: str
    messages: list[Message]
    tools: list[Any] | None
    variables: Mapping[str, Any]
    """What else the template reads."""
    pattern: re.Pattern[str]
    """Matches control-token literals, and any literal between two marks."""
    mark: str | None
    """The character around literals that are contents; None if no content spells one."""

    def render(self, count: int, add_generation_prompt: bool) -> chat_templates.Rendered:
        """Return the text of the first `count` messages."""
        return chat_templates.render(
            self.template, self.messages[:count], add_generation_prompt, self.variables, self.tools
        )

    def text(self, add_generation_prompt: bool) -> str:
        """Return the text of all messages."""
        return self.render(len(self.messages), add_generation_prompt).text


def hide(
    template: str,
    messages: list[Message],
    tools: list[Any] | None,
    variables: Mapping[str, Any],
    control: Collection[str],
) -> Conversation:
    """Return a conversation whose contents spell no control token that the tokenizer sees."""
    contents = "".join([*strings(messages), *strings(tools, roles=True)])
    pattern = alternatives(control)
    mark = None
    if pattern.search(contents):
        mark = next(chr(c) for c in range(0xE000, 0xF900) if chr(c) not in contents)

        def enclose(text: str) -> str:
            return pattern.sub(lambda match: f"{mark}{match[0]}{mark}", text)

        messages = _map_strings(messages, enclose)
        tools = _map_strings(tools, enclose, roles=True)
    return Conversation(template, messages, tools, variables, alternatives(control, mark), mark)


# --- the assistant's turns ---


class Turn(NamedTuple):
    """The place of an assistant's turn in the text of a conversation, in characters."""

    start: int
    stop: int
    end: int
    """End of the control token that ends the turn and begins at `stop`. It equals `stop` if the
    template writes none."""


def turns_by_difference(
    conversation: Conversation, answers: Sequence[int], ends: Collection[str]
) -> tuple[str, list[Turn], str]:
    """Return (text, its assistant's turns, "" or the reason why they cannot be found).

    A turn is what rendering a message adds to the prompt before it. The text that follows a turn
    must begin with the text up to the turn's end. What a template writes after the end, often a
    line break, is no part of the turn: there the sampler has stopped already.

    Args:
        answers: positions of the assistant's messages.
        ends: literals of the control tokens that end a turn.
    """
    text = ""
    turns: list[Turn] = []
    for index in answers:
        prompt = conversation.render(index, True).text
        whole = conversation.render(index + 1, False).text
        if not prompt.startswith(text):
            return text, turns, "it renders an earlier turn in another way once others follow"
        if not whole.startswith(prompt):
            return text, turns, "its generation prompt does not begin the assistant's turn"
        turn = _turn(conversation, whole, len(prompt), len(whole), ends)
        if turn.end == turn.stop:
            return text, turns, "it writes no end-of-sequence token after the assistant's turn"
        turns.append(turn)
        text = whole[: turn.end]
    return text, turns, ""


def turns_by_marks(
    conversation: Conversation, answers: Sequence[int], ends: Collection[str]
) -> tuple[str, list[Turn]]:
    """Return (text, its assistant's turns), as the template's {% generation %} blocks mark them.

    A control token that ends a turn and directly follows the block belongs to the turn. Raises
    InputError if the template marks nothing.
    """
    messages = conversation.messages
    text, spans = conversation.render(len(messages), False)
    if any(message["role"] == "assistant" for message in messages[: answers[0]]):
        spans = spans[len(conversation.render(answers[0], False).spans) :]
    turns = []
    for start, stop in _joined_spans(spans):
        turn = _turn(conversation, text, start, stop, ends)
        after = conversation.pattern.match(text, stop)
        if turn.end == turn.stop and after and after[0] in ends:
            turn = Turn(start, stop, after.end())
        if turn.end > turn.start:
            turns.append(turn)
    if not turns:
        raise InputError(
            "the chat template marks nothing of an answer as written by the assistant",
            where=shown(messages),
            why="its {% generation %} block is empty or left out for this conversation",
            fix="correct the template (--tokenizer.chat-template), or drop the row",
        )
    return text[: turns[-1].end], turns


def _joined_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans, of which those that follow each other directly are one."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def _turn(
    conversation: Conversation, text: str, start: int, stop: int, ends: Collection[str]
) -> Turn:
    """Return the turn in text[start:stop], up to its last end."""
    matches = conversation.pattern.finditer(text, start, stop)
    places = [match.span() for match in matches if match[0] in ends]
    return Turn(start, *places[-1]) if places else Turn(start, stop, stop)


def spans_in_turn(message: Message, turn: str) -> list[dict[str, Any]]:
    """Return the weighted parts of a message's content, by characters of its rendered turn.

    Raises InputError if the turn does not show the content as it is, once.
    """
    spans = message.get(SPAN_WEIGHTS) or []
    if not spans:
        return []
    content = str(message.get("content") or "")
    shown = content.strip()
    at_end = turn.rstrip().endswith(shown)
    if not at_end and turn.count(shown) != 1:
        raise InputError(
            "parts of an answer have weights, and its rendered turn shows the text in another way",
            where=json.dumps(message, ensure_ascii=False, default=str)[:200],
            why="the chat template changes the answer, or writes it twice",
            fix="use another template (--tokenizer.chat-template), or a weight for the message",
        )
    place = len(turn.rstrip()) - len(shown) if at_end else turn.index(shown)
    shift = place - content.index(shown)

    def moved(character: int) -> int:
        # White space around the content may not be shown.
        return min(max(character + shift, 0), len(turn))

    return [span | {"start": moved(span["start"]), "end": moved(span["end"])} for span in spans]


# --- what a rendering shows ---

SPAN_WEIGHTS = "span_weights"
"""Key of a message with the weights of parts of its content (`data.span_weights`)."""
NO_TEXT = ("role", "weight", SPAN_WEIGHTS, "tool_call_id")
"""Keys of messages that are no texts for the model to read."""
LINKS = ("id", "type")
"""Keys of calls that only some templates show, and that mean nothing by themselves."""


def unshown(message: Message, rendering: str) -> list[str]:
    """Return the keys of a message whose texts do not all occur in a rendering.

    White space does not count, and a text may be written as in JSON.
    """
    return [
        key
        for key, value in message.items()
        if key not in NO_TEXT and not all(occurs(text, rendering) for text in _leaves(value))
    ]


def occurs(text: str, rendering: str) -> bool:
    """Return True if a text occurs in a rendering, whatever the white space and the escapes."""
    if text.strip() in rendering:
        return True
    forms = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
    squeezed = "".join(rendering.split())
    return any("".join(form.split()) in squeezed for form in (*forms, repr(text)[1:-1]))


def is_label(value: Any) -> bool:
    """Return True if no text in a value has two words: names, dates and identifiers."""
    return not any(re.search(r"[^\W\d_]\s+[^\W\d_]", text) for text in _leaves(value))


def _leaves(value: Any) -> list[str]:
    """Return the texts in a value, and the names of keys below the first level of a call."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        arguments = value.get("arguments")
        names = [*arguments] if isinstance(arguments, dict) else []
        items = [item for key, item in value.items() if key not in LINKS]
        return [*names, *(text for item in items for text in _leaves(item))]
    if isinstance(value, list):
        return [text for item in value for text in _leaves(item)]
    return []


# --- texts and messages ---


def alternatives(control: Collection[str], mark: str | None = None) -> re.Pattern[str]:
    """Return a pattern of all control-token literals, longest first, and of one between marks."""
    longest_first = sorted(control, key=len, reverse=True)
    literals = "|".join(re.escape(text) for text in longest_first) or "(?!)"
    if mark is None:
        return re.compile(literals)
    return re.compile(f"{mark}(?:{literals}){mark}|{mark}|{literals}")


def as_messages(value: str | list[Message], role: str) -> list[Message]:
    """Return messages as they are, and a text as one message of the role."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def shown(messages: Sequence[Message]) -> str:
    """Return the beginning of a conversation, for error messages."""
    return json.dumps(messages, ensure_ascii=False, default=str)[:200]


def strings(value: Any, roles: bool = False) -> list[str]:
    """Return all texts in a message or conversation, without roles unless `roles`."""
    found: list[str] = []
    _map_strings(value, found.append, roles)
    return found


def _map_strings(value: Any, function: Any, roles: bool = False) -> Any:
    """Return the value with `function` applied to all texts of `strings`."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {
            function(key) if isinstance(key, str) else key: item
            if key == "role" and not roles
            else _map_strings(item, function, roles)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_map_strings(item, function, roles) for item in value]
    return value


def require_messages(messages: list[Message]) -> None:
    """Raise InputError if the list is empty, or one of its items is not a message."""
    for number, message in enumerate(messages or [None], start=1):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not ("content" in message or message.get("tool_calls"))
        ):
            raise InputError(
                "a conversation has messages, each an object with `role` and `content`",
                where=f"message {number}: {json.dumps(message, default=str)[:120]}",
                why="a chat template reads both",
                fix='as in {"role": "user", "content": "..."}',
            )


def parse_tools(tools: Tools | None) -> list[Any] | None:
    """Return descriptions of functions as a list; None if there are none.

    Raises InputError if they are neither a list of objects nor the JSON text of one.
    """
    values: Any = tools
    if isinstance(values, str):
        with contextlib.suppress(ValueError):
            values = json.loads(values) if values.strip() else None
    if not values and (values is None or isinstance(values, list)):
        return None
    if not isinstance(values, list) or not all(isinstance(tool, dict) for tool in values):
        raise InputError(
            "`tools` is a list of objects, or such a list as JSON text",
            where=json.dumps(tools, default=str)[:120],
            why="the chat template reads it as descriptions of functions",
            fix="correct the column `tools`, rename it, or leave it out",
        )
    return values
