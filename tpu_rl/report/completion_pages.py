"""Pages of single completions inside report.html: a step's completions, and the tokens of one.

A page is a part of the document that the style sheet shows while the address names it
("#step-40", "#step-40-3"). So links and the browser's history work without a script. Only some
steps and completions have a page, so that the file stays small: those at the end of the run, and
others spread over it. templates/completions.html writes them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from tpu_rl import run_files
from tpu_rl.report.html_page import number
from tpu_rl.report.pictures import Picture, Pictures

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
    are passed over: `launch/verify.py` names them. Raises DamagedDataError if the first one is.
    """
    if next(run_files.read_rows(path), None) is None:
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


def early_and_late(steps: Sequence[Samples]) -> tuple[Samples, Samples]:
    """Return rewarded samples of the first and of the last tenth of the steps that have some."""
    rewarded = [[one for one in step if one.get("reward") is not None] for step in steps]
    rewarded = [samples for samples in rewarded if samples]
    if len(rewarded) < 2:
        return [], []
    count = max(1, len(rewarded) // 10)
    return sum(rewarded[:count], []), sum(rewarded[-count:], [])


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
    return min(len(_texts(sample)), TOKENS_OF_COMPLETION)


def _texts(sample: dict[str, Any]) -> list[str]:
    tokens = sample.get("tokens")
    texts = tokens.get("text") if isinstance(tokens, dict) else None
    return [str(text) for text in texts] if isinstance(texts, list) else []


# --- what the template shows ---


class Token(NamedTuple):
    """A token with its numbers."""

    text: str
    classes: str
    """Classes of its colors."""
    numbers: str


class Wait(NamedTuple):
    """A part of the time of an episode."""

    kind: str
    seconds: float
    color: str
    left: float
    """The place of its bar, in percent."""
    width: float


class Completion:
    """A completion with a page. A row of samples.jsonl may have anything in any place."""

    def __init__(self, sample: dict[str, Any], place: int, group: Samples, pictures: list[Picture]):
        """Read a sample, the completion number `place` of its step, with those of its group."""
        self._sample = sample
        self.step = sample["step"]
        self.place = place
        self.pictures = pictures
        self.text = sample["completion"]
        self.prompt = sample.get("prompt", "")
        self.read_prompt = sample.get("rendered") or self.prompt
        self.rejected = sample.get("rejected")
        self.reward = reward if _is_number(reward := sample.get("reward")) else None
        self.tags = {name: str(sample[name]) for name in TAGS if sample.get(name) not in (None, "")}
        row = sample.get("row")
        self.number = row if isinstance(row, int) else place + 1
        self.texts = _texts(sample)
        tokens = sample.get("tokens")
        self._tokens: dict[str, Any] = tokens if isinstance(tokens, dict) else {}
        advantage = self._tokens.get("advantage")
        self.advantage = advantage if _is_number(advantage) else None
        self.size = len(self.texts) or len(self.text)
        self.length = f"{self.size} {'tokens' if self.texts else 'characters'}"
        self._earned = [other["reward"] for other in group if _is_number(other.get("reward"))]
        self.color = ""
        """The class of the color that all its tokens share."""
        self.shown: list[Token] = []

    @property
    def facts(self) -> dict[str, str]:
        """Facts that stand beside it, and the rewards of its group."""
        sample = self._sample
        facts = {"reward": number(self.reward)}
        parts, episode = sample.get("parts"), sample.get("episode")
        if isinstance(parts, dict):
            facts |= {str(name): number(value) for name, value in parts.items()}
        if self.texts:
            facts["tokens"] = str(len(self.texts))
        if self.advantage is not None:
            facts["advantage"] = number(self.advantage)
        if isinstance(episode, dict):
            facts |= {str(name).replace("_", " "): str(value) for name, value in episode.items()}
        if len(self._earned) > 1:
            numbers = ", ".join(map(number, sorted(self._earned, reverse=True)))
            mean = sum(self._earned) / len(self._earned)
            facts["its group"] = f"{numbers}; mean {number(mean)}"
        return facts | self.tags

    @property
    def turns(self) -> list[tuple[str, str]]:
        """(role, text) of the turns of a conversation with an environment, with calls of tools."""
        messages = self._sample.get("messages")
        turns = []
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                calls = message.get("tool_calls") or []
                parts = [message.get("content") or "", *(json.dumps(call) for call in calls)]
                text = "\n".join(str(part) for part in parts if part)
                turns.append((str(message.get("role", "")), text))
        return turns

    @property
    def waits(self) -> list[list[Wait]]:
        """Waits of its episode, a list for each turn of the policy.

        A sample has pairs (kind of work, seconds) in their order, or their sums by kind.
        """
        seconds = self._sample.get("seconds")
        is_ordered = isinstance(seconds, list)
        pairs = seconds if is_ordered else [*seconds.items()] if isinstance(seconds, dict) else []
        waits = [(str(kind), value) for kind, value in pairs if _is_number(value) and value > 0]
        total = sum(value for _, value in waits)
        kinds = list(dict.fromkeys(kind for kind, _ in waits))
        left = 0.0
        lines: list[list[Wait]] = [[]]
        for kind, value in waits:
            if is_ordered and kind == "policy" and lines[-1] and len(lines) < MAX_TURNS:
                lines.append([])
            width = 100 * value / total
            lines[-1].append(Wait(kind, value, f"c{kinds.index(kind) % 6}", left, width))
            left += width
        return lines if waits else []

    def show_tokens(self, count: int) -> None:
        """Show the numbers of the first tokens."""
        columns = []
        for measure in MEASURES:
            values = self._tokens.get(measure.name)
            if _is_number(values):
                self.color = _class(measure, values)
            elif isinstance(values, list):
                columns.append((measure, values))
        for index, text in enumerate(self.texts[:count]):
            known = [
                (measure, values[index])
                for measure, values in columns
                if index < len(values) and _is_number(values[index])
            ]
            classes = " ".join(filter(None, (_class(measure, value) for measure, value in known)))
            numbers = " · ".join(f"{measure.label} {value:g}" for measure, value in known)
            # Tokens that the model did not choose have no numbers.
            self.shown.append(Token(text or "·", classes if numbers else "given", numbers))


class StepPage(NamedTuple):
    """The completions of a step with a page."""

    step: int
    groups: list[list[Completion]]
    middle: float
    """The number between the lowest and the highest reward: those above are good."""

    @property
    def completions(self) -> list[Completion]:
        """Completions of all groups."""
        return list(itertools.chain(*self.groups))


def pages_of(steps: Sequence[Samples], pictures: Pictures) -> list[StepPage]:
    """Return the pages of the steps and completions of `read_steps`."""
    tokens_left = MAX_TOKENS
    pages = []
    for index, samples in enumerate(steps):
        share = tokens_left // (len(steps) - index)
        places = itertools.count()
        groups = [
            [Completion(one, next(places), group, pictures.of_sample(one)) for one in group]
            for group in _groups(samples)
        ]
        page = StepPage(samples[0]["step"], groups, middle(one.get("reward") for one in samples))
        for completion in page.completions:
            count = min(len(completion.texts), TOKENS_OF_COMPLETION, share)
            completion.show_tokens(count)
            share -= count
            tokens_left -= count
        pages.append(page)
    return pages


def extremes(completions: Sequence[Completion]) -> dict[str, list[Completion]]:
    """Return the completions at both ends of an order by reward and by length."""
    rewarded = [one for one in completions if one.reward is not None]
    by_reward = sorted(rewarded, key=lambda one: one.reward or 0.0)
    by_length = sorted(completions, key=lambda one: one.size)
    orders = {
        "highest reward": by_reward[::-1],
        "lowest reward": by_reward,
        "longest": by_length[::-1],
        "shortest": by_length,
    }
    return {name: order[:MOST_EXTREMES] for name, order in orders.items() if order}


def middle(rewards: Iterable[Any]) -> float:
    """Return the number between the lowest and the highest reward; 0 without any."""
    known = [reward for reward in rewards if _is_number(reward)]
    return (min(known) + max(known)) / 2 if known else 0.0


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _class(measure: Measure, value: float) -> str:
    """Return the class of the color of a number; empty for the level without a color."""
    level = sum(abs(value) >= threshold for threshold in measure.thresholds)
    if not level:
        return ""
    is_negative = value < 0 and measure.negative_color
    return f"{measure.letter.upper() if is_negative else measure.letter}{level}"
