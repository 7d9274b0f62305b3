"""Actions on a screen, points in boxes and overlaps of boxes.

Rule rewards of GUI-R1 (arXiv 2504.10458), UI-R1 (arXiv 2503.21620) and VLM-R1 (arXiv 2504.07615).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tpu_rl.rewards import spans
from tpu_rl.rewards.scoring import Reward
from tpu_rl.rewards.verifier import with_settings
from tpu_rl.verifiers import composed

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in any unit that the answers use too."""


BOX_FORM = "[left, top, right, bottom]"


class Action(NamedTuple):
    """Action on a screen. None stands for "anything"."""

    kind: str | None
    box: Box | None
    text: str | None


def action() -> Reward:
    """Return the share of an action's parts that each completion has right.

    The parts are those of `answer`: {"action": "click", "box": [left, top, right, bottom], "text":
    "..."}: the same kind, a point in the box, and the same text, without regard to case. A
    completion writes [{"action": "click", "point": [x, y], "input_text": "..."}], also in <answer>
    (GUI-R1, arXiv 2504.10458; UI-R1, arXiv 2503.21620). Without a readable action it gets 0.
    """

    example = '{"action": "click", "box": [0, 0, 9, 9]}'
    return composed.against("answer", _gold_action, example, _share)


def point_in_box() -> Reward:
    """Return 1 for each completion whose last point (x, y) is in the box of `answer`, else 0.

    A box is [left, top, right, bottom]; its border belongs to it. A completion's box stands for its
    center. The unit is that of the data: pixels, or thousandths.
    """

    def measure(text: str, box: Box) -> float:
        point = _last_point(text)
        return float(point is not None and _is_in(point, box))

    return composed.against("answer", _box, BOX_FORM, measure)


def box_iou(threshold: float = 0.0) -> Reward:
    """Return the overlap of each completion's last box with the box of `answer`; 0 without one.

    IoU = area of the intersection / area of the union (VLM-R1, arXiv 2504.07615). With a
    `threshold` above 0: 1 where IoU is at least that, else 0.
    """
    composed.require(0 <= threshold <= 1, f"box_iou(threshold={threshold})", "use 0 to 1")

    def measure(text: str, box: Box) -> float:
        predicted: Any = spans.coordinates(text, [spans.BOX])
        value = iou(predicted, box) if predicted else 0.0
        return float(value >= threshold) if threshold else value

    return composed.against("answer", _box, BOX_FORM, measure)


def iou(a: Box, b: Box) -> float:
    """Return the area of the intersection of two boxes over that of their union."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    union = _area(a) + _area(b) - shared
    return shared / union if union > 0 else 0.0


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def _box(value: Any) -> Box:
    left, top, right, bottom = spans.numbers(
        spans.value_of(value) if isinstance(value, str) else value
    )
    if not (left <= right and top <= bottom) or not all(map(math.isfinite, (left, top))):
        raise ValueError(
            "its right or bottom is before its left or top (COCO writes width and height)"
        )
    return left, top, right, bottom


def _is_in(point: Sequence[float], box: Box) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def _last_point(text: str) -> tuple[float, float] | None:
    found = spans.coordinates(text)
    if len(found) == 4:
        return (found[0] + found[2]) / 2, (found[1] + found[3]) / 2
    return (found[0], found[1]) if found else None


def _fields(value: Any) -> dict[str, Any]:
    """Return an action's kind, point, box and text, by the names that data sets use."""
    value = value[-1] if isinstance(value, list) and value else value
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    return {name: next((value[k] for k in keys if k in value), None) for name, keys in _KEYS}


_KEYS = (
    ("kind", ("action", "type", "gt_action")),
    ("point", ("point", "coordinate", "coordinates")),
    ("box", ("box", "bbox", "bbox_2d", "gt_bbox")),
    ("text", ("text", "input_text", "gt_input_text")),
)


def _gold_action(value: Any) -> Action:
    found = _fields(spans.value_of(value) if isinstance(value, str) else value)
    kind, box, text = found["kind"], found["box"], found["text"]
    if kind is None and box is None and text is None:
        raise ValueError("it has none of action, box and text")
    if box is None and found["point"] is not None:
        raise ValueError("its point needs a box around it, under the name box")
    return Action(
        None if kind is None else _plain(kind),
        None if box is None else _box(box),
        None if text is None else _plain(text),
    )


def _share(text: str, gold: Action) -> float:
    try:
        found = _fields(spans.value_of(spans.answer_of(text)))
    except ValueError:
        return 0.0
    parts = []
    if gold.kind is not None:
        parts.append(_plain(found["kind"]) == gold.kind)
    if gold.box is not None:
        try:
            point = spans.numbers(found["point"])
        except composed.NO_READING:
            point = ()
        parts.append(len(point) == 2 and _is_in(point, gold.box))
    if gold.text is not None:
        parts.append(_plain(found["text"]) == gold.text)
    return sum(parts) / len(parts)


def _plain(text: Any) -> str:
    return " ".join(str(text).lower().split())


VERIFIERS = {
    "action": with_settings(action),
    "box_iou": with_settings(box_iou),
    "point_in_box": with_settings(point_in_box),
}
