"""Accuracy on held-out problems, with intervals: pass@1, pass@k, majority votes, best of n.

Intervals count problems, not completions, because completions of one problem are not independent
of each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tpu_rl import rewards
from tpu_rl.data import Row
from tpu_rl.evaluation import calibration
from tpu_rl.evaluation.calibration import Calibration
from tpu_rl.evaluation.intervals import Estimate, estimate, mean_estimate
from tpu_rl.rewards import AnswerReaders, ReadGroups
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.scoring import by_episode
from tpu_rl.types import Params, Rollout

ANY_LENGTH = 2**31 - 1
"""A limit for the tokens of prompts that limits nothing."""


@dataclass(frozen=True)
class Problem:
    """One problem and its scored completions. Lists have one entry per completion."""

    prompt: str
    completions: list[str]
    correct: list[bool]
    answers: list[Hashable | None]
    rows: list[int] = field(default_factory=list)
    """Their rows in the rollout."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    """Name of a reward -> its values; NaN where it has none."""


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`. A completion is correct if its first reward is above 0.5."""

    is_graded: bool
    """True if the first reward gave other values than 0 and 1, or -1 and 1. Then it says how good
    a completion is and not whether it is right: report `reward`, not `accuracy`."""
    accuracy: Estimate
    """Share of correct completions: pass@1. It counts problems with a scored completion."""
    reward: Estimate
    """The mean of the reward that says what is correct: of the completions of a problem, and then
    of the problems."""
    rewards: dict[str, Estimate]
    """The mean of each reward function, by name."""
    total: Estimate
    """The mean of the total of all reward terms."""
    well_formed: float
    """Share of completions that end before their limit and whose answer can be read."""
    mean_length: float
    """Mean number of tokens per completion, its stop token included."""
    reads_answers: bool
    """True if answers can be read. If not, there is no majority vote, and "well formed" means
    "ended"."""
    calibration: Calibration | None
    """Of the completions that state a confidence; None if none does, or if rewards are graded."""
    errors: list[str]
    """Messages of the reward function's failures. The completions it failed on are left out."""
    problems: list[Problem]
    rollout: Rollout = field(compare=False, repr=False)
    """All completions as sampled. Arrays, which do not compare."""


def evaluate(
    engine: Engine, params: Params, rows: Sequence[Row], readers: AnswerReaders = AnswerReaders()
) -> Evaluation:
    """Answer each row's prompt with a group of completions, and score them.

    An engine with `Purpose.EVALUATION` answers with the same random keys each time, so that what
    differs between two evaluations is the model.

    Args:
        engine: its group size is the number of completions per problem. The first of its reward
            functions says which completions are correct; the others are measured.
        rows: the problems, each with a `prompt`.
        readers: read final answers, for majority votes. Those of whole groups are asked only where
            a problem has several completions.

    Raises:
        InputError: if the reward function fails on too large a share of the completions.
    """
    scored = by_episode(engine.roll_out(params, RolloutRequest(list(rows), step=0)))
    judged = next(iter(scored.parts.values()), scored.rewards)
    group_size = len(scored.completions) // len(rows)
    errors = list(scored.errors)
    read_groups = readers.read_groups if group_size > 1 else None
    reads_answers = readers.read_answer is not None or read_groups is not None
    answers: list[Hashable | None] = [None] * len(scored.completions)
    texts = scored.completions
    if scored.episodes is not None:
        texts = [rewards.text_of(messages) for messages in scored.episodes.messages]
    if read_groups is not None:
        answers = _group_answers(read_groups, texts, group_size, errors)
    elif readers.read_answer is not None:
        answers = [readers.read_answer(text) for text in texts]
    ended = ~np.asarray(scored.rollout.truncated)
    readable = np.array([not reads_answers or answer is not None for answer in answers])
    problems = []
    for first in range(0, len(answers), group_size):
        scored_rows = [row for row in range(first, first + group_size) if np.isfinite(judged[row])]
        if scored_rows:
            problems.append(
                Problem(
                    prompt=scored.prompts[first],
                    completions=[scored.completions[row] for row in scored_rows],
                    correct=[bool(judged[row] > 0.5) for row in scored_rows],
                    answers=[answers[row] for row in scored_rows],
                    rows=scored_rows,
                    parts={
                        name: [float(values[row]) for row in scored_rows]
                        for name, values in scored.parts.items()
                    },
                )
            )
    is_graded = _is_graded(judged[np.isfinite(judged)])
    return Evaluation(
        is_graded=is_graded,
        accuracy=estimate([float(np.mean(problem.correct)) for problem in problems]),
        reward=_mean_reward(judged, group_size),
        rewards={name: _mean_reward(values, group_size) for name, values in scored.parts.items()},
        total=_mean_reward(scored.rewards, group_size),
        well_formed=float(np.mean(ended & readable)),
        mean_length=float(scored.lengths.mean()),
        reads_answers=reads_answers,
        calibration=None if is_graded else calibration.of_completions(texts, judged),
        errors=errors,
        problems=problems,
        rollout=scored.rollout,
    )


def _is_graded(rewards: np.ndarray) -> bool:
    """Return True unless all rewards are 0 or 1, or all are -1 or 1."""
    return not (np.isin(rewards, (0, 1)).all() or np.isin(rewards, (-1, 1)).all())


def _mean_reward(values: np.ndarray, group_size: int) -> Estimate:
    """Return the mean over problems of the mean of a problem's values; NaN is no value."""
    groups = [group[np.isfinite(group)] for group in values.reshape(-1, group_size)]
    means = [float(group.mean(dtype=np.float64)) for group in groups if len(group)]
    # Means of zeros and ones vary at most as much as zeros and ones do.
    is_share = np.isin(values[np.isfinite(values)], (0, 1)).all()
    return estimate(means) if is_share and means else mean_estimate(means)


def _group_answers(
    read_groups: ReadGroups, completions: Sequence[str], group_size: int, errors: list[str]
) -> list[Hashable | None]:
    """Return the answers of all completions; add a message to `errors` for each failure."""
    groups = [
        completions[first : first + group_size] for first in range(0, len(completions), group_size)
    ]
    answers: list[Hashable | None] = []
    for group, group_answers in zip(groups, read_groups(groups), strict=True):
        if isinstance(group_answers, Exception):
            errors.append(f"the answers of a problem do not vote: {group_answers}")
            answers += [None] * len(group)
        else:
            answers += [None if isinstance(a, Exception) else a for a in group_answers]
    return answers


def pass_at(problems: Sequence[Problem], k: int) -> Estimate:
    """Return pass@k: the chance that one of k completions is correct.

    Only problems with at least k completions count.
    """
    return estimate(
        [
            pass_at_k(len(problem.correct), sum(problem.correct), k)
            for problem in problems
            if len(problem.correct) >= k
        ]
    )


def majority_vote(problems: Sequence[Problem]) -> Estimate:
    """Return the share of problems whose most frequent answer is correct: maj@k."""
    return estimate([float(majority(problem.answers, problem.correct)) for problem in problems])


def best_of(problems: Sequence[Problem], scores: Sequence[Sequence[float]]) -> Estimate:
    """Return the share of problems whose completion with the highest score is correct.

    `scores` has a score for each completion of each problem. The first of equal scores counts.
    """
    return estimate(
        [
            float(problem.correct[int(np.argmax(problem_scores))])
            for problem, problem_scores in zip(problems, scores, strict=True)
        ]
    )


def weighted_vote(problems: Sequence[Problem], scores: Sequence[Sequence[float]]) -> Estimate:
    """Return the share of problems whose answer with the largest total score is correct."""
    return estimate(
        [
            float(weighted(problem.answers, problem.correct, problem_scores))
            for problem, problem_scores in zip(problems, scores, strict=True)
        ]
    )


def judged(problems: Sequence[Problem], judge: str) -> tuple[list[list[float]], list[list[float]]]:
    """Return (scores for `best_of`, weights for `weighted_vote`) of a reward for each problem.

    A completion without a value is chosen last and has no weight. Weights are the values, or, if
    any value is negative, exp(value - the problem's largest).
    """
    values = [np.array(problem.parts[judge]) for problem in problems]
    scores = [np.nan_to_num(row, nan=-np.inf) for row in values]
    is_weight = all(np.nanmin(row, initial=0.0) >= 0 for row in values)
    weights = [
        np.nan_to_num(row) if is_weight else np.exp(row - max(row.max(), np.finfo(float).min))
        for row in (values if is_weight else scores)
    ]
    return [row.tolist() for row in scores], [row.tolist() for row in weights]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the chance that k of n completions, drawn without replacement, include a correct one.

    This estimator of pass@k is unbiased: 1 - C(n - correct, k) / C(n, k) (Chen et al. 2021, arXiv
    2107.03374, equation 1). Raises ValueError if `correct` or `k` is not within n.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} completions, {correct} correct")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> bool:
    """Return True if the most frequent answer is correct.

    The first of equally frequent answers counts. None does not vote.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return correct[list(answers).index(winner)]


def weighted(
    answers: Sequence[Hashable | None], correct: Sequence[bool], scores: Sequence[float]
) -> bool:
    """Return True if the answer with the largest total score is correct.

    The first of equal totals counts. None does not vote.
    """
    votes: dict[Hashable, float] = {}
    for answer, answer_score in zip(answers, scores, strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0.0) + answer_score
    if not votes:
        return False
    winner = max(votes, key=lambda answer: votes[answer])
    return correct[list(answers).index(winner)]
