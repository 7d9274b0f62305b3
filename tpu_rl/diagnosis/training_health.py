"""Warnings while a run goes on that it learns nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

PATIENCE = 20
"""The number of steps with equal rewards in every group before a warning, and between warnings."""


class HealthMonitor:
    """Watches the metrics and samples of each step."""

    def __init__(self, patience: int = PATIENCE):
        self._patience = patience
        self._equal_steps = 0
        self._rewards: Counter[float] = Counter()

    def warn(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]
    ) -> None:
        """Print the warnings of a step to stderr."""
        for line in self.observe(metrics, samples):
            print(f"warning: step {step}: {line}", file=sys.stderr)

    def observe(
        self, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        """Record a step and return its warnings, one line each."""
        lines = (self._equal_rewards(metrics, samples), empty_completions(samples))
        return [line for line in lines if line]

    def _equal_rewards(
        self, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]
    ) -> str:
        """Return a warning if all groups have had equal rewards for `patience` steps, else ""."""
        if metrics.get("reward/zero_std_groups") != 1:
            self._equal_steps = 0
            self._rewards = Counter()
            return ""
        self._equal_steps += 1
        self._rewards.update(round(float(sample["reward"]), 3) for sample in samples)
        if self._equal_steps % self._patience:
            return ""
        counts = sorted(self._rewards.items())[:8]
        histogram = ", ".join(f"{value:g}: {count}" for value, count in counts)
        return (
            f"for {self._equal_steps} steps all completions of each prompt earned the same reward, "
            f"which teaches nothing (rewards {histogram}): use easier or harder problems, or look "
            "at samples.jsonl for a fault of the reward"
        )


def empty_completions(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning if more than half of the completions are empty, else ""."""
    empty = sum(not sample["completion"] for sample in samples)
    if 2 * empty <= len(samples):
        return ""
    return (
        f"{empty} of {len(samples)} completions are empty: does the prompt end as the model "
        "expects (chat template), and is the end-of-sequence token the right one "
        "(generation_config.json)?"
    )
