"""Star graphs: find the one path from the centre to the goal (Bachmann and Nagarajan, arXiv 2403.06963).

`degree` branches of `length` - 1 nodes each leave the centre, and the goal is the end of one of them. A prompt lists
the edges in random order, then centre and goal, "12,5|7,30|5,9|12,7/12,9="; the answer is the path, "12,5,9". Whoever
learns it by imitation, one node after the other, can guess the branch and then follow edges: every node but the first
is easy given the one before it. That shortcut is right once in `degree` times, and hides that only the first step, from
the centre, needs the whole path to be looked up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tpu_rl.errors import InputError


@dataclass(frozen=True)
class StarGraph:
    """Which graphs there are."""

    degree: int = 2
    """Branches that leave the centre."""
    length: int = 5
    """Nodes of the path, centre and goal included."""
    nodes: int = 50
    """Names of nodes: 0 .. nodes - 1, none twice in a graph."""

    def __post_init__(self):
        needed = 1 + self.degree * (self.length - 1)
        if self.degree < 2 or self.length < 2:
            raise InputError(f"a star graph of degree {self.degree} and length {self.length}: both are 2 or more")
        if self.nodes < needed:
            raise InputError(f"{self.nodes} names for {needed} nodes", fix=f"raise nodes to {needed} or more")


@dataclass(frozen=True)
class StarGraphSource:
    """`rows` graphs: row i is {"prompt", "completion", "answer"}, texts, a function of (config, split, seed, i).

    `answer` is the path, and `completion` the same: what demonstrations imitate. Graphs are so many that those of two
    splits never agree (the probability is below rows^2 / nodes!).
    """

    config: StarGraph = StarGraph()
    split: Literal["train", "post", "eval"] = "train"
    rows: int = 200_000
    """How many graphs there are: few can be learned by heart."""
    seed: int = 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, str]:
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of {self.rows}")
        split = {"train": 0, "post": 1, "eval": 2}[self.split]
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, 7, split, int(index)))))
        prompt, path = _draw(self.config, generator)
        return {"prompt": prompt, "completion": path, "answer": path}


def _draw(config: StarGraph, generator: np.random.Generator) -> tuple[str, str]:
    """(prompt, path) of a random graph."""
    names = generator.permutation(config.nodes)[: 1 + config.degree * (config.length - 1)]
    centre, branches = names[0], names[1:].reshape(config.degree, config.length - 1)
    paths = [[centre, *branch] for branch in branches]
    edges = [f"{a},{b}" for path in paths for a, b in zip(path, path[1:], strict=False)]
    listed = "|".join(edges[i] for i in generator.permutation(len(edges)))
    path = paths[generator.integers(config.degree)]
    return f"{listed}/{centre},{path[-1]}=", ",".join(map(str, path))


def parse_path(text: str) -> tuple[int, ...]:
    """The node names in a completion, in order; commas may be spaces (a tokenizer without commas decodes so)."""
    return tuple(int(name) for name in re.findall(r"[0-9]+", text))
