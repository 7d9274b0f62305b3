"""Pages of single completions inside report.html: a step's completions, and the tokens of one.

A page is a part of the document that the style sheet shows while the address names it
("#step-40", "#step-40-3"). So links and the browser's history work without a script. Only some
steps and completions have a page, so that the file stays small: those at the end of the run, and
others spread over it.
"""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from tpu_rl.report import html_page
from tpu_rl.report.pictures import STYLE as PICTURE_STYLE
from tpu_rl.report.pictures import Pictures

MAX_STEPS = 100
"""Steps with a page, at most."""
PAGE_BYTES = 3 << 20
"""All pages together take about so much, at most: longer completions mean fewer steps."""
READ_BYTES = 24 << 20
"""Of a larger file of samples the steps of about so much are read."""
BYTES_OF_TOKEN = 95
"""Bytes of a page that a token with numbers takes."""
BYTES_OF_COMPLETION = 1500
"""Bytes of a page that a completion takes, apart from its tokens with numbers."""
MIN_STEPS = 6
"""Steps with a page however long completions are, at least."""
LATEST_STEPS = 4
"""So many of them are the latest ones of the run."""
COMPLETIONS = 256
"""Completions of a step with a page, at most."""
MOST_EXTREMES = 5
"""Completions that the report lists at each end of an order, such as the longest."""
MAX_TOKENS = 40_000
"""Tokens with numbers on all pages together, at most."""
TOKENS_OF_COMPLETION = 500
"""Tokens with numbers of a completion, at most."""
MAX_STEP_BYTES = 1 << 22
"""A step whose rows take more is read up to here."""
MAX_TURNS = 64
"""Lines of the time of an episode; the last one has the further turns."""
CHARACTERS_IN_LIST = 160
CHARACTERS_FOUND = 80
TAGS = ("by", "source", "label", "error")
"""Entries of a sample that its line shows."""


class Measure(NamedTuple):
    """A number of tokens that their color shows."""

    name: str
    """As in samples.jsonl."""
    label: str
    letter: str
    """Classes of tokens are this letter and a level."""
    color: str
    """Red, green and blue."""
    thresholds: tuple[float, ...]
    """A token's level is the number of these that its magnitude reaches."""
    legend: str
    negative_color: str = ""
    """If negative numbers have a color of their own: their letter is a capital."""


MEASURES = (
    Measure(
        "log_prob",
        "log-prob",
        "l",
        "212 118 44",
        (0.05, 0.2, 0.7, 1.5, 3.0, 5.0),
        "Stronger: less likely. Log-prob from -0.05 to -5 nats.",
    ),
    Measure(
        "advantage",
        "advantage",
        "a",
        "44 150 110",
        (0.01, 0.3, 0.7, 1.2, 1.8, 2.5),
        "Green: reinforced. Red: discouraged. Advantage from 0.01 to 2.5.",
        "200 60 80",
    ),
    Measure(
        "entropy",
        "entropy",
        "e",
        "122 106 190",
        (0.05, 0.2, 0.5, 1.0, 1.7, 2.5),
        "Stronger: less certain. Entropy from 0.05 to 2.5 nats.",
    ),
    Measure(
        "gap",
        "sampler-trainer gap",
        "g",
        "40 130 200",
        (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0),
        "Stronger: trainer and sampler differ more. Log-probs differ by 1e-5 to 1 nats.",
    ),
)
Samples = list[dict[str, Any]]


# --- reading ---


def read_steps(path: Path) -> list[Samples]:
    """Return the samples of the latest steps of samples.jsonl and of some others, in order.

    Only parts of the file are read, because it may be larger than memory. Lines that are no rows
    are passed over: `launch/verify.py` names them.
    """
    if not path.exists():
        return []
    size = path.stat().st_size
    steps: dict[int, Samples] = {}
    with path.open("rb") as file:
        first = next(_whole_steps(file, skip=False, most=MAX_STEP_BYTES), [])
        length = sum(len(json.dumps(row)) for row in first) or 1
        probes = 2 * max(MIN_STEPS, min(MAX_STEPS, READ_BYTES // (2 * length)))
        for number in range(probes):
            file.seek(number * size // probes)
            if number:
                file.readline()  # The rest of a line.
            whole = _whole_steps(file, skip=bool(number), most=MAX_STEP_BYTES)
            for samples in itertools.islice(whole, 1):
                steps[samples[0]["step"]] = samples
        # The latest steps: from so far before the end that they are all behind it.
        lengths = [sum(len(json.dumps(row)) for row in samples) for samples in steps.values()]
        longest = max(lengths, default=0)
        file.seek(max(0, size - 2 * (LATEST_STEPS + 1) * longest))
        is_inside = file.tell() > 0
        if is_inside:
            file.readline()
        latest = list(_whole_steps(file, skip=is_inside, most=size))[-LATEST_STEPS:]
    steps |= {samples[0]["step"]: samples for samples in latest}
    return choose([steps[step] for step in sorted(steps)])


def _whole_steps(lines: Iterable[bytes], skip: bool, most: int) -> Iterator[Samples]:
    """Yield the rows of one step after another, of at most so many bytes of lines.

    The first step is left out if `skip`.
    """
    for _, group in itertools.groupby(_rows(lines, most), key=lambda row: row["step"]):
        samples = list(group)
        if not skip:
            yield samples
        skip = False


def _rows(lines: Iterable[bytes], most: int) -> Iterator[dict[str, Any]]:
    num_bytes = 0
    for line in lines:
        try:
            row = json.loads(line)
            usable = isinstance(row["step"], int) and isinstance(row["completion"], str)
        except (ValueError, KeyError, TypeError):
            continue
        num_bytes += len(line)
        if usable:
            yield row
        if num_bytes > most:
            return


def choose(steps: Sequence[Samples]) -> list[Samples]:
    """Return the steps and completions that get a page: fewer of them if they are long."""
    chosen = [_completions(samples) for samples in steps]
    size = sum(
        BYTES_OF_COMPLETION + BYTES_OF_TOKEN * _num_tokens(sample)
        for samples in chosen
        for sample in samples
    )
    fitting = PAGE_BYTES * len(chosen) // max(size, 1)
    count = max(MIN_STEPS, min(MAX_STEPS, fitting))
    latest = chosen[-LATEST_STEPS:]
    earlier = chosen[: -len(latest)] if latest else []
    num_earlier = min(count - len(latest), len(earlier))
    return [earlier[i * len(earlier) // num_earlier] for i in range(num_earlier)] + latest


def _completions(samples: Samples) -> Samples:
    """Return the completions of a step, at most COMPLETIONS of them.

    They are whole groups. Of a larger group they are its first completions, and without groups some
    at equal distances.
    """
    count = min(COMPLETIONS, len(samples))
    groups = _groups(samples)
    if len(groups) == len(samples):
        return [samples[i * len(samples) // count] for i in range(count)]
    chosen: Samples = []
    for group in groups:
        if not chosen or len(chosen) + len(group) <= COMPLETIONS:
            chosen += group[:COMPLETIONS]
    return chosen


def _groups(samples: Samples) -> list[Samples]:
    """Return the completions of a step by group; one without a group is its own."""

    def key(pair: tuple[int, dict[str, Any]]) -> tuple[str, Any]:
        index, sample = pair
        return ("group", sample["group"]) if "group" in sample else ("alone", index)

    grouped = itertools.groupby(enumerate(samples), key)
    return [[sample for _, sample in members] for _, members in grouped]


def _num_tokens(sample: dict[str, Any]) -> int:
    texts = _texts(sample)
    return min(len(texts), TOKENS_OF_COMPLETION)


def _texts(sample: dict[str, Any]) -> list[str]:
    tokens = sample.get("tokens")
    texts = tokens.get("text") if isinstance(tokens, dict) else None
    return [str(text) for text in texts] if isinstance(texts, list) else []


# --- HTML ---


def section(steps: Sequence[Samples], pictures: Pictures) -> str:
    """Return all pages, with the bar that chooses what colors show; empty without steps."""
    if not steps:
        return ""
    inputs = "".join(
        f'<input type="radio" name="by" id="by-{measure.letter}"{" checked" * (index == 0)}'
        f' aria-label="{measure.label}">'
        for index, measure in enumerate(MEASURES)
    )
    labels = "".join(f'<label for="by-{m.letter}">{m.label}</label>' for m in MEASURES)
    legends = "".join(f'<span class="legend-{m.letter}">{m.legend}</span>' for m in MEASURES)
    bar = f'<div class="colors"><b>Color</b> {labels}<div class="lead">{legends}</div></div>'
    tokens_left = MAX_TOKENS
    pages = []
    numbers = [samples[0]["step"] for samples in steps]
    for index, samples in enumerate(steps):
        neighbors = (numbers[index - 1] if index else None, *numbers[index + 1 : index + 2])
        pages.append(_step_page(samples, neighbors))
        share = tokens_left // (len(steps) - index)
        for place, sample in enumerate(samples):
            count = min(_num_tokens(sample), share)
            share -= count
            tokens_left -= count
            shown = pictures.of_sample(sample)
            group = next(of for of in _groups(samples) if any(one is sample for one in of))
            pages.append(_completion_page(sample, place, len(samples), count, shown, group))
    pages.append(pictures.definitions())
    return f'<section class="pages">{inputs}{bar}{"".join(pages)}</section>'


def step_links(steps: Sequence[int]) -> str:
    """Return links to the pages of steps."""
    links = " ".join(f'<a href="#step-{step}">{step}</a>' for step in steps)
    return f"<p class='lead links'>Steps with completions to look at: {links}</p>" if links else ""


def search(steps: Sequence[Samples]) -> str:
    """Return the list of all completions with a page, and the form that filters it."""
    items = []
    for samples in steps:
        for place, sample in enumerate(samples):
            step = sample["step"]
            reward = sample.get("reward")
            attribute = f' data-reward="{reward:.6g}"' if _is_number(reward) else ""
            tags = " ".join(
                f"{name} {_line(str(sample[name]), CHARACTERS_FOUND)}"
                for name in TAGS
                if sample.get(name) not in (None, "")
            )
            prompt = _line(str(sample.get("prompt", "")), CHARACTERS_FOUND)
            completion = _line(sample["completion"], CHARACTERS_FOUND)
            items.append(
                f'<li{attribute}><a href="#step-{step}-{place}"><b>{html_page.number(reward)}</b>'
                f"<small>step {step} {tags}</small> {prompt} → <span>{completion}</span></a></li>"
            )
    return (
        '<details><summary>Search completions</summary><form id="search" class="lead">'
        '<input name="text" placeholder="words of text, prompt or tag" aria-label="words"> reward '
        'from <input name="low" type="number" step="any" aria-label="least reward"> to '
        '<input name="high" type="number" step="any" aria-label="highest reward"> '
        f'<span id="count">{len(items)} completions</span></form>'
        f'<ul id="found" class="list">{"".join(items)}</ul></details>'
    )


def extremes(steps: Sequence[Samples]) -> str:
    """Return links to the completions at both ends of an order by reward and by length."""
    pages = [
        (samples[0]["step"], place, sample)
        for samples in steps
        for place, sample in enumerate(samples)
    ]
    rewarded = [page for page in pages if _is_number(page[2].get("reward"))]
    by_reward = sorted(rewarded, key=lambda page: page[2]["reward"])
    by_length = sorted(pages, key=lambda page: _num_tokens_or_characters(page[2]))
    lines = []
    for name, order in (
        ("highest reward", by_reward[::-1]),
        ("lowest reward", by_reward),
        ("longest", by_length[::-1]),
        ("shortest", by_length),
    ):
        links = " ".join(
            f'<a href="#step-{step}-{place}">step {step}: '
            f"{html_page.number(sample.get('reward'))}, {_length(sample)}</a>"
            for step, place, sample in order[:MOST_EXTREMES]
        )
        if links:
            lines.append(f"<tr><td>{name}</td><td class='links'>{links}</td></tr>")
    return f"<table class='plain found'>{''.join(lines)}</table>" if lines else ""


def _num_tokens_or_characters(sample: dict[str, Any]) -> int:
    return len(_texts(sample)) or len(sample["completion"])


def _length(sample: dict[str, Any]) -> str:
    unit = "tokens" if _texts(sample) else "characters"
    return f"{_num_tokens_or_characters(sample)} {unit}"


def _advantage(sample: dict[str, Any]) -> str:
    tokens = sample.get("tokens")
    advantage = tokens.get("advantage") if isinstance(tokens, dict) else None
    return f"advantage {html_page.number(advantage)}, " if _is_number(advantage) else ""


def nearest(steps: Sequence[int], step: float) -> int:
    """Return the step with a page that is nearest to a step."""
    return min(steps, key=lambda other: abs(other - step))


def _step_page(samples: Samples, neighbors: Sequence[int | None]) -> str:
    step = samples[0]["step"]
    middle = _middle(samples)
    lists = []
    place = 0
    for group in _groups(samples):
        items = []
        for sample in group:
            completion = _line(sample["completion"], CHARACTERS_IN_LIST) or "(empty)"
            items.append(
                f'<li><a href="#step-{step}-{place}">{_reward(sample, middle)} '
                f"<small>{_advantage(sample)}{_length(sample)}</small> "
                f"<span>{completion}</span></a></li>"
            )
            place += 1
        prompt = _line(str(group[0].get("prompt", "")), CHARACTERS_IN_LIST)
        lists.append(f'<h3 class="group">{prompt}</h3><ul class="list">{"".join(items)}</ul>')
    links = [
        f'<a href="#step-{other}">step {other}</a>' for other in neighbors if other is not None
    ]
    return (
        f'<article class="page" id="step-{step}">{_navigation(links)}<h2>Step {step}</h2>'
        f"<p class='lead'>Some prompts of this step with their completions, not chosen by"
        f" reward.</p>{''.join(lists)}</article>"
    )


def _line(text: str, most: int) -> str:
    """Return a text on one line, cut to `most` characters, escaped for HTML."""
    words = " ".join(text.split())
    return html.escape(words[:most] + "…" * (len(words) > most))


def _completion_page(
    sample: dict[str, Any], place: int, count: int, num_tokens: int, pictures: str, group: Samples
) -> str:
    """Return the page of a completion, with its pictures, its conversation, what its group earned,
    and numbers of its first `num_tokens` tokens."""
    step = sample["step"]
    links = [f'<a href="#step-{step}">step {step}</a>']
    if place > 0:
        links.append(f'<a href="#step-{step}-{place - 1}">previous</a>')
    if place + 1 < count:
        links.append(f'<a href="#step-{step}-{place + 1}">next</a>')
    texts = _texts(sample)
    row = sample.get("row")
    facts = {"reward": html_page.number(sample.get("reward"))}
    parts = sample.get("parts")
    if isinstance(parts, dict):
        facts |= {str(name): html_page.number(value) for name, value in parts.items()}
    if texts:
        facts["tokens"] = str(len(texts))
        advantage = sample["tokens"].get("advantage")
        if isinstance(advantage, (int, float)):
            facts["advantage"] = html_page.number(advantage)
    episode = sample.get("episode")
    if isinstance(episode, dict):
        facts |= {str(name).replace("_", " "): str(value) for name, value in episode.items()}
    earned = [other["reward"] for other in group if _is_number(other.get("reward"))]
    if len(earned) > 1:
        numbers = ", ".join(map(html_page.number, sorted(earned, reverse=True)))
        facts["its group"] = f"{numbers}; mean {html_page.number(sum(earned) / len(earned))}"
    facts |= {name: str(sample[name]) for name in TAGS if sample.get(name) not in (None, "")}
    table = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in facts.items()
    )
    if num_tokens:
        completion = _token_spans(sample["tokens"], texts[:num_tokens])
        if num_tokens < len(texts):
            completion += (
                f"<p class='lead'>The first {num_tokens} of {len(texts)} tokens that"
                " samples.jsonl has.</p>"
            )
    else:
        completion = f"<div class='completion'>{html_page.text(sample['completion'])}</div>"
    if sample.get("rejected"):
        completion += f"<h3>Rejected</h3><div>{html_page.text(sample['rejected'])}</div>"
    completion += _timeline(sample.get("messages")) + _waits(sample.get("seconds"))
    name = f"completion {row}" if isinstance(row, int) else f"completion {place + 1}"
    prompt = sample.get("rendered") or sample.get("prompt", "")
    return (
        f'<article class="page one" id="step-{step}-{place}">{_navigation(links)}'
        f"<h2>Step {step}, {name}</h2><div class='beside'><div>{pictures}"
        f"<div class='prompt'>{html_page.text(prompt)}</div>{completion}</div>"
        f"<table class='plain'>{table}</table></div></article>"
    )


def _timeline(messages: Any) -> str:
    """Return the turns of a conversation with an environment, with its calls of tools, as HTML."""
    if not isinstance(messages, list):
        return ""
    turns = []
    for message in messages:
        if isinstance(message, dict):
            calls = message.get("tool_calls") or []
            parts = [message.get("content") or "", *(json.dumps(call) for call in calls)]
            text = "\n".join(str(part) for part in parts if part)
            role = html.escape(str(message.get("role", "")))
            turns.append(f"<li><b>{role}</b> <span>{html_page.text(text)}</span></li>")
    return f"<h3>Conversation</h3><ol class='turns'>{''.join(turns)}</ol>" if turns else ""


def _waits(seconds: Any) -> str:
    """Draw what an episode waited for, a line for each turn of the policy, with a legend, as HTML.

    `seconds` are pairs (kind of work, seconds) in their order, or their sums by kind.
    """
    is_ordered = isinstance(seconds, list)
    pairs = seconds if is_ordered else [*seconds.items()] if isinstance(seconds, dict) else []
    waits = [(str(kind), value) for kind, value in pairs if _is_number(value) and value > 0]
    totals: dict[str, float] = {}
    for kind, value in waits:
        totals[kind] = totals.get(kind, 0.0) + value
    total = sum(totals.values())
    colors = {kind: f"c{index % 6}" for index, kind in enumerate(totals)}
    start = 0.0
    lines = [""]
    for kind, value in waits:
        if is_ordered and kind == "policy" and lines[-1] and len(lines) < MAX_TURNS:
            lines.append("")
        width = 100 * value / total
        shown = f"<title>{html.escape(kind)} {value:.3g} s</title>"
        place = f'x="{start:.2f}" width="{width:.2f}"'
        lines[-1] += f'<rect class="{colors[kind]}" {place} height="4">{shown}</rect>'
        start += width
    drawing = "".join(f'<svg viewBox="0 0 100 4" class="waits">{bars}</svg>' for bars in lines)
    keys = "".join(
        f'<span class="key {colors[kind]}">{html.escape(kind)} {value:.3g} s</span>'
        for kind, value in totals.items()
    )
    title = f"Time by turn, {total:.3g} s" if len(lines) > 1 else f"Time, {total:.3g} s"
    return f'<h3>{title}</h3>{drawing}<div class="keys">{keys}</div>' if waits else ""


def _navigation(links: Sequence[str]) -> str:
    return f'<nav><a href="#charts">charts</a>{"".join(links)}</nav>'


def _middle(samples: Samples) -> float:
    rewards = [sample["reward"] for sample in samples if _is_number(sample.get("reward"))]
    return (min(rewards) + max(rewards)) / 2 if rewards else 0.0


def _reward(sample: dict[str, Any], middle: float) -> str:
    reward = sample.get("reward")
    if not _is_number(reward):
        return "<b>no reward</b>"
    kind = "good" if reward >= middle else "poor"
    return f"<b class='{kind}'>reward {html_page.number(reward)}</b>"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _token_spans(tokens: dict[str, Any], texts: Sequence[str]) -> str:
    """Return tokens as HTML: classes for their colors, and their numbers below the pointer."""
    constant = ""
    columns = []
    for measure in MEASURES:
        values = tokens.get(measure.name)
        if _is_number(values):
            constant = _class(measure, values)
        elif isinstance(values, list):
            columns.append((measure, values))
    spans = []
    for index, text in enumerate(texts):
        known = [
            (measure, values[index])
            for measure, values in columns
            if index < len(values) and _is_number(values[index])
        ]
        classes = " ".join(filter(None, (_class(measure, value) for measure, value in known)))
        numbers = " · ".join(f"{measure.label} {value:g}" for measure, value in known)
        attributes = f' class="{classes}"' if classes else ""
        # Tokens that the model did not choose have no numbers.
        attributes += f' title="{numbers}"' if numbers else ' class="given"'
        spans.append(f"<i{attributes}>{html.escape(text) or '·'}</i>")
    return f'<div class="tokens {constant}">{"".join(spans)}</div>'


def _class(measure: Measure, value: float) -> str:
    """Return the class of the color of a number; empty for the level without a color."""
    level = sum(abs(value) >= threshold for threshold in measure.thresholds)
    if not level:
        return ""
    is_negative = value < 0 and measure.negative_color
    return f"{measure.letter.upper() if is_negative else measure.letter}{level}"


def style() -> str:
    """Return the style sheet of the pages."""
    rules = []
    for measure in MEASURES:
        chosen = f"#by-{measure.letter}:checked ~"
        rules.append(
            f"{chosen} .colors label[for=by-{measure.letter}] {{ border-color: var(--ink); }}"
        )
        rules.append(f"{chosen} .colors .legend-{measure.letter} {{ display: inline; }}")
        signs = [(measure.letter, measure.color)]
        if measure.negative_color:
            signs.append((measure.letter.upper(), measure.negative_color))
        for letter, color in signs:
            for level in range(1, len(measure.thresholds) + 1):
                name = f"{letter}{level}"
                alpha = 0.06 + 0.1 * level
                rules.append(
                    f"{chosen} .page i.{name}, {chosen} .page .{name} i:not(.given)"
                    f" {{ background: rgb({color} / {alpha:.2f}); }}"
                )
    return FIXED_STYLE + PICTURE_STYLE + "\n".join(rules) + "\n"


FIXED_STYLE = """
.page, .colors, .colors .lead span { display: none; }
.page:target { display: block; }
body:has(.page:target) main > :not(.pages) { display: none; }
.pages { margin-top: 0; }
.pages:has(.one:target) .colors { display: block; }
.pages > input { position: fixed; opacity: 0; pointer-events: none; }
.colors {
  position: sticky; top: 0; z-index: 1; padding: 8px 0; background: var(--paper);
  border-bottom: 1px solid var(--line); font-size: 13px;
}
.colors label {
  display: inline-block; padding: 1px 8px; margin: 2px; border: 1px solid var(--line);
  border-radius: 12px; cursor: pointer;
}
.colors .lead { margin: 4px 0 0; }
.page nav { padding: 12px 0; font-size: 13px; } .page nav a, .links a { margin-right: 14px; }
.page h2 { border: 0; padding: 0; }
.page a, .links a { color: var(--blue); } .page a, .links a, .list a { text-decoration: none; }
.list { list-style: none; margin: 0; padding: 0; }
.list a {
  display: block; padding: 10px 4px; border-top: 1px solid var(--line); color: var(--ink);
  overflow-wrap: anywhere;
}
.list a:hover { background: var(--code); } .list b { margin-right: 10px; font-size: 13px; }
.list small { color: var(--muted); }
.group { font-size: 14px; margin: 22px 0 4px; overflow-wrap: anywhere; }
.found { margin: 6px 0 14px; font-size: 13px; } .found a { white-space: nowrap; }
.list span, .list small {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px;
}
.turns li { border-top: 1px solid var(--line); padding: 6px 0; white-space: pre-wrap; }
.waits { width: 100%; } .waits rect { fill: var(--c); }
.beside { display: grid; grid-template-columns: minmax(0, 1fr) 260px; gap: 28px; }
.beside .prompt { overflow-wrap: anywhere; }
.beside .completion, .tokens { margin-top: 10px; overflow-wrap: anywhere; }
.tokens {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13.5px;
  line-height: 1.75; white-space: pre-wrap;
}
.tokens i { font-style: normal; border-radius: 3px; box-decoration-break: clone; }
.tokens i:hover { outline: 1px solid var(--muted); } .tokens .given { color: var(--muted); }
@media (max-width: 720px) { .beside { grid-template-columns: minmax(0, 1fr); } }
"""
