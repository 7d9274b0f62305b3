"""The library behind a tokenizer."""

from __future__ import annotations

import copy
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Backend:
    """The tokenizer of transformers behind a `Tokenizer`."""

    tokenizer: Any
    lock: Any = field(default_factory=threading.Lock, compare=False, repr=False)
    """Held while the library encodes: whether it splits special tokens is a state of its object,
    which threads would change for each other."""

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of ordinary text."""
        with self.lock:
            return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode_control(self, text: str) -> list[int]:
        """Return the ids of text in which control-token literals become control tokens."""
        with self.lock:
            return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, control tokens included."""
        with self.lock:
            return self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )

    def parse_response(self, text: str, prefix: str, tools: list[Any]) -> dict[str, Any] | None:
        """Return the message that the model wrote after a prefix, as the tokenizer's own files
        describe it. Returns None if they do not, or if it cannot be read."""
        if getattr(self.tokenizer, "response_template", None) is None:
            return None
        try:
            message = self.tokenizer.parse_response(text, prefix=prefix, tools=tools)
        except Exception:  # The library raises many types for what a model may write.
            return None
        return message if isinstance(message, dict) else None

    @property
    def special_texts(self) -> dict[str, Any]:
        """Texts of special tokens, by the names that chat templates use."""
        return self.tokenizer.special_tokens_map

    def with_template(self, template: str) -> Backend:
        """Return the backend with another chat template, which `save` writes."""
        tokenizer = copy.copy(self.tokenizer)
        tokenizer.chat_template = template
        return Backend(tokenizer, self.lock)

    def save(self, directory: Path) -> None:
        """Write the library's own files."""
        self.tokenizer.save_pretrained(directory)
        config_file = directory / "tokenizer_config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        if config.get("tokenizer_class") == "TokenizersBackend":
            # A name of transformers 5. All versions know the same class by the other name.
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            config_file.write_text(
                json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
