"""The likelihood of the reference answer as a reward: no verifier is needed.

With the answer y* that the data bring, a completion z_i of x up to the answer's mark, and z_0 the
mark alone,

    l_it = log p(y*_t | x, z_i, y*_<t),   c_i = mean_t exp l_it

    gain        clip(c_i - c_0, 0, 1)                              RLPR, arXiv 2506.18254, eq. 4, 5
    spread      sum_t w_t (l_it - l_0t),  w_t = s_t / sum_t s_t    R3 of DRO, arXiv 2506.13351
    consistent  R_i if R_i > 1/2 and c_i >= mean c of such i,      GRPO-CARE, arXiv 2506.16141
                otherwise 0

s_t is the standard deviation of l_it over the group's completions with the mark; without any
spread, w_t is uniform. R_i is the return of the other rewards. p is the policy's or the
reference's, at temperature 1, before the update. A completion without the mark has the reward 0;
with `spread` the group's smallest, if that is below 0.

Deviations: RLPR and DRO drop prompts whose rewards vary little; for a share of the prompts use
--rollout.keep-variance-share. GRPO-CARE's reference is a moving average, as with
--algorithm.reference-reset-share below 1. DRO's weights may also be a threshold on s_t; here they
are s_t itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tpu_rl.data import Row
from tpu_rl.data.encoding import stacked_pieces
from tpu_rl.experience.config import LikelihoodConfig
from tpu_rl.experience.text_log_probs import TextLogProbs
from tpu_rl.experience.transforms import Transform, text_of_column
from tpu_rl.rollout.scoring import Scored, first_of_runs, number_of_run, place_rewards
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
        rows: `ids`, the tokens of a text, `answer`, how many of the last ones are the answer, and
            `images`, the pieces of the images of `ids`, if there are any. A text that is longer
            than `columns` counts nothing.
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
        "images": stacked_pieces([row.get("images") for row in rows]),
    }
    return Demonstrations(**arrays)


def _gain(found: np.ndarray, alone: np.ndarray, returns: np.ndarray) -> np.ndarray:
    return np.clip(np.exp(found).mean(1) - np.exp(alone).mean(), 0.0, 1.0)


def _spread(found: np.ndarray, alone: np.ndarray, returns: np.ndarray) -> np.ndarray:
    spreads = found.std(0)
    weights = spreads / spreads.sum() if spreads.any() else np.full(len(alone), 1 / len(alone))
    return (found - alone) @ weights


def _consistent(found: np.ndarray, alone: np.ndarray, returns: np.ndarray) -> np.ndarray:
    likelihood = np.exp(found).mean(1)
    is_right = returns > 0.5
    threshold = likelihood[is_right].mean() if is_right.any() else np.inf
    return np.where(is_right & (likelihood >= threshold), returns, 0.0)


_FORMS = {"gain": _gain, "spread": _spread, "consistent": _consistent}
"""Form -> (l [m, t], l_0 [t], R [m]) -> the rewards [m] of a group's completions with the mark."""


def reference_likelihood(
    config: LikelihoodConfig, log_probs: TextLogProbs, tokenizer: Tokenizer, columns: int
) -> Transform:
    """Build the transform that adds `config.coef` x the reward above to each completion's reward.

    Args:
        config: the form of the reward, the column of the answer, and its mark.
        log_probs: of the model that says how likely an answer is.
        columns: the largest number of tokens of a text.
    """

    def add_likelihood(scored: Scored, step: int, state: TrainState) -> Scored:
        rollout = scored.rollout
        mask = np.asarray(rollout.action_mask)
        tokens = np.asarray(rollout.tokens)
        group_starts = first_of_runs(np.asarray(rollout.group_id))
        group = number_of_run(np.asarray(rollout.group_id))
        answers = [
            tokenizer.encode_continuation(text_of_column(row, config.column)) for row in scored.rows
        ]
        prompts = [tokens[start, : mask[start].argmax()].tolist() for start in group_starts]
        mark = tokenizer.encode_continuation(config.mark)
        # First the answers without a completion, one for each group.
        pieces = rollout.images
        images = [None if pieces is None else np.asarray(pieces)[start] for start in group_starts]
        texts = [
            {"ids": [*prompt, *mark, *answer], "answer": len(answer), "images": shown}
            for prompt, answer, shown in zip(prompts, answers, images, strict=True)
        ]
        marked = []
        for n, number in enumerate(group):
            ids = tokens[n][mask[n]].tolist()
            end = tokens_up_to(ids, config.mark, tokenizer)
            if end is not None:
                marked.append(n)
                answer = answers[number]
                texts.append(
                    {
                        "ids": [*prompts[number], *ids[:end], *answer],
                        "answer": len(answer),
                        "images": images[number],
                    }
                )
        of_texts = log_probs(state.params, texts, lambda some: answer_texts(some, columns))
        # Then one reward for each completion, group by group. A text that was too long has no
        # log-probs, so that its completion is one without the mark.
        reward = np.zeros(len(mask), np.float32)
        of_completions = dict(zip(marked, of_texts[len(prompts) :], strict=True))
        for number, (alone,) in enumerate(of_texts[: len(prompts)]):
            members = [
                n for n in marked if group[n] == number and len(of_completions[n][0]) == len(alone)
            ]
            if members and len(alone):
                found = np.stack([of_completions[n][0] for n in members])
                own = np.nan_to_num(scored.rewards[members])
                values = _FORMS[config.form](found, alone, own)
                in_group = group == number
                if len(members) < in_group.sum():
                    reward[in_group] = min(0.0, values.min())
                reward[members] = values
        # Where no other reward counts, this one makes the completion scored.
        total = np.nan_to_num(scored.rewards) + np.float32(config.coef) * reward
        return replace(
            scored,
            rewards=total,
            parts={**scored.parts, NAME: reward},
            rollout=place_rewards(rollout, total, np.asarray(rollout.rewards)),
        )

    return add_likelihood
