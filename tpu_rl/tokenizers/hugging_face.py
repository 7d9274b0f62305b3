"""Tokenizers of the Hugging Face libraries, from their files or made of an alphabet."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_rl import model_files
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import end_of_sequence
from tpu_rl.tokenizers.tokenizer import Tokenizer

# transformers would say at every start that PyTorch is missing and what it could do with it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


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


def load(where: Path) -> Tokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    has_config = any((where / name).is_file() for name in ("tokenizer_config.json", "config.json"))
    if not has_config and not (where / "tokenizer.json").is_file():
        raise InputError(
            "no tokenizer in this directory",
            where=str(where),
            why="it holds neither tokenizer.json nor tokenizer_config.json nor tokenizer.model",
            fix="copy the tokenizer's files into it",
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
            "cannot load the tokenizer",
            where=str(where),
            why=f"{type(error).__name__}: {error}"[:500],
            fix="download its files again",
        ) from error
    return _from_hugging_face(tokenizer, end_of_sequence.listed(where, _vocab_size(tokenizer)), str(where))


def _vocab_size(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values()) + 1


def _from_hugging_face(tokenizer: Any, eos_ids: tuple[int, ...], where: str) -> Tokenizer:
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.all_special_tokens}
    special.pop(tokenizer.unk_token, None)
    eos_ids = end_of_sequence.require((tokenizer.eos_token_id, *eos_ids), where)
    # All of them, as an end may be the unknown token, too: that of GPT-2 is.
    control = special | {tokenizer.convert_ids_to_tokens(i): i for i in eos_ids}
    plain = tokenizer.encode("a", add_special_tokens=False)
    wrapped = tokenizer.encode("a", add_special_tokens=True)
    starts = [k for k in range(len(wrapped)) if wrapped[k : k + len(plain)] == plain]
    template = tokenizer.chat_template
    return Tokenizer(
        backend=_HuggingFace(tokenizer),
        eos_ids=eos_ids,
        bos_id=tokenizer.bos_token_id,
        pad_id=eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        vocab_size=_vocab_size(tokenizer),
        prefix_ids=tuple(wrapped[: starts[0]]) if starts else (),
        control=control,
        chat_template=(template.get("default") if isinstance(template, dict) else template) or None,
    )
