"""report.html: what a run did, on one page that opens offline.

`write_report` reads only the run folder (metrics.jsonl, samples.jsonl, config.yaml, summary.json)
and shows what it finds there, also while the run is on. `plot_learning_curve` writes the headline
chart as a PNG.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpu_rl import run_files
from tpu_rl.errors import InputError, typed_command
from tpu_rl.evaluation.intervals import NORMAL_95, share_interval
from tpu_rl.metrics import SAMPLES_FILE
from tpu_rl.redaction import redact
from tpu_rl.report import charts, completion_pages, explorer, html_page, plots
from tpu_rl.report.chart_list import BEHAVIOR, LOSSES, OPTIMIZATION, THROUGHPUT, Chart
from tpu_rl.report.pictures import Pictures
from tpu_rl.report.run_data import GRADES, PAIRS, PROBLEMS, STEPS, Run, metric_of, read_run
from tpu_rl.report.series import Series

FILE = run_files.REPORT
SHOWN_PROMPTS = 6
HELD_OUT_LOSS = "eval/loss"
SET_MEASURES = {
    "accuracy": "Share of right answers.",
    "reward": "Mean over problems.",
    "loss": "Nats per token.",
}
"""Metric of a further set of held-out rows -> what it is; the first one that a set has is drawn."""
OTHER_CHARTS = 12
"""Charts of metrics that have no chart of their own, at most."""
OTHER_PREFIXES = (
    *("value/", "preference/", "q/", "distill/", "sft/", "rft/", "router/"),
    *("rollout/multiplier_", "rollout/excess_", "rollout/replay", "policy/solution_share"),
    "policy/observation_loss",
)
"""Prefixes of the metrics that get such a chart."""
REFRESH_SECONDS = 30
ACRONYMS = {"Cispo", "Dpo", "Grpo", "Gspo", "Kto", "Ppo", "Prime", "Rft", "Sft"}
"""Names of methods that are written in capitals."""


class Measure(NamedTuple):
    """The words for what evaluations of a kind measure."""

    title: str
    change: str
    """Goes before the gain."""
    is_share: bool = True
    """True for a share, shown in percent; False for a mean reward."""

    def format(self, value: float) -> str:
        """Return a value as text, without the unit."""
        return f"{100 * value:.1f}" if self.is_share else f"{value:.3f}"


MEASURES = {
    PROBLEMS: Measure("Accuracy on held-out problems", "held-out accuracy before and after"),
    PAIRS: Measure(
        "Share of held-out pairs ranked as labeled",
        "share of held-out pairs ranked as labeled, before and after",
    ),
    STEPS: Measure(
        "Share of held-out steps judged as labeled",
        "share of held-out steps judged as labeled, before and after",
    ),
    GRADES: Measure(
        "Mean reward of held-out problems", "held-out mean reward before and after", is_share=False
    ),
}


def write_report(run_dir: str | os.PathLike[str], *, live: bool = False) -> None:
    """Write report.html into a run folder.

    Args:
        live: whether the run is on. Then the page says so, and reloads itself.

    Raises:
        InputError: if the run has no metrics.
        DamagedDataError: if a file of the run cannot be read.
    """
    _write(Path(run_dir), build_page(run_dir, REFRESH_SECONDS if live else None))


def write_failure(run_dir: str | os.PathLike[str], error: Exception) -> None:
    """Write a page that says only why there is no report, with the command that builds one."""
    body = (
        "<h1>There is no report</h1><p class='note'>The run is complete. Its report failed:"
        f" {html.escape(redact(f'{type(error).__name__}: {error}'))}</p>"
        f"<p><code>{typed_command('report')} RUN_DIR</code> builds it again.</p>"
    )
    _write(Path(run_dir), document("no report", [body]))


def build_page(run_dir: str | os.PathLike[str], refresh_seconds: int | None = None) -> str:
    """Return the page of a run as HTML.

    Args:
        refresh_seconds: after how long the page reloads itself if the run is not finished.

    Raises:
        InputError: if the run has no metrics.
        DamagedDataError: if a file of the run cannot be read.
    """
    run = read_run(Path(run_dir), live=refresh_seconds is not None)
    steps = completion_pages.read_steps(Path(run_dir) / SAMPLES_FILE)
    run = run._replace(page_steps=tuple(samples[0]["step"] for samples in steps))
    if run.summary:
        refresh_seconds = None
    optimization = OPTIMIZATION + _other_charts(run)
    moving = [_chart_html(run, chart) for chart in optimization if not _is_flat(run, chart)]
    flat = [_chart_html(run, chart) for chart in optimization if _is_flat(run, chart)]
    sections = (
        _headline(run, refresh_seconds),
        _learning(run),
        explorer.section([run], [run.name]),
        _guided(run),
        _completions(run, completion_pages.search(steps) + completion_pages.extremes(steps)),
        html_page.section("Optimization", moving, flat),
        _performance(run),
        _faults(run),
        _configuration(run),
        completion_pages.section(steps, Pictures(Path(run_dir) / run_files.PICTURES)),
    )
    return document(run.name, sections, refresh_seconds)


def document(title: str, sections: Sequence[str], refresh_seconds: int | None = None) -> str:
    """Return a whole page of sections, which are HTML; empty ones are left out."""
    refresh = html_page.refresh(refresh_seconds) if refresh_seconds else ""
    page = html_page.PAGE.format(
        policy=html_page.policy(refresh_seconds, explorer.SCRIPT),
        title=html.escape(title),
        style=html_page.STYLE + explorer.STYLE + completion_pages.style(),
        body="\n".join(filter(None, sections)),
        refresh=refresh,
        script=f"<script>{explorer.SCRIPT}</script>",
    )
    # Half a surrogate pair, which rows and settings may have, is shown as its escape.
    return page.encode(errors="backslashreplace").decode()


def _write(folder: Path, page: str) -> None:
    path = folder / FILE
    if path.is_dir():
        raise run_files.damage(path, "a folder has its name", "delete it, and build the page again")
    # The command launch/report.py may write at the same time as the run.
    temporary = path.with_name(f"{FILE}.{os.getpid()}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


def plot_learning_curve(run_dir: str | os.PathLike[str], path_png: str | os.PathLike[str]) -> None:
    """Write the report's headline chart as a PNG.

    Raises InputError if the run has neither evaluations nor a loss.
    """
    run = read_run(Path(run_dir))
    series, kind = _headline_series(run)
    if series is None:
        raise InputError(
            f"Run {run.name} has nothing to plot.",
            where=str(run_dir),
            why="it has no evaluation and no loss",
        )
    if kind is None:
        figure = plots.line_chart([series], size=plots.WIDE)
    else:
        title = MEASURES[kind].title
        title = f"{run.name}: {title[0].lower()}{title[1:]}, 95 % interval"
        figure = plots.learning_curve(series, title=title, percent=MEASURES[kind].is_share)
    plots.save_png(figure, path_png)


# --- headline ---


def _headline(run: Run, refresh_seconds: int | None) -> str:
    note = ""
    if refresh_seconds is not None:
        last = run.rows[-1]
        moment = datetime.fromtimestamp(last["time"], UTC)
        text = (
            f"This run is not finished: step {last['step']} ended on {moment:%Y-%m-%d at %H:%M}"
            f" UTC. These charts reload themselves every {refresh_seconds} seconds."
        )
        note = f'<p class="note">{text}</p>'
    elif not run.summary:
        text = "This run is not finished: the page shows what it has written so far."
        note = f'<p class="note">{text}</p>'
    series, kind = _headline_series(run)
    curve = ""
    if series is not None and kind is not None:
        caption = f"{MEASURES[kind].title}; band: 95 % interval."
        curve = html_page.figure_html(
            "",
            caption,
            charts.learning_curve(series, run.page_steps, percent=MEASURES[kind].is_share),
            wide=True,
        )
    elif series is not None:
        chart = charts.line_chart([series], tall=True, pages=run.page_steps)
        caption = "Loss." if series.band is None else "Held-out loss; band: 95 % interval."
        curve = html_page.figure_html("", caption, chart, wide=True)
    result = _evaluation_result(run, kind) or _loss_result(run)
    heading = f"<h1>{html.escape(run.name)}</h1>"
    return f'<header id="charts">{heading}{note}{result}{_facts(run)}</header>{curve}'


def _evaluation_result(run: Run, kind: str | None) -> str:
    """Return the accuracy, or the mean reward of graded answers, before and after training as
    HTML; empty if it was not evaluated."""
    evaluations = run.evaluations()
    if evaluations is None:
        return ""
    measure = MEASURES[kind or PROBLEMS]
    before, after = evaluations
    gain = after["value"] - before["value"]
    difference = f"{100 * gain:+.1f} points" if measure.is_share else f"{gain:+.3f}"
    problems = f", {after['n']} problems" if after.get("n") else ""
    unit = "<small>%</small>" if measure.is_share else ""
    first, last = (f"{measure.format(result['value'])}{unit}" for result in evaluations)
    intervals = " and ".join(_interval(result, measure) for result in evaluations)
    return html_page.result(
        first,
        last,
        f"{measure.change}, {difference}<br>95 % intervals {intervals}{problems}"
        f"{_greedy(run, kind or PROBLEMS)}",
    )


def _loss_result(run: Run) -> str:
    held_out = run.with_limits(HELD_OUT_LOSS)
    if held_out is not None and len(held_out.y) > 1:
        limits = ""
        if held_out.band is not None:
            low, high = held_out.band
            first, last = (f"{low[index]:.3f}–{high[index]:.3f}" for index in (0, -1))
            limits = f"<br>95 % intervals {first} and {last}"
        return html_page.result(
            f"{held_out.y[0]:.3f}",
            f"{held_out.y[-1]:.3f}",
            f"held-out loss before and after, nats per token{limits}",
        )
    loss = run.series("sft/loss")
    if loss is None:
        return ""
    return html_page.result(
        f"{loss.y[0]:.3f}",
        f"{loss.y[-1]:.3f}",
        "loss of the first and the last step, nats per token",
    )


def _facts(run: Run) -> str:
    """Return the run's key facts as HTML, without those that are unknown."""
    first = run.rows[0]
    last = run.rows[-1]
    memory = run.series("perf/peak_memory")
    planned_steps = run.config.get("steps", last["step"])
    method = run.setting("algorithm", "kind").removesuffix("Config")
    is_done = last["step"] >= planned_steps
    facts = {
        "steps": f"{last['step']}" if is_done else f"{last['step']} of {planned_steps}",
        "duration": html_page.duration(run.summary.get("seconds", last["time"] - first["time"])),
        "device": run.summary.get("device"),
        "peak memory": f"{memory.y.max() / 2**30:.2f} GiB" if memory else "",
        "algorithm": method.upper() if method in ACRONYMS else method,
        "model": Path(run.setting("model", "path")).name,
        "seed": run.config.get("seed"),
    }
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{html.escape(str(value))}</dd></div>"
        for name, value in facts.items()
        if value not in (None, "")
    )
    return f"<dl class='facts'>{tiles}</dl>"


def _headline_series(run: Run) -> tuple[Series | None, str | None]:
    """Return (the latest kind of evaluation with its limits, the kind); without evaluations (a
    loss, None); without that (None, None)."""
    kinds = run.evaluation_kinds()
    if kinds:
        return run.evaluated(kinds[-1]).with_limits(metric_of(kinds[-1])), kinds[-1]
    held_out = run.with_limits(HELD_OUT_LOSS)
    if held_out is not None:
        return held_out, None
    losses = (run.series(name) for name in LOSSES)
    return next((series for series in losses if series is not None), None), None


def _interval(evaluation: dict[str, Any], measure: Measure) -> str:
    if evaluation.get("low") is None or evaluation.get("high") is None:
        return "unknown"
    return f"{measure.format(evaluation['low'])}–{measure.format(evaluation['high'])}"


def _greedy(run: Run, kind: str) -> str:
    greedy = run.series(metric_of(kind).replace("eval/", "eval/greedy_"))
    if greedy is None or len(greedy.y) < 2:
        return ""
    measure = MEASURES[kind]
    first, last = (measure.format(greedy.y[index]) for index in (0, -1))
    unit = " %" if measure.is_share else ""
    return f"<br>with greedy decoding: {first} → {last}{unit}"


# --- charts ---


def _chart_html(run: Run, chart: Chart) -> str:
    """Return the chart as HTML; empty if the run has none of its metrics."""
    read = run.with_limits if chart.has_band else run.series
    lines = [read(metric, label) for metric, label in chart.metrics.items()]
    return lines_html(chart, lines, run.page_steps)


def _is_flat(run: Run, chart: Chart) -> bool:
    """Return True if nothing on the chart moves, as ratios and clipped shares on policy."""
    lines = [line for name in chart.metrics if (line := run.series(name)) is not None]
    return bool(lines) and all(
        len(line.y) > 1 and np.ptp(line.y) <= chart.resolution for line in lines
    )


def lines_html(chart: Chart, series: Iterable[Series | None], pages: Sequence[int] = ()) -> str:
    """Return the chart of some lines as HTML; empty if there are none. For `pages` see `charts`."""
    lines = [line for line in series if line is not None]
    if chart.log:
        # A logarithmic axis can show the points above zero only.
        lines = [line.map(lambda part, of=line.y > 0: part[of]) for line in lines]
        lines = [line for line in lines if len(line.y)]
    if not lines:
        return ""
    drawing = charts.line_chart(
        lines, percent=chart.percent, log=chart.log, resolution=chart.resolution, pages=pages
    )
    return html_page.figure_html(chart.title, chart.note, drawing)


def _other_charts(run: Run) -> tuple[Chart, ...]:
    """Return charts of metrics that have no chart of their own."""
    charted = {metric for chart in BEHAVIOR + OPTIMIZATION for metric in chart.metrics}
    if not run.evaluation_kinds() and run.series(HELD_OUT_LOSS) is None:
        charted.add(next((name for name in LOSSES if run.series(name) is not None), ""))
    charts = [
        Chart(name, "", {name: ""})
        for name in run.metric_names()
        if name.startswith(OTHER_PREFIXES) and name not in charted
    ]
    return tuple(charts[:OTHER_CHARTS])


def _learning(run: Run) -> str:
    figures = [_earlier_measure(run, kind) for kind in run.evaluation_kinds()[:-1]]
    # The headline is the loss if nothing was evaluated.
    figures += [_chart_html(run, HELD_OUT_LOSS_CHART)] if run.evaluation_kinds() else []
    figures += [_held_out_reward(run), _held_out_rewards(run), *_held_out_sets(run)]
    figures += [_reward_chart(run), _reward_parts_chart(run), _reward_histogram(run)]
    figures += [_chart_html(run, chart) for chart in BEHAVIOR]
    return html_page.section("Learning", figures)


HELD_OUT_LOSS_CHART = Chart(
    "Held-out loss", "Nats per token. Band: 95 % interval.", {HELD_OUT_LOSS: ""}, has_band=True
)
HELD_OUT_REWARD_CHART = Chart(
    "Reward on held-out problems",
    "Mean over problems. Band: 95 % interval.",
    {"eval/reward": ""},
    has_band=True,
)


def _earlier_measure(run: Run, kind: str) -> str:
    """Return the evaluations of earlier stages, which measure something else than the last."""
    title, percent = MEASURES[kind].title, MEASURES[kind].is_share
    metrics = {metric_of(kind): ""}
    chart = Chart(title, "Band: 95 % interval.", metrics, percent, has_band=True)
    return _chart_html(run.evaluated(kind), chart)


def _held_out_reward(run: Run) -> str:
    """Return the mean reward of held-out problems; empty if it is the accuracy itself, or has a
    chart as the evaluations of graded answers."""
    reward, accuracy = run.series("eval/reward"), run.series("eval/accuracy")
    is_accuracy = reward and accuracy and np.array_equal(reward.y, accuracy.y)
    if is_accuracy or GRADES in run.evaluation_kinds():
        return ""
    return _chart_html(run, HELD_OUT_REWARD_CHART)


def _held_out_rewards(run: Run) -> str:
    """Return the means of several rewards on held-out problems; empty if there is one only."""
    start = "eval/reward/"
    names = dict.fromkeys(run.metric_names())
    labels = {
        name: name.removeprefix(start)
        for name in names
        if name.startswith(start) and f"{name}_n" in names
    }
    note = "Means over problems."
    return _chart_html(run, Chart("Rewards on held-out problems", note, labels))


def _held_out_sets(run: Run) -> list[str]:
    """Return a chart for each further set of held-out rows: its accuracy, mean reward or loss."""
    figures = []
    sets = (run.config.get("evaluation") or {}).get("sets") or ()
    for name in (text.partition("=")[0] for text in sets):
        for measure, note in SET_MEASURES.items():
            chart = Chart(
                f"Held-out rows: {name}",
                f"{note} Band: 95 % interval.",
                {f"eval/{name}/{measure}": ""},
                percent=measure == "accuracy",
                has_band=True,
            )
            figure = _chart_html(run, chart)
            if figure:
                figures.append(figure)
                break
    return figures


def _reward_chart(run: Run) -> str:
    reward = run.series("reward/mean")
    if reward is None:
        return ""
    note = "Mean over the completions of a step."
    spread = run.series("reward/std")
    tokens = run.series("rollout/tokens")
    length = run.series("rollout/length_mean")
    if (
        spread
        and tokens
        and length
        and len(reward.x) == len(spread.x) == len(tokens.x) == len(length.x)
    ):
        completions = tokens.y / np.maximum(length.y, 1e-9)
        reward = reward._replace(band=_band(reward.y, spread.y, np.maximum(completions, 1)))
        note += " Band: 95 % interval of the mean, as if completions were independent."
    return lines_html(Chart("Reward", note, {}), [reward], run.page_steps)


def _band(mean: np.ndarray, spread: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the 95 % interval of each step's mean of n rewards.

    The spread of zeros and ones is sqrt(mean (1 - mean)). They have the interval of a share.
    """
    half = NORMAL_95 * spread / np.sqrt(n)
    low = mean - half
    high = mean + half
    variance = mean * (1 - mean)
    for step in np.flatnonzero(np.isclose(spread**2, variance, rtol=1e-3, atol=1e-6)):
        share = min(max(mean[step], 0.0), 1.0)
        low[step], high[step] = share_interval(share * n[step], n[step])
    return low, high


def _reward_parts_chart(run: Run) -> str:
    parts = sorted(name for name in run.metric_names() if re.fullmatch(r"reward/.+/mean", name))
    if len(parts) < 2:
        return ""
    labels = {name: name.removeprefix("reward/").removesuffix("/mean") for name in parts}
    # The end of a line has little room: functions, not their files.
    short = [label.rpartition(".")[2] for label in labels.values()]
    if len(set(short)) == len(short):
        labels = dict(zip(parts, short, strict=True))
    note = "Means over the completions of a step."
    return _chart_html(run, Chart("Parts of the reward", note, labels))


def _reward_histogram(run: Run) -> str:
    if not run.early:
        return ""
    groups = [
        (f"steps {_step_range(part)}", np.array([sample["reward"] for sample in part], float))
        for part in (run.early, run.late)
    ]
    figure = charts.histogram(groups, "reward")
    return html_page.figure_html("Rewards, early and late", "Share of completions.", figure)


def _step_range(samples: list[dict[str, Any]]) -> str:
    first = samples[0]["step"]
    last = samples[-1]["step"]
    return f"{first}" if first == last else f"{first}–{last}"


def _guided(run: Run) -> str:
    """Return the accuracy of a Q#-guided model against its KL divergence, one point per
    coefficient. Every curve begins at the model without guidance."""
    lines = run.guided.get("lines", [])
    unguided = [line for line in lines if line["name"] == "reference"]
    curves = []
    for name in dict.fromkeys(line["name"] for line in lines if line["kl_coef"] is not None):
        points = unguided + [line for line in lines if line["name"] == name]
        points.sort(key=lambda line: line["kl"])
        kl = np.array([line["kl"] for line in points], float)
        accuracy, low, high = np.array([line["accuracy"][:3] for line in points], float).T
        curves.append(Series(name, kl, accuracy, (low, high)))
    if not curves:
        return ""
    note = (
        "Accuracy against the KL divergence from the model without guidance, nats per completion."
        " Band: 95 % interval."
    )
    figure = html_page.figure_html("", note, charts.trade_off(curves), wide=True)
    return html_page.section("Guidance", [figure])


def _performance(run: Run) -> str:
    return html_page.section("Performance", [_time_chart(run), _chart_html(run, THROUGHPUT)])


def _time_chart(run: Run) -> str:
    """Return the time of a step by phase as HTML; empty if it was not measured."""
    total = run.series("time/step")
    if total is None:
        return ""
    phases = [(phase, run.series(f"time/{phase}")) for phase in ("rollout", "reward", "update")]
    parts = [
        (phase, series.y)
        for phase, series in phases
        if series is not None and len(series.x) == len(total.x)
    ]
    if not parts:
        return ""
    other = np.maximum(total.y - sum(seconds for _, seconds in parts), 0.0)
    figure = charts.stacked_areas(total.x, [*parts, ("other", other)], run.page_steps)
    note = "Seconds. The axis is cut where compilation took far longer."
    return html_page.figure_html("Time per step", note, figure)


# --- completions ---


def _completions(run: Run, extremes: str) -> str:
    """Return links to completions (`extremes`) and a table of early and late ones, as HTML.

    It has the same prompts on both sides where prompts recur, and otherwise prompts of the first
    and of the last steps.
    """
    links = completion_pages.step_links(run.page_steps)
    if not run.early:
        return f"<section><h2>Completions</h2>{links}{extremes}</section>" if links else ""
    early = {sample["prompt"]: sample for sample in reversed(run.early)}
    late = {sample["prompt"]: sample for sample in run.late}
    shared = _evenly([prompt for prompt in early if prompt in late])
    choice = "chosen evenly over the batch, not by reward."
    if shared:
        note = f"The same prompts at the start and at the end; {choice}"
        pairs = [(early[prompt], late[prompt]) for prompt in shared]
    else:
        note = f"Prompts of the first and of the last steps; {choice}"
        pairs = list(zip(_evenly(list(early.values())), _evenly(list(late.values())), strict=False))
    rewards = [sample["reward"] for sample in run.early + run.late]
    middle = (min(rewards) + max(rewards)) / 2
    rows = "".join(f"<tr>{_cell(first, middle)}{_cell(last, middle)}</tr>" for first, last in pairs)
    table = f"<table class='samples'><tr><th>early</th><th>late</th></tr>{rows}</table>"
    note = f"<p class='lead'>{note}</p>"
    return f"<section><h2>Completions</h2>{links}{extremes}{note}{table}</section>"


def _evenly(values: list[Any]) -> list[Any]:
    """Return SHOWN_PROMPTS values at equal distances, or all if there are fewer."""
    count = min(SHOWN_PROMPTS, len(values))
    return [values[i * len(values) // count] for i in range(count)]


def _cell(sample: dict[str, Any], middle: float) -> str:
    """Return a completion as HTML. The color of its reward shows its side of `middle`."""
    parts = sample.get("parts") or {}
    details = ""
    if len(parts) > 1:
        details = ", ".join(f"{name} {html_page.number(value)}" for name, value in parts.items())
    good = "good" if sample["reward"] >= middle else "poor"
    reward = f"<span class='{good}'>reward {html_page.number(sample['reward'])}</span>"
    step = f"<span class='step'>step {sample['step']}</span>"
    return (
        f"<td><div class='prompt'>{html_page.text(sample['prompt'])}</div>"
        f"<div class='completion'>{html_page.text(sample['completion'])}</div>"
        f"<div class='reward'>{reward} {html.escape(details)}{step}</div></td>"
    )


# --- faults and configuration ---


def _faults(run: Run) -> str:
    def total(metric: str) -> str:
        series = run.series(metric)
        return "not measured" if series is None else f"{series.y.sum():.0f}"

    undefined = sorted({name for row in run.rows for name, value in row.items() if value is None})
    digest = run.summary.get("params_digest")
    facts = {
        "completions whose reward failed": total("reward/errors"),
        "optimizer steps skipped because a gradient was not finite": total("optim/skipped"),
        "metrics that were not finite at some step": ", ".join(undefined) or "none",
        "digest of the final parameters": digest or "known when the run ends",
    }
    rows = "".join(
        f"<tr><td>{name}</td><td>{html.escape(value)}</td></tr>" for name, value in facts.items()
    )
    table = f"<table class='plain'>{rows}</table>"
    return f"<section><h2>Errors and digest</h2>{table}</section>"


def _configuration(run: Run) -> str:
    if not run.config_text:
        return ""
    text = re.sub(r"(?m)^(\s*(?:- )?[\w.-]+:)", r"<b>\1</b>", html.escape(run.config_text))
    details = f"<details><summary>config.yaml</summary><pre>{text}</pre></details>"
    return f"<section><h2>Configuration</h2>{details}</section>"
