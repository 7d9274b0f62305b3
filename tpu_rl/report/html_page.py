"""The frame of report.html, its style sheet and its elements.

The page has one column of figures on a phone and two elsewhere.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import Any

from tpu_rl.report import plots

SHOWN_CHARACTERS = 900
"""Longer prompts and completions are cut."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
<footer>tpu_rl</footer>
</main></body></html>
"""

STYLE = """
:root { --ink: #1f2430; --muted: #6b7280; --line: #e6e8ec; --blue: #2a6496; }
* { box-sizing: border-box; }
body {
  margin: 0; background: #fff; color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1080px; margin: 0 auto; padding: 48px 24px 32px; }
h1 { font-size: 26px; font-weight: 650; letter-spacing: -0.01em; margin: 0 0 20px; }
h2 {
  font-size: 18px; font-weight: 650; margin: 0 0 14px; padding-top: 18px;
  border-top: 1px solid var(--line);
}
section { margin-top: 36px; }
p { margin: 0; }
.lead, .result p, .note { color: var(--muted); }
.note { margin: -12px 0 20px; }
.lead { margin-bottom: 14px; }
.result { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 28px; margin-bottom: 24px; }
.numbers {
  font-size: 52px; font-weight: 650; letter-spacing: -0.03em; line-height: 1.1; white-space: nowrap;
}
.numbers small { font-size: 0.5em; font-weight: 500; margin-left: 0.08em; }
.before { color: #9aa1ab; } .after { color: var(--blue); }
.arrow { color: #c3c7cd; font-weight: 400; margin: 0 14px; }
.facts { display: flex; flex-wrap: wrap; gap: 12px 40px; margin: 0 0 24px; }
dt { color: var(--muted); font-size: 12.5px; }
dd { margin: 0; font-weight: 550; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 28px 36px; }
figure { margin: 0; display: flex; flex-direction: column; justify-content: space-between; }
figcaption { color: var(--muted); font-size: 13px; margin-bottom: 4px; }
figcaption b { color: var(--ink); font-size: 14.5px; font-weight: 600; margin-right: 6px; }
img { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; }
.samples { table-layout: fixed; }
th {
  text-align: left; font-weight: 600; font-size: 13px; color: var(--muted); padding: 0 14px 6px;
}
.samples td {
  vertical-align: top; padding: 12px 14px; border-top: 1px solid var(--line);
  overflow-wrap: anywhere;
}
.samples td + td, .samples th + th { border-left: 1px solid var(--line); }
.prompt, .completion, pre {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px;
  white-space: pre-wrap;
}
.prompt { color: var(--muted); } .completion { margin: 4px 0 8px; }
.reward { font-size: 12.5px; color: var(--muted); } .step { float: right; }
.good, .poor { font-weight: 600; } .good { color: #2c7a6b; } .poor { color: #b5495b; }
.plain td {
  padding: 7px 0; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere;
}
.plain td:first-child { color: var(--muted); width: 46%; padding-right: 20px; }
.plain tr:first-child td { border-top: 0; }
summary { cursor: pointer; color: var(--blue); }
pre { background: #f7f8fa; border-radius: 6px; padding: 16px 18px; overflow-x: auto; }
pre b { color: var(--blue); font-weight: 500; }
footer { margin-top: 48px; color: #9aa1ab; font-size: 12.5px; }
@media (max-width: 720px) {
  .grid { grid-template-columns: minmax(0, 1fr); } .numbers { font-size: 38px; }
  main { padding-top: 28px; } .wide { overflow-x: auto; } .wide img { min-width: 620px; }
}
@media print { section { break-inside: avoid-page; } }
"""


def section(title: str, figures: Sequence[str]) -> str:
    """Return a section with a grid of figures; empty if all of them are."""
    grid = "".join(figures)
    return f"<section><h2>{title}</h2><div class='grid'>{grid}</div></section>" if grid else ""


def result(before: str, after: str, caption: str) -> str:
    """Return a pair of large numbers with a caption. All three are HTML."""
    numbers = (
        f'<span class="before">{before}</span><span class="arrow">→</span>'
        f'<span class="after">{after}</span>'
    )
    return f'<div class="result"><div class="numbers">{numbers}</div><p>{caption}</p></div>'


def figure_html(title: str, note: str, figure: Any, wide: bool = False) -> str:
    """Return a matplotlib figure with its title and note.

    The SVG is inside an image, so that element ids of several figures cannot clash.
    """
    data = base64.b64encode(plots.as_svg(figure).encode()).decode()
    heading = f"<b>{html.escape(title)}</b> " if title else ""
    description = f"{html.escape(title or note)} over the steps"
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{description}">'
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><figcaption>{heading}{html.escape(note)}</figcaption>{image}</figure>"


def duration(seconds: float) -> str:
    """Format a time: 12 s, 3.4 min, 5.6 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 60 else f"{minutes / 60:.1f} h"


def text(value: Any) -> str:
    """Return text escaped for HTML, cut to SHOWN_CHARACTERS."""
    content = str(value)
    if len(content) > SHOWN_CHARACTERS:
        content = f"{content[:SHOWN_CHARACTERS]} … ({len(content)} characters)"
    return html.escape(content)


def number(value: Any) -> str:
    """Format a number with three digits; "none" for None."""
    return "none" if value is None else f"{value:.3g}"
