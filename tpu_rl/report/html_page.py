"""Pages of HTML from the templates of this folder, in which every text is escaped.

The page has one column of figures on a phone and two elsewhere, and is dark where the reader's
system is. Models and users wrote the texts on it, so its content-security policy allows two inline
scripts only, by their digests: page.js, and while the run is active, the one that reloads the page.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

SHOWN_CHARACTERS = 900
"""Longer prompts and completions are cut."""
FOLDER = Path(__file__).parent / "templates"
SCRIPT = Markup((FOLDER / "page.js").read_text(encoding="utf-8"))
STYLE = Markup((FOLDER / "page.css").read_text(encoding="utf-8"))
RELOAD = "setInterval(() => document.querySelector('.page:target') || location.reload(), {})"
"""The script of the page of a run that is on. Without it, a reload would end the reading of a
completion."""


class Figure(NamedTuple):
    """A chart with its title and note."""

    title: str
    note: str
    chart: Any
    """A `charts.Drawing`."""
    wide: bool = False


def render(template: str, title: str, refresh_seconds: int | None = None, **values: Any) -> str:
    """Return a whole page.

    Args:
        template: a file of templates/ that extends frame.html.
        refresh_seconds: after how long the page reloads itself, except while it shows a step or a
            completion; None for never.
        values: what the template shows.
    """
    reload = Markup(RELOAD.format(1000 * refresh_seconds)) if refresh_seconds else ""
    scripts = filter(None, (SCRIPT, reload))
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts)
    page = (
        _templates()
        .get_template(template)
        .render(
            title=title,
            refresh_seconds=refresh_seconds,
            script_digests=list(digests),
            script=SCRIPT,
            reload=reload,
            style=STYLE,
            **values,
        )
    )
    # Half a surrogate pair, which rows and settings may have, is shown as its escape.
    return page.encode(errors="backslashreplace").decode()


@functools.cache
def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    templates.filters |= {"cut": cut, "line": line, "number": number, "place": place}
    return templates


# --- filters of the templates ---


def cut(value: Any) -> str:
    """Return a text of at most SHOWN_CHARACTERS, and how long it was."""
    text = str(value)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]} … ({len(text)} characters)"


def line(value: Any, most: int) -> str:
    """Return a text on one line, cut to `most` characters."""
    words = " ".join(str(value).split())
    return words[:most] + "…" * (len(words) > most)


def number(value: Any) -> str:
    """Format a number with three digits; "none" for None."""
    return "none" if value is None else f"{value:.3g}"


def place(share: float) -> str:
    """Format a place between 0 and 1 in percent."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".")


def duration(seconds: float) -> str:
    """Format a time: 12 s, 3.4 min, 5.6 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 60 else f"{minutes / 60:.1f} h"
