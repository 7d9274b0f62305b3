"""Both ends of the channel between a test and the program that it judges.

The test runs in one process (`judge`) and the program in another (`serve`). Between them go plain
values, encoded here, and nothing else: numbers, texts, containers of them. Everything else stays in
its process, and the other one holds a `Proxy` that asks for each operation. So nothing that the
program defines, not even an `__eq__`, runs in the judge, and no callable of the program is called
there: a proxy stands for it, a builtin function too.

A message is one of these tuples. Requests nest like calls: a function of the test that the program
calls may itself ask the program.

    ("ask", operation, arguments, keywords, whether to return the changed arguments)
    ("value", value, None or (arguments, keywords))
    ("error", exception)

`child.py` loads this file's code in its confined process. It uses the standard library only.
"""

import _operator
import _thread
import builtins
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NoReturn

MAX_BYTES = 32 << 20
"""Bytes of one message. A longer one is no answer."""
MAX_RECURSION = 4000
"""Recursion limit of both ends: a call across the channel takes several frames of each."""
SINGLE_ITEMS = 64
"""Items of an iterator of the program that are fetched one by one. Further ones are fetched in
growing batches."""
MAX_BATCH = 4096
TEST = "test"
"""Name of the test's module."""
SCALARS: tuple[tuple[type, bytes, Callable[[Any], str]], ...] = (
    (int, b"i", lambda value: format(int(value), "x")),
    (float, b"f", float.__repr__),
    (complex, b"c", complex.__repr__),
)
CONTAINERS: dict[type, tuple[bytes, Callable[[Any], Iterable[Any]]]] = {
    list: (b"l", list.__iter__),
    tuple: (b"t", tuple.__iter__),
    set: (b"s", set.__iter__),
    frozenset: (b"z", frozenset.__iter__),
    dict: (b"d", lambda value: (part for item in dict.items(value) for part in item)),
    type({}.keys()): (b"K", iter),
    type({}.values()): (b"V", iter),
    type({}.items()): (b"I", lambda value: (part for item in value for part in item)),
}
NAMED: dict[tuple[str, str], tuple[bytes, Callable[[Any], Iterable[Any]]]] = {
    ("collections", "deque"): (b"q", iter),
    ("collections", "Counter"): (b"C", CONTAINERS[dict][1]),
    ("collections", "OrderedDict"): (b"O", CONTAINERS[dict][1]),
    ("collections", "defaultdict"): (b"d", CONTAINERS[dict][1]),
    ("fractions", "Fraction"): (b"F", lambda value: (value.numerator, value.denominator)),
    ("decimal", "Decimal"): (b"D", lambda value: (str(value),)),
    ("datetime", "date"): (b"a", lambda value: (value.isoformat(),)),
    ("datetime", "time"): (b"h", lambda value: (value.isoformat(),)),
    ("datetime", "datetime"): (b"w", lambda value: (value.isoformat(),)),
    ("datetime", "timedelta"): (
        b"p",
        lambda value: (value.days, value.seconds, value.microseconds),
    ),
}
"""Containers and numbers of modules, which are imported only where they are used."""
END = b"."
VISIBLE = {"__name__", "__qualname__", "__doc__", "__wrapped__", "__dict__"}
"""Attributes between double underscores that an object of the other end answers."""


class NotPlain(Exception):
    """A value that cannot go through the channel."""


class TooLarge(NotPlain):
    """A value whose encoding is too long or too deep."""


class Closed(BaseException):
    """The end of a conversation: the test failed, or the other end is gone or breaks the protocol.

    A test that catches it has failed all the same.
    """

    reasons: ClassVar[list[str]] = []

    def __init__(self, reason: str):
        """Record the reason."""
        super().__init__(reason)
        self.reasons.append(reason[:500])


# --- values as bytes ---


class Writer:
    """Encodes one message."""

    def __init__(self, refer: Callable[[Any], tuple[bytes, str]]):
        """`refer` returns the tag and the content of an object that is no plain value."""
        self.data = bytearray()
        self._refer = refer
        self._open: set[int] = set()

    def _put(self, tag: bytes, content: bytes = b"") -> None:
        self.data += tag + len(content).to_bytes(4, "big") + content
        if len(self.data) > MAX_BYTES:
            raise TooLarge(f"a value of more than {MAX_BYTES} bytes")

    def _put_items(self, tag: bytes, items: Iterable[Any]) -> None:
        self._put(tag)
        for item in items:
            self.value(item)
        self._put(END)

    def value(self, value: Any) -> None:
        """Add a value."""
        kind = type(value)
        if value is None or kind is bool:
            return self._put(b"N" if value is None else b"1" if value else b"0")
        if isinstance(value, str):
            return self._put(b"u", str.encode(value, "utf-8", "surrogatepass"))
        if isinstance(value, bytes):
            return self._put(b"b", bytes(value))
        if kind is bytearray:
            return self._put(b"B", bytes(value))
        for base, tag, text in SCALARS:
            # An enumeration's number is a number.
            if isinstance(value, base):
                return self._put(tag, text(value).encode())
        tag_and_items = CONTAINERS.get(kind) or NAMED.get((kind.__module__, kind.__name__))
        if tag_and_items:
            if id(value) in self._open:
                raise NotPlain("a value that contains itself")
            self._open.add(id(value))
            tag, items = tag_and_items
            self._put_items(tag, items(value))
            return self._open.remove(id(value))
        if kind is range:
            return self._put_items(b"r", (value.start, value.stop, value.step))
        if isinstance(value, BaseException):
            self._put(b"e")
            self.value([base.__name__ for base in kind.__mro__])
            self.value(_arguments_of(value))
            # Each end finds its own exceptions again when they come back.
            self._put_object(vars(value).get("_origin", value))
            return self._put(END)
        return self._put_object(value)

    def _put_object(self, value: Any) -> None:
        tag, content = self._refer(value)
        self._put(tag, content.encode())


class Reader:
    """Decodes one message. It builds plain values and proxies, whatever the bytes are."""

    def __init__(self, data: bytes, resolve: Callable[[bytes, str], Any]):
        """`resolve` returns the object of a tag and a content of `Writer`'s `refer`."""
        self._data = data
        self._position = 0
        self._resolve = resolve

    def value(self) -> Any:
        """Return the next value.

        Raises:
            ValueError: if there is none.
        """
        tag, content = self._take()
        if tag in SIMPLE:
            return SIMPLE[tag](content)
        if tag in MAKERS:
            items: list[Any] = []
            while self._data[self._position : self._position + 1] != END:
                items.append(self.value())
            self._take()
            return MAKERS[tag](items)
        return self._resolve(tag, content.decode())

    def _take(self) -> tuple[bytes, bytes]:
        start = self._position + 5
        if start > len(self._data):
            raise ValueError("the message ends too soon")
        tag = self._data[self._position : self._position + 1]
        self._position = start + int.from_bytes(self._data[start - 4 : start], "big")
        return tag, self._data[start : self._position]


def _module(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _arguments_of(error: BaseException) -> tuple[Any, ...]:
    """Return arguments with which a builtin class makes an exception of the same text."""
    kind = type(error)
    base = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    return error.args if kind.__str__ is base.__str__ else (str(error)[:2000],)


def _exception(items: list[Any]) -> BaseException:
    """Return an exception of the first class that is built in, or the one that came from here."""
    names, arguments, origin = items
    if isinstance(origin, Exception):
        return origin
    for name in names:
        kind = vars(builtins).get(name) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                error = kind(*arguments)
            except (TypeError, ValueError):
                # Some need arguments of their own.
                continue
            vars(error)["_origin"] = origin
            return error
    return Closed(f"the program ended with {names!r:.100}: {arguments!r:.300}")


SIMPLE: dict[bytes, Callable[[bytes], Any]] = {
    b"N": lambda _: None,
    b"1": lambda _: True,
    b"0": lambda _: False,
    b"u": lambda content: content.decode("utf-8", "surrogatepass"),
    b"b": lambda content: content,
    b"B": bytearray,
    b"i": lambda content: int(content, 16),
    b"f": float,
    b"c": lambda content: complex(content.decode()),
}
MAKERS: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": list,
    b"t": tuple,
    b"s": set,
    b"z": frozenset,
    b"d": _pairs,
    b"r": lambda items: range(*items),
    b"K": lambda items: dict.fromkeys(items).keys(),
    b"V": lambda items: dict(enumerate(items)).values(),
    b"I": lambda items: _pairs(items).items(),
    b"q": lambda items: _module("collections").deque(items),
    b"C": lambda items: _module("collections").Counter(_pairs(items)),
    b"O": lambda items: _module("collections").OrderedDict(_pairs(items)),
    b"F": lambda items: _module("fractions").Fraction(*map(int, items)),
    b"D": lambda items: _module("decimal").Decimal(*items),
    b"a": lambda items: _module("datetime").date.fromisoformat(*items),
    b"h": lambda items: _module("datetime").time.fromisoformat(*items),
    b"w": lambda items: _module("datetime").datetime.fromisoformat(*items),
    b"p": lambda items: _module("datetime").timedelta(*items),
    b"e": _exception,
}


class End:
    """One end of the channel: it asks the other one, and meanwhile answers what that asks."""

    def __init__(
        self,
        incoming: int,
        outgoing: int,
        operations: dict[str, Callable[..., Any]],
        proxy: type["Proxy"],
    ):
        """Take descriptors of the pipes, answers to the other end, and the class of its objects."""
        self._incoming = incoming
        self._outgoing = outgoing
        self._operations = operations
        self._proxy = proxy
        self._own: list[Any] = []
        """This end's objects that the other one knows, by number."""
        self._own_numbers: dict[int, int] = {}
        self._proxies: dict[str, Any] = {}
        """The other end's objects, by number. They are kept, so that no id is used twice."""
        self._proxy_numbers: dict[int, str] = {}
        self.lock = _thread.RLock()
        """Threads of a program wait until the exchange of another one is over."""

    def ask(
        self,
        operation: str,
        *arguments: Any,
        keywords: dict[str, Any] | None = None,
        back: bool = False,
    ) -> Any:
        """Return the other end's answer. With `back`, containers among the arguments are changed
        as it changed its copies.

        Raises:
            Exception: that of the other end, of the first class that is built in.
            Closed: if it does not answer.
        """
        keywords = keywords or {}
        with self.lock:
            self.send(("ask", operation, arguments, keywords, back))
            while True:
                match self.receive():
                    case ("ask", str(), tuple(), dict(), bool()) as request:
                        self.answer(request)
                    case ("value", value, after):
                        if back:
                            _update(arguments, keywords, after)
                        return value
                    case ("error", BaseException() as error):
                        self.raise_(error)
                    case _:
                        raise Closed("the program breaks the protocol")

    def answer(self, request: Any) -> None:
        """Answer a request of the other end."""
        _, operation, arguments, keywords, back = request
        try:
            value = self._operations[operation](*arguments, **keywords)
            self.send(("value", value, (arguments, keywords) if back else None))
        except Exception as error:
            self.send_error(error)

    def raise_(self, error: BaseException) -> NoReturn:
        """Raise the other end's exception."""
        raise error

    def send_error(self, error: BaseException) -> None:
        """Send an exception in place of an answer."""
        try:
            self.send(("error", error))
        except NotPlain:
            error.args = (str(error)[:2000],)
            self.send(("error", error))

    def send(self, message: Any) -> None:
        """Send a value.

        Raises:
            NotPlain: before anything is sent.
            Closed: if nobody reads.
        """
        writer = Writer(self.refer)
        try:
            writer.value(message)
        except RecursionError:
            raise TooLarge("a value of too many levels") from None
        rest = memoryview(len(writer.data).to_bytes(8, "big") + writer.data)
        try:
            with self.lock:
                while rest:
                    rest = rest[os.write(self._outgoing, rest) :]
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self) -> Any:
        """Return the next value. Raises Closed if there is none."""
        size = int.from_bytes(self._read(8), "big")
        if size > MAX_BYTES:
            raise Closed("a message is too long")
        try:
            return Reader(self._read(size), self.resolve).value()
        except Exception as error:
            raise Closed(f"not a value: {type(error).__name__}") from None

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = os.read(self._incoming, min(size - len(data), 1 << 16))
            if not part:
                raise Closed("the program ended")
            data += part
        return bytes(data)

    # Tags of objects: "y" for yours (of the end that reads), "m" for mine, "g" for a function of
    # mine, and "x" for a function or class of Python's own by its name.

    def refer(self, value: Any) -> tuple[bytes, str]:
        """Return the tag and the content of an object."""
        if id(value) in self._proxy_numbers:
            return b"y", self._proxy_numbers[id(value)]
        self.check_own(value)
        number = self._own_numbers.get(id(value))
        if number is None:
            number = self._own_numbers[id(value)] = len(self._own)
            self._own.append(value)
        return b"m", str(number)

    def check_own(self, value: Any) -> None:
        """Raise NotPlain if the other end must not get a proxy of an object."""

    def resolve(self, tag: bytes, content: str) -> Any:
        """Return the object of a tag and a content, or a proxy of it."""
        number, _, name = content.partition(" ")
        if tag == b"y":
            return self._own[int(number)]
        if tag not in (b"m", b"g"):
            raise ValueError(f"tag {tag!r}")
        number = str(int(number))
        if number not in self._proxies:
            proxy = self.make_proxy(name if tag == b"g" else None)
            self._proxies[number] = proxy
            self._proxy_numbers[id(proxy)] = number
        return self._proxies[number]

    def make_proxy(self, function_name: str | None) -> Any:
        """Return a new proxy. Functions have a name."""
        del function_name
        return object.__new__(self._proxy)

    def number_of(self, proxy: Any) -> str:
        """Return the number of an object of the other end."""
        if id(proxy) not in self._proxy_numbers:
            raise Closed("an object of the program was made on this side")
        return self._proxy_numbers[id(proxy)]


def _update(arguments: tuple[Any, ...], keywords: dict[str, Any], after: Any) -> None:
    """Give the containers among arguments the content of the other end's copies."""
    match after:
        case (tuple() as new_arguments, dict() as new_keywords):
            pairs = [*zip(arguments, new_arguments, strict=False)]
            pairs += [(keywords[name], new_keywords.get(name)) for name in keywords]
        case _:
            raise Closed("the program breaks the protocol")
    for old, new in pairs:
        if type(old) is not type(new):
            continue
        if isinstance(old, list | bytearray):
            old[:] = new
        elif isinstance(old, dict | set):
            old.clear()
            old.update(new)
        elif type(old).__name__ == "deque":
            old.clear()
            old.extend(new)


# --- objects of the other end ---


class Proxy:
    """An object of the other end. Each operation asks for it there."""

    __slots__ = ()

    end: ClassVar[list[End]] = []
    """The end of this process."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.end[0].ask("call", self, *arguments, keywords=keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in VISIBLE:
            raise AttributeError(name)
        return self.end[0].ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.end[0].ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.end[0].ask("delete", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self.end[0].ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.end[0].ask("set item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self.end[0].ask("delete item", self, key)

    def __len__(self) -> int:
        return self.end[0].ask("length", self)

    def __iter__(self) -> Iterator[Any]:
        items = self.end[0].ask("iterate", self)
        return items if isinstance(items, Proxy) else iter(items)

    def __next__(self) -> Any:
        items, _ = self.end[0].ask("next", self, 1)
        if not items:
            raise StopIteration
        return items[0]

    def __contains__(self, item: Any) -> bool:
        return self.end[0].ask("contains", self, item)

    def __bool__(self) -> bool:
        return self.end[0].ask("truth", self)

    def __str__(self) -> str:
        return self.end[0].ask("text", self)

    def __repr__(self) -> str:
        return self.end[0].ask("repr", self)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other or self.end[0].ask("compare", "eq", self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return self.end[0].ask("compare", "lt", self, other)

    def __le__(self, other: Any) -> bool:
        return self.end[0].ask("compare", "le", self, other)

    def __gt__(self, other: Any) -> bool:
        return self.end[0].ask("compare", "gt", self, other)

    def __ge__(self, other: Any) -> bool:
        return self.end[0].ask("compare", "ge", self, other)


def _call(function: Any, *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


def _compare(name: str, left: Any, right: Any) -> bool:
    return bool(COMPARISONS[name](left, right))


def _iterate(value: Any) -> Any:
    """Return the items of an object that has a length, and an iterator of any other."""
    return list(value) if hasattr(type(value), "__len__") else iter(value)


def _next_items(iterator: Any, count: int) -> tuple[list[Any], bool]:
    """Return up to `count` items, and True if these are all. An exception comes after them."""
    if id(iterator) in _late:
        raise _late.pop(id(iterator))
    items: list[Any] = []
    while len(items) < count:
        try:
            items.append(next(iterator))
        except StopIteration:
            return items, True
        except BaseException as error:
            if not items:
                raise
            _late[id(iterator)] = error
            break
    return items, False


COMPARISONS = {name: getattr(_operator, name) for name in ("eq", "lt", "le", "gt", "ge")}
_late: dict[int, BaseException] = {}
"""Exceptions of iterators whose items before them are sent first."""
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "get": getattr,
    "item": _operator.getitem,
    "length": len,
    "iterate": _iterate,
    "next": _next_items,
    "contains": _operator.contains,
    "truth": bool,
    "text": str,
    "repr": repr,
    "compare": _compare,
}
"""What both ends answer about their objects."""


# --- the program's end ---


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

    def make_proxy(self, function_name: str | None) -> Any:
        """Return a proxy. That of a function is a function, as `functools.wraps` expects."""
        proxy = super().make_proxy(function_name)
        if function_name is None:
            return proxy

        def function(*arguments: Any, **keywords: Any) -> Any:
            return self.ask("call", function, *arguments, keywords=keywords)

        function.__name__ = function.__qualname__ = function_name
        return function

    def resolve(self, tag: bytes, content: str) -> Any:
        """Return an object that the test names."""
        if tag != b"x":
            return super().resolve(tag, content)
        module, _, path = content.partition(":")
        value = _module(module)
        for name in path.split("."):
            value = getattr(value, name)
        return value


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
        "is instance": isinstance,
        "is subclass": issubclass,
        "operator": lambda name, *values: getattr(_operator, name)(*values),
        "enter": lambda manager: type(manager).__enter__(manager),
        "exit": _exit,
        "copy": lambda value, function: getattr(_module("copy"), function)(value),
        "plain": _as_plain,
        "state": _state,
        "name of": _name_of,
    }
    end = ProgramEnd(incoming, outgoing, operations, Proxy)
    Proxy.end.append(end)
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


def _as_plain(value: Any) -> Any:
    """Return (the container that an object of a subclass of it is equal to,), () if none."""
    for base, (_, items) in CONTAINERS.items():
        if isinstance(value, base):
            values = list(items(value))
            return (_pairs(values) if base is dict else base(values),)
    return ()


def _state(value: Any) -> Any:
    """Return an object's class and attributes."""
    slots = [name for base in type(value).__mro__ for name in vars(base).get("__slots__", ())]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return type(value), attributes | getattr(value, "__dict__", {})


def _name_of(value: Any) -> str:
    """Return the name by which the other end finds a function or class of Python's own, or ""."""
    owner = getattr(value, "__objclass__", value)
    module = sys.modules.get(str(getattr(owner, "__module__", "")))
    path = str(getattr(value, "__qualname__", ""))
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    own = ("", "__main__", TEST)
    if found is not value or not callable(value) or module is None or module.__name__ in own:
        return ""
    return f"{module.__name__}:{path}"


# --- the test's end ---


class JudgeEnd(End):
    """The end whose process runs the test. It shows of the test what that gives away.

    That are functions, iterators, and instances of the test's own classes, with their public
    attributes.
    """

    def __init__(self, incoming: int, outgoing: int):
        """Take descriptors of the pipes."""
        operations = {name: self._guarded(name) for name in OPERATIONS} | {"set": self._set}
        super().__init__(incoming, outgoing, operations, Remote)
        self.refusals: list[str] = []
        """Objects that the test must not give to a program."""
        self.unhandled: dict[int, BaseException] = {}
        """Exceptions of the program that no handler of the test has caught so far."""
        self.views: dict[tuple[str, str], Any] = {}
        """What the program last said of its objects. It holds until the program runs again."""
        self._statements = 0
        """Calls for their effect that are under way."""

    def ask(
        self,
        operation: str,
        *arguments: Any,
        keywords: dict[str, Any] | None = None,
        back: bool = False,
    ) -> Any:
        """Return the program's answer: see `End.ask`."""
        if operation not in READS:
            self.views.clear()
        self._statements += back
        try:
            return super().ask(operation, *arguments, keywords=keywords, back=back)
        finally:
            self._statements -= back
            if operation not in READS:
                self.views.clear()

    def view(self, operation: str, remote: "Remote") -> Any:
        """Return what the program says of an object, the same as long as nothing changes it."""
        key = (operation, self.number_of(remote))
        if key not in self.views:
            answer = self.ask(operation, remote)
            self.views[key] = answer
        return self.views[key]

    def raise_(self, error: BaseException) -> NoReturn:
        """Raise the program's exception. A handler that the test has written must catch it."""
        if isinstance(error, Exception):
            self.unhandled[id(error)] = error
        raise error

    def handle(self, error: BaseException | None) -> None:
        """Record that the test has caught an exception, and those that led to it."""
        seen: set[int] = set()
        todo = [error]
        while todo:
            error = todo.pop()
            if error is None or id(error) in seen:
                continue
            seen.add(id(error))
            self.unhandled.pop(id(error), None)
            todo += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]

    def send(self, message: Any) -> None:
        """Send a value. A test that must not give it away cannot be judged."""
        try:
            super().send(message)
        except TooLarge as error:
            raise Closed(str(error)) from None
        except NotPlain as error:
            self.refusals.append(str(error))
            raise Closed(str(error)) from None

    def refer(self, value: Any) -> tuple[bytes, str]:
        """Return the tag and content of an object, which has a name if it is Python's own."""
        if not callable(value) or id(value) in self._proxy_numbers:
            return super().refer(value)
        if name := _name_of(value):
            return b"x", name
        tag, number = super().refer(value)
        return (b"g", f"{number} {value.__name__}") if hasattr(value, "__name__") else (tag, number)

    def check_own(self, value: Any) -> None:
        """Raise NotPlain for what the test must not give away."""
        shared = callable(value) or hasattr(type(value), "__next__") or _is_of_test(value)
        if not shared and not isinstance(value, BaseException):
            raise NotPlain(f"an object of {type(value).__name__}")

    def _guarded(self, name: str) -> Callable[..., Any]:
        """Return an operation that is refused for what the test did not give away."""
        operation = OPERATIONS[name]

        def guarded(*arguments: Any, **keywords: Any) -> Any:
            value = arguments[1 if name == "compare" else 0]
            is_own = self._own_numbers.get(id(value)) is not None
            allowed = {
                "call": callable(value),
                "next": hasattr(type(value), "__next__"),
                "iterate": hasattr(type(value), "__iter__"),
                "get": _is_of_test(value) and _is_public(*arguments[1:]),
            }.get(name, _is_of_test(value))
            if not is_own or not allowed:
                raise TypeError(f"an object of the test does not answer {name!r}")
            return operation(*arguments, **keywords)

        return guarded

    def _set(self, value: Any, name: str, item: Any) -> None:
        # In any other call the test keeps its own values.
        if not (self._statements and _is_of_test(value) and _is_public(name)):
            raise AttributeError(f"an object of the test does not change in this call: {name}")
        setattr(value, name, item)


READS = {
    *("name", "get", "has", "item", "length", "iterate", "truth", "text", "repr", "compare"),
    *("callable", "is instance", "is subclass", "plain", "state", "name of"),
}
"""Requests that change nothing in the program."""


def _is_public(name: Any) -> bool:
    return type(name) is str and not name.startswith("_")


def _is_of_test(value: Any) -> bool:
    return type(value).__module__ == TEST and not isinstance(value, type)


def judge(
    code: Any, program_names: set[str], num_asserts: int, incoming: int, outgoing: int
) -> str:
    """Run a test, and return "passed" or the reason why the program does not pass.

    A reason that begins with "refused" means that the test cannot be judged at all.

    Args:
        code: see `unit_tests.prepare`, as for the next two.
        program_names: names that the program defines.
        num_asserts: asserts that must be reached.
        incoming: descriptor of the pipe with the program's answers.
        outgoing: descriptor of the pipe for requests.
    """
    end = JudgeEnd(incoming, outgoing)
    Proxy.end.append(end)
    reached: set[int] = set()
    sys.setrecursionlimit(MAX_RECURSION)

    def check(number: int, value: Any) -> None:
        # Constants have the number -1.
        reached.update({number} - {-1})
        # Not an exception: the test could catch it.
        if isinstance(value, Remote) and not _plain(value):
            raise Closed("an assert is about an object of the program")
        if not value:
            raise Closed("an assert is false")

    def discard(function: Any, *arguments: Any, **keywords: Any) -> None:
        # A call as a statement is made for its effect, so the program's changes of the arguments
        # count. In any other call the test keeps its own values.
        if isinstance(function, Remote):
            end.ask("call", function, *arguments, keywords=keywords, back=True)
        else:
            function(*arguments, **keywords)

    def caught() -> None:
        end.handle(sys.exc_info()[1])

    def advance(iterator: Any, *default: Any) -> Any:
        try:
            return next(iterator, *default)
        except StopIteration as error:
            end.unhandled[id(error)] = error
            raise

    def has_attribute(value: Any, name: str) -> bool:
        return end.ask("has", value, name) if isinstance(value, Remote) else hasattr(value, name)

    def is_callable(value: Any) -> bool:
        return end.ask("callable", value) if isinstance(value, Remote) else callable(value)

    class Names(dict[str, Any]):
        """Names that the test does not define: builtins first, then the program's."""

        def __missing__(self, name: str) -> Any:
            if name in program_names:
                match end.ask("name", name):
                    case (value,):
                        return value
            raise KeyError(name)

    names = Names(vars(builtins))
    names |= {"next": advance, "callable": is_callable}
    names |= {"<check>": check, "<discard>": discard, "<caught>": caught}
    names |= {"<hasattr>": has_attribute, "<context>": Context}
    failure = ""
    try:
        exec(code, {"__name__": TEST, "__builtins__": names})
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"[:500]
    if end.refusals:
        return f"refused: the test gives the program {end.refusals[0]}, which is no plain value"
    if Closed.reasons or failure:
        return f"failed: {(Closed.reasons or [failure])[0]}"
    if end.unhandled:
        (error, *_) = end.unhandled.values()
        return f"failed: the program's {type(error).__name__} ended a part of the test"
    if len(reached) < num_asserts or not num_asserts:
        return "failed: not all asserts were reached"
    return "passed"


class Context:
    """A context manager of the test: what it suppresses is caught."""

    def __init__(self, manager: Any):
        """Take the manager."""
        self._manager = manager

    def __enter__(self) -> Any:
        if isinstance(self._manager, Remote):
            return Proxy.end[0].ask("enter", self._manager)
        return type(self._manager).__enter__(self._manager)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if isinstance(self._manager, Remote):
            # What a manager of the program suppresses is not caught by the test.
            return Proxy.end[0].ask("exit", self._manager, error) is True
        suppressed = bool(type(self._manager).__exit__(self._manager, kind, error, traceback))
        if suppressed:
            Remote.end[0].handle(error)
        return suppressed


class Remote(Proxy):
    """An object of the program, held by the test.

    Containers are read as a plain copy. Other objects are equal to nothing but objects of the
    program: its methods would decide.
    """

    __slots__ = ()

    end: ClassVar[list[JudgeEnd]] = Proxy.end  # type: ignore[assignment]
    batches: ClassVar[dict[int, tuple[list[Any], bool, int]]] = {}
    """Id of an iterator -> items that were fetched ahead, in reverse; True after the last ones;
    items that it has given."""

    def __getitem__(self, key: Any) -> Any:
        plain = _plain(self)
        return plain[0][key] if plain else super().__getitem__(key)

    def __len__(self) -> int:
        plain = _plain(self)
        if plain:
            return len(plain[0])
        if not self._has_length():
            # Python asks before it makes a list of an iterator, and ignores this.
            raise TypeError("an object of the program has no length")
        length = self.end[0].view("length", self)
        self._check_length()
        return length

    def _has_length(self) -> bool:
        return self.end[0].ask("has", self, "__len__") is True

    def __iter__(self) -> Iterator[Any]:
        plain = _plain(self)
        if plain:
            return iter(plain[0])
        items = self.end[0].view("iterate", self)
        if isinstance(items, Remote):
            # A new iterator each time.
            del self.end[0].views["iterate", self.end[0].number_of(self)]
            return items
        self._check_length()
        return iter(items)

    def _check_length(self) -> None:
        # A length that was never there would make loops of the test too short.
        number = self.end[0].number_of(self)
        length = self.end[0].views.get(("length", number))
        items = self.end[0].views.get(("iterate", number))
        if isinstance(items, list) and isinstance(length, int) and len(items) < length:
            raise Closed("an object of the program has fewer items than its length")

    def __next__(self) -> Any:
        items, ended, given = self.batches.get(id(self), ([], False, 0))
        if not items and not ended:
            count = 1 if given < SINGLE_ITEMS else min(given, MAX_BATCH)
            match self.end[0].ask("next", self, count):
                case (list() as items, bool() as ended):
                    items.reverse()
                case _:
                    raise Closed("the program breaks the protocol")
        self.batches[id(self)] = (items, ended, given + 1)
        if not items:
            raise StopIteration
        return items.pop()

    def __contains__(self, item: Any) -> bool:
        return any(item is other or item == other for other in self)

    def __bool__(self) -> bool:
        """Objects are true, except for those that have a length of 0."""
        plain = _plain(self)
        if plain:
            return bool(plain[0])
        return not self._has_length() or len(self) != 0

    def __str__(self) -> str:
        return self.end[0].view("text", self)

    def __repr__(self) -> str:
        return self.end[0].view("repr", self)

    def __instancecheck__(self, value: Any) -> bool:
        return self.end[0].ask("is instance", value, self) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return self.end[0].ask("is subclass", value, self) is True

    def __copy__(self) -> Any:
        return self._copied_by("copy")

    def __deepcopy__(self, memo: Any) -> Any:
        return self._copied_by("deepcopy")

    def _copied_by(self, function: str) -> Any:
        copy = self.end[0].ask("copy", self, function)
        if not isinstance(copy, Remote):
            raise Closed("a copy of the program's object is none")
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an object of the program has no pickle")

    def __hash__(self) -> int:
        plain = _plain(self)
        return hash(plain[0]) if plain else id(self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        left, right = _plain(self), _plain(other)
        if left and right:
            return left[0] == right[0]
        if left or right:
            # A builtin function or class is the one of its name.
            name = _name_of(other) if not left and callable(other) else ""
            return bool(name) and self.end[0].ask("name of", self) == name
        return self._has_same_state(other)

    def _has_same_state(self, other: Any) -> bool:
        """Return True if the program says so, and both have the same class and attributes."""
        pair = (id(self), id(other))
        if pair in _compared:
            return True
        _compared.append(pair)
        try:
            return self.end[0].ask("compare", "eq", self, other) is True and self.end[0].ask(
                "state", self
            ) == self.end[0].ask("state", other)
        finally:
            _compared.remove(pair)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return _is_ordered("lt", self, other)

    def __le__(self, other: Any) -> bool:
        return _is_ordered("le", self, other)

    def __gt__(self, other: Any) -> bool:
        return _is_ordered("gt", self, other)

    def __ge__(self, other: Any) -> bool:
        return _is_ordered("ge", self, other)


_compared: list[tuple[int, int]] = []
"""Objects whose attributes are being compared, which may lead back to them."""


def _plain(value: Any) -> Any:
    """Return (a plain copy of a value,), () if it is an object that has none."""
    if not isinstance(value, Remote):
        return (value,)
    copy = Remote.end[0].view("plain", value)
    if copy != () and (type(copy) is not tuple or type(copy[0]) not in CONTAINERS):
        raise Closed("the program breaks the protocol")
    return copy[:1]


def _is_ordered(name: str, left: Any, right: Any) -> bool:
    """Compare two values of the program by its own order, which must be one.

    An object of the program and a value of the test have none: the program would see the value.
    """
    plain_left, plain_right = _plain(left), _plain(right)
    if plain_left and plain_right:
        return getattr(_operator, name)(plain_left[0], plain_right[0])
    if plain_left or plain_right:
        raise Closed("an object of the program is no plain value")
    ask = Proxy.end[0].ask
    answer = ask("compare", name, left, right) is True
    if answer and name in ("lt", "gt") and ask("compare", name, right, left) is True:
        raise Closed("the program's objects have no order")
    return answer


def _operator_of(name: str, is_reflected: bool) -> Callable[..., Any]:
    def operate(self: Any, *others: Any) -> Any:
        operands = (*others, self) if is_reflected else (self, *others)
        if _plain(self):
            raise TypeError(f"an object of the program has no {name}")
        result = Remote.end[0].ask("operator", name, *operands)
        if any(map(_plain, others)) and _plain(result):
            # The program saw the test's value, and could answer with what is expected.
            raise Closed("an operator of the program's object gives a plain value")
        return result

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "and_", "or_", "xor"):
    setattr(Remote, f"__{_name.rstrip('_')}__", _operator_of(_name, is_reflected=False))
    setattr(Remote, f"__r{_name.rstrip('_')}__", _operator_of(_name, is_reflected=True))
Remote.__neg__ = _operator_of("neg", is_reflected=False)  # type: ignore[attr-defined]
