"""Both ends of the channel between a test and the program that it judges.

The test runs in one process (`judge`) and the program in another (`serve`). Between them go plain
values, encoded here, and nothing else: numbers, texts, containers of them. Objects of the program
stay in its process; the test holds a `Remote` for each. So nothing that the program defines, not
even an `__eq__`, takes part in a comparison.

`child.py` loads this file's code in its confined process. It uses the standard library only.
"""

import builtins
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

MAX_BYTES = 4 << 20
"""Bytes of one message. A longer one is no answer."""
BUILTINS = {id(value): name for name, value in vars(builtins).items() if callable(value)}
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
}
"""Containers and numbers of modules, which are imported only where they are used."""
END = b"."


class NotPlain(Exception):
    """A value that cannot go through the channel."""


class Closed(BaseException):
    """The end of a conversation: the test failed, or the other end is gone or breaks the protocol.

    A test that catches it has failed all the same.
    """

    reasons: ClassVar[list[str]] = []

    def __init__(self, reason: str):
        """Record the reason."""
        super().__init__(reason)
        self.reasons.append(reason)


# --- values as bytes ---


class Writer:
    """Encodes one message."""

    def __init__(self, refer: Callable[[Any], tuple[bytes, int]]):
        """`refer` returns the tag and the number of an object that is no plain value."""
        self.parts: list[bytes] = []
        self._size = 0
        self._refer = refer

    def _put(self, tag: bytes, content: bytes = b"") -> None:
        self._size += 5 + len(content)
        if self._size > MAX_BYTES:
            raise NotPlain(f"a value of more than {MAX_BYTES} bytes")
        self.parts.append(tag + len(content).to_bytes(4, "big") + content)

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
            tag, items = tag_and_items
            return self._put_items(tag, items(value))
        if kind is range:
            return self._put_items(b"r", (value.start, value.stop, value.step))
        if isinstance(value, Remote):
            return self._put(b"R", str(_numbers[id(value)]).encode())
        # Iterators of the language and its library, but not of classes with other methods.
        if hasattr(kind, "__next__") and kind.__module__ != "__main__":
            return self._put_items(b"n", value)
        if id(value) in BUILTINS:
            return self._put(b"x", BUILTINS[id(value)].encode())
        tag, number = self._refer(value)
        return self._put(tag, str(number).encode())


class Reader:
    """Decodes one message. It builds plain values only, whatever the bytes are."""

    def __init__(self, data: bytes, resolve: Callable[[bytes, int], Any]):
        """`resolve` returns the object of a tag and a number of `Writer`'s `refer`."""
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
        return self._resolve(tag, int(content))

    def _take(self) -> tuple[bytes, bytes]:
        start = self._position + 5
        if start > len(self._data):
            raise ValueError("the message ends too soon")
        tag = self._data[self._position : self._position + 1]
        self._position = start + int.from_bytes(self._data[start - 4 : start], "big")
        return tag, self._data[start : self._position]


def _module(name: str) -> Any:
    return __import__(name)


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


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
    b"x": lambda content: vars(builtins)[content.decode()],
}
MAKERS: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": list,
    b"t": tuple,
    b"s": set,
    b"z": frozenset,
    b"n": iter,
    b"d": _pairs,
    b"r": lambda items: range(*items),
    b"K": lambda items: dict.fromkeys(items).keys(),
    b"V": lambda items: dict(enumerate(items)).values(),
    b"I": lambda items: _pairs(items).items(),
    b"q": lambda items: _module("collections").deque(items),
    b"C": lambda items: _module("collections").Counter(_pairs(items)),
    b"O": lambda items: _module("collections").OrderedDict(_pairs(items)),
    b"F": lambda items: _module("fractions").Fraction(*items),
    b"D": lambda items: _module("decimal").Decimal(*items),
}


class Channel:
    """Messages over two pipes."""

    def __init__(
        self,
        incoming: int,
        outgoing: int,
        refer: Callable[[Any], tuple[bytes, int]],
        resolve: Callable[[bytes, int], Any],
    ):
        """Take descriptors of the pipes; `refer` and `resolve` are those of Writer and Reader."""
        self._incoming = incoming
        self._outgoing = outgoing
        self._refer = refer
        self._resolve = resolve

    def send(self, message: Any) -> None:
        """Send a value.

        Raises:
            NotPlain: before anything is sent.
            Closed: if nobody reads.
        """
        writer = Writer(self._refer)
        try:
            writer.value(message)
        except RecursionError:
            raise NotPlain("a value that contains itself") from None
        data = b"".join(writer.parts)
        rest = memoryview(len(data).to_bytes(8, "big") + data)
        try:
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
            return Reader(self._read(size), self._resolve).value()
        except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            raise Closed(f"not a value: {error}") from None

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = os.read(self._incoming, min(size - len(data), 1 << 16))
            if not part:
                raise Closed("the program ended")
            data += part
        return bytes(data)


# --- the program's end ---


def serve(program: str, incoming: int, outgoing: int) -> None:
    """Run the program as __main__, then answer what the test asks.

    A request is (operation, arguments, keyword arguments, whether to return changed arguments). The
    answer is ("value", value, arguments) or ("error", names of its classes, message).
    """
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    try:  # noqa: SIM105  # contextlib takes milliseconds to import
        exec(compile(program, "program.py", "exec"), scope)
    except SystemExit:
        pass
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def refer(value: Any) -> tuple[bytes, int]:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return b"R", numbers[id(value)]

    def resolve(tag: bytes, number: int) -> Any:
        return objects[number] if tag == b"R" else callback(number)

    def callback(number: int) -> Callable[..., Any]:
        def ask(*arguments: Any, **keywords: Any) -> Any:
            channel.send(("callback", number, arguments, keywords))
            kind, value = channel.receive()
            if kind == "error":
                raise _error(*value)
            return value

        return ask

    def call(function: Any, *arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    def set_item(value: Any, key: Any, item: Any) -> None:
        value[key] = item

    def delete_item(value: Any, key: Any) -> None:
        del value[key]

    operations: dict[str, Callable[..., Any]] = {
        "name": scope.__getitem__,
        "call": call,
        "get": getattr,
        "set": setattr,
        "item": lambda value, key: value[key],
        "set item": set_item,
        "delete item": delete_item,
        "length": len,
        "iterate": iter,
        "text": str,
        "repr": repr,
        "is instance": isinstance,
        "plain": _as_plain,
    }
    channel = Channel(incoming, outgoing, refer, resolve)
    while True:
        try:
            operation, arguments, keywords, returns_arguments = channel.receive()
        except Closed:
            sys.stdout.flush()
            return
        try:
            value = operations[operation](*arguments, **keywords)
            if operation == "iterate":
                value = list(value)
            channel.send(("value", value, arguments if returns_arguments else ()))
        except Closed:
            return
        except BaseException as error:
            names = [base.__name__ for base in type(error).__mro__]
            channel.send(("error", names, str(error)[:2000]))


def _as_plain(value: Any) -> Any:
    """Return the container that an object of a subclass of it is equal to."""
    for base, (_, items) in CONTAINERS.items():
        if isinstance(value, base):
            values = list(items(value))
            return _pairs(values) if base is dict else base(values)
    raise TypeError(f"{type(value).__name__} is no plain value")


# --- the test's end ---


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
    functions: list[Any] = []
    reached: set[int] = set()

    def refer(value: Any) -> tuple[bytes, int]:
        if not callable(value):
            raise NotPlain(f"an object of {type(value).__name__}")
        functions.append(value)
        return b"G", len(functions) - 1

    def resolve(tag: bytes, number: int) -> Any:
        if tag != b"R":
            raise ValueError(f"tag {tag!r}")
        remote = object.__new__(Remote)
        _numbers[id(remote)] = number
        _kept.append(remote)
        return remote

    channel = Channel(incoming, outgoing, refer, resolve)
    refusals: list[str] = []

    def send(message: Any) -> None:
        try:
            channel.send(message)
        except NotPlain as error:
            refusals.append(str(error))
            raise

    def ask(
        operation: str, *arguments: Any, keywords: dict[str, Any] | None = None, back: bool = False
    ) -> Any:
        send((operation, arguments, keywords or {}, back))
        while True:
            match channel.receive():
                case ("value", value, tuple() as after):
                    for old, new in zip(arguments, after, strict=False):
                        _replace(old, new)
                    return value
                case ("error", list() as names, str() as message):
                    raise _error(names, message)
                case ("callback", int() as number, tuple() as given, dict() as named) if (
                    0 <= number < len(functions)
                ):
                    try:
                        answer = ("value", functions[number](*given, **named))
                    except Exception as error:
                        names = [base.__name__ for base in type(error).__mro__]
                        answer = ("error", (names, str(error)[:2000]))
                    send(answer)
                case _:
                    raise Closed("the program breaks the protocol")

    def check(number: int, value: Any) -> None:
        # Constants have the number -1.
        reached.update({number} - {-1})
        if not value:
            # Not an exception: the test could catch it.
            raise Closed("an assert is false")

    def discard(function: Any, *arguments: Any, **keywords: Any) -> None:
        # A call as a statement is made for its effect, so the program's changes of the arguments
        # count. In any other call the test keeps its own values.
        if isinstance(function, Remote):
            ask("call", function, *arguments, keywords=keywords, back=True)
        else:
            function(*arguments, **keywords)

    class Names(dict[str, Any]):
        """Names that the test does not define: builtins first, then the program's."""

        def __missing__(self, name: str) -> Any:
            if name in program_names:
                return ask("name", name)
            raise KeyError(name)

    _connection.append(ask)
    names = Names(vars(builtins))
    names |= {"<check>": check, "<discard>": discard}
    failure = ""
    try:
        exec(code, {"__name__": "test", "__builtins__": names})
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"[:500]
    if refusals:
        return f"refused: the test gives the program {refusals[0]}, which is no plain value"
    if Closed.reasons or failure:
        return f"failed: {(Closed.reasons or [failure])[0]}"
    if len(reached) < num_asserts or not num_asserts:
        return "failed: not all asserts were reached"
    return "passed"


_connection: list[Any] = []
"""`ask` of the judge."""
_numbers: dict[int, int] = {}
"""Id of a Remote -> number of its object in the program's process."""
_kept: list[Any] = []
"""All Remotes, so that no id is used twice."""


def _replace(old: Any, new: Any) -> None:
    """Give a container of the test the content that the program gave its copy."""
    if type(old) is type(new) is list:
        old[:] = new
    elif type(old) is type(new) and isinstance(old, dict | set):
        old.clear()
        old.update(new)


def _error(names: Any, message: str) -> BaseException:
    """Return an exception of the first class that is built in."""
    for name in names:
        kind = vars(builtins).get(name) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(message)
            except TypeError:
                # Some need more arguments than a message.
                continue
    return Closed(f"the program ended with {message}")


class Remote:
    """An object of the program, held by the test.

    Containers are compared by a plain copy. Other objects are equal to nothing and true for nobody:
    the program's own methods would decide.
    """

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _connection[0]("call", self, *arguments, keywords=keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _connection[0]("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _connection[0]("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        plain = _plain_or_none(self)
        return _connection[0]("item", self, key) if plain is None else plain[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        _connection[0]("set item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        _connection[0]("delete item", self, key)

    def __len__(self) -> int:
        plain = _plain_or_none(self)
        return _connection[0]("length", self) if plain is None else len(plain)

    def __iter__(self) -> Any:
        plain = _plain_or_none(self)
        return iter(_connection[0]("iterate", self) if plain is None else plain)

    def __contains__(self, item: Any) -> bool:
        return item in _plain(self)

    def __bool__(self) -> bool:
        return bool(_plain(self))

    def __str__(self) -> str:
        return _connection[0]("text", self)

    def __repr__(self) -> str:
        return _connection[0]("repr", self)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and _connection[0]("is instance", value, self)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return _plain(self) == _plain(other)

    def __ne__(self, other: object) -> bool:
        return _plain(self) != _plain(other)

    def __lt__(self, other: Any) -> bool:
        return _plain(self) < _plain(other)

    def __le__(self, other: Any) -> bool:
        return _plain(self) <= _plain(other)

    def __gt__(self, other: Any) -> bool:
        return _plain(self) > _plain(other)

    def __ge__(self, other: Any) -> bool:
        return _plain(self) >= _plain(other)


def _plain_or_none(value: Any) -> Any:
    """Return a plain copy of the program's object, None if there is none."""
    if not isinstance(value, Remote):
        return value
    try:
        copy = _connection[0]("plain", value)
    except TypeError:
        return None
    return None if isinstance(copy, Remote) else copy


def _plain(value: Any) -> Any:
    copy = _plain_or_none(value)
    if copy is None and value is not None:
        raise Closed("an object of the program is no plain value")
    return copy
