"""Preference pairs and judged completions of a run: read from a file or sampled and told apart by the reward.

The reference's log-probs are computed once, before the first step, and kept in the run folder, whatever the packing; a
run that is resumed reads them. Sampled from the reference, completions bring them along.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from launch import dataset, dataset_changes, sources, watchdog
from launch.config import ExperimentConfig, FileData, Stage
from launch.sources import Drawn, Setup, Source
from tpu_rl import comparisons, data, digests, evaluation, packing, processes, rollouts, sharding, training
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.log_probs import token_log_probs
from tpu_rl.types import Algorithm, Experience, Pairs, Params, TrainState

Referenced = Callable[[list[data.Row]], Pairs]
"""Rows -> pairs with the reference's log-probs."""


def pair_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """Pairs as the data have them, or sampled, for an algorithm that learns from Pairs."""
    role = stage.algorithm.needs.sampled_by
    return given_pairs(setup, stage, params) if role is None else sampled_pairs(setup, stage, role)


def are_given(stage: Stage) -> bool:
    return stage.algorithm.needs.experience is Pairs and stage.algorithm.needs.sampled_by is None


# --- sampled -----------------------------------------------------------------------------------------------------


def sampled_pairs(setup: Setup, stage: Stage, role: str) -> Source:
    """Of each prompt's completions by a role's model a good one with a bad one, or each by itself, judged."""
    config, judged = setup.config, stage.algorithm.needs.judged
    stream = dataset.make_stream(config, stage, setup.language)
    roll_out = sources.roller(setup, role)
    size = config.batch.prompts * config.batch.completions

    def draw(step: int, state: TrainState) -> Drawn:
        def roll(rows: list[data.Row], round_: int) -> rollouts.Scored:
            return roll_out(step, state, rows, round_ * size)

        scored = rollouts.collect(lambda: next(stream)[1], roll, config.batch.refill_rounds)
        pairs, without = (comparisons.judge if judged else comparisons.pair_up)(scored)
        groups = len(np.unique(pairs.group_id))
        found = rollouts.metrics(scored) | {
            "preference/pairs": groups - without,
            "preference/no_pair": without / groups,
        }
        return Drawn(pairs, found, rollouts.records(scored, step), rollouts.warnings(scored))

    return Source(draw, stream.get_state, stream.set_state)


# --- given -------------------------------------------------------------------------------------------------------


def given_pairs(setup: Setup, stage: Stage, params: Params) -> Source:
    """The stream's pairs as they are."""
    train, held_out = rows_that_fit(setup)
    stream = dataset_changes.stream(setup.config, stage.algorithm.needs, train, setup.config.batch.prompts)
    pairs_of = referenced(setup, stage, params, [*train, *held_out])

    def draw(step: int, state: TrainState) -> Drawn:
        del step, state
        return Drawn(pairs_of(next(stream)[1]), {}, [], [])

    return Source(draw, stream.get_state, stream.set_state)


class Sifted(NamedTuple):
    """Rows are numbered through, from 0, the training rows first, in the column `row`."""

    train: list[data.Row]
    held_out: list[data.Row]
    dropped: list[tuple[data.Row, str]]
    """The others, and why."""
    given: int
    fingerprint: str
    """Of all rows as they were given."""

    @property
    def whys(self) -> list[str]:
        return sorted({why for _, why in self.dropped})


def rows_that_fit(setup: Setup) -> tuple[list[data.Row], list[data.Row]]:
    """(training rows, held-out rows), numbered through in the column `row`; how many were dropped, is said."""
    found = sift(setup)
    for why in found.whys:
        count = sum(reason == why for _, reason in found.dropped)
        print(f"warning: {count} of {found.given} pairs dropped: {why}", file=sys.stderr)
    if not found.train:
        where = "--data.path, --sampling.max-new-tokens, --batch.row-length"
        fix = "raise these, or give other pairs"
        raise InputError("no pair is left", where=where, why="; ".join(found.whys), fix=fix)
    return found.train, found.held_out


def sift(setup: Setup) -> Sifted:
    """The rows that can be learned from. What decides between two solutions often stands at their end: none is cut."""
    config, tokenizer = setup.config, setup.language.tokenizer
    if not isinstance(config.data, FileData):
        fix = "give --data.path with columns prompt, chosen, rejected, or sample them: --algorithm.pairs reference"
        raise InputError("these data hold no pairs", where="--algorithm.pairs", fix=fix)
    train, held_out = dataset.file_rows(config, config.data, config.algorithm.needs)
    whys = [why_dropped(config, tokenizer, row) for row in [*train, *held_out]]
    numbered = [row | {"row": i} for i, row in enumerate([*train, *held_out])]
    first, last = numbered[: len(train)], numbered[len(train) :]
    first, last = ([row for row in part if not whys[row["row"]]] for part in (first, last))
    dropped = [(row, why) for row, why in zip(numbered, whys, strict=True) if why]
    return Sifted(first, last, dropped, len(numbered), data.fingerprint([*train, *held_out]))


def why_dropped(config: ExperimentConfig, tokenizer: Any, row: data.Row) -> str:
    if "chosen" in row and row["chosen"] == row["rejected"]:
        return "both completions are the same"
    return "" if fits(config, tokenizer, row) else "they are too long"


def fits(config: ExperimentConfig, tokenizer: Any, row: data.Row) -> bool:
    """Whether prompt and completions keep within their limits, and the pair within a packed row."""
    how = config.sampling
    mask = np.asarray(data.pairs([row], tokenizer, 1 + how.max_prompt_tokens + how.max_new_tokens).action_mask)
    prompt, lengths = int(mask[0].argmax()), mask.sum(-1)
    within = mask.any(-1).all() and prompt <= how.max_prompt_tokens and lengths.max() <= how.max_new_tokens
    return bool(within) and prompt + int(lengths.sum()) <= config.batch.row_length


# --- the reference's log-probs -----------------------------------------------------------------------------------


def referenced(setup: Setup, stage: Stage, params: Params, every: list[data.Row]) -> Referenced:
    """Some of `every` row -> their pairs, with the log-probs of the reference if the algorithm wants the data's."""
    plain = without_log_probs(setup)
    if not stage.algorithm.needs.reference_log_probs:
        return plain
    return joined(plain, every, cached_log_probs(setup, stage, params, every, plain))


def with_kept_log_probs(setup: Setup, stage: Stage, every: list[data.Row]) -> Referenced:
    """The same, with what the stage keeps in the run folder."""
    plain = without_log_probs(setup)
    if not stage.algorithm.needs.reference_log_probs:
        return plain
    return joined(plain, every, read_log_probs(log_probs_path(setup, stage))[1])


def without_log_probs(setup: Setup) -> Referenced:
    length = setup.config.sampling.max_prompt_tokens + setup.config.sampling.max_new_tokens
    return partial(data.pairs, tokenizer=setup.language.tokenizer, max_length=length)


def joined(plain: Referenced, every: list[data.Row], kept: list[list[np.ndarray]]) -> Referenced:
    numbers = {row["row"]: i for i, row in enumerate(every)}

    def pairs_of(rows: list[data.Row]) -> Pairs:
        pairs = plain(rows)
        values = [value for row in rows for value in kept[numbers[row["row"]]]]
        log_probs = np.zeros(pairs.action_mask.shape, np.float32)
        log_probs[pairs.action_mask] = np.concatenate(values)
        return replace(pairs, reference_log_probs=log_probs)

    return pairs_of


def log_probs_path(setup: Setup, stage: Stage) -> Path:
    return setup.run_dir / f"reference_log_probs_{stage.index}.npz"


def cached_log_probs(
    setup: Setup, stage: Stage, params: Params, rows: list[data.Row], plain: Referenced
) -> list[list[np.ndarray]]:
    """For each row, for each of its completions, the reference's log-probs of its tokens: read, or computed and kept.

    The reference is the role of that name, or else the policy as the stage finds it. Of a run's first stage that is
    known; a run that is resumed inside a later one finds other params, and trusts what is kept.
    """
    path = log_probs_path(setup, stage)
    role = "reference" if "reference" in stage.algorithm.roles else "policy"
    identity = {"data": data.fingerprint(rows), "model": digests.of_tree(setup.params_of(role)(params))}
    found = read_log_probs(path) if processes.from_first(path.exists) else None
    if found is not None:
        kept, values = found
        if kept["data"] == identity["data"] and (stage.first > 1 or kept["model"] == identity["model"]):
            return values
        same_model = kept["model"] == identity["model"]
        accepted = same_model and setup.config.accept_dataset_change
        has_begun = processes.from_first(lambda: (setup.run_dir / "metrics.jsonl").stat().st_size > 0)
        if has_begun and not accepted:
            changed = "data" if kept["data"] != identity["data"] else "reference model"
            fix = "restore it, or start a new run"
            fix += ", or go on with the changed data: --accept-dataset-change" * same_model
            raise InputError(f"the {changed} changed since the run began", where=str(path), fix=fix)
    values = compute_log_probs(setup, params, role, rows, plain)
    processes.from_first(lambda: write_log_probs(path, identity, values))
    if not path.exists() or read_log_probs(path)[0] != identity:  # in a store, each process has a folder of its own
        write_log_probs(path, identity, values)
    return values


def compute_log_probs(
    setup: Setup, params: Params, role: str, rows: list[data.Row], plain: Referenced
) -> list[list[np.ndarray]]:
    """A batch of rows at a time; the last one is filled up with rows that are there already."""
    model = setup.role(role)

    @partial(jax.jit, compiler_options=training.compiler_options(setup.mesh))
    def log_probs(params: Params, experience: Experience) -> jax.Array:
        tokens, layout = experience.data.tokens, experience.layout
        packed = packing.over_micro_batches(
            lambda micro_batch: token_log_probs(model, params, micro_batch).log_probs, layout.rows(tokens)
        )
        return layout.unpack(packed)

    size = setup.config.batch.prompts
    values: list[list[np.ndarray]] = []
    for first in range(0, len(rows), size):
        some = [rows[i % len(rows)] for i in range(first, first + size)]
        pairs = plain(some)
        found = sharding.to_host(log_probs(params, sources.lay_out(setup.config, pairs, setup.mesh)))
        watchdog.mark("the reference's log-probs of the pairs")
        of_row = [[] for _ in some]
        for group, mask, line in zip(pairs.group_id, pairs.action_mask, found, strict=True):
            of_row[group].append(line[mask])
        values += of_row
    return values[: len(rows)]


def write_log_probs(path: Path, identity: dict[str, str], values: list[list[np.ndarray]]) -> None:
    """Wholly or not at all."""
    completions = [value for of_row in values for value in of_row]
    unfinished = path.with_suffix(f".{processes.index()}.tmp")
    with unfinished.open("wb") as file:
        np.savez(
            file,
            identity=np.array(json.dumps(identity)),
            log_probs=np.concatenate(completions),
            lengths=np.array([len(value) for value in completions]),
            completions=np.array([len(of_row) for of_row in values]),
        )
    unfinished.replace(path)


def read_log_probs(path: Path) -> tuple[dict[str, str], list[list[np.ndarray]]]:
    """(identity, values) as written. Raises DamagedDataError where they cannot be read."""
    try:
        with path.open("rb") as opened, np.load(opened) as kept:
            identity = json.loads(str(kept["identity"]))
            completions = np.split(kept["log_probs"], np.cumsum(kept["lengths"])[:-1])
            ends = np.cumsum(kept["completions"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        fix = "delete it: it is computed anew"
        raise DamagedDataError(
            "the reference's log-probs are damaged", where=str(path), why=str(error), fix=fix
        ) from error
    return identity, [completions[end - count : end] for end, count in zip(ends, np.diff(ends, prepend=0), strict=True)]


# --- held-out pairs ----------------------------------------------------------------------------------------------


def evaluator(setup: Setup, stage: Stage, algorithm: Algorithm, params: Params) -> Callable[[Params], dict[str, float]]:
    """How many held-out pairs the algorithm ranks rightly, beside what their lengths alone tell.

    A problem counts once, whatever the number of its pairs (column `problem`). Each pair is an optimizer step of its
    own, so that its metrics are those of one pair.
    """
    train, held_out = rows_that_fit(setup)
    if not held_out or stage.algorithm.needs.judged:
        print("note: nothing is evaluated: there are no held-out pairs", file=sys.stderr)
        return lambda params: {}
    pairs = referenced(setup, stage, params, [*train, *held_out])(held_out)
    mask = np.asarray(pairs.action_mask)
    longest = int((mask.argmax(-1)[::2] + mask.sum(-1).reshape(-1, 2).sum(-1)).max())
    context = setup.config.mesh.context
    unit = 256 * context if context > 1 else 64  # of a length that devices, or tiles, can share
    layout = packing.lay_out(
        mask,
        np.asarray(pairs.group_id),
        row_length=-(-longest // unit) * unit,
        micro_batch_rows=1,
        minibatches=len(held_out),
        whole_groups=True,
    )
    problems = [row.get("problem", row["row"]) for row in held_out]

    @partial(jax.jit, compiler_options=training.compiler_options(setup.mesh))
    def accuracies(params: Params, experience: Experience) -> jax.Array:
        batch, _ = algorithm.make_batch(experience, params, algorithm.init_state(params))

        def one(step: Any) -> jax.Array:
            _, metrics = algorithm.loss(params, training.minibatch(step, 0))
            return training.reduce_metrics({"it": metrics["preference/accuracy"]})["it"]

        return jax.lax.map(one, batch)

    lengths = by_problem(by_length(data.pairs(train, setup.language.tokenizer, pairs.tokens.shape[1]), pairs), problems)

    def evaluate(params: Params) -> dict[str, float]:
        right = sharding.to_host(accuracies(params, Experience(pairs, layout)))
        return named("eval/", by_problem(right, problems)) | named("eval/length_only_", lengths)

    return evaluate


def by_length(train: Pairs, held_out: Pairs) -> np.ndarray:
    """[pairs] which of the held-out ones the longer or else the shorter completion wins, as more often in training."""

    def longer_wins(pairs: Pairs) -> np.ndarray:
        chosen, rejected = np.asarray(pairs.action_mask).sum(-1).reshape(-1, 2).T
        return (chosen > rejected) + 0.5 * (chosen == rejected)

    found = longer_wins(held_out)
    return found if longer_wins(train).mean() >= 0.5 else 1 - found


def named(prefix: str, found: evaluation.Estimate) -> dict[str, float]:
    return {
        f"{prefix}accuracy": found.value,
        f"{prefix}accuracy_low": found.low,
        f"{prefix}accuracy_high": found.high,
        f"{prefix}n": found.n,
    }


def by_problem(shares: np.ndarray, problems: list[int]) -> evaluation.Estimate:
    """The mean over problems of each one's mean, with its interval."""
    return evaluation.estimate([float(np.mean(shares[np.array(problems) == p])) for p in sorted(set(problems))])
