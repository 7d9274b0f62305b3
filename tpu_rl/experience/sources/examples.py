"""Data rows as a model reads them, for people to look at before a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tpu_rl import data
from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.data import Row
from tpu_rl.tokenizers import Tokenizer


class Span(NamedTuple):
    """A stretch of rendered text."""

    text: str
    note: str
    """The part of it that is learned; "" if nothing is."""


class Example(NamedTuple):
    """A text as the model reads it."""

    title: str
    spans: list[Span]


LEARNED = "learned"


def of_row(
    row: Row,
    spec: ExperienceSpec,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    max_new_tokens: int,
) -> list[Example]:
    """Return the texts that an algorithm makes of a data row: two of a pair, else one.

    Args:
        row: a row with the columns of `spec`.
    """
    max_length = max_prompt_tokens + max_new_tokens
    is_given = spec.sampled_by is None
    if spec.source == "demonstrations" or (spec.source == "completions" and is_given):
        texts: Any = data.demonstrations([row], tokenizer, max_length)
        names = {0.0: "", 1.0: LEARNED, -1.0: "forgotten"}
        weights = [float(weight) for weight in texts.weights[0]]
        notes = [[names.get(weight, f"weight {weight:g}") for weight in weights]]
        titles = ["demonstration"]
    elif spec.source == "step_labels" and is_given:
        texts = data.steps([row], tokenizer, max_length)
        labels = np.where(texts.returns > 0, "right", "wrong")
        notes = np.where(texts.action_mask, labels, "").tolist()
        titles = ["labeled steps"]
    elif spec.source in ("pairs", "scored_completions") and is_given:
        if spec.source == "pairs":
            texts = data.pairs([row], tokenizer, max_length)
            graded = (
                f"label {bool(row['label'])}" if "label" in row else f"score {row.get('score')}"
            )
            titles = ["chosen", "rejected"] if "chosen" in row else [graded]
        else:
            size = len(row["completions"])
            texts = data.scored_completions([row], tokenizer, max_length, size)
            titles = [f"score {score:g}" for score in row["scores"]]
        notes = np.where(texts.action_mask, LEARNED, "").tolist()
    else:
        ids = tokenizer.encode_row(row).ids
        completion = Span(f"a completion of at most {max_new_tokens} tokens", f"sampled, {LEARNED}")
        example = _noted("prompt", ids, [""] * len(ids), tokenizer)
        return [example._replace(spans=[*example.spans, completion])]
    return [
        _noted(title, tokens, of_text, tokenizer)
        for title, tokens, of_text in zip(titles, texts.tokens, notes, strict=True)
    ]


def _noted(title: str, tokens: Any, notes: Sequence[str], tokenizer: Tokenizer) -> Example:
    """Return tokens as text, with neighbors of the same note together.

    Padding follows the last noted token of a row of an array, and is left out.
    """
    ids = [int(token) for token in tokens]
    last = max((i for i, note in enumerate(notes) if note), default=len(ids) - 1)
    while not any(notes) and last > 0 and ids[last] == tokenizer.pad_id:
        last -= 1
    spans: list[Span] = []
    before = ""
    stop = 0
    for note, group in itertools.groupby(notes[: last + 1]):
        start = stop
        stop += len(list(group))
        # What a token adds to a text can depend on the tokens before it.
        text = tokenizer.decode(ids[:stop], skip_special=False)
        is_longer = text.startswith(before)
        piece = tokenizer.decode(ids[start:stop], skip_special=False)
        spans.append(Span(text[len(before) :] if is_longer else piece, note))
        before = text
    num_learned = sum(bool(note) for note in notes)
    counts = f"{last + 1} tokens" + (f", {num_learned} of them learned" if num_learned else "")
    return Example(f"{title}: {counts}", spans)
