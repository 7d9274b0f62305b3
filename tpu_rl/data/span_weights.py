"""Weights of parts of an answer in supervised fine-tuning, by characters.

    {"role": "assistant", "content": "So 42.", "span_weights": [{"text": "42", "weight": 3}]}

A span is a `text` that occurs once, or `start` and `end`, the characters [start, end). What no span
has keeps the weight 1. A message's `weight` multiplies those of its spans.
"""

from __future__ import annotations

from typing import Any

from tpu_rl.data.values import is_number, shown

KEY = "span_weights"
"""Key of a message, and column of a row with a plain completion. Rows that are read have there a
list of {"start", "end", "weight"} in order, which do not overlap."""
LEARNED_FLAGS = ("train", "training", "loss")
"""Keys of messages that say whether these are learned: axolotl's and ms-swift's names."""
OTHER_MASKS = ("mask", "masked", "loss_mask", "train_mask", "train_detail", "training_detail")
"""Keys that say it of a message or its parts in ways that differ between libraries."""
FLAGS = ("weight", *LEARNED_FLAGS, *OTHER_MASKS)
"""Keys that parts of a content must not have."""


def checked(spans: Any, text: str, place: str) -> list[dict[str, Any]]:
    """Return spans with their `start` and `end`, in order.

    Raises ValueError if one has another form or no place in the text, or two overlap.
    """
    if not isinstance(spans, list):
        raise ValueError(f"`{KEY}` of {place} is a list of spans, not {shown(spans)}")
    result = []
    for span in spans:
        if isinstance(span, dict):
            # Arrow gives each span the keys of all.
            span = {key: value for key, value in span.items() if value is not None}
        keys = span.keys() if isinstance(span, dict) else set()
        if keys not in ({"text", "weight"}, {"start", "end", "weight"}):
            raise ValueError(
                f"a span of {place} has `text` or `start` and `end`, and `weight`: {shown(span)}"
            )
        weight = span["weight"]
        if not is_number(weight) or weight < 0:
            raise ValueError(f"the weight of a span of {place} is no number from 0: {shown(span)}")
        start, end = span.get("start"), span.get("end")
        if "text" in span:
            part = span["text"]
            count = text.count(part) if isinstance(part, str) and part else 0
            if count != 1:
                raise ValueError(
                    f"the text of a span of {place} occurs {count} times: {shown(span)}; it "
                    "occurs once, or `start` and `end` say where it is"
                )
            start = text.index(part)
            end = start + len(part)
        _require_within(start, end, len(text), place, span)
        result.append({"start": start, "end": end, "weight": float(weight)})
    result.sort(key=lambda span: (span["start"], span["end"]))
    for before, after in zip(result, result[1:], strict=False):
        if after["start"] < before["end"]:
            raise ValueError(f"spans of {place} overlap: {shown([before, after])}")
    return result


def _require_within(start: Any, end: Any, last: int, place: str, span: Any) -> None:
    are_places = all(isinstance(n, int) and not isinstance(n, bool) for n in (start, end))
    if not are_places or not 0 <= start <= end <= last:
        raise ValueError(f"a span of {place} is not within 0 and {last}: {shown(span)}")
