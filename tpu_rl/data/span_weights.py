"""Weights of parts of an answer in supervised fine-tuning, by characters.

    {"role": "assistant", "content": "So 42.", "span_weights": [{"text": "42", "weight": 3}]}
    {"role": "assistant", "content": [{"text": "So", "train": false}, {"text": " 42."}]}
    {"role": "assistant", "content": "So 42.",
     "train_detail": [{"begin_offset": 2, "end_offset": 5, "train": true}]}

The second and the third form are axolotl's. A span is a `text` that occurs once, or `start` and
`end`, the characters [start, end). axolotl's `end_offset` is the last character itself, and what
its spans leave out is not learned. In our form it keeps the weight 1. A message's `weight`
multiplies those of its spans.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tpu_rl.data.values import is_number, shown

KEY = "span_weights"
"""Key of a message, and column of a row with a plain completion. Rows that are read have there a
list of {"start", "end", "weight"} in order, which do not overlap."""
DETAILS = ("train_detail", "training_detail")
"""axolotl's keys."""
LEARNED_FLAGS = ("train", "training", "loss")
"""Keys of messages and of their parts that say whether these are learned: axolotl's and ms-swift's
names."""
OTHER_MASKS = ("mask", "masked", "loss_mask", "train_mask")
"""Keys that say the same in ways that differ between libraries."""


def of_parts(parts: Sequence[Any], texts: Sequence[str], place: str) -> list[dict[str, Any]]:
    """Return the spans of a content of parts with these texts: those with a flag or a `weight`.

    Raises ValueError if a flag is no truth value, or has no meaning that libraries agree on.
    """
    spans = []
    start = 0
    for part, text in zip(parts, texts, strict=True):
        flags = part if isinstance(part, dict) else {}
        weight = flags.get("weight")
        for mask in OTHER_MASKS:
            if flags.get(mask) is not None:
                raise ValueError(
                    f"`{mask}` of a part of {place} has no meaning that libraries agree on; write "
                    "`train` (true or false) or `weight` (a number)"
                )
        for flag in LEARNED_FLAGS:
            if flags.get(flag) is not None:
                weight = _of_flag(flags[flag], place)
        if weight is not None:
            spans.append({"start": start, "end": start + len(text), "weight": weight})
        start += len(text)
    return spans


def of_details(details: Any, length: int, place: str) -> list[dict[str, Any]]:
    """Return the spans of axolotl's `train_detail`, for a content of `length` characters.

    Raises ValueError if one of them has another form.
    """
    learned = [0.0] * length
    for detail in details if isinstance(details, list) else [details]:
        keys = ("begin_offset", "end_offset", "train")
        if not isinstance(detail, dict) or not set(keys) <= detail.keys():
            raise ValueError(f"`train_detail` of {place} has no {', '.join(keys)}: {shown(detail)}")
        start, last, flag = (detail[key] for key in keys)
        _require_within(start, last, length - 1, place, detail)
        if _of_flag(flag, place):
            learned[start : last + 1] = [1.0] * (last + 1 - start)
    spans = []
    start = 0
    for weight, characters in itertools.groupby(learned):
        end = start + len(list(characters))
        spans.append({"start": start, "end": end, "weight": weight})
        start = end
    return spans


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


def _of_flag(flag: Any, place: str) -> float:
    if not isinstance(flag, bool):
        raise ValueError(f"the flag of a part of {place} is true or false, not {shown(flag)}")
    return float(flag)
