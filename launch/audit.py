"""Which preference pairs the trained model does not believe: audit.json and audit.jsonl in the run folder.

A pair whose label is wrong contradicts what the others teach, so that its margin stays low. audit.jsonl has a line for
each pair, the worst first; audit.json says what was given, what of it was trained on, what was dropped and why, and
how many pairs of each slice are ranked as their labels say. Margins are in the algorithm's own units of reward. `row`
counts from 0 in the order of the data, the training rows first.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from launch import build, pairs, phases, reward_runs, watchdog
from launch.config import Stage
from launch.sources import Setup
from tpu_rl import data, packing, processes, rewards, sharding, training
from tpu_rl.types import Algorithm, Experience, Pairs, Params

RANKING, SUMMARY = "audit.jsonl", "audit.json"
MOST = 10_000
"""Pairs that are ranked; of more, as many are drawn evenly from the whole."""
AT_ONCE = 64
TEXT = 400
"""Characters kept of each text in the ranking."""


def is_audited(stage: Stage) -> bool:
    """Whether the stage learns from given pairs; completions judged one by one have no margin."""
    return pairs.are_given(stage) and not stage.algorithm.needs.judged


def audit_run(setup: Setup, params: Params) -> None:
    """At the end of a run: judges the pairs of its last stage, where they were given, by what was trained."""
    stage = phases.stages(setup.config, setup.run_dir, setup.config.steps)[-1]
    if is_audited(stage):
        print(write(setup, stage, build.build_algorithm(setup, stage), params))


def write(setup: Setup, stage: Stage, algorithm: Algorithm, params: Params) -> str:
    """Judges the stage's pairs by its trained params, writes both files, and returns a line to tell."""
    sifted = pairs.sift(setup)
    every = [*sifted.train, *sifted.held_out]
    times = times_drawn(setup, stage, sifted.train)
    chosen = [every[i] for i in np.linspace(0, len(every) - 1, min(MOST, len(every))).round().astype(int)]
    found = measure(setup, stage, algorithm, params, every, chosen)
    order = np.argsort(found["margin"], kind="stable")
    lines = [
        {"rank": rank, **described(chosen[i], times), **{name: float(values[i]) for name, values in found.items()}}
        for rank, i in enumerate(order, start=1)
    ]
    wrong = int((found["margin"] < 0).sum())
    summary = {
        "given": {"rows": sifted.given, "fingerprint": sifted.fingerprint},
        "dropped": {why: sorted(row["row"] for row, reason in sifted.dropped if reason == why) for why in sifted.whys},
        "trained": {
            "rows": len(times),
            "draws": sum(times.values()),
            "fingerprint": data.fingerprint([row for row in sifted.train if times[row["row"]]]),
        },
        "held_out": len(sifted.held_out),
        "audited": len(chosen),
        "ranked_against_their_label": wrong,
        "accuracy": accuracies(setup, chosen, found["margin"]),
    }
    write_whole(setup.run_dir / RANKING, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    write_whole(setup.run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return f"audit: {wrong} of {len(chosen)} pairs are ranked against their label, the worst first in {RANKING}"


def times_drawn(setup: Setup, stage: Stage, train: list[data.Row]) -> Counter[int]:
    """Row -> how often the stage learned from it: the stream is a function of the seed, and is run again."""
    stream = data.stream(train, setup.config.seed, setup.config.batch.prompts)
    return Counter(row["row"] for _ in range(stage.first, stage.last + 1) for row in next(stream)[1])


def described(row: data.Row, times: Counter[int]) -> dict[str, Any]:
    texts = {name: rewards.text_of(row[name])[:TEXT] for name in ("prompt", "chosen", "rejected")}
    return {"row": row["row"], "times": times[row["row"]], **texts} | (
        {"slice": row["slice"]} if "slice" in row else {}
    )


def measure(
    setup: Setup, stage: Stage, algorithm: Algorithm, params: Params, every: list[data.Row], rows: list[data.Row]
) -> dict[str, np.ndarray]:
    """{"margin", "loss"}, each [rows]. Each pair is an optimizer step of its own: its metrics are those of one pair."""
    pairs_of = pairs.with_kept_log_probs(setup, stage, every)

    @jax.jit
    def of_pairs(params: Params, experience: Experience) -> dict[str, jax.Array]:
        batch, _ = algorithm.make_batch(experience, params, algorithm.init_state(params))

        def one(step: Any) -> dict[str, jax.Array]:
            _, metrics = algorithm.loss(params, training.minibatch(step, 0))
            reduced = training.reduce_metrics(metrics)
            return {name: reduced[f"preference/{name}"] for name in ("margin", "loss")}

        return jax.lax.map(one, batch)

    found: list[dict[str, np.ndarray]] = []
    for first in range(0, len(rows), AT_ONCE):
        # The last batch is filled up, so that one program serves all.
        some = [rows[i % len(rows)] for i in range(first, first + AT_ONCE)]
        found.append(sharding.to_host(of_pairs(params, one_each(setup, pairs_of(some)))))
        watchdog.mark("the audit of the pairs")
    return {name: np.concatenate([part[name] for part in found])[: len(rows)] for name in found[0]}


def one_each(setup: Setup, of: Pairs) -> Experience:
    """Each pair in a packed row and an optimizer step of its own."""
    mask, group_id = np.asarray(of.action_mask), np.asarray(of.group_id)
    layout = packing.lay_out(
        mask,
        group_id,
        row_length=setup.config.batch.row_length,
        micro_batch_rows=1,
        minibatches=len(mask) // 2,
        whole_groups=True,
    )
    return Experience(of, layout)


def accuracies(setup: Setup, rows: list[data.Row], margins: np.ndarray) -> dict[str, dict[str, float]]:
    """Slice -> {"accuracy", "low", "high", "n"}; "" is everything. Intervals of 95 % over problems."""
    problems = [row.get("problem", row["row"]) for row in rows]
    right = (margins > 0) + 0.5 * (margins == 0)
    length = setup.config.sampling.max_prompt_tokens + setup.config.sampling.max_new_tokens
    named = [(str(row["slice"]),) if "slice" in row else () for row in rows]
    slices = reward_runs.with_lengths(named, data.pairs(rows, setup.language.tokenizer, length))
    lines = [reward_runs.Accuracy("", pairs.by_problem(right, problems))]
    lines += reward_runs.by_slice(right, problems, slices)
    return {
        name: {"accuracy": found.value, "low": found.low, "high": found.high, "n": found.n} for name, found in lines
    }


def write_whole(path: Path, text: str) -> None:
    """Wholly or not at all; by the first process."""
    if processes.index():
        return
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
