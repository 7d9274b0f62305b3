"""Intervals of settings, and the numbers that algorithms refuse by the names of their flags."""

import math
from dataclasses import dataclass, fields
from typing import Annotated

import pytest

from tests.fixtures.algorithm_cases import CASES
from tpu_rl import ranges
from tpu_rl.commands import run
from tpu_rl.errors import InputError
from tpu_rl.ranges import In


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "words"),
    [
        ("(0, inf)", (1e-9, 1e9), (0.0, -1.0, math.inf, math.nan), "above 0"),
        ("[0, 1]", (0, 1), (-1e-9, 1.1, math.nan), "at least 0 and at most 1"),
        ("(0, 1)", (0.5,), (0, 1), "above 0 and below 1"),
        ("[-inf, inf]", (-math.inf, 0), (math.nan,), "a number"),
    ],
)
def test_an_interval_has_the_ends_in_brackets(interval, inside, outside, words):
    numbers = In(interval)
    assert all(number in numbers for number in inside)
    assert not any(number in numbers for number in outside)
    assert str(numbers) == words


@dataclass(frozen=True)
class Settings:
    share: ranges.Share = 0.5
    cap: Annotated[float, In("(1, inf)")] | None = None
    pair: tuple[float, ...] = ()
    plain: float = 0.0


def test_a_number_outside_is_named_by_its_flag():
    ranges.check(Settings(cap=2.0, pair=(math.inf,), plain=-math.inf))
    with pytest.raises(InputError) as error:
        ranges.check(Settings(cap=1.0), "--algorithm.critic")
    assert error.value.where == "--algorithm.critic.cap"
    assert error.value.why == "it must be above 1"
    for settings in (Settings(share=2.0), Settings(pair=(math.nan,)), Settings(plain=math.nan)):
        with pytest.raises(InputError):
            ranges.check(settings)


@pytest.mark.parametrize(
    ("flag", "number"),
    [("--sampling.top-p", "nan"), ("--optimizer.weight-decay", "inf"), ("--steps", "-1")],
)
def test_a_run_refuses_numbers_that_are_none(flag, number, capsys):
    assert run.main(["arithmetic_grpo", flag, number, "--dry-run"]) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("kind", sorted({type(case.config) for case in CASES.values()}, key=str))
def test_no_algorithm_takes_nan(kind):
    required = {"teacher": "t"} if "teacher" in {field.name for field in fields(kind)} else {}
    numbers = [field.name for field in fields(kind) if isinstance(field.default, float)]
    for name in numbers:
        with pytest.raises(InputError, match=r"nan"):
            kind(**required, **{name: math.nan})
