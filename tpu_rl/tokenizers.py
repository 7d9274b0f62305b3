"""Text to token ids and back: Hugging Face tokenizer directories, sentencepiece models, character-level tokenizers.

Control tokens. A tokenizer's special tokens (end of sequence, turn markers) steer a model, so text that merely *spells*
one must not become one: `encode` and the contents of chat messages yield ordinary tokens for a literal "<eos>". Only a
chat template, or `encode(text, special=True)`, writes control tokens.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tpu_rl import chat_templates, model_files
from tpu_rl.errors import InputError

# transformers would say at every start that PyTorch is missing and what it could do with it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

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
        """Writes files that `load`, and transformers or sentencepiece, read back."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.backend.save(Path(directory))

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


# --- loading -----------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory, of a sentencepiece `.model` file, or of a hub id (local cache first).

    Raises InputError where there is none, or where it has no end-of-sequence token.
    """
    where = _resolve(str(path))
    if where.is_dir():
        model_files.require_safe(where)
    model_file = where / "tokenizer.model" if where.is_dir() else where
    names = {"tokenizer.json", "tokenizer_config.json"}
    if where.is_file() or (model_file.is_file() and not any((where / name).is_file() for name in names)):
        return _load_sentencepiece(model_file)
    return _load_hugging_face(where)


def characters(alphabet: str, chat_template: str | None = None) -> Tokenizer:
    """A tokenizer with one token a character of `alphabet`, after <pad>, <bos>, <eos> and <unk> (ids 0 to 3).

    It is an ordinary fast tokenizer: saved, it loads in transformers.
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise InputError(f"an alphabet is one or more different characters, not {alphabet!r}")
    import tokenizers as fast
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *alphabet])}
    model = fast.Tokenizer(fast.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = fast.pre_tokenizers.Split(fast.Regex(r"[\s\S]"), "isolated")
    model.decoder = fast.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, **special)
    tokenizer.chat_template = chat_template
    return _from_hugging_face(tokenizer, eos_ids=(), where="characters")


@dataclass(frozen=True)
class _HuggingFace:
    tokenizer: Any

    def encode_text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode_control(self, text: str) -> list[int] | None:
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @property
    def special_texts(self) -> dict[str, Any]:
        return self.tokenizer.special_tokens_map

    def save(self, directory: Path) -> None:
        self.tokenizer.save_pretrained(directory)
        config_file = directory / "tokenizer_config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        if config.get("tokenizer_class") == "TokenizersBackend":
            # transformers 5's name for the class that all versions know under this one.
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _load_hugging_face(where: Path) -> Tokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    has_config = any((where / name).is_file() for name in ("tokenizer_config.json", "config.json"))
    if not has_config and not (where / "tokenizer.json").is_file():
        raise InputError(
            "no tokenizer in this directory",
            where=str(where),
            why="it holds neither tokenizer.json nor tokenizer_config.json nor tokenizer.model",
        )
    if (where / "tokenizer_config.json").is_file():
        settings = where / "tokenizer_config.json"
        model_files.refuse_outside_files(model_files.read_json(settings), settings)
    try:
        if has_config:
            tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=True, trust_remote_code=False)
        else:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(where / "tokenizer.json"))
    # transformers and the Rust library below it raise bare Exception for damaged files.
    except Exception as error:
        raise InputError(
            "cannot load the tokenizer", where=str(where), why=f"{type(error).__name__}: {error}"[:500]
        ) from error
    return _from_hugging_face(tokenizer, _listed_eos(where, _vocab_size(tokenizer)), str(where))


def _vocab_size(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values()) + 1


def _from_hugging_face(tokenizer: Any, eos_ids: tuple[int, ...], where: str) -> Tokenizer:
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.all_special_tokens}
    special.pop(tokenizer.unk_token, None)
    control = special | {tokenizer.convert_ids_to_tokens(i): i for i in eos_ids}
    eos_ids = _require_eos((tokenizer.eos_token_id, *eos_ids), where)
    plain = tokenizer.encode("a", add_special_tokens=False)
    wrapped = tokenizer.encode("a", add_special_tokens=True)
    starts = [k for k in range(len(wrapped)) if wrapped[k : k + len(plain)] == plain]
    return Tokenizer(
        backend=_HuggingFace(tokenizer),
        eos_ids=eos_ids,
        bos_id=tokenizer.bos_token_id,
        pad_id=eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        vocab_size=_vocab_size(tokenizer),
        prefix_ids=tuple(wrapped[: starts[0]]) if starts else (),
        control=control,
        chat_template=tokenizer.get_chat_template() if tokenizer.chat_template else None,
    )


@dataclass(frozen=True)
class _SentencePiece:
    processor: Any
    file: Path

    def encode_text(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def encode_control(self, text: str) -> list[int] | None:
        return None

    def decode(self, ids: list[int]) -> str:
        text, ordinary = "", []
        for i in ids:
            if self.processor.is_control(i):
                text += self.processor.decode(ordinary) + self.processor.id_to_piece(i)
                ordinary = []
            else:
                ordinary.append(i)
        return text + self.processor.decode(ordinary)

    @property
    def special_texts(self) -> dict[str, Any]:
        return {}

    def save(self, directory: Path) -> None:
        target = directory / "tokenizer.model"
        if target.resolve() != self.file.resolve():
            shutil.copyfile(self.file, target)


def _load_sentencepiece(file: Path) -> Tokenizer:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.Load(str(file))
    except (OSError, RuntimeError) as error:
        raise InputError(
            "not a sentencepiece model",
            where=str(file),
            why=str(error),
            fix="give a model's directory, or a sentencepiece .model file",
        ) from error
    size = processor.get_piece_size()
    bos = processor.bos_id() if processor.bos_id() >= 0 else None
    eos = processor.eos_id() if processor.eos_id() >= 0 else None
    eos_ids = _require_eos((eos, *_listed_eos(file.parent, size)), str(file))
    return Tokenizer(
        backend=_SentencePiece(processor, file),
        eos_ids=eos_ids,
        bos_id=bos,
        pad_id=processor.pad_id() if processor.pad_id() >= 0 else eos_ids[0],
        vocab_size=size,
        prefix_ids=() if bos is None else (bos,),
        control={processor.id_to_piece(i): i for i in range(size) if processor.is_control(i)},
    )


def _resolve(path: str) -> Path:
    """The local file or directory that `path` means; hub ids are looked up in the local cache, then downloaded."""
    where = Path(path).expanduser()
    if where.exists():
        return where
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) and not where.parent.exists():
        return _hub_directory(path)
    names = [entry.name for entry in where.parent.iterdir()] if where.parent.is_dir() else []
    nearest = difflib.get_close_matches(where.name, names, n=1)
    raise InputError(
        "no such model directory or tokenizer file",
        where=path,
        fix=f"did you mean {where.parent / nearest[0]}?" if nearest else "",
    )


def _hub_directory(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = ["tokenizer*", "*config.json", "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name} is neither a local directory nor in the local hub cache, and could not be downloaded",
            why=str(error).splitlines()[0],
            fix="check the name, or download the model and give its directory",
        ) from error


def _listed_eos(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids that generation_config.json lists; chat models end a turn with more than one."""
    file = directory / "generation_config.json"
    if not file.is_file():
        return ()
    try:
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise InputError("not a JSON object", where=str(file), why=str(error)) from error
    listed = listed if isinstance(listed, list) else [listed]
    ids = tuple(i for i in listed if isinstance(i, int))
    if any(not 0 <= i < vocab_size for i in ids):
        raise InputError(f"eos_token_id {listed} is not among the tokenizer's {vocab_size} ids", where=str(file))
    return ids


def _require_eos(candidates: tuple[int | None, ...], where: str) -> tuple[int, ...]:
    eos_ids = tuple(dict.fromkeys(i for i in candidates if i is not None))
    if not eos_ids:
        raise InputError(
            "the tokenizer has no end-of-sequence token: a model cannot stop",
            where=where,
            fix="set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json",
        )
    return eos_ids


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
