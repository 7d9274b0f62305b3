"""Secrets are kept out of what a run writes: tokens and keys of the environment, and texts of their known shapes."""

from __future__ import annotations

import os
import re
import sys
import traceback
from types import TracebackType

NAMES = re.compile(
    r"(?:^|[_-])(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET|AUTH)[_-]?KEY|KEY)$",
    re.IGNORECASE,
)
"""Of environment variables and flags that hold a secret: HF_TOKEN, WANDB_API_KEY, --hub-token."""

SHORTEST = 8
"""Characters: values such as "false" are no secrets, and to hide them would spoil texts."""

SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"
    r"|\b(?:ghp|gho|ghs|ghu)_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}"
    r"|\bwandb_v1_\w{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bya29\.[\w.-]{20,}|\bxox[abprs]-[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"
)
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI and relatives, Weights & Biases, AWS, Google, Slack; private keys; the
user and password of an address."""

HIDDEN = "<secret>"


def redact(text: str) -> str:
    """The text with <secret>, or <secret: NAME of its environment variable>, in place of every secret."""
    return SHAPES.sub(HIDDEN, hide_environment(text))


def hide_environment(text: str) -> str:
    """The text without the values of the environment's secrets: for what a model wrote, kept as it is otherwise."""
    for name, value in os.environ.items():
        if value in text and _is_secret(name, value):
            text = text.replace(value, f"<secret: {name}>")
    return text


def _is_secret(name: str, value: str) -> bool:
    # A path names the file of a secret and is none.
    return len(value) >= SHORTEST and not value.startswith("/") and NAMES.search(name) is not None


def hide_in_tracebacks() -> None:
    """From now on, what escapes the program is printed without secrets."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print(redact("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)

    sys.excepthook = report
