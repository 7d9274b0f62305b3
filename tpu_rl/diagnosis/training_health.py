"""Warnings while a run goes on that it learns nothing, or computes what it need not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

PATIENCE = 20
"""The number of steps with equal rewards in every group before a warning, and between warnings."""

EMPTY_STEPS = 3
"""The number of steps in a row that compute mostly empty rows before a warning."""
MOSTLY_EMPTY = 0.5
"""The share of rows without a token beyond which a step counts as such."""


class HealthMonitor:
    """Watches the metrics and samples of each step."""

    def __init__(self, patience: int = PATIENCE):
        self._patience = patience
        self._equal_steps = 0
        self._rewards: Counter[float] = Counter()
        self._empty_steps = 0
        self._has_said_unscored = False

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
        lines = (
            self._equal_rewards(metrics, samples),
            empty_completions(samples),
            self._empty_rows(metrics),
            self._unscored(metrics),
        )
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

    def _unscored(self, metrics: Mapping[str, float]) -> str:
        """Return a warning, once, if some completions have no reward and no fault, else ""."""
        share = metrics.get("reward/unscored", 0.0)
        if not share or self._has_said_unscored:
            return ""
        self._has_said_unscored = True
        return (
            f"{share:.0%} of the completions have no reward (every function returned None), so "
            "nothing is learned from them; reward/unscored of metrics.jsonl counts them"
        )

    def _empty_rows(self, metrics: Mapping[str, float]) -> str:
        """Return a warning if so many steps in a row computed mostly empty rows, else ""."""
        share = metrics.get("perf/empty_rows", 0.0)
        self._empty_steps = self._empty_steps + 1 if share > MOSTLY_EMPTY else 0
        if self._empty_steps != EMPTY_STEPS:
            return ""
        return (
            f"{share:.0%} of the packed rows that updates compute hold no token: a smaller "
            "--batch.micro-batch-rows, or a shorter --batch.row-length, computes less"
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
