"""Values of our own classes as JSON, and exactly back: in checkpoints, and between processes.

Dataclasses and named tuples become objects with the name of their class, arrays their type, shape
and bytes, and futures their results. Functions are left out, and have their defaults again. Only
classes that the reader names are ever made of what it reads.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from tpu_rl.errors import InputError
from tpu_rl.plain_values import fields_of
from tpu_rl.runtime import processes

T = TypeVar("T")

KIND = ""
"""Key of the name of an object's class. No field is called so."""


def to_json(value: Any) -> Any:
    """Return a value as JSON values. Waits for the results of futures."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [to_json(item) for item in value]
        case bytes():
            return {KIND: "bytes", "content": base64.b64encode(value).decode()}
        case Future():
            return {KIND: "future", "result": to_json(value.result())}
        case Mapping() if KIND in value or not all(isinstance(key, str) for key in value):
            return {KIND: "dict", "items": [[key, to_json(item)] for key, item in value.items()]}
        case Mapping():
            return {key: to_json(item) for key, item in value.items()}
        case tuple() if type(value) is tuple:
            return {KIND: "tuple", "items": [to_json(item) for item in value]}
        case tuple():
            named: Any = value
            fields = named._asdict()
        case _ if dataclasses.is_dataclass(value):
            fields = fields_of(value)
        case _:
            return _array_to_json(np.asarray(value))
    kept = {name: to_json(part) for name, part in fields.items() if not callable(part)}
    return {KIND: type(value).__name__} | kept


def from_json(value: Any, *classes: type) -> Any:
    """Return the value that `to_json` was given, whose objects are of these classes."""
    if isinstance(value, list):
        return [from_json(item, *classes) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: from_json(item, *classes) for key, item in value.items() if key != KIND}
    match value.get(KIND):
        case None:
            return fields
        case "bytes":
            return base64.b64decode(fields["content"])
        case "future":
            return finished(fields["result"])
        case "dict":
            return dict(fields["items"])
        case "tuple":
            return tuple(fields["items"])
        case "array":
            return _array_from_json(fields)
        case kind:
            return {made.__name__: made for made in classes}[kind](**fields)


def finished(result: T) -> Future[T]:
    """Return a future with this result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def gather(value: T, *classes: type) -> list[T]:
    """Return the values of all processes, as `processes.gather` does, of these classes."""
    if processes.count() == 1:
        return [value]
    return from_json(processes.gather(to_json(value)), *classes)


def merge(values: Mapping[int, Any], *classes: type) -> dict[int, Any]:
    """Return the values of all processes, by their numbers, which differ; see `gather`."""
    gathered = gather(dict(values), *classes)
    return {number: value for of_process in gathered for number, value in of_process.items()}


def of_checkpoint(values: list[Any], kind: type[T], *classes: type) -> list[T]:
    """Return the values of a class, and of others in them, that a checkpoint holds.

    Raises InputError if an earlier version wrote it, in another form.
    """
    found = []
    with contextlib.suppress(KeyError, TypeError):
        found = from_json(values, kind, *classes)
    if len(found) < len(values) or not all(isinstance(value, kind) for value in found):
        raise InputError(
            "the checkpoint has completions in the form of another version of tpu_rl",
            why="they were sampled for steps that had not begun",
            fix="end the run with the version that began it",
        )
    return found


def _array_to_json(array: np.ndarray) -> dict[str, Any]:
    """Return an array's type, its shape, and its bytes: compressed, in base 64.

    Most of a rollout is padding, and prompts that are repeated.
    """
    if array.dtype.hasobject:
        raise TypeError(f"JSON has no form of {array!r}")
    content = base64.b64encode(zlib.compress(array.tobytes(), level=1)).decode()
    return {KIND: "array", "dtype": array.dtype.str, "shape": [*array.shape], "content": content}


def _array_from_json(fields: dict[str, Any]) -> np.ndarray:
    content = zlib.decompress(base64.b64decode(fields["content"]))
    array = np.frombuffer(content, np.dtype(fields["dtype"])).reshape(fields["shape"])
    return array.copy()  # Those of a buffer are read-only.
