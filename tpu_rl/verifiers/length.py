"""Terms of length: the cosine of a length, bounded effort, and short answers in easy groups."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpu_rl.rewards.scoring import Reward
from tpu_rl.rewards.verifier import with_settings
from tpu_rl.verifiers import composed
from tpu_rl.verifiers.math_verify_pool import math_equivalent


def cosine_length(
    of: Reward = math_equivalent,
    max_tokens: int = 1024,
    short_right: float = 1.0,
    long_right: float = 0.5,
    short_wrong: float = -1.0,
    long_wrong: float = -0.5,
) -> Reward:
    """Return a cosine from a short completion's reward to a long one's, for right ones and others.

    R = long + (short - long) (1 + cos(pi min(tokens / max_tokens, 1))) / 2, with the two bounds of
    right completions where the reward `of` is above 0.5, else with those of wrong ones
    (arXiv 2502.03373, appendix C.1). It is TRL 1.16's get_cosine_scaled_reward, for any reward.
    """
    composed.require(max_tokens >= 1, f"cosine_length(max_tokens={max_tokens})", "use 1 or more")

    def combine(
        values: Sequence[float | None], *_: Any, token_counts: Sequence[int], **__: Any
    ) -> list[float]:
        rewards = []
        for value, count in zip(values, token_counts, strict=True):
            right = value is not None and value > 0.5
            short, long = (short_right, long_right) if right else (short_wrong, long_wrong)
            cosine = math.cos(math.pi * min(count / max_tokens, 1.0))
            rewards.append(long + 0.5 * (short - long) * (1.0 + cosine))
        return rewards

    return composed.on(of, combine)


def effort(max_tokens: int = 1024) -> Reward:
    """Return min(tokens / max_tokens, 1) of each completion.

    A bounded bonus for search: with a weight below 1 beside a reward of 0 and 1, no wrong
    completion beats a right one (RLSP, arXiv 2502.06773, where the effort may also be a judge's).
    With a negative weight and a gate, as in "-0.5*effort?math>0.5", right completions should be
    short, and wrong ones pay nothing.
    """
    composed.require(max_tokens >= 1, f"effort(max_tokens={max_tokens})", "use 1 or more")

    def score(
        prompts: Sequence[Any], completions: Sequence[Any], *, token_counts: Sequence[int], **_: Any
    ) -> list[float]:
        return [min(count / max_tokens, 1.0) for count in token_counts]

    return score


def easy_length(
    of: Reward = math_equivalent, accuracy: float = 0.75, coefficient: float = 0.5
) -> Reward:
    """Return the reward `of`, less for long right completions in groups that are easy.

    In a group whose share of right completions (above 0.5) is at least `accuracy`, a right one gets
    value - coefficient sigmoid((tokens - mean) / std), with mean and deviation over the group's
    right completions. All others keep their value (after GRPO-lambda, arXiv 2505.18086). The paper
    takes the best groups of each batch; a threshold does not depend on which groups are together.
    """
    setting = f"easy_length(accuracy={accuracy})"
    composed.require(0 < accuracy <= 1, setting, "use a share above 0")

    def combine(
        values: Sequence[float | None],
        *_: Any,
        token_counts: Sequence[int],
        group: Sequence[int],
        **__: Any,
    ) -> list[float]:
        rewards = [math.nan if value is None else value for value in values]
        members = defaultdict(list)
        for row, number in enumerate(group):
            if values[row] is not None:
                members[number].append(row)
        for rows in members.values():
            right = [row for row in rows if rewards[row] > 0.5]
            if len(right) < accuracy * len(rows):
                continue
            lengths = np.array([token_counts[row] for row in right], np.float64)
            # z = 0 where all right completions are equally long.
            z = (lengths - lengths.mean()) / (lengths.std() or 1.0)
            for row, shaped in zip(right, coefficient / (1 + np.exp(-z)), strict=True):
                rewards[row] -= float(shaped)
        return rewards

    return dataclasses.replace(composed.on(of, combine), whole_batch=True)


VERIFIERS = {
    "cosine_length": with_settings(cosine_length),
    "easy_length": with_settings(easy_length),
    "effort": with_settings(effort),
}
