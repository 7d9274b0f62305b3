"""The frame of report.html, its style sheet and its elements.

The page has one column of figures on a phone and two elsewhere, and is dark where the reader's
system is. Models and users wrote the texts on it, so its content-security policy allows two inline
scripts only, by their digests: `explorer.SCRIPT`, and while the run is active, the one that reloads
the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from typing import Any

SHOWN_CHARACTERS = 900
"""Longer prompts and completions are cut."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
{refresh}<title>{title}</title><style>{style}</style></head>
<body><main>
{body}
<footer>tpu_rl</footer>
</main>{script}</body></html>
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
RELOAD = "setInterval(() => document.querySelector('.page:target') || location.reload(), {})"
"""The script of the page of a run that is on. Without it, a reload would end the reading of a
completion."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --code: #f7f8fa; --ink: #1f2430; --muted: #6b7280; --pale: #9aa1ab;
  --line: #e6e8ec; --rest: #c3c7cd; --blue: #2a6496; --good: #2c7a6b; --poor: #b5495b;
  --c0: #2a6496; --c1: #d4762c; --c2: #3a9188; --c3: #b5495b; --c4: #7a6aa8; --c5: #8a8f98;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15181e; --code: #1d2129; --ink: #e4e7ec; --muted: #9aa3b0; --pale: #717985;
    --line: #2b3039; --rest: #4d5561; --blue: #74b0e2; --good: #5fc0ab; --poor: #e58a99;
    --c0: #74b0e2; --c1: #f0a262; --c2: #5fc0ab; --c3: #e58a99; --c4: #b1a2df; --c5: #a6acb6;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1080px; margin: 0 auto; padding: 48px 24px 32px; }
h1 {
  font-size: 26px; font-weight: 650; letter-spacing: -0.01em; margin: 0 0 20px;
  overflow-wrap: anywhere;
}
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
.before { color: var(--pale); } .after { color: var(--blue); }
.arrow { color: var(--rest); font-weight: 400; margin: 0 14px; }
.facts { display: flex; flex-wrap: wrap; gap: 12px 40px; margin: 0 0 24px; }
dt { color: var(--muted); font-size: 12.5px; }
dd { margin: 0; font-weight: 550; overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 28px 36px; }
figure { margin: 0; display: flex; flex-direction: column; justify-content: space-between; }
figcaption { color: var(--muted); font-size: 13px; margin-bottom: 4px; }
figcaption b { color: var(--ink); font-size: 14.5px; font-weight: 600; margin-right: 6px; }
.chart {
  position: relative; height: 170px; margin: 22px 10px 26px 48px;
  color: var(--muted); font-size: 11.5px; line-height: 15px;
}
.chart.tall { height: 250px; } .chart.ends { margin-right: 102px; }
.chart svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.chart path { fill: none; vector-effect: non-scaling-stroke; }
.chart span { position: absolute; white-space: nowrap; }
.chart .y { right: calc(100% + 8px); transform: translateY(-50%); }
.chart .x { top: calc(100% + 5px); transform: translateX(-50%); }
.chart .name { top: calc(100% + 5px); right: calc(100% + 8px); }
.chart .end {
  left: calc(100% + 8px); transform: translateY(-50%); max-width: 94px; overflow: hidden;
  text-overflow: ellipsis; font-weight: 550;
}
.tall .end { font-size: 13px; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .rest { --c: var(--rest); }
.end, .key { color: var(--c, var(--muted)); }
.end.rest, .key.rest { color: var(--muted); }
.chart .grid { stroke: var(--line); stroke-width: 1px; }
.chart .line { stroke: var(--c); stroke-width: 2px; stroke-linejoin: round; }
.chart .main { stroke-width: 2.5px; } .chart .raw { stroke-width: 1px; opacity: 0.4; }
.chart .first { stroke: var(--pale); stroke-width: 1px; stroke-dasharray: 4 4; }
.chart .dots { stroke: var(--c); stroke-width: 7px; stroke-linecap: round; }
.chart .area { fill: var(--c); } .chart .band { opacity: 0.16; } .chart .stack { opacity: 0.85; }
.chart i { position: absolute; top: 0; bottom: 0; cursor: crosshair; }
.chart i u { position: absolute; top: 0; bottom: 0; border-left: 1px solid var(--pale); }
.chart i b {
  position: absolute; bottom: calc(100% + 4px); left: 0; z-index: 2; width: max-content;
  max-width: 260px; padding: 2px 7px; border: 1px solid var(--line); border-radius: 4px;
  background: var(--paper); color: var(--ink); font-weight: 400; font-style: normal;
  overflow-wrap: anywhere; pointer-events: none;
}
.chart i.r b { left: auto; right: 0; }
.chart i u, .chart i b { display: none; }
.chart i:hover u, .chart i:hover b { display: block; }
.keys { font-size: 12.5px; } .key { margin-right: 16px; font-weight: 550; }
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
.good, .poor { font-weight: 600; } .good { color: var(--good); } .poor { color: var(--poor); }
.overview { overflow-x: auto; }
.overview td { padding: 4px 14px; } .overview td:first-child { overflow-wrap: anywhere; }
.plain td {
  padding: 7px 0; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere;
}
.plain td:first-child { color: var(--muted); width: 46%; padding-right: 20px; }
.plain tr:first-child td { border-top: 0; }
summary { cursor: pointer; color: var(--blue); }
pre { background: var(--code); border-radius: 6px; padding: 16px 18px; overflow-x: auto; }
pre b { color: var(--blue); font-weight: 500; }
footer { margin-top: 48px; color: var(--pale); font-size: 12.5px; }
@media (max-width: 720px) {
  .grid { grid-template-columns: minmax(0, 1fr); } .numbers { font-size: 38px; }
  main { padding: 28px 16px; } .chart.ends { margin-right: 78px; } .chart .end { max-width: 70px; }
  .samples, .samples tbody, .samples tr, .samples td { display: block; }
  .samples tr:first-child { display: none; } .samples td + td { border: 0; padding-top: 0; }
}
@media print { section { break-inside: avoid-page; } }
"""


def refresh(seconds: int) -> str:
    """Return the HTML that reloads the page, except while it shows a step or a completion."""
    return (
        f"<script>{RELOAD.format(1000 * seconds)}</script>"
        f'<noscript><meta http-equiv="refresh" content="{seconds}"></noscript>\n'
    )


def policy(refresh_seconds: int | None, *scripts: str) -> str:
    """Return the security policy of a page: no scripts but these and the one that reloads it."""
    if refresh_seconds:
        scripts = (*scripts, RELOAD.format(1000 * refresh_seconds))
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    names = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return f"{POLICY}; script-src {names}" if names else POLICY


def section(title: str, figures: Sequence[str], folded: Sequence[str] = ()) -> str:
    """Return a section with a grid of figures, and with others folded; empty if all of them are."""
    grid = "".join(figures)
    rest = "".join(folded)
    if not grid + rest:
        return ""
    if rest:
        count = len(list(filter(None, folded)))
        summary = f"<summary>{count} charts on which nothing moves</summary>"
        rest = f"<details>{summary}<div class='grid'>{rest}</div></details>"
    return f"<section><h2>{title}</h2><div class='grid'>{grid}</div>{rest}</section>"


def result(before: str, after: str, caption: str) -> str:
    """Return a pair of large numbers with a caption. All three are HTML."""
    numbers = (
        f'<span class="before">{before}</span><span class="arrow">→</span>'
        f'<span class="after">{after}</span>'
    )
    return f'<div class="result"><div class="numbers">{numbers}</div><p>{caption}</p></div>'


def figure_html(title: str, note: str, chart: str, wide: bool = False) -> str:
    """Return a chart, which is HTML, with its title and note."""
    heading = f"<b>{html.escape(title)}</b> " if title else ""
    description = html.escape(f"{title or note} over the steps")
    kind = ' class="wide"' if wide else ""
    return (
        f"<figure{kind}><figcaption>{heading}{html.escape(note)}</figcaption>"
        f'<div role="img" aria-label="{description}">{chart}</div></figure>'
    )


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
