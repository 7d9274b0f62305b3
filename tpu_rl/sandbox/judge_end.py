"""The test's end of the channel: run the test, and give the verdict.

`child.py` loads this file's code in its confined process, after that of `channel.py`.
"""

import builtins
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tpu_rl.sandbox.channel import (
    BINARY,
    COMPARISONS,
    CONTAINERS,
    CONVERSIONS,
    ENDS,
    IN_PLACE,
    MAX_RECURSION,
    OPERATIONS,
    OPERATORS,
    TEST,
    UNARY,
    Closed,
    End,
    NotPlain,
    Proxy,
    TooLarge,
    defines,
    module_named,
    name_of,
)

SINGLE_ITEMS = 64
"""Items of an iterator of the program that are fetched one by one. Further ones are fetched in
growing batches."""
MAX_BATCH = 4096


class JudgeEnd(End):
    """The end whose process runs the test.

    The program can use only those objects of the test that the test passes to it: functions,
    iterators, and instances of the test's own classes with their public attributes.
    """

    def __init__(self, incoming: int, outgoing: int):
        """Take descriptors of the pipes."""
        operations = {name: self._guarded(name) for name in OPERATIONS} | {"set": self._set}
        super().__init__(incoming, outgoing, operations, Remote)
        self.refusals: list[str] = []
        """Objects that the test must not give to a program."""
        self.named: set[int] = set()
        """Ids of the program's objects that the test has by name."""
        self.unhandled: dict[int, BaseException] = {}
        """Exceptions of the program that no handler of the test has caught so far."""
        self.views: dict[tuple[str, str], Any] = {}
        """The latest answers about the program's objects, valid until the program runs again."""
        self.attributes: dict[int, tuple[Any, Remote, str]] = {}
        """Id of a container -> it, and the object and the attribute that it is a copy of."""
        self._program_errors: set[int] = set()
        """Ids of all exceptions of the program. They are kept in `_kept`."""
        self._kept: list[BaseException] = []
        self._has_answers = False
        """True once a call of the program has returned a value."""
        self._statements = 0
        """Calls for their effect that are under way."""
        self._shown: set[int] = set()
        """Ids of the test's objects that the program saw since the outermost of these began."""

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
        if back and not self._statements:
            self._shown.clear()
        self._statements += back
        try:
            value = super().ask(operation, *arguments, keywords=keywords, back=back)
            self._has_answers |= operation == "call" and value is not None
            if operation == "get" and type(value) in (list, dict, set):
                self.attributes[id(value)] = (value, *arguments)  # type: ignore[assignment]
            return value
        finally:
            self._statements -= back
            if operation not in READS:
                self.views.clear()

    def view(self, operation: str, remote: "Remote") -> Any:
        """Return the program's answer about an object. It stays the same until the program runs."""
        key = (operation, self.number_of(remote))
        if key not in self.views:
            answer = self.ask(operation, remote)
            self.views[key] = answer
        return self.views[key]

    def answer(self, request: Any) -> None:
        """Answer a request of the program: see `End.answer`."""
        try:
            super().answer(request)
        except SystemExit:
            raise Closed("a function that the program called ended the test") from None

    def raise_(self, error: BaseException) -> NoReturn:
        """Raise the program's exception. A handler that the test has written must catch it."""
        if isinstance(error, Exception):
            self.unhandled[id(error)] = error
            self._program_errors.add(id(error))
            self._kept.append(error)
        raise error

    def is_of_program(self, error: BaseException) -> bool:
        """Return True for an exception that came from the program."""
        return id(error) in self._program_errors

    def has_objects(self) -> bool:
        """Return True if one end has objects of the other one beside those that the test names."""
        return bool(self._own) or any(id(p) not in self.named for p in self._proxies.values())

    def raise_again(self, error: BaseException | None) -> None:
        """Record that a handler of the test passes an exception on."""
        if error is not None and self.is_of_program(error):
            self.unhandled[id(error)] = error

    def send_error(self, error: BaseException) -> None:
        """Send an exception of a function of the test to the program.

        It is the program's to handle: it need not have called the function. But it must not hide an
        assert that is false, or one that was skipped.
        """
        if isinstance(error, AssertionError) and not self.is_of_program(error):
            raise Closed(f"a function of the test found an error: {error}")
        if _skips_assert(error.__traceback__):
            raise Closed(f"{type(error).__name__} ended a function with asserts: {error}")
        self.handle(error)
        super().send_error(error)

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
            todo += [error.__cause__, error.__context__]

    def send(self, message: Any) -> None:
        """Send a value. A test that must not give it away cannot be judged.

        But where the program's answer is what gets it, a right program might have given another.
        """
        try:
            super().send(message)
        except NotPlain as error:
            is_answers = False
            if message[0] == "ask":
                _, operation, arguments, *_ = message
                is_answers = operation != "call" or id(arguments[0]) not in self.named
                # What the test gives away may come of earlier answers.
                is_answers = is_answers or self._has_answers
            if not is_answers and not isinstance(error, TooLarge):
                self.refusals.append(str(error))
            raise Closed(str(error)) from None

    def refer(self, value: Any) -> tuple[bytes, str]:
        """Return the tag and content of an object, which has a name if it is Python's own."""
        if id(value) not in self._proxy_numbers:
            self._shown.add(id(value))
        if not callable(value) or id(value) in self._proxy_numbers:
            return super().refer(value)
        if name := name_of(value):
            return b"x", name
        tag, number = super().refer(value)
        name = getattr(value, "__name__", None)
        return (tag, number) if name is None else (b"g", f"{number} {name} {value.__doc__ or ''}")

    def check_own(self, value: Any) -> None:
        """Raise NotPlain for an object that the test must not give away."""
        shared = callable(value) or defines(value, "__next__") or _is_of_test(value)
        if not shared and not isinstance(value, BaseException):
            raise NotPlain(f"an object of {type(value).__name__}")

    def _guarded(self, name: str) -> Callable[..., Any]:
        """Return an operation that is refused for objects that the test did not pass on."""
        operation = OPERATIONS[name]

        def guarded(*arguments: Any, **keywords: Any) -> Any:
            value = arguments[1 if name == "compare" else 0]
            is_own = self._own_numbers.get(id(value)) is not None
            allowed = {
                "call": callable(value),
                "next": defines(value, "__next__"),
                "iterate": defines(value, "__iter__"),
                "get": _is_of_test(value) or (_is_buffer(value) and "getbuffer" not in arguments),
            }.get(name, _is_of_test(value))
            if name == "get":
                allowed = allowed and _is_public(*arguments[1:])
            if not is_own or not allowed:
                raise TypeError(f"an object of the test does not answer {name!r}")
            return operation(*arguments, **keywords)

        return guarded

    def _set(self, value: Any, name: str, item: Any) -> None:
        # In any other call the test keeps its own values.
        changes = self._statements and id(value) in self._shown
        # A method may check what the program did.
        changes = changes and not callable(getattr(type(value), str(name), None))
        if not (changes and _is_of_test(value) and _is_public(name)):
            raise AttributeError(f"an object of the test does not change in this call: {name}")
        setattr(value, name, item)


READS = {
    *("name", "get", "has", "item", "length", "iterate", "truth", "text", "repr", "compare"),
    *("callable", "is instance", "is subclass", "plain", "state", "name of", "hash", "type"),
}
"""Requests that change nothing in the program."""


BUFFERS = {("_io", "StringIO"), ("_io", "BytesIO")}


def _is_public(name: Any) -> bool:
    return type(name) is str and not name.startswith("_")


def _is_of_test(value: Any) -> bool:
    return type(value).__module__ == TEST and not isinstance(value, type)


def _is_buffer(value: Any) -> bool:
    """Return True for a file in memory."""
    return (type(value).__module__, type(value).__name__) in BUFFERS


def judge(
    code: Any, program_names: set[str], num_asserts: int, incoming: int, outgoing: int
) -> str:
    """Run a test, and return "passed" or the reason why the program does not pass.

    A reason that begins with "refused" means that the test cannot be judged at all; with "unclear",
    that the test used more of the program than plain values, which the channel may not carry.

    Args:
        code: see `unit_tests.prepare`, as for the next two.
        program_names: names that the program defines.
        num_asserts: asserts that must be reached.
        incoming: descriptor of the pipe with the program's answers.
        outgoing: descriptor of the pipe for requests.
    """
    end = JudgeEnd(incoming, outgoing)
    ENDS.append(end)
    sys.setrecursionlimit(MAX_RECURSION)
    functions = TestFunctions(end)
    failure = ""
    word = "failed"
    try:
        exec(code, {"__name__": TEST, "__builtins__": Names(end, functions, program_names)})
    except SystemExit as error:
        failure = f"the test ended with {error.code!r:.100}" if error.code else ""
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"[:500]
        # Numbers, texts and dicts of the program's own classes come without their class.
        is_of_class = isinstance(error, AttributeError | TypeError | LookupError)
        word = "unclear" if is_of_class and not end.is_of_program(error) else word
    if end.refusals:
        return f"refused: the test gives the program {end.refusals[0]}, which is no plain value"
    word = "unclear" if end.has_objects() else word
    if Closed.reasons or failure:
        return f"{word}: {(Closed.reasons or [failure])[0]}"
    if end.unhandled:
        (error, *_) = end.unhandled.values()
        return f"{word}: the program's {type(error).__name__} ended a part of the test"
    if len(functions.reached) < num_asserts:
        return f"{word}: not all asserts were reached"
    return "passed"


class TestFunctions:
    """The functions that `unit_tests.prepare` makes a test call."""

    def __init__(self, end: JudgeEnd):
        self._end = end
        self.reached: set[int] = set()
        """Numbers of the asserts that were true so far."""

    def check(self, number: int, value: Any) -> None:
        """Judge the value of an assert. A constant has the number -1."""
        self.reached.update({number} - {-1})
        # Not an exception: the test could catch it.
        if isinstance(value, Remote) and not _plain(value):
            raise Closed(f"{_where()} is about an object of the program")
        if not value:
            raise Closed(f"{_where()} is false")

    def effect(self, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """Call a function for its effect, so that the program's changes of the arguments count.

        In any other call the test keeps its own values.
        """
        if isinstance(function, Remote):
            return self._end.ask("call", function, *arguments, keywords=keywords, back=True)
        owner = None
        if isinstance(function, BOUND_METHODS):
            owner = self._end.attributes.get(id(function.__self__))
        value = function(*arguments, **keywords)
        if owner:
            # As in `s.items.append(x)`: the container of the program changes like its copy.
            method = function.__name__
            self._end.ask("method", *owner[1:], method, *arguments, keywords=keywords)
        return value

    def caught(self) -> None:
        """Note that a handler of the test begins."""
        self._end.handle(sys.exc_info()[1])

    def raised(self, error: Any = None) -> None:
        """Note that a handler of the test passes an exception on."""
        self._end.raise_again(error or sys.exc_info()[1])

    def next(self, iterator: Any, *default: Any) -> Any:
        """Do what the builtin does. Only an iterator of the test may end because another ends."""
        try:
            return next(iterator, *default)
        except StopIteration as error:
            if sys._getframe(1).f_code.co_name != "__next__":
                self._end.unhandled[id(error)] = error
            raise

    def has_attribute(self, value: Any, name: str) -> bool:
        return self._end.ask("has", value, name) if _is_remote(value) else hasattr(value, name)

    def is_callable(self, value: Any) -> bool:
        return self._end.ask("callable", value) if _is_remote(value) else callable(value)

    def type_of(self, value: Any) -> Any:
        return self._end.ask("type", value) if _is_remote(value) else type(value)


class Names(dict[str, Any]):
    """Names that the test does not define: builtins first, then the program's."""

    def __init__(self, end: JudgeEnd, functions: TestFunctions, program_names: set[str]):
        super().__init__(vars(builtins))
        self._end = end
        self._program_names = program_names
        self |= {
            "next": functions.next,
            "callable": functions.is_callable,
            "<type>": functions.type_of,
            "<hasattr>": functions.has_attribute,
            "<check>": functions.check,
            "<effect>": functions.effect,
            "<caught>": functions.caught,
            "<raised>": functions.raised,
            "<context>": Context,
        }
        for name in program_names:
            self.pop(name, None)

    def __missing__(self, name: str) -> Any:
        if name in self._program_names:
            match self._end.ask("name", name):
                case (value,):
                    if isinstance(value, Remote):
                        self._end.named.add(id(value))
                    return value
        raise KeyError(name)


BOUND_METHODS = (type([].append), type([].__len__))
"""Types of the methods of containers, whose `__self__` is the container."""


def _where() -> str:
    """Name the assert that is judged by its line in the test."""
    return f"the assert in line {sys._getframe(2).f_lineno} of the test"


def _is_remote(value: Any) -> bool:
    return isinstance(value, Remote)


def _is_raised(traceback: Any) -> bool:
    """Return True if a `raise` of the test is where an exception began."""
    while traceback.tb_next:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    opcode = module_named("opcode").opmap["RAISE_VARARGS"]
    return code.co_filename == TEST and code.co_code[traceback.tb_lasti] == opcode


def _skips_assert(step: Any) -> bool:
    """Return True if an error that the test did not raise itself ended a function with asserts.

    Args:
        step: traceback of the error, or None.
    """
    if step is None or _is_raised(step):
        return False
    while step and not _asserts(step.tb_frame.f_code, step.tb_frame.f_globals, set()):
        step = step.tb_next
    return step is not None


def _asserts(code: Any, scope: dict[str, Any], seen: set[str]) -> bool:
    """Return True if a function of the test, or one that it names, has asserts."""
    if code.co_filename != TEST:
        return False
    names = {*code.co_names} - seen
    seen |= names
    functions = [scope[name] for name in names if type(scope.get(name)) is type(_asserts)]
    return "<check>" in names or any(_asserts(f.__code__, scope, seen) for f in functions)


class Context:
    """A context manager of the test: what it suppresses is caught."""

    def __init__(self, manager: Any, last_assert: int):
        """Take the manager, and the last line with an assert of the block, or 0."""
        self._manager = manager
        self._last_assert = last_assert

    def __enter__(self) -> Any:
        if isinstance(self._manager, Remote):
            return ENDS[0].ask("enter", self._manager)
        return type(self._manager).__enter__(self._manager)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if isinstance(self._manager, Remote):
            # What a manager of the program suppresses is not caught by the test.
            suppressed = ENDS[0].ask("exit", self._manager, error) is True
            is_cut = traceback and traceback.tb_lineno <= self._last_assert
            if suppressed and (is_cut or _skips_assert(traceback and traceback.tb_next)):
                raise Closed(f"{type(error).__name__} skipped an assert: {error}")
            return suppressed
        suppressed = bool(type(self._manager).__exit__(self._manager, kind, error, traceback))
        if suppressed:
            ENDS[0].handle(error)
        return suppressed


def _view(operation: str) -> Callable[[Any], Any]:
    """Return a method whose answer stays the same until the program runs."""
    return lambda self: ENDS[0].view(operation, self)


def _copy(operation: str) -> Callable[[Any], Any]:
    """Return a method that copies an object of the program."""

    def copy(self: Any) -> Any:
        result = ENDS[0].ask(operation, self)
        if not isinstance(result, Remote):
            raise Closed("a copy of the program's object is none")
        return result

    return copy


def _order(name: str) -> Callable[[Any, Any], bool]:
    """Return a comparison of two values of the program by its own order, which must be one.

    An object of the program and a value of the test have none: the program would see the value.
    """

    def compare(self: Any, other: Any) -> bool:
        left, right = _plain(self), _plain(other)
        if left and right:
            return COMPARISONS[name](left[0], right[0])
        if left or right:
            raise Closed("an object of the program is no plain value")
        answer = ENDS[0].ask("compare", name, self, other) is True
        if answer and name in ("lt", "gt") and ENDS[0].ask("compare", name, other, self) is True:
            raise Closed("the program's objects have no order")
        return answer

    return compare


def _operator_of(name: str, is_reflected: bool) -> Callable[..., Any]:
    """Return an operator, which works on plain copies or on objects of the program alone."""

    def operate(self: Any, *others: Any) -> Any:
        operands = (*others, self) if is_reflected else (self, *others)
        plain = [_plain(operand) for operand in operands]
        if all(plain):
            return OPERATORS[name](*(copy for (copy,) in plain))
        if _plain(self):
            raise TypeError(f"an object of the program has no {name}")
        result = ENDS[0].ask("operator", name, *operands)
        is_mixed = any(map(_plain, others)) or any(id(operand) in _mixed for operand in operands)
        if is_mixed and isinstance(result, Remote):
            _mixed.add(id(result))
        if is_mixed and _plain(result):
            # The program saw the test's value, and could answer with what is expected.
            raise Closed("an operator of the program's object gives a plain value")
        return result

    return operate


class Remote(Proxy):
    """An object of the program, held by the test.

    Containers are read as a plain copy. Other objects are equal to nothing but objects of the
    program: its methods would decide.
    """

    __slots__ = ()

    __str__ = _view("text")
    __repr__ = _view("repr")
    __copy__ = _copy("copy")
    __lt__ = _order("lt")
    __le__ = _order("le")
    __gt__ = _order("gt")
    __ge__ = _order("ge")

    def __getattr__(self, name: str) -> Any:
        plain = _plain(self) if name in PLAIN_METHODS else ()
        if plain and defines(plain[0], name):
            return getattr(plain[0], name)
        return super().__getattr__(name)

    def __deepcopy__(self, memo: Any) -> Any:
        return _copy("deep copy")(self)

    def __getitem__(self, key: Any) -> Any:
        plain = _plain(self)
        if plain:
            try:
                return plain[0][key]
            except LookupError:
                # Its class may know more keys.
                pass
        return super().__getitem__(key)

    def __len__(self) -> int:
        plain = _plain(self)
        if plain:
            return len(plain[0])
        if not _has_length(self):
            # Python asks before it makes a list of an iterator, and ignores this.
            raise TypeError("an object of the program has no length")
        length = ENDS[0].view("length", self)
        _check_length(self)
        return length

    def __iter__(self) -> Iterator[Any]:
        plain = _plain(self)
        if plain:
            return iter(plain[0])
        items = ENDS[0].view("iterate", self)
        if isinstance(items, Remote):
            # A new iterator each time.
            del ENDS[0].views["iterate", ENDS[0].number_of(self)]
            if _has_length(self):
                raise Closed("the program breaks the protocol")
            return items
        ENDS[0].view("length", self)
        _check_length(self)
        return iter(items)

    def __next__(self) -> Any:
        items, ended, given = _batches.get(id(self), ([], False, 0))
        if not items and not ended:
            count = 1 if given < SINGLE_ITEMS else min(given, MAX_BATCH)
            match ENDS[0].ask("next", self, count):
                case (list() as items, bool() as ended):
                    items.reverse()
                case _:
                    raise Closed("the program breaks the protocol")
        _batches[id(self)] = (items, ended, given + 1)
        if not items:
            raise StopIteration
        return items.pop()

    def __contains__(self, item: Any) -> bool:
        return any(item is other or item == other for other in self)

    def __bool__(self) -> bool:
        """Objects are true, except for those that have a length of 0."""
        if id(self) in _mixed:
            # The program saw a value of the test, and decides.
            raise Closed("the truth of an operator's result is the program's")
        plain = _plain(self)
        if plain:
            return bool(plain[0])
        return not _has_length(self) or len(self) != 0

    def __instancecheck__(self, value: Any) -> bool:
        return ENDS[0].ask("is instance", value, self) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return ENDS[0].ask("is subclass", value, self) is True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an object of the program has no pickle")

    def __hash__(self) -> int:
        plain = _plain(self)
        return hash(plain[0]) if plain else ENDS[0].view("hash", self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        left, right = _plain(self), _plain(other)
        if left and right:
            return left[0] == right[0]
        if left or right:
            # A builtin function or class is the one of its name.
            name = name_of(other) if not left and callable(other) else ""
            return bool(name) and ENDS[0].ask("name of", self) == name
        return _have_same_state(self, other)


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    """Return an operator that changes an object of the program; a plain copy has none."""
    operate = _operator_of(name, is_reflected=False)
    return lambda self, other: NotImplemented if _plain(self) else operate(self, other)


def _conversion(name: str) -> Callable[[Any], Any]:
    """Return a method that makes a number of an object of the program."""

    def convert(self: Any) -> Any:
        result = ENDS[0].ask("operator", name, self)
        if id(self) in _mixed or type(result) is not CONVERSIONS[name][1]:
            raise Closed(f"{name}() of the program's object is no number of its own")
        return result

    return convert


for _name in (*BINARY, *UNARY):
    setattr(Remote, f"__{_name}__", _operator_of(_name, is_reflected=False))
for _name in BINARY:
    setattr(Remote, f"__r{_name}__", _operator_of(_name, is_reflected=True))
for _name in IN_PLACE:
    setattr(Remote, f"__{_name}__", _in_place(_name))
for _name in CONVERSIONS:
    setattr(Remote, f"__{_name}__", _conversion(_name))
_mixed: set[int] = set()
"""Ids of objects that operators of the program made of values of the test."""
Remote.__doc__ = property(lambda self: ENDS[0].ask("get", self, "__doc__"))  # type: ignore

_batches: dict[int, tuple[list[Any], bool, int]] = {}
"""Id of an iterator -> items that were fetched ahead, in reverse; True after the last ones; items
that it has given."""
_compared: list[tuple[int, int]] = []
"""Objects whose attributes are being compared, which may lead back to them."""
PLAIN_METHODS = {"keys", "values", "items"}
PLAIN_METHODS |= {"count", "index", "issubset", "issuperset", "isdisjoint"}
"""Methods of containers that are read from their plain copy."""


def _plain(value: Any) -> Any:
    """Return (a plain copy of a value,), () if it is an object that has none."""
    if not isinstance(value, Remote):
        return (value,)
    copy = ENDS[0].view("plain", value)
    if copy != () and (type(copy) is not tuple or type(copy[0]) not in CONTAINERS):
        raise Closed("the program breaks the protocol")
    return copy[:1]


def _has_length(remote: Remote) -> bool:
    return ENDS[0].ask("has", remote, "__len__") is True


def _check_length(remote: Remote) -> None:
    """Raise Closed if an object has fewer items than its length.

    Loops of the test over such an object would be too short.
    """
    number = ENDS[0].number_of(remote)
    length = ENDS[0].views.get(("length", number))
    items = ENDS[0].views.get(("iterate", number))
    if isinstance(items, list) and isinstance(length, int) and len(items) < length:
        raise Closed("an object of the program has fewer items than its length")


def _have_same_state(left: Remote, right: Any) -> bool:
    """Return True if the program says so, and both have the same class and attributes."""
    pair = (id(left), id(right))
    if pair in _compared:
        return True
    ask = ENDS[0].ask
    _compared.append(pair)
    try:
        is_equal = ask("compare", "eq", left, right) is True
        return is_equal and ask("state", left) == ask("state", right)
    finally:
        _compared.remove(pair)
