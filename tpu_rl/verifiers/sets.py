"""Sets of items against sets of items: F-beta, and the hit score that lists of everything fool.

With predicted items A and gold items B, P = |A and B| / |A|, R = |A and B| / |B|, and
F = (1 + beta^2) P R / (beta^2 P + R). SoRFT (arXiv 2502.20127) rewards F with beta > 1, because a
policy earns the hit score, 1 if anything matches, by listing everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.rewards import spans
from tpu_rl.rewards.scoring import Reward
from tpu_rl.rewards.verifier import with_settings
from tpu_rl.verifiers import composed

_BULLET = re.compile(r"^\s*(?:[-*+•]|\d+[.)])\s+")
_QUOTES = " \t\"'`"


def items_of(text: str) -> set[str]:
    """Return the items that an answer lists: a list of JSON, or lines and commas, with bullets."""
    answer = spans.answer_of(text)
    try:
        value = spans.value_of(answer)
    except ValueError:
        value = None
    if isinstance(value, list | tuple | set):
        items = [str(item) for item in value]
    else:
        items = [item for line in answer.splitlines() for item in _BULLET.sub("", line).split(",")]
    return {item.replace("**", "").strip(_QUOTES) for item in items} - {""}


def _gold(value: Any) -> set[str]:
    if isinstance(value, dict):
        raise ValueError("it is no list")
    if isinstance(value, str):
        items = items_of(value)
    else:
        items = {str(item).strip(_QUOTES) for item in value} - {""}
    if not items:
        raise ValueError("it has no items")
    return items


def _over_sets(measure: Callable[[set[str], set[str]], float]) -> Reward:
    expected = 'a list, as in ["a.py", "b.py"]'
    return composed.against(
        "answer", _gold, expected, lambda text, gold: measure(items_of(text), gold)
    )


def f_beta(beta: float = 2.0) -> Reward:
    """Return F-beta of the items that each completion lists and those of `answer`; 0 without any.

    F = (1 + beta^2) P R / (beta^2 P + R) with precision P and recall R. A beta above 1 favors
    recall (SoRFT, arXiv 2502.20127). Items are the list in the last <answer>, in the last fenced
    block or in all of the text without thoughts: as JSON, or separated by lines and commas.
    """
    composed.require(beta > 0, f"f_beta(beta={beta})", "use a number above 0")

    def measure(found: set[str], gold: set[str]) -> float:
        # (1 + b^2) P R / (b^2 P + R) = (1 + b^2) hits / (b^2 |gold| + |found|).
        return (1 + beta**2) * len(found & gold) / (beta**2 * len(gold) + len(found))

    return _over_sets(measure)


def hit_score() -> Reward:
    """Return 1 for each completion of which one item is in `answer`, else 0.

    A control for `f_beta`: the policy earns it by listing everything. Watch `0*listed_items`.
    """
    return _over_sets(lambda found, gold: float(bool(found & gold)))


def listed_items() -> Reward:
    """Return the number of items that each completion lists: a monitor, with the weight 0."""

    def score(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(len(items_of(text_of(completion)))) for completion in completions]

    return score


VERIFIERS = {
    "f_beta": with_settings(f_beta),
    "hit_score": with_settings(hit_score),
    "listed_items": with_settings(listed_items),
}
