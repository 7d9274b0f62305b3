"""Problems as data sets publish them: HumanEval's rows, MBPP's, code in prompts.

A prompt may give code beside the function that it asks for: imports, and helpers with a body. The
test gets helpers of its own, as a program may define others of these names. The program gets all of
it, as its author read it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import symtable
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tpu_rl.sandbox import unit_tests

HUMAN_EVAL = ("test", "entry_point")
"""Columns of a row whose test calls `check` with the program's function."""
MBPP = ("test_list",)
SOLUTIONS = ("solution", "canonical_solution", "reference_solution", "solutions")
"""Columns with programs that are right."""
TRAILING_LINES = 8
"""Lines of prose after the code of a prompt, such as an instruction."""


class GivenCode(NamedTuple):
    """The code in a prompt, without the function that it asks for."""

    imports: list[ast.stmt] = []
    helpers: dict[str, ast.stmt] = {}
    classes: list[ast.stmt] = []


# --- rows ---


def columns_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns with the tests of a row."""
    for columns in (HUMAN_EVAL, MBPP):
        if "tests" not in row and all(name in row for name in columns):
            return columns
    return ("tests",)


def with_tests(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of HumanEval or MBPP with the column `tests`, and any other as it is."""
    match columns_of(row):
        case ("test", "entry_point"):
            name = row["entry_point"]
            test = f"{row['test']}\ncheck({name})"
            return {**row, "tests": [with_helpers(test, given_code(row["prompt"], name))]}
        case ("test_list",):
            setup = [row.get("test_setup_code") or "", *(row.get("test_imports") or ())]
            return {**row, "tests": ["\n".join([*setup, test]) for test in row["test_list"]]}
    return dict(row)


def first_text(value: Any) -> str:
    """Return a text, or the first one of a list, which APPS writes as JSON."""
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, str) else ""


def check(row: Mapping[str, Any]) -> None:
    """Check a row's tests without running anything.

    Raises ValueError if a program could not be judged by one of them.
    """
    given = given_code(row.get("prompt", ""), row.get("entry_point") or "")
    has_solution = any(row.get(name) for name in SOLUTIONS)
    for test in unit_tests.tests_of(with_tests(row)["tests"]):
        # A row's own solution may show that one process can judge it.
        if not (has_solution and isinstance(test, str)):
            unit_tests.check_test(with_helpers(test, given))


# --- code in prompts ---


def given_code(prompt: Any, entry_point: str = "") -> GivenCode:
    """Return the code that a prompt gives to programs and tests.

    Without the name of the function that is asked for, it is one that has no body. A prompt without
    such a function gives nothing: its functions may be what a program is to repair.

    Args:
        prompt: text or messages.
        entry_point: name of the function that is asked for, if it is known.
    """
    statements = _code_of(_text(prompt))
    functions = [part for part in statements if isinstance(part, ast.FunctionDef)]
    asked = {function.name for function in functions if _has_no_body(function)} | {entry_point}
    if asked == {""}:
        return GivenCode()
    helpers: dict[str, ast.stmt] = {f.name: f for f in functions if f.name not in asked}
    assigned = [part for part in statements if isinstance(part, ast.Assign)]
    helpers |= {
        target.id: part
        for part in assigned
        for target in part.targets
        if isinstance(target, ast.Name)
    }
    imports = [part for part in statements if isinstance(part, ast.Import | ast.ImportFrom)]
    classes: list[ast.stmt] = [
        part
        for part in statements
        if isinstance(part, ast.ClassDef) and part.name not in asked and not _has_no_body(part)
    ]
    helpers |= {
        part.name: part for part in classes if isinstance(part, ast.ClassDef) and _is_bare(part)
    }
    return GivenCode([part for part in imports if _is_absolute(part)], helpers, classes)


def _is_bare(part: ast.ClassDef) -> bool:
    """Return True for a class whose objects a test of its own class can take the place of."""
    methods = {node.name for node in part.body if isinstance(node, ast.FunctionDef)}
    return not (part.bases or part.decorator_list or "__eq__" in methods)


def with_helpers(test: Any, given: GivenCode) -> Any:
    """Return a test with its own copy of the helpers that it calls without defining them."""
    bound = {
        (alias.asname or alias.name).partition(".")[0]: part
        for part in given.imports
        for alias in part.names  # type: ignore[attr-defined]
    }
    if not (given.helpers or bound) or not isinstance(test, str):
        return test
    while True:
        try:
            table = symtable.symtable(test, "test", "exec")
        except (SyntaxError, ValueError):
            # `unit_tests.prepare` says what is wrong.
            return test
        free = unit_tests.free_names(table)
        missing = [
            name for name in given.helpers if name in free and not _asks_of(test, given, name)
        ]
        if not missing and any(_is_allowed(bound[name]) for name in free & bound.keys()):
            parts = {id(part): part for name, part in bound.items() if name in free}
            own = [ast.unparse(part) for part in parts.values() if _is_allowed(part)]
            test = "\n".join([*own, test])
            continue
        if not missing:
            return test
        added = [*given.imports, *(given.helpers[name] for name in missing)]
        # An import that no test may have is left out.
        added = [part for part in added if _is_allowed(part)]
        test = "\n".join([*map(ast.unparse, added), test])


def _is_allowed(part: ast.stmt) -> bool:
    return all(map(unit_tests.is_importable, unit_tests.modules_of(part)))


def _asks_of(test: str, given: GivenCode, name: str) -> bool:
    """Return True if a test asks for the class of the program's objects by the name of one."""
    is_class = isinstance(given.helpers[name], ast.ClassDef)
    return is_class and re.search(r"\b(?:isinstance|issubclass|type)\(|\bcase\b", test) is not None


def with_helpers_in(column: Any, given: GivenCode) -> Any:
    """Return a column of tests (see `unit_tests.tests_of`) with the helpers in each."""
    if not (given.helpers or given.imports):
        return column
    try:
        return [with_helpers(test, given) for test in unit_tests.tests_of(column)]
    except ValueError:
        # Whoever judges by it says what is wrong.
        return column


def with_given_code(program: str, given: GivenCode) -> str:
    """Return a program that begins with a prompt's code."""
    helpers = {id(part): part for part in given.helpers.values()}
    helpers |= {id(part): part for part in given.classes}
    code = [*given.imports, *sorted(helpers.values(), key=lambda part: part.lineno)]
    # That must be the first statement.
    if not code or re.search(r"^from __future__ import", program, re.MULTILINE):
        return program
    # A package that the sandbox lacks may not be needed.
    tried = [ast.unparse(ast.Try([part], [_IGNORED], [], [])) for part in code]
    return "\n".join([*tried, program])


_IGNORED = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])


def _is_absolute(statement: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(statement, ast.Import):
        return True
    return not statement.level and all(alias.name != "*" for alias in statement.names)


def _has_no_body(statement: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return True if a function is only announced: by a docstring, `pass`, `...` or an error."""

    def says_nothing(part: ast.stmt) -> bool:
        match part:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return True
            case ast.Raise(exc=error) if error is not None:
                return "NotImplementedError" in ast.unparse(error)
        return isinstance(part, ast.FunctionDef) and _has_no_body(part)

    return all(says_nothing(part) for part in statement.body)


def _text(prompt: Any) -> str:
    """Return the text of a prompt; of messages, those of the user."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence):
        return ""
    return "\n".join(
        message["content"]
        for message in prompt
        if isinstance(message, Mapping)
        and message.get("role") == "user"
        and isinstance(message.get("content"), str)
    )


def _code_of(text: str) -> list[ast.stmt]:
    """Return the statements of a text's fenced blocks; of a text without any, of its lines from the
    first one that may be code."""
    statements: list[ast.stmt] = []
    for block in _FENCED.findall(text) or [text]:
        begin = _BEGIN.search(block)
        lines = block[begin.start() :].rstrip().splitlines() if begin else []
        for end in range(len(lines), max(len(lines) - TRAILING_LINES, 0), -1):
            try:
                statements += ast.parse("\n".join(lines[:end])).body
                break
            except (SyntaxError, ValueError, MemoryError, RecursionError):
                continue
    return statements


_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_BEGIN = re.compile(r"^(?:import \w|from [\w.]+ import |def \w+\(|class \w+.*:|@\w)", re.MULTILINE)
