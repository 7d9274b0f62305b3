"""Rewards of stated confidence. Under proper scoring rules it pays to state the true chance.

For an answer that is right with the chance q, the expected reward of a stated p is greatest at
p = q (Rewarding Doubt, arXiv 2503.02623; Brier, 1950).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.rewards.scoring import Reward
from tpu_rl.rewards.spans import read_confidence
from tpu_rl.rewards.verifier import with_settings
from tpu_rl.verifiers import composed
from tpu_rl.verifiers.math_verify_pool import math_equivalent

_SHIFT = 3.4539
_SCALE = 3.4529
"""(s + 3.4539) / 3.4529 maps ln .001 and ln .999 to -1 and 1, as in the paper's program."""
_LEAST = -30.0


def doubt(of: Reward = math_equivalent) -> Reward:
    """Return 10 times a logarithmic score of each completion's stated confidence, -10 to 12.5.

    p = clip(confidence, .001, .999); s = ln p where the reward `of` is above 0.5, else ln(1 - p);
    R = 10 ((s + 3.4539) / 3.4529 + .25 if right); without a readable confidence R = -30
    (Rewarding Doubt, arXiv 2503.02623). Readable are "Confidence: 8" (of 10), "8/10", "80%" and
    "0.8"; the last one counts.
    """

    def reward(p: float | None, right: bool) -> float:
        if p is None:
            return _LEAST
        p = min(max(p, 0.001), 0.999)
        s = math.log(p if right else 1 - p)
        return 10 * ((s + _SHIFT) / _SCALE + 0.25 * right)

    return _scored(of, reward)


def brier(of: Reward = math_equivalent) -> Reward:
    """Return -(p - right)^2 of each completion's stated confidence p; -1 without a readable one.

    `right` is 1 where the reward `of` is above 0.5, else 0. With that reward as a second term the
    total is right - (p - right)^2 (RLCR, arXiv 2507.16806). The forms of a confidence are those of
    `doubt`.
    """

    def reward(p: float | None, right: bool) -> float:
        return -1.0 if p is None else -((p - right) ** 2)

    return _scored(of, reward)


def _scored(of: Reward, reward: Any) -> Reward:
    def combine(
        values: Sequence[float | None], prompts: Sequence[Any], completions: Sequence[Any], **_: Any
    ) -> list[float]:
        return [
            reward(read_confidence(text_of(completion)), value is not None and value > 0.5)
            for value, completion in zip(values, completions, strict=True)
        ]

    return composed.on(of, combine)


VERIFIERS = {"brier": with_settings(brier), "doubt": with_settings(doubt)}
