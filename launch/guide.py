"""A model guided by a Q# run: accuracy against KL for each coefficient, and q as a reward model. Part of `evaluate`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launch import q_examples, stored_runs
from launch.export import load_run
from launch.roles import Language, Select
from tpu_rl import evaluation, guidance, models, rewards, sampler
from tpu_rl.algos import QSharpConfig
from tpu_rl.errors import InputError
from tpu_rl.evaluation import Estimate, Evaluation
from tpu_rl.report import GUIDED_FILE, write_report
from tpu_rl.types import Array, Model, Params, Policy, Rollout

POLICY_PARAMS, Q_PARAMS = Select("policy"), Select("q")

NAMES = {"q_sharp": "Q#", "cd": "CD", "fudge": "FUDGE"}


class Guided(NamedTuple):
    """A reference with the q that guides it."""

    models: dict[str, Model]
    """"policy" and "q"."""
    params: Params
    """Of both, by the same names."""
    algorithm: QSharpConfig

    @property
    def reference(self) -> Policy:
        return models.policy(self.models["policy"], POLICY_PARAMS)

    @property
    def q(self) -> Policy:
        return models.policy(self.models["q"], Q_PARAMS)


class Line(NamedTuple):
    """One way to answer, and how well it did."""

    name: str
    kl_coef: float | None
    accuracy: Estimate
    majority: Estimate | None
    """Of all samples of a problem; None where answers cannot be read."""
    kl: float
    """Nats a completion: the sum over its tokens of KL(sampled policy || reference), over the whole vocabulary and
    before any truncation; mean over completions."""
    length: float
    """Tokens of a completion."""


def load(guide: str, language: Language, params: Params) -> Guided:
    """q of a Q# run at its newest checkpoint, beside the model to guide."""
    setup, trained, step = load_run(guide)
    algorithm = setup.config.algorithm
    if not isinstance(algorithm, QSharpConfig):
        raise InputError("not a run of Q#", where=f"--guide {guide}", fix="train one: launch/run.py arithmetic_q_sharp")
    ours, theirs = (one.tokenizer.vocab_size for one in (language, setup.language))
    if ours != theirs:
        why = f"their vocabularies have {ours} and {theirs} tokens"
        raise InputError("q cannot score this model's tokens", where="--guide", why=why, fix="train q for this model")
    print(f"guided by {guide}, step {step}")
    both = {"policy": language.model, "q": setup.models["q"]}
    return Guided(both, {"policy": params, "q": setup.params_of("q")(trained)}, algorithm)


class Task(NamedTuple):
    """What is answered, and how."""

    language: Language
    problems: list[dict[str, Any]]
    reward: rewards.Reward
    reward_name: str
    max_fault_share: float
    sampling: sampler.SamplerConfig
    key: Array
    mesh: Mesh


def sweep(
    guided: Guided, task: Task, kl_coefs: Sequence[float], baselines: Sequence[guidance.Method]
) -> tuple[list[Line], list[tuple[str, Estimate]]]:
    """(the reference, then Q# and the baselines at each coefficient; what q is worth as a judge of the reference).

    All draw with the same luck.
    """
    reference = answer(task, guided.reference, guided.params)
    lines = [line("reference", None, reference, 0.0)]
    for method in ("q_sharp", *baselines):
        policy = q_examples.guided_policy(guided.reference, guided.q, guided.algorithm, method)
        for kl_coef in kl_coefs if method != "fudge" else (1.0,):
            params = guidance.with_kl_coef(guided.params, kl_coef)
            found = answer(task, policy, params)
            kl = completion_kl(policy, guided.reference, params, found.rollout, task.sampling)
            lines.append(line(NAMES[method], kl_coef if method != "fudge" else None, found, float(kl.mean())))
    return lines, judge(guided, reference, task.sampling)


def answer(task: Task, policy: Policy, params: Params) -> Evaluation:
    how: dict[str, Any] = {"reward_name": task.reward_name, "max_fault_share": task.max_fault_share, "mesh": task.mesh}
    tokenizer = task.language.tokenizer
    return evaluation.evaluate(policy, params, tokenizer, task.problems, task.reward, task.sampling, task.key, **how)


def line(name: str, kl_coef: float | None, found: Evaluation, kl: float) -> Line:
    majority = evaluation.majority_vote(found.problems) if found.reads_answers else None
    accuracy = Estimate(found.accuracy, found.low, found.high, found.n)
    return Line(name, kl_coef, accuracy, majority, kl, found.mean_length)


def completion_kl(
    policy: Policy, reference: Policy, params: Params, rollout: Rollout, how: sampler.SamplerConfig
) -> np.ndarray:
    """[N] nats: KL(policy || reference) summed over each completion's tokens."""
    begins, ends = spans(rollout)
    width = np.asarray(rollout.tokens).shape[1] - how.max_new_tokens

    def part(tokens: Array, begins: Array, ends: Array) -> Array:
        return guidance.token_kl(policy, reference, params, tokens, begins, ends, width, how.temperature).sum(1)

    return in_waves(part, rollout, begins, ends, how.max_rows)


def spans(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """[N] each: column of a completion's first token, and the one behind its last."""
    mask = np.asarray(rollout.action_mask)
    return mask.argmax(1), mask.shape[1] - mask[:, ::-1].argmax(1)


def in_waves(function: Any, rollout: Rollout, begins: np.ndarray, ends: np.ndarray, size: int) -> np.ndarray:
    """`function` (tokens, begins, ends) -> [rows], so many rows at a time: the last wave is filled up."""
    rows, found = len(begins), []
    for start in range(0, rows, min(size, rows)):
        taken = np.minimum(np.arange(start, start + min(size, rows)), rows - 1)
        found.append(function(*(jnp.asarray(np.asarray(x)[taken]) for x in (rollout.tokens, begins, ends))))
    return np.concatenate(found)[:rows]


def judge(guided: Guided, found: Evaluation, how: sampler.SamplerConfig) -> list[tuple[str, Estimate]]:
    """q as a reward model: what it says of the reference's completions at their last token chooses among them."""
    algorithm = guided.algorithm
    support, reads = algorithm.histogram, "own" if algorithm.q_type == "v" else "previous"
    begins, ends = spans(found.rollout)

    def part(tokens: Array, begins: Array, ends: Array) -> Array:
        del begins
        return guidance.last_return(guided.q, support, reads, guided.params, tokens, ends)

    scores = in_waves(part, found.rollout, begins, ends, how.max_rows)
    of_problems = [[float(scores[row]) for row in problem.rows] for problem in found.problems]
    size = how.samples_per_prompt
    if size == 1:
        return []
    lines = [(f"best of {size} by q", evaluation.best_of(found.problems, of_problems))]
    if found.reads_answers:
        lines.append((f"maj@{size} weighted by q", evaluation.weighted_vote(found.problems, of_problems)))
    return lines


def record(run_dir: str, lines: Sequence[Line], judged: Sequence[tuple[str, Estimate]]) -> None:
    """Writes guided.json into q's run folder, and its report anew."""
    folder = stored_runs.fetched(run_dir)
    finite = [one._replace(kl_coef=None if one.kl_coef == math.inf else one.kl_coef) for one in lines]
    found = {"lines": [one._asdict() for one in finite], "judge": judged}
    (folder / GUIDED_FILE).write_text(json.dumps(found), encoding="utf-8")
    write_report(folder)
    stored_runs.write_back(run_dir, folder, (GUIDED_FILE, "report.html"))


def report(title: str, lines: Sequence[Line], judged: Sequence[tuple[str, Estimate]], samples: int) -> None:
    """A table of the lines, then what q is worth as a judge."""
    columns = ("", "kl coef", "pass@1", "95 % interval", *([f"maj@{samples}"] if samples > 1 else []), "KL", "tokens")
    table = Table(*columns, title=escape(title))
    for one in lines:
        kl_coef = "" if one.kl_coef is None else f"{one.kl_coef:g}"
        votes = [] if samples == 1 else ["" if one.majority is None else f"{100 * one.majority.value:.1f} %"]
        interval = f"{100 * one.accuracy.low:.1f} to {100 * one.accuracy.high:.1f}"
        cells = (f"{100 * one.accuracy.value:.1f} %", interval, *votes, f"{one.kl:.3f}", f"{one.length:.1f}")
        table.add_row(one.name, kl_coef, *cells)
    console = Console()
    console.print(table)
    console.print("KL: nats a completion, to the model alone, over the whole vocabulary and before any truncation")
    for name, found in judged:
        console.print(f"{name}: {100 * found.value:.1f} % ({100 * found.low:.1f} to {100 * found.high:.1f})")
