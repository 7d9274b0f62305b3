"""Remove secrets from what a run writes and prints.

Secrets are the values of environment variables whose names say so (HF_TOKEN, WANDB_API_KEY), and
texts that have the known form of a token or key.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from types import TracebackType

SECRET_NAMES = re.compile(
    r"(?:^|[_-])(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?"
    r"|(?:API|ACCESS|PRIVATE|SECRET|AUTH)[_-]?KEY|KEY)$",
    re.IGNORECASE,
)
"""Names of environment variables and flags that hold a secret: HF_TOKEN, --hub-token."""

MIN_SECRET_LENGTH = 8
"""Shorter values, such as "false", are not secrets; replacing them would spoil texts."""

SECRET_PATTERNS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"
    r"|\b(?:ghp|gho|ghs|ghu)_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}"
    r"|\bwandb_v1_\w{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bya29\.[\w.-]{20,}|\bxox[abprs]-[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"
)
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI and similar services, Weights & Biases, AWS,
Google and Slack; private keys; the user and password in a URL."""

REPLACEMENT = "<secret>"


def redact(text: str) -> str:
    """Return the text with "<secret>" or "<secret: VARIABLE>" in place of every secret."""
    return SECRET_PATTERNS.sub(REPLACEMENT, redact_environment(text))


def redact_environment(text: str) -> str:
    """Return the text without the values of secret environment variables.

    Use this for texts that a model wrote: apart from real secrets, they stay as they are.
    """
    for name, value in os.environ.items():
        if value in text and _is_secret(name, value):
            text = text.replace(value, f"<secret: {name}>")
    return text


def _is_secret(name: str, value: str) -> bool:
    # A path names the file of a secret and is no secret itself.
    is_path = value.startswith("/")
    return len(value) >= MIN_SECRET_LENGTH and not is_path and bool(SECRET_NAMES.search(name))


def redact_tracebacks() -> None:
    """Print uncaught exceptions without secrets from now on."""

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        print(redact(text), end="", file=sys.stderr)

    sys.excepthook = report
