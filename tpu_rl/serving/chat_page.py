"""A page to talk to one server, or to two side by side, with the log-prob of each token.

It is one file without outside parts. What a model writes becomes text, never markup. The second
server may be another one of this machine: pages of loopback addresses may read its answers
(`LOOPBACK_ORIGIN`).
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

LOOPBACK_ORIGIN = r"http://(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?"
"""The origins whose pages may read answers."""

PAGE = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
_SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; "
    f"connect-src 'self' http://127.0.0.1:* http://localhost:*; script-src 'sha256-{_HASH}'"
)
"""The page's policy: it runs this script alone, which may ask servers of this machine."""
