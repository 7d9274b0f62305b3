"""Star graphs: find the one path from the center to the goal (Bachmann and Nagarajan, arXiv
2403.06963).

`degree` branches of `length` - 1 nodes each leave the center, and the goal is the end of one of
them. A prompt lists the edges in random order, then center and goal, "12,5|7,30|5,9|12,7/12,9=".
The answer is the path, "12,5,9".

A model that imitates paths node by node can guess the branch and then follow edges: given the node
before it, every node but the first is easy. This shortcut is right once in `degree` times, and it
hides that only the first step, from the center, needs the whole path to be looked up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from tpu_rl import ranges
from tpu_rl.environments.task import Task, text_of
from tpu_rl.errors import InputError
from tpu_rl.ranges import In
from tpu_rl.rewards.verifier import Verifier
from tpu_rl.tasks.made_rows import MadeRows


@dataclass(frozen=True)
class StarGraph(ranges.Checked):
    """The graphs that can occur."""

    FLAG = "--data"
    degree: Annotated[int, In("[2, inf)")] = 2
    """Branches that leave the center."""
    length: Annotated[int, In("[2, inf)")] = 5
    """Nodes of the path, center and goal included."""
    nodes: int = 50
    """Names of nodes: 0 to nodes - 1, none twice in a graph."""

    def __post_init__(self):
        super().__post_init__()
        if self.nodes < self.num_nodes:
            raise InputError(
                f"{self.nodes} names are too few for {self.num_nodes} nodes",
                where="nodes",
                why="no name comes twice in a graph",
                fix=f"raise nodes to {self.num_nodes} or more",
            )

    @property
    def num_nodes(self) -> int:
        """Nodes of a graph."""
        return 1 + self.degree * (self.length - 1)


@dataclass(frozen=True)
class StarGraphData:
    """Paths in star graphs; pretraining, post-training and evaluation have different graphs."""

    graph: StarGraph = StarGraph()
    rows: int = 200_000
    """Training graphs."""
    split: Literal["train", "post"] = "post"
    """The graphs that are trained on: those of pretraining, or others."""
    demonstrated: Literal["right", "any"] = "right"
    """Paths that demonstrations show. right: to the goal. any: down a random branch to its end,
    which is the goal once in `degree` times."""


@dataclass(frozen=True)
class StarGraphSource(MadeRows):
    """`rows` graphs with the columns `prompt`, `completion` and `answer`, all texts.

    `answer` is the path to the goal, and
    `completion` the path that demonstrations show. There are so many graphs that those of two
    splits never agree (the probability is below rows^2 / nodes!).
    """

    config: StarGraph = StarGraph()
    split: Literal["train", "post", "eval"] = "train"
    rows: int = 200_000
    """Number of graphs. A few can be memorized."""
    seed: int = 0
    demonstrated: Literal["right", "any"] = "right"

    STREAM = (7,)
    SPLITS = ("train", "post", "eval")

    def __len__(self) -> int:
        return self.rows

    def row(self, index: int) -> dict[str, str]:
        prompt, answer, other = _sample(self.config, self.generator(index))
        completion = answer if self.demonstrated == "right" else other
        return {"prompt": prompt, "completion": completion, "answer": answer}


def parse_path(text: str) -> tuple[int, ...]:
    """Return the node names in a completion, in order.

    Any text may separate them: a tokenizer without commas decodes to spaces.
    """
    return tuple(int(name) for name in re.findall(r"[0-9]+", text))


def correct(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 for each completion that is the whole path from the center to the goal, else 0."""
    paths = [parse_path(text_of(completion)) for completion in completions]
    return [float(path == parse_path(right)) for path, right in zip(paths, answer, strict=True)]


def _train_rows(data: StarGraphData, seed: int) -> StarGraphSource:
    return StarGraphSource(data.graph, data.split, data.rows, seed, data.demonstrated)


TASK = Task(
    settings=StarGraphData,
    train_rows=_train_rows,
    demonstrations=_train_rows,
    evaluation_rows=lambda data, count: StarGraphSource(data.graph, "eval", count),
)

VERIFIERS = {"star_graph": Verifier(correct)}


def _sample(config: StarGraph, generator: np.random.Generator) -> tuple[str, str, str]:
    """Return (prompt, path to the goal, path down a random branch) of a random graph."""
    names = generator.permutation(config.nodes)[: config.num_nodes]
    center = names[0]
    branches = names[1:].reshape(config.degree, config.length - 1)
    paths = [[center, *branch] for branch in branches]
    edges = [f"{a},{b}" for path in paths for a, b in zip(path, path[1:], strict=False)]
    shuffled = "|".join(edges[i] for i in generator.permutation(len(edges)))
    path = paths[generator.integers(config.degree)]
    walk = paths[generator.integers(config.degree)]
    prompt = f"{shuffled}/{center},{path[-1]}="
    return prompt, ",".join(map(str, path)), ",".join(map(str, walk))
