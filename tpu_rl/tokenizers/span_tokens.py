"""The tokens that write parts of a text."""

from __future__ import annotations

import bisect
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpu_rl.errors import InputError

CONTEXT = 8
"""Tokens before a token with which it is decoded to find the characters that it writes."""

Decode = Callable[[list[int]], str]
"""Returns the text of ids, control tokens included."""


def weights(
    decode: Decode, ids: Sequence[int], start: int, text: str, spans: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Return the weight of each of ids[start:]; see `Tokenizer.weights_of_spans`."""
    answer = list(ids[start:])
    if not spans:
        return [1.0] * len(answer)
    # What a token writes can depend on the tokens before it, or at the start of a text.
    for context in (list(ids[:start]), []):
        before = len(decode(context))
        if decode(context + answer)[before:] == text:
            break
    else:
        raise InputError(
            "parts of an answer have weights, and the tokenizer writes another text back",
            where=repr(text[:80]),
            why="the tokens of each part cannot be told",
            fix="give the whole answer one weight",
        )

    # What a token writes depends on few tokens before it; if not, on all of them.
    written = _written(decode, context, answer, text, CONTEXT)
    if written(len(answer)) != len(text):
        written = _written(decode, context, answer, text, len(context) + len(answer))
    counts = range(len(answer) + 1)
    edges = [0, *(edge for span in spans for edge in (span["start"], span["end"])), len(text)]
    pieces = [(span["start"], span["end"], span["weight"]) for span in spans]
    pieces += [(a, b, 1.0) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    weights = [math.inf] * len(answer)
    for first, end, weight in pieces:
        if first >= end:
            continue
        # From the token that writes beyond `first`, or the one after it is reached.
        low = bisect.bisect_right(counts, first, key=written) - 1
        low = min(low, bisect.bisect_left(counts, first, key=written))
        for token in range(low, bisect.bisect_left(counts, end, key=written)):
            weights[token] = min(weights[token], weight)
    return [1.0 if weight == math.inf else weight for weight in weights]


def _written(
    decode: Decode, context: list[int], answer: list[int], text: str, overlap: int
) -> Callable[[int], int]:
    """Return the function from a number of the answer's tokens to the characters of the text
    that they write, of which half of one is none.

    A token is decoded with the `overlap` tokens before it and no others, because an answer may
    have tens of thousands of tokens and hundreds of spans.
    """
    ids = context + answer

    def piece(first: int, count: int) -> str:
        first, count = first + len(context), count + len(context)
        known = decode(ids[max(first - overlap, 0) : first])
        whole = decode(ids[max(first - overlap, 0) : count])
        return whole[len(known) :]

    # (tokens, characters) of places where a character ends, some tokens apart.
    places = [(0, 0)]
    for count in range(len(answer)):
        first, start = places[-1]
        if count - first >= 8 * overlap:
            new = piece(first, count)
            if text.startswith(new, start) and not new.endswith("\ufffd"):
                places.append((count, start + len(new)))

    @functools.cache
    def written(count: int) -> int:
        first, start = places[bisect.bisect_right(places, (count, len(text))) - 1]
        new = piece(first, count)
        return start + len(os.path.commonprefix([new, text[start : start + len(new)]]))

    return written
