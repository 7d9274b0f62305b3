"""Model-written programs, run where they can do no harm, and judged by what they compute, never by what they claim.

A program runs in a process that has confined itself (`sandbox_child`), with inputs but without any expected output:
what it prints, or the values of the tests' expressions, come back over pipes and are compared here. So an exit code, a
printed verdict or a patched `==` are worth nothing.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import marshal
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tpu_rl.errors import MachineError

CHILD = Path(__file__).with_name("sandbox_child.py")
START_SECONDS = 20.0
"""For the process to confine itself."""
MODULES = {"math", "cmath", "collections", "itertools", "functools", "re", "string", "operator", "fractions", "decimal"}
"""Modules of the standard library whose functions in a test are the test's own."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one run of a program may take."""

    seconds: float = 5.0
    """By the clock; as much of a processor's time, rounded up."""
    memory_mb: int = 512
    disk_mb: int = 16
    output_kb: int = 1024
    """Of what it prints, and of the values that it gives."""


class Outcome(NamedTuple):
    """What a program did."""

    ended: str
    """ "" where it ran to its end; else "time" or "output" for the limit that stopped it, or "exit CODE"."""
    printed: str
    errors: str
    """The end of what it wrote to stderr."""
    values: list[str]
    """`repr` of each expression that was reached, as the program gives it: to be parsed, never to be run."""


class Refused(Exception):
    """The kernel does not let a process confine itself."""


def run(
    program: str,
    stdin: str = "",
    steps: Sequence[tuple[str, str]] = (),
    limits: SandboxLimits | None = None,
    confine: bool = True,
) -> Outcome:
    """Run a program, then steps in its scope: ("do", statements) or ("value", expression).

    Raises Refused, before the program begins, where it cannot be confined; with `confine` False it has the rights of
    this process, and limits only.
    """
    limits = limits or SandboxLimits()
    request = {
        "program": program,
        "stdin": stdin,
        "steps": list(steps),
        "confine": confine,
        "memory_bytes": limits.memory_mb << 20,
        "disk_bytes": limits.disk_mb << 20,
        "cpu_seconds": int(limits.seconds) + 1,
    }
    with tempfile.TemporaryDirectory(prefix="tpu_rl_program_") as folder:
        report, protocol = os.pipe()
        process = _spawn(protocol, folder)
        try:
            return _attend(process, report, marshal.dumps(request), limits)
        finally:
            # Its namespace ends with it, and all that the program has started in there.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(report)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None and not pipe.closed:
                    pipe.close()


def require() -> None:
    """Raises MachineError where programs cannot be confined here."""
    reason = refusal()
    if reason:
        raise MachineError(
            "this machine cannot sandbox model-written programs",
            why=reason,
            fix="allow user namespaces, or --allow-unsandboxed-code to run them with this user's rights",
        )


@cache
def refusal() -> str:
    """Why programs cannot be confined here; "" where they can."""
    try:
        outcome = run("print(1)")
    except Refused as error:
        return str(error)
    return "" if outcome.printed == "1\n" else f"a program that prints 1 ended with {outcome}"


# --- verdicts --------------------------------------------------------------------------------------------------------


def passes(program: str, test: Any, limits: SandboxLimits | None = None, confine: bool = True) -> bool:
    """Whether a program passes one test: {"input": text, "output": text} of its stdin and stdout, or statements with
    asserts about what it defines. Raises ValueError where the test is neither."""
    match test:
        case {"input": str() as stdin, "output": str() as output}:
            outcome = run(program, stdin, limits=limits, confine=confine)
            return not outcome.ended and _lines(outcome.printed) == _lines(output)
        case str():
            steps, claims = split(test)
            outcome = run(program, steps=steps, limits=limits, confine=confine)
            values = [_literal(text) for text in outcome.values]
            if len(values) != sum(kind == "value" for kind, _ in steps) or None in values:
                return False
            # By a process that has never seen the program.
            given = [("do", f"hole_{n} = {value}") for n, value in enumerate(values)]
            imports = [("do", f"import {', '.join(sorted(MODULES))}")]
            judged = run("", steps=imports + given + [("value", f"bool({claim})") for claim in claims], confine=confine)
            return [_literal(text) for text in judged.values] == ["True"] * len(claims)
    raise _no_test(test)


def _no_test(test: Any) -> ValueError:
    return ValueError(f"a test is {{'input': text, 'output': text}} or a text with asserts, not {test!r:.100}")


def split(test: str) -> tuple[list[tuple[str, str]], list[str]]:
    """A test's statements -> (steps for the program's process, the asserted expressions with names for its values:
    hole_0, hole_1 and so on).

    What hangs on a name that is neither built in nor of the standard library's (see MODULES) is the program's, and its
    value is asked for; what is done with the values, and the comparison, is the test's. Raises ValueError for a test
    without asserts, or one in which the two cannot be told apart.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"the test {test!r:.100} is not Python: {error}") from None
    foreign = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    } - MODULES
    steps: list[tuple[str, str]] = []
    claims: list[str] = []
    holes, owned = _Holes(foreign), _answers(tree)
    for statement in tree.body:
        if isinstance(statement, ast.Assert):
            before = len(holes.expressions)
            claims.append(ast.unparse(holes.visit(_Replace(owned).visit(statement.test))))
            steps += [("value", ast.unparse(expression)) for expression in holes.expressions[before:]]
        elif not (isinstance(statement, ast.Assign) and _target(statement) in owned):
            steps.append(("do", ast.unparse(statement)))
    if not claims:
        raise ValueError(f"the test {test!r:.100} asserts nothing")
    return steps, claims


def _answers(tree: ast.Module) -> dict[str, ast.expr]:
    """The literals that a test gives names to and only compares with: the program must not see them."""
    named = {
        _target(node): node.value for node in tree.body if isinstance(node, ast.Assign) and _is_literal(node.value)
    }
    compared = {
        id(side)
        for statement in tree.body
        if isinstance(statement, ast.Assert)
        for node in ast.walk(statement.test)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
    }
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    stored = [node.id for node in names if not isinstance(node.ctx, ast.Load)]
    used = {node.id for node in names if isinstance(node.ctx, ast.Load) and id(node) not in compared}
    return {name: value for name, value in named.items() if name not in used and stored.count(name) == 1}


def _target(statement: ast.Assign) -> str:
    first = statement.targets[0]
    return first.id if len(statement.targets) == 1 and isinstance(first, ast.Name) else ""


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError):
        return False
    return True


class _Replace(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)


class _Holes(ast.NodeTransformer):
    """Replaces each maximal expression of the program's by a name for its value, numbered as in `expressions`."""

    def __init__(self, foreign: set[str]):
        self.expressions: list[ast.expr] = []
        self._foreign = foreign

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.NamedExpr):
            raise ValueError(f"the assert's {ast.unparse(node)!r:.100} cannot be judged apart from the program")
        if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            root: ast.AST = node
            while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.Name) and root.id in self._foreign:
                raise ValueError(f"the test's import {root.id} is not of {', '.join(sorted(MODULES))}")
            if isinstance(root, ast.Name) and root.id not in MODULES | vars(builtins).keys():
                self.expressions.append(node)
                return ast.Name(f"hole_{len(self.expressions) - 1}")
        return self.generic_visit(node)


def _literal(text: str) -> str | None:
    """The source of a value, from a line that a program reports; None where it is not that of a plain literal."""
    try:
        return repr(ast.literal_eval(text.encode().decode("unicode_escape")))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _lines(text: str) -> list[str]:
    """Lines without trailing blanks and blank lines at the end, which no judge of programs looks at."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


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

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(judge, programs, tests))


# --- the process -----------------------------------------------------------------------------------------------------


def _spawn(protocol: int, folder: str) -> subprocess.Popen[bytes]:
    """The child, at the start of its program; it has nothing of this process but its pipes."""
    try:
        return subprocess.Popen(
            # Isolated, and without the packages of this environment.
            [sys.executable, "-I", "-S", str(CHILD), str(protocol)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(protocol,),
            start_new_session=True,
            cwd=folder,
            env={"LANG": "C.UTF-8"},
        )
    finally:
        os.close(protocol)


def _attend(process: subprocess.Popen[bytes], report: int, request: bytes, limits: SandboxLimits) -> Outcome:
    """Feed a process and read its pipes until it ends or has to."""
    assert process.stdout is not None
    assert process.stderr is not None
    _give(process, request)
    places = {report: bytearray(), process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    confined = _first_line(process, report, places[report])
    if confined != b"confined":
        process.kill()
        raise Refused(confined.decode(errors="replace") or process.stderr.read(2000).decode(errors="replace"))
    deadline, most, ended = time.monotonic() + limits.seconds, limits.output_kb << 10, ""
    with selectors.DefaultSelector() as selector:
        for descriptor in places:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and not ended:
            left = deadline - time.monotonic()
            ready = selector.select(max(left, 0))
            if left <= 0 and not ready:
                ended = "time"
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                places[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
                if len(places[key.fd]) > most:
                    ended = "output"
            if left <= 0:
                ended = ended or "time"
    if not ended:
        code = process.wait()
        ended = f"exit {code}" if code else ""
    values, printed, errors = (bytes(text).decode(errors="replace") for text in places.values())
    return Outcome(ended, printed, errors[-2000:], values.splitlines())


def _give(process: subprocess.Popen[bytes], request: bytes) -> None:
    """Our own code reads it before anything else runs: it cannot be kept waiting."""
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):  # it ended at once: what it says tells why
        process.stdin.write(request)
        process.stdin.close()


def _first_line(process: subprocess.Popen[bytes], report: int, found: bytearray) -> bytes:
    """The first line of the report, taken out of what was `found`."""
    with selectors.DefaultSelector() as selector:
        selector.register(report, selectors.EVENT_READ)
        deadline = time.monotonic() + START_SECONDS
        while b"\n" not in found:
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return b"it does not start in time"
            data = os.read(report, 1 << 16)
            if not data:
                return bytes(found)
            found += data
    line, _, rest = bytes(found).partition(b"\n")
    found[:] = rest
    return line
