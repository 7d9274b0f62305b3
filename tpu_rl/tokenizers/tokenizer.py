"""A tokenizer, whatever library is behind it.

Control tokens. A tokenizer's special tokens (end of sequence, turn markers) steer a model, so text that merely *spells*
one must not become one: `encode` and the contents of chat messages yield ordinary tokens for a literal "<eos>". Only a
chat template, or `encode(text, special=True)`, writes control tokens.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tpu_rl import chat_templates
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import end_of_sequence

Message = dict[str, Any]
"""One turn of a conversation: {"role": "user", "content": "..."} and whatever else the chat template reads."""


class Backend(Protocol):
    """What a tokenizer library must do for `Tokenizer`."""

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text."""
        ...

    def encode_control(self, text: str) -> list[int] | None:
        """Ids of text whose control-token literals are control tokens; None if the library cannot tell them."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of ids, control tokens included."""
        ...

    @property
    def special_texts(self) -> dict[str, Any]:
        """What chat templates call the special tokens -> their texts."""
        ...

    def save(self, directory: Path) -> None: ...


@dataclass(frozen=True)
class Tokenizer:
    """Text <-> ids, the same for every kind of tokenizer. Built by `load` or `characters`."""

    backend: Backend
    eos_ids: tuple[int, ...]
    """Ids that end a completion; the first one is what demonstrations end with."""
    bos_id: int | None
    pad_id: int
    """The padding id; where the tokenizer has none, the first end-of-sequence id (padding is masked everywhere)."""
    vocab_size: int
    """One more than the largest id; a model's vocabulary may be padded beyond it."""
    prefix_ids: tuple[int, ...]
    """What the tokenizer puts before a plain text (usually the beginning-of-sequence id or nothing)."""
    control: dict[str, int]
    """Literal -> id of every control token, except the unknown token: ordinary text may hold unknown characters."""
    chat_template: str | None = None

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of `text`, nothing added. Control-token literals become control tokens only with `special`."""
        _require_encodable(text)
        if not special:
            return self._encode_text(text)
        ids = self.backend.encode_control(text)
        return self._encode_marked(text, mark=None) if ids is None else ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`, without control tokens unless `skip_special` is False. Raises ValueError for an unknown id."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is not one of the tokenizer's {self.vocab_size}")
        if skip_special:
            control = frozenset(self.control.values())
            ids = [i for i in ids if i not in control]
        return self.backend.decode(ids)

    def render(self, messages: list[Message], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation by the chat template. Raises InputError where the template fails, or never ends."""
        if self.chat_template is None:
            raise InputError(
                "the tokenizer has no chat template, but the data hold messages",
                fix="use an instruction-tuned checkpoint, or give `prompt` as plain text",
            )
        _require_messages(messages)
        texts = "".join(_strings(messages))
        _require_encodable(texts)
        pattern = _alternatives(self.control)
        if not pattern.search(texts):
            return self.encode(self._text_of(messages, add_generation_prompt), special=True)
        # Control tokens spelt in the contents are hidden from the tokenizer behind a character that no content holds.
        mark = next(chr(c) for c in range(0xE000, 0xF900) if chr(c) not in texts)
        hidden = _map_strings(messages, lambda text: pattern.sub(lambda match: f"{mark}{match[0]}{mark}", text))
        return self._encode_marked(self._text_of(hidden, add_generation_prompt), mark)

    def _text_of(self, messages: list[Message], add_generation_prompt: bool) -> str:
        assert self.chat_template is not None
        return chat_templates.render(self.chat_template, messages, add_generation_prompt, self.backend.special_texts)

    def encode_prompt(self, prompt: str | list[Message]) -> list[int]:
        """Ids that a completion continues: a conversation by the chat template, a text after the usual prefix."""
        if isinstance(prompt, str):
            return [*self.prefix_ids, *self.encode(prompt)]
        if prompt and prompt[-1].get("role") == "assistant":
            raise InputError(
                "the prompt's last message is the assistant's",
                why="the model is to write the assistant's next turn",
                fix="move that message to the column `completion`",
            )
        return self.render(prompt)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes files that `load`, and transformers or sentencepiece, read back.

        generation_config.json is one of them: of several ends, a tokenizer's own files know the first alone.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.backend.save(Path(directory))
        first, *others = self.eos_ids
        eos = [first, *others] if others else first
        ids = {"bos_token_id": self.bos_id, "eos_token_id": eos, "pad_token_id": self.pad_id}
        known = {name: value for name, value in ids.items() if value is not None}
        (Path(directory) / end_of_sequence.FILE).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")

    def _encode_text(self, text: str) -> list[int]:
        control = frozenset(self.control.values())
        ids = self.backend.encode_text(text)
        if control.isdisjoint(ids):
            return ids
        # Some vocabularies (Unigram) hold a control token's text as an ordinary piece: break it after its first letter.
        starts = [match.start() + 1 for match in _alternatives(self.control).finditer(text)]
        pieces = [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]
        ids = [i for piece in pieces if piece for i in self.backend.encode_text(piece)]
        if not control.isdisjoint(ids):
            raise InputError("the tokenizer writes control tokens for ordinary text", where=repr(text[:80]))
        return ids

    def _encode_marked(self, text: str, mark: str | None) -> list[int]:
        """Ids of `text` with its control tokens, except those that stand between two `mark` characters."""
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

    def _encode_after(self, text: str, inside: bool) -> list[int]:
        """Ids of text that follows a control token if `inside`; there most tokenizers put no space of their own."""
        if not text:
            return []
        alone = self._encode_text(text)
        if not inside or not self._drops_space:
            return alone
        newline = self._encode_text("\n")
        after_newline = self._encode_text("\n" + text)
        return after_newline[len(newline) :] if after_newline[: len(newline)] == newline else alone

    @functools.cached_property
    def _drops_space(self) -> bool:
        """Whether a text's ids differ at the very start and after a control token (sentencepiece's leading space)."""
        literal = next(iter(self.control))
        ids = self.backend.encode_control(literal + "a")
        return ids is not None and ids[1:] != self._encode_text("a")


# --- texts and messages ------------------------------------------------------------------------------------------


def _alternatives(control: dict[str, int], mark: str | None = None) -> re.Pattern[str]:
    """Matches any control-token literal, longest first, and one between two `mark` characters."""
    literals = "|".join(re.escape(text) for text in sorted(control, key=len, reverse=True)) or "(?!)"
    return re.compile(literals if mark is None else f"{mark}(?:{literals}){mark}|{mark}|{literals}")


def _strings(value: Any) -> list[str]:
    """All texts in a message or conversation; roles are no text."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() if key != "role" for text in _strings(item)]
    return [text for item in value for text in _strings(item)] if isinstance(value, list) else []


def _map_strings(value: Any, function: Any) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {key: item if key == "role" else _map_strings(item, function) for key, item in value.items()}
    return [_map_strings(item, function) for item in value] if isinstance(value, list) else value


def _require_encodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds half of a surrogate pair, {text[error.start]!r}",
            where=f"character {error.start} of {text[max(error.start - 20, 0) : error.start]!r}...",
            fix="repair the data: such a character cannot be written in UTF-8",
        ) from error


def _require_messages(messages: list[Message]) -> None:
    if not messages:
        raise InputError("the conversation has no messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(
                "a message is an object with `role` and `content`",
                where=f"message {number}: {json.dumps(message, default=str)[:120]}",
            )
