"""A tokenizer, whatever library is behind it.

Control tokens. A tokenizer's special tokens (end of sequence, turn markers) steer a model, so text
that merely spells one must not become one: `encode` and the contents of chat messages yield
ordinary tokens for a literal "<eos>". Only a chat template, or `encode(text, special=True)`, writes
control tokens.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tpu_rl.errors import InputError
from tpu_rl.tokenizers import chat_templates, end_of_sequence

Message = dict[str, Any]
"""One turn of a conversation: {"role": "user", "content": "..."} and any other keys that the chat
template reads."""


class Backend(Protocol):
    """The part of a tokenizer library that `Tokenizer` uses."""

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of ordinary text."""
        ...

    def encode_control(self, text: str) -> list[int] | None:
        """Return the ids of text in which control-token literals become control tokens.

        Returns None if the library cannot do this.
        """
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, control tokens included."""
        ...

    @property
    def special_texts(self) -> dict[str, Any]:
        """Texts of special tokens, by the names that chat templates use."""
        ...

    def save(self, directory: Path) -> None:
        """Write the library's own files."""
        ...


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back, the same for every kind of tokenizer. See `load` and `characters`."""

    backend: Backend
    eos_ids: tuple[int, ...]
    """Ids that end a completion. Demonstrations end with the first one."""
    bos_id: int | None
    pad_id: int
    """The padding id. If the tokenizer has none, it is the first end-of-sequence id: padding is
    masked everywhere."""
    vocab_size: int
    """One more than the largest id. A model's vocabulary may be padded beyond it."""
    prefix_ids: tuple[int, ...]
    """Ids before a plain text: usually the beginning-of-sequence id, or none."""
    control: dict[str, int]
    """Literal -> id of every control token. The unknown token is not one of them, because ordinary
    text may contain unknown characters."""
    chat_template: str | None = None

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer can render conversations."""
        return self.chat_template is not None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text, with nothing added.

        Control-token literals become control tokens only if `special` is True.

        Raises:
            InputError: if the text cannot be written in UTF-8.
        """
        _require_encodable(text)
        if not special:
            return self._encode_text(text)
        ids = self.backend.encode_control(text)
        return self._encode_marked(text, mark=None) if ids is None else ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of ids, without control tokens unless `skip_special` is False.

        Raises:
            ValueError: for an unknown id.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is not one of the tokenizer's {self.vocab_size}")
        if skip_special:
            control = frozenset(self.control.values())
            ids = [i for i in ids if i not in control]
        return self.backend.decode(ids)

    def render(self, messages: list[Message], add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation, by the chat template.

        Raises:
            InputError: if there is no template, or it fails or does not end.
        """
        if self.chat_template is None:
            raise InputError(
                "the tokenizer has no chat template, but the data hold messages",
                where="--model.path, --data.path",
                why="only a chat template turns messages into one text",
                fix="use an instruction-tuned checkpoint, or give `prompt` as plain text",
            )
        _require_messages(messages)
        texts = "".join(_strings(messages))
        _require_encodable(texts)
        pattern = _alternatives(self.control)
        if not pattern.search(texts):
            return self.encode(self._text_of(messages, add_generation_prompt), special=True)
        # Control tokens that contents spell are put between two marks, a character that no content
        # has, so that the tokenizer does not see them.
        mark = next(chr(c) for c in range(0xE000, 0xF900) if chr(c) not in texts)
        hidden = _map_strings(
            messages, lambda text: pattern.sub(lambda match: f"{mark}{match[0]}{mark}", text)
        )
        return self._encode_marked(self._text_of(hidden, add_generation_prompt), mark)

    def _text_of(self, messages: list[Message], add_generation_prompt: bool) -> str:
        assert self.chat_template is not None
        return chat_templates.render(
            self.chat_template, messages, add_generation_prompt, self.backend.special_texts
        )

    def encode_prompt(self, prompt: str | list[Message]) -> list[int]:
        """Return the ids that a completion continues.

        A conversation is rendered by the chat template. A text follows `prefix_ids`.
        """
        if isinstance(prompt, str):
            return [*self.prefix_ids, *self.encode(prompt)]
        if prompt and prompt[-1].get("role") == "assistant":
            raise InputError(
                "the prompt's last message is the assistant's",
                where=f"message {len(prompt)} of the prompt",
                why="the model is to write the assistant's next turn",
                fix="move that message to the column `completion`",
            )
        return self.render(prompt)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write files that `load`, and transformers or sentencepiece, can read.

        generation_config.json is one of them, because a tokenizer's own files can name one end
        only.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.backend.save(Path(directory))
        first, *others = self.eos_ids
        eos = [first, *others] if others else first
        ids = {"bos_token_id": self.bos_id, "eos_token_id": eos, "pad_token_id": self.pad_id}
        text = json.dumps({name: i for name, i in ids.items() if i is not None}, indent=2)
        (Path(directory) / end_of_sequence.FILE).write_text(text + "\n", encoding="utf-8")

    def _encode_text(self, text: str) -> list[int]:
        """Return the ids of ordinary text, which are never control tokens."""
        control = frozenset(self.control.values())
        ids = self.backend.encode_text(text)
        if control.isdisjoint(ids):
            return ids
        # Some vocabularies (Unigram) have a control token's text as an ordinary piece. Break the
        # text after its first letter.
        starts = [match.start() + 1 for match in _alternatives(self.control).finditer(text)]
        pieces = [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]
        ids = [i for piece in pieces if piece for i in self.backend.encode_text(piece)]
        if not control.isdisjoint(ids):
            raise InputError(
                "the tokenizer writes control tokens for ordinary text",
                where=repr(text[:80]),
                why="the text would steer the model",
                fix="drop the row, or use another tokenizer",
            )
        return ids

    def _encode_marked(self, text: str, mark: str | None) -> list[int]:
        """Return the ids of a text with its control tokens, except those between two marks."""
        pattern = _alternatives(self.control, mark)
        ids: list[int] = []
        ordinary = ""
        end = 0
        for match in pattern.finditer(text):
            ordinary += text[end : match.start()]
            end = match.end()
            if mark is not None and match[0].startswith(mark):
                ordinary += match[0].strip(mark)
            else:
                ids += [*self._encode_after(ordinary, bool(ids)), self.control[match[0]]]
                ordinary = ""
        ordinary += text[end:]
        return ids + self._encode_after(ordinary, bool(ids))

    def _encode_after(self, text: str, follows_control: bool) -> list[int]:
        """Return the ids of a text, which may follow a control token.

        Most tokenizers add no space of their own after a control token.
        """
        if not text:
            return []
        alone = self._encode_text(text)
        if not follows_control or not self._drops_space:
            return alone
        newline = self._encode_text("\n")
        after_newline = self._encode_text("\n" + text)
        return after_newline[len(newline) :] if after_newline[: len(newline)] == newline else alone

    @functools.cached_property
    def _drops_space(self) -> bool:
        """True if a text has other ids at the very start than after a control token.

        The reason is sentencepiece's leading space.
        """
        literal = next(iter(self.control))
        ids = self.backend.encode_control(literal + "a")
        return ids is not None and ids[1:] != self._encode_text("a")


# --- texts and messages ---


def _alternatives(control: dict[str, int], mark: str | None = None) -> re.Pattern[str]:
    """Return a pattern of all control-token literals, longest first, and of one between marks."""
    longest_first = sorted(control, key=len, reverse=True)
    literals = "|".join(re.escape(text) for text in longest_first) or "(?!)"
    if mark is None:
        return re.compile(literals)
    return re.compile(f"{mark}(?:{literals}){mark}|{mark}|{literals}")


def _strings(value: Any) -> list[str]:
    """Return all texts in a message or conversation, without roles."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() if key != "role" for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return []


def _map_strings(value: Any, function: Any) -> Any:
    """Return the message or conversation with `function` applied to all texts but roles."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {
            key: item if key == "role" else _map_strings(item, function)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_map_strings(item, function) for item in value]
    return value


def _require_encodable(text: str) -> None:
    """Raise InputError if the text cannot be written in UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds half of a surrogate pair, {text[error.start]!r}",
            where=f"character {error.start} of {text[max(error.start - 20, 0) : error.start]!r}...",
            why="such a character cannot be written in UTF-8",
            fix="repair the text: it was cut inside a character",
        ) from error


def _require_messages(messages: list[Message]) -> None:
    """Raise InputError if the list is empty, or one of its items is not a message."""
    if not messages:
        raise InputError(
            "the conversation has no messages",
            why="the list is empty",
            fix="add a message, or drop the row",
        )
    for number, message in enumerate(messages, start=1):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise InputError(
                "a message is an object with `role` and `content`",
                where=f"message {number}: {json.dumps(message, default=str)[:120]}",
                why="a chat template reads both",
                fix='as in {"role": "user", "content": "..."}',
            )
