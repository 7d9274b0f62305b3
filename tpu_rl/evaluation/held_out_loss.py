"""The loss of held-out texts that a policy learns to imitate, with an interval over texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpu_rl import data
from tpu_rl.data import Row
from tpu_rl.evaluation import intervals
from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.experience.text_log_probs import TextLogProbs
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Demonstrations, Params, Rollout


def held_out_loss(
    log_probs: TextLogProbs, rows: list[Row], tokenizer: Tokenizer, max_length: int
) -> Callable[[Params], Estimate]:
    """Return a function that computes the mean negative log-prob of the learned tokens of rows, in
    nats.

    Args:
        log_probs: of the policy.
        rows: demonstrations.
        max_length: tokens of a text; longer ones are cut, as in training.
    """
    return _loss(log_probs, rows, lambda some: data.demonstrations(some, tokenizer, max_length))


def sampled_loss(
    log_probs: TextLogProbs, rows: list[Row], texts: Rollout
) -> Callable[[Params], Estimate]:
    """Return the same for texts that a teacher wrote, one for each row."""
    tokens = np.asarray(texts.tokens)
    action_mask = np.asarray(texts.action_mask)
    numbered = [{"text": number} for number in range(len(rows))]

    def to_texts(some_rows: Sequence[Row]) -> Demonstrations:
        numbers = [row["text"] for row in some_rows]
        arrays: dict[str, Any] = {
            "tokens": tokens[numbers],
            "action_mask": action_mask[numbers],
            "group_id": np.arange(len(numbers), dtype=np.int32),
            "images": None if texts.images is None else np.asarray(texts.images)[numbers],
        }
        return Demonstrations(**arrays)

    return _loss(log_probs, numbered, to_texts)


def _loss(
    log_probs: TextLogProbs, rows: list[Row], to_texts: Callable[[Sequence[Row]], Demonstrations]
) -> Callable[[Params], Estimate]:
    def loss(params: Params) -> Estimate:
        texts = [text for of_row in log_probs(params, rows, to_texts) for text in of_row]
        totals = [-float(text.sum(dtype=np.float64)) for text in texts]
        return intervals.ratio_estimate(totals, [len(text) for text in texts])

    return loss
