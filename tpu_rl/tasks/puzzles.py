"""Puzzles that make and solve themselves: countdown, traced programs, paths in graphs, and steps of
solutions that are masked or shuffled.

A row of any kind has a prompt, a worked solution that ends with "#" and the answer, and the answer.
The verifier reads what stands behind the last "#". Row i is a function of the settings, the split,
the seed and i; one prompt in eight is kept for evaluation.

countdown      make a number of others; the solution turns back `backtracks` times before it is
               right (arXiv 2505.24273); with `corrupt`, results of those attempts are random
traced_value   the value of a variable after a line of a program has run for the n-th time, and
traced_next    the line that runs next, both as Python's own tracer saw them (ExecVerify; REval,
               arXiv 2403.16437)
graph_path     a shortest path, edge by edge; each step has a label: is the path still shortest
               (GraphPRM, arXiv 2503.00845)
masked_step    the step that is missing from the solution of an expression, and
ordered_steps  its shuffled steps in order; the reward is the share of steps in their places
               (MR-RLVR)
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import FrameType
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from tpu_rl import ranges
from tpu_rl.environments.task import text_of
from tpu_rl.errors import InputError
from tpu_rl.ranges import In
from tpu_rl.rewards.verifier import AnswerReaders, Verifier
from tpu_rl.tasks import arithmetic, calculator
from tpu_rl.tasks.made_rows import MadeRows, split_of, task

OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
LONGEST = 200
"""Characters of an expression that the verifier reads."""


@dataclass(frozen=True)
class PuzzlesData(ranges.Checked):
    """Puzzles of one or several kinds, made as needed; training and evaluation never share one."""

    FLAG = "--data"
    kinds: tuple[str, ...] = ("countdown",)
    """Any of countdown, traced_value, traced_next, graph_path, masked_step and ordered_steps. Row i
    is of kind i modulo their number."""
    size: Annotated[int, In("[3, 8]")] = 4
    """Numbers of countdown, terms of expressions, statements of programs, nodes of graphs."""
    backtracks: Annotated[int, In("[0, 20]")] = 0
    """countdown: attempts of the solution that fail before the last one."""
    corrupt: bool = False
    """countdown: results of those attempts are random numbers."""
    chat: bool = True
    """True if a prompt is a message of the user, False if it is a text to continue."""

    def __post_init__(self):
        super().__post_init__()
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise InputError(
                f"no puzzle is called {', '.join(unknown) or 'nothing'}",
                where="--data.kinds",
                fix=f"use any of {', '.join(KINDS)}",
            )


class Puzzle(NamedTuple):
    """A puzzle and its solution."""

    prompt: str
    steps: str
    """The solution before the answer."""
    answer: str


class Kind(NamedTuple):
    """A kind of puzzle."""

    make: Callable[[PuzzlesData, np.random.Generator], Puzzle]
    judge: Callable[[str, str, str], float]
    """(prompt, answer of a completion, right answer) -> reward."""
    mark: str
    """Text of its prompts, and of no other kind's."""


# --- countdown ---


def _countdown(config: PuzzlesData, generator: np.random.Generator) -> Puzzle:
    numbers = [int(number) for number in generator.integers(1, 21, config.size)]

    def attempt() -> tuple[str, str, int]:
        """Return (the expression, its calculation, its value) of the numbers in random order."""
        first, *others = (numbers[i] for i in generator.permutation(len(numbers)))
        text, value, steps = str(first), first, []
        for other in others:
            sign = "+-*"[generator.integers(3)]
            result = OPERATORS[sign](value, other)
            steps.append(f"{value} {sign} {other} = {result}")
            text, value = f"({text} {sign} {other})", result
        return text, ", ".join(steps), value

    right, calculation, target = attempt()
    lines: list[str] = []
    while len(lines) < config.backtracks:
        _, steps, value = attempt()
        if value == target:
            continue
        if config.corrupt:
            steps = re.sub(r"= -?\d+", lambda _: f"= {generator.integers(-99, 100)}", steps)
        lines.append(f"{steps}: not {target}, back\n")
    lines.append(f"{calculation}: yes\n")
    shown = ", ".join(map(str, numbers))
    prompt = f"Make {target} of {shown}. Use each number once, with + - * and brackets.\n"
    return Puzzle(prompt, "".join(lines), right[1:-1])


def _is_countdown(prompt: str, said: str, answer: str) -> float:
    target, *numbers = map(int, re.findall(r"-?\d+", prompt.partition(". Use")[0]))
    used = sorted(map(int, re.findall(r"\d+", said)))
    return float(used == sorted(numbers) and _value(said) == target)


def _value(text: str) -> Fraction | None:
    """Return the value of an expression of + - * and brackets, or None."""
    plain = " ".join(text.split())
    is_read = re.fullmatch(r"[0-9+*() -]+", plain) is not None
    return calculator.calculate(plain, LONGEST) if is_read and len(text) <= LONGEST else None


# --- traced programs ---


def _program(config: PuzzlesData, generator: np.random.Generator) -> list[str]:
    names = ["a", "b", "c"]

    def assign() -> str:
        target, left, right = (names[i] for i in generator.integers(0, 3, 3))
        other = right if generator.random() < 0.5 else str(generator.integers(1, 10))
        return f"{target} = {left} {'+-'[generator.integers(2)]} {other}"

    lines = [f"{name} = {generator.integers(0, 10)}" for name in names]
    lines.append(f"for i in range({generator.integers(2, 4)}):")
    for _ in range(config.size - 2):
        if generator.random() < 0.4:
            lines.append(f"    if {names[generator.integers(3)]} > {generator.integers(0, 10)}:")
            lines.append(f"        {assign()}")
        else:
            lines.append(f"    {assign()}")
    if lines[-1].endswith(":"):
        lines.append(f"    {assign()}")
    return [*lines, assign()]


def trace(lines: Sequence[str]) -> list[tuple[int, dict[str, int]]]:
    """Return (line number from 1, the variables when it has run) of each line that runs.

    The lines run in this process: they must be a program of this file.
    """
    code = compile("\n".join(lines), "<puzzle>", "exec")
    variables: dict[str, Any] = {"__builtins__": {"range": range}}
    visits: list[int] = []
    states: list[dict[str, int]] = []

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event in ("line", "return"):
            if visits:
                plain = {k: v for k, v in variables.items() if isinstance(v, int)}
                states.append(plain)
            if event == "line":
                visits.append(frame.f_lineno)
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        exec(code, variables)
    finally:
        sys.settrace(before)
    return list(zip(visits, states, strict=True))


def _traced(asks_next: bool) -> Callable[[PuzzlesData, np.random.Generator], Puzzle]:
    def make(config: PuzzlesData, generator: np.random.Generator) -> Puzzle:
        lines = _program(config, generator)
        visits = trace(lines)
        # From the loop on, and not the last visit, which nothing follows.
        step = int(generator.integers(3, len(visits) - 1))
        line, variables = visits[step]
        times = sum(visited == line for visited, _ in visits[: step + 1])
        numbered = "\n".join(f"{number} {text}" for number, text in enumerate(lines, 1))
        walk = " ".join(str(visited) for visited, _ in visits[: step + 1])
        begin = f"{numbered}\nLine {line} has run for the {times}. time. "
        if asks_next:
            answer = str(visits[step + 1][0])
            return Puzzle(f"{begin}Which line runs next?\n", f"lines {walk}\n", answer)
        name = "abc"[generator.integers(3)]
        values = [state.get(name) for _, state in visits[: step + 1]]
        changes = [
            v for i, v in enumerate(values) if v is not None and (not i or v != values[i - 1])
        ]
        steps = f"lines {walk}\n{name} = {', '.join(map(str, changes))}\n"
        return Puzzle(f"{begin}What is {name}?\n", steps, str(variables[name]))

    return make


# --- graphs ---


def _graph_path(config: PuzzlesData, generator: np.random.Generator) -> Puzzle:
    count = config.size + 2
    names = generator.permutation(np.arange(10, 100))[:count].tolist()
    # A tree, so that all is connected, and a few more edges.
    edges = {frozenset((names[i], names[generator.integers(i)])) for i in range(1, count)}
    for _ in range(config.size // 2):
        edges.add(frozenset(generator.permutation(names)[:2].tolist()))
    start, goal = (int(name) for name in generator.permutation(names)[:2])
    ordered = sorted(tuple(sorted(edge)) for edge in edges)
    shown = " ".join(
        f"{a}-{b}" for a, b in (ordered[i] for i in generator.permutation(len(ordered)))
    )
    distance = _distances(edges, goal)
    path = [start]
    while path[-1] != goal:
        path.append(min(n for n in distance if _is_step(edges, distance, path[-1], n)))
    steps = "".join(f"{a}-{b};" for a, b in zip(path, path[1:], strict=False))
    prompt = f"Edges {shown}. A shortest path from {start} to {goal}:\n"
    return Puzzle(prompt, steps, " ".join(map(str, path)))


def _read_graph(prompt: str) -> tuple[set[frozenset[int]], int, int]:
    edges = {frozenset(map(int, edge)) for edge in re.findall(r"(\d+)-(\d+)", prompt)}
    start, goal = map(int, re.findall(r"from (\d+) to (\d+):", prompt)[-1])
    return edges, start, goal


def _distances(edges: set[frozenset[int]], goal: int) -> dict[int, int]:
    """Return the number of edges between each node and the goal."""
    distance = {goal: 0}
    queue = [goal]
    for node in queue:
        for other in sorted(n for edge in edges if node in edge for n in edge - {node}):
            if other not in distance:
                distance[other] = distance[node] + 1
                queue.append(other)
    return distance


def _is_step(edges: set[frozenset[int]], distance: dict[int, int], a: int, b: int) -> bool:
    return frozenset((a, b)) in edges and distance[b] == distance[a] - 1


def _is_path(prompt: str, said: str, answer: str) -> float:
    edges, start, goal = _read_graph(prompt)
    path = [int(number) for number in re.findall(r"\d{1,4}", said)]
    distance = _distances(edges, goal)
    steps = zip(path, path[1:], strict=False)
    ends = bool(path) and path[0] == start and path[-1] == goal
    return float(ends and all(_is_step(edges, distance, a, b) for a, b in steps))


def label_steps(prompt: str, completion: str) -> list[tuple[str, bool]]:
    """Return the steps of a path, each with True if the path can still be a shortest one.

    Steps end with a semicolon, and the answer is the last one. Joined, they are the completion.

    Raises:
        InputError: if the puzzle is of another kind.
    """
    if not prompt.startswith("Edges "):
        raise InputError(
            "only steps of graph_path have labels", where="--data.kinds", fix="use graph_path"
        )
    edges, place, goal = _read_graph(prompt)
    distance = _distances(edges, goal)
    steps = re.findall(r"[^;]*;|[^;]+$", completion)
    labels: list[tuple[str, bool]] = []
    is_right = True
    for step in steps:
        if step.endswith(";"):
            ends = re.fullmatch(r"\s*(\d{1,4})-(\d{1,4});", step)
            a, b = map(int, ends.groups()) if ends else (-1, -1)
            is_right = is_right and a == place and _is_step(edges, distance, a, b)
            place = b
        else:
            is_right = is_right and _is_path(prompt, step.rpartition("#")[2], "") == 1
        labels.append((step, is_right))
    return labels


# --- steps of solutions ---


def _solution(config: PuzzlesData, generator: np.random.Generator) -> tuple[str, list[str]]:
    settings = arithmetic.Arithmetic(config.size, config.size, 9 + config.size, "+-*")
    expression = arithmetic.sample_expression(settings, "train", generator)
    return expression, arithmetic.worked_solution(expression).split(";")[:-1]


def _masked_step(config: PuzzlesData, generator: np.random.Generator) -> Puzzle:
    expression, steps = _solution(config, generator)
    place = int(generator.integers(len(steps)))
    shown = "; ".join("?" if i == place else step for i, step in enumerate(steps))
    return Puzzle(f"{expression}: {shown}. Which step is missing?\n", "", steps[place])


def _ordered_steps(config: PuzzlesData, generator: np.random.Generator) -> Puzzle:
    expression, steps = _solution(config, generator)
    shown = "; ".join(steps[i] for i in generator.permutation(len(steps)))
    return Puzzle(f"{expression}: {shown}. Put the steps in order.\n", "", "; ".join(steps))


def _is_same(prompt: str, said: str, answer: str) -> float:
    return float(_plain(said) == _plain(answer))


def _in_place(prompt: str, said: str, answer: str) -> float:
    right = _plain(answer).split(";")
    steps = _plain(said).split(";")
    if len(steps) != len(right):
        return 0.0
    return sum(a == b for a, b in zip(steps, right, strict=True)) / len(right)


def _plain(text: str) -> str:
    return re.sub(r"\s", "", text).strip(".;")


KINDS: dict[str, Kind] = {
    "countdown": Kind(_countdown, _is_countdown, "Use each number once"),
    "traced_value": Kind(_traced(asks_next=False), _is_same, "What is "),
    "traced_next": Kind(_traced(asks_next=True), _is_same, "Which line runs next"),
    "graph_path": Kind(_graph_path, _is_path, "A shortest path from "),
    "masked_step": Kind(_masked_step, _is_same, "Which step is missing"),
    "ordered_steps": Kind(_ordered_steps, _in_place, "Put the steps in order"),
}
"""Every kind by its name. To add one, write how it is made and judged, and its row here."""


# --- the task ---


@dataclass(frozen=True)
class PuzzlesSource(MadeRows):
    """Endless puzzles with the columns `prompt`, `completion`, `solution`, `answer`, `kind`."""

    config: PuzzlesData = PuzzlesData()
    split: Literal["train", "eval"] = "train"
    seed: int = 0

    STREAM = (11,)

    def row(self, index: int) -> dict[str, Any]:
        kind = self.config.kinds[index % len(self.config.kinds)]
        generator = self.generator(index)
        while True:
            puzzle = KINDS[kind].make(self.config, generator)
            if split_of(puzzle.prompt) == self.split:
                break
        prompt: Any = puzzle.prompt
        completion: Any = f"{puzzle.steps}#{puzzle.answer}"
        row: dict[str, Any] = {"solution": completion, "answer": puzzle.answer, "kind": kind}
        if self.config.chat:
            prompt = [{"role": "user", "content": prompt}]
            completion = [{"role": "assistant", "content": completion}]
        return {"prompt": prompt, "completion": completion, **row}


def read_answer(completion: Any) -> str | None:
    """Return the text behind the last "#" on its line, without white space; None without it."""
    _, mark, tail = text_of(completion).rpartition("#")
    line = tail.strip().partition("\n")[0]
    return _plain(line) or None if mark else None


def puzzle(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any
) -> list[float | None]:
    """Return 1 for the right answer of a puzzle behind the last "#", else 0; of ordered steps, the
    share of those in their places. A prompt that is no puzzle has no reward."""
    values: list[float | None] = []
    for prompt, completion, right in zip(prompts, completions, answer, strict=True):
        mark, tail = text_of(completion).rpartition("#")[1:]
        said = tail.strip().partition("\n")[0]
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        kind = next((kind for kind in KINDS.values() if kind.mark in question), None)
        if kind is None:
            values.append(None)
        else:
            values.append(kind.judge(question, said, right) if mark else 0.0)
    return values


TASK = task(
    PuzzlesData, PuzzlesSource, label_steps=label_steps, slices_of=lambda row: (row["kind"],)
)

VERIFIERS = {"puzzles": Verifier(puzzle, AnswerReaders(read_answer))}
