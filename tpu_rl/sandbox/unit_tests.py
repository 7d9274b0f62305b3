"""Judge model-written programs by what they compute, never by what they claim.

A program gets inputs and no expected outputs. A process that has never seen the program compares
what it prints, or the values of the tests' expressions. So an exit code, a printed verdict or a
patched `==` achieve nothing.
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

MODULES = {
    "math",
    "cmath",
    "collections",
    "itertools",
    "functools",
    "re",
    "string",
    "operator",
    "fractions",
    "decimal",
}
"""Modules of the standard library. What a test calls of them belongs to the test."""
TEST_NAMES = MODULES | set(vars(builtins))
"""Names that a test has without the program."""
MAKERS = {
    "float",
    "range",
    "set",
    "frozenset",
    "iter",
    "keys",
    "values",
    "items",
    "deque",
    "Fraction",
    "Decimal",
}
"""Functions and methods that `child.source` writes."""
MAX_VALUE_TEXT = 1 << 16
"""Characters of one value. A longer one is no answer to a test, and takes long to parse."""


def passes(
    program: str, test: Any, limits: SandboxLimits | None = None, confine: bool = True
) -> bool:
    """Return True if a program passes a test.

    Args:
        program: Python source.
        test: {"input": text, "output": text} of stdin and stdout, or statements with asserts about
            what the program defines.
        limits: what the program may use.
        confine: see `sandbox.run`.

    Raises:
        ValueError: if the test is neither.
    """
    match test:
        case {"input": str() as stdin, "output": str() as output}:
            outcome = run(program, stdin, limits=limits, confine=confine)
            return not outcome.ended and _lines(outcome.printed) == _lines(output)
        case str():
            program_steps, test_steps = split(test)
            outcome = run(program, steps=program_steps, limits=limits, confine=confine)
            values = [value_source(text) for text in outcome.values]
            if outcome.ended or len(values) != _num_values(program_steps) or None in values:
                return False
            # The asserts run in a process that has never seen the program.
            imports = [("do", f"import {', '.join(sorted(MODULES))}")]
            holes = [("do", f"hole_{n} = ({value})") for n, value in enumerate(values)]
            verdict = run("", steps=imports + holes + test_steps, confine=confine)
            return verdict.values == ["True"] * _num_values(test_steps)
    raise _not_a_test(test)


def _num_values(steps: Steps) -> int:
    return sum(kind == "value" for kind, _ in steps)


def _not_a_test(test: Any) -> ValueError:
    return ValueError(
        f"a test is {{'input': text, 'output': text}} or a text with asserts, not {test!r:.100}"
    )


# --- the test's part and the program's part ---

Steps = list[tuple[str, str]]
"""("do", statements) or ("value", expression), as `sandbox.run` takes them."""


def split(test: str) -> tuple[Steps, Steps]:
    """Split the statements of a test in two: (steps of the program, steps of the test).

    The first are run in the program's process, and the second in a process of their own. There,
    hole_0, hole_1 and so on are the values of the first.

    An expression belongs to the program if it uses a name that is neither built in nor of MODULES.
    Its value is reported. What is done with the values, and the comparison, belongs to the test.

    Raises:
        ValueError: if the test has no asserts, or its two parts cannot be separated.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"the test {test!r:.100} is not Python: {error}") from None
    _require_separable(tree)
    shared = [statement for statement in tree.body if _is_known_import(statement)]
    known = TEST_NAMES | _imported_names(shared)
    unknown_imports = _imported_names(node for node in ast.walk(tree) if node not in shared) - known
    expected = _expected_values(tree, known, unknown_imports)
    holes = _Holes(unknown_imports, known | expected)
    program_steps: Steps = []
    test_steps: Steps = []
    for statement in tree.body:
        if isinstance(statement, ast.Assert):
            text = ast.unparse(statement)
            num_before = len(holes.expressions)
            condition = ast.unparse(holes.visit(statement.test))
            test_steps.append(("value", f"bool({condition})"))
            new_expressions = holes.expressions[num_before:]
            program_steps += [("value", ast.unparse(expression)) for expression in new_expressions]
            if not new_expressions:
                raise ValueError(
                    f"{text!r:.100} asks nothing of the program: "
                    "all its names are built in or the test's"
                )
            continue
        if _assigned_name(statement) in expected or statement in shared:
            test_steps.append(("do", ast.unparse(statement)))
        if _assigned_name(statement) not in expected:
            program_steps.append(("do", ast.unparse(statement)))
    if not _num_values(test_steps):
        raise ValueError(f"the test {test!r:.100} asserts nothing")
    return program_steps, test_steps


def _require_separable(tree: ast.Module) -> None:
    """Raise ValueError if the parts of the test cannot be separated.

    An assert inside another statement would have to be judged by the program's own process, and the
    names of a star import are not known.
    """
    for statement in tree.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assert) and node is not statement:
                kind = type(statement).__name__.lower()
                raise ValueError(
                    f"{ast.unparse(node)!r:.100} in a {kind} "
                    "cannot be judged apart from the program"
                )
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            raise ValueError(
                f"names of {ast.unparse(node)!r:.100} cannot be told apart from the program's"
            )


def _is_known_import(statement: ast.stmt) -> bool:
    """Return True if the statement imports from MODULES only."""
    match statement:
        case ast.Import():
            return all(alias.name.partition(".")[0] in MODULES for alias in statement.names)
        case ast.ImportFrom(level=0):
            return statement.module in MODULES
    return False


def _imported_names(imports: Iterable[ast.AST]) -> set[str]:
    """Return the names that imports define."""
    aliases = [
        alias
        for node in imports
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    return {alias.asname or alias.name.partition(".")[0] for alias in aliases}


def _expected_values(tree: ast.Module, known: set[str], unknown_imports: set[str]) -> set[str]:
    """Return names of values that the test computes by itself and does not show to the program.

    Such a value needs only what is `known` without the program, and is in no expression of the
    program, which must not see the expected result.
    """
    values = {
        _assigned_name(node): node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
    }
    stored = [
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    ]
    expected = {name for name in values if stored.count(name) == 1}
    # Each name that is dropped may expose others, so repeat until none is.
    while True:
        shown: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.Assert):
                holes = _Holes(unknown_imports, known | expected)
                holes.visit(ast.parse(ast.unparse(node.test), mode="eval").body)
                shown |= {name for hole in holes.expressions for name in _loaded_names(hole)}
            elif _assigned_name(node) not in expected:
                shown |= _loaded_names(node)
        dropped = {
            name
            for name in expected
            if name in shown or not _uses_only(values[name], known | expected)
        }
        if not dropped:
            return expected
        expected -= dropped


def _assigned_name(statement: ast.stmt) -> str:
    """Return the name that a statement assigns to, or "" if it is not an assignment to one name."""
    if isinstance(statement, ast.AnnAssign):
        target: ast.expr = statement.target
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    else:
        return ""
    return target.id if isinstance(target, ast.Name) else ""


def _loaded_names(node: ast.AST) -> set[str]:
    """Return the names that code reads."""
    return {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }


def _uses_only(value: ast.expr, known: set[str]) -> bool:
    """Return True if an expression uses no names but known ones and those that it binds itself."""
    names = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
    bound = {part.arg for part in ast.walk(value) if isinstance(part, ast.arg)}
    bound |= {
        part.id
        for part in ast.walk(value)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    return names <= known | bound


class _Holes(ast.NodeTransformer):
    """Replaces each maximal expression of the program by a name for its value.

    `expressions` has the replaced expressions, in the order of the names' numbers.
    """

    def __init__(self, unknown_imports: set[str], known: set[str]):
        """Prepare for the asserts of one test.

        Args:
            unknown_imports: names that the test imports from modules outside MODULES.
            known: names that the test has without the program.
        """
        self.expressions: list[ast.expr] = []
        self._unknown_imports = unknown_imports
        self._known = known

    def visit(self, node: ast.AST) -> Any:
        if isinstance(
            node,
            ast.Lambda
            | ast.ListComp
            | ast.SetComp
            | ast.DictComp
            | ast.GeneratorExp
            | ast.NamedExpr,
        ):
            raise ValueError(
                f"the assert's {ast.unparse(node)!r:.100} cannot be judged apart from the program"
            )
        if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            root: ast.AST = node
            while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.Name) and root.id in self._unknown_imports:
                modules = ", ".join(sorted(MODULES))
                raise ValueError(f"what the test imports as {root.id} is not of {modules}")
            if isinstance(root, ast.Name) and root.id not in self._known:
                self.expressions.append(node)
                return ast.Name(f"hole_{len(self.expressions) - 1}")
        return self.generic_visit(node)


# --- values ---


def value_source(text: str) -> str | None:
    """Return the source of a value from a line that a program reports.

    Returns None if it has anything but literals and MAKERS, or is too long.
    """
    if len(text) > MAX_VALUE_TEXT:
        return None
    try:
        source = text.encode().decode("unicode_escape")
        tree = ast.parse(source, mode="eval")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return source if all(map(_is_part_of_value, ast.walk(tree))) else None


def _is_part_of_value(node: ast.AST) -> bool:
    """Return True if a node of a syntax tree may be part of a value."""
    if isinstance(node, ast.Call):
        # ast.walk also visits the function, which must be a maker.
        return isinstance(node.func, ast.Attribute | ast.Name) and not node.keywords
    if isinstance(node, ast.Attribute):
        return node.attr in MAKERS
    if isinstance(node, ast.Name):
        return node.id in MAKERS | {"fractions", "decimal", "collections"}
    return isinstance(node, VALUE_NODES)


VALUE_NODES = (
    ast.Expression,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.expr_context,
    # Signs and complex numbers.
    ast.UnaryOp,
    ast.USub,
    ast.UAdd,
    ast.BinOp,
    ast.Add,
    ast.Sub,
)
"""Nodes of the syntax trees of literals."""


def _lines(text: str) -> list[str]:
    """Return lines without trailing blanks, and without blank lines at the end.

    Judges of programs usually ignore these.
    """
    return [line.rstrip() for line in text.rstrip().splitlines()]


# --- rows ---


def tests_of(column: Any) -> list[Any]:
    """Return the tests of a row as a list of tests for `passes`.

    Args:
        column: such a list, {"inputs": [...], "outputs": [...]}, or either as JSON.

    Raises:
        ValueError: for anything else, and if there are no tests.
    """
    match json.loads(column) if isinstance(column, str) else column:
        case {"inputs": list() as inputs, "outputs": list() as outputs} if (
            len(inputs) == len(outputs) > 0
        ):
            return [
                {"input": stdin, "output": output}
                for stdin, output in zip(inputs, outputs, strict=True)
            ]
        case list() as tests if tests:
            return tests
    raise ValueError(f"no tests: {column!r:.100}")


def check_tests(column: Any) -> None:
    """Check a row's tests without running anything.

    Raises:
        ValueError: if `passes` could not judge a program by one of them.
    """
    for test in tests_of(column):
        match test:
            case {"input": str(), "output": str()}:
                continue
            case str():
                split(test)
            case _:
                raise _not_a_test(test)


def all_pass(
    programs: Sequence[str], tests: Sequence[Any], confine: bool = True
) -> list[bool | ValueError]:
    """Return for each program True if it passes all of its tests, or a ValueError for bad tests.

    A program that fails a test does not run the tests after it.

    Args:
        programs: [N] Python sources.
        tests: [N] see `tests_of`.
        confine: see `sandbox.run`.
    """

    def grade(program: str, column: Any) -> bool | ValueError:
        try:
            return all(passes(program, test, confine=confine) for test in tests_of(column))
        except ValueError as error:
            return error

    # One thread per processor: more programs at once would use up each other's time.
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    with ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(grade, programs, tests))
