"""The likelihood of the reference answer as a reward: no verifier is needed.

    r(z)   = mean_t p(y*_t | x, z, y*_<t)         z: a completion of x up to the answer's mark
    reward = clip(r(z) - r(mark alone), 0, 1)     y*: the answer that the data bring

RLPR (arXiv 2506.18254, eq. 4 and 5). p is the policy's, at temperature 1, before the update. What
z does not make likelier earns nothing. A completion without the mark has the reward 0.

Deviation: RLPR drops prompts whose rewards vary little, by a moving average; for a share of the
prompts use --rollout.keep-variance-share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tpu_rl.data import Row
from tpu_rl.experience.config import LikelihoodConfig
from tpu_rl.experience.text_log_probs import TextLogProbs
from tpu_rl.experience.transforms import Transform, text_of_column
from tpu_rl.rollout.scoring import Scored, first_of_runs, place_rewards
from tpu_rl.runtime.segments import count_tokens
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Demonstrations, TrainState

NAME = "likelihood"
"""The reward's name in metrics and samples."""


def tokens_up_to(ids: Sequence[int], mark: str, tokenizer: Tokenizer) -> int | None:
    """Count the tokens that write a text up to the end of its last mark.

    None if the text lacks the mark.
    """
    end = tokenizer.decode(list(ids)).rfind(mark)
    if end < 0:
        return None
    return count_tokens(ids, end + len(mark), tokenizer.decode)


def answer_texts(rows: Sequence[Row], columns: int) -> Demonstrations:
    """Return texts [N, columns] of which only the answers count.

    Args:
        rows: `ids`, the tokens of a text, and `answer`, how many of the last ones are the answer.
            A text that is longer than `columns` counts nothing.
        columns: of the arrays.
    """
    tokens = np.zeros((len(rows), columns), np.int32)
    mask = np.zeros((len(rows), columns), bool)
    for i, row in enumerate(rows):
        length = len(row["ids"])
        if length <= columns:
            tokens[i, :length] = row["ids"]
            mask[i, length - row["answer"] : length] = True
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": mask,
        "group_id": np.arange(len(rows), dtype=np.int32),
    }
    return Demonstrations(**arrays)


def reference_likelihood(
    config: LikelihoodConfig, log_probs: TextLogProbs, tokenizer: Tokenizer, columns: int
) -> Transform:
    """Build the transform that adds `config.coef` x the reward above to each completion's reward.

    Args:
        config: the column of the answer, and its mark.
        log_probs: of the policy.
        tokenizer: encodes answers.
        columns: the largest number of tokens of a text.
    """

    def add_likelihood(scored: Scored, step: int, state: TrainState) -> Scored:
        del step
        rollout = scored.rollout
        mask = np.asarray(rollout.action_mask)
        tokens = np.asarray(rollout.tokens)
        group_starts = first_of_runs(np.asarray(rollout.group_id))
        group = np.searchsorted(group_starts, np.arange(len(mask)), side="right") - 1
        answers = [
            tokenizer.encode_continuation(text_of_column(row, config.column)) for row in scored.rows
        ]
        prompts = [tokens[start, : mask[start].argmax()].tolist() for start in group_starts]
        mark = tokenizer.encode_continuation(config.mark)
        # First the answers without a completion, one for each group.
        texts = [
            {"ids": [*prompt, *mark, *answer], "answer": len(answer)}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        marked = []
        for n, number in enumerate(group):
            ids = tokens[n][mask[n]].tolist()
            end = tokens_up_to(ids, config.mark, tokenizer)
            if end is not None:
                marked.append(n)
                answer = answers[number]
                texts.append(
                    {"ids": [*prompts[number], *ids[:end], *answer], "answer": len(answer)}
                )
        of_texts = log_probs(state.params, texts, lambda some: answer_texts(some, columns))
        means = np.array([np.exp(values).mean() if len(values) else 0.0 for (values,) in of_texts])
        reward = np.zeros(len(mask), np.float32)
        gain = means[len(prompts) :] - means[: len(prompts)][group[marked]]
        reward[marked] = np.clip(gain, 0.0, 1.0)
        # Where no other reward counts, this one makes the completion scored.
        total = np.nan_to_num(scored.rewards) + np.float32(config.coef) * reward
        return replace(
            scored,
            rewards=total,
            parts={**scored.parts, NAME: reward},
            rollout=place_rewards(rollout, total, np.asarray(rollout.rewards)),
        )

    return add_likelihood
