"""report.html: what a run did, on one page that opens offline.

Reads the run folder only (metrics.jsonl, samples.jsonl, config.yaml, summary.json), and makes do with what is there: a
run that is still going or was interrupted has no summary, supervised training has no rewards.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from tpu_rl import charts, report_page
from tpu_rl.errors import InputError
from tpu_rl.metrics import METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE
from tpu_rl.report_charts import BEHAVIOUR, LOSSES, OPTIMIZATION, THROUGHPUT, Chart

FILE = "report.html"
GUIDED_FILE = "guided.json"
SHOWN_PROMPTS = 6
OTHER_CHARTS = 12
"""Charts of metrics that the page does not know by name, at most."""


class Run(NamedTuple):
    """A run folder's content."""

    name: str
    rows: list[dict[str, Any]]
    early: list[dict[str, Any]]
    late: list[dict[str, Any]]
    config: dict[str, Any]
    config_text: str
    summary: dict[str, Any]
    guided: dict[str, Any]
    """What `launch/evaluate.py --guide` found of a run of Q#."""

    def series(self, metric: str, label: str = "") -> charts.Series | None:
        """A metric over the steps that have it, or None."""
        points = [(row["step"], row[metric]) for row in self.rows if row.get(metric) is not None]
        if not points:
            return None
        x, y = np.array(points, float).T
        return charts.Series(label, x, y)


def write_report(run_dir: str | os.PathLike[str]) -> None:
    """Write report.html into a run folder. Raises InputError if it has no metrics."""
    run = _read(Path(run_dir))
    sections = (
        _headline(run),
        _learning(run),
        _guided(run),
        _completions(run),
        report_page.section("Optimization", [_draw(run, chart) for chart in OPTIMIZATION + _other_charts(run)]),
        _machine(run),
        _faults(run),
        _configuration(run),
    )
    body = "\n".join(filter(None, sections))
    page = report_page.PAGE.format(title=html.escape(run.name), style=report_page.STYLE, body=body)
    path = Path(run_dir) / FILE
    temporary = path.with_suffix(".html.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


def plot_learning_curve(run_dir: str | os.PathLike[str], path_png: str | os.PathLike[str]) -> None:
    """The report's headline picture as a PNG. Raises InputError if the run has neither evaluations nor a loss."""
    run = _read(Path(run_dir))
    figure = _headline_figure(run, title=f"{run.name}: accuracy on held-out problems, 95 % interval")
    if figure is None:
        raise InputError(f"Run {run.name} has nothing to plot.", where=str(run_dir), why="no eval/accuracy and no loss")
    charts.save_png(figure, path_png)


# --- reading -----------------------------------------------------------------------------------------------------


def _read(folder: Path) -> Run:
    rows = list(_json_lines(folder / METRICS_FILE))
    if not rows:
        raise InputError("There is nothing to report.", where=str(folder / METRICS_FILE), fix="Give a run's folder.")
    config = folder / "config.yaml"
    config_text = config.read_text(encoding="utf-8") if config.exists() else ""
    early, late = _early_and_late(folder / SAMPLES_FILE)
    return Run(
        name=folder.resolve().name,
        rows=rows,
        early=early,
        late=late,
        config=yaml.safe_load(config_text) or {},
        config_text=config_text,
        summary=_json(folder / SUMMARY_FILE),
        guided=_json(folder / GUIDED_FILE),
    )


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that may be missing, or be growing: an unfinished last line is left out."""
    if path.exists():
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))


def _early_and_late(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rewarded samples of the first and the last tenth of all sampled steps, at most 20 steps each.

    The file is read twice rather than kept: it may be larger than memory.
    """
    steps = sorted({sample["step"] for sample in _json_lines(path) if sample.get("reward") is not None})
    if len(steps) < 2:
        return [], []
    count = max(1, min(20, len(steps) // 10))
    first, last = steps[count - 1], steps[-count]
    outer = [s for s in _json_lines(path) if s.get("reward") is not None and not first < s["step"] < last]
    return [s for s in outer if s["step"] <= first], [s for s in outer if s["step"] >= last]


# --- headline ----------------------------------------------------------------------------------------------------


def _headline(run: Run) -> str:
    figures = []
    before, after = _evaluations(run)
    if before and after:
        gain = 100 * (after["accuracy"] - before["accuracy"])
        figures.append(
            f'<div class="result"><div class="numbers"><span class="before">{_percent(before)}</span>'
            f'<span class="arrow">→</span><span class="after">{_percent(after)}</span></div>'
            f"<p>held-out accuracy before and after, {gain:+.1f} points<br>95 % intervals "
            f"{_interval(before)} and {_interval(after)}{_problems(after)}{_greedy(run)}</p></div>"
        )
    loss = run.series("sft/loss")
    if not figures and loss is not None:
        figures.append(
            f'<div class="result"><div class="numbers"><span class="before">{loss.y[0]:.3f}</span>'
            f'<span class="arrow">→</span><span class="after">{loss.y[-1]:.3f}</span></div>'
            "<p>loss of the first and the last step, nats a token</p></div>"
        )
    last = run.rows[-1]
    seconds = run.summary.get("seconds", last["time"] - run.rows[0]["time"])
    memory = run.series("perf/peak_memory")
    planned = run.config.get("steps", last["step"])
    facts = [
        ("steps", f"{last['step']}" if last["step"] >= planned else f"{last['step']} of {planned}"),
        ("duration", report_page.duration(seconds)),
        ("device", run.summary.get("device")),
        ("peak memory", f"{memory.y.max() / 2**30:.2f} GiB" if memory else ""),
        ("algorithm", _lookup(run.config, "algorithm", "kind").removesuffix("Config")),
        ("model", Path(_lookup(run.config, "model", "path")).name),
        ("seed", run.config.get("seed")),
    ]
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{html.escape(str(value))}</dd></div>"
        for name, value in facts
        if value not in (None, "")
    )
    note = (
        ""
        if run.summary
        else '<p class="note">This run is not finished: the page shows what it has written so far.</p>'
    )
    picture = _headline_figure(run)
    evaluated = _headline_metric(run) == "eval/accuracy"
    caption = "Accuracy on held-out problems; band: 95 % interval." if evaluated else "Loss."
    curve = report_page.figure_html("", caption, picture, wide=True) if picture else ""
    head = f"<h1>{html.escape(run.name)}</h1>{note}{''.join(figures)}<dl class='facts'>{tiles}</dl>"
    return f"<header>{head}</header>{curve}"


def _headline_metric(run: Run) -> str | None:
    return next((name for name in ("eval/accuracy", *LOSSES) if run.series(name) is not None), None)


def _headline_figure(run: Run, title: str = "") -> Any:
    metric = _headline_metric(run)
    series = run.series(metric) if metric else None
    if series is None or metric != "eval/accuracy":
        return charts.line_chart([series], size=charts.WIDE) if series is not None else None
    low, high = run.series("eval/accuracy_low"), run.series("eval/accuracy_high")
    if low is not None and high is not None and len(low.x) == len(high.x) == len(series.x):
        series = series._replace(low=low.y, high=high.y)
    return charts.learning_curve(series, title=title)


def _evaluations(run: Run) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The first and the last evaluation {accuracy, low, high, n}: of the summary, or of the metrics so far."""
    summary = run.summary.get("eval") or {}
    before, after = summary.get("before") or {}, summary.get("after") or {}
    if before.get("accuracy") is not None and after.get("accuracy") is not None:
        return before, after
    rows = [row for row in run.rows if row.get("eval/accuracy") is not None]
    found = [
        {"accuracy": row["eval/accuracy"], "low": row.get("eval/accuracy_low"), "high": row.get("eval/accuracy_high")}
        for row in rows[:1] + rows[-1:]
    ]
    return (found[0], found[1]) if len(rows) > 1 else (None, None)


def _percent(evaluation: dict[str, Any]) -> str:
    return f"{100 * evaluation['accuracy']:.1f}<small>%</small>"


def _interval(evaluation: dict[str, Any]) -> str:
    if evaluation.get("low") is None or evaluation.get("high") is None:
        return "unknown"
    return f"{100 * evaluation['low']:.1f}–{100 * evaluation['high']:.1f}"


def _problems(evaluation: dict[str, Any]) -> str:
    return f", {evaluation['n']} problems" if evaluation.get("n") else ""


def _greedy(run: Run) -> str:
    greedy = run.series("eval/greedy_accuracy")
    if greedy is None or len(greedy.y) < 2:
        return ""
    return f"<br>most likely completions alone: {100 * greedy.y[0]:.1f} → {100 * greedy.y[-1]:.1f} %"


def _lookup(config: dict[str, Any], *names: str) -> str:
    """A nested value as text; empty where it is missing."""
    value: Any = config
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else str(value)


# --- charts ------------------------------------------------------------------------------------------------------


def _draw(run: Run, chart: Chart) -> str:
    """The chart as HTML, or nothing if the run has none of its metrics."""
    found = [run.series(metric, label) for metric, label in chart.metrics.items()]
    lines = [one for one in found if one is not None]
    if chart.log:
        lines = [_where(one, one.y > 0) for one in lines if (one.y > 0).any()]
    if not lines:
        return ""
    figure = charts.line_chart(lines, percent=chart.percent, log=chart.log)
    return report_page.figure_html(chart.title, chart.note, figure)


def _where(series: charts.Series, kept: np.ndarray) -> charts.Series:
    return charts.Series(series.label, series.x[kept], series.y[kept])


def _other_charts(run: Run) -> tuple[Chart, ...]:
    """Metrics of methods that this page does not know by name."""
    names = dict.fromkeys(name for row in run.rows for name in row)
    known = {metric for chart in BEHAVIOUR + OPTIMIZATION for metric in chart.metrics} | {_headline_metric(run)}
    prefixes = ("value/", "preference/", "q/", "distill/", "sft/", "router/")
    found = [Chart(name, "", {name: ""}) for name in names if name.startswith(prefixes) and name not in known]
    return tuple(found[:OTHER_CHARTS])


def _learning(run: Run) -> str:
    figures = []
    reward = run.series("reward/mean")
    if reward is not None:
        note = "Mean over a step's completions."
        spread, tokens, length = map(run.series, ("reward/std", "rollout/tokens", "rollout/length_mean"))
        if spread and tokens and length and len(reward.x) == len(spread.x) == len(tokens.x) == len(length.x):
            completions = tokens.y / np.maximum(length.y, 1e-9)
            half = 1.96 * spread.y / np.sqrt(np.maximum(completions, 1))
            reward = reward._replace(low=reward.y - half, high=reward.y + half)
            note += " Band: 95 % interval of that mean, completions taken as independent."
        figures.append(report_page.figure_html("Reward", note, charts.line_chart([reward])))
    parts = sorted({name for row in run.rows for name in row if re.fullmatch(r"reward/.+/mean", name)})
    if len(parts) > 1:
        labels = {name: name.removeprefix("reward/").removesuffix("/mean") for name in parts}
        figures.append(_draw(run, Chart("Parts of the reward", "Means over a step's completions.", labels)))
    if run.early:
        parts = (run.early, run.late)
        groups = [(f"steps {_span(part)}", np.array([s["reward"] for s in part], float)) for part in parts]
        figures.append(
            report_page.figure_html("Rewards, early and late", "Share of completions.", charts.histogram(groups))
        )
    return report_page.section("Learning", figures + [_draw(run, chart) for chart in BEHAVIOUR])


def _guided(run: Run) -> str:
    """Accuracy against KL, a point a coefficient; the model alone is where they begin."""
    lines = run.guided.get("lines", [])
    start = [line for line in lines if line["name"] == "reference"]
    curves = []
    for name in dict.fromkeys(line["name"] for line in lines if line["kl_coef"] is not None):
        points = sorted([*start, *(line for line in lines if line["name"] == name)], key=lambda line: line["kl"])
        y, low, high = np.array([line["accuracy"][:3] for line in points], float).T
        curves.append(charts.Series(name, np.array([line["kl"] for line in points], float), y, low, high))
    if not curves:
        return ""
    note = "Share of right answers against KL to the model alone, nats a completion. Band: 95 % interval."
    return report_page.section("Guided", [report_page.figure_html("", note, charts.trade_off(curves), wide=True)])


def _span(samples: list[dict[str, Any]]) -> str:
    first, last = samples[0]["step"], samples[-1]["step"]
    return f"{first}" if first == last else f"{first}–{last}"


def _machine(run: Run) -> str:
    figures = []
    total = run.series("time/step")
    parts = [("rollout", "time/rollout"), ("reward", "time/reward"), ("update", "time/update")]
    found = [(label, run.series(metric)) for label, metric in parts]
    known = [(label, one.y) for label, one in found if one is not None and total and len(one.x) == len(total.x)]
    if total is not None and known:
        other = np.maximum(total.y - sum(y for _, y in known), 0.0)
        figure = charts.stacked_areas(total.x, [*known, ("other", other)])
        figures.append(
            report_page.figure_html(
                "Time of a step", "Seconds; where compilation took far longer, it is cut off.", figure
            )
        )
    return report_page.section("Machine", [*figures, _draw(run, THROUGHPUT)])


# --- completions -------------------------------------------------------------------------------------------------


def _completions(run: Run) -> str:
    """The same prompts early and late where they recur, else prompts of the first and of the last step."""
    if not run.early:
        return ""
    then = {sample["prompt"]: sample for sample in reversed(run.early)}
    now = {sample["prompt"]: sample for sample in run.late}
    shared = _evenly([prompt for prompt in then if prompt in now])
    if shared:
        note = "The same prompts at the start and at the end; chosen evenly over the batch, not by reward."
        pairs = [(then[prompt], now[prompt]) for prompt in shared]
    else:
        note = "Prompts of the first and of the last steps; chosen evenly over the batch, not by reward."
        pairs = list(zip(_evenly(list(then.values())), _evenly(list(now.values())), strict=False))
    rewards = [sample["reward"] for sample in run.early + run.late]
    middle = (min(rewards) + max(rewards)) / 2
    rows = "".join(f"<tr>{_cell(first, middle)}{_cell(last, middle)}</tr>" for first, last in pairs)
    table = f"<table class='samples'><tr><th>early</th><th>late</th></tr>{rows}</table>"
    return f"<section><h2>Completions</h2><p class='lead'>{note}</p>{table}</section>"


def _evenly(values: list[Any]) -> list[Any]:
    """SHOWN_PROMPTS values at equal distances, or all."""
    count = min(SHOWN_PROMPTS, len(values))
    return [values[i * len(values) // count] for i in range(count)]


def _cell(sample: dict[str, Any], middle: float) -> str:
    """One completion; its reward is coloured by which side of `middle` it is on."""
    parts = sample.get("parts") or {}
    details = (
        ", ".join(f"{name} {report_page.number(value)}" for name, value in parts.items()) if len(parts) > 1 else ""
    )
    good = "good" if sample["reward"] >= middle else "poor"
    return (
        f"<td><div class='prompt'>{report_page.text(sample['prompt'])}</div>"
        f"<div class='completion'>{report_page.text(sample['completion'])}</div>"
        f"<div class='reward'><span class='{good}'>reward {report_page.number(sample['reward'])}</span> "
        f"{html.escape(details)}<span class='step'>step {sample['step']}</span></div></td>"
    )


# --- the rest ----------------------------------------------------------------------------------------------------


def _faults(run: Run) -> str:
    def total(metric: str) -> str:
        series = run.series(metric)
        return "not measured" if series is None else f"{series.y.sum():.0f}"

    undefined = sorted({name for row in run.rows for name, value in row.items() if value is None})
    facts = [
        ("completions whose reward failed", total("reward/errors")),
        ("optimizer steps skipped, because a gradient was not finite", total("optim/skipped")),
        ("metrics that were not finite at some step", ", ".join(undefined) or "none"),
        ("digest of the final parameters", run.summary.get("params_digest") or "written when the run ends"),
    ]
    rows = "".join(f"<tr><td>{name}</td><td>{html.escape(value)}</td></tr>" for name, value in facts)
    return f"<section><h2>Faults and identity</h2><table class='plain'>{rows}</table></section>"


def _configuration(run: Run) -> str:
    if not run.config_text:
        return ""
    text = re.sub(r"(?m)^(\s*(?:- )?[\w.-]+:)", r"<b>\1</b>", html.escape(run.config_text))
    return (
        f"<section><h2>Configuration</h2><details><summary>config.yaml</summary><pre>{text}</pre></details></section>"
    )
