"""The published shapes of rows. `normalize` brings a row to the columns that algorithms read.

SHAPES lists the shapes of well-known datasets. Whatever the shape, messages get one form
(`messages`), a system prompt in a column of its own begins the conversation, and a prompt that
stands both beside and inside of answers is taken once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tpu_rl.data import images, span_weights
from tpu_rl.data import messages as message_forms
from tpu_rl.data.values import is_number, shown

Row = dict[str, Any]

MESSAGE_COLUMNS = images.TEXT_COLUMNS
"""Columns that may hold messages."""
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
"""Columns that may hold the text of a system message."""
EXCHANGES = (("human", "assistant"), ("input", "output"))
"""Keys of a question and its answer, where a conversation is a list of both (Capybara)."""
ROLES = ("user", "assistant")
"""Roles of texts in turn."""
ASKED = ("messages", "instruction", "question", "query")
"""Columns that may hold what is asked."""
MEDIA = ("video", "audio")
"""Kinds of content that no model reads. Columns have these names or their plurals."""


class Shape(NamedTuple):
    """The shape in which a dataset is published."""

    name: str
    has: Mapping[str, Any]
    """Columns of a row of the shape -> the types of their values."""
    convert: Callable[[Row], Row] | str
    """Returns our columns of such a row, or raises ValueError if it cannot be read. A text: why no
    row of the shape is read."""
    lacks: tuple[str, ...] = ("messages", "prompt")
    """Columns that a row of the shape does not have."""
    where: Callable[[Row], bool] = lambda row: True
    """Returns True for a row of the shape, of those with these columns."""
    others: tuple[str, ...] = ()
    """Further columns that are read."""
    replaced: tuple[str, ...] = ()
    """Columns that ours take the place of. Rewards may read the others."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        return (*self.has, *self.others)

    def fits(self, row: Row) -> bool:
        """Return True for a row of the shape that lacks our columns."""
        return (
            all(name in row and isinstance(row[name], kind) for name, kind in self.has.items())
            and not any(column in row for column in self.lacks)
            and self.where(row)
        )

    def read(self, row: Row) -> Row:
        """Return our columns of a row of the shape. Raises ValueError if it cannot be read."""
        if isinstance(self.convert, str):
            raise ValueError(self.convert)
        return self.convert(row)


def normalize(row: Row, columns: Sequence[str], names: Sequence[str] = ()) -> Row:
    """Return the row with the columns that an algorithm reads, if its shape implies them.

    `names` gives columns by other names, as NAME=COLUMN.

    Columns of published shapes (`SHAPES`) become `messages`, `prompt` and `completion`. `text`
    becomes an empty prompt and a completion. The beginning that `chosen` and `rejected` share
    becomes the prompt. The last answer of `messages` is split off, if they end with it. A
    `completion` with its `score` becomes lists of one, if such are read. Other columns stay. Raises
    ValueError if the shape is clear but the row does not fit it.
    """
    row = renamed(row, names)
    _refuse_media(row)
    texts = [name for name in MESSAGE_COLUMNS if isinstance(row.get(name), str)]
    row = row | {name: message_forms.parsed_list(row[name]) for name in texts}
    row = images.collected(row)
    shape = shape_of(row)
    if shape is not None:
        others = {name: value for name, value in row.items() if name not in shape.replaced}
        row = others | shape.read(row)
    for column in MESSAGE_COLUMNS:
        if column in row:
            row = row | {column: message_forms.canonical(row[column], column)}
    if "functions" in row and "tools" not in row:
        row = row | {"tools": row["functions"]}
    if "tools" in row and "tools" not in columns:
        row = row | {"tools": message_forms.canonical_tools(row["tools"])}
    if "scores" in columns and "completion" in row and "score" in row and "scores" not in row:
        row = row | {"completions": [row["completion"]], "scores": [row["score"]]}
    return images.placed(_with_system(_with_columns(row, columns), columns))


def renamed(row: Row, names: Sequence[str]) -> Row:
    """Return the row with columns by other names, NAME=COLUMN, beside their own.

    Points reach into objects and lists: `answer=reward_model.ground_truth`, `answer=answers.0`,
    `answer=conversations.-1.value`. A sum of columns with numbers is a number:
    `score=0.65*helpfulness+0.8*correctness-2`, `margin=score_chosen-score_rejected`. Raises
    ValueError if a name has another form, there is no such column, or a part of a sum is no number.
    """
    for name in names:
        column, equals, source = name.partition("=")
        if not equals:
            raise ValueError(f"--data.columns {name} is not of the form NAME=COLUMN")
        is_sum = source not in row and _SUM.fullmatch(source) is not None
        value = _sum_of(row, name, source) if is_sum else _value_at(row, name, source)
        # A name of a file that the user names is no name of a container.
        is_file = column in images.COLUMNS and isinstance(value, str) and value
        row = row | {column: [value] if is_file else value}
    return row


_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_FACTOR = rf"(?:{_NUMBER}|[A-Za-z_]\w*(?:\.(?:-?[0-9]+|\w+))*)"
_TERM = rf"{_FACTOR}(?:\s*\*\s*{_FACTOR})*"
_SUM = re.compile(rf"\s*-?\s*(?=.*(?<![.])[*+-]){_TERM}\s*(?:[+-]\s*{_TERM}\s*)*")
"""Columns and numbers with signs and factors. A name alone is none, nor is `answers.-1.text`."""


def _value_at(row: Row, name: str, source: str) -> Any:
    """Return the value of a column, or what points reach in it."""
    value: Any = row
    passed = ""
    for key in [source] if source in row else source.split("."):
        if isinstance(value, str):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        is_number = isinstance(value, list) and re.fullmatch("-?[0-9]+", key) is not None
        place: Any = int(key) if is_number else key
        try:
            value = value[place]
        except (LookupError, TypeError) as error:
            has = ", ".join(value) if isinstance(value, dict) else f"no names: {shown(value)}"
            reason = f"; there are {has}" if value is row else f": `{passed}` has {has}"
            raise ValueError(
                f"--data.columns {name}: there is no column `{source}`{reason}"
            ) from error
        passed = key
    return value


def _sum_of(row: Row, name: str, source: str) -> float:
    """Return the value of a sum of columns and numbers."""
    total = 0.0
    for sign, term in re.findall(rf"(?:^|(?<![.]))\s*([+-]?)\s*({_TERM})", source):
        product = -1.0 if sign == "-" else 1.0
        for factor in map(str.strip, term.split("*")):
            is_literal = re.fullmatch(_NUMBER, factor) is not None
            value = float(factor) if is_literal else _value_at(row, name, factor)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(
                    f"--data.columns {name}: `{factor}` is no number, but {shown(value)}"
                )
            product *= value
        total += product
    return total


def shape_of(row: Row) -> Shape | None:
    """Return the published shape of a row, or None if it has our columns already."""
    return next((shape for shape in _shapes_with(tuple(row)) if shape.fits(row)), None)


@functools.lru_cache
def _shapes_with(columns: tuple[str, ...]) -> tuple[Shape, ...]:
    """Return the shapes whose columns are among some, so that a row is compared with few."""
    return tuple(shape for shape in SHAPES if shape.has.keys() <= set(columns))


def _with_columns(row: Row, columns: Sequence[str]) -> Row:
    """Return the row with a prompt, if other columns imply it."""
    if "prompt" in row:
        return _take_prompt_once(row) if row["prompt"] != "" else row
    if tuple(columns) == ("prompt", "completion") and is_plain_text(row):
        if not isinstance(row["text"], str) or not row["text"]:
            raise ValueError("`text` must be a text that is not empty")
        return row | {"prompt": "", "completion": row["text"]}
    if "prompt" not in columns:
        return row
    messages = row.get("messages")
    if "chosen" in row and "rejected" in row:
        answers = (row["chosen"], row["rejected"])
        are_lists = all(isinstance(answer, list) and answer for answer in answers)
        if are_lists and not all(_role(answer[0]) == "assistant" for answer in answers):
            return row | _split_shared_prompt(*answers)
        if isinstance(messages, list) and messages:
            return row | {"prompt": _before_answers(messages, row["chosen"])}
        return (row | _split_shared_prompt(*answers)) if are_lists else row
    if "completion" in columns and "completion" in row and "messages" not in row:
        messages = row["completion"]
    if isinstance(messages, list) and messages:
        if _role(messages[-1]) != "assistant":
            return row | {"prompt": messages}
        if len(messages) == 1:
            raise ValueError("`messages` has nothing before the assistant's answer")
        is_whole = "completion" not in row or row["completion"] is messages
        answer = {"completion": messages[-1:]} if is_whole else {}
        return row | {"prompt": messages[:-1]} | (answer if "completion" in columns else {})
    return row


def _with_system(row: Row, columns: Sequence[str]) -> Row:
    """Return the row whose conversation begins with the system prompt of a column of its own.

    Raises:
        ValueError: if the conversation has another system message, or two columns differ.
    """
    names = [name for name in SYSTEM_COLUMNS if name not in columns and row.get(name)]
    texts = {name: message_forms.text_of(row[name], f"`{name}`") for name in names}
    column = "messages" if isinstance(row.get("messages"), list) else "prompt"
    targets = [name for name in ("messages", "prompt") if row.get(name)]
    if not texts or column not in targets:
        return row
    if len(set(texts.values())) > 1:
        raise ValueError(f"`{'` and `'.join(texts)}` differ: which one is the system message?")
    name, text = next(iter(texts.items()))
    for target in targets:
        conversation = row[target]
        if isinstance(conversation, str):
            conversation = [{"role": "user", "content": conversation}]
        if not isinstance(conversation, list) or not conversation:
            continue
        if _role(conversation[0]) not in ("system", "developer"):
            conversation = [{"role": "system", "content": text}, *conversation]
        elif _content(conversation[0]) != text.strip():
            raise ValueError(
                f"`{name}` and the first message of `{target}` are two different system messages"
            )
        row = row | {target: conversation}
    return row


def check_together(row: Row, columns: Sequence[str]) -> None:
    """Check what `normalize` and the types of single columns leave open.

    Raises ValueError if steps and their labels do not belong together, a margin is no number, or
    nobody answers in a conversation to learn from.
    """
    if "completions" in columns and "labels" in columns:
        _check_steps(row["completions"], row["labels"])
    if "completions" in columns and "scores" in columns:
        _check_scores(row["completions"], row["scores"])
    for column, reader, kind, is_right in VALUES:
        if reader in columns and not is_right(row.get(column)):
            raise ValueError(f"`{column}` is {kind}, not {shown(row.get(column))}")
    if "messages" in columns and all(_role(turn) != "assistant" for turn in row["messages"][1:]):
        raise ValueError("no message of the assistant follows a prompt, so nothing is learned")
    if "messages" in columns or tuple(columns) == ("prompt", "completion"):
        _check_weights(row)
    else:
        _refuse_spans(row)
    if row.get("forget") is True and "forget" not in columns:
        raise ValueError("`forget` is true, and the method learns all rows; see the preset unlearn")


VALUES: tuple[tuple[str, str, str, Callable[[Any], bool]], ...] = (
    ("margin", "chosen", "a number", lambda value: isinstance(value, int | float | None)),
    ("score", "score", "a number", is_number),
    ("forget", "forget", "true or false", lambda value: isinstance(value, bool)),
)
"""(column, column of the methods that read it, what its values are, whether a value is one)."""


def _check_weights(row: Row) -> None:
    """Raise ValueError if a weight of the row or of a message is no number from 0 on, or all are 0.

    A weight that is null counts as 1.
    """
    if row.get(span_weights.KEY) is not None:
        text = row.get("completion")
        if not isinstance(text, str):
            raise ValueError(
                f"the column `{span_weights.KEY}` is about a text in `completion`; messages have "
                "the key themselves"
            )
        span_weights.checked(row[span_weights.KEY], text, "`completion`")
    messages = row["messages"][1:] if "messages" in row else row["completion"]
    answers = [turn for turn in messages if isinstance(turn, dict) and _role(turn) == "assistant"]
    weights = [row.get("weight"), *[answer.get("weight") for answer in answers]]
    for weight in weights:
        if weight is not None and not (is_number(weight) and weight >= 0):
            raise ValueError(
                f"`weight` is a finite number that is not negative, not {shown(weight)}"
            )
    if answers and not any(weight is None or weight > 0 for weight in weights[1:]):
        raise ValueError("`weight` is 0 in every message of the assistant, so nothing is learned")


def _refuse_spans(row: Row) -> None:
    """Raise ValueError if an answer that is no demonstration has weights of its parts."""
    for column in ("chosen", "rejected", "completion"):
        messages = row.get(column)
        if isinstance(messages, list) and any(span_weights.KEY in turn for turn in messages):
            raise ValueError(f"`{column}` has weights of parts, which only SFT reads")


def _check_steps(steps: Any, labels: Any) -> None:
    """Raise ValueError if the steps are no texts, or do not each have a label."""
    if not isinstance(steps, list) or not all(isinstance(step, str) and step for step in steps):
        raise ValueError("`completions` is a list of texts, the steps, none of them empty")
    if not isinstance(labels, list) or not all(label in (True, False) for label in labels):
        raise ValueError("`labels` is a list of true and false")
    if not steps or len(steps) != len(labels):
        raise ValueError(
            f"`completions` has {len(steps)} steps and `labels` has {len(labels)}; "
            "there is one label for each step"
        )


def _check_scores(completions: Any, scores: Any) -> None:
    """Raise ValueError unless each of one or more completions has a score."""
    if not isinstance(completions, list) or not completions:
        raise ValueError("`completions` is a list of completions, one or more")
    if not isinstance(scores, list) or not all(map(is_number, scores)):
        raise ValueError("`scores` is a list of finite numbers")
    if len(scores) != len(completions):
        raise ValueError(
            f"there are {len(completions)} `completions` and {len(scores)} `scores`; "
            "there is one score for each completion"
        )


def require_several(row: Row) -> None:
    """Raise ValueError if a row has one completion, where completions are compared."""
    if len(row["completions"]) < 2:
        raise ValueError(
            "`completions` has one completion, and the loss compares two or more; one suffices to "
            "A-LoL with a critic (--algorithm.loss a_lol --algorithm.critic DIR)"
        )


def with_separators(row: Row, separator: str) -> Row:
    """Return the row with a separator after each step but the last, as in TRL's rows of steps.

    Steps with white space between them are joined as they are.
    """
    steps = row["completions"]
    borders = zip(steps, steps[1:], strict=False)
    if any(before[-1:].isspace() or after[:1].isspace() for before, after in borders):
        return row
    return row | {"completions": [*(step + separator for step in steps[:-1]), steps[-1]]}


def is_plain_text(row: Row) -> bool:
    """Return True if the row is a `text` to learn as a whole."""
    return "text" in row and not {"prompt", "completion", "messages"} & row.keys()


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _content(message: Any) -> str:
    """Return the text of a message for comparison."""
    return str(message.get("content") or "").strip()


# --- prompts beside and inside of answers ---


def _split_shared_prompt(chosen: list[Any], rejected: list[Any]) -> Row:
    """Return `prompt`, `chosen` and `rejected` of two conversations with one beginning."""
    length = 0
    for good, bad in zip(chosen, rejected, strict=False):
        if good != bad:
            break
        length += 1
    if length == len(chosen) == len(rejected):
        # The same answer twice: the pair is left out later, and counted.
        length -= 1
    elif length == len(chosen) or length == len(rejected):
        raise ValueError("one of `chosen` and `rejected` is the beginning of the other")
    while length and _role(chosen[length - 1]) == "assistant":
        length -= 1
    if length == 0:
        raise ValueError(
            "the row has no `prompt`, and `chosen` and `rejected` do not begin with the same "
            "messages"
        )
    return {"prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


def _before_answers(messages: list[Any], chosen: Any) -> list[Any]:
    """Return the messages before the chosen answer, which may stand at their end."""
    answer = chosen if isinstance(chosen, list) else [{"role": "assistant", "content": chosen}]
    if _same(messages[-len(answer) :], answer):
        messages = messages[: -len(answer)]
    if not messages or _role(messages[-1]) == "assistant":
        raise ValueError(
            "`messages` ends with another answer of the assistant than `chosen`: which of both is "
            "the chosen one?"
        )
    return messages


def _take_prompt_once(row: Row) -> Row:
    """Return the row whose answers do not repeat the prompt.

    Published pairs often hold the prompt as text, and whole conversations beside it, as in TRL's
    `extract_prompt`. A system message may stand in one of both only.

    Raises:
        ValueError: if an answer begins with other messages than the prompt.
    """
    whole = [
        name
        for name in ("chosen", "rejected", "completion")
        if isinstance(row.get(name), list)
        and row[name]
        and _role(row[name][0]) in ("system", "developer", "user")
    ]
    if not whole:
        return row
    prompt = row["prompt"]
    if not isinstance(prompt, list):
        prompt = [{"role": "user", "content": str(prompt)}]
    if whole == ["chosen", "rejected"]:
        split = _split_shared_prompt(row["chosen"], row["rejected"])
    elif len(whole) == 1 and whole[0] == "completion":
        length = _beginning(row["completion"], prompt)
        split = {"prompt": row["completion"][:length], "completion": row["completion"][length:]}
    else:
        raise ValueError("one of `chosen` and `rejected` begins with the prompt, and one does not")
    system, question = _without_system(prompt)
    inner_system, inner = _without_system(split["prompt"])
    is_beginning = _same(inner[: len(question)], question)
    is_last = isinstance(row["prompt"], str) and inner and _same(inner[-1:], question)
    if not is_beginning and not is_last:
        raise ValueError(
            f"`{whole[0]}` is a whole conversation, and it does not begin with `prompt`: which of "
            "both is the prompt? Leave one out"
        )
    if system and inner_system and not _same(system, inner_system):
        raise ValueError(f"`prompt` and `{whole[0]}` begin with different system messages")
    return row | split | {"prompt": [*(inner_system or system), *inner]}


def _beginning(conversation: list[Any], prompt: list[Any]) -> int:
    """Return the number of messages of a conversation that are its prompt."""
    system, inner = _without_system(conversation)
    question = _without_system(prompt)[1]
    if _same(inner[: len(question)], question):
        return len(system) + len(question)
    length = len(conversation)
    while length and _role(conversation[length - 1]) == "assistant":
        length -= 1
    return length


def _without_system(messages: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return (the system message in a list, or none; the other messages)."""
    count = int(bool(messages) and _role(messages[0]) in ("system", "developer"))
    return messages[:count], messages[count:]


def _same(first: list[Any], second: list[Any]) -> bool:
    """Return True if messages have the same roles and texts."""
    if len(first) != len(second):
        return False
    pairs = zip(first, second, strict=True)
    return all(_role(a) == _role(b) and _content(a) == _content(b) for a, b in pairs)


# --- the shapes of datasets ---


def _sharegpt(row: Row) -> Row:
    """Return ShareGPT's conversation as `messages`, or as the prompt of given answers."""
    column = "conversations" if "conversations" in row else "conversation"
    conversation = message_forms.parsed_list(row[column])
    if not isinstance(conversation, list) or not conversation:
        raise ValueError(f"`{column}` must be a list of messages that is not empty")
    for names in EXCHANGES:
        if all(isinstance(turn, dict) and turn.keys() == set(names) for turn in conversation):
            conversation = _in_turn([turn[name] for turn in conversation for name in names])
    if all(isinstance(turn, str) for turn in conversation):
        conversation = _in_turn(conversation)
    for number, message in enumerate(conversation, start=1):
        keys = message.keys() if isinstance(message, dict) else set()
        if not {"from", "role"} & keys or not {"value", "content", "text", "tool_calls"} & keys:
            raise ValueError(
                f"message {number} of `{column}` is not an object with `from` and `value`"
            )
    messages = message_forms.canonical(conversation, column)
    is_prompt = "chosen" in row and "rejected" in row and "prompt" not in row
    return {"prompt" if is_prompt else "messages": messages}


def _alpaca(row: Row) -> Row:
    """Return an instruction, with its input on the next line, and the answer to it."""
    parts = [row["instruction"], row.get("input", row.get("context"))]
    if not all(isinstance(part, str | None) for part in parts) or not parts[0]:
        raise ValueError("`instruction` and its input are texts, and the first is not empty")
    prompt: Any = "\n".join(part for part in parts if part)
    history = row.get("history")
    if history:
        if not isinstance(history, list) or not all(
            isinstance(exchange, list) and len(exchange) == 2 for exchange in history
        ):
            raise ValueError("`history` is a list of pairs: a question and its answer")
        turns = [
            {"role": role, "content": text}
            for exchange in history
            for role, text in zip(("user", "assistant"), exchange, strict=True)
        ]
        prompt = [*turns, {"role": "user", "content": prompt}]
    answer = next((row[name] for name in ("output", "response") if name in row), None)
    has_answer = answer is not None and "completion" not in row
    return {"prompt": prompt} | ({"completion": answer} if has_answer else {})


def _query(row: Row) -> Row:
    """Return a query after its history, and the response or a pair of responses."""
    columns = _alpaca({"instruction": row["query"], "history": row.get("history")})
    if "rejected_response" not in row:
        return columns | ({} if "completion" in row else {"completion": row["response"]})
    return columns | {"chosen": row["response"], "rejected": row["rejected_response"]}


def _function_calls(row: Row) -> Row:
    """Return a query and the calls that answer it."""
    calls = [{"role": "function_call", "content": row["answers"]}]
    if row["answers"] in ("[]", []):
        raise ValueError("`answers` has no call, so nothing is learned")
    return {"messages": [{"role": "user", "content": row["query"]}, *calls]}


_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def _is_open_dialogue(row: Row) -> bool:
    prompt = row["prompt"]
    is_from_human = prompt.lstrip().startswith("Human:")
    return is_from_human and prompt.rstrip().endswith("\n\nAssistant:")


def _dialogue(text: str) -> list[message_forms.Message]:
    """Return the messages of a text that names who speaks."""
    _, *parts = _SPEAKER.split(text.strip())
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": content.strip()}
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _stripped_answers(row: Row) -> Row:
    """Return the answers without the space that parts them from the text of a prompt."""
    names = ("completion", "chosen", "rejected")
    return {name: row[name].strip() for name in names if isinstance(row.get(name), str)}


def _marked_steps(row: Row) -> Row:
    """Return the steps of Math-Shepherd, each of which ends with a mark in `input`.

    `label` has + or - in the place of each mark.
    """
    mark = "ки"
    steps = row["input"].split(mark)
    labels = row["label"]
    signs = []
    position = 0
    for step in steps[:-1]:
        position += len(step)
        signs.append(labels[position : position + 1])
        # A sign is one character, and the mark is two.
        labels = labels[:position] + mark + labels[position + 1 :]
        position += len(mark)
    if not signs or any(sign not in ("+", "-") for sign in signs):
        raise ValueError("`label` has no + or - where `input` has its marks")
    question, start, first = steps[0].partition("Step 1:")
    if not start or not question.strip():
        raise ValueError("`input` has no question before `Step 1:`")
    texts = [text.strip() for text in [start + first, *steps[1:-1]]]
    return {
        "prompt": question.strip(),
        "completions": texts,
        "labels": [sign == "+" for sign in signs],
    }


def _in_turn(texts: Sequence[Any]) -> list[message_forms.Message]:
    """Return texts of the user and the assistant in turn as messages."""
    return [{"role": ROLES[number % 2], "content": text} for number, text in enumerate(texts)]


def _is_whole(answer: Any) -> bool:
    """Return True if a conversation begins before the assistant answers."""
    first = answer[0] if isinstance(answer, list) and answer else None
    return _role(first) in ("system", "developer", "user")


def _outputs_of_input(row: Row) -> Row:
    """Return OpenAI's pair: the messages and tools of an input, and two outputs."""
    prompt = row["input"].get("messages")
    if not isinstance(prompt, list):
        raise ValueError("`input` has no list `messages`")
    tools = {"tools": row["input"]["tools"]} if row["input"].get("tools") else {}
    chosen = row["preferred_output"]
    return {"prompt": prompt, "chosen": chosen, "rejected": row["non_preferred_output"]} | tools


def _rejected_answer(row: Row) -> Row:
    """Return a pair: the last answer of a conversation, and the one that was rejected."""
    messages = message_forms.canonical(row["messages"], "messages")
    if not messages or _role(messages[-1]) != "assistant" or len(messages) < 2:
        raise ValueError("`messages` does not end with the chosen answer of the assistant")
    rejected = row.get("rejected_response", row.get("rejected_message"))
    if isinstance(rejected, str):
        rejected = [{"role": "assistant", "content": rejected}]
    return {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": rejected}


def _first_error(row: Row) -> Row:
    """Return the steps of ProcessBench up to the first wrong one, whose number `label` gives."""
    steps = row["steps"]
    wrong = row["label"]
    if not isinstance(steps, list) or not -1 <= wrong < len(steps):
        raise ValueError("`label` is no number of one of `steps`, and not -1")
    count = len(steps) if wrong < 0 else wrong + 1
    labels = [number != wrong for number in range(count)]
    return {"prompt": row["problem"], "completions": steps[:count], "labels": labels}


def _refuse_media(row: Row) -> None:
    """Raise ValueError if the row is about a video or a sound."""
    for kind in MEDIA:
        for column in (kind, f"{kind}s"):
            if images.has_file(row, column, kind):
                raise ValueError(
                    f"the row has a file in `{column}`, and models of this library read texts and "
                    "images only"
                )


def _marks_objects(row: Row) -> bool:
    text = str([value for name, value in row.items() if name not in images.COLUMNS])
    return "<bbox>" in text or "<ref-object>" in text


SHAPES = (
    Shape(
        "ms-swift's marks of objects in texts",
        {"objects": object},
        "<bbox> and <ref-object> in the texts stand for the column `objects`, which is not read: "
        "write the coordinates and the names into the texts",
        lacks=(),
        where=lambda row: bool(row["objects"]) and _marks_objects(row),
    ),
    Shape(
        "ShareGPT's conversations",
        {},
        _sharegpt,
        lacks=("messages",),
        where=lambda row: (
            ("conversations" in row or isinstance(row.get("conversation"), list))
            and not {"prompt", "chosen", "rejected"} <= row.keys()
            and not all(map(_is_whole, (row.get("chosen"), row.get("rejected"))))
        ),
        others=("conversations", "conversation"),
        replaced=("conversations", "conversation"),
    ),
    Shape(
        "xLAM's and APIGen's calls of functions: query, answers, tools",
        {"query": object, "answers": object, "tools": object},
        _function_calls,
    ),
    Shape(
        "pairs of responses to an instruction, as argilla publishes them",
        {"chosen_response": object, "rejected_response": object},
        lambda row: (
            {"prompt": next(row[name] for name in ASKED if name in row)}
            | {name: row[f"{name}_response"] for name in ("chosen", "rejected")}
        ),
        lacks=("prompt", "chosen", "rejected"),
        where=lambda row: any(name in row for name in ASKED),
        others=ASKED,
    ),
    Shape(
        "Alpaca's instruction, input and output, or Dolly's instruction, context and response",
        {"instruction": object},
        _alpaca,
        others=("input", "context", "output", "response", "history"),
    ),
    Shape(
        "ms-swift's query, response and history",
        {"query": str, "response": str},
        _query,
        others=("history", "rejected_response"),
    ),
    Shape(
        "dialogues of Human and Assistant as texts, as in HH-RLHF",
        {"chosen": str, "rejected": str},
        lambda row: {name: _dialogue(row[name]) for name in ("chosen", "rejected")},
        lacks=("prompt",),
        where=lambda row: all(
            row[name].lstrip().startswith("Human:") for name in ("chosen", "rejected")
        ),
    ),
    Shape(
        "prompts of Human and Assistant as one text",
        {"prompt": str},
        lambda row: {"prompt": _dialogue(row["prompt"])[:-1]} | _stripped_answers(row),
        lacks=(),
        where=_is_open_dialogue,
    ),
    Shape(
        "pairs of answers to a question",
        {"question": str, "chosen": object, "rejected": object},
        lambda row: {"prompt": row["question"]},
    ),
    Shape(
        "pairs of answers to an input",
        {"input": str, "chosen": object, "rejected": object},
        lambda row: {"prompt": row["input"]},
        lacks=("messages", "prompt", "question"),
    ),
    Shape(
        "OpenAI's pairs of outputs",
        {"input": dict, "preferred_output": list, "non_preferred_output": list},
        _outputs_of_input,
        lacks=("messages", "prompt", "chosen", "rejected"),
    ),
    Shape(
        "Math-Shepherd's marked steps",
        {"input": str, "label": str},
        _marked_steps,
        lacks=("prompt",),
        where=lambda row: "ки" in row["input"],
        others=("task",),
    ),
    Shape(
        "UltraChat's texts in turn",
        {"data": list},
        lambda row: {"messages": _in_turn(row["data"])},
        where=lambda row: (
            len(row["data"]) > 1 and all(isinstance(text, str) for text in row["data"])
        ),
    ),
    Shape(
        "the Cauldron's and FineVision's texts",
        {"texts": list},
        lambda row: {"messages": _in_turn([turn[name] for turn in row["texts"] for name in ROLES])},
        where=lambda row: (
            bool(row["texts"])
            and all(isinstance(turn, dict) and {*ROLES} <= turn.keys() for turn in row["texts"])
        ),
    ),
    Shape(
        "ms-swift's and OpenPipe's messages with a rejected answer",
        {"messages": object},
        _rejected_answer,
        lacks=("prompt", "chosen_response"),
        where=lambda row: "rejected_response" in row or "rejected_message" in row,
        replaced=("rejected_response", "rejected_message"),
    ),
    Shape(
        "ms-swift's messages with a rejected conversation",
        {"messages": object, "rejected_messages": object},
        # `normalize` then splits off the prompt of both.
        lambda row: {"chosen": row["messages"], "rejected": row["rejected_messages"]},
        lacks=("prompt",),
        replaced=("messages", "rejected_messages"),
    ),
    Shape(
        "ProcessBench's steps up to the first wrong one",
        {"problem": object, "steps": object, "label": int},
        _first_error,
        lacks=("prompt", "labels"),
    ),
    Shape(
        "single messages of trees, as OpenAssistant publishes them",
        {"text": object, "role": object, "parent_id": object},
        "the row is one message of a tree (`parent_id`); join each path from the root into "
        "`messages`",
        lacks=("messages",),
    ),
    Shape(
        "PRM800K's trees of rated steps",
        {"label": dict},
        "`label` is a tree of rated steps, as OpenAI publishes PRM800K; use the rows of "
        "trl-lib/prm800k (prompt, completions, labels), or write such rows",
        lacks=("prompt",),
        others=("question",),
    ),
)
"""The first shape that fits a row is taken."""
