"""The operation that made the first NaN or infinity is named by its line; what was masked away
accuses nobody."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.source_lines import line_of
from tpu_rl.runtime import nan_tracer
from tpu_rl.runtime.nan_tracer import Finding


def found(function: Callable[..., Any], *arguments: Any) -> Finding:
    finding = nan_tracer.find(function, *arguments)
    assert finding is not None
    return finding


ZEROS, ONES = jnp.zeros(3), jnp.ones(3)


def log_of_zero(x: jax.Array) -> jax.Array:
    masked = jnp.where(x > 0, jnp.log(x), 0.0)  # infinite, and on purpose
    shifted = jnp.log(masked)  # here
    return shifted.sum() + 1.0


def zero_times_infinity(x: jax.Array) -> jax.Array:
    surprise = -jnp.log(x)  # here
    return (surprise * x).sum()  # then


def nothing_left_of_a_row(x: jax.Array) -> jax.Array:
    scores = jnp.where(x > 0, x, -jnp.inf)
    return (scores - scores.max()).sum()  # here


def overflow(x: jax.Array) -> jax.Array:
    return jnp.exp(1000.0 * (x + 1)).sum()  # here


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (log_of_zero, [("inf", "log", "here")]),
        (zero_times_infinity, [("inf", "log", "here"), ("NaN", "mul", "then")]),
        (nothing_left_of_a_row, [("NaN", "sub", "here")]),
        (overflow, [("inf", "exp", "here")]),
    ],
)
def test_the_first_operation_is_named_by_its_line(function, expected):
    finding = found(jax.jit(function), ZEROS)
    assert [(made.kind, made.operation) for made in finding.operations] == [
        made[:2] for made in expected
    ]
    for made, (_, _, mark) in zip(finding.operations, expected, strict=True):
        assert made.frames[0] == f"{line_of(function, mark)} in {function.__name__}"
        assert not made.loops
    assert finding.argument == ""


def test_what_is_finite_in_the_end_is_no_finding():
    assert nan_tracer.find(lambda x: jnp.where(x > 0, jnp.log(x), 0.0), ZEROS) is None
    assert nan_tracer.find(lambda x: (x, x.astype(jnp.int32), jax.random.key(0)), ONES) is None


def test_an_argument_that_came_in_bad_is_named():
    finding = found(
        lambda tree, x: {"sum": (tree["a"]["b"] + x).sum(), "fine": x},
        {"a": {"b": ONES / ZEROS}},
        ONES,
    )
    assert finding == Finding(["sum"], [], "0/a/b")


def layers(weights: jax.Array, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sqrt(x - weight), None  # here

    return jax.lax.scan(layer, x, weights)[0].sum()  # loop


def test_an_iteration_of_a_loop_is_named():
    finding = found(layers, jnp.array([0.0, 0.5, 0.9, 0.0]), ONES)
    (made,) = finding.operations
    assert (made.kind, made.operation) == ("NaN", "sqrt")
    assert made.frames[0] == f"{line_of(layers, 'here')} in layer"
    assert made.loops == (f"iteration 2 of the loop at {line_of(layers, 'loop')} in layers",)


def test_a_gradient_is_followed_into_the_loop_that_made_it():
    """The root of 0 is 0 and its derivative is infinite: the last layer's, which is the first in
    the way back."""
    finding = found(jax.value_and_grad(layers), jnp.array([0.0, 0.5, 0.5**0.5, 0.0]), ONES)
    assert finding.outputs == ["1"]
    made = finding.operations[0]
    assert made.kind == "inf"
    assert made.frames[0] == f"{line_of(layers, 'here')} in layer"
    assert made.loops[0].startswith("iteration 3 of the loop")


def carried(x: jax.Array) -> jax.Array:
    def step(_: Any, both: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, power = both
        return total + power, power * 1e15  # here

    return jax.lax.fori_loop(0, 5, step, (x, x))[0].sum()


def test_what_a_loop_carries_is_followed_to_the_iteration_before():
    (made,) = found(carried, ONES).operations
    assert (made.kind, made.operation) == ("inf", "mul")
    assert made.frames[0] == f"{line_of(carried, 'here')} in step"
    assert made.loops[0].startswith("iteration 2 ")


def branches(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0] < 0, lambda x: 1 / x, lambda x: 1 / (x - x), x).sum()  # here


@jax.custom_vjp
def sharp(x: jax.Array) -> jax.Array:
    return x


sharp.defvjp(lambda x: (x, x), lambda x, g: (g / x,))


def custom(x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: sharp(x).sum())(x) / (1 - x)


@pytest.mark.parametrize("function", [branches, custom])
def test_branches_and_functions_with_their_own_gradient(function):
    made = found(function, ONES).operations[0]
    assert (made.kind, made.operation) == ("inf", "div")
    assert made.frames[0].startswith(__file__)


def compiled(x: jax.Array) -> jax.Array:
    def step(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        answer = jax.pure_callback(
            lambda _: np.float32(ANSWERS.pop(0)), jax.ShapeDtypeStruct((), jnp.float32), row
        )
        return total + answer, None

    return jax.lax.scan(step, jnp.zeros(()), x)[0]  # loop


ANSWERS: list[float] = []


def test_what_is_finite_one_operation_at_a_time_is_told_of_the_loop():
    """Compiled as a whole, it may round otherwise; here the first three answers make the
    difference."""
    ANSWERS[:] = [1.0, np.inf, 1.0] + [1.0] * 10
    (made,) = found(compiled, ONES).operations
    assert (made.kind, made.operation) == ("inf", "scan")
    assert made.frames[0].startswith(line_of(compiled, "loop"))
