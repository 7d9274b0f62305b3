"""Drawn pictures: count the marks of a color, find one of them, or look at one closely.

A picture is a grid of `cells` x `cells` cells, and some of them have a colored shape. There are two
questions. "count red?" has a digit as its answer, and "find blue?" the row and the column of the
only blue mark, each from 1, "2,3". Nothing in the text tells the answer: a model has to look at the
picture.

"which red?" asks for the shape of the only red mark in a picture that is too coarse to tell:
it shows where marks are, and their colors. In the environment `picture_look` the model writes
"look 2,3", and sees that cell enlarged.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tpu_rl.environments.answer_text import answer_text
from tpu_rl.environments.answers import is_denied
from tpu_rl.environments.task import Task, text_of
from tpu_rl.errors import InputError
from tpu_rl.rewards.verifier import Verifier
from tpu_rl.tasks.made_rows import MadeRows

COLORS = {"red": (220, 30, 30), "green": (20, 160, 60), "blue": (40, 70, 230)}
SHAPES = ("square", "cross", "bar")
COARSE = "cell"
"""The shape of all marks of a coarse picture."""
LOOK = "which"
"""The beginning of questions about shapes."""
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 ,?=\n"
"""The characters of questions and answers."""

Questions = Literal["count", "find", "both", "look"]
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
class PicturesSource(MadeRows):
    """`rows` questions with the columns `prompt`, `completion`, `answer` and `images`.

    `images` has one PNG file as bytes. Rows about
    shapes also have `sharp`, the picture that the environment enlarges.
    """

    config: PicturesData = PicturesData()
    split: Literal["train", "eval"] = "train"
    rows: int = 200_000
    seed: int = 0
    shows_steps: bool = False
    """Rows about shapes are the steps of an episode, to imitate: half of them where to look, and
    half the answer once the cell is seen."""

    STREAM = (11,)

    def __len__(self) -> int:
        return self.rows

    def row(self, index: int) -> dict[str, Any]:
        if self.config.questions == "look":
            return self._look(index)
        question, answer, picture = _sample(self.config, self.generator(index, 0))
        if self.config.control == "blank":
            picture = np.full_like(picture, 255)
        elif self.config.control == "shuffled":
            picture = _sample(self.config, self.generator(index, 1))[2]
        # The mark of `tokenizers.images` stands for the picture.
        prompt = f"\ufffc{question}?\n"
        return {"prompt": prompt, "completion": answer, "answer": answer, "images": [_png(picture)]}

    def _look(self, index: int) -> dict[str, Any]:
        generator = self.generator(index, 0)
        color, shape, place, marks = _one_of_a_color(self.config, generator)
        shown = marks
        if self.config.control == "shuffled":
            shown = _one_of_a_color(self.config, self.generator(index, 1))[3]
        coarse = _draw(self.config, {cell: (name, COARSE) for cell, (name, _) in shown.items()})
        sharp = _draw(self.config, marks)
        if self.config.control == "blank":
            coarse = np.full_like(coarse, 255)
        images = [_png(coarse)]
        prompt = f"\ufffc{LOOK} {color}?\n"
        completion = f"look {place[0]},{place[1]}\n"
        if self.shows_steps and index % 2:
            images.append(_png(enlarged(sharp, self.config.cells, *place)))
            prompt += f"{completion}\ufffc\n"
            completion = f"{shape}\n"
        row = {"prompt": prompt, "completion": completion, "answer": shape, "images": images}
        return row | {"sharp": _png(sharp), "cells": self.config.cells}


def correct(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any
) -> list[float]:
    """Return 1 for each completion whose last number, pair of numbers or shape is the answer.

    Thoughts are left out.
    """
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        text = answer_text(text_of(completion))
        answers = [*re.finditer(rf"\d+(?:,\d+)?|{'|'.join(SHAPES)}", text)]
        is_right = bool(answers) and answers[-1][0] == str(right)
        rewards.append(float(is_right and not is_denied(text[: answers[-1].start()])))
    return rewards


TASK = Task(
    settings=PicturesData,
    train_rows=lambda data, seed: PicturesSource(data, "train", data.rows, seed),
    demonstrations=lambda data, seed: PicturesSource(
        data, "train", data.rows, seed, shows_steps=True
    ),
    evaluation_rows=lambda data, count: PicturesSource(data, "eval", count),
)

VERIFIERS = {"pictures": Verifier(correct)}


def _sample(config: PicturesData, generator: np.random.Generator) -> tuple[str, str, np.ndarray]:
    """Return (question, answer, picture [H, W, 3] uint8)."""
    asks_count = config.questions == "count" or (
        config.questions == "both" and generator.random() < 0.5
    )
    if not asks_count:
        color, _, (row, column), marks = _one_of_a_color(config, generator)
        return f"find {color}", f"{row},{column}", _draw(config, marks)
    num_cells = config.cells**2
    marks: dict[int, tuple[str, str]] = {}
    color = str(generator.choice([*COLORS]))
    count = int(generator.integers(0, min(num_cells // 2, 9) + 1))
    others = int(generator.integers(0, num_cells // 2 + 1))
    cells = generator.permutation(num_cells)[: count + others]
    other_colors = [name for name in COLORS if name != color]
    for number, cell in enumerate(cells):
        name = color if number < count else str(generator.choice(other_colors))
        marks[int(cell)] = (name, str(generator.choice(SHAPES)))
    return f"count {color}", str(count), _draw(config, marks)


def _one_of_a_color(
    config: PicturesData, generator: np.random.Generator
) -> tuple[str, str, tuple[int, int], dict[int, tuple[str, str]]]:
    """Return (color, shape, (row, column) from 1, marks) of a picture with one mark of a color."""
    color, shape = str(generator.choice([*COLORS])), str(generator.choice(SHAPES))
    cells = generator.permutation(config.cells**2)[: 1 + generator.integers(1, config.cells**2)]
    others = [name for name in COLORS if name != color]
    marks = {
        int(cell): (str(generator.choice(others)), str(generator.choice(SHAPES))) for cell in cells
    }
    marks[int(cells[0])] = (color, shape)
    row, column = divmod(int(cells[0]), config.cells)
    return color, shape, (row + 1, column + 1), marks


def enlarged(picture: np.ndarray, cells: int, row: int, column: int) -> np.ndarray:
    """Return a cell, from 1, of a picture [H, W, 3], as large as the picture."""
    size = len(picture) // cells
    cell = picture[(row - 1) * size : row * size, (column - 1) * size : column * size]
    return cell.repeat(cells, 0).repeat(cells, 1)


class PictureLook:
    """A question about a coarse picture, in which the model looks closely at cells."""

    def reset(self, sharp: bytes, cells: int, answer: str, **row: Any) -> None:
        """Take a row of `PicturesSource` with the questions "look"."""
        from PIL import Image

        self._sharp = np.asarray(Image.open(io.BytesIO(sharp)))
        self._cells = cells
        self._answer = answer
        self.looked = 0

    def step(self, text: str) -> tuple[Any, float | None, bool, dict[str, Any]]:
        """Show the cell that the model asks for, or judge its answer."""
        request = re.search(r"look ([1-9]),([1-9])", text)
        if request is None:
            return "", correct([], [text], answer=[self._answer])[0], True, {}
        row, column = map(int, request.groups())
        if max(row, column) > self._cells:
            return "\n", None, False, {}
        from PIL import Image

        self.looked += 1
        cell = Image.fromarray(enlarged(self._sharp, self._cells, row, column))
        return [cell, "\n"], None, False, {}


def _draw(config: PicturesData, marks: dict[int, tuple[str, str]]) -> np.ndarray:
    """Return the picture [H, W, 3] uint8 of marks: cell -> (color, shape)."""
    picture = np.full((config.pixels, config.pixels, 3), 255, np.uint8)
    size = config.pixels // config.cells
    third = max(size // 3, 1)
    for cell, (color, shape) in marks.items():
        row, column = divmod(cell, config.cells)
        patch = picture[row * size : (row + 1) * size, column * size : (column + 1) * size]
        middle = slice(third, size - third)
        if shape == COARSE:
            patch[:] = COLORS[color]
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


ENVIRONMENTS = {"picture_look": PictureLook}
