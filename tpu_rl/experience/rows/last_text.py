"""The text of a prompt, or of its last message, which methods change."""

from __future__ import annotations

from typing import Any

from tpu_rl.errors import InputError


def of(prompt: Any, what: str, where: str) -> str:
    """Return a prompt that is a text, or the text of its last message.

    Raises InputError if that is no text; it begins with `what`.
    """
    text = prompt if isinstance(prompt, str) or not prompt else prompt[-1].get("content")
    if not isinstance(text, str):
        raise InputError(
            what,
            where=f"{where}, the row with the prompt {str(prompt)[:80]!r}",
            why="the last message of the prompt is no text",
            fix="give rows with a `prompt` of text, or whose last message is one",
        )
    return text


def replaced(prompt: Any, text: str) -> Any:
    """Return the prompt with this text, or with it in the last message."""
    if isinstance(prompt, str):
        return text
    return [*prompt[:-1], prompt[-1] | {"content": text}]
