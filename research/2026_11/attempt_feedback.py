"""The shipped model's second attempts, by what it reads after a wrong answer.

    python research/2026_11/attempt_feedback.py

The model answers 400 held-out expressions of 5 terms. What it got wrong, it tries again after a
text of the task's own characters; N stands for the attempts that are left.

Prints one line per text: the share of right second attempts, and of those that can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import arms
import numpy as np

import tpu_rl
from tpu_rl import models, sampler, tokenizers
from tpu_rl.commands.presets.arithmetic_grpo import LONG
from tpu_rl.environments import ArithmeticData, arithmetic
from tpu_rl.types import Purpose

FOLDER = Path(tpu_rl.__file__).parent / "pretrained" / "arithmetic"
FEEDBACK = ("=;", "=N;", "N=;", "=;N", "N;", "N=", ";N=", "=N", "N", ";", "#;")


def main() -> None:
    """Print the table."""
    model, params = models.load(str(FOLDER))
    tokenizer = tokenizers.load(FOLDER)
    source = arithmetic.TASK.evaluation_rows(ArithmeticData(LONG, LONG), 400)
    rows = [source[index] for index in range(400)]
    config = sampler.SamplerConfig(
        max_new_tokens=64, stop_ids=tokenizer.eos_ids, prompt_length=128, max_num_seqs=512
    )

    def answer(
        prompts: list[list[int]], answers: Sequence[str]
    ) -> tuple[list[list[int]], list[float], list[float]]:
        key = sampler.run_key(0, Purpose.ROLLOUT, 0)
        rollout = sampler.sample(models.policy(model), params, prompts, key, config)
        pairs = zip(rollout.tokens, rollout.action_mask, strict=True)
        token_ids = [tokens[mask].tolist() for tokens, mask in pairs]
        texts = [tokenizer.decode(ids) for ids in token_ids]
        right = arithmetic.correct([], texts, answer=answers)
        return token_ids, right, arithmetic.well_formed([], texts)

    prompts = [tokenizer.encode_prompt(row["prompt"]) for row in rows]
    first, right, _ = answer(prompts, [row["answer"] for row in rows])
    wrong = np.flatnonzero(np.array(right) == 0)
    arms.print_heading("feedback", "right, %", "readable, %")
    for text in FEEDBACK:
        for left in (1, 4) if "N" in text else (1,):
            feedback = text.replace("N", str(left))
            message = {"role": "user", "content": feedback}
            ids = tokenizer.encode_observation([message], ended=True, is_chat=False)
            contexts = [prompts[row] + first[row] + ids for row in wrong]
            _, again, readable = answer(contexts, [rows[row]["answer"] for row in wrong])
            shares = [f"{100 * np.mean(values):.1f}" for values in (again, readable)]
            arms.print_row(f"`{feedback}`", *shares)


if __name__ == "__main__":
    main()
