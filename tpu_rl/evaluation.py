"""How well a policy answers held-out problems: accuracy with its interval, pass@k, majority votes.

A problem, not a completion, is what intervals count: completions of one problem are not independent of each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from tpu_rl import environments, rewards, rollouts, sampler
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Array, Params, Policy, Rollout

ReadAnswer = Callable[[str], Hashable | None]
"""A completion's final answer; None where it gives none."""

ANSWERS: dict[rewards.Reward, ReadAnswer] = {
    rewards.arithmetic: environments.parse,
    rewards.gsm8k: rewards.final_number,
}
"""How to read the answers that a built-in reward judges."""

ANY_LENGTH = 2**31 - 1
"""The limit of prompts, in tokens, where the sampler's settings name none."""


class Estimate(NamedTuple):
    """A share of n problems with its 95 % Wilson interval."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Problem:
    """One problem with the completions that were scored. Lists have one entry a completion."""

    prompt: str
    completions: list[str]
    correct: list[bool]
    answers: list[Hashable | None]
    rows: list[int] = field(default_factory=list)
    """Their rows of the rollout."""


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found. A completion is correct where its reward is above 0.5."""

    accuracy: float
    """Share of correct completions: pass@1."""
    low: float
    high: float
    n: int
    """Problems with a scored completion."""
    well_formed: float
    """Share of completions that end before their limit and whose answer can be read."""
    mean_length: float
    """Tokens of a completion, its stop token included."""
    reads_answers: bool
    """Whether `ANSWERS` knows the reward: else there is no majority vote, and well formed means ended."""
    errors: list[str]
    """What the reward function failed on; those completions are left out."""
    problems: list[Problem]
    rollout: Rollout = field(compare=False, repr=False)
    """All completions, as sampled: arrays, which do not compare."""


def evaluate(
    policy: Policy,
    params: Params,
    tokenizer: Tokenizer,
    rows: Sequence[dict[str, Any]],
    reward: rewards.Reward,
    config: sampler.SamplerConfig,
    key: Array,
    *,
    mesh: Mesh | None = None,
    stop_at: sampler.StopAt | None = None,
    at_border: Callable[[], None] | None = None,
    reward_name: str = "reward",
    max_fault_share: float = rewards.DEFAULT_LIMITS.fault_share,
) -> Evaluation:
    """Answers each row's prompt `config.samples_per_prompt` times and scores the completions.

    The same key gives the same luck, so that what differs between two evaluations is the model. `reward_name`
    is for messages. Raises InputError where it fails on a larger share of the completions than `max_fault_share`.
    """

    def generate(prompts: list[list[int]], row_ids: np.ndarray, on_finished: sampler.OnFinished | None) -> Rollout:
        looks: dict[str, Any] = {"on_finished": on_finished, "stop_at": stop_at, "at_border": at_border}
        return sampler.sample(policy, params, prompts, key, config, row_ids=row_ids, mesh=mesh, **looks)

    group = config.samples_per_prompt
    limit = config.prompt_length or ANY_LENGTH
    judges = {reward_name: reward}
    ids = np.arange(len(rows) * group)
    scored = rollouts.roll_out(list(rows), ids, generate, tokenizer, judges, limit, max_fault_share)
    read = ANSWERS.get(reward)
    answers = [read(completion) if read else None for completion in scored.completions]
    ended = ~np.asarray(scored.rollout.truncated)
    readable = np.array([read is None or answer is not None for answer in answers])
    problems = []
    for first in range(0, len(answers), group):
        judged = [i for i in range(first, first + group) if np.isfinite(scored.rewards[i])]
        if judged:
            problems.append(
                Problem(
                    prompt=scored.prompts[first],
                    completions=[scored.completions[i] for i in judged],
                    correct=[bool(scored.rewards[i] > 0.5) for i in judged],
                    answers=[answers[i] for i in judged],
                    rows=judged,
                )
            )
    accuracy = estimate([float(np.mean(problem.correct)) for problem in problems])
    return Evaluation(
        accuracy=accuracy.value,
        low=accuracy.low,
        high=accuracy.high,
        n=accuracy.n,
        well_formed=float(np.mean(ended & readable)),
        mean_length=float(scored.lengths.mean()),
        reads_answers=read is not None,
        errors=scored.errors,
        problems=problems,
        rollout=scored.rollout,
    )


def pass_at(problems: Sequence[Problem], k: int) -> Estimate:
    """Chance that one of k completions is correct, over the problems with at least k."""
    return estimate([pass_at_k(len(p.correct), sum(p.correct), k) for p in problems if len(p.correct) >= k])


def majority_vote(problems: Sequence[Problem]) -> Estimate:
    """Share of problems whose most frequent answer is correct (maj@k with all k completions)."""
    return estimate([float(majority(problem.answers, problem.correct)) for problem in problems])


def best_of(problems: Sequence[Problem], scores: Sequence[Sequence[float]]) -> Estimate:
    """Share of problems whose completion of the highest score is correct (best of n); ties go to the first."""
    return estimate([float(p.correct[int(np.argmax(s))]) for p, s in zip(problems, scores, strict=True)])


def weighted_vote(problems: Sequence[Problem], scores: Sequence[Sequence[float]]) -> Estimate:
    """Share of problems whose answer of the largest total score is correct: a majority vote with a say by score."""
    return estimate([float(weighted(p.answers, p.correct, s)) for p, s in zip(problems, scores, strict=True)])


# --- statistics --------------------------------------------------------------------------------------------------


def estimate(shares: Sequence[float]) -> Estimate:
    """The mean of a number in [0, 1] for each problem; no problem at all tells nothing: NaN from 0 to 1."""
    n = len(shares)
    value = math.fsum(shares) / n if n else math.nan
    return Estimate(value, *wilson(math.fsum(shares), n), n)


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of n trials (E. B. Wilson, JASA 22, 1927). `successes` may be fractional.

    A sum of numbers in [0, 1] varies at most as much as a count of the same mean, so the interval is then a safe one.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} trials")
    if n == 0:
        return 0.0, 1.0
    z = 1.959963984540054  # the normal distribution's 97.5 % quantile
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n completions, drawn without replacement, hold one of the `correct`: unbiased for pass@k.

    1 - C(n - correct, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} completions, {correct} correct")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> bool:
    """Whether the most frequent answer is correct; of equally frequent ones the first counts, and None never votes."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return correct[list(answers).index(winner)]


def weighted(answers: Sequence[Hashable | None], correct: Sequence[bool], scores: Sequence[float]) -> bool:
    """Whether the answer of the largest total score is correct; of equal ones the first counts, None never votes."""
    votes: dict[Hashable, float] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0.0) + score
    return bool(votes) and correct[list(answers).index(max(votes, key=lambda answer: votes[answer]))]
