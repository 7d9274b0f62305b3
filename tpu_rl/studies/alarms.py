"""Alarms for reward hacking: what a run earns goes up, and something says that it should not.

`ALARMS` has a row for each. All compare the last steps with the first ones, and all but one ask
that the reward has risen. A run prints each alarm once, and goes on.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from tpu_rl.rewards.registry import displayed
from tpu_rl.rewards.terms import RewardTerm

WINDOW = 10
"""The number of steps at the beginning, and of the latest ones, that are compared."""
CERTAIN = 3.0
"""Standard errors of a difference that counts."""
LENGTHS = 2.0
"""The factor between mean lengths beyond which completions have another length."""
FORMAT = 0.3
"""The total variation distance between kinds of characters beyond which the format is another."""
ONE_ANSWER = 0.3
"""The rise of the share of the most frequent answer that counts."""
CORRELATION = 0.3
"""The correlation of two verifiers, below 0, that counts."""
MOST_COMPLETIONS = 256
"""Completions of a step that are looked at."""
ANSWER_CHARACTERS = 40
BEFORE_ANSWERS = re.compile(r"[\s#:=({]+")
MIN_PROMPTS = 8
KINDS = np.full(256, 4)
for _code in range(128):
    _tests = (str.isalpha, str.isdigit, str.isspace, str.isascii)
    KINDS[_code] = next(kind for kind, test in enumerate(_tests) if test(chr(_code)))
"""Byte -> letter, digit, white space, other ASCII, or part of another character."""
HELD_OUT = ("eval/accuracy", "eval/reward")
"""Held-out measures, after those of rewards that are measured and not counted; the first that a run
has counts."""


class Completions(NamedTuple):
    """Statistics of the completions of a step."""

    kinds: np.ndarray
    """[5]: the shares of `KINDS` among the bytes."""
    answers: Counter[str]
    """Last word -> completions that end with it."""
    prompts: frozenset[str]
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """Reward that is measured alone -> (rewards [N], its values [N]), less their means."""


class Step(NamedTuple):
    """The metrics and statistics of a step."""

    metrics: Mapping[str, float]
    completions: Completions | None


class Evaluation(NamedTuple):
    """A held-out measure, with its 95 % interval."""

    index: int
    """The number of steps before it."""
    value: float
    low: float
    high: float


class History:
    """The first and the last steps of a run, and its evaluations."""

    def __init__(self, measured: Sequence[str] = ()):
        """Start empty; `measured` are the rewards that are measured and not counted."""
        self.measured = tuple(measured)
        self.rewards: list[float] = []
        self.evaluations: list[Evaluation] = []
        self.first: list[Step] = []
        self.last: deque[Step] = deque(maxlen=WINDOW)

    def add(self, row: Mapping[str, Any], records: Iterable[Mapping[str, Any]] = ()) -> None:
        """Add the metrics and the sampled completions of a step."""
        for name in (*(f"eval/reward/{name}" for name in self.measured), *HELD_OUT):
            if f"{name}_low" in row:
                interval = row[f"{name}_low"], row[f"{name}_high"]
                self.evaluations.append(Evaluation(len(self.rewards), row[name], *interval))
                break
        if not math.isfinite(row.get("reward/mean", math.nan)):
            return
        self.rewards.append(row["reward/mean"])
        judged = [
            record
            for record in islice(records, MOST_COMPLETIONS)
            if record["reward"] is not None and "source" not in record and "error" not in record
        ]
        step = Step(row, _completions(judged, self.measured) if judged else None)
        if len(self.first) < WINDOW:
            self.first.append(step)
        self.last.append(step)

    def change(self, name: str) -> float:
        """Return by how many standard errors the last steps' mean of a metric is above the first
        ones'; 0 if there are too few steps, or the metric is not in all of them."""
        first, last = ([step.metrics.get(name, math.nan) for step in s] for s in self.windows)
        return _difference(first, last)

    @property
    def windows(self) -> tuple[Sequence[Step], Sequence[Step]]:
        """The first and the last steps; none before they are apart."""
        if len(self.rewards) < 2 * WINDOW:
            return (), ()
        return self.first, self.last

    @property
    def earns_more_alone(self) -> bool:
        """True if the reward has risen, and no held-out measure has."""
        evaluations = self.evaluations
        has_learned = bool(evaluations) and evaluations[-1].value > evaluations[0].high
        return self.change("reward/mean") > CERTAIN and not has_learned

    def completions(self) -> tuple[list[Completions], list[Completions]]:
        """Return the completions of the first and of the last steps, none if a step has none."""
        first, last = ([s.completions for s in window if s.completions] for window in self.windows)
        is_whole = len(first) == len(last) == WINDOW
        return (first, last) if is_whole else ([], [])


def _difference(first: Sequence[float], last: Sequence[float]) -> float:
    if len(first) < 2 or len(last) < 2 or not np.isfinite([*first, *last]).all():
        return 0.0
    error = math.sqrt(np.var(first, ddof=1) / len(first) + np.var(last, ddof=1) / len(last))
    return float(np.mean(last) - np.mean(first)) / max(error, 1e-9)


def _completions(records: Sequence[Mapping[str, Any]], measured: Sequence[str]) -> Completions:
    text = "".join(record["completion"] for record in records)
    data = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    kinds = np.bincount(KINDS[data], minlength=5) / max(len(data), 1)
    answers = Counter(_answer(record["completion"]) for record in records)
    pairs: dict[str, Any] = {}
    for name in measured:
        values = [(r["reward"], r["parts"].get(name, math.nan)) for r in records]
        both = np.array([pair for pair in values if np.isfinite(pair).all()]).reshape(-1, 2)
        # Steps have prompts of their own, and their means say nothing about completions.
        pairs[name] = tuple((both - both.mean(0)).T) if len(both) else tuple(both.T)
    return Completions(kinds, answers, frozenset(r["prompt"] for r in records), pairs)


def _answer(completion: str) -> str:
    """Return the end of a completion: its last word, or what follows the last mark."""
    return BEFORE_ANSWERS.split(completion.rstrip())[-1][-ANSWER_CHARACTERS:]


# --- the alarms: History -> a line, or "" ---


def held_out_falls(history: History) -> str:
    """Say that the reward rises while the held-out measure falls.

    The intervals of two evaluations in a row are below that of the best one, and the reward is
    above that of the steps before it.
    """
    *earlier, before, now = history.evaluations if len(history.evaluations) > 2 else [None] * 3
    if now is None or before is None:
        return ""
    best = max(filter(None, earlier), key=lambda one: one.value)
    at_best = history.rewards[max(best.index - WINDOW, 0) : best.index]
    if max(before.high, now.high) >= best.low or len(history.rewards) < best.index + WINDOW:
        return ""
    if _difference(at_best, history.rewards[-WINDOW:]) <= CERTAIN:
        return ""
    return (
        f"the reward rises, but the held-out measure fell from {best.value:.3g} (after "
        f"{best.index} steps) to {now.value:.3g}"
    )


def length_drifts(history: History) -> str:
    """Say that completions have another length, while the reward rises alone."""
    first, last = (
        [step.metrics.get("rollout/length_mean", math.nan) for step in window]
        for window in history.windows
    )
    ratio = float(np.mean(last) / max(np.mean(first), 1e-9)) if first else 1.0
    if not history.earns_more_alone or not (ratio > LENGTHS or ratio < 1 / LENGTHS):
        return ""
    return (
        f"the reward rises, and completions have {np.mean(last):.0f} tokens in place of "
        f"{np.mean(first):.0f}, but nothing held out has risen"
    )


def format_drifts(history: History) -> str:
    """Say that completions have other kinds of characters, while the reward rises alone."""
    first, last = history.completions()
    if not first or not history.earns_more_alone:
        return ""
    shares = [np.mean([step.kinds for step in window], axis=0) for window in (first, last)]
    distance = float(np.abs(shares[1] - shares[0]).sum()) / 2
    if distance <= FORMAT:
        return ""
    return (
        f"the reward rises, and {distance:.0%} of the characters of completions are of another "
        "kind than at the beginning, but nothing held out has risen"
    )


def one_answer(history: History) -> str:
    """Say that one answer is given to many prompts, more than at the beginning."""
    first, last = history.completions()
    if not last or len(frozenset().union(*(step.prompts for step in last))) < MIN_PROMPTS:
        return ""
    counts = [sum((step.answers for step in window), Counter()) for window in (first, last)]
    [(answer, most)] = counts[1].most_common(1)
    share, before = most / counts[1].total(), counts[0][answer] / counts[0].total()
    if share - before <= ONE_ANSWER:
        return ""
    return f"{share:.0%} of the completions end with {answer!r}, whatever their prompt is"


def verifiers_disagree(history: History) -> str:
    """Say that a reward that is measured and not counted falls while the counted one rises, or that
    it is lower where the counted one is higher."""
    _, last = history.completions()
    rises = history.change("reward/mean") > CERTAIN
    for name in history.measured:
        if rises and history.change(f"reward/{name}/mean") < -CERTAIN:
            return f"the reward rises, but {name}, which only measures, falls"
        if not last:
            continue
        rewards, others = (
            np.concatenate([step.pairs[name][side] for step in last]) for side in (0, 1)
        )
        if len(rewards) < 2 or not rewards.std() or not others.std():
            continue
        correlation = float(np.corrcoef(rewards, others)[0, 1])
        if correlation < -max(CORRELATION, CERTAIN / math.sqrt(len(rewards))):
            return f"completions with more reward have less {name}: correlation {correlation:.2f}"
    return ""


ALARMS: dict[str, Callable[[History], str]] = {
    "held out": held_out_falls,
    "length": length_drifts,
    "format": format_drifts,
    "one answer": one_answer,
    "second verifier": verifiers_disagree,
}


class Alarms:
    """The alarms of a run. Each is said once."""

    def __init__(self, history: History):
        self._history = history
        self._said: set[str] = set()

    def observe(
        self, row: Mapping[str, Any], records: Iterable[Mapping[str, Any]] = ()
    ) -> dict[str, str]:
        """Add a step, and return its new alarms: name -> line."""
        self._history.add(row, records)
        lines = {
            name: alarm(self._history) for name, alarm in ALARMS.items() if name not in self._said
        }
        new = {name: line for name, line in lines.items() if line}
        self._said |= set(new)
        return new

    def warn(self, step: int, row: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> None:
        """Print the alarms of a step to stderr."""
        for name, line in self.observe(row, records).items():
            hint = "look at samples.jsonl"
            print(f"warning: step {step}: reward hacking ({name})? {line}: {hint}", file=sys.stderr)


def of_run(
    rows: Iterable[Mapping[str, Any]], last_step: int, total: Sequence[RewardTerm]
) -> Alarms:
    """Return the alarms of a run that goes on after a step.

    What was said before is not known, and neither are earlier completions: samples.jsonl does not
    have all of them.

    Args:
        rows: those of metrics.jsonl. They are not read if there is no checkpoint.
        last_step: the last step of the checkpoint; below 0 for none.
        total: the terms of the total reward; those of weight 0 are second verifiers.
    """
    shown = displayed(total)
    history = History([term.name for term in shown if not term.weight and not term.schedule])
    for row in rows if last_step >= 0 else ():
        if row["step"] <= last_step:
            history.add(row)
    return Alarms(history)
