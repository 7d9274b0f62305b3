"""Remove secrets from what a run writes and prints.

Secrets are the values of environment variables whose names say so (HF_TOKEN, WANDB_API_KEY), and
texts that have the known form of a token or key.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import sys
import traceback
import urllib.parse
from types import TracebackType

SECRET_NAMES = re.compile(
    r"(?:^|[_-])(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?"
    r"|(?:API|ACCESS|PRIVATE|SECRET|AUTH)[_-]?KEY|KEY)$",
    re.IGNORECASE,
)
"""Names of environment variables and flags that hold a secret: HF_TOKEN, --hub-token."""

MORE_NAMES = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|WEBHOOK|CONN(?:ECTION)?_?STR|COOKIE|BEARER|JWT"
    r"|_(?:PWD|PASS|PAT|DSN|SAS)$"
    r"|(?:^|_)(?:TOKEN|SECRET|ACCESS_KEY)\d*(?:_\w+)?$"
    r"|(?:^|_)(?:DATABASE|DB|REDIS|MONGO\w*|POSTGRES\w*|MYSQL|AMQP|BROKER)_UR[IL]$",
    re.IGNORECASE,
)
"""Names of environment variables that hold one too: PGPASSWORD, GH_TOKEN_2, DATABASE_URL."""

MIN_SECRET_LENGTH = 8
"""Shorter values, such as "false", are not secrets; replacing them would spoil texts."""

SECRET_PATTERNS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"
    r"|\bgh[oprsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\b[rs]k_(?:live|test)_\w{16,}|\bnvapi-[\w-]{20,}"
    r"|\bgsk_\w{20,}|\bwandb_v1_\w{20,}"
    r"|\bA(?:KIA|SIA)[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bya29\.[\w.-]{20,}"
    r"|\bxox[abprs]-[\w-]{10,}|\bxapp-[\w-]{10,}"
    r"|\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w-]{40,}|\bdckr_pat_[\w-]{20,}"
    r"|\bSG\.[\w-]{16,}\.[\w-]{16,}|\b\d{8,10}:AA[\w-]{30,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<=//hooks\.slack\.com/)\S+|(?<=/api/webhooks/)\S+|(?<=\.webhook\.office\.com/)\S+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|(?<=://)[^\s/:@]*:[^\s/]+(?=@)"
)
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI and similar services, Weights & Biases, AWS,
Google, Slack, npm, PyPI, Docker and Telegram; JSON web tokens; webhooks; private keys; the user and
password in a URL."""

NAMED_SECRETS = re.compile(
    r"(\b(?:password|passwd|pwd|accountkey|sharedaccesskey|api_?key|access_?token|client_?secret"
    r"|secret_?access_?key|sig)=|\b(?:bearer|basic) )[^\s;,&'\"<>]{8,}",
    re.IGNORECASE,
)
"""Secrets behind their names, as in connection strings, queries and headers."""

REPLACEMENT = "<secret>"


def redact(text: str) -> str:
    """Return the text with "<secret>" or "<secret: VARIABLE>" in place of every secret."""
    text = SECRET_PATTERNS.sub(REPLACEMENT, redact_environment(text))
    return NAMED_SECRETS.sub(rf"\1{REPLACEMENT}", text)


def redact_environment(text: str) -> str:
    """Return the text without the values of secret environment variables.

    Use this for texts that a model wrote: apart from real secrets, they stay as they are. Do it
    before a text is encoded: JSON writes a quote or a letter with an accent in another way.
    """
    # Of two values, one of which contains the other, the longer comes first.
    for name, value in sorted(os.environ.items(), key=lambda item: -len(item[1])):
        if _is_secret(name, value):
            for form in _forms(value):
                text = text.replace(form, f"<secret: {name}>")
    return text


@functools.lru_cache
def _forms(value: str) -> tuple[str, ...]:
    """Return a value as texts may have it: as it is, quoted, and in base64 at any position."""
    forms = [value, repr(value)[1:-1], json.dumps(value)[1:-1], urllib.parse.quote(value, safe="")]
    data = value.encode(errors="surrogateescape")
    for shift in range(3):
        # Characters that also depend on the bytes before or after are left out.
        first = (8 * shift + 5) // 6
        last = 8 * (shift + len(data)) // 6
        encoded = base64.b64encode(bytes(shift) + data).decode()[first:last]
        forms += [encoded, encoded.replace("+", "-").replace("/", "_")]
    return tuple(dict.fromkeys(forms))


@functools.lru_cache
def _is_secret(name: str, value: str) -> bool:
    if len(value) < MIN_SECRET_LENGTH:
        return False
    if not SECRET_NAMES.search(name) and not MORE_NAMES.search(name):
        return False
    # A path names the file of a secret and is no secret itself. A key may begin with a slash too.
    is_path = re.fullmatch(r"(?:/[\w.@~-]{1,20})+/?", value) or (
        value.startswith("/") and os.path.exists(value)
    )
    return not is_path


def redact_tracebacks() -> None:
    """Print uncaught exceptions without secrets from now on."""

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        print(redact(text), end="", file=sys.stderr)

    sys.excepthook = report
