"""The completions of a step that samples.jsonl keeps, with what was measured of their tokens.

All of a batch would fill a disk. So a step keeps some of its groups, evenly chosen and not by
reward, and numbers of a limited number of their tokens. Groups are kept whole, because an advantage
means nothing without the completions that it compares.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl.rollout import pictures
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Rollout, RowSource

MAX_TOKENS = 4096
"""The tokens of a step whose numbers are kept, at most. Later completions have none."""
LOG_PROB = "log_prob"
ADVANTAGE = "advantage"
ENTROPY = "entropy"
GAP = "gap"
"""Names of the numbers of a token: its log-prob as sampled, in nats; its advantage; the entropy, in
nats, of the distribution that it was drawn from; the trainer's log-prob minus the sampler's."""


def is_kept(step: int, every: int) -> bool:
    """Return True if a step's completions are kept: those of steps 1, N, 2 N, ..."""
    return step == 1 or step % every == 0


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, at equal distances."""
    most = min(most, count)
    return [number * count // most for number in range(most)]


def of_whole_groups(group_ids: Sequence[int], most: int) -> list[int]:
    """Return the indices of at most `most` completions: whole groups at equal distances.

    Of a group that alone has more, some completions are chosen evenly.

    Args:
      group_ids: the group of each completion; those of a group follow each other.
    """
    groups = [
        [index for index, _ in members]
        for _, members in itertools.groupby(enumerate(group_ids), key=lambda pair: pair[1])
    ]
    largest = max(map(len, groups), default=1)
    if largest > most:
        group = groups[0]
        return [group[place] for place in evenly(len(group), most)]
    return [index for place in evenly(len(groups), most // largest) for index in groups[place]]


def keep(
    records: Sequence[Mapping[str, Any]],
    rollouts: Sequence[Rollout],
    tokenizer: Tokenizer,
    most: int,
    numbers: Mapping[str, np.ndarray],
    folder: Path,
) -> list[dict[str, Any]]:
    """Return the objects for samples.jsonl of a step.

    To a record it adds `row`, its place in the batch; `group`, the number that the completions of
    a prompt share; `rendered`, the exact prompt that the model
    read, control tokens included; and `tokens`, lists with one entry per token from the first
    action to the last: `id`, `text`, and numbers, which are None where the model chose no token. An
    advantage that is the same everywhere is one number. Pictures are named by their copies
    (`rollout.pictures`).

    Args:
      records: one per completion of the batch.
      rollouts: arrays of numpy whose rows, in order, are those of `records`; there may be fewer.
      most: how many completions to keep.
      numbers: name -> [N, T] of the rows of the first rollout, NaN where unknown.
    """
    places = [(rollout, row) for rollout in rollouts for row in range(len(rollout.tokens))]
    # A record without a rollout is a group of its own.
    group_ids = [int(rollout.group_id[row]) for rollout, row in places]
    group_ids += [-1 - index for index in range(len(group_ids), len(records))]
    tokens_left = MAX_TOKENS
    objects = []
    for index in of_whole_groups(group_ids[: len(records)], most):
        record = {**records[index], "row": index}
        if "images" in record and tokenizer.images is not None:
            record["images"] = pictures.kept(record["images"], tokenizer.images, folder)
        if group_ids[index] >= 0:
            record["group"] = group_ids[index]
        if index < len(places):
            rollout, row = places[index]
            values: dict[str, np.ndarray] = {}
            is_policy = rollout.source is None or rollout.source[row] == RowSource.POLICY
            if is_policy:  # Nobody knows the sampler's log-probs of other rows.
                values[LOG_PROB] = np.asarray(rollout.log_probs[row])
            if is_policy and rollout is rollouts[0]:
                values |= {name: array[row] for name, array in numbers.items()}
            ids = np.asarray(rollout.tokens[row])
            mask = np.asarray(rollout.action_mask[row])
            actions = np.flatnonzero(mask)
            if len(actions):
                start = int(actions[0])
                end = min(int(actions[-1]) + 1, start + tokens_left)
                tokens_left -= end - start
                record["rendered"] = tokenizer.decode(ids[:start].tolist(), skip_special=False)
                if end > start:
                    record["tokens"] = token_records(ids, mask, values, start, end, tokenizer)
        objects.append(record)
    return objects


def token_records(
    ids: np.ndarray,
    mask: np.ndarray,
    numbers: Mapping[str, np.ndarray],
    start: int,
    end: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Return the lists of `keep` for the tokens of a row from `start` to `end`; all are [T]."""
    decode = functools.partial(tokenizer.decode, skip_special=False)
    context = max(start - 1, 0)
    texts = token_texts(ids[context:end].tolist(), decode)[start - context :]
    record: dict[str, Any] = {"id": ids[start:end].tolist(), "text": texts}
    for name, values in numbers.items():
        known = mask[start:end] & np.isfinite(values[start:end])
        if not known.any():
            continue
        short = [
            _short(name, float(value)) if is_known else None
            for value, is_known in zip(values[start:end], known, strict=True)
        ]
        is_constant = name == ADVANTAGE and len(set(short) - {None}) == 1
        record[name] = next(x for x in short if x is not None) if is_constant else short
    return record


def _short(name: str, value: float) -> float:
    """Return a number with few digits: gaps are tiny, and the others about 1."""
    short = float(f"{value:.1e}") if name == GAP else round(value, 3)
    return short + 0.0  # Not -0.0.


def token_texts(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Return the text that each token adds to those before it; together they are the whole text.

    Some characters take several tokens. The last of these has the character, and the others have
    no text.
    """
    alone = functools.cache(lambda token_id: decode([token_id]))
    texts: list[str] = []
    start = 0
    shown = ""
    for end in range(1, len(ids) + 1):
        # Some tokenizers strip a space at the beginning, so a token is decoded with the one before.
        text = decode(list(ids[start:end]))
        if text.endswith("\ufffd") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(shown) :])
        start = end - 1
        shown = alone(ids[start])
    return texts
