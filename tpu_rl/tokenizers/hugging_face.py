"""Tokenizers of the Hugging Face libraries, from their files or made of an alphabet."""

from __future__ import annotations

import copy
import json
import os
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpu_rl import untrusted_files
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import end_of_sequence, probe
from tpu_rl.tokenizers.tokenizer import Tokenizer

# Otherwise transformers prints a warning at every start that PyTorch is missing.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def characters(alphabet: str, chat_template: str | None = None) -> Tokenizer:
    """Return a tokenizer with one token per character of `alphabet`.

    Ids 0 to 3 are <pad>, <bos>, <eos> and <unk>. It is an ordinary fast tokenizer, which loads in
    transformers once saved. Raises InputError if a character comes twice, or there is none.
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise InputError(
            f"an alphabet is one or more different characters, not {alphabet!r}",
            why="each character is one token",
            fix="give each character once",
        )
    import tokenizers as fast
    from transformers import PreTrainedTokenizerFast

    special = {
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    vocabulary = {token: i for i, token in enumerate([*special.values(), *alphabet])}
    model = fast.Tokenizer(fast.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = fast.pre_tokenizers.Split(fast.Regex(r"[\s\S]"), "isolated")
    model.decoder = fast.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, **special)
    tokenizer.chat_template = chat_template
    return _from_hugging_face(tokenizer, eos_ids=(), where="characters")


@dataclass(frozen=True)
class _HuggingFace:
    """Backend of `Tokenizer`."""

    tokenizer: Any
    lock: Any = field(default_factory=threading.Lock, compare=False, repr=False)
    """Held while the library encodes: whether it splits special tokens is a state of its object,
    which threads would change for each other."""

    def encode_text(self, text: str) -> list[int]:
        with self.lock:
            return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode_control(self, text: str) -> list[int] | None:
        with self.lock:
            return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        with self.lock:
            return self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )

    def parse_response(self, text: str, prefix: str, tools: list[Any]) -> dict[str, Any] | None:
        if getattr(self.tokenizer, "response_template", None) is None:
            return None
        try:
            message = self.tokenizer.parse_response(text, prefix=prefix, tools=tools)
        except Exception:  # The library raises many types for what a model may write.
            return None
        return message if isinstance(message, dict) else None

    @property
    def special_texts(self) -> dict[str, Any]:
        return self.tokenizer.special_tokens_map

    def with_template(self, template: str) -> _HuggingFace:
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.chat_template = template
        return _HuggingFace(tokenizer, self.lock)

    def save(self, directory: Path) -> None:
        self.tokenizer.save_pretrained(directory)
        config_file = directory / "tokenizer_config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        if config.get("tokenizer_class") == "TokenizersBackend":
            # A name of transformers 5. All versions know the same class by the other name.
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            config_file.write_text(
                json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )


def load(directory: Path) -> Tokenizer:
    """Return the tokenizer of a directory. Raises InputError if it is missing or damaged."""
    from transformers import PreTrainedTokenizerFast

    settings_file = directory / "tokenizer_config.json"
    has_config = settings_file.is_file() or (directory / "config.json").is_file()
    if not has_config and not (directory / "tokenizer.json").is_file():
        raise InputError(
            "no tokenizer in this directory",
            where=str(directory),
            why="it holds neither tokenizer.json nor tokenizer_config.json nor tokenizer.model",
            fix="copy the tokenizer's files into it",
        )
    settings: dict[str, Any] = {}
    if settings_file.is_file():
        settings = untrusted_files.read_json(settings_file)
        untrusted_files.refuse_outside_files(settings, settings_file)
    if (directory / "tokenizer.json").is_file():
        probe.require_harmless(directory / "tokenizer.json", "cannot load the tokenizer")
    try:
        if has_config:
            loader: Any = PreTrainedTokenizerFast
            if not _is_plain(settings, directory):
                from transformers import AutoTokenizer as loader
            tokenizer = loader.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            if _loses_more_than_file(tokenizer, directory / "tokenizer.json"):
                tokenizer = PreTrainedTokenizerFast.from_pretrained(
                    directory, local_files_only=True
                )
        else:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    # transformers and the Rust library below it raise bare Exception for damaged files, and the
    # library's panics are no Exception.
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise InputError(
            "cannot load the tokenizer",
            where=str(directory),
            why=f"{type(error).__name__}: {error}"[:500],
            fix="download its files again",
        ) from error
    if not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(directory / "chat_template.json")
    eos_ids = end_of_sequence.listed(directory, _vocab_size(tokenizer))
    result = _from_hugging_face(tokenizer, eos_ids, str(directory))
    rows = end_of_sequence.embedding_rows(directory)
    if rows is not None and result.pad_id >= rows:
        # Padding is masked everywhere, but the embedding reads it.
        return replace(result, pad_id=result.eos_ids[0])
    return result


def _is_plain(settings: dict[str, Any], directory: Path) -> bool:
    """Return True if `AutoTokenizer` would take `PreTrainedTokenizerFast`.

    Importing it imports torch, too, where that is installed, which takes seconds. Models other than
    Llamas may have another class than the one that their files name.
    """
    model = directory / "config.json"
    return (
        settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
        and "auto_map" not in settings
        and (directory / "tokenizer.json").is_file()
        and model.is_file()
        and untrusted_files.read_json(model).get("model_type") == "llama"
    )


def _processor_template(file: Path) -> str | None:
    """Return the chat template of a processor, which earlier models that see images publish in a
    file of its own (LLaVA's, SmolVLM's), or None without such a file."""
    if not file.is_file():
        return None
    template = untrusted_files.read_json(file).get("chat_template")
    if not isinstance(template, str):
        raise InputError(
            "the file has no chat template",
            where=str(file),
            why="its `chat_template` is missing or no text",
            fix="download it again, or remove it",
        )
    return template


PROBES = ("How are you?\n  x = 1", "\u2115 na\u00efve")
"""Texts that a tokenizer should not lose a character of."""


def _loses_more_than_file(tokenizer: Any, file: Path) -> bool:
    """Return True if a text survives the pipeline in tokenizer.json, but not the tokenizer.

    In transformers 5 some classes put a pipeline of their own in its place. For DeepSeek's models,
    whose tokenizer_config.json says LlamaTokenizerFast, it drops all spaces
    (github.com/huggingface/transformers/issues/45488).
    """
    import tokenizers as fast

    lost = [
        text
        for text in PROBES
        if tokenizer.decode(
            tokenizer.encode(text, add_special_tokens=False),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        != text
    ]
    if not lost or not file.is_file():
        return False
    pipeline = fast.Tokenizer.from_file(str(file))
    return any(
        pipeline.decode(
            pipeline.encode(text, add_special_tokens=False).ids, skip_special_tokens=False
        )
        == text
        for text in lost
    )


def _vocab_size(tokenizer: Any) -> int:
    """Return one more than the largest id."""
    return max(tokenizer.get_vocab().values()) + 1


def _from_hugging_face(tokenizer: Any, eos_ids: tuple[int, ...], where: str) -> Tokenizer:
    special = {
        token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    special |= {
        text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.all_special_tokens
    }
    special.pop(tokenizer.unk_token, None)
    eos_ids = end_of_sequence.require((tokenizer.eos_token_id, *eos_ids), where)
    # Every end is a control token, also one that is the unknown token, as in GPT-2.
    control = special | {tokenizer.convert_ids_to_tokens(i): i for i in eos_ids}
    plain = tokenizer.encode("a", add_special_tokens=False)
    wrapped = tokenizer.encode("a", add_special_tokens=True)
    starts = [k for k in range(len(wrapped)) if wrapped[k : k + len(plain)] == plain]
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        templates = {"default": templates}
    template = templates.get("default")
    return Tokenizer(
        backend=_HuggingFace(tokenizer),
        eos_ids=eos_ids,
        bos_id=tokenizer.bos_token_id,
        pad_id=eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        vocab_size=_vocab_size(tokenizer),
        prefix_ids=tuple(wrapped[: starts[0]]) if starts else (),
        control=control,
        unknown_id=None if tokenizer.unk_token_id in eos_ids else tokenizer.unk_token_id,
        chat_template=template or None,
        tool_template=templates.get("tool_use") if template else None,
    )
