"""Verdicts on model-written programs: by what they compute, never by what they claim.

A program is given inputs and no expected output: what it prints, or the values of the tests' expressions, are compared
by a process that has never seen it. So an exit code, a printed verdict or a patched `==` are worth nothing.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tpu_rl.sandbox import SandboxLimits, run

MODULES = {"math", "cmath", "collections", "itertools", "functools", "re", "string", "operator", "fractions", "decimal"}
"""Modules of the standard library whose functions in a test are the test's own."""
OWN = MODULES | set(vars(builtins))
"""Names that a test has without the program."""
MAKERS = {"float", "range", "set", "frozenset", "iter", "keys", "values", "items", "deque", "Fraction", "Decimal"}
"""What `sandbox_child.source` calls, by name or as an attribute."""
MOST_TEXT = 1 << 16
"""Characters of one value: more is no answer to a test, and costs the trainer time to parse."""


def passes(program: str, test: Any, limits: SandboxLimits | None = None, confine: bool = True) -> bool:
    """Whether a program passes one test: {"input": text, "output": text} of its stdin and stdout, or statements with
    asserts about what it defines. Raises ValueError where the test is neither."""
    match test:
        case {"input": str() as stdin, "output": str() as output}:
            outcome = run(program, stdin, limits=limits, confine=confine)
            return not outcome.ended and _lines(outcome.printed) == _lines(output)
        case str():
            steps, own = split(test)
            outcome = run(program, steps=steps, limits=limits, confine=confine)
            values = [value_source(text) for text in outcome.values]
            if outcome.ended or len(values) != sum(kind == "value" for kind, _ in steps) or None in values:
                return False
            # By a process that has never seen the program.
            given = [("do", f"hole_{n} = ({value})") for n, value in enumerate(values)]
            imports = [("do", f"import {', '.join(sorted(MODULES))}")]
            judged = run("", steps=imports + given + own, confine=confine)
            return judged.values == ["True"] * sum(kind == "value" for kind, _ in own)
    raise _no_test(test)


def _no_test(test: Any) -> ValueError:
    return ValueError(f"a test is {{'input': text, 'output': text}} or a text with asserts, not {test!r:.100}")


# --- a test's part and the program's ---------------------------------------------------------------------------------

Steps = list[tuple[str, str]]
"""("do", statements) or ("value", expression), as `sandbox.run` takes them."""


def split(test: str) -> tuple[Steps, Steps]:
    """A test's statements -> (steps for the program's process, steps for the judge's, with the names hole_0, hole_1 and
    so on for the values that the former gave).

    What hangs on a name that is neither built in nor of the standard library's (see MODULES) is the program's, and its
    value is asked for; what is done with the values, and the comparison, is the test's. Raises ValueError for a test
    without asserts, or one in which the two cannot be told apart.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"the test {test!r:.100} is not Python: {error}") from None
    _require_told_apart(tree)
    shared = [statement for statement in tree.body if _is_the_judges(statement)]
    known = OWN | _bound(shared)
    foreign = _bound(node for node in ast.walk(tree) if node not in shared) - known
    answers = _answers(tree, known, foreign)
    holes, steps, own = _Holes(foreign, known | answers), [], []
    for statement in tree.body:
        if isinstance(statement, ast.Assert):
            text, before = ast.unparse(statement), len(holes.expressions)
            own.append(("value", f"bool({ast.unparse(holes.visit(statement.test))})"))
            steps += [("value", ast.unparse(expression)) for expression in holes.expressions[before:]]
            if len(holes.expressions) == before:
                raise ValueError(f"{text!r:.100} asks nothing of the program: all its names are built in or the test's")
            continue
        if _name(statement) in answers or statement in shared:
            own.append(("do", ast.unparse(statement)))
        if _name(statement) not in answers:
            steps.append(("do", ast.unparse(statement)))
    if not any(kind == "value" for kind, _ in own):
        raise ValueError(f"the test {test!r:.100} asserts nothing")
    return steps, own


def _require_told_apart(tree: ast.Module) -> None:
    """Raises ValueError for an assert inside another statement, which the program's own process would have to judge,
    and for names that nobody can tell."""
    for statement in tree.body:
        inside = (node for node in ast.walk(statement) if isinstance(node, ast.Assert) and node is not statement)
        for node in inside:
            kind = type(statement).__name__.lower()
            raise ValueError(f"{ast.unparse(node)!r:.100} in a {kind} cannot be judged apart from the program")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            raise ValueError(f"names of {ast.unparse(node)!r:.100} cannot be told apart from the program's")


def _is_the_judges(statement: ast.stmt) -> bool:
    """Whether it is an import that the judge can do, too: of MODULES."""
    match statement:
        case ast.Import():
            return all(alias.name.partition(".")[0] in MODULES for alias in statement.names)
        case ast.ImportFrom(level=0):
            return statement.module in MODULES
    return False


def _bound(imports: Iterable[ast.AST]) -> set[str]:
    """Names that imports give to what they import."""
    aliases = [alias for node in imports if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    return {alias.asname or alias.name.partition(".")[0] for alias in aliases}


def _answers(tree: ast.Module, known: set[str], foreign: set[str]) -> set[str]:
    """Names of what a test computes from what is `known` without the program, and gives to no expression of the
    program's, which must not see it."""
    values = {
        _name(node): node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
    }
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
    found = {name for name in values if stored.count(name) == 1}
    while True:
        shown: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.Assert):
                holes = _Holes(foreign, known | found)
                holes.visit(ast.parse(ast.unparse(node.test), mode="eval").body)
                shown |= {name for hole in holes.expressions for name in _loaded(hole)}
            elif _name(node) not in found:
                shown |= _loaded(node)
        lost = {name for name in found if name in shown or not _is_own(values[name], known | found)}
        if not lost:
            return found
        found -= lost


def _name(statement: ast.stmt) -> str:
    """What an assignment to one name calls its value, else ""."""
    if isinstance(statement, ast.AnnAssign):
        target: ast.expr = statement.target
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    else:
        return ""
    return target.id if isinstance(target, ast.Name) else ""


def _loaded(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}


def _is_own(value: ast.expr, known: set[str]) -> bool:
    """Whether an expression needs nothing but what is known: nothing that the program or its steps define."""
    names = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
    bound = {part.arg for part in ast.walk(value) if isinstance(part, ast.arg)}
    bound |= {part.id for part in ast.walk(value) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return names <= known | bound


class _Holes(ast.NodeTransformer):
    """Replaces each maximal expression of the program's by a name for its value, numbered as in `expressions`; `own`
    are names that the test has without it, `foreign` ones nobody can judge by."""

    def __init__(self, foreign: set[str], own: set[str]):
        self.expressions: list[ast.expr] = []
        self._foreign, self._own = foreign, own

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.NamedExpr):
            raise ValueError(f"the assert's {ast.unparse(node)!r:.100} cannot be judged apart from the program")
        if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            root: ast.AST = node
            while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.Name) and root.id in self._foreign:
                known = ", ".join(sorted(MODULES))
                raise ValueError(f"what the test imports as {root.id} is not of {known}")
            if isinstance(root, ast.Name) and root.id not in self._own:
                self.expressions.append(node)
                return ast.Name(f"hole_{len(self.expressions) - 1}")
        return self.generic_visit(node)


# --- values ----------------------------------------------------------------------------------------------------------


def value_source(text: str) -> str | None:
    """The source of a value, from a line that a program reports; None where it is not of literals and MAKERS alone."""
    if len(text) > MOST_TEXT:
        return None
    try:
        found = text.encode().decode("unicode_escape")
        tree = ast.parse(found, mode="eval")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return found if all(map(_is_of_a_value, ast.walk(tree))) else None


def _is_of_a_value(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute | ast.Name) and not node.keywords  # and, being walked to, a maker
    if isinstance(node, ast.Attribute):
        return node.attr in MAKERS
    if isinstance(node, ast.Name):
        return node.id in MAKERS | {"fractions", "decimal", "collections"}
    return isinstance(node, VALUES)


VALUES = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.expr_context)
VALUES += (ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub)  # of signs and complex numbers


def _lines(text: str) -> list[str]:
    """Lines without trailing blanks and blank lines at the end, which no judge of programs looks at."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


# --- rows ------------------------------------------------------------------------------------------------------------


def tests_of(column: Any) -> list[Any]:
    """A row's tests as a list of what `passes` takes; from that, {"inputs": [...], "outputs": [...]}, or JSON of both.

    Raises ValueError for anything else, and where there is none.
    """
    match json.loads(column) if isinstance(column, str) else column:
        case {"inputs": list() as inputs, "outputs": list() as outputs} if len(inputs) == len(outputs) > 0:
            return [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
        case list() as tests if tests:
            return tests
    raise ValueError(f"no tests: {column!r:.100}")


def check_tests(column: Any) -> None:
    """Raises ValueError where `passes` could not judge a program by one of a row's tests. Nothing is run."""
    for test in tests_of(column):
        match test:
            case {"input": str(), "output": str()}:
                continue
            case str():
                split(test)
            case _:
                raise _no_test(test)


def all_pass(programs: Sequence[str], tests: Sequence[Any], confine: bool = True) -> list[bool | ValueError]:
    """For each program whether it passes all of its tests, up to the first that it fails; ValueError for bad tests."""

    def judge(program: str, its_tests: Any) -> bool | ValueError:
        try:
            return all(passes(program, test, confine=confine) for test in tests_of(its_tests))
        except ValueError as error:
            return error

    # As many as this process may use: more would take each other's seconds.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None) as threads:
        return list(threads.map(judge, programs, tests))
