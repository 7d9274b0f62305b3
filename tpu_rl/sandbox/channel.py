"""The channel between a test and the program that it judges.

The test runs in one process (`judge_end.py`) and the program in another (`program_end.py`). Between
them go plain values, encoded here, and nothing else: numbers, texts, containers of them. Everything
else stays in its process, and the other one holds a `Proxy` that asks for each operation. So
nothing that the program defines, not even an `__eq__`, runs in the judge, and no callable of the
program is called there: a proxy stands for it, a builtin function too.

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
from typing import Any, ClassVar, NamedTuple, NoReturn

MAX_BYTES = 32 << 20
"""Bytes of one message. A longer one is no answer."""
MAX_RECURSION = 4000
"""Recursion limit of both ends: a call across the channel takes several frames of each."""
TEST = "test"
"""Name of the test's module."""
SCALARS: tuple[tuple[type, bytes, Callable[[Any], str]], ...] = (
    (int, b"i", lambda value: format(int(value), "x")),
    (float, b"f", float.__repr__),
    (complex, b"c", complex.__repr__),
)


class Codec(NamedTuple):
    """How values of a class are written as items, and made of them again."""

    tag: bytes
    items: Callable[[Any], Iterable[Any]]
    make: Callable[[Any, list[Any]], Any] = lambda kind, items: kind(items)
    """(the class, items) -> value."""


def module_named(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def pairs_of(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _keys_and_values(value: Any) -> Iterable[Any]:
    return (part for item in dict.items(value) for part in item)


def _bounds(value: Any) -> Iterable[Any]:
    return value.start, value.stop, value.step


def _iso_text(value: Any) -> Iterable[Any]:
    return (value.isoformat(),)


def _make_of_pairs(kind: Any, items: list[Any]) -> Any:
    return kind(pairs_of(items))


def _make_of_arguments(kind: Any, items: list[Any]) -> Any:
    return kind(*items)


def _make_of_iso_text(kind: Any, items: list[Any]) -> Any:
    return kind.fromisoformat(*items)


KEYS = Codec(b"K", iter, lambda _, items: dict.fromkeys(items).keys())
VALUES = Codec(b"V", iter, lambda _, items: dict(enumerate(items)).values())
PAIRS = Codec(
    b"I",
    lambda value: (part for item in value for part in item),
    lambda _, items: pairs_of(items).items(),
)
MAPPING = Codec(b"d", _keys_and_values, lambda _, items: pairs_of(items))
CONTAINERS: dict[type, Codec] = {
    list: Codec(b"l", list.__iter__),
    tuple: Codec(b"t", tuple.__iter__),
    set: Codec(b"s", set.__iter__),
    frozenset: Codec(b"z", frozenset.__iter__),
    dict: MAPPING,
    type({}.keys()): KEYS,
    type({}.values()): VALUES,
    type({}.items()): PAIRS,
}
NAMED: dict[tuple[str, str], Codec] = {
    ("builtins", "range"): Codec(b"r", _bounds, _make_of_arguments),
    ("builtins", "slice"): Codec(b"S", _bounds, _make_of_arguments),
    ("builtins", "odict_keys"): KEYS,
    ("builtins", "odict_values"): VALUES,
    ("builtins", "odict_items"): PAIRS,
    ("collections", "defaultdict"): MAPPING,
    ("collections", "deque"): Codec(
        b"q", lambda value: (list(value), value.maxlen), _make_of_arguments
    ),
    ("collections", "Counter"): Codec(b"C", _keys_and_values, _make_of_pairs),
    ("collections", "OrderedDict"): Codec(b"O", _keys_and_values, _make_of_pairs),
    ("fractions", "Fraction"): Codec(
        b"F",
        lambda value: (value.numerator, value.denominator),
        lambda kind, items: kind(*map(int, items)),
    ),
    ("decimal", "Decimal"): Codec(b"D", lambda value: (str(value),), _make_of_arguments),
    ("datetime", "timedelta"): Codec(
        b"p", lambda value: (value.days, value.seconds, value.microseconds), _make_of_arguments
    ),
    ("datetime", "date"): Codec(b"a", _iso_text, _make_of_iso_text),
    ("datetime", "time"): Codec(b"h", _iso_text, _make_of_iso_text),
    ("datetime", "datetime"): Codec(b"w", _iso_text, _make_of_iso_text),
}
"""Classes by module and name: the modules are imported only where they are used."""
CLASSES: dict[bytes, tuple[tuple[str, str], Codec]] = {
    codec.tag: (name, codec)
    for name, codec in (
        *NAMED.items(),
        *(((kind.__module__, kind.__name__), codec) for kind, codec in CONTAINERS.items()),
    )
}
"""Tag -> (module, class) and codec. The class itself, of a dict's views, is not needed."""
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
        codec = CONTAINERS.get(kind) or NAMED.get((kind.__module__, kind.__name__))
        if codec:
            if id(value) in self._open:
                raise NotPlain("a value that contains itself")
            self._open.add(id(value))
            self._put_items(codec.tag, codec.items(value))
            return self._open.remove(id(value))
        if value is Ellipsis:
            return self._put(b"E")
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
        """Return the next value. Raises ValueError if there is none."""
        tag, content = self._take()
        if tag in SIMPLE:
            return SIMPLE[tag](content)
        if tag not in CLASSES and tag != b"e":
            return self._resolve(tag, content.decode())
        items: list[Any] = []
        while self._data[self._position : self._position + 1] != END:
            items.append(self.value())
        self._take()
        if tag == b"e":
            return _exception(items)
        (module, name), codec = CLASSES[tag]
        return codec.make(vars(module_named(module)).get(name), items)

    def _take(self) -> tuple[bytes, bytes]:
        start = self._position + 5
        if start > len(self._data):
            raise ValueError("the message ends too soon")
        tag = self._data[self._position : self._position + 1]
        self._position = start + int.from_bytes(self._data[start - 4 : start], "big")
        return tag, self._data[start : self._position]


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
                if isinstance(origin, Proxy) and name != names[0]:
                    kind = type(names[0], (kind,), {"__getattr__": _attribute_of_origin})
                error = kind(*arguments)
            except (TypeError, ValueError):
                # Some need arguments of their own.
                continue
            if isinstance(origin, Proxy):
                vars(error)["_origin"] = origin
            return error
    return Closed(f"the program ended with {names!r:.100}: {arguments!r:.300}")


def _attribute_of_origin(error: Any, name: str) -> Any:
    if name.startswith("__") or "_origin" not in vars(error):
        raise AttributeError(name)
    return getattr(vars(error)["_origin"], name)


SIMPLE: dict[bytes, Callable[[bytes], Any]] = {
    b"N": lambda _: None,
    b"1": lambda _: True,
    b"0": lambda _: False,
    b"E": lambda _: Ellipsis,
    b"u": lambda content: content.decode("utf-8", "surrogatepass"),
    b"b": lambda content: content,
    b"B": bytearray,
    b"i": lambda content: int(content, 16),
    b"f": float,
    b"c": lambda content: complex(content.decode()),
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
        number, _, function = content.partition(" ")
        if tag == b"y":
            return self._own[int(number)]
        if tag not in (b"m", b"g"):
            raise ValueError(f"tag {tag!r}")
        number = str(int(number))
        if number not in self._proxies:
            proxy = self.make_proxy(function if tag == b"g" else None)
            self._proxies[number] = proxy
            self._proxy_numbers[id(proxy)] = number
        return self._proxies[number]

    def make_proxy(self, function: str | None) -> Any:
        """Return a new proxy. Of a function the name and the docstring are known."""
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

ENDS: list[Any] = []
"""The end of this process."""


def _request(operation: str, *first: Any) -> Callable[..., Any]:
    """Return a method that asks the other end for an operation of the object."""

    def method(self: Any, *arguments: Any) -> Any:
        return ENDS[0].ask(operation, *first, self, *arguments)

    return method


class Proxy:
    """An object of the other end. Each operation asks for it there."""

    __slots__ = ()

    __setattr__ = _request("set")
    __delattr__ = _request("delete")
    __getitem__ = _request("item")
    __setitem__ = _request("set item")
    __delitem__ = _request("delete item")
    __len__ = _request("length")
    __contains__ = _request("contains")
    __bool__ = _request("truth")
    __str__ = _request("text")
    __repr__ = _request("repr")
    __lt__ = _request("compare", "lt")
    __le__ = _request("compare", "le")
    __gt__ = _request("compare", "gt")
    __ge__ = _request("compare", "ge")

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        return ENDS[0].ask("call", self, *arguments, keywords=keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in VISIBLE:
            raise AttributeError(name)
        return ENDS[0].ask("get", self, name)

    def __iter__(self) -> Iterator[Any]:
        items = ENDS[0].ask("iterate", self)
        return items if isinstance(items, Proxy) else iter(items)

    def __next__(self) -> Any:
        items, _ = ENDS[0].ask("next", self, 1)
        if not items:
            raise StopIteration
        return items[0]

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other or ENDS[0].ask("compare", "eq", self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def defines(value: Any, method: str) -> bool:
    """Return True if the class of a value, or a base of it, defines a method."""
    return any(method in vars(base) for base in type(value).__mro__)


def _call(function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


def _compare(name: str, left: Any, right: Any) -> bool:
    return bool(COMPARISONS[name](left, right))


def _iterate(value: Any) -> Any:
    """Return the items of an object that has a length, and an iterator of any other."""
    return list(value) if defines(value, "__len__") else iter(value)


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


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": _operator.eq,
    "lt": _operator.lt,
    "le": _operator.le,
    "gt": _operator.gt,
    "ge": _operator.ge,
}
BINARY: dict[str, Callable[..., Any]] = {
    **{
        name: vars(_operator)[name]
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "xor", "pow")
    },
    "and": _operator.and_,
    "or": _operator.or_,
    "lshift": _operator.lshift,
    "rshift": _operator.rshift,
    "divmod": divmod,
}
"""Operators of two operands, by the names of their methods."""
IN_PLACE = {f"i{name}": vars(_operator)[f"i{name}"] for name in BINARY if name != "divmod"}
UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": _operator.neg,
    "pos": _operator.pos,
    "invert": _operator.invert,
    "abs": abs,
}
CONVERSIONS: dict[str, tuple[Callable[[Any], Any], type]] = {
    "int": (int, int),
    "float": (float, float),
    "complex": (complex, complex),
    "index": (_operator.index, int),
    "round": (round, int),
    "trunc": (lambda value: module_named("math").trunc(value), int),
    "floor": (lambda value: module_named("math").floor(value), int),
    "ceil": (lambda value: module_named("math").ceil(value), int),
}
"""Name of a method -> what calls it, and the type of its result."""
OPERATORS = BINARY | IN_PLACE | UNARY | {name: call for name, (call, _) in CONVERSIONS.items()}
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
"""Requests about objects that both ends answer."""


def name_of(value: Any) -> str:
    """Return the name by which the other end finds a function or class of Python's own, or ""."""
    owner = getattr(value, "__objclass__", value)
    module = sys.modules.get(str(getattr(owner, "__module__", "")))
    path = str(getattr(value, "__qualname__", ""))
    if not callable(value) or module is None or module.__name__ in ("", "__main__", TEST):
        return ""
    try:
        if _operator.attrgetter(path)(module) is not value:
            return ""
    except AttributeError:
        return ""
    return f"{module.__name__}:{path}"
