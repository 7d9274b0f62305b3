"""The log-ratios of a teacher that sees a hint, as rewards of tokens (`algos.self_distill`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tpu_rl.algorithm_spec import Hint
from tpu_rl.experience.likelihood import answer_texts
from tpu_rl.experience.rows import last_text
from tpu_rl.experience.text_log_probs import TextLogProbs
from tpu_rl.experience.transforms import Transform, text_of_column
from tpu_rl.rollout.scoring import Scored, number_of_run
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import TrainState


def with_hint(prompt: Any, hint: str, template: str) -> Any:
    """Return the prompt that the teacher sees: a text, or a conversation whose last message is in
    the template.

    Raises InputError if the last message holds no plain text.
    """
    last = last_text.of(prompt, "a hint joins a plain text", "--algorithm")
    # Texts of rows may have braces of their own.
    before, after = template.split("{hint}", 1)
    text = before.replace("{prompt}", last) + hint + after.replace("{prompt}", last)
    return last_text.replaced(prompt, text)


def log_ratios(
    spec: Hint, log_probs: TextLogProbs, tokenizer: Tokenizer, columns: int
) -> Transform:
    """Build the transform that sets `Rollout.rewards` [N, T] to ln teacher - ln policy, in nats.

    `Scored.rewards` and `parts`, and so all metrics of rewards, stay. A completion that is longer
    than a row with its hint becomes one that is not scored; the console says so.

    Args:
        spec: the teacher's role, the column of hints, and the template of prompts.
        log_probs: of the teacher, at the sampler's temperature.
        columns: the largest number of tokens of a text.
    """

    def set_rewards(scored: Scored, step: int, state: TrainState) -> Scored:
        rollout = scored.rollout
        mask = np.asarray(rollout.action_mask)
        tokens = np.asarray(rollout.tokens)
        group = number_of_run(np.asarray(rollout.group_id))
        prompts = []
        for row in scored.rows:
            hinted = with_hint(row["prompt"], text_of_column(row, spec.column), spec.template)
            prompts.append(tokenizer.encode_row({**row, "prompt": hinted}))
        texts = [
            {
                "ids": [*prompts[group[n]].ids, *tokens[n][mask[n]].tolist()],
                "answer": mask[n].sum(),
                "images": prompts[group[n]].pieces,
            }
            for n in range(len(mask))
        ]
        of_texts = log_probs(state.params, texts, lambda some: answer_texts(some, columns))
        rewards = np.zeros(mask.shape, np.float32)
        has_values = np.zeros(len(mask), bool)
        faults = list(scored.faults)
        for n, (values,) in enumerate(of_texts):
            has_values[n] = len(values) == mask[n].sum() > 0
            if has_values[n]:
                rewards[n, mask[n]] = values - np.asarray(rollout.log_probs)[n, mask[n]]
            elif mask[n].any():
                faults[n] = f"with its hint it exceeds the {columns} tokens of rows"
        rollout = replace(rollout, rewards=rewards, scored=has_values)
        return replace(scored, rollout=rollout, faults=faults)

    return set_rewards
