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
    r"|(?:^|_)(?:PWD|PASS|PAT|DSN|SAS|AUTH|TOKENS)$"
    r"|(?:^|_)(?:TOKEN|SECRET|ACCESS_KEY)\d*(?:_\w+)?$"
    r"|(?:^|_)(?:DATABASE|DB|REDIS|MONGO\w*|POSTGRES\w*|MYSQL|AMQP|BROKER)_UR[IL]$",
    re.IGNORECASE,
)
"""Names of environment variables that hold one too: PGPASSWORD, GH_TOKEN_2, DATABASE_URL."""

MIN_SECRET_LENGTH = 8
"""Shorter values, such as "false", are not secrets; replacing them would spoil texts."""

_WORDS = (
    r"api_org_|gh[oprsu]_|npm_|gsk_|fw_|r8_|rpa_|secret_|ntn_|sbp_|nfp_|jina_|dapi|tgp_v1_"
    r"|do[opr]_v1_|shp(?:at|ca|pa|ss)_|lin_(?:api|oauth)_|[rs]k_(?:live|test)_|whsec_|rubygems_"
    r"|sntry[su]_|AGE-SECRET-KEY-|age-secret-key-|EAAA"
)
_PREFIXES = (
    r"github_pat_|gl(?:pat|dt|rt|ptt|agent|soat)-|sk-|nvapi-|xai-|pplx-|csk-|lsv2_[ps]t_|wandb_v1_"
    r"|hv[bsr]\.|atlasv1\.|dp\.(?:pt|st|ct|sa)\.|dckr_[po]at_|pypi-|pscale_\w{2,5}_|figd_|gls?[ac]_"
    r"|PMAK-|CFPAT-|tskey-(?:auth|api)-|AT[AC]TT3x|sq0(?:atp|csp)-|ops_eyJ|FLWSECK_|xkeysib-|ya29\."
)
"""Beginnings of tokens of services, as in gitleaks' rules (MIT). Only letters and digits follow
those in `_WORDS`. Scanners in Python know few of these, and their import takes longer than
that of the flags."""

SECRET_PATTERNS = re.compile(
    rf"\bhf_[A-Za-z0-9]{{20,}}|\b(?:{_WORDS})(?=[A-Za-z0-9]{{0,99}}[\dA-Z])[A-Za-z0-9]{{20,}}"
    rf"|\b(?:{_PREFIXES})(?=[\w-]{{0,99}}[\dA-Z])[\w-]{{16,}}(?:\.[\w-]+)*"
    r"|\bA(?:KIA|SIA|BIA|CCA)[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bLTAI[A-Za-z0-9]{12,}"
    r"|\bxox[abeoprs]-[\w.-]{10,}|\bxapp-[\w-]{10,}"
    r"|\bSG\.[\w-]{16,}\.[\w-]{16,}|\b\d{8,10}:AA[\w-]{30,}|\b(?:key-|SK|AC)[0-9a-f]{32}\b"
    r"|\b[0-9a-f]{32}-us\d{1,2}\b|\b[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<=//hooks\.slack\.com/)\S+|(?<=/api/webhooks/)\S+|(?<=\.webhook\.office\.com/)\S+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:.|\n)*?"
    r"(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|$)"
    r"|(?<=://)[^\s/:@]*:[^\s/]+(?=@)"
)
"""Tokens and keys by their forms; webhooks; the user and password in a URL."""

_NAMES = (
    r"password|passwd|pwd|passphrase|accountkey|sharedaccesskey(?:name)?|_?auth_?token|_password"
    r"|(?:[a-z]{1,20}[_-]){0,3}(?:api[_-]?key|access[_-]?token|refresh[_-]?token|id[_-]?token"
    r"|security[_-]?token|session[_-]?token|client[_-]?secret|secret[_-]?(?:access[_-]?)?key"
    r"|auth[_-]token|private[_-]token|vault[_-]token)|x-(?:amz|goog|ms)-signature|sig"
)
"""Names behind which a secret stands, in any letters."""
_QUOTE = r"""\\?["']?"""
_DIGIT = r"(?=\S{0,99}\d)"
"""A digit, which the words of "basic arithmetic" lack."""
_VALUE = r"""[^\s;,&'"<>\\]{8,}"""
NAMED_SECRETS = re.compile(
    # Connection strings, queries, JSON, YAML, INI, headers.
    rf"((?i:(?<![a-z0-9])(?:{_NAMES}){_QUOTE}\s*[:=]\s*{_QUOTE}))(?!//){_VALUE}"
    # Lines of .env, and of a shell.
    rf"|(\b[A-Z0-9_]*(?:TOKENS?|SECRET|PASS|PWD|PASSWORD|PASSWD|KEY|CREDENTIALS|PAT|AUTH)\s*=\s*"
    rf"{_QUOTE}){_DIGIT}(?!\d+\b)[^\s;,&'\"<>\\(\[]{{8,}}"
    # Arguments of commands.
    rf"|((?<!\S)--(?:[a-z]+-){{0,3}}(?:password|passwd|passphrase|token|secret|api-?key|access-key)"
    rf"(?:=|\s+){_QUOTE})(?=\S{{0,99}}[\d!#$%^*@+/]){_VALUE}"
    rf"|(\bcurl\b[^\n]{{0,300}}?\s(?:-u|--user|--proxy-user)[\s=]*{_QUOTE}[^\s:'\"]{{1,99}}:)"
    r"""[^\s'"]{4,}"""
    # The schemes of headers, and cookies, which go on to the end of the line.
    rf"|((?i:\b(?:bearer|basic) ){_QUOTE}){_DIGIT}{_VALUE}"
    rf"|((?i:\bauthorization{_QUOTE}\s*[:=]\s*{_QUOTE}"
    rf"(?:(?:bearer|basic|token|digest|apikey) )?)){_VALUE}"
    r"""|((?i:\bcookie["']?: *["']?))[^\r\n"'<>]{8,}"""
    # .netrc; .pgpass; Docker's config.json; kaggle.json.
    rf"|(\blogin\s+\S+\s+password\s+){_VALUE}"
    rf"|(\b[\w.-]{{1,100}}:(?:\d{{2,5}}|\*):[^:\s]+:[^:\s/]+:)(?!//){_VALUE}"
    r"""|("auth"\s*:\s*")[\w+/=]{8,}"""
    r"""|("key"\s*:\s*")[0-9a-f]{32}\b"""
)
"""Secrets behind their names: connection strings, queries, headers, and files of credentials."""

REPLACEMENT = "<secret>"


def redact(text: str) -> str:
    """Return the text with "<secret>" or "<secret: VARIABLE>" in place of every secret."""
    text = SECRET_PATTERNS.sub(REPLACEMENT, redact_environment(text))
    return NAMED_SECRETS.sub(lambda match: f"{match[match.lastindex or 0]}{REPLACEMENT}", text)


def redact_environment(text: str) -> str:
    """Return the text without the values of secret environment variables.

    Use this for texts that a model wrote: apart from real secrets, they stay as they are. Do it
    before a text is encoded: JSON writes a quote or a letter with an accent in another way.
    """
    if len(text) < MIN_SECRET_LENGTH:  # As the text of a token: no form of a secret is as short.
        return text
    for form, replacement in _replacements(tuple(os.environ.items())):
        text = text.replace(form, replacement)
    return text


@functools.lru_cache(maxsize=1)
def _replacements(variables: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Return (form of a secret, what stands in its place) for all secrets of an environment."""
    forms = [
        (form, f"<secret: {name}>")
        for name, value in variables
        if _is_secret(name, value)
        for form in _forms(value)
    ]
    # Of two forms, one of which contains the other, the longer comes first.
    return sorted(forms, key=lambda form: -len(form[0]))


def _forms(value: str) -> tuple[str, ...]:
    """Return a value as texts may have it: as it is, quoted, and in base64 at any position.

    A value that was read from a file often ends with a line end, which those who use it strip.
    """
    forms: list[str] = []
    # Exceptions print texts of several lines with something before each.
    lines = [line.strip() for line in value.splitlines() if len(line) >= 20 and " " not in line]
    for text in dict.fromkeys((value, value.rstrip("\r\n"), value.strip(), *lines)):
        forms += [text, repr(text)[1:-1], json.dumps(text)[1:-1]]
        forms.append(urllib.parse.quote(text.encode(errors="surrogateescape"), safe=""))
        data = text.encode(errors="surrogateescape")
        for shift in range(3):
            # Characters that also depend on the bytes before or after are left out.
            first = (8 * shift + 5) // 6
            last = 8 * (shift + len(data)) // 6
            encoded = base64.b64encode(bytes(shift) + data).decode()[first:last]
            forms += [encoded, encoded.replace("+", "-").replace("/", "_")]
    return tuple(dict.fromkeys(forms))


@functools.lru_cache
def _is_secret(name: str, value: str) -> bool:
    if len(value.strip()) < MIN_SECRET_LENGTH:
        return False
    if not SECRET_NAMES.search(name) and not MORE_NAMES.search(name):
        return False
    # USE_AUTH=required and MAX_TOKENS=32768000 are settings.
    if name.upper().endswith(("AUTH", "TOKENS")) and (value.isalpha() or value.isdigit()):
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
