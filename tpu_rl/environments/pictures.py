"""Drawn pictures: count the marks of a color, or find one of them.

A picture is a grid of `cells` x `cells` cells, and some of them have a colored shape. There are two
questions. "count red?" has a digit as its answer, and "find the blue cross?" the row and the column
of the only blue cross, each from 1, "2,3". Nothing in the text tells the answer: a model has to
look at the picture.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tpu_rl.environments.task import Task, text_of
from tpu_rl.errors import InputError

COLORS = {"red": (220, 30, 30), "green": (20, 160, 60), "blue": (40, 70, 230)}
SHAPES = ("square", "cross", "bar")
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 ,?=\n"
"""The characters of questions and answers."""

Questions = Literal["count", "find", "both"]
Control = Literal["none", "blank", "shuffled"]


@dataclass(frozen=True)
class PicturesData:
    """Questions about drawn pictures."""

    cells: int = 4
    """Rows and columns of cells in a picture."""
    pixels: int = 32
    """Height and width of a picture, a multiple of `cells`."""
    questions: Questions = "both"
    control: Control = "none"
    """The picture that a control shows instead. blank: an empty one. shuffled: that of another
    question. A model that answers as well as before does not look."""
    rows: int = 200_000
    """Training questions."""

    def __post_init__(self):
        if not 2 <= self.cells <= 9 or self.pixels % self.cells or self.pixels < 4 * self.cells:
            raise InputError(
                f"pictures of {self.pixels} pixels cannot have {self.cells} cells a side",
                where="--data.cells, --data.pixels",
                why="there are 2 to 9 cells a side, each of 4 pixels or more",
                fix="use e.g. 4 cells and 32 pixels",
            )


@dataclass(frozen=True)
class PicturesSource:
    """`rows` questions with the columns `prompt`, `completion`, `answer` and `images`.

    Row i is a function of (config, split, seed, i). `images` has one PNG file as bytes.
    """

    config: PicturesData = PicturesData()
    split: Literal["train", "eval"] = "train"
    rows: int = 200_000
    seed: int = 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of {self.rows}")
        question, answer, picture = _sample(self.config, self._generator(index))
        if self.config.control == "blank":
            picture = np.full_like(picture, 255)
        elif self.config.control == "shuffled":
            picture = _sample(self.config, self._generator(index, other=1))[2]
        # The mark of `tokenizers.images` stands for the picture.
        prompt = f"\ufffc{question}?\n"
        return {"prompt": prompt, "completion": answer, "answer": answer, "images": [_png(picture)]}

    def _generator(self, index: int, other: int = 0) -> np.random.Generator:
        split_number = {"train": 0, "eval": 1}[self.split]
        entropy = (self.seed, 11, split_number, int(index), other)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def correct(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 for each completion whose last number, or last pair of numbers, is the answer."""
    del prompts
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        found = re.findall(r"\d+(?:,\d+)?", text_of(completion))
        rewards.append(float(bool(found) and found[-1] == right))
    return rewards


def _train_rows(data: PicturesData, seed: int) -> PicturesSource:
    return PicturesSource(data, "train", data.rows, seed)


def _evaluation_rows(data: PicturesData, count: int) -> PicturesSource:
    return PicturesSource(data, "eval", count)


TASK = Task(
    settings=PicturesData,
    train_rows=_train_rows,
    demonstrations=_train_rows,
    evaluation_rows=_evaluation_rows,
    rewards={"pictures": correct},
)


def _sample(config: PicturesData, generator: np.random.Generator) -> tuple[str, str, np.ndarray]:
    """Return (question, answer, picture [H, W, 3] uint8)."""
    kinds = [(color, shape) for color in COLORS for shape in SHAPES]
    asks_count = config.questions == "count" or (
        config.questions == "both" and generator.random() < 0.5
    )
    num_cells = config.cells**2
    marks: dict[int, tuple[str, str]] = {}
    if asks_count:
        color = str(generator.choice([*COLORS]))
        count = int(generator.integers(0, min(num_cells // 2, 9) + 1))
        others = int(generator.integers(0, num_cells // 2 + 1))
        cells = generator.permutation(num_cells)[: count + others]
        other_colors = [name for name in COLORS if name != color]
        for number, cell in enumerate(cells):
            name = color if number < count else str(generator.choice(other_colors))
            marks[int(cell)] = (name, str(generator.choice(SHAPES)))
        question = f"count {color}"
        answer = str(count)
    else:
        wanted = kinds[generator.integers(len(kinds))]
        others = int(generator.integers(1, num_cells))
        cells = generator.permutation(num_cells)[: 1 + others]
        other_kinds = [kind for kind in kinds if kind != wanted]
        for number, cell in enumerate(cells):
            is_wanted = number == 0
            kind = wanted if is_wanted else other_kinds[generator.integers(len(other_kinds))]
            marks[int(cell)] = kind
        row, column = divmod(int(cells[0]), config.cells)
        question = f"find the {wanted[0]} {wanted[1]}"
        answer = f"{row + 1},{column + 1}"
    return question, answer, _draw(config, marks)


def _draw(config: PicturesData, marks: dict[int, tuple[str, str]]) -> np.ndarray:
    """Return the picture [H, W, 3] uint8 of marks: cell -> (color, shape)."""
    picture = np.full((config.pixels, config.pixels, 3), 255, np.uint8)
    size = config.pixels // config.cells
    third = max(size // 3, 1)
    for cell, (color, shape) in marks.items():
        row, column = divmod(cell, config.cells)
        patch = picture[row * size : (row + 1) * size, column * size : (column + 1) * size]
        middle = slice(third, size - third)
        if shape == "square":
            patch[1 : size - 1, 1 : size - 1] = COLORS[color]
        if shape in ("cross", "bar"):
            patch[middle, 1 : size - 1] = COLORS[color]
        if shape == "cross":
            patch[1 : size - 1, middle] = COLORS[color]
    return picture


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG", compress_level=1)
    return file.getvalue()
