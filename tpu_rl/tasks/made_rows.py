"""Rows that tasks make: row i is a function of the fields of its source and i."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar, Literal

import numpy as np

from tpu_rl.environments.task import Task

ENDLESS = 2**31 - 1
"""Rows of a source: practically endless, and within the 32 bits of grain's shuffle."""
EVALUATION_SHARE = 8
"""One problem in this many belongs to evaluation."""


class MadeRows:
    """A source of rows. It is a frozen dataclass, whose `repr` identifies it in checkpoints."""

    STREAM: ClassVar[tuple[int, ...]] = ()
    """The numbers that tell a task's random numbers from those of others."""
    SPLITS: ClassVar[tuple[str, ...]] = ("train", "eval")
    split: Any
    seed: int

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.row(int(index))

    def row(self, index: int) -> dict[str, Any]:
        """Make a row."""
        raise NotImplementedError

    def generator(self, index: int, *others: int) -> np.random.Generator:
        """Return the random numbers of a row; `others` tell several of them apart."""
        entropy = (self.seed, *self.STREAM, self.SPLITS.index(self.split), index, *others)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def split_of(text: str) -> Literal["train", "eval"]:
    """Return the split of the problem with a text, in every configuration."""
    digest = hashlib.sha256(text.encode()).digest()
    return "eval" if digest[0] % EVALUATION_SHARE == 0 else "train"


def task(settings: type, source: Any, **others: Any) -> Task:
    """Return the task of a source with the fields config, split and seed, whose rows also have what
    demonstrations need."""

    def train_rows(data: Any, seed: int) -> MadeRows:
        return source(data, "train", seed)

    return Task(settings, train_rows, train_rows, lambda data, _: source(data, "eval"), **others)
