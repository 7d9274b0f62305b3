"""Intervals of settings, and the numbers that algorithms refuse by the names of their flags."""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import pytest

from tests.fixtures.algorithm_cases import CASES
from tpu_rl import ranges
from tpu_rl.commands import run
from tpu_rl.errors import InputError
from tpu_rl.ranges import Conflicts, In, Needs, ReadOnlyWith


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "words"),
    [
        ("(0, inf)", (1e-9, 1e9), (0.0, -1.0, math.inf, math.nan), "above 0"),
        ("[0, 1]", (0, 1), (-1e-9, 1.1, math.nan), "at least 0 and at most 1"),
        ("(0, 1)", (0.5,), (0, 1), "above 0 and below 1"),
        (("[1, 9]", "", True), (0, 1), (0.5, math.nan), "0, or at least 1 and at most 9"),
        ("[-inf, inf]", (-math.inf, 0), (math.nan,), "a number"),
    ],
)
def test_an_interval_has_the_ends_in_brackets(interval, inside, outside, words):
    numbers = In(*interval) if isinstance(interval, tuple) else In(interval)
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


@dataclass(frozen=True)
class Choices:
    loss: Literal["nll", "dft"] = "nll"
    ball: Literal["tv", "kl"] | None = None
    freeze: tuple[Literal["vision", "projector"], ...] = ()
    bound: Literal["auto"] | float = 1.0


def test_a_value_that_is_none_of_a_literal_is_named_by_its_flag():
    ranges.check(Choices(loss="dft", ball="kl", freeze=("vision",), bound=0.5))
    wrong: Any = "vison"
    for name, settings in {
        "loss": Choices(loss=wrong),
        "ball": Choices(ball=wrong),
        "freeze": Choices(freeze=("projector", wrong)),
    }.items():
        with pytest.raises(InputError, match=f"unknown {name} 'vison'") as error:
            ranges.check(settings)
        assert error.value.where == f"--algorithm.{name}"
    assert error.value.fix == "did you mean vision? All: vision, projector"


@dataclass(frozen=True)
class Related:
    credit: str = "episode"
    gamma: Annotated[ranges.Share, ReadOnlyWith("credit", "turn", "step", why="by turn")] = 1.0
    coef: float = 0.0
    target: Annotated[ranges.Positive | None, Needs("coef", "elsewhere")] = None
    kind: Annotated[str, Conflicts("coef", when="plain", why="it has none")] = "usual"
    free: Annotated[bool, Conflicts("coef"), Conflicts("credit")] = False
    mask: Annotated[float | None, Conflicts("credit step")] = None


@pytest.mark.parametrize(
    ("settings", "what", "where", "fix"),
    [
        (
            {"gamma": 0.5},
            "gamma is not read with credit episode",
            "--a.gamma, --a.credit",
            "use --a.credit turn or step, or leave --a.gamma out (the default is 1.0)",
        ),
        (
            {"target": 1.0},
            "target does nothing without coef or elsewhere",
            "--a.target",
            "give --a.coef or --a.elsewhere, too",
        ),
        (
            {"kind": "plain", "coef": 0.1},
            "kind plain does not go with coef",
            "--a.kind, --a.coef",
            "leave --a.coef out, or change --a.kind",
        ),
        (
            {"free": True, "credit": "turn"},
            "free does not go with credit",
            "--a.free, --a.credit",
            "leave --a.credit out, or change --a.free",
        ),
        (
            {"mask": 0.5, "credit": "step"},
            "mask does not go with credit step",
            "--a.mask, --a.credit",
            "change --a.credit, or change --a.mask",
        ),
        ({"coef": 0.1, "target": -1.0}, "target is -1", "--a.target", "the default is None"),
    ],
    ids=["read only with", "needs", "conflicts when", "conflicts", "value", "interval"],
)
def test_a_setting_that_does_not_go_with_others_is_named(settings, what, where, fix):
    with pytest.raises(InputError) as error:
        ranges.check(Related(**settings), "--a")
    assert (error.value.what, error.value.where, error.value.fix) == (what, where, fix)


@dataclass(frozen=True)
class WithCoef(Related):
    coef: float = 0.1


def test_a_default_of_a_subclass_is_on():
    ranges.check(WithCoef(target=1.0))
    with pytest.raises(InputError, match="free does not go with coef"):
        ranges.check(WithCoef(free=True))


def test_settings_that_go_together_are_taken():
    ranges.check(Related(credit="turn", gamma=0.5, coef=0.1, target=1.0))
    ranges.check(Related(kind="plain", credit="step", free=False))


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
