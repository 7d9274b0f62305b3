"""Values of our classes as JSON, and exactly back."""

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import pytest

from tpu_rl.errors import InputError
from tpu_rl.runtime import typed_json


class Pair(NamedTuple):
    key: np.ndarray
    answer: Future[str]


@dataclasses.dataclass
class Whole:
    pairs: list[Pair]
    values: Any
    end: Callable[[], int] = lambda: 7


def through_text(value: Any, *classes: type) -> Any:
    return typed_json.from_json(json.loads(json.dumps(typed_json.to_json(value))), *classes)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, 0.1, float("inf"), "text", ""],
        (1, ("a", b"\x00\xff"), []),
        {"a": {"b": (1,)}},
        {1: "one", 2: "two"},
        {"": "the key of classes"},
    ],
)
def test_plain_values_come_back_as_they_were(value):
    assert through_text(value) == value


@pytest.mark.parametrize("dtype", ["float32", "uint32", "bool", "int64"])
def test_arrays_come_back_bit_by_bit(dtype):
    array = np.array([[0.1, -3.0, 2.5]]).astype(dtype)
    found = through_text({"a": array})["a"]
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    found += found  # It can be written to.


def test_objects_have_their_classes_and_functions_their_defaults():
    value = Whole([Pair(np.arange(2), typed_json.finished("yes"))], {"x": 1}, end=lambda: 8)
    found = through_text(value, Whole, Pair)
    assert isinstance(found, Whole)
    assert isinstance(found.pairs[0], Pair)
    assert found.pairs[0].answer.result() == "yes"
    assert found.pairs[0].key.tolist() == [0, 1]
    assert (found.values, found.end()) == ({"x": 1}, 7)
    # Nothing is made of a class that the reader does not name.
    with pytest.raises(KeyError, match="Pair"):
        through_text(value, Whole)


def test_what_json_cannot_hold_is_an_error():
    with pytest.raises(TypeError):
        typed_json.to_json({1, 2})


@pytest.mark.parametrize("values", [{"rows": []}, [{"tokens": [1]}], [{"": "Other"}], [[1]]])
def test_a_checkpoint_of_another_version_is_refused(values):
    with pytest.raises(InputError, match="another version"):
        typed_json.of_checkpoint(values, Whole)
