"""A fine-grained reward for arithmetic: the share of right steps."""

from __future__ import annotations

from typing import Any


def right_steps(
    prompts: list[str], completions: list[str], solution: list[str], **columns: Any
) -> list[float]:
    """Return the share of the steps of the worked solution that a completion has, in any order.

    "3+8=11;11-4=7;#7" has two steps. A bare result has none.
    """
    return [
        share(completion, worked) for completion, worked in zip(completions, solution, strict=True)
    ]


def share(completion: str, worked: str) -> float:
    """Return the share of the steps of `worked` that are in `completion`."""
    steps = worked.split(";")[:-1]
    written = completion.split(";")
    return sum(step in written for step in steps) / max(len(steps), 1)
