"""Find the operation that made the first NaN or infinity in a function's outputs.

The function runs once more, operation by operation. The bad output is then followed backwards
through the values that it was computed from, into compiled functions and loops, until an operation
with only finite inputs. So a NaN or infinity that is masked away later, as masks and double
`where`s make them on purpose, is not reported. (jax_debug_nans stops at the first NaN anywhere and
names a loop as a whole; the NaN checks of checkify do not see that log(0) is infinite.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.extend.core as core
import jax.numpy as jnp
import jaxlib
import optax

LIBRARIES = tuple(
    str(Path(str(module.__file__)).parent) + "/" for module in (jax, jaxlib, flax, optax)
)
"""Folders whose stack frames are not shown."""

CALL_PRIMITIVES = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "checkpoint",
        "remat",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
    }
)
"""The names of primitives that call a function."""

MAX_FRAMES = 4
"""The number of stack frames that are shown of an operation."""


class BadOperation(NamedTuple):
    """An operation whose result is bad though its inputs were not, or were bad in another way."""

    kind: str
    """NaN or inf."""
    operation: str
    """The name of the primitive."""
    frames: tuple[str, ...]
    """ "file:line in function", the innermost first, without those of libraries."""
    is_backward: bool
    """The operation belongs to the gradient of that line."""
    loops: tuple[str, ...]
    """ "iteration N of the loop at ...", the outermost first."""


class Finding(NamedTuple):
    """The result of `find`."""

    outputs: list[str]
    """Paths of the outputs that are not finite."""
    operations: list[BadOperation]
    """The operations that led to the first of these outputs, in order; empty if an argument was
    bad already."""
    argument: str
    """The path of the argument that was not finite; "" if there is none."""


class _Location(NamedTuple):
    """The surroundings of an operation; see `BadOperation`."""

    frames: tuple[str, ...] = ()
    is_backward: bool = False
    loops: tuple[str, ...] = ()


class _Origin(NamedTuple):
    """Why an output of a jaxpr is not finite."""

    operations: list[BadOperation]
    """The last operation first."""
    argument: int | None
    """The index of the argument that was bad already, or None."""


def find(function: Callable[..., Any], *arguments: Any) -> Finding | None:
    """Return what made the first output that is not finite, or None if all are finite.

    This is slow, and needs the memory of all intermediate values of one iteration of the outermost
    loop.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    values = _evaluate(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(arguments))
    bad_outputs = [
        index for index, output in enumerate(jaxpr.jaxpr.outvars) if kind_of(_read(values, output))
    ]
    if not bad_outputs:
        return None
    origin = _follow(jaxpr.jaxpr, values, bad_outputs[0], _Location()) or _Origin([], None)
    output_names = names(shapes)
    argument = "" if origin.argument is None else names(arguments)[origin.argument]
    return Finding(
        [output_names[index] for index in bad_outputs], origin.operations[::-1], argument
    )


def names(tree: Any) -> list[str]:
    """Return the paths of a tree's leaves, such as "gradient/policy/embedding"."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def kind_of(value: Any) -> str:
    """Return "NaN", "inf", or "" for an array without either."""
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return ""
    has_nan, has_infinity = _nan_and_infinity(value)
    if has_nan:
        return "NaN"
    return "inf" if has_infinity else ""


@jax.jit
def _nan_and_infinity(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.isnan(value).any(), jnp.isinf(value).any()


# --- evaluation ---


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> dict[Any, Any]:
    """Return the value of every variable."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    for equation in jaxpr.eqns:
        values |= _apply(jaxpr, equation, values)
    return values


def _apply(jaxpr: core.Jaxpr, equation: core.JaxprEqn, values: dict[Any, Any]) -> dict[Any, Any]:
    """Return variable -> value of the results of one equation of `jaxpr`."""
    inputs = [variable for variable in equation.invars if not isinstance(variable, core.Literal)]
    inputs = list(dict.fromkeys(inputs))
    results = [variable for variable in equation.outvars if not isinstance(variable, core.DropVar)]
    single = jaxpr.replace(constvars=[], invars=inputs, outvars=results, eqns=[equation])
    function = core.jaxpr_as_fun(core.ClosedJaxpr(single, ()))
    return dict(zip(results, function(*(values[variable] for variable in inputs)), strict=True))


def _read(values: dict[Any, Any], variable: Any) -> Any:
    return variable.val if isinstance(variable, core.Literal) else values[variable]


# --- the way back ---


def _follow(
    jaxpr: core.Jaxpr, values: dict[Any, Any], output: int, location: _Location
) -> _Origin | None:
    """Follow an output back through the equations.

    Returns None if the output is finite after all: an operation of a program that was compiled as a
    whole may round differently from the operation alone.
    """
    makers = {
        variable: number
        for number, equation in enumerate(jaxpr.eqns)
        for variable in equation.outvars
    }
    operations: list[BadOperation] = []
    variable = jaxpr.outvars[output]
    if not kind_of(_read(values, variable)):
        return None
    while not isinstance(variable, core.Literal) and variable in makers:
        equation = jaxpr.eqns[makers[variable]]
        inputs = [_read(values, read) for read in equation.invars]
        inner_location = _locate(equation, location)
        inner = _enter(equation, inputs, equation.outvars.index(variable), inner_location)
        if inner is not None:
            operations += inner.operations
            if inner.argument is None:
                return _Origin(operations, None)
            variable = equation.invars[inner.argument]
            continue
        kind = kind_of(values[variable])
        input_kinds = [kind_of(value) for value in inputs]
        candidates = [
            read
            for read, input_kind in zip(equation.invars, input_kinds, strict=True)
            if input_kind == kind
        ]
        if not candidates:
            operations.append(BadOperation(kind, equation.primitive.name, *inner_location))
            candidates = [
                read
                for read, input_kind in zip(equation.invars, input_kinds, strict=True)
                if input_kind
            ]
        if not candidates:
            return _Origin(operations, None)
        variable = min(
            candidates,
            key=lambda read: -1 if isinstance(read, core.Literal) else makers.get(read, -1),
        )
    if isinstance(variable, core.Literal) or variable not in jaxpr.invars:
        return _Origin(operations, None)
    return _Origin(operations, jaxpr.invars.index(variable))


def _enter(
    equation: core.JaxprEqn, inputs: Sequence[Any], output: int, location: _Location
) -> _Origin | None:
    """Follow an output into the function that an equation calls or repeats.

    Returns None for an equation that does neither.
    """
    name = equation.primitive.name
    parameters = equation.params
    if name == "scan":
        return _trace_scan(parameters, inputs, output, location)
    if name == "cond":
        branch = parameters["branches"][int(inputs[0])]
        origin = _trace(branch, inputs[1:], output, location)
        if origin is None or origin.argument is None:
            return origin
        return origin._replace(argument=origin.argument + 1)
    if name not in CALL_PRIMITIVES:
        return None
    jaxpr = parameters["jaxpr"] if "jaxpr" in parameters else parameters["call_jaxpr"]
    if not isinstance(jaxpr, core.ClosedJaxpr):
        jaxpr = core.ClosedJaxpr(jaxpr, ())
    return _trace(jaxpr, inputs, output, location)


def _trace(
    jaxpr: core.ClosedJaxpr, arguments: Sequence[Any], output: int, location: _Location
) -> _Origin | None:
    values = _evaluate(jaxpr.jaxpr, jaxpr.consts, arguments)
    return _follow(jaxpr.jaxpr, values, output, location)


def _trace_scan(
    parameters: dict[str, Any], inputs: Sequence[Any], output: int, location: _Location
) -> _Origin | None:
    """Follow an output of a scan into its first bad iteration, then back through the carry."""
    body = parameters["jaxpr"]
    num_consts = parameters["num_consts"]
    num_carry = parameters["num_carry"]
    consts = inputs[:num_consts]
    carry = list(inputs[num_consts : num_consts + num_carry])
    rows = inputs[num_consts + num_carry :]
    iterations = range(parameters["length"])
    if parameters["reverse"]:
        iterations = iterations[::-1]

    step = jax.jit(core.jaxpr_as_fun(body))
    history: list[list[Any]] = []
    for iteration in iterations:
        history.append([*consts, *carry, *(row[iteration] for row in rows)])
        results = step(*history[-1])
        carry = results[:num_carry]
        if kind_of(results[output]):
            break

    operations: list[BadOperation] = []
    for number in reversed(range(len(history))):
        loop = f"iteration {number}"
        if location.frames:
            loop = f"iteration {iterations[number]} of the loop at {location.frames[0]}"
        inner_location = location._replace(loops=(*location.loops, loop))
        origin = _trace(body, history[number], output, inner_location)
        if origin is None:
            return None
        operations = operations + origin.operations
        argument = origin.argument
        is_carry = argument is not None and num_consts <= argument < num_consts + num_carry
        if argument is None or not is_carry or number == 0:
            return _Origin(operations, argument)
        output = argument - num_consts
    return _Origin(operations, None)


# --- source locations ---


def _locate(equation: core.JaxprEqn, outer: _Location) -> _Location:
    """Return the location of an equation; one inside a library has that of the library's call."""
    frames = tuple(_frames(equation))[:MAX_FRAMES] or outer.frames
    is_backward = outer.is_backward or "transpose(" in str(equation.source_info.name_stack)
    return _Location(frames, is_backward, outer.loops)


def _frames(equation: core.JaxprEqn) -> Iterator[str]:
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith((*LIBRARIES, "<")):
            yield f"{frame.file_name}:{frame.line_num} in {frame.function_name.rpartition('.')[2]}"
