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
    if spec.source == "demonstrations" or (spec.source == "completions" and not spec.sampled_by):
        texts = data.demonstrations([row], tokenizer, max_length)
        weights = np.asarray(texts.weights[0]) if texts.weights is not None else []
        names = {1.0: LEARNED, -1.0: "forgotten"}
        notes = [names.get(float(weight), f"weight {weight:g}") for weight in weights]
        notes = [note if weight else "" for note, weight in zip(notes, weights, strict=True)]
        return [_noted("demonstration", texts.tokens[0], notes, tokenizer)]
    if spec.source == "pairs" and spec.sampled_by is None:
        pair = data.pairs([row], tokenizer, max_length)
        titles = [f"label {bool(row['label'])}" if "label" in row else f"score {row.get('score')}"]
        titles = ["chosen", "rejected"] if "chosen" in row else titles
        return [
            _example(title, pair.tokens, pair.action_mask, index, tokenizer)
            for index, title in enumerate(titles)
        ]
    if spec.source == "step_labels" and spec.sampled_by is None:
        steps = data.steps([row], tokenizer, max_length)
        labels = np.where(np.asarray(steps.returns[0]) > 0, "right", "wrong")
        notes = np.where(np.asarray(steps.action_mask[0]), labels, "")
        return [_noted("labeled steps", steps.tokens[0], notes.tolist(), tokenizer)]
    if spec.source == "scored_completions" and spec.sampled_by is None:
        size = len(row["completions"])
        scored = data.scored_completions([row], tokenizer, max_length, size)
        return [
            _example(f"score {score:g}", scored.tokens, scored.action_mask, index, tokenizer)
            for index, score in enumerate(row["scores"])
        ]
    ids = tokenizer.encode_row(row).ids
    completion = Span(f"a completion of at most {max_new_tokens} tokens", f"sampled, {LEARNED}")
    example = _noted("prompt", ids, [""] * len(ids), tokenizer)
    return [example._replace(spans=[*example.spans, completion])]


def _example(title: str, tokens: Any, mask: Any, index: int, tokenizer: Tokenizer) -> Example:
    """Return a row of arrays [N, T], without its padding, and with what is learned."""
    learned = np.asarray(mask[index])
    notes = [LEARNED if is_learned else "" for is_learned in learned]
    return _noted(title, tokens[index], notes, tokenizer)


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
