"""Static checks of unit tests that a model writes (after RLSQM, arXiv 2310.02368)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.rewards.verifier import Verifier
from tpu_rl.verifiers.programs import program_of

_LONGEST_CODE = 20_000


def unit_test_quality(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    entry_point: Sequence[str | None] | None = None,
    **_: Any,
) -> list[float]:
    """Return the share of static checks that each completion's unit test holds; 0 if it is none.

    The program is the last fenced block, or all of the text. It is a test if it is Python, asserts
    something and calls the function `entry_point`, if the data name one, without defining it. The
    checks: it has no if, loop or try, and no test returns; it prints nothing; repeats no assert;
    asserts nothing that always holds; has a comment or docstring; and each of its functions is
    named test_ and at least two words. It is not run: `python_tests` and the tests' verdicts on
    right and wrong programs are other terms.
    """
    names = entry_point or [None] * len(completions)
    return [
        quality(program_of(text_of(completion)), name or "")
        for completion, name in zip(completions, names, strict=True)
    ]


def quality(code: str, entry_point: str) -> float:
    """Return the share of checks that hold, from 0 to 1; see `unit_test_quality`."""
    if len(code) > _LONGEST_CODE:
        return 0.0
    try:
        tree = ast.parse(code)
        asserts = [ast.dump(node) for node in _asserts(tree)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    calls = {_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    is_called = entry_point in calls and entry_point not in _defined(tree)
    if not asserts or (entry_point and not is_called):
        return 0.0
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [node for node in functions if node.name.startswith("test")]
    returns = [n for test in tests for n in ast.walk(test) if isinstance(n, ast.Return)]
    branches = ast.If | ast.For | ast.While | ast.Try | ast.IfExp
    checks: list[Callable[[], bool]] = [
        lambda: not returns and not any(isinstance(node, branches) for node in ast.walk(tree)),
        lambda: "print" not in calls,
        lambda: len(set(asserts)) == len(asserts),
        lambda: all(map(_says_something, _asserts(tree))),
        lambda: "#" in code or any(map(ast.get_docstring, [tree, *functions])),
        lambda: bool(tests) and all(len(node.name.split("_")) > 2 for node in tests),
    ]
    return sum(check() for check in checks) / len(checks)


def _asserts(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield statements that assert, and calls as self.assertEqual(...).

    Of `with pytest.raises(...)` this is the whole statement: what raises is in its body.
    """
    contexts: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            managers = [item.context_expr for item in node.items]
            if any(True for manager in managers for _ in _asserts(manager)):
                yield node
            contexts += managers
        elif isinstance(node, ast.Assert):
            yield node
        elif node in contexts:
            continue
        elif isinstance(node, ast.Call):
            name = _name(node.func)
            if name.startswith(("assert", "fail")) or name in ("raises", "approx_equal"):
                yield node


def _defined(tree: ast.Module) -> set[str]:
    """Return the functions that a program defines or assigns outside of classes and functions."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    return functions | {target.id for target in targets if isinstance(target, ast.Name)}


def _name(function: ast.AST) -> str:
    """Return "f" of f() and of module.f()."""
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _says_something(node: ast.AST) -> bool:
    """Return True unless an assert is about constants, or holds whatever the program computes."""
    sides: list[ast.expr] = []
    match node:
        case ast.Assert(test=ast.Compare(left=left, comparators=comparators)):
            sides = [left, *comparators]
        case ast.Call(args=args):
            sides = args[:2]
        case ast.Assert(test=ast.BoolOp(op=ast.Or(), values=values)):
            if any(not any(map(_is_unknown, ast.walk(value))) for value in values):
                return False
        case ast.Assert(
            test=ast.Tuple() | ast.List() | ast.JoinedStr() | ast.GeneratorExp() | ast.Lambda()
        ):
            return False
    is_same = len(sides) > 1 and len(set(map(ast.dump, sides))) == 1
    return not is_same and any(_is_unknown(part) for part in ast.walk(node))


def _is_unknown(node: ast.AST) -> bool:
    """Return True for a name of something that a program computes."""
    return isinstance(node, ast.Name) and node.id not in ("self", "pytest", "unittest")


VERIFIERS = {"unit_test_quality": Verifier(unit_test_quality)}
