"""The program's end of the channel: run the program, then answer what the test asks.

`child.py` loads this file's code in its confined process, after that of `channel.py`.
"""

import _operator
import builtins
import sys
from typing import Any

from tpu_rl.sandbox.channel import (
    CONTAINERS,
    ENDS,
    MAX_RECURSION,
    OPERATIONS,
    OPERATORS,
    Closed,
    End,
    Proxy,
    module_named,
    name_of,
    pairs_of,
)


class ProgramEnd(End):
    """The end whose process runs the program. Whatever it raises is an answer."""

    def answer(self, request: Any) -> None:
        """Answer a request of the test."""
        try:
            super().answer(request)
        except Closed:
            raise
        except BaseException as error:
            self.send_error(error)

    def make_proxy(self, function: str | None) -> Any:
        """Return a proxy. That of a function is a function, as `functools.wraps` expects."""
        if function is None:
            return super().make_proxy(function)

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.ask("call", call, *arguments, keywords=keywords)

        call.__name__, _, doc = function.partition(" ")
        call.__qualname__ = call.__name__
        call.__doc__ = doc or None
        return call

    def resolve(self, tag: bytes, content: str) -> Any:
        """Return an object that the test names."""
        if tag != b"x":
            return super().resolve(tag, content)
        module, _, path = content.partition(":")
        return _operator.attrgetter(path)(module_named(module))


def serve(program: str, incoming: int, outgoing: int) -> None:
    """Run the program as __main__, then answer what the test asks."""
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    try:  # noqa: SIM105  # contextlib takes milliseconds to import
        exec(compile(program, "program.py", "exec"), scope)
    except SystemExit:
        pass
    sys.setrecursionlimit(max(sys.getrecursionlimit(), MAX_RECURSION))
    operations = OPERATIONS | {
        "name": lambda name: (scope[name],) if name in scope else (),
        "set": setattr,
        "delete": delattr,
        "set item": _operator.setitem,
        "delete item": _operator.delitem,
        "has": hasattr,
        "callable": callable,
        "hash": hash,
        "type": type,
        "is instance": isinstance,
        "is subclass": issubclass,
        "operator": lambda name, *values: OPERATORS[name](*values),
        "enter": lambda manager: type(manager).__enter__(manager),
        "exit": _exit,
        "method": _call_method,
        "copy": lambda value: module_named("copy").copy(value),
        "deep copy": lambda value: module_named("copy").deepcopy(value),
        "plain": _as_plain,
        "state": _state,
        "name of": name_of,
    }
    end = ProgramEnd(incoming, outgoing, operations, Proxy)
    ENDS.append(end)
    try:
        while True:
            with end.lock:
                request = end.receive()
            end.answer(request)
    except Closed:
        sys.stdout.flush()


def _exit(manager: Any, error: Any) -> bool:
    kind = type(error) if error is not None else None
    return bool(type(manager).__exit__(manager, kind, error, None))


def _call_method(
    value: Any, attribute: str, method: str, /, *arguments: Any, **keywords: Any
) -> Any:
    return getattr(getattr(value, attribute), method)(*arguments, **keywords)


def _as_plain(value: Any) -> Any:
    """Return (the container that an object of a subclass of it is equal to,), () if none."""
    for base, codec in CONTAINERS.items():
        if isinstance(value, base):
            values = list(codec.items(value))
            return (pairs_of(values) if base is dict else base(values),)
    return ()


def _state(value: Any) -> Any:
    """Return an object's class and attributes."""
    slots = [name for base in type(value).__mro__ for name in vars(base).get("__slots__", ())]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return type(value), attributes | getattr(value, "__dict__", {})
