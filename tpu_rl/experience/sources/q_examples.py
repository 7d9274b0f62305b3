"""Examples for Q#: prefixes that the guided policy sampled, continued by the reference, and the
return that followed.

A round (arXiv 2502.20548, algorithm 1) is a stage of the run. At its beginning the policy, guided
by q as it is then, answers prompts; in the first round the reference answers alone. Each answer is
cut at a token drawn uniformly from its length, the reference continues from there, and the whole
text is scored. The examples go to RUN_DIR/examples/round_K.npz, and the stage learns from all
rounds so far.

With `roll_in="none"` nothing is cut: the reference writes whole answers, and each of their tokens
has a label. That takes half the sampling, and such answers of a prompt share it when they are
learned from.

The text behind the cut is always sampled again, in the first round too. The place of the cut
depends on the answer's length, so the answer's own end would not be a fair sample of what follows
the prefix. Dropping prompts whose examples all have the same return, as the paper does, is not fair
either: of prompts that are nearly always or nearly never solved, the examples that stay are the
surprising ones, which pulls q's distribution of returns to the middle. `q/dropped_groups` counts
the prompts dropped.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_rl import data, sampler
from tpu_rl.data import Row
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.experience import array_files
from tpu_rl.experience.rows import dataset_identity
from tpu_rl.experience.source import Source, StepExperience
from tpu_rl.rollout import prompts, records, scoring
from tpu_rl.rollout.engine import Decoding, Engine, RolloutRequest, Scorer
from tpu_rl.rollout.scoring import Sampled
from tpu_rl.runtime import agreement, processes, watchdog
from tpu_rl.types import Params, Purpose, QExamples, Rollout, TrainState

CUTS = "cuts"
"""Column of `Sampled`: the index of the last token of each prefix."""
MAX_RECORDS = 64
"""The most examples of a round that go to samples.jsonl."""


class RoundSpec(NamedTuple):
    """A round of examples, and the stage that learns from it."""

    number: int
    """Rounds count from 1."""
    first_step: int
    """The first step of the stage."""
    seed: int
    batch_size: int
    """Examples per step."""
    return_range: tuple[float, float]
    """The lowest and the highest return that q's distribution can represent."""
    identity: str
    """A digest of what the examples are made of; see `round_identity`."""
    drop_equal_returns: bool = False
    """Drop prompts whose examples all have the same return."""
    together: int = 1
    """Number of consecutive examples that are drawn together: those of one prompt, if they share
    it."""


class Round(NamedTuple):
    """The examples of a round, one per row."""

    tokens: np.ndarray
    """[N, T] int32: prompt, prefix, continuation, padding."""
    first: np.ndarray
    """[N] int32: index of the prefix's last token, the first token that has a label."""
    ends: np.ndarray
    """[N] int32: index behind the last token."""
    returns: np.ndarray
    """[N] float32: the reward of the whole text."""
    metrics: np.ndarray
    """[] str: JSON, the round's part of a metrics row."""
    made_of: np.ndarray
    """[] str: `RoundSpec.identity`."""


def q_example_source(
    engine: Engine,
    rows: list[Row],
    params: Params,
    spec: RoundSpec,
    run_dir: Path,
    decode: Callable[..., str],
) -> Source:
    """Return the source of the examples of this round and all before it, shuffled in each epoch.

    A round that is in the run folder already is read: the run was interrupted in this stage. If no
    checkpoint depends on it yet and it was made of something else, it is collected again.

    Args:
        engine: samples and scores examples; see `q_engine`.
        rows: the prompts of this round.
        decode: returns the text of token ids (`Tokenizer.decode`).

    Raises:
        InputError: if no examples differ in return; see `collect`.
        DamagedDataError: if an earlier round is missing, damaged or not the one that a checkpoint
            knows.
    """
    folder = run_dir / "examples"
    paths = [folder / f"round_{number}.npz" for number in range(1, spec.number + 1)]
    seconds: dict[str, float] = {}
    if not processes.from_first(lambda: _is_valid(paths[-1], run_dir, spec)):
        began = time.perf_counter()
        _collect_file(paths[-1], engine, rows, params, spec, run_dir)
        seconds["time/rollout"] = time.perf_counter() - began
    files = {path.name: read(path) for path in paths}
    digests = {name: digest for name, (_, digest) in files.items()}
    agreement.require_equal({f"examples/{name}": digest for name, digest in digests.items()})
    rounds = [round_ for round_, _ in files.values()]
    joined = join(rounds)
    num_examples = len(joined.ends)
    num_drawn = 0

    def draw(step: int, state: TrainState) -> StepExperience:
        nonlocal num_drawn
        rows = drawn_rows(num_drawn, num_examples, spec)
        num_drawn += 1
        examples = take(joined, rows)
        metrics = {
            "q/examples": float(num_examples),
            "q/epoch": num_drawn * spec.batch_size / num_examples,
        }
        if step > spec.first_step:
            return StepExperience(examples, metrics, [], [])
        metrics |= json.loads(str(rounds[-1].metrics)) | seconds
        return StepExperience(examples, metrics, sample_records(rounds[-1], decode, step), [])

    def snapshot() -> Callable[[], dict[str, Any]]:
        state = {"drawn": num_drawn, "sha256": digests}
        return lambda: state

    def set_state(state: dict[str, Any]) -> None:
        nonlocal num_drawn
        for name, digest in state["sha256"].items():
            if digests[name] != digest:
                raise DamagedDataError(
                    "a round of Q# examples is not the one that the run learned from",
                    where=str(folder / name),
                    why="its SHA-256 is not the checkpoint's",
                    fix="restore the file, or begin a new run",
                )
        num_drawn = int(state["drawn"])

    return Source(draw, snapshot, set_state)


def _collect_file(
    path: Path, engine: Engine, rows: list[Row], params: Params, spec: RoundSpec, run_dir: Path
) -> None:
    """Collect the examples of a round, and write them to the file of each process."""
    if processes.index() == 0:
        # A round may take long, and no step is printed before it ends.
        print(
            f"note: sampling examples of {len(rows):,} prompts for round {spec.number} of Q#",
            file=sys.stderr,
        )
    collected = collect(engine, rows, params, spec)
    processes.from_first(lambda: write(path, collected))
    # If the run folder is in an object store, each process has a local folder of its own.
    if not _is_valid(path, run_dir, spec):
        write(path, collected)


def join(rounds: Sequence[Round]) -> Round:
    """Return the examples of all rounds as one, with the other fields of the last."""
    names = ("tokens", "first", "ends", "returns")
    arrays = {name: np.concatenate([part._asdict()[name] for part in rounds]) for name in names}
    return rounds[-1]._replace(**arrays)


def take(examples: Round, rows: np.ndarray) -> QExamples:
    """Return some examples."""
    tokens, first, ends, returns = (field[rows] for field in examples[:4])
    columns = np.arange(tokens.shape[1])[None]
    labeled = (columns >= first[:, None]) & (columns < ends[:, None])
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": labeled,
        "group_id": prefix_ids(tokens, first),
        "returns": np.where(labeled, returns[:, None], np.float32(0)),
    }
    return QExamples(**arrays)


def prefix_ids(tokens: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Number the runs of rows that have the same tokens before their first labeled one.

    tokens [B, T], first [B] -> [B] int32, from 0.
    """
    prefixes = np.where(np.arange(tokens.shape[1])[None] < first[:, None], tokens, -1)
    begins = np.any(prefixes[1:] != prefixes[:-1], axis=1)
    return np.concatenate([[0], np.cumsum(begins)]).astype(np.int32)


def drawn_rows(num_drawn: int, num_examples: int, spec: RoundSpec) -> np.ndarray:
    """Return the rows of the examples of the next step, [spec.batch_size].

    If `spec.together` does not divide the number of examples, the last ones are left out.
    """
    blocks = spec.batch_size // spec.together
    positions = num_drawn * blocks + np.arange(blocks)
    chosen = shuffled(positions, num_examples // spec.together, (spec.seed, spec.number))
    return (chosen[:, None] * spec.together + np.arange(spec.together)).reshape(-1)


def shuffled(positions: np.ndarray, num_rows: int, seed: tuple[int, ...]) -> np.ndarray:
    """Return the rows at positions [B] of an endless stream of epochs.

    Each epoch is a permutation of its own of all rows.
    """

    def permutation(epoch: int) -> np.ndarray:
        seeds = np.random.SeedSequence((*seed, epoch))
        return np.random.Generator(np.random.Philox(seeds)).permutation(num_rows)

    first_epoch = int(positions.min()) // num_rows
    last_epoch = int(positions.max()) // num_rows
    epochs = {epoch: permutation(epoch) for epoch in range(first_epoch, last_epoch + 1)}
    return np.array(
        [epochs[int(position) // num_rows][int(position) % num_rows] for position in positions]
    )


# --- a round ---


def collect(engine: Engine, rows: list[Row], params: Params, spec: RoundSpec) -> Round:
    """Sample and score the examples of a round.

    Raises InputError if all examples have the same return or, with `spec.drop_equal_returns`, if
    those of each prompt do; or if a return is outside `spec.return_range`.
    """
    sampled = engine.generate(params, RolloutRequest(rows, spec.first_step))
    scored = engine.score(sampled)
    useful = np.isfinite(scored.rewards)
    reason = f"all answers of {len(rows)} prompts earned the same"
    if spec.drop_equal_returns:
        useful &= ~scoring.zero_variance(scored)
        group_size = len(scored.rewards) // len(rows)
        reason = f"for each of {len(rows)} prompts, all {group_size} answers earned the same"
    if len(np.unique(scored.rewards[useful])) < 2:
        raise InputError(
            f"Q# has nothing to learn from in round {spec.number}",
            why=reason,
            fix="use problems that the model solves sometimes, "
            "or raise --algorithm.prompts or --batch.group-size",
        )
    check_returns(scored.rewards[useful], spec.return_range)
    metrics = {
        name: value
        for name, value in records.metrics(scored).items()
        if not name.startswith(("time/", "perf/"))
    }
    metrics["q/dropped_groups"] = float(len(rows) - len(np.unique(scored.rollout.group_id[useful])))
    metrics["q/round"] = float(spec.number)
    mask = np.asarray(scored.rollout.action_mask)
    ends = mask.shape[1] - mask[:, ::-1].argmax(1)
    return Round(
        tokens=np.asarray(scored.rollout.tokens)[useful],
        first=sampled.columns[CUTS][useful],
        ends=ends[useful],
        returns=scored.rewards[useful],
        metrics=np.asarray(json.dumps(metrics)),
        made_of=np.asarray(spec.identity),
    )


def round_identity(
    rows: list[Row], settings: Mapping[str, Any], reward_files: Sequence[str]
) -> str:
    """Return a digest of what examples are made of: prompts, settings, reward functions' files."""
    content = b"".join(Path(file).expanduser().read_bytes() for file in reward_files)
    described = f"{data.fingerprint(rows)} {dict(settings)}"
    return hashlib.sha256(described.encode() + content).hexdigest()


def _is_valid(path: Path, run_dir: Path, spec: RoundSpec) -> bool:
    """Return True if the stage should learn from the file of its round."""
    if not path.exists():
        return False
    if dataset_identity.newest_checkpoint(run_dir) >= spec.first_step:
        return True  # The checkpoint knows the file's SHA-256, and `set_state` compares it.
    try:
        return str(read(path)[0].made_of) == spec.identity
    except DamagedDataError:
        return False


def check_returns(returns: np.ndarray, return_range: tuple[float, float]) -> None:
    """Check that q's distribution can represent the returns. Raises InputError if it cannot."""
    low, high = return_range
    if returns.min() < low or returns.max() > high:
        raise InputError(
            f"returns go from {returns.min():g} to {returns.max():g}, beyond {low:g} to {high:g}",
            where="--reward, --algorithm.distribution, --algorithm.support",
            fix="use a histogram with a support that holds them",
        )


def q_engine(roll_in: Decoding, roll_out: Decoding | None, scorer: Scorer) -> Engine:
    """Return the engine whose completions are examples for Q#.

    `roll_in` answers the prompts of a request. Each answer is cut at a random token, and `roll_out`
    continues it from there; without `roll_out` answers stay as they are. `Sampled.columns[CUTS]`
    has the tokens that were cut at: the first of each answer, if none was.
    """

    def generate(params: Params, request: RolloutRequest) -> Sampled:
        began = time.perf_counter()
        step = request.step
        num_rows = len(request.rows) * roll_in.config.samples_per_prompt
        row_ids = request.first_row_id + np.arange(num_rows)
        token_ids = prompts.encode(request.rows, scorer.tokenizer, roll_in.max_prompt_tokens)
        # Rewards do not stream: an answer that ends is only a part of an example.
        with scorer.streaming(request.rows, roll_in.config.samples_per_prompt):
            watchdog.mark(f"the prefixes of Q# examples, before step {step}")
            answers = roll_in.sample(params, token_ids, step, row_ids)
            if roll_out is None:
                rollout = answers
                cuts = np.asarray(answers.action_mask).argmax(1)
            else:
                watchdog.mark(f"the continuations of Q# examples, before step {step}")
                rollout, cuts = cut_and_continue(roll_out, params, answers, step, row_ids)
            watchdog.mark(f"the rewards of Q# examples, before step {step}")
        sampled = scoring.describe(request.rows, rollout, scorer.tokenizer)
        seconds = time.perf_counter() - began
        return replace(sampled, step=step, seconds=seconds, columns={CUTS: cuts})

    return Engine(generate, scorer)


def cut_and_continue(
    roll_out: Decoding, params: Params, answers: Rollout, step: int, row_ids: np.ndarray
) -> tuple[Rollout, np.ndarray]:
    """Cut answers at uniformly drawn tokens, and continue them.

    Returns (the whole texts, [N] the index of the token that each answer was cut at). Nothing
    follows an answer's last token. A row that is cut there samples one token, to keep the shapes,
    and drops it.
    """
    pad_id = roll_out.config.pad_id
    tokens = np.asarray(answers.tokens)
    mask = np.asarray(answers.action_mask)
    begins = mask.argmax(1)
    ends = mask.shape[1] - mask[:, ::-1].argmax(1)
    keys = sampler.row_keys(sampler.run_key(roll_out.seed, Purpose.DATA, step), row_ids)
    uniform = np.asarray(jax.vmap(jax.random.uniform)(keys))
    cuts = begins + np.floor(uniform * (ends - begins)).astype(np.int64)
    at_end = cuts == ends - 1

    remaining = begins + roll_out.config.max_new_tokens - (cuts + 1)
    continued = roll_out.sample(
        params,
        [row[: cut + 1].tolist() for row, cut in zip(tokens, cuts, strict=True)],
        step,
        len(row_ids) + row_ids,  # Other random keys than those of the answers.
        limits=np.where(at_end, 1, remaining),
    )
    width = tokens.shape[1]
    num_continued = np.asarray(continued.action_mask).sum(1)
    ends = np.where(at_end, cuts + 1, cuts + 1 + num_continued)
    columns = np.arange(width)[None]
    whole_tokens = np.asarray(continued.tokens)[:, :width]
    zeros = np.zeros(tokens.shape, np.float32)
    whole = replace(
        answers,
        tokens=np.where(columns < ends[:, None], whole_tokens, pad_id),
        action_mask=(columns >= begins[:, None]) & (columns < ends[:, None]),
        log_probs=zeros,
        behaviour_log_probs=zeros,
        truncated=np.where(at_end, answers.truncated, continued.truncated),
    )
    return whole, cuts


def sample_records(round_: Round, decode: Callable[..., str], step: int) -> list[dict[str, Any]]:
    """Return samples.jsonl objects of some examples.

    `prompt` contains the prefix, and `completion` the continuation.
    """

    def text(row: int, start: int, end: int, **settings: bool) -> str:
        return decode(round_.tokens[row, start:end].tolist(), **settings)

    cuts = round_.first + 1
    return [
        {
            "step": step,
            "prompt": text(row, 0, cuts[row]),
            "rendered": text(row, 0, cuts[row], skip_special=False),
            "completion": text(row, cuts[row], round_.ends[row]),
            "reward": float(round_.returns[row]),
            "parts": {},
        }
        for row in range(min(MAX_RECORDS, len(cuts)))
    ]


# --- the run folder ---


def write(path: Path, round_: Round) -> None:
    """Write the file of a round completely or not at all."""
    array_files.write(path, round_._asdict())


def read(path: Path) -> tuple[Round, str]:
    """Return a round and the SHA-256 of its file.

    Raises DamagedDataError if the file is missing or cannot be read.
    """
    arrays = array_files.read(
        path,
        Round._fields,
        "a round of Q# examples cannot be read",
        "restore the file, or begin a new run",
    )
    return Round(**arrays), hashlib.sha256(path.read_bytes()).hexdigest()
