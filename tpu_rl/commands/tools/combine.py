"""Add up the weights of models, or report what a training changed.

    python launch/combine.py --to DIR A=0.5 B=0.5                  a soup
    python launch/combine.py --to DIR A=1 B=-1 --base DIR          base + (A - base) - (B - base)
    python launch/combine.py --to DIR A=s B=1-s --sweep 0 0.5 1    DIR/0, DIR/0.5, DIR/1
        [-- PRESET|METHOD --flags]                                 evaluate each of them
    python launch/combine.py RUN [RUN ...] --deltas [--base DIR]   sparsity, rank, angles

A model is a run folder, a model directory, a hub id or builtin:NAME. A weight is a number, or an
expression in s of numbers, + - * / and parentheses. The models must have one architecture and one
tokenizer. After `--` come flags of launch/run.py that describe held-out problems and a reward.
"""

from __future__ import annotations

import ast
import math
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from tpu_rl import ranges
from tpu_rl.checkpoint import remote_run
from tpu_rl.commands import config as configuration
from tpu_rl.commands.config import ExperimentConfig
from tpu_rl.commands.recipe import answers
from tpu_rl.commands.tools import combined_files, deltas
from tpu_rl.errors import InputError, reported, typed_command
from tpu_rl.ranges import Conflicts, Count
from tpu_rl.report import markdown

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Flags:
    terms: tyro.conf.Positional[tuple[str, ...]]
    """MODEL=WEIGHT, or models with --deltas."""
    to: Annotated[str | None, Conflicts("deltas", why="it writes nothing")] = None
    """The directory to write: new, empty, or a model directory, which is then replaced."""
    base: str | None = None
    """Add weighted differences to this model. With --deltas, the model that the training began
    with; the default is the run's own."""
    sweep: tuple[float, ...] = ()
    """Values of s in weights. Each gets a directory of its own below --to."""
    deltas: bool = False
    """Report what changed, and write nothing."""
    directions: Count = 8
    """With --deltas: the number of principal directions that are compared."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    argv, problems = answers.split(argv)
    flags = tyro.cli(Flags, args=argv, prog=typed_command("combine"), description=__doc__)
    ranges.check(flags, "--")
    if not flags.terms or not (flags.to or flags.deltas):
        raise InputError(
            "no model, or no directory to write",
            where="MODEL, --to",
            fix="as in --to soup a=0.5 b=0.5",
        )
    if len(problems) > (not flags.deltas):
        raise InputError(
            "too many sets of problems",
            where="--",
            why="sums answer one set, and --deltas none",
            fix="leave the others out",
        )
    if flags.deltas:
        report_deltas(flags)
    else:
        write(flags, problems)
    return 0


def write(flags: Flags, problems: list[list[str]]) -> None:
    """Write the sums, and evaluate them on a set of problems if there is one.

    Raises InputError if flags do not go together, or models do not.
    """
    assert flags.to is not None
    pairs = [term.rpartition("=")[::2] for term in flags.terms]
    uses_s = any(weight_of(text, 1.0) != weight_of(text, 2.0) for _, text in pairs)
    if uses_s != bool(flags.sweep):
        raise InputError(
            "weights with s need --sweep" if uses_s else "no weight depends on s",
            where="--sweep",
            fix="as in A=s B=1-s --sweep 0 0.5 1",
        )
    points = [(f"{s:g}", s) for s in flags.sweep] or [("", 0.0)]
    if len({name for name, _ in points}) < len(points):
        raise InputError(
            f"{' '.join(name for name, _ in points)} are not different folders",
            where="--sweep",
            fix="give values that differ in six digits",
        )
    config = configuration.parse(problems[0]) if problems else None
    base = Path(answers.address_of(flags.base)) if flags.base is not None else None
    paths = [Path(answers.address_of(name)) for name, _ in pairs]
    measured = []
    for name, s in points:
        terms = [(path, weight_of(text, s)) for path, (_, text) in zip(paths, pairs, strict=True)]
        target = Path(flags.to) / name
        combined_files.combine(target, terms, base)
        print(f"wrote {target}")
        if config is not None:
            measured.append((name or flags.to, measure(config, str(target))))
    if measured:
        best = max(measured, key=lambda item: item[1].value)
        print(markdown.table(["s", "value"], [[n, markdown.of(value)] for n, value in measured]))
        print(f"best: {best[0]}")


def measure(config: ExperimentConfig, model: str) -> answers.Estimate:
    """Return the accuracy of a model on the problems of a configuration."""
    language, params = answers.load_model(model, config)
    return answers.evaluate(
        config, language, params, answers.problems_of(config, is_whole=True)
    ).estimate()


def weight_of(text: str, s: float) -> float:
    """Return the value of a weight, such as "0.5" or "1-s".

    Raises InputError if it is something else.
    """

    def value(node: ast.AST) -> float:
        match node:
            case ast.Expression(body):
                return value(body)
            case ast.Constant(int() | float() as number) if not isinstance(number, bool):
                return float(number)
            case ast.Name("s"):
                return s
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
                return OPERATIONS[type(operation)](value(left), value(right))
        raise ValueError

    try:
        result = value(ast.parse(text.strip(), mode="eval"))
        if math.isfinite(result):
            return result
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        pass
    raise InputError(
        f"{text!r} is no weight",
        where="MODEL=WEIGHT",
        fix="use a number such as 0.5, or an expression in s such as 1-s",
    )


def report_deltas(flags: Flags) -> None:
    """Print what the training of each model changed, and the cosines of the changes."""
    console = Console()
    found = []
    for name in flags.terms:
        base = flags.base
        if base is None and remote_run.is_run(name):
            config = configuration.load(remote_run.fetch(name) / remote_run.CONFIG)
            base = None if config.model.random_init else config.model.path
        if base is None:
            raise InputError(
                "nothing says which model the training began with", where=name, fix="add --base DIR"
            )
        before, after = (Path(answers.address_of(path)) for path in (base, name))
        rows = list(deltas.deltas(before, after, flags.directions))
        found.append((name, before, after))
        # Names of weights have no spaces, and would be cut.
        headers = ("unchanged in bf16", "|D|/|W|", "rank", "rotation", "principal share")
        table = Table(Column(overflow="fold"), *headers, title=escape(f"{name} against {base}"))
        for row in rows:
            numbers = [row.effective_rank, row.rotation, row.principal_share]
            shown = ["-" if math.isnan(number) else f"{number:.3g}" for number in numbers]
            share = f"{100 * row.unchanged:.2f} %"
            table.add_row(escape(row.name), share, f"{row.relative_norm:.2e}", *shown)
        sizes = np.array([row.size for row in rows], np.float64)
        unchanged = float(np.average([row.unchanged for row in rows], weights=sizes))
        table.add_row("all weights", f"{100 * unchanged:.2f} %", "", "", "", "")
        console.print(table)
    for index, (name, before, after) in enumerate(found):
        for other, other_before, other_after in found[index + 1 :]:
            if before == other_before:
                value = deltas.cosine(before, after, other_after)
                print(f"cosine of the changes of {name} and {other}: {value:.4f}")
