"""Terms of a text's form: thoughts in tags, and repetition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.rewards import composed
from tpu_rl.rewards.scoring import Reward


def think_format(opened: bool = False) -> Reward:
    """Return 1 for each completion "<think>...</think>...", with one <think>, at its start, else 0.

    It is TRL 1.16's think_format_reward. Where the chat template itself opens <think>, the
    completion begins behind it: use `think_format(opened=true)`.
    """

    def score(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        del prompts
        start = "" if opened else "<think>"
        texts = [text_of(completion) for completion in completions]
        bodies = [text.removeprefix(start) if text.startswith(start) else "" for text in texts]
        return [float("<think>" not in body and "</think>" in body) for body in bodies]

    return score


def repetition(size: int = 3, penalty: float = -1.0) -> Reward:
    """Return the penalty times the share of each completion's n-grams of tokens that are repeated.

    R = penalty (1 - different n-grams / n-grams), 0 for fewer tokens than `size`
    (arXiv 2502.03373, appendix C.2). It is TRL 1.16's get_repetition_penalty_reward.
    """
    composed.require(size >= 1, f"repetition(size={size})", "use 1 or more tokens")
    composed.require(penalty <= 0, f"repetition(penalty={penalty})", "use 0 or less")

    def share(ids: Sequence[int]) -> float:
        grams = list(zip(*(ids[first:] for first in range(size)), strict=False))
        return 1 - len(set(grams)) / len(grams) if grams else 0.0

    def score(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float]:
        del prompts, completions
        # Without -0.
        return [penalty * share(ids) + 0.0 for ids in completion_ids]

    return score
