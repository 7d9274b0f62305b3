"""An audit of given preference pairs: which labels does the trained model contradict?

A pair whose label is wrong contradicts what the other pairs teach, so its margin stays low. The run
folder gets two files. audit.jsonl has a line for each pair, the lowest margin first. audit.json
says what was given, which of it was trained on, what was dropped and why, and how many pairs of
each slice are ranked as their labels say. Margins are in the algorithm's own units of reward. `row`
counts from 0 in the order of the data, the training rows first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpu_rl import data, rewards, run_files
from tpu_rl.data import Row
from tpu_rl.evaluation.pair_accuracy import (
    by_problem,
    metrics_of_pairs,
    one_pair_per_step,
    problems_of,
)
from tpu_rl.evaluation.reward_accuracy import by_slice, column_slices, with_lengths
from tpu_rl.experience.config import FLIPPED, BatchConfig
from tpu_rl.experience.sources import pairs
from tpu_rl.experience.sources.pairs import GivenPairs, ToPairs
from tpu_rl.experience.text_log_probs import announce
from tpu_rl.runtime import processes, watchdog
from tpu_rl.train import sharding
from tpu_rl.types import Algorithm, Params

RANKING = "audit.jsonl"
SUMMARY = "audit.json"
MAX_PAIRS = 10_000
"""The largest number of pairs that are ranked. Of more, evenly spaced ones are. Nor are there more
than the run drew: the audit of a short run would take longer than the run."""
BATCH_SIZE = 64
MEASURES = ("margin", "loss")
MAX_CHARACTERS = 400
"""Characters of each text in the ranking."""


class Trained(NamedTuple):
    """The algorithm that was trained on the pairs, and how."""

    algorithm: Algorithm
    params: Params
    to_pairs: ToPairs
    """Any of the usable rows -> pairs, with all that the algorithm needs."""
    num_steps: int
    """Steps of the stage that trained on them."""
    seed: int
    batch: BatchConfig
    """Pairs per step, and their packed rows."""
    weights: Sequence[float] = ()
    """Of the parts of the data."""


def write(given: GivenPairs, trained: Trained, run_dir: Path) -> str:
    """Judge the pairs that were trained on or held out, write both files, and return a line for the
    console."""
    drawn = pairs.draws(
        given.train, trained.seed, trained.batch.prompts, trained.num_steps, trained.weights
    )
    draws = np.bincount(drawn.reshape(-1), minlength=len(given.train))
    seen = data.take(given.train, np.flatnonzero(draws))
    times_trained: dict[int, int] = {}
    for row, times in zip(seen, draws[draws > 0], strict=True):
        times_trained[row["row"]] = times_trained.get(row["row"], 0) + int(times)
    judged = data.join(seen, given.held_out)
    count = min(MAX_PAIRS, len(judged), int(draws.sum()))
    indices = np.linspace(0, len(judged) - 1, count).round().astype(int)
    audited = [judged[index] for index in indices]
    measured = measure(trained, audited)
    margins = measured["margin"]
    ranking = [
        {
            "rank": rank,
            **describe(audited[index], times_trained),
            **{name: float(values[index]) for name, values in measured.items()},
        }
        for rank, index in enumerate(np.argsort(margins, kind="stable"), start=1)
    ]
    num_wrong = int((margins < 0).sum())
    summary = {
        "given": {"rows": len(given.rows), "fingerprint": data.fingerprint(given.rows)},
        "dropped": given.dropped,
        "trained": {
            "rows": len(times_trained),
            "draws": int(draws.sum()),
            "fingerprint": data.fingerprint(seen),
        },
        "held_out": len(given.held_out),
        "audited": len(audited),
        "ranked_against_their_label": num_wrong,
        "accuracy": accuracies(audited, margins, trained.to_pairs),
    }
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in ranking]
    if processes.index() == 0:
        run_files.write_text(run_dir / RANKING, "".join(lines))
        run_files.write_text(run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return (
        f"audit: {num_wrong} of {len(audited)} pairs are ranked against their label, "
        f"the worst first in {RANKING}"
    )


def describe(row: Row, times_trained: Mapping[int, int]) -> dict[str, Any]:
    """Return the ranking's verdict on a row, besides the measurements."""
    line = {"row": row["row"], "times": times_trained.get(row["row"], 0)}
    for name in ("prompt", "chosen", "rejected"):
        line[name] = rewards.text_of(row[name])[:MAX_CHARACTERS]
    return line | {name: row[name] for name in ("slice", FLIPPED) if name in row}


def measure(trained: Trained, rows: list[Row]) -> dict[str, np.ndarray]:
    """Return {"margin", "loss"}, each [rows].

    Each pair is an optimizer step of its own, so that the metrics are those of one pair.
    """
    measure_pairs = metrics_of_pairs(trained.algorithm, [f"preference/{name}" for name in MEASURES])
    batch = trained.batch
    parts: list[dict[str, np.ndarray]] = []
    began = time.monotonic()
    for first in range(0, len(rows), BATCH_SIZE):
        if first == BATCH_SIZE:  # The first batch compiles, too, but it alone may take minutes.
            left = (len(rows) - first) / BATCH_SIZE
            announce(f"audit of {len(rows)} pairs", (time.monotonic() - began) * left)
        # The last batch is filled up with rows from the beginning, so that one program serves all.
        batch_rows = [rows[index % len(rows)] for index in range(first, first + BATCH_SIZE)]
        given = trained.to_pairs(batch_rows)
        experience = one_pair_per_step(given, batch.row_length, batch.share_prefixes)
        parts.append(sharding.to_host(measure_pairs(trained.params, experience)))
        watchdog.mark("the audit of the pairs")
    return {
        name: np.concatenate([part[f"preference/{name}"] for part in parts])[: len(rows)]
        for name in MEASURES
    }


def accuracies(
    rows: Sequence[Row], margins: np.ndarray, to_pairs: ToPairs
) -> dict[str, dict[str, float]]:
    """Return slice -> {"accuracy", "low", "high", "n"}; "" is everything.

    Intervals are 95 %, over problems.
    """
    problems = problems_of(rows)
    right = (margins > 0) + 0.5 * (margins == 0)
    slices = with_lengths(column_slices(rows), to_pairs(list(rows)))
    lines = {"": by_problem(right, problems)} | by_slice(right, problems, slices)
    keys = ("accuracy", "low", "high", "n")
    return {name: dict(zip(keys, estimate, strict=True)) for name, estimate in lines.items()}
