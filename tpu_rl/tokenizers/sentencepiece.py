"""Tokenizers of sentencepiece's .model files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpu_rl.errors import refused
from tpu_rl.tokenizers import end_of_sequence, probe
from tpu_rl.tokenizers.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
"""The file of the chat template beside the .model file, as transformers names it."""


@dataclass(frozen=True)
class _SentencePiece:
    """Backend of `Tokenizer`."""

    processor: Any
    file: Path
    chat_template: str | None = None

    def encode_text(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def encode_control(self, text: str) -> list[int] | None:
        return None

    def decode(self, ids: list[int]) -> str:
        text = ""
        ordinary: list[int] = []
        for i in ids:
            if self.processor.is_control(i):
                text += self.processor.decode(ordinary) + self.processor.id_to_piece(i)
                ordinary = []
            else:
                ordinary.append(i)
        return text + self.processor.decode(ordinary)

    def parse_response(self, text: str, prefix: str, tools: list[Any]) -> dict[str, Any] | None:
        return None

    @property
    def special_texts(self) -> dict[str, Any]:
        ids = {"bos_token": self.processor.bos_id(), "eos_token": self.processor.eos_id()}
        return {name: self.processor.id_to_piece(i) for name, i in ids.items() if i >= 0}

    def with_template(self, template: str) -> _SentencePiece:
        return replace(self, chat_template=template)

    def save(self, directory: Path) -> None:
        target = directory / "tokenizer.model"
        if target.resolve() != self.file.resolve():
            shutil.copyfile(self.file, target)
        if self.chat_template is not None:
            (directory / TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")


def load(file: Path, chat_template: str | None = None) -> Tokenizer:
    """Return the tokenizer of a .model file. Raises InputError if it is not one."""
    import sentencepiece

    probe.require_harmless(file, "not a sentencepiece model")
    processor = sentencepiece.SentencePieceProcessor()
    with refused(
        (OSError, RuntimeError),
        "not a sentencepiece model",
        where=str(file),
        fix="give a model's directory, or a sentencepiece .model file",
    ):
        processor.Load(str(file))
    size = processor.get_piece_size()
    bos = processor.bos_id() if processor.bos_id() >= 0 else None
    eos = processor.eos_id() if processor.eos_id() >= 0 else None
    eos_ids = end_of_sequence.require((eos, *end_of_sequence.listed(file.parent, size)), str(file))
    return Tokenizer(
        backend=_SentencePiece(processor, file, chat_template),
        eos_ids=eos_ids,
        bos_id=bos,
        pad_id=processor.pad_id() if processor.pad_id() >= 0 else eos_ids[0],
        vocab_size=size,
        prefix_ids=() if bos is None else (bos,),
        control={processor.id_to_piece(i): i for i in range(size) if processor.is_control(i)},
        unknown_id=processor.unk_id(),
        chat_template=chat_template,
    )
