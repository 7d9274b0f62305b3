"""Signs that a run learns nothing, said while it goes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

PATIENCE = 20
"""Steps without any difference between the rewards of a prompt's completions before it is said, and said again."""


class Signs:
    """Looks at each step's metrics and samples."""

    def __init__(self, patience: int = PATIENCE):
        self._patience = patience
        self._equal_steps = 0
        self._rewards: Counter[float] = Counter()

    def warn(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        for line in self.observe(metrics, samples):
            print(f"warning: step {step}: {line}", file=sys.stderr)

    def observe(self, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> list[str]:
        """What people should know after this step, one line each."""
        return [line for line in (self._equal_rewards(metrics, samples), empty_completions(samples)) if line]

    def _equal_rewards(self, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> str:
        if metrics.get("reward/zero_std_groups") != 1:
            self._equal_steps, self._rewards = 0, Counter()
            return ""
        self._equal_steps += 1
        self._rewards.update(round(float(sample["reward"]), 3) for sample in samples)
        if self._equal_steps % self._patience:
            return ""
        histogram = ", ".join(f"{value:g}: {count}" for value, count in sorted(self._rewards.items())[:8])
        return (
            f"for {self._equal_steps} steps all completions of a prompt earned the same, which teaches nothing "
            f"(rewards {histogram}): use easier or harder problems, or look at samples.jsonl for the reward's fault"
        )


def empty_completions(samples: Sequence[Mapping[str, Any]]) -> str:
    """A line where more than half of the completions are empty."""
    empty = sum(not sample["completion"] for sample in samples)
    if 2 * empty <= len(samples):
        return ""
    return (
        f"{empty} of {len(samples)} completions are empty: does the prompt end as the model expects (chat template), "
        "and is the end-of-sequence token the right one (generation_config.json)?"
    )
