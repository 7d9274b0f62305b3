"""Judge model-written programs by what they compute, never by what they claim.

A program gets inputs and no expected outputs. What it prints is compared here; a test with asserts
runs in a process of its own, which gets nothing but plain values from the program. So an exit code,
a printed verdict or a patched `==` achieve nothing.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import json
import os
import secrets
import symtable
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import CodeType
from typing import Any, NamedTuple

from tpu_rl.sandbox import SandboxLimits, judge, run

MODULES = {
    *("math", "cmath", "fractions", "decimal", "operator"),
    *("collections", "itertools", "functools", "re", "string"),
}
"""Modules of the standard library. What a test calls of them belongs to the test."""
IMPORTABLE = MODULES | {
    *("abc", "bisect", "contextlib", "copy", "dataclasses", "datetime", "enum", "hashlib", "heapq"),
    *("io", "json", "numbers", "random", "statistics", "sys", "textwrap", "time", "typing"),
    "unicodedata",
}
"""Modules of the standard library that a test may import."""
TEST_NAMES = MODULES | set(dir(builtins))
"""Names that a test has without the program."""
EVALUATORS = {"eval", "exec", "compile", "__import__", "__builtins__", "__loader__", "breakpoint"}
"""Builtins that could run a text of the program on the test's side."""


def passes(
    program: str, test: Any, limits: SandboxLimits | None = None, confine: bool = True
) -> bool:
    """Return True if a program passes a test in a process apart from it.

    Args:
        test: {"input": text, "output": text} of stdin and stdout, or statements with asserts about
            what the program defines.
        confine: see `sandbox.run`.

    Raises:
        ValueError: if the test is neither.
    """
    return verdict_on(program, test, limits, confine) is True


class Uncarried(NamedTuple):
    """A verdict: the program passes together with its test, but not in a process of its own."""

    why: str
    """The operation that the channel did not carry, or that forges a verdict."""


def verdict_on(
    program: str, test: Any, limits: SandboxLimits | None = None, confine: bool = True
) -> bool | Uncarried:
    """Run a program on a test, and return its verdict; see `passes`."""
    match test:
        case {"input": str() as stdin, "output": str() as output}:
            outcome = run(program, stdin, limits=limits, confine=confine)
            return not outcome.ended and _lines(outcome.printed) == _lines(output)
        case str():
            prepared = prepare(test)
            verdict = judge(program, *prepared, limits=limits, confine=confine)
            kind, _, why = verdict.partition(": ")
            if kind == "failed" and _keeps_arguments(test, prepared.program_names):
                kind = "unclear"
            if kind == "refused":
                raise ValueError(f"{verdict}, in the test {test!r:.100}")
            if kind == "unclear" and passes_plainly(program, test, limits, confine):
                _say_once(UNCARRIED)
                return Uncarried(f"it passes in one process, but not apart from its test: {why}")
            return verdict == "passed"
    raise _not_a_test(test)


def _keeps_arguments(test: str, program_names: set[str]) -> bool:
    """Return True if a test has its arguments by name, so that it can see what becomes of them."""
    tree = ast.parse(test)
    derived = _derived_names(tree, program_names) | TEST_NAMES
    arguments = [arg for part in ast.walk(tree) if isinstance(part, ast.Call) for arg in part.args]
    return any(_value_names(arg) - derived for arg in arguments)


UNCARRIED = (
    "a program passes in one process, but not apart from its test, and gets 0: samples.jsonl says "
    "why; rows with a `solution` that does so are judged in one process"
)


@functools.cache
def _say_once(what: str) -> None:
    print(f"note: {what}", file=sys.stderr)


def passes_plainly(
    program: str, test: str, limits: SandboxLimits | None = None, confine: bool = True
) -> bool:
    """Return True if a program passes a test in one confined process, as other judges run them.

    There the program can reach the test. So only rows are judged in this way whose own solution
    `passes` cannot judge.
    """
    token = secrets.token_hex(16)
    script = f"""
try:
    exec(compile({program!r}, "program.py", "exec"), globals())
except SystemExit:
    pass
exec(compile({test!r}, "test.py", "exec"), globals())
print("\\n" + {token!r})
"""
    outcome = run(script, limits=limits, confine=confine)
    return not outcome.ended and outcome.printed.rstrip().endswith(f"\n{token}")


@functools.lru_cache(1 << 14)
def judged_plainly(solution: str, tests: tuple[Any, ...], confine: bool = True) -> frozenset[int]:
    """Return the numbers of the tests that a row's own solution passes in one process only.

    An empty program must fail them: a test that calls nothing, as a class of unittest, says
    nothing.
    """

    def is_strict(test: str) -> bool:
        try:
            return passes(solution, test, confine=confine)
        except ValueError:
            return False

    asserting = [(index, test) for index, test in enumerate(tests) if isinstance(test, str)]
    return frozenset(
        index
        for index, test in asserting
        if not is_strict(test)
        and passes_plainly(solution, test, confine=confine)
        and not passes_plainly("", test, confine=confine)
    )


def _not_a_test(test: Any) -> ValueError:
    return ValueError(
        f"a test is {{'input': text, 'output': text}} or a text with asserts, not {test!r:.100}"
    )


# --- the test's part and the program's part ---


class Prepared(NamedTuple):
    """A test as `sandbox.judge` takes it."""

    code: CodeType
    program_names: set[str]
    num_asserts: int


def prepare(test: str) -> Prepared:
    """Compile a test for a process of its own.

    There every name is the test's, except for those that it uses without defining them: they are
    the program's, and each use of them asks its process. So the test's functions, loops, literals
    and comparisons are beyond the program's reach. Each assert must be reached. Raises ValueError
    if the test has no asserts, or its part cannot be separated from the program's.
    """
    try:
        tree = ast.parse(test)
        table = symtable.symtable(test, "test", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"the test {test!r:.100} is not Python: {error}") from None
    defined = _defined_names(table)
    names = free_names(table)
    _require_separable(tree, names, defined)
    num_asserts = sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
    if not num_asserts:
        raise ValueError(f"the test {test!r:.100} asserts nothing")
    _require_questions(tree, names)
    used = _global_names(table) & MODULES - defined - names
    imports = [ast.Import([ast.alias(name)]) for name in sorted(used)]
    unused = _asserts_of_unused(tree)
    _require_calls(tree, unused)
    if all(node in unused for node in ast.walk(tree) if isinstance(node, ast.Assert)):
        raise ValueError(f"the asserts of the test {test!r:.100} are in functions it never calls")
    rewrite = _Rewrite(in_place_calls(tree, names), unused)
    judged = rewrite.visit(tree)
    judged.body = [*imports, *_seeds(tree), *judged.body]
    code = compile(ast.fix_missing_locations(judged), "test", "exec")
    return Prepared(code, names, rewrite.num_asserts)


def _refusal(node: ast.stmt | ast.expr | ast.excepthandler, why: str) -> ValueError:
    return ValueError(f"line {node.lineno} of the test, {ast.unparse(node)!r:.100}: {why}")


def free_names(table: symtable.SymbolTable) -> set[str]:
    """Return the names that a test asks of the program: those that it does not define."""
    asked = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_declared_global()}
    return _global_names(table) - _defined_names(table) - (TEST_NAMES - asked)


def _defined_names(table: symtable.SymbolTable) -> set[str]:
    return {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }


def _global_names(table: symtable.SymbolTable) -> set[str]:
    """Return the names that code reads from outside of its functions."""
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module")
    }
    return names.union(*map(_global_names, table.get_children()))


def modules_of(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports, or imports names of."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module):
            return [module or ""]
    return []


def is_importable(module: str) -> bool:
    """Return True if a test may import a module."""
    return module.partition(".")[0] in IMPORTABLE


REDIRECTIONS = {"redirect_stdout", "redirect_stderr"}
OWN_STREAMS = (
    "the program has standard streams of its own; a test of what it reads and prints is "
    "{'input': text, 'output': text}"
)


def _require_separable(tree: ast.Module, program_names: set[str], defined: set[str]) -> None:
    """Raise ValueError if a part of the test cannot be separated from the program's.

    Args:
        tree: the test.
        program_names: names that the program defines.
        defined: names that the test defines.
    """
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(names=names) if any(alias.name == "*" for alias in names):
                raise _refusal(node, "its names cannot be told apart from the program's")
            case ast.Import() | ast.ImportFrom() if not all(map(is_importable, modules_of(node))):
                known = ", ".join(sorted(IMPORTABLE))
                raise _refusal(node, f"what the test imports must be of {known}")
            case ast.ClassDef(bases=bases, keywords=keywords):
                parts = [*bases, *(keyword.value for keyword in keywords)]
            case ast.ExceptHandler(type=ast.expr() as kind):
                parts = [kind]
            case ast.Name(id=name) if name in EVALUATORS - defined:
                raise _refusal(node, "it could run a text of the program on the test's side")
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in REDIRECTIONS:
                raise _refusal(node, OWN_STREAMS)
            case ast.Attribute(
                value=ast.Name(id="sys"), attr="stdin" | "stdout" | "stderr", ctx=ast.Store()
            ):
                raise _refusal(node, OWN_STREAMS)
            case _:
                continue
        if any(_loaded_names(part) & program_names for part in parts):
            raise _refusal(node, "a class of the program cannot be judged apart from it")


def _require_questions(tree: ast.Module, program_names: set[str]) -> None:
    """Raise ValueError if an assert at the top of the test does not depend on the program."""
    dependent = set(program_names)
    size = -1
    while size != len(dependent):
        size = len(dependent)
        for statement in tree.body:
            names = _loaded_names(statement)
            if _has_function(statement):
                # The program may call a function that it was given.
                names |= _bound_names(statement)
            if names & dependent:
                dependent |= _bound_names(statement)
    for statement in tree.body:
        if isinstance(statement, ast.Assert) and not _loaded_names(statement) & dependent:
            raise _refusal(
                statement,
                "it asks nothing of the program: all its names are built in or the test's",
            )
    if not program_names:
        raise ValueError("the test asks nothing of the program")


def _asserts_of_unused(tree: ast.Module) -> set[ast.AST]:
    """Return the asserts of functions that nothing names, as of helpers that many tests share."""
    return {
        part
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and not node.decorator_list
        and not any(
            isinstance(name, ast.Name) and name.id in (node.name, "globals", "locals", "vars")
            for name in ast.walk(tree)
        )
        for part in ast.walk(node)
        if isinstance(part, ast.Assert)
    }


def _require_calls(tree: ast.Module, unused: set[ast.AST]) -> None:
    """Raise ValueError for a function like pytest's that the test itself must call."""
    for node in tree.body:
        is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test")
        if is_test and any(part in unused for part in ast.walk(node)):
            raise _refusal(node, "nothing calls this function")


def _loaded_names(node: ast.AST) -> set[str]:
    """Return the names that code reads."""
    return {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }


def _has_function(statement: ast.stmt) -> bool:
    functions = (ast.Lambda, ast.FunctionDef, ast.ClassDef)
    return any(isinstance(part, functions) for part in ast.walk(statement))


def _bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement may define or change."""
    names: set[str] = set()
    for part in ast.walk(statement):
        match part:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name):
                # A call may change its arguments.
                names.add(name)
    return names - TEST_NAMES


def _seeds(tree: ast.Module) -> list[ast.stmt]:
    """Return statements that make a test's random numbers the same in each run."""
    modules = [module for node in ast.walk(tree) for module in modules_of(node)]
    uses_random = any(module.partition(".")[0] == "random" for module in modules)
    return ast.parse("__import__('random').seed(0)").body if uses_random else []


# --- calls that change their arguments ---


def in_place_calls(tree: ast.Module, program_names: set[str]) -> set[ast.Call]:
    """Return calls as in `k = f(xs)` after which the test reads what became of the arguments.

    It does if it uses an argument in comparisons with values of its own only: `xs[:k] == [1, 2]`.
    If it compares one with an answer of the program, the argument must stay the test's.
    """
    derived = _derived_names(tree, program_names)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    calls = {
        node: {part.id for part in node.args if isinstance(part, ast.Name)} - derived
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _value_names(node.func) & derived
    }
    aliases = _aliases(tree)
    calls = {
        call: names if isinstance(parents[call], ast.Assign) else names - aliases
        for call, names in calls.items()
    }
    copies = _copies_before(tree, calls)

    def is_read(name: ast.Name) -> bool | None:
        """Return True for a comparison with the test's own value, None for an argument."""
        node: ast.AST = name
        while not isinstance(node, ast.stmt):
            parent = parents[node]
            if parent in calls and node in calls_arguments(parent):
                return None
            if parent in copies:
                return None
            if isinstance(parent, ast.Compare):
                others = [part for part in (parent.left, *parent.comparators) if part is not node]
                return not any(_value_names(part) & (derived | {name.id}) for part in others)
            node = parent
        return False

    def calls_arguments(call: ast.AST) -> list[ast.expr]:
        return call.args if isinstance(call, ast.Call) else []

    uses: dict[str, set[bool | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            uses.setdefault(node.id, set()).add(is_read(node))
    return {
        call
        for call, names in calls.items()
        if names and all(uses[n] == {True, None} for n in names)
    }


def _aliases(tree: ast.Module) -> set[str]:
    """Return names that may be bound to a part of another value of the test."""
    new = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.Call
    owned = {
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, new)
        for target in node.targets
    }
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in owned
    }


def _copies_before(tree: ast.Module, calls: dict[ast.Call, set[str]]) -> set[ast.expr]:
    """Return copies as in `old = list(xs)` that are made before a call gets `xs`.

    `xs` must be bound before in the same statements, or an earlier round of a loop may change it.
    """
    copies: set[ast.expr] = set()
    for node in ast.walk(tree):
        fresh: set[str] = {node.target.id} if _has_target(node) else set()  # type: ignore
        for statement in _body(node):
            match statement:
                case ast.Assign(
                    targets=[ast.Name()],
                    value=ast.Call(func=ast.Name(id="list" | "dict" | "set" | "tuple" | "sorted"))
                    | ast.Call(func=ast.Name(id="deepcopy") | ast.Attribute(attr="deepcopy"))
                    | ast.Call(func=ast.Attribute(attr="copy"))
                    | ast.Subscript(slice=ast.Slice()) as value,
                ) if _value_names(value) & fresh:
                    copies.add(value)
            parts = [*ast.walk(statement)]
            fresh |= {
                part.id
                for part in parts
                if isinstance(part, ast.Name)
                and isinstance(part.ctx, ast.Store)
                and isinstance(statement, ast.Assign)
            }
            given = [calls[part] for part in parts if isinstance(part, ast.Call) and part in calls]
            fresh -= set[str]().union(*given)
    return copies


def _body(node: ast.AST) -> list[ast.stmt]:
    """Return the statements of a module or a compound statement."""
    match node:
        case ast.Module(body=list() as body) | ast.stmt(body=list() as body):  # type: ignore
            return body
    return []


def _has_target(node: ast.AST) -> bool:
    return isinstance(node, ast.For) and isinstance(node.target, ast.Name)


def _derived_names(tree: ast.Module, program_names: set[str]) -> set[str]:
    """Return names whose values may be the program's: its own, parameters, what comes of them."""
    derived = program_names | {part.arg for part in ast.walk(tree) if isinstance(part, ast.arg)}
    size = -1
    while size != len(derived):
        size = len(derived)
        for node in ast.walk(tree):
            match node:
                case ast.Assign(value=source, targets=targets):
                    pass
                case (
                    ast.AnnAssign(value=source, target=target)
                    | ast.AugAssign(value=source, target=target)
                    | ast.NamedExpr(value=source, target=target)
                    | ast.For(iter=source, target=target)
                    | ast.comprehension(iter=source, target=target)
                    | ast.withitem(context_expr=source, optional_vars=target)
                ):
                    targets = [target] if target else []
                case ast.FunctionDef(name=name):
                    source, targets = node, [ast.Name(name)]
                case _:
                    continue
            if source is not None and _value_names(source) & derived:
                parts = [part for root in targets for part in ast.walk(root)]
                derived |= {part.id for part in parts if isinstance(part, ast.Name)}
    return derived


def _value_names(node: ast.AST) -> set[str]:
    """Return the names that a value is made of, without those of indices."""
    if isinstance(node, ast.Name):
        return {node.id}
    parts = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
    return set[str]().union(*map(_value_names, parts))


class _Rewrite(ast.NodeTransformer):
    """Makes asserts, calls for their effect, handlers and `with` into calls of
    `judge_end.TestFunctions`."""

    def __init__(self, in_place: set[ast.Call], unused: set[ast.AST]):
        """Take the calls for their effect whose value is used as well, and asserts of functions
        that nothing calls."""
        self._unused = unused
        self._in_place = in_place
        self._last_assert = 0
        """Last line with an assert of the `with` that is visited."""
        self._has_type = True
        """True if `type` is the builtin."""
        self._decisive: set[str] = set()
        """Names that the test reads outside of asserts, so that they may decide what it does."""
        self._own: set[str] = set()
        """Functions and classes of the test, which may have asserts."""
        self.num_asserts = 0
        """Asserts that must be reached: those of constants, as `assert False`, need not."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self._has_type = not any(
            isinstance(part, ast.arg)
            and part.arg == "type"
            or isinstance(part, ast.Name)
            and part.id == "type"
            and isinstance(part.ctx, ast.Store)
            for part in ast.walk(node)
        )
        asserted = [part.test for part in ast.walk(node) if isinstance(part, ast.Assert)]
        parts = {part for test in asserted for part in ast.walk(test)}
        self._decisive = {
            part.id
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and part not in parts
        }
        kinds = (ast.FunctionDef, ast.ClassDef)
        self._own = {p.name for p in ast.walk(node) if isinstance(p, kinds)}
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        names = {part.id for part in node.targets if isinstance(part, ast.Name)}
        skips = names & self._decisive or _loaded_names(node.value) & self._own
        if len(names) == len(node.targets) and not skips:
            _ask_of_attributes(node.value)
        self.generic_visit(node)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        _ask_of_attributes(node.test)
        self.generic_visit(node)
        number = -1
        if not isinstance(node.test, ast.Constant) and node not in self._unused:
            number = self.num_asserts
            self.num_asserts += 1
        arguments: list[ast.expr] = [ast.Constant(number), node.test]
        call = ast.Call(ast.Name("<check>", ast.Load()), arguments, [])
        return ast.copy_location(ast.Expr(call), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call):
            self._in_place.add(node.value)
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        # A test may guard its calls by `if __name__ == "__main__"`.
        is_guard = node.id == "__name__" and isinstance(node.ctx, ast.Load)
        return ast.copy_location(ast.Constant("__main__"), node) if is_guard else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr != "__class__" or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(ast.Call(ast.Name("<type>", ast.Load()), [node.value], []), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id="type") as function, args=[_]) if self._has_type:
                function.id = "<type>"
        if node not in self._in_place:
            return node
        function = ast.Name("<effect>", ast.Load())
        call = ast.Call(function, [node.func, *node.args], node.keywords)
        return ast.copy_location(call, node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(ast.Call(ast.Name("<caught>", ast.Load()), [], [])))
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST | list[ast.AST]:
        self.generic_visit(node)
        if node.exc is not None and not isinstance(node.exc, ast.Name):
            return node
        # A handler may pass on what it has caught.
        arguments: list[ast.expr] = [node.exc] if node.exc else []
        return [ast.Expr(ast.Call(ast.Name("<raised>", ast.Load()), arguments, [])), node]

    def visit_With(self, node: ast.With) -> ast.AST:
        lines = [
            part.lineno
            for part in ast.walk(node)
            if isinstance(part, ast.Assert) and not isinstance(part.test, ast.Constant)
        ]
        outer, self._last_assert = self._last_assert, max(lines, default=0)
        self.generic_visit(node)
        self._last_assert = outer
        return node

    def visit_withitem(self, node: ast.withitem) -> ast.AST:
        self.generic_visit(node)
        arguments = [node.context_expr, ast.Constant(self._last_assert)]
        node.context_expr = ast.Call(ast.Name("<context>", ast.Load()), arguments, [])
        return node


def _ask_of_attributes(value: ast.expr) -> None:
    """Make a missing attribute an answer, and no failure of the program, in what asserts judge."""
    for part in ast.walk(value):
        if isinstance(part, ast.Name) and part.id == "hasattr":
            part.id = "<hasattr>"


def _lines(text: str) -> list[str]:
    """Return lines without trailing blanks, and without blank lines at the end.

    Judges of programs usually ignore these.
    """
    return [line.rstrip() for line in text.rstrip().split("\n")]


# --- rows ---


def tests_of(column: Any) -> list[Any]:
    """Return the tests of a row as a list of tests for `passes`.

    Args:
        column: such a list, {"inputs": [...], "outputs": [...]}, either as JSON, or one text of
            asserts, also as functions of pytest (KodCode). With "fn_name"
            the inputs are arguments of that function, see `problems.call_test`.

    Raises:
        ValueError: for anything else, and if there are no tests.
    """
    if isinstance(column, str):
        try:
            column = json.loads(column)
        except (ValueError, RecursionError):
            column = [column] if column.strip() else []
    match column:
        case {"inputs": list() as inputs, "outputs": list() as outputs, **rest} if (
            len(inputs) == len(outputs) > 0
        ):
            return [
                _plain_test({"input": given, "output": output} | rest)
                for given, output in zip(inputs, outputs, strict=True)
            ]
        case list() as tests if tests:
            return [_plain_test(test) for test in tests]
    raise ValueError(
        'no tests; write asserts, [{"input": "1", "output": "2"}] or {"inputs": [...], "outputs": '
        f"[...]}}, and not {column!r:.100}"
    )


def calls_program(column: Any) -> bool:
    """Return True if tests call what a program defines; False if they read what it prints."""
    try:
        return any(isinstance(test, str) for test in tests_of(column))
    except ValueError:
        return False


def _plain_test(test: Any) -> Any:
    """Return the text of a test that names a function, and any other test as it is."""
    match test:
        case {"input": given, "output": output, "fn_name": str() as name}:
            return call_test(name, given, output)
        case str():
            return _with_calls(test)
        case {"testtype": "functional"}:
            raise ValueError(
                f"a functional test needs `fn_name`, its function's name: {test!r:.100}"
            )
    return test


def _with_calls(test: str) -> str:
    """Return a test whose functions test_...() are called, and which imports no solution."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(test)
        lines = test.splitlines()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module in ("solution", "main"):
                place = slice(node.lineno - 1, node.end_lineno)
                lines[place] = [""] * len(lines[place])
        called = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        lines += [
            f"{node.name}()"
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and node.name.startswith("test")
            and not node.args.args
            and node.name not in called
        ]
        return "\n".join(lines)
    return test


def call_test(name: str, arguments: Any, output: Any) -> str:
    """Return a test that calls a function, or a method of the class Solution, with values.

    APPS, TACO and LiveCodeBench have such tests. As there, tuples are equal to lists, and a list of
    one value to the value.

    Args:
        name: the function's.
        arguments: a list of values, or a text with one JSON value on each line.
        output: the result, as a value or as JSON.

    Raises:
        ValueError: if they are no JSON values.
    """
    if not name.isidentifier():
        raise ValueError(f"fn_name must be a function's name, not {name!r:.100}")
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        output = json.loads(output) if isinstance(output, str) else output
    if not isinstance(arguments, list):
        raise ValueError(f"inputs of {name} must be lists of arguments, not {arguments!r:.100}")
    return f"""import json as _json

# The program may have a function of a builtin's name.
global {name}

def _plain(value):
    return [_plain(item) for item in value] if type(value) in (type([]), type(())) else value

try:
    _function = {name}
except NameError:
    _function = Solution().{name}
_want = _json.loads({json.dumps(output)!r})
_got = _plain(_function(*_json.loads({json.dumps(arguments)!r})))
assert _got == _want or [_got] == _want
"""


def check_test(test: Any) -> None:
    """Check a test without running anything.

    Raises ValueError if `passes` could not judge a program by it.
    """
    match test:
        case {"input": str(), "output": str()}:
            pass
        case str():
            prepare(test)
        case _:
            raise _not_a_test(test)


def all_pass(
    programs: Sequence[str],
    tests: Sequence[Any],
    confine: bool = True,
    solutions: Sequence[str | None] | None = None,
) -> list[bool | Uncarried | ValueError]:
    """Return for each program True if it passes all of its tests, or a ValueError for bad tests.

    A program that fails a test does not run the tests after it.

    Args:
        programs: [N] Python sources.
        tests: [N] see `tests_of`.
        confine: see `sandbox.run`.
        solutions: [N] programs that are right, or None. They say which tests `passes_plainly`
            judges.
    """

    def grade(program: str, column: Any, solution: str | None) -> bool | Uncarried | ValueError:
        try:
            parts = tests_of(column)
            plain = plain_tests(solution, parts, confine)
            for index, test in enumerate(parts):
                judged_by = passes_plainly if index in plain else verdict_on
                verdict = judged_by(program, test, confine=confine)
                if verdict is not True:
                    return verdict
            return True
        except ValueError as error:
            return error

    # One thread per processor: more programs at once would use up each other's time.
    num_threads = len(os.sched_getaffinity(0)) if sys.platform == "linux" else None
    of_rows = solutions or [None] * len(programs)
    with ThreadPoolExecutor(num_threads) as threads:
        # The completions of a row share what its solution says: it is judged once.
        kinds = {
            (solution, repr(column)): (solution, column)
            for solution, column in zip(of_rows, tests, strict=True)
        }
        list(threads.map(lambda kind: _decide(kind[0], kind[1], confine), kinds.values()))
        return list(threads.map(grade, programs, tests, of_rows))


def _decide(solution: str | None, column: Any, confine: bool) -> None:
    """Find out how a row is judged, before its completions are."""
    # Bad tests are said of each program.
    with contextlib.suppress(ValueError):
        plain_tests(solution, tests_of(column), confine)


def plain_tests(solution: str | None, tests: Sequence[Any], confine: bool) -> frozenset[int]:
    """Return the numbers of the tests of a row that are judged plainly; none without a solution."""
    if solution is None:
        return frozenset()
    texts = tuple(test if isinstance(test, str) else None for test in tests)
    found = judged_plainly(solution, texts, confine)
    if found:
        _say_once("some rows are judged plainly, in one process, as their own solution needs it")
    return found
