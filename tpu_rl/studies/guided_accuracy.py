"""Accuracy against KL of a reference that q guides, and q as a reward model.

See `tpu_rl.sampler.guided_policy` for the guided policy itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tpu_rl import sampler
from tpu_rl.evaluation import answer_accuracy
from tpu_rl.evaluation.answer_accuracy import Evaluation
from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.losses.return_distributions import Method, Support
from tpu_rl.sampler import guided_policy
from tpu_rl.sampler.guided_policy import Reads
from tpu_rl.types import Array, Params, Policy, Rollout

NAMES = {"q_sharp": "Q#", "cd": "CD", "fudge": "FUDGE"}


class Guided(NamedTuple):
    """A reference with the q that guides it."""

    reference: Policy
    q: Policy
    params: Params
    """The tree that both read."""
    guide: Callable[[Method], Policy]
    """Return the guided reference; it reads `with_kl_coef` of the params."""
    support: Support | None
    """The returns of q's histogram; None if q is Bernoulli."""
    reads: Reads


class Line(NamedTuple):
    """One way to answer, and its accuracy."""

    name: str
    kl_coef: float | None
    accuracy: Estimate
    reward: Estimate
    """Mean of the reward that says what is correct."""
    majority: Estimate | None
    """Accuracy of the majority vote over all samples of a problem; None if answers cannot be read.
    """
    kl: float
    """Nats per completion: the sum over its tokens of KL(sampled policy || reference), over the
    whole vocabulary and before any truncation; the mean over completions."""
    length: float
    """Mean number of tokens per completion."""
    problem_accuracy: list[float]
    """Accuracy of each problem. All lines have the same problems, so methods can be compared in
    pairs."""
    problem_kl: list[float]
    """KL of each problem: the mean over its completions."""


Answer = Callable[[Policy, Params], Evaluation]
"""Answers the problems with a policy, by the same random keys each time."""


def sweep(
    guided: Guided,
    answer: Answer,
    config: sampler.SamplerConfig,
    kl_coefs: Sequence[float],
    baselines: Sequence[Method],
) -> tuple[list[Line], list[tuple[str, Estimate]]]:
    """Answer with the reference, then with Q# and the baselines at each coefficient.

    `config` is that of the sampler. Returns (a line for each, the accuracy of q as a judge of the
    reference's completions).
    """
    reference = answer(guided.reference, guided.params)
    no_kl = np.zeros(len(reference.rollout.tokens))
    lines = [make_line("reference", None, reference, no_kl)]
    for method in ("q_sharp", *baselines):
        policy = guided.guide(method)
        has_coef = method != "fudge"
        for kl_coef in kl_coefs if has_coef else (1.0,):
            params = guided_policy.with_kl_coef(guided.params, kl_coef)
            result = answer(policy, params)
            kl = completion_kl(policy, guided.reference, params, result.rollout, config)
            shown_coef = kl_coef if has_coef else None
            lines.append(make_line(NAMES[method], shown_coef, result, kl))
    return lines, judge(guided, reference, config)


def make_line(name: str, kl_coef: float | None, result: Evaluation, kl: np.ndarray) -> Line:
    """Return the line of an evaluation; `kl` [N] is that of its completions."""
    majority = answer_accuracy.majority_vote(result.problems) if result.reads_answers else None
    return Line(
        name,
        kl_coef,
        result.accuracy,
        result.reward,
        majority,
        float(kl.mean()),
        result.mean_length,
        [float(np.mean(problem.correct)) for problem in result.problems],
        [float(np.mean(kl[problem.rows], dtype=np.float64)) for problem in result.problems],
    )


def completion_kl(
    policy: Policy,
    reference: Policy,
    params: Params,
    rollout: Rollout,
    config: sampler.SamplerConfig,
) -> np.ndarray:
    """Return [N] nats: KL(policy || reference), summed over the tokens of each completion."""
    begins, ends = spans(rollout)
    width = np.asarray(rollout.tokens).shape[1] - config.max_new_tokens

    def batch_kl(tokens: Array, begins: Array, ends: Array) -> Array:
        token_kl = guided_policy.token_kl(
            policy, reference, params, tokens, begins, ends, width, config.temperature
        )
        return token_kl.sum(1)

    return in_batches(batch_kl, rollout, begins, ends, config.max_num_seqs)


def spans(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Return [N] each: index of a completion's first token, and the index behind its last."""
    mask = np.asarray(rollout.action_mask)
    return mask.argmax(1), mask.shape[1] - mask[:, ::-1].argmax(1)


def in_batches(
    function: Callable[[Array, Array, Array], Array],
    rollout: Rollout,
    begins: np.ndarray,
    ends: np.ndarray,
    batch_size: int,
) -> np.ndarray:
    """Return function(tokens, begins, ends) of all rows, computed `batch_size` rows at a time.

    The last batch repeats its last row, to keep its shape.
    """
    num_rows = len(begins)
    size = min(batch_size, num_rows)
    tokens = np.asarray(rollout.tokens)
    results = []
    for start in range(0, num_rows, size):
        rows = np.minimum(np.arange(start, start + size), num_rows - 1)
        arrays = (tokens[rows], begins[rows], ends[rows])
        results.append(function(*(jnp.asarray(array) for array in arrays)))
    return np.concatenate(results)[:num_rows]


def judge(
    guided: Guided, reference: Evaluation, config: sampler.SamplerConfig
) -> list[tuple[str, Estimate]]:
    """Return the accuracy of q as a reward model that chooses among the reference's completions.

    Its score of a completion is the mean return that it predicts at the last token.
    """
    num_samples = config.samples_per_prompt
    if num_samples == 1:
        return []
    begins, ends = spans(reference.rollout)

    def batch_scores(tokens: Array, begins: Array, ends: Array) -> Array:
        return guided_policy.last_return(
            guided.q, guided.support, guided.reads, guided.params, tokens, ends
        )

    scores = in_batches(batch_scores, reference.rollout, begins, ends, config.max_num_seqs)
    problems = reference.problems
    problem_scores = [[float(scores[row]) for row in problem.rows] for problem in problems]
    lines = [(f"best of {num_samples} by q", answer_accuracy.best_of(problems, problem_scores))]
    if reference.reads_answers:
        vote = answer_accuracy.weighted_vote(problems, problem_scores)
        lines.append((f"maj@{num_samples} weighted by q", vote))
    return lines
