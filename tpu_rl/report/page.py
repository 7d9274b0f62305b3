"""report.html: what a run did, on one page that opens offline.

`write_report` reads only the run folder (metrics.jsonl, samples.jsonl, config.yaml, summary.json)
and shows what it finds there, also while the run is on: it fills templates/run.html.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpu_rl import run_files
from tpu_rl.errors import typed_command
from tpu_rl.evaluation.intervals import NORMAL_95, share_interval
from tpu_rl.metrics import SAMPLES_FILE
from tpu_rl.redaction import redact
from tpu_rl.report import charts, completion_pages, explorer, html_page
from tpu_rl.report.chart_list import BEHAVIOR, LOSSES, OPTIMIZATION, THROUGHPUT, Chart
from tpu_rl.report.completion_pages import Samples
from tpu_rl.report.html_page import Figure
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
    reason = redact(f"{type(error).__name__}: {error}")
    page = html_page.render(
        "failure.html", "no report", reason=reason, command=typed_command("report")
    )
    _write(Path(run_dir), page)


def build_page(run_dir: str | os.PathLike[str], refresh_seconds: int | None = None) -> str:
    """Return the page of a run as HTML.

    Args:
        refresh_seconds: after how long the page reloads itself if the run is not finished.

    Raises:
        InputError: if the run has no metrics.
        DamagedDataError: if a file of the run cannot be read.
    """
    run = read_run(Path(run_dir), live=refresh_seconds is not None)
    samples = completion_pages.read_steps(Path(run_dir) / SAMPLES_FILE)
    run = run._replace(page_steps=tuple(of_step[0]["step"] for of_step in samples))
    pictures = Pictures(Path(run_dir) / run_files.PICTURES)
    steps = completion_pages.pages_of(samples, pictures)
    completions = [one for step in steps for one in step.completions]
    if run.summary:
        refresh_seconds = None
    optimization = OPTIMIZATION + _other_charts(run)
    flat = [chart for chart in optimization if _is_flat(run, chart)]
    headline, result = _headline(run)
    early, late = completion_pages.early_and_late(samples)
    note, pairs = _chosen(early, late)
    return html_page.render(
        "run.html",
        run.name,
        refresh_seconds,
        run=run,
        last_end=datetime.fromtimestamp(run.rows[-1]["time"], UTC),
        headline=headline,
        result=result,
        facts=_facts(run),
        learning=_learning(run, _reward_histogram(early, late)),
        explorer=explorer.data([run], [run.name]),
        guidance=_guided(run),
        note=note,
        pairs=pairs,
        middle=completion_pages.middle(one["reward"] for one in early + late),
        optimization=_figures(run, [chart for chart in optimization if chart not in flat]),
        flat=_figures(run, flat),
        performance=[*_time_chart(run), *_figures(run, [THROUGHPUT])],
        faults=_faults(run),
        steps=steps,
        completions=completions,
        extremes=completion_pages.extremes(completions),
        measures=completion_pages.MEASURES,
        pictures=pictures.urls,
    )


def _write(folder: Path, page: str) -> None:
    path = folder / FILE
    if path.is_dir():
        raise run_files.damage(path, "a folder has its name", "delete it, and build the page again")
    # The command launch/report.py may write at the same time as the run.
    temporary = path.with_name(f"{FILE}.{os.getpid()}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


# --- headline ---


class Result(NamedTuple):
    """Numbers before and after training."""

    before: str
    after: str
    unit: str
    captions: list[str]


def _headline(run: Run) -> tuple[Figure | None, Result | None]:
    """Return the headline chart, and the result of training."""
    series, kind = _headline_series(run)
    if series is None:
        return None, None
    percent = kind is not None and MEASURES[kind].is_share
    chart = charts.line_chart(
        [series],
        tall=True,
        pages=run.page_steps,
        percent=percent,
        headline=kind is not None,
        dots=kind is not None,
    )
    what = "Loss" if series.band is None else "Held-out loss"
    if kind is not None:
        what = MEASURES[kind].title
    band = "" if kind is None and series.band is None else "; band: 95 % interval"
    result = _evaluation_result(run, kind) or _loss_result(run)
    return Figure("", f"{what}{band}.", chart, wide=True), result


def _evaluation_result(run: Run, kind: str | None) -> Result | None:
    """Return the accuracy, or the mean reward of graded answers, before and after training; None if
    it was not evaluated."""
    evaluations = run.evaluations()
    if evaluations is None:
        return None
    measure = MEASURES[kind or PROBLEMS]
    before, after = evaluations
    gain = after["value"] - before["value"]
    difference = f"{100 * gain:+.1f} points" if measure.is_share else f"{gain:+.3f}"
    problems = f", {after['n']} problems" if after.get("n") else ""
    intervals = " and ".join(_interval(result, measure) for result in evaluations)
    captions = [f"{measure.change}, {difference}", f"95 % intervals {intervals}{problems}"]
    greedy = run.series(metric_of(kind or PROBLEMS).replace("eval/", "eval/greedy_"))
    if greedy is not None and len(greedy.y) > 1:
        first, last = (measure.format(greedy.y[index]) for index in (0, -1))
        captions.append(f"with greedy decoding: {first} → {last}{' %' * measure.is_share}")
    first, last = (measure.format(result["value"]) for result in evaluations)
    return Result(first, last, "%" if measure.is_share else "", captions)


def _interval(evaluation: dict[str, Any], measure: Measure) -> str:
    if evaluation.get("low") is None or evaluation.get("high") is None:
        return "unknown"
    return f"{measure.format(evaluation['low'])}–{measure.format(evaluation['high'])}"


def _loss_result(run: Run) -> Result | None:
    loss = run.with_limits(HELD_OUT_LOSS)
    captions = ["held-out loss before and after, nats per token"]
    if loss is None or len(loss.y) < 2:
        loss = run.series("sft/loss")
        captions = ["loss of the first and the last step, nats per token"]
    if loss is None:
        return None
    if loss.band is not None:
        first, last = (f"{loss.band[0][i]:.3f}–{loss.band[1][i]:.3f}" for i in (0, -1))
        captions.append(f"95 % intervals {first} and {last}")
    return Result(f"{loss.y[0]:.3f}", f"{loss.y[-1]:.3f}", "", captions)


def _facts(run: Run) -> dict[str, Any]:
    """Return the run's key facts, without those that are unknown."""
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
    return {name: value for name, value in facts.items() if value not in (None, "")}


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


# --- charts ---


def _figures(run: Run, chart_list: Iterable[Chart]) -> list[Figure]:
    """Return those of the charts of which the run has a metric."""
    figures = []
    for chart in chart_list:
        read = run.with_limits if chart.has_band else run.series
        lines = [read(metric, label) for metric, label in chart.metrics.items()]
        figures += lines_figure(chart, lines, run.page_steps)
    return figures


def _is_flat(run: Run, chart: Chart) -> bool:
    """Return True if nothing on the chart moves, as ratios and clipped shares on policy."""
    lines = [line for name in chart.metrics if (line := run.series(name)) is not None]
    return bool(lines) and all(
        len(line.y) > 1 and np.ptp(line.y) <= chart.resolution for line in lines
    )


def lines_figure(
    chart: Chart, series: Iterable[Series | None], pages: Sequence[int] = ()
) -> list[Figure]:
    """Return the chart of some lines in a list, empty if there are none.

    For `pages` see `charts.line_chart`.
    """
    lines = [line for line in series if line is not None]
    if chart.log:
        # A logarithmic axis can show the points above zero only.
        lines = [line.map(lambda part, of=line.y > 0: part[of]) for line in lines]
        lines = [line for line in lines if len(line.y)]
    if not lines:
        return []
    drawing = charts.line_chart(
        lines, percent=chart.percent, log=chart.log, resolution=chart.resolution, pages=pages
    )
    return [Figure(chart.title, chart.note, drawing)]


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


def _learning(run: Run, histogram: list[Figure]) -> list[Figure]:
    kinds = run.evaluation_kinds()
    figures = []
    for kind in kinds[:-1]:  # Earlier stages measured something else than the last.
        title = MEASURES[kind].title
        percent = MEASURES[kind].is_share
        metrics = {metric_of(kind): ""}
        chart = Chart(title, "Band: 95 % interval.", metrics, percent, has_band=True)
        figures += _figures(run.evaluated(kind), [chart])
    if kinds:  # The headline is the loss if nothing was evaluated.
        note = "Nats per token. Band: 95 % interval."
        figures += _figures(run, [Chart("Held-out loss", note, {HELD_OUT_LOSS: ""}, has_band=True)])
    reward, accuracy = run.series("eval/reward"), run.series("eval/accuracy")
    is_accuracy = reward and accuracy and np.array_equal(reward.y, accuracy.y)
    if not is_accuracy and GRADES not in kinds:
        note = "Mean over problems. Band: 95 % interval."
        metrics = {"eval/reward": ""}
        title = "Reward on held-out problems"
        figures += _figures(run, [Chart(title, note, metrics, has_band=True)])
    start = "eval/reward/"
    names = dict.fromkeys(run.metric_names())
    labels = {
        name: name.removeprefix(start)
        for name in names
        if name.startswith(start) and f"{name}_n" in names
    }
    note = "Means over problems."
    figures += _figures(run, [Chart("Rewards on held-out problems", note, labels)])
    figures += [*_held_out_sets(run), *_reward_chart(run), *_reward_parts_chart(run)]
    return [*figures, *histogram, *_figures(run, BEHAVIOR)]


def _held_out_sets(run: Run) -> list[Figure]:
    """Return a chart for each further set of held-out rows: its accuracy, mean reward or loss."""
    figures = []
    sets = (run.config.get("evaluation") or {}).get("sets") or ()
    for name in (text.partition("=")[0] for text in sets):
        of_set = [
            Chart(
                f"Held-out rows: {name}",
                f"{note} Band: 95 % interval.",
                {f"eval/{name}/{measure}": ""},
                percent=measure == "accuracy",
                has_band=True,
            )
            for measure, note in SET_MEASURES.items()
        ]
        figures += _figures(run, of_set)[:1]
    return figures


def _reward_chart(run: Run) -> list[Figure]:
    reward = run.series("reward/mean")
    if reward is None:
        return []
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
    return lines_figure(Chart("Reward", note, {}), [reward], run.page_steps)


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


def _reward_parts_chart(run: Run) -> list[Figure]:
    parts = sorted(name for name in run.metric_names() if re.fullmatch(r"reward/.+/mean", name))
    if len(parts) < 2:
        return []
    labels = {name: name.removeprefix("reward/").removesuffix("/mean") for name in parts}
    # The end of a line has little room: functions, not their files.
    short = [label.rpartition(".")[2] for label in labels.values()]
    if len(set(short)) == len(short):
        labels = dict(zip(parts, short, strict=True))
    note = "Means over the completions of a step."
    return _figures(run, [Chart("Parts of the reward", note, labels)])


def _reward_histogram(early: Samples, late: Samples) -> list[Figure]:
    if not early:
        return []
    groups = [
        (f"steps {_step_range(part)}", np.array([sample["reward"] for sample in part], float))
        for part in (early, late)
    ]
    drawing = charts.histogram(groups, "reward")
    return [Figure("Rewards, early and late", "Share of completions.", drawing)]


def _step_range(samples: list[dict[str, Any]]) -> str:
    first = samples[0]["step"]
    last = samples[-1]["step"]
    return f"{first}" if first == last else f"{first}–{last}"


def _guided(run: Run) -> list[Figure]:
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
        return []
    note = (
        "Accuracy against the KL divergence from the model without guidance, nats per completion."
        " Band: 95 % interval."
    )
    drawing = charts.line_chart(curves, percent=True, tall=True, dots=True, x_name="KL, nats")
    return [Figure("", note, drawing, wide=True)]


def _time_chart(run: Run) -> list[Figure]:
    """Return the time of a step by phase, if it was measured."""
    total = run.series("time/step")
    if total is None:
        return []
    phases = [(phase, run.series(f"time/{phase}")) for phase in ("rollout", "reward", "update")]
    parts = [
        (phase, series.y)
        for phase, series in phases
        if series is not None and len(series.x) == len(total.x)
    ]
    if not parts:
        return []
    other = np.maximum(total.y - sum(seconds for _, seconds in parts), 0.0)
    drawing = charts.stacked_areas(total.x, [*parts, ("other", other)], run.page_steps)
    note = "Seconds. The axis is cut where compilation took far longer."
    return [Figure("Time per step", note, drawing)]


# --- completions ---


def _chosen(
    early: Samples, late: Samples
) -> tuple[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Return pairs of an early and a late sample, and how they were chosen.

    They have the same prompts where prompts recur, and otherwise prompts of the first and of the
    last steps.
    """
    firsts = {sample["prompt"]: sample for sample in reversed(early)}
    lasts = {sample["prompt"]: sample for sample in late}
    shared = _evenly([prompt for prompt in firsts if prompt in lasts])
    choice = "chosen evenly over the batch, not by reward."
    if shared:
        pairs = [(firsts[prompt], lasts[prompt]) for prompt in shared]
        return f"The same prompts at the start and at the end; {choice}", pairs
    pairs = list(zip(_evenly(list(firsts.values())), _evenly(list(lasts.values())), strict=False))
    return f"Prompts of the first and of the last steps; {choice}", pairs


def _evenly(values: list[Any]) -> list[Any]:
    """Return SHOWN_PROMPTS values at equal distances, or all if there are fewer."""
    count = min(SHOWN_PROMPTS, len(values))
    return [values[i * len(values) // count] for i in range(count)]


def _faults(run: Run) -> dict[str, str]:
    def total(metric: str) -> str:
        series = run.series(metric)
        return "not measured" if series is None else f"{series.y.sum():.0f}"

    undefined = sorted({name for row in run.rows for name, value in row.items() if value is None})
    return {
        "completions whose reward failed": total("reward/errors"),
        "optimizer steps skipped because a gradient was not finite": total("optim/skipped"),
        "metrics that were not finite at some step": ", ".join(undefined) or "none",
        "digest of the final parameters": run.summary.get("params_digest")
        or "known when the run ends",
    }
