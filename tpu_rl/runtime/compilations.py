"""A line for each program of a run that is compiled again, with what changed.

A program is compiled for the shapes of its arguments. When they change, a step takes seconds to
minutes longer, and without a word it looks as if the run hung.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

LOGGER = "jax._src.interpreters.pxla"
"""The logger of JAX that tells what is compiled, at level DEBUG."""
MESSAGE = "Compiling %s with global shapes and types"
MAX_CHANGES = 4


class Program(NamedTuple):
    """The words for a program."""

    name: str
    axes: dict[int, tuple[str, ...]]
    """Number of dimensions of an argument that changes -> the names of these."""


COMPLETIONS = ("completions", "tokens")
PACKED = ("micro-batches", "packed rows", "tokens per row")
PROGRAMS = {
    "jit(update)": Program("the update step", {3: PACKED}),
    "jit(make_batch)": Program("the batch", {2: COMPLETIONS, 4: ("updates", *PACKED)}),
    "jit(prefill)": Program("the prefill of prompts", {2: ("prompts", "prompt tokens")}),
    "jit(decode_segment)": Program("decoding", {2: COMPLETIONS}),
    "jit(batch_log_probs)": Program("the log-probs of given completions", {2: COMPLETIONS}),
    "jit(score)": Program("the reward model", {2: COMPLETIONS}),
    "jit(accuracies)": Program("the accuracy on pairs", {2: COMPLETIONS}),
}
"""The programs that take long, by the names that JAX gives them. Others are not told of."""


@contextmanager
def watch(tell: Callable[[str], None] = print) -> Iterator[None]:
    """Tell of each program of PROGRAMS that is compiled again until the context ends.

    Should a version of JAX log something else, nothing is told.
    """
    logger = logging.getLogger(LOGGER)
    level = logger.level
    # What would be logged without this context.
    usual_level = logger.getEffectiveLevel()
    known: dict[str, list[Sequence[Any]]] = {}
    placed: set[tuple[str, ...]] = set()

    def observe(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(MESSAGE) and isinstance(record.args, tuple):
            name, shapes = str(record.args[0]), record.args[1]
            if name in PROGRAMS and isinstance(shapes, (list, tuple)):
                earlier = known.setdefault(name, [])
                where = (name, str(shapes), str(record.args[2:]))
                if earlier:
                    changes = cause(name, earlier, shapes) or (
                        "the same shapes, with other settings of it, such as the temperature"
                        if where in placed
                        else "the same shapes, which lie on other devices or are divided otherwise"
                    )
                    tell(f"compiling {PROGRAMS[name].name} again: {changes}")
                earlier.append(shapes)
                placed.add(where)
        return record.levelno >= usual_level

    logger.addFilter(observe)
    logger.setLevel(min(usual_level, logging.DEBUG))
    try:
        yield
    finally:
        logger.removeFilter(observe)
        logger.setLevel(level)


def cause(name: str, earlier: Sequence[Sequence[Any]], shapes: Sequence[Any]) -> str:
    """Describe the difference from the most similar arguments that the program was compiled for;
    empty if their shapes and types are the same.

    Args:
        name: a key of PROGRAMS.
        earlier: the arguments of each earlier compilation, which have a `shape` and a `dtype`.
        shapes: the arguments now.
    """

    def changed(others: Sequence[Any]) -> list[tuple[Any, Any]]:
        pairs = zip(others, shapes, strict=True)
        return [(old, new) for old, new in pairs if str(old) != str(new)]

    # Of equally similar ones, the latest.
    comparable = [changed(others) for others in reversed(earlier) if len(others) == len(shapes)]
    if not comparable:
        return f"{len(earlier[-1])} -> {len(shapes)} arrays"
    named: dict[str, None] = {}
    others: dict[str, None] = {}
    for old, new in min(comparable, key=len):
        if old.dtype != new.dtype or old.ndim != new.ndim:
            others[f"{old} -> {new}"] = None
            continue
        names = PROGRAMS[name].axes.get(old.ndim, ())
        for axis, (before, after) in enumerate(zip(old.shape, new.shape, strict=True)):
            if before == after:
                continue
            if axis < len(names):
                named[f"{names[axis]} {before} -> {after}"] = None
            else:
                others[f"axis {axis} of {new} {before} -> {after}"] = None
    lines = list(named or others)
    return ", ".join(lines[:MAX_CHANGES])
