"""Refuse settings that contain a secret, because settings are kept in files and shown in lists."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_rl import redaction
from tpu_rl.errors import InputError


def refuse_secrets(words: Sequence[str], where: str = "") -> None:
    """Raise InputError if a word is a secret, or a flag that would hold one.

    The error does not repeat the secret.

    Args:
      words: the arguments of a command, or the words of a configuration.
      where: the place to name in the error; the default is the flag or the number of the argument.
    """
    for number, word in enumerate(words):
        is_flag = word.startswith("--")
        flag = word.partition("=")[0] if is_flag else ""
        is_secret_flag = is_flag and redaction.SECRET_NAMES.search(flag)
        previous = words[number - 1] if number else ""
        before = "" if is_flag else f"{previous} "
        # As in "Bearer SECRET", or "password: SECRET" in a line of a file. Words of prompts follow
        # such names, too, and have no digits.
        before *= any(letter.isdigit() for letter in word)
        is_named = redaction.redact(before + word) != redaction.redact(before) + word
        if not is_secret_flag and not is_named:
            continue
        if not flag and previous.startswith("--"):
            flag = previous
        raise InputError(
            "a secret was given as a setting",
            where=where or flag or f"argument {number + 1}",
            why="settings are kept in config.yaml, in the shell's history and in lists of "
            "processes",
            fix="set an environment variable such as HF_TOKEN or WANDB_API_KEY, and revoke this "
            "secret",
        )
