"""Answers that the policy improves after a critique, as rows of their group (Critique-GRPO, arXiv
2506.03106).

    prompt -> n completions;  prompt + the worst of them + critique -> a refinement
    group  =  n completions + the refinement, if it earns more than what it refines

The refinement stands behind the plain prompt, with its own reward. The policy learns to write it
without the critique; it did not sample it so, which the loss has to allow for (`algos.mixed`).

Deviations: the critique is a rule's, a text that may name the right answer, where the paper also
has those of a larger model; one completion of a group is refined, in place of all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tpu_rl.algorithm_spec import Refinement
from tpu_rl.data import Row
from tpu_rl.experience.transforms import AddedRow, Transform, add_rows, text_of_column
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.scoring import Scored, first_of_runs
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import RowSource, TrainState


def with_critique(row: Row, completion: str, spec: Refinement) -> Row:
    """Return the row whose prompt goes on with a completion and its critique.

    Raises InputError if the critique names the answer, and its column holds no text.
    """
    critique = spec.critique
    if "{answer}" in critique:
        critique = critique.replace("{answer}", text_of_column(row, spec.column))
    prompt: Any = row["prompt"]
    if isinstance(prompt, str):
        return row | {"prompt": f"{prompt}{completion}{critique}"}
    answer = {"role": "assistant", "content": completion}
    return row | {"prompt": [*prompt, answer, {"role": "user", "content": critique}]}


def refinement(
    engine: Engine, spec: Refinement, tokenizer: Tokenizer, max_prompt_tokens: int
) -> Transform:
    """Build the transform that adds a row to each group: its refinement, or an empty row.

    A group has an empty row, which teaches nothing, if the refinement earns no more than what it
    refines, or if the critique does not fit a prompt; the console says the latter.

    Args:
        engine: samples a completion of each prompt by the policy, and scores it.
    """

    def add(scored: Scored, step: int, state: TrainState) -> Scored:
        starts = first_of_runs(np.asarray(scored.rollout.group_id))
        worth = np.where(np.isnan(scored.rewards), np.inf, scored.rewards)
        worst = [
            first + int(worth[first:end].argmin())
            for first, end in zip(starts, [*starts[1:], len(worth)], strict=True)
        ]
        rows = [
            with_critique(row, scored.completions[place], spec)
            for row, place in zip(scored.rows, worst, strict=True)
        ]
        fits = [tokenizer.row_length(row) <= max_prompt_tokens for row in rows]
        # All groups are sampled for, so that one program serves every step.
        prompt_rows = [
            row if fit else old for row, fit, old in zip(rows, fits, scored.rows, strict=True)
        ]
        request = RolloutRequest(prompt_rows, step, policy_step=int(state.step))
        refined = engine.roll_out(state.params, request)
        earned = np.where(np.isnan(refined.rewards), -np.inf, refined.rewards)
        mask = np.asarray(refined.rollout.action_mask)
        tokens = np.asarray(refined.rollout.tokens)
        is_added = np.array(fits) & (earned > worth[worst])
        added = [
            [AddedRow(tokens[n, mask[n]].tolist(), refined.completions[n])] if ok else [EMPTY]
            for n, ok in enumerate(is_added)
        ]
        result = add_rows(scored, added, RowSource.EXPERT)

        # The refinements are the last rows of their groups; each reward is on its last action.
        places = np.append(first_of_runs(np.asarray(result.rollout.group_id))[1:] - 1, -1)
        rewards = np.array(result.rollout.rewards)
        action_mask = np.asarray(result.rollout.action_mask)
        last = action_mask.shape[1] - 1 - action_mask[places, ::-1].argmax(-1)
        has_actions = action_mask[places].any(-1)
        rewards[places, last] = np.where(has_actions, earned, 0.0)
        faults = list(result.faults)
        for place, fit in zip(places, fits, strict=True):
            if not fit:
                faults[place] = f"its critique exceeds the {max_prompt_tokens} tokens of prompts"
        return replace(result, rollout=replace(result.rollout, rewards=rewards), faults=faults)

    return add


EMPTY = AddedRow([], "")
