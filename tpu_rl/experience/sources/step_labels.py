"""Steps of solutions with labels, right or wrong, for process reward models.

The data bring labeled steps, or the reference completes arithmetic prompts and the task itself
labels the steps, or the reference continues from the ends of steps and a reward judges what
follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from tpu_rl import sampler
from tpu_rl.data import Row
from tpu_rl.environments import task_of, text_of
from tpu_rl.errors import InputError
from tpu_rl.experience.config import DataConfig, FileData
from tpu_rl.rollout import image_prompts, scoring
from tpu_rl.rollout.engine import Decoding, Scorer
from tpu_rl.rollout.scoring import Scored, require_single_rows
from tpu_rl.types import Params, Purpose, QExamples, Rollout
from tpu_rl.wings import TASKS

LabelCompletion = Callable[[str, str], list[tuple[str, bool]]]
"""(prompt, completion) -> its steps, each with True if it is right; see `Task.label_steps`."""


def monte_carlo_labels(
    scored: Scored, roll_out: Decoding, scorer: Scorer, params: Params, step: int, config: Any
) -> QExamples:
    """Return scored completions, each with a label at one end of a step, drawn uniformly.

    A completion that nobody could judge has no label. See `algos.process_reward`.

    Args:
        roll_out: continues prefixes, `config.continuations` times each.
        scorer: judges what was continued.
        config: a ProcessRewardConfig.
    """
    require_single_rows(scored)
    answers = scored.rollout
    tokens = np.asarray(answers.tokens)
    mask = np.asarray(answers.action_mask)
    begins = mask.argmax(1)
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    ends = mask & np.isin(tokens, config.separators)
    ends[np.arange(len(mask)), last] = True
    # The j-th of n ends, j uniform.
    row_ids = np.arange(len(mask))
    keys = sampler.row_keys(sampler.run_key(roll_out.seed, Purpose.DATA, step), row_ids)
    drawn = np.floor(np.asarray(jax.vmap(jax.random.uniform)(keys)) * ends.sum(1))
    cuts = (ends & (ends.cumsum(1) == drawn[:, None] + 1)).argmax(1)
    at_end = cuts == last
    count = config.continuations
    # A row that was cut at its end samples one token, to keep the shapes, and nobody reads it.
    limits = np.where(at_end, 1, begins + roll_out.config.max_new_tokens - cuts - 1)
    prefixes = [row[: cut + 1].tolist() for row, cut in zip(tokens, cuts, strict=True)]
    images = None
    if answers.images is not None:
        reader = scorer.tokenizer.images
        assert reader is not None, "the model reads images"
        pieces = [
            pieces[: reader.count(prefix)]
            for pieces, prefix in zip(np.asarray(answers.images), prefixes, strict=True)
        ]
        prefixes, images = image_prompts.table(prefixes, pieces, reader)
    continued = roll_out.sample(
        params,
        prefixes,
        step,
        len(mask) + np.arange(len(mask) * count),  # Other random keys than the completions'.
        limits=np.repeat(limits, count),
        images=images,
    )
    whole = _from_begins(continued, np.repeat(begins, count))
    rows = [row for row in scored.rows for _ in range(len(mask) // len(scored.rows))]
    rewards = scorer(scoring.describe(rows, whole, scorer.tokenizer)).rewards.reshape(-1, count)
    rewards = np.where(at_end[:, None], scored.rewards[:, None], rewards)
    right = rewards >= config.min_reward
    known = np.isfinite(rewards)
    labels = right.sum(1) / np.maximum(known.sum(1), 1)
    columns = np.arange(mask.shape[1])[None]
    is_labeled = np.any(known, axis=1) & np.any(mask, axis=1)
    labeled = (columns == cuts[:, None]) & is_labeled[:, None]
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": labeled,
        # What stands before a label is its prompt, so that no two rows share one.
        "group_id": np.arange(len(mask), dtype=np.int32),
        "returns": np.where(labeled, labels[:, None], 0).astype(np.float32),
        "images": answers.images,
    }
    return QExamples(**arrays)


def _from_begins(continued: Rollout, begins: np.ndarray) -> Rollout:
    """Return continuations whose actions begin at these columns: the prefix belongs to them."""
    mask = np.asarray(continued.action_mask)
    columns = np.arange(mask.shape[1])[None]
    ends = mask.shape[1] - mask[:, ::-1].argmax(1)
    whole = (columns >= begins[:, None]) & (columns < ends[:, None])
    zeros = np.zeros(mask.shape, np.float32)
    return replace(continued, action_mask=whole, log_probs=zeros, behaviour_log_probs=zeros)


def require_steps(
    data_config: DataConfig, sampled_by: str | None, steps: str = "", is_judged: bool = True
) -> None:
    """Check that something labels steps.

    Args:
        data_config: a task's settings, or files.
        sampled_by: the role that writes the steps; None if the data bring them.
        steps: the setting `ProcessRewardConfig.steps`.
        is_judged: there is a reward.

    Raises:
        InputError: if neither the data nor their task say which steps are right, or if
            continuations are to say it and nothing judges them.
    """
    why = "a file has columns prompt, completions (the steps) and labels; of tasks only "
    why += f"{', '.join(name for name, task in TASKS.items() if task.label_steps)} knows them"
    fix = "give such a --data.path with --algorithm.steps given, or arithmetic with "
    fix += "--algorithm.steps reference"
    task = task_of(data_config)
    if steps == "monte_carlo":
        is_labeled = is_judged
        why = "a step is as good as the rewards of what follows"
        fix = "give --reward"
    elif sampled_by is None:
        is_labeled = isinstance(data_config, FileData) and data_config.format == "plain"
    else:
        is_labeled = task is not None and task.label_steps is not None
    if not is_labeled:
        raise InputError(
            "nothing says which steps are right", where="--algorithm.steps", why=why, fix=fix
        )


def label_steps(scored: Scored, label_completion: LabelCompletion) -> list[Row]:
    """Return the completions of a task's prompts as rows of labeled steps.

    A completion without text is left out.
    """
    require_single_rows(scored)
    group_size = len(scored.completions) // len(scored.rows)
    labeled = []
    for index, completion in enumerate(scored.completions):
        problem = index // group_size
        prompt = scored.rows[problem]["prompt"]
        steps = label_completion(text_of(prompt), completion)
        if steps:
            labeled.append(
                {
                    "prompt": prompt,
                    "completions": tuple(text for text, _ in steps),
                    "labels": tuple(label for _, label in steps),
                    "ended": not bool(scored.rollout.truncated[index]),
                    "problem": problem,
                }
            )
    return labeled
