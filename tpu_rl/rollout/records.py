"""Metrics, sample records and warnings of scored completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpu_rl.data import Row
from tpu_rl.redaction import redact
from tpu_rl.rewards import spans
from tpu_rl.rollout.dynamic_sampling import all_sampled, of_policy
from tpu_rl.rollout.prompts import as_text
from tpu_rl.rollout.scoring import Scored, by_episode, group_size, zero_variance
from tpu_rl.tokenizers.images import sources_of
from tpu_rl.types import RowSource

MAX_DATA_ROWS = 4
"""Rows of data that a step records, at most."""
COMPLETIONS = ("completion", "chosen", "text", "completions")
"""Columns of data with what is learned; the first that a row has."""


def metrics(scored: Scored) -> dict[str, float]:
    """Return the rollout's and the rewards' part of a metrics row. Lengths are in tokens.

    The values describe everything that was sampled, also groups that dynamic sampling or the filter
    by variance passed over. An episode of several rows counts once. "rollout/kept" is the share of
    the sampled groups that training uses: those in the batch with a scored completion.
    "reward/zero_std_groups" is the share of groups whose rewards are all equal; it is present if
    groups have several completions. "reward/unscored" is the share of completions that no reward
    function has a number for. "rollout/tokens_per_draft", at least 1, is present if decoding
    was speculative. "env/turns", "env/tool_calls", "env/errors" and "env/observation_tokens" are
    means over episodes with an environment. "time/episode_NAME_p50" and "_p90" are percentiles over
    episodes of the seconds in which one waited for NAME (`EpisodeOutcomes.seconds`).
    """
    sampled = by_episode(all_sampled(scored))
    size = group_size(sampled)
    finite = sampled.rewards[np.isfinite(sampled.rewards)]
    learned = np.asarray(by_episode(of_policy(scored)).rollout.scored).reshape(-1, size).any(1)
    row = {}
    if is_judged(sampled):
        row["reward/mean"] = _finite_mean(sampled.rewards)
        row["reward/std"] = float(finite.std()) if finite.size else float("nan")
    row |= {f"reward/{name}/mean": _finite_mean(part) for name, part in sampled.parts.items()}
    if size > 1 and is_judged(sampled):
        row["reward/zero_std_groups"] = float(zero_variance(sampled).mean())
    row["reward/errors"] = float(len(sampled.errors))
    unscored = np.isnan(sampled.rewards) & np.array([not fault for fault in sampled.faults])
    row["reward/unscored"] = float(unscored.mean())
    row["rollout/kept"] = float(learned.sum() * size / len(sampled.lengths))
    row["rollout/length_mean"] = float(sampled.lengths.mean())
    row["rollout/length_max"] = float(sampled.lengths.max())
    row["rollout/truncated"] = float(np.mean(sampled.rollout.truncated))
    row["rollout/tokens"] = float(sampled.lengths.sum())
    if sampled.drafts:
        row["rollout/tokens_per_draft"] = sampled.tokens_of_drafts / sampled.drafts
    if sampled.episodes is not None:
        row |= {
            f"env/{name}": float(np.mean(values))
            for name, values in sampled.episodes.counts.items()
        }
        row["time/rollout_idle"] = sampled.episodes.idle_seconds
        for name, seconds in sampled.episodes.seconds.items():
            row[f"time/episode_{name}_p50"] = float(np.percentile(seconds, 50))
            row[f"time/episode_{name}_p90"] = float(np.percentile(seconds, 90))
    row["time/reward"] = sampled.seconds_reward
    return row | speed(sampled.lengths, sampled.seconds)


def is_judged(scored: Scored) -> bool:
    """Return True unless nothing gives rewards, so that all of them are 0."""
    return bool(scored.parts) or scored.episodes is not None or bool(np.any(scored.rewards))


def speed(lengths: np.ndarray, seconds: float) -> dict[str, float]:
    """Return the metrics of the time that sampling took."""
    return {
        "time/rollout": seconds,
        "perf/rollout_tokens_per_second": float(lengths.sum()) / seconds,
    }


def _finite_mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


def warnings(scored: Scored, max_lines: int = 3) -> list[str]:
    """Return lines for the console: which errors left how many completions without a reward.

    The most frequent error comes first.
    """
    faults = all_sampled(scored).failures + _failures_of_added_rows(scored)
    counts = Counter(fault for fault in faults if fault)
    lines = [
        redact(f"{count} of {len(faults)} completions not scored: {fault}")
        for fault, count in counts.most_common()
    ]
    if len(lines) > max_lines:
        rest = len(lines) - max_lines + 1
        lines[max_lines - 1 :] = [f"{rest} more kinds of fault in reward functions"]
    return lines


def _failures_of_added_rows(scored: Scored) -> list[str]:
    if scored.rollout.source is None:
        return []
    rows = np.flatnonzero(scored.rollout.source)
    return [scored.failures[row] for row in rows]


def of_data(rows: Sequence[Row], step: int) -> list[dict[str, Any]]:
    """Return samples.jsonl objects of the first rows of data that a step learns from.

    They have no reward, and the `source` "data". Of a pair, `completion` is the better one; it has
    the other as `rejected`.
    """

    def written(value: Any) -> str:
        """Return one text of a text, of messages, or of several completions or steps."""
        if isinstance(value, str) or all(isinstance(part, dict) for part in value):
            return as_text(value)
        return "\n".join(map(written, value))

    objects = []
    for row in rows[:MAX_DATA_ROWS]:
        messages = row.get("messages") or []
        completion = next((row[name] for name in COMPLETIONS if row.get(name)), messages[-1:])
        record = {
            "step": step,
            "prompt": as_text(row.get("prompt") or messages[:-1] or ""),
            "completion": written(completion) if completion else "",
            "reward": None,
            "parts": {},
            "source": "data",
        }
        record |= {name: row[name] for name in ("rejected", "label", "labels") if name in row}
        objects.append(record)
    return objects


def records(scored: Scored, step: int) -> list[dict[str, Any]]:
    """Return one samples.jsonl object per completion of the batch.

    A completion that is not scored has the reason in `error`, and one whose reward is explained in
    `reason`. One that the policy did not write has its `source`: expert, hint or replay. A
    conversation with an environment has its `messages`, its numbers of turns, calls, errors and
    read tokens in `episode`, and in `seconds` its waits in their order, [kind of work, seconds].
    One about images has them in `images`, and the last coordinates that the completion and the
    answer of the data give in `marks`.
    """
    objects = []
    judged = is_judged(scored)
    group_ids = np.asarray(scored.rollout.group_id)
    groups = np.cumsum(np.diff(group_ids, prepend=group_ids[:1]) != 0)
    for row, fault in enumerate(scored.faults):
        record: dict[str, Any] = {
            "step": step,
            "prompt": scored.prompts[row],
            "completion": scored.completions[row],
            "reward": float(scored.rewards[row]) if judged else None,
            "parts": {name: float(part[row]) for name, part in scored.parts.items()},
        }
        if fault:
            record["error" if np.isnan(scored.rewards[row]) else "reason"] = fault
        if scored.rollout.source is not None and scored.rollout.source[row]:
            record["source"] = RowSource(int(scored.rollout.source[row])).name.lower()
        if scored.episodes is not None:
            record["messages"] = scored.episodes.messages[row]
            counts = scored.episodes.counts
            record["episode"] = {name: int(values[row]) for name, values in counts.items()}
            waits = scored.episodes.waits[row] if scored.episodes.waits else []
            record["seconds"] = [[kind, round(seconds, 4)] for kind, seconds in waits]
        data_row = scored.rows[groups[row]]
        of_episodes = [] if scored.episodes is None else scored.episodes.images
        of_episode = of_episodes[row] if of_episodes else []
        if images := [*sources_of(data_row), *of_episode]:
            record["images"] = images
            marks = {
                "completion": spans.coordinates(record["completion"]),
                "answer": spans.coordinates(data_row.get("answer", "")),
            }
            record["marks"] = {name: numbers for name, numbers in marks.items() if numbers}
        objects.append(record)
    return objects
