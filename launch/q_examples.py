"""Q#'s experience: prefixes that the guided policy rolled in, continued by the reference, and the return that followed.

A round (arXiv 2502.20548, algorithm 1) is a stage of the run. At its beginning the policy guided by q as it is then
(in the first round: the reference) answers prompts; each answer is cut at a token drawn uniformly from its realised
length; the reference continues from there; the whole is scored. Prompts whose examples all earn the same are dropped.
What is kept goes to RUN_DIR/examples/round_K.npz, and the stage learns from all rounds so far.

The answer is drawn anew from the cut on, in the first round too: where it is cut depends on its length, so its own end
would not be a fair sample of what follows the prefix. Dropping prompts (the paper's too) is not fair either: of those
that are nearly always right, or nearly never, the examples that stay are the surprising ones, which draws q's law of
returns towards the middle; `q/dropped_groups` counts them.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from launch import dataset, dataset_changes, hosts, sources, watchdog
from launch.acting import Acting, acting
from launch.config import ExperimentConfig, Stage, that_stay
from launch.sources import Drawn, Setup, Source
from tpu_rl import data, guidance, processes, rollouts, sampler
from tpu_rl.algos import QSharpConfig
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.types import Params, Policy, Purpose, QExamples, Rollout, TrainState

MICRO_BATCHES = "batch.micro_batch_rows"
"""A setting that no example depends on, and that goes with the devices (see `divisions.fitted`)."""
MOST_RECORDS = 64
"""Examples of a round that go into samples.jsonl."""


def guided_policy(policy: Policy, q: Policy, algorithm: QSharpConfig, method: guidance.Method = "q_sharp") -> Policy:
    """The policy guided by q; its params are `guidance.with_kl_coef` of the whole tree."""
    return guidance.guide(
        policy,
        q,
        guidance.offset(method, algorithm.histogram),
        algorithm.candidates,
        "own" if algorithm.q_type == "v" else "previous",
    )


def guided_acting(setup: Setup, algorithm: QSharpConfig) -> Acting:
    """The role "policy", guided by the role "q"."""
    policy = guided_policy(setup.policy("policy"), setup.policy("q"), algorithm)
    reads = [setup.params_of("policy"), setup.params_of("q")]
    alone = acting(setup.config, policy, reads, setup.mesh)

    def params_of(params: Params) -> Params:
        return guidance.with_kl_coef(alone.params(params), algorithm.kl_coef)

    return alone._replace(params=params_of)


class Round(NamedTuple):
    """The examples of a round, one a row."""

    tokens: np.ndarray
    """[N, T] int32: prompt, roll-in, continuation, padding."""
    first: np.ndarray
    """[N] int32: column of the roll-in's last token, the first that has a label."""
    ends: np.ndarray
    """[N] int32: behind the last token."""
    returns: np.ndarray
    """[N] float32: what the whole earned."""
    metrics: np.ndarray
    """[] str: JSON, the round's part of a metrics row."""
    made_of: np.ndarray
    """[] str: `made_of`."""


def q_example_source(setup: Setup, stage: Stage, params: Params) -> Source:
    """The examples of this round and all before it, shuffled anew each epoch.

    A round that lies in the run folder already is read: the run was interrupted in this stage. As long as no checkpoint
    rests on it, it is collected anew where what it was made of is not what it was.
    """
    config = setup.config
    number = round_number(config, stage)
    folder = setup.run_dir / "examples"
    paths = [folder / f"round_{k}.npz" for k in range(1, number + 1)]
    times: dict[str, float] = {}
    of = made_of(config, prompts_of(setup, stage, number))
    if not processes.from_first(lambda: stands(setup.run_dir, stage, paths[-1], of)):
        began = time.perf_counter()
        collected = collect(setup, stage, params, number)
        processes.from_first(lambda: write(paths[-1], collected))
        if not stands(setup.run_dir, stage, paths[-1], of):  # of a run in a store, each has a folder of its own
            write(paths[-1], collected)
        times["time/rollout"] = time.perf_counter() - began
    found = {path.name: read(path) for path in paths}
    hosts.require_alike({f"examples/{name}": digest for name, (_, digest) in found.items()})
    rounds = [round_ for round_, _ in found.values()]
    size, total, position = config.batch.prompts * config.batch.completions, sum(len(r.ends) for r in rounds), [0]

    def draw(step: int, state: TrainState) -> Drawn:
        del state
        at = position[0] * size + np.arange(size)
        position[0] += 1
        examples = take(rounds, shuffled(at, total, (config.seed, number)))
        row = {"q/examples": float(total), "q/epoch": position[0] * size / total}
        if step > stage.first:
            return Drawn(examples, row, [], [])
        row |= json.loads(str(rounds[-1].metrics)) | times
        return Drawn(examples, row, records(setup, rounds[-1], step), [])

    def get_state() -> dict[str, Any]:
        return {"drawn": position[0], "sha256": {name: digest for name, (_, digest) in found.items()}}

    def set_state(state: dict[str, Any]) -> None:
        for name, digest in state["sha256"].items():
            if found[name][1] != digest:
                raise DamagedDataError(
                    "a round of Q# examples is not the one that the run learned from",
                    where=str(folder / name),
                    why="its SHA-256 is not the checkpoint's",
                    fix="restore the file, or begin a new run",
                )
        position[0] = int(state["drawn"])

    return Source(draw, get_state, set_state)


def take(rounds: Sequence[Round], rows: np.ndarray) -> QExamples:
    """Some rows of the rounds, counted one after the other."""
    tokens, first, ends, returns = (np.concatenate([round_[i] for round_ in rounds])[rows] for i in range(4))
    columns = np.arange(tokens.shape[1])[None]
    labelled = (columns >= first[:, None]) & (columns < ends[:, None])
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": labelled,
        "group_id": np.arange(len(rows), dtype=np.int32),  # prefixes differ, also those of one prompt
        "returns": np.where(labelled, returns[:, None], np.float32(0)),
    }
    return QExamples(**arrays)


def shuffled(at: np.ndarray, rows: int, seed: tuple[int, ...]) -> np.ndarray:
    """Places [B] in an endless stream of epochs, each a permutation of its own of so many rows -> rows [B]."""

    def permutation(epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((*seed, epoch)))).permutation(rows)

    epochs = {epoch: permutation(epoch) for epoch in range(int(at.min()) // rows, int(at.max()) // rows + 1)}
    return np.array([epochs[int(i) // rows][int(i) % rows] for i in at])


# --- a round -----------------------------------------------------------------------------------------------------


def collect(setup: Setup, stage: Stage, params: Params, number: int) -> Round:
    """Samples and scores the examples of a round. Raises InputError where no prompt's examples differ in return."""
    config, lang, algorithm = setup.config, setup.language, stage.algorithm
    assert isinstance(algorithm, QSharpConfig)
    rows = prompts_of(setup, stage, number)
    row_ids = np.arange(algorithm.prompts * config.batch.completions)
    cuts: list[np.ndarray] = []

    def generate(prompts: list[list[int]], row_ids: np.ndarray, on_finished: sampler.OnFinished | None) -> Rollout:
        del on_finished  # what ends is a part of the answers
        watchdog.mark(f"the roll-ins of round {number}")
        rolled_in = roll_in(setup, stage, params, prompts, row_ids)
        watchdog.mark(f"the roll-outs of round {number}")
        rollout, places = roll_out(setup, stage, params, rolled_in, row_ids)
        cuts.append(places)
        watchdog.mark(f"the rewards of round {number}")
        return rollout

    functions = sources.reward_functions(config)
    longest, limits = config.sampling.max_prompt_tokens, config.reward_limits
    scored = rollouts.roll_out(rows, row_ids, generate, lang.tokenizer, functions, longest, limits.fault_share)
    kept = ~rollouts.zero_variance(scored) & np.isfinite(scored.rewards)
    if not kept.any():
        raise InputError(
            f"Q# has nothing to learn from in round {number}",
            why=f"for each of {len(rows)} prompts, all {config.batch.completions} answers earned the same",
            fix="use problems that the model solves sometimes, or raise --algorithm.prompts or --batch.completions",
        )
    check_returns(algorithm, scored.rewards[kept])
    timeless = {k: v for k, v in rollouts.metrics(scored).items() if not k.startswith(("time/", "perf/"))}
    dropped = len(rows) - len(np.unique(scored.rollout.group_id[kept]))
    measured = timeless | {"q/dropped_groups": float(dropped), "q/round": float(number)}
    tokens, mask = np.asarray(scored.rollout.tokens), np.asarray(scored.rollout.action_mask)
    ends = mask.shape[1] - mask[:, ::-1].argmax(1)
    arrays = (tokens, cuts[0], ends, scored.rewards)
    of = np.asarray(made_of(config, rows))
    return Round(*(np.asarray(x)[kept] for x in arrays), metrics=np.asarray(json.dumps(measured)), made_of=of)


def prompts_of(setup: Setup, stage: Stage, number: int) -> list[data.Row]:
    """The data rows of the round: each round has the next ones of the stream."""
    assert isinstance(stage.algorithm, QSharpConfig)
    stream = dataset.make_stream(setup.config, stage, setup.language, stage.algorithm.prompts)
    for _ in range(number - 1):
        next(stream)
    return next(stream)[1]


def made_of(config: ExperimentConfig, rows: list[data.Row]) -> str:
    """A digest of what examples are made of: prompts, files of reward functions, settings."""
    files = [name.rpartition(":")[0] for name in config.reward if ".py:" in name]
    content = b"".join(Path(file).expanduser().read_bytes() for file in files)
    settings = {name: value for name, value in that_stay(config).items() if name != MICRO_BATCHES}
    return hashlib.sha256(f"{data.fingerprint(rows)} {settings}".encode() + content).hexdigest()


def stands(run_dir: Path, stage: Stage, path: Path, of: str) -> bool:
    """Whether the round there is to be learned from."""
    if not path.exists():
        return False
    if dataset_changes.newest_checkpoint(run_dir) >= stage.first:  # it knows the round by its SHA-256
        return True
    try:
        return str(read(path)[0].made_of) == of
    except DamagedDataError:
        return False


def check_returns(algorithm: QSharpConfig, returns: np.ndarray) -> None:
    low, high = algorithm.support[:2] if algorithm.histogram else (0.0, 1.0)
    if returns.min() < low or returns.max() > high:
        raise InputError(
            f"returns go from {returns.min():g} to {returns.max():g}, beyond {low:g} to {high:g}",
            where="--reward, --algorithm.distribution, --algorithm.support",
            fix="use a histogram with a support that holds them",
        )


def round_number(config: ExperimentConfig, stage: Stage) -> int:
    """From 1 on."""
    return 1 + sum(isinstance(other.algorithm, QSharpConfig) for other in config.stages[: stage.index])


def rolls_in(setup: Setup, stage: Stage) -> Acting:
    """The guided policy, or the reference in the first round, when nothing has learned to guide it."""
    assert isinstance(stage.algorithm, QSharpConfig)
    is_first = round_number(setup.config, stage) == 1
    return setup.acting("policy") if is_first else guided_acting(setup, stage.algorithm)


def roll_in(setup: Setup, stage: Stage, params: Params, prompts: list[list[int]], row_ids: np.ndarray) -> Rollout:
    """Whole answers of who rolls in."""
    config, answers = setup.config, rolls_in(setup, stage)
    how = sources.sampler_config(config, setup.language.tokenizer, config.batch.completions)
    with jax.set_mesh(answers.mesh):
        key, params = sampler.run_key(config.seed, Purpose.ROLLOUT, stage.first), answers.params(params)
        looks: dict[str, Any] = {"mesh": answers.mesh, "at_border": watchdog.beat}
        return sampler.sample(answers.policy, params, prompts, key, how, row_ids=row_ids, **looks)


def roll_out_config(setup: Setup) -> sampler.SamplerConfig:
    """How the reference goes on behind prompts with what was rolled in, once behind each."""
    config = setup.config
    longest = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    return replace(sources.sampler_config(config, setup.language.tokenizer, 1), prompt_length=longest)


def roll_out(
    setup: Setup, stage: Stage, params: Params, rolled_in: Rollout, row_ids: np.ndarray
) -> tuple[Rollout, np.ndarray]:
    """(the roll-ins cut at a uniformly drawn token and continued by the reference, [N] columns of those tokens).

    After a roll-in's last token nothing follows: such rows draw one token for the shape's sake, which is dropped.
    """
    config, pad = setup.config, setup.language.tokenizer.pad_id
    mask, tokens = np.asarray(rolled_in.action_mask), np.asarray(rolled_in.tokens)
    begins, ends = mask.argmax(1), mask.shape[1] - mask[:, ::-1].argmax(1)
    keys = sampler.row_keys(sampler.run_key(config.seed, Purpose.DATA, stage.first), row_ids)
    cuts = begins + np.floor(np.asarray(jax.vmap(jax.random.uniform)(keys)) * (ends - begins)).astype(np.int64)
    over = cuts == ends - 1

    room = begins + config.sampling.max_new_tokens - (cuts + 1)
    prefixes = [row[: cut + 1].tolist() for row, cut in zip(tokens, cuts, strict=True)]
    reference = setup.acting("policy")
    with jax.set_mesh(reference.mesh):
        continued = sampler.sample(
            reference.policy,
            reference.params(params),
            prefixes,
            sampler.run_key(config.seed, Purpose.ROLLOUT, stage.first),
            roll_out_config(setup),
            limits=np.where(over, 1, room),
            row_ids=len(row_ids) + row_ids,  # luck of their own, not that of the roll-in
            mesh=reference.mesh,
            at_border=watchdog.beat,
        )
    width = tokens.shape[1]
    after = np.asarray(continued.action_mask).sum(1)
    ends = np.where(over, cuts + 1, cuts + 1 + after)
    columns = np.arange(width)[None]
    zeros = np.zeros(tokens.shape, np.float32)
    whole = replace(
        rolled_in,
        tokens=np.where(columns < ends[:, None], np.asarray(continued.tokens)[:, :width], pad),
        action_mask=(columns >= begins[:, None]) & (columns < ends[:, None]),
        log_probs=zeros,
        behaviour_log_probs=zeros,
        truncated=np.where(over, rolled_in.truncated, continued.truncated),
    )
    return whole, cuts


def records(setup: Setup, round_: Round, step: int) -> list[dict[str, Any]]:
    """samples.jsonl objects of some examples: `prompt` ends where the reference took over."""

    def text(row: int, start: int, end: int) -> str:
        return setup.language.tokenizer.decode(round_.tokens[row, start:end].tolist())

    cuts = round_.first + 1
    return [
        {
            "step": step,
            "prompt": text(row, 0, cuts[row]),
            "completion": text(row, cuts[row], round_.ends[row]),
            "reward": float(round_.returns[row]),
            "parts": {},
        }
        for row in range(min(MOST_RECORDS, len(cuts)))
    ]


# --- the run folder ----------------------------------------------------------------------------------------------


def write(path: Path, round_: Round) -> None:
    """Wholly or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, **round_._asdict())
    unfinished = path.with_suffix(f".{processes.index()}.tmp")
    unfinished.write_bytes(content.getvalue())
    unfinished.replace(path)


def read(path: Path) -> tuple[Round, str]:
    """A round and the SHA-256 of its file. Raises DamagedDataError where it is missing or cannot be read."""
    try:
        content = path.read_bytes()
        with np.load(io.BytesIO(content)) as arrays:
            return Round(**{name: arrays[name] for name in Round._fields}), hashlib.sha256(content).hexdigest()
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        fix = "restore the file, or begin a new run"
        what = "a round of Q# examples cannot be read"
        raise DamagedDataError(what, where=str(path), why=str(error), fix=fix) from error
