"""Preference pairs and judged completions: given by the data, or sampled and told apart by rewards.

Sampled completions bring the log-probs of the policy that sampled them. For given pairs see
`reference_log_probs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tpu_rl import data
from tpu_rl.data import Row, stored_rows
from tpu_rl.experience.config import BatchConfig, SamplingConfig
from tpu_rl.experience.rows import tasks
from tpu_rl.experience.source import Source, StepExperience, from_scored, of_rows
from tpu_rl.experience.sources import pairing
from tpu_rl.rollout.engine import Engine, RolloutRequest
from tpu_rl.rollout.scoring import Scored
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Pairs, TrainState

ToPairs = Callable[[Sequence[Row]], Pairs]
"""Rows of pairs -> their token ids, two completions per row."""


def sampled_pairs(scored: Scored, step: int, graded: bool) -> StepExperience:
    """Return pairs of sampled completions: of each prompt a good and a bad one.

    With `graded`, each completion stands for itself, with True if it is good.
    """
    pairs, num_without = pairing.grade(scored) if graded else pairing.pair_up(scored)
    num_groups = len(np.unique(pairs.group_id))
    experience = from_scored(scored, step, pairs)
    experience.metrics["preference/pairs"] = num_groups - num_without
    experience.metrics["preference/no_pair"] = num_without / num_groups
    return experience


def opposed_pair_source(policy: Engine, opponent: Engine, stream: data.RowStream) -> Source:
    """Return the source of pairs of a completion of the policy and one of its opponent."""

    def make(rows: list[Row], step: int, state: TrainState) -> StepExperience:
        request = RolloutRequest(rows, step, policy_step=int(state.step))
        of_policy = policy.roll_out(state.params, request)
        of_opponent = opponent.roll_out(state.params, request)
        pairs, num_without = pairing.pair_with(of_policy, of_opponent)
        experience = from_scored(of_policy, step, pairs)
        opposed = from_scored(of_opponent, step)
        experience.records.extend(record | {"by": "opponent"} for record in opposed.records)
        experience.warnings.extend(opposed.warnings)
        num_pairs = len(of_policy.rewards)
        experience.metrics["preference/pairs"] = num_pairs - num_without
        experience.metrics["preference/no_pair"] = num_without / num_pairs
        experience.metrics["preference/opponent_reward"] = opposed.metrics["reward/mean"]
        return experience._replace(rollouts=experience.rollouts + opposed.rollouts)

    return of_rows(stream, make)


ENCODED_SHARE = 4
"""Of the sample of a large file, one in so many pairs is encoded before the first step."""


@dataclass(frozen=True)
class GivenPairs:
    """The rows of given pairs that can be trained on.

    The column `row` numbers all given rows from 0, the training rows first.
    """

    train: Sequence[Row]
    held_out: Sequence[Row]
    dropped: dict[str, list[int]]
    """Reason -> the numbers of the other rows that were checked, sorted by reasons."""
    num_checked: int
    """The others are checked when they are drawn."""
    rows: Sequence[Row]
    """All rows, as the data bring them."""


def usable_pairs(
    train: Sequence[Row],
    held_out: Sequence[Row],
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
    batch: BatchConfig,
) -> GivenPairs:
    """Return the rows that fit the limits of tokens.

    No completion is cut to fit: what decides between two solutions often stands at their end. Of
    training rows that are checked when they are drawn, a sample is checked here, and the next one
    takes the place of each that does not fit.
    """
    given = data.join(train, held_out)
    numbered = data.with_number(given, "row")
    misfit = functools.partial(_reason_to_drop, tokenizer=tokenizer, sampling=sampling, batch=batch)
    is_sampled = stored_rows.checksums(train) is not None
    of_train = np.arange(len(train))
    if is_sampled:
        of_train = stored_rows.sampled_indices(len(train))[::ENCODED_SHARE]
    checked = np.concatenate([of_train, np.arange(len(train), len(given))])
    by_reason: dict[str, list[int]] = {"": []}
    for index in checked.tolist():
        with data.naming_row(given, index):
            by_reason.setdefault(misfit(numbered[index]), []).append(index)
    fitting = np.array(by_reason.pop(""), np.int64)
    of_train = fitting[fitting < len(train)]
    in_turn: Sequence[Row] = numbered.take(of_train)
    if is_sampled and len(of_train):
        in_turn = tasks.first_fitting(data.with_number(train, "row"), misfit)
    return GivenPairs(
        train=in_turn,
        held_out=numbered.take(fitting[fitting >= len(train)]),
        dropped=dict(sorted(by_reason.items())),
        num_checked=len(checked),
        rows=given,
    )


class _Positions(stored_rows.Source):
    """Rows whose only column is their position among others, for streams that read no row."""

    def __init__(self, rows: Sequence[Row]):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return {"position": index}

    def part_numbers(self) -> np.ndarray:
        return data.part_numbers(self._rows)


def draws(
    rows: Sequence[Row], seed: int, batch_size: int, num_steps: int, weights: Sequence[float] = ()
) -> np.ndarray:
    """Return [steps, batch_size] int, the positions of the rows that a stream's first steps draw.

    The order of a stream is a function of its seed, so it is simply repeated.
    """
    positions = data.StoredRows(_Positions(rows))
    stream = data.stream(
        positions, seed, batch_size, source_fingerprint="positions", weights=weights
    )
    drawn = [[row["position"] for row in next(stream)[1]] for _ in range(num_steps)]
    return np.array(drawn, np.int64)


def new_batches(drawn: np.ndarray) -> np.ndarray:
    """Return those of the batches of `draws` that have a row which no earlier batch has."""
    _, first = np.unique(drawn, return_index=True)
    return drawn[np.unique(first // drawn.shape[1])]


def _reason_to_drop(
    row: Row, tokenizer: Tokenizer, sampling: SamplingConfig, batch: BatchConfig
) -> str:
    if "chosen" in row and row["chosen"] == row["rejected"]:
        return "both completions are the same"
    return "" if _fits(row, tokenizer, sampling, batch) else "they are too long"


def _fits(row: Row, tokenizer: Tokenizer, sampling: SamplingConfig, batch: BatchConfig) -> bool:
    """Return True if prompt, completions and the whole pair are within their limits."""
    pair = data.pairs([row], tokenizer, 1 + sampling.max_prompt_tokens + sampling.max_new_tokens)
    mask = np.asarray(pair.action_mask)
    prompt_length = int(mask[0].argmax())
    lengths = mask.sum(-1)
    prompts = 1 if batch.share_prefixes else len(mask)
    return bool(
        mask.any(-1).all()
        and prompt_length <= sampling.max_prompt_tokens
        and lengths.max() <= sampling.max_new_tokens
        and prompts * prompt_length + int(lengths.sum()) <= batch.row_length
    )
