"""Transforms of a batch: what happens to scored completions before they are packed.

    source of rollouts -> Scored -> transform -> ... -> transform -> packed rows

A transform may set baselines, drop groups, or add rows to them. Every source of rollouts applies
the same ones, in order, to the whole batch of a step. Metrics and records are made afterwards:
`Scored.chosen_from` keeps what was sampled, and `Rollout.source` says whose a row is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_rl import data, rewards
from tpu_rl.algorithm_spec import ExperienceSpec, PromptValue
from tpu_rl.data import Row
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages
from tpu_rl.plain_values import fields_of
from tpu_rl.rollout import dynamic_sampling
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.scoring import (
    Scored,
    by_episode,
    first_of_runs,
    place_rewards,
    require_single_rows,
)
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import RowSource, TrainState

Transform = Callable[[Scored, int, TrainState], Scored]
"""(scored completions, step, state) -> scored completions. The state is that of the policy which
the step updates. All processes call it together."""


def apply(transforms: Sequence[Transform], scored: Scored, step: int, state: TrainState) -> Scored:
    """Apply the transforms in order."""
    for transform in transforms:
        scored = transform(scored, step, state)
    return scored


def of_algorithm(
    spec: ExperienceSpec, tokenizer: Tokenizer, first: Sequence[Transform] = ()
) -> tuple[Transform, ...]:
    """Build the transforms that an algorithm brings, and check the rows that they add.

    The first ones are those of the algorithm that the run has made, because they have a memory
    (`source.Memory`) or sample.

    The transforms raise InputError if groups do not grow by `spec.rows_added` rows: memory and
    shapes are planned for that many.
    """
    chain = tuple(first)
    if spec.expert_column is not None:
        chain += (expert_of_column(spec.expert_column, tokenizer),)
    if spec.transforms is not None:
        chain += tuple(spec.transforms(tokenizer))
    if spec.texts is not None:
        chain += (text_of_file(spec.texts, tokenizer),)
    if not chain:
        return ()

    def transform_and_check(scored: Scored, step: int, state: TrainState) -> Scored:
        result = apply(chain, scored, step, state)
        before = _rows_per_group(scored)
        after = _rows_per_group(result)
        if len(after) != len(before) or np.any(after - before != spec.rows_added):
            raise InputError(
                f"transforms made {int(after.sum())} rows in {len(after)} groups of "
                f"{int(before.sum())} in {len(before)}",
                where="ExperienceSpec.transforms of the algorithm",
                why=f"rows_added={spec.rows_added} promises that many more rows in each group",
                fix="set rows_added to the number of rows that each group gets",
            )
        return result

    return (transform_and_check,)


def _rows_per_group(scored: Scored) -> np.ndarray:
    group_id = np.asarray(scored.rollout.group_id)
    return np.diff([*first_of_runs(group_id), len(group_id)])


# --- baselines and filters ---


def prompt_baseline(engine: Engine, spec: PromptValue) -> Transform:
    """Build the transform that gives completions the value of their prompt as baseline.

    The value comes from `spec.samples` further completions of the prompt, by `engine`. Completions
    of a prompt whose value is unknown, because nothing scored it, are marked as not scored.
    """

    def set_baseline(scored: Scored, step: int, state: TrainState) -> Scored:
        request = RolloutRequest(scored.rows, step, policy_step=int(state.step))
        sampled = by_episode(engine.roll_out(state.params, request))
        returns = sampled.rewards.reshape(-1, spec.samples)
        values = advantages.optimal_value(jnp.asarray(returns), jnp.isfinite(returns), spec.beta)
        baseline = np.repeat(np.asarray(values), _rows_per_group(scored)).astype(np.float32)
        has_value = np.isfinite(baseline)
        rollout = replace(
            scored.rollout,
            baseline=np.where(has_value, baseline, np.float32(0.0)),
            scored=scored.rollout.scored & has_value,
        )
        return replace(scored, rollout=rollout)

    return set_baseline


def chance_to_win(opponent: Engine) -> Transform:
    """Build the transform that compares completions with an opponent's, in place of their rewards.

        return_i = P(y_i is preferred to y'_i) - 1/2 = sigmoid(r(y_i) - r(y'_i)) - 1/2

    y'_i is the opponent's completion of the same prompt and place, and P that of Bradley and Terry.
    The 1/2 is the mean against an equal opponent. `Scored.rewards` stay what they are.
    """

    def compare(scored: Scored, step: int, state: TrainState) -> Scored:
        require_single_rows(scored)
        request = RolloutRequest(scored.rows, step, policy_step=int(state.step))
        others = opponent.roll_out(state.params, request)
        require_single_rows(others)
        chance = np.float32(1.0) / (1 + np.exp(np.asarray(others.rewards - scored.rewards)))
        return replace(
            scored,
            parts={**scored.parts, "win": chance, "opponent": others.rewards},
            rollout=place_rewards(scored.rollout, chance - np.float32(0.5)),
        )

    return compare


def normalized_rewards(terms: Sequence[rewards.RewardTerm]) -> Transform:
    """Build the transform that scales each reward in its group before the sum (GDPO, arXiv
    2601.05242, eq. 4 and 5).

        return_i = sum_k |w_k| (x_ik - group mean of x_k) / group standard deviation of x_k

    x_k is the term w_k r_k of the total, 0 where its gate is closed. A reward that has no value for
    a completion counts in no mean of the group, and 0 in the completion's sum. What `rewards` and
    `parts` say, and so all metrics, does not change.
    """

    def normalize(scored: Scored, step: int, state: TrainState) -> Scored:
        rollout = scored.rollout
        if np.any(np.asarray(rollout.rewards)[:, :-1] * np.asarray(rollout.action_mask)[:, 1:]):
            raise InputError(
                "rewards of segments would lose their places",
                where="--rollout.normalize-rewards, --reward",
                why="the scaled sum belongs to the whole completion",
                fix="leave the flag out, or return one number for each completion",
            )
        totals = np.zeros(len(scored.rewards), np.float32)
        for term in rewards.at_step(terms, step):
            values = term.values(scored.parts)
            known = np.isfinite(values)
            scaled = advantages.group_scaled(
                jnp.asarray(values), jnp.asarray(rollout.group_id), jnp.asarray(known)
            )
            totals += abs(term.weight) * np.asarray(scaled)
        returns = np.where(rollout.scored, totals, np.float32(np.nan))
        return replace(scored, rollout=place_rewards(rollout, returns))

    return normalize


# --- rows that the policy did not write ---


@dataclass(frozen=True)
class AddedRow:
    """A row that the policy did not write: a completion of its group's prompt, or a text."""

    token_ids: Sequence[int]
    """The completion, with its end-of-sequence token, or the whole text."""
    text: str
    """The same, for people."""
    learned: Sequence[bool] | None = None
    """The tokens of a text that are learned. None: the row is a completion of the group's prompt.
    """


def text_of_column(row: Row, column: str) -> str:
    """Return the text that a data row has in a column.

    Raises InputError if the column is missing or holds no text.
    """
    text = row.get(column)
    if not isinstance(text, str) or not text:
        raise InputError(
            f"the column `{column}` holds no text",
            where=f"the row with the prompt {str(row.get('prompt'))[:80]!r}",
            why=f"it is {text!r}"[:120],
            fix="write a text, or leave the row out; a flag of the method names the column",
        )
    return text


def row_of_column(row: Row, column: str, tokenizer: Tokenizer) -> AddedRow:
    """Encode the completion that a data row has in a column, with its end-of-sequence token.

    Raises InputError if the column is missing or holds no text.
    """
    text = text_of_column(row, column)
    return AddedRow([*tokenizer.encode(text), tokenizer.eos_ids[0]], text)


def expert_of_column(column: str, tokenizer: Tokenizer) -> Transform:
    """Build the transform that adds the text of a column to each group, as an expert's row."""

    def add_expert(scored: Scored, step: int, state: TrainState) -> Scored:
        experts = [[row_of_column(row, column, tokenizer)] for row in scored.rows]
        return add_rows(scored, experts, RowSource.EXPERT)

    return add_expert


def read_texts(path: str) -> data.StoredRows:
    """Return the rows of a file that SFT reads: texts, prompts with completions, or conversations.

    Raises InputError if the file cannot be read, or has other rows.
    """
    is_chat = "messages" in data.first_row(path)
    return data.read(path, ("messages",) if is_chat else ("prompt", "completion"))


def text_of_file(path: str, tokenizer: Tokenizer) -> Transform:
    """Build the transform that adds a text of a file to each group.

    The texts of a batch are a function of its step: the file in another order each time that it is
    through. Texts are cut at the end of the batch's columns.
    """
    rows = read_texts(path)

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng(epoch).permutation(len(rows))

    def add_texts(scored: Scored, step: int, state: TrainState) -> Scored:
        columns = np.asarray(scored.rollout.tokens).shape[1]
        texts = []
        for number in range(step * len(scored.rows), (step + 1) * len(scored.rows)):
            epoch, place = divmod(number, len(rows))
            row = rows[int(order(epoch)[place])]
            encoded = data.demonstrations([row], tokenizer, columns)
            mask = np.asarray(encoded.action_mask)[0]
            ids = np.asarray(encoded.tokens)[0][: len(mask) - int(mask[::-1].argmax())]
            learned = mask[: len(ids)].tolist()
            texts.append([AddedRow(ids.tolist(), tokenizer.decode(ids.tolist()), learned)])
        return add_rows(scored, texts, RowSource.TEXT)

    return add_texts


def add_rows(
    scored: Scored, rows_of_groups: Sequence[Sequence[AddedRow]], source: RowSource
) -> Scored:
    """Add rows at the end of each group. They are in no baseline, reward or metric of the policy.

    A row that is longer than the batch has columns becomes a row without actions, which teaches
    nothing; the console says so.

    Args:
        rows_of_groups: for each group, in order, its further rows.
        source: whose they are.

    Raises:
        InputError: if the completions are conversations.
    """
    if scored.episodes is not None or scored.rollout.parent is not None:
        raise InputError(
            "rows cannot join conversations",
            where="--algorithm",
            why="an added row is one completion of the prompt",
            fix="train without --environment and --agent",
        )
    group_id = np.asarray(scored.rollout.group_id)
    starts = first_of_runs(group_id)
    # Each added row begins as a copy of its group's first one, behind the group's last.
    first_rows = np.repeat(starts, [len(added) for added in rows_of_groups])
    flat = [row for added in rows_of_groups for row in added]
    order = np.argsort(np.concatenate([group_id, group_id[first_rows]]), kind="stable")
    widened = dynamic_sampling.take_rows(
        [scored], np.concatenate([np.arange(len(group_id)), first_rows])[order]
    )
    old_source = scored.rollout.source
    policy_rows = np.zeros(len(group_id), np.int8) if old_source is None else old_source
    sources = np.concatenate([policy_rows, np.full(len(flat), source, np.int8)])[order]
    is_added = (order >= len(group_id)).nonzero()[0]

    tokens = np.array(widened.rollout.tokens)
    action_mask = np.array(widened.rollout.action_mask)
    columns = tokens.shape[1]
    # Texts share no prompt with their group, so that each row has to say what it shares.
    new_starts = first_of_runs(np.asarray(widened.rollout.group_id))
    first_of_group = np.repeat(new_starts, np.diff([*new_starts, len(tokens)]))
    shared = action_mask.argmax(-1) * (np.arange(len(tokens)) != first_of_group)
    completions = list(widened.completions)
    faults = list(widened.faults)
    for place in is_added:
        added = flat[order[place] - len(group_id)]
        start = 0 if added.learned is not None else int(action_mask[place].argmax())
        end = start + len(added.token_ids)
        action_mask[place] = False
        tokens[place, start:] = 0
        completions[place] = added.text
        faults[place] = ""
        if end > columns:
            faults[place] = f"a row of {source.name.lower()} exceeds the {columns} tokens of rows"
            continue
        if added.learned is not None and not any(added.learned):
            faults[place] = f"a text has nothing to learn within the {columns} tokens of rows"
        tokens[place, start:end] = added.token_ids
        action_mask[place, start:end] = True if added.learned is None else added.learned
        if added.learned is not None:
            shared[place] = 0

    def cleared(values: Any, value: float = 0.0) -> np.ndarray:
        result = np.array(values)
        result[is_added] = value
        return result

    rollout = widened.rollout
    arrays = fields_of(rollout)
    per_token = {
        name: cleared(arrays[name])
        for name in ("log_probs", "behaviour_log_probs", "rewards", "routing")
        if arrays[name] is not None
    }
    if any(added.learned is not None for added in flat):
        row_numbers = np.arange(len(tokens))
        per_token["parent"] = np.where(shared > 0, first_of_group, row_numbers).astype(np.int32)
        per_token["shared"] = shared.astype(np.int32)
    return replace(
        widened,
        rollout=replace(
            rollout,
            tokens=tokens,
            action_mask=action_mask,
            truncated=cleared(rollout.truncated, False),
            scored=cleared(rollout.scored, False),
            source=sources,
            **per_token,
        ),
        completions=completions,
        lengths=action_mask.sum(-1),
        rewards=cleared(widened.rewards, np.nan),
        parts={name: cleared(part, np.nan) for name, part in widened.parts.items()},
        faults=faults,
        chosen_from=scored.chosen_from or (scored,),
    )
