"""Which operation made the first NaN or infinity that reached a function's outputs.

The function is run once more, operation by operation, and the bad output is followed backwards through what it was
computed from, into compiled functions and loops, until an operation with nothing bad before it. So a NaN or infinity
that is masked away later, as masks and double `where`s make them on purpose, accuses nobody. (jax_debug_nans stops at
the first NaN anywhere and names a loop as a whole; checkify's NaN checks do not see that log(0) is infinite.)
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

LIBRARIES = tuple(str(Path(str(module.__file__)).parent) + "/" for module in (jax, jaxlib, flax, optax))
CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call"}
CALLS |= {"custom_vjp_call", "custom_vjp_call_jaxpr"}
"""Operations that are a function's call, by the names of their primitives."""
MOST_FRAMES = 4


class Made(NamedTuple):
    """An operation whose result is not finite though what it read was, or was so in another way."""

    kind: str
    """NaN or inf."""
    operation: str
    frames: tuple[str, ...]
    """ "file:line in function", the innermost first, without the libraries'."""
    is_backward: bool
    """It belongs to the gradient of that line."""
    loops: tuple[str, ...]
    """ "iteration N of the loop at ...", the outermost first."""


class Finding(NamedTuple):
    outputs: list[str]
    """Paths of the outputs that are not finite."""
    made: list[Made]
    """What happened on the way to the first of them, the first operation first; empty if an argument was at fault."""
    argument: str
    """The path of the argument that was not finite, "" if none was to blame."""


class _Place(NamedTuple):
    """What surrounds an operation."""

    frames: tuple[str, ...] = ()
    is_backward: bool = False
    loops: tuple[str, ...] = ()


def find(function: Callable[..., Any], *arguments: Any) -> Finding | None:
    """What made the first output that is not finite, in their order; None where all are finite.

    Slow, and takes the memory of all intermediate values of one iteration of the outermost loop.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    values = _compute(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(arguments))
    bad = [index for index, output in enumerate(jaxpr.jaxpr.outvars) if kind_of(_read(values, output))]
    if not bad:
        return None
    made, argument = _follow(jaxpr.jaxpr, values, bad[0], _Place()) or ([], None)
    outputs, inputs = names(shapes), names(arguments)
    return Finding([outputs[index] for index in bad], made[::-1], "" if argument is None else inputs[argument])


def names(tree: Any) -> list[str]:
    """The paths of a tree's leaves, "gradient/policy/embedding"."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def kind_of(value: Any) -> str:
    """NaN, inf, or "" for an array without either."""
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return ""
    has_nan, has_infinity = _look(value)
    return "NaN" if has_nan else "inf" if has_infinity else ""


@jax.jit
def _look(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.isnan(value).any(), jnp.isinf(value).any()


def _compute(jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> dict[Any, Any]:
    """The value of every variable."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    for equation in jaxpr.eqns:
        values |= _apply(jaxpr, equation, values)
    return values


Way = tuple[list[Made], int | None] | None
"""(what made an output not finite, the last operation first; the argument that brought it in, or None). None where the
output is finite after all: compiled as a whole, operations may round otherwise than one by one."""


def _follow(jaxpr: core.Jaxpr, values: dict[Any, Any], output: int, place: _Place) -> Way:
    """An output's way back through the equations."""
    makers = {variable: number for number, equation in enumerate(jaxpr.eqns) for variable in equation.outvars}
    made: list[Made] = []
    variable = jaxpr.outvars[output]
    if not kind_of(_read(values, variable)):
        return None
    while not isinstance(variable, core.Literal) and variable in makers:
        equation = jaxpr.eqns[makers[variable]]
        reads = [_read(values, read) for read in equation.invars]
        here = _place_of(equation, place)
        inside = _enter(equation, reads, equation.outvars.index(variable), here)
        if inside is not None:
            made += inside[0]
            if inside[1] is None:
                return made, None
            variable = equation.invars[inside[1]]
            continue
        kind = kind_of(values[variable])
        kinds = [(kind_of(value), read) for value, read in zip(reads, equation.invars, strict=True)]
        alike = [read for its, read in kinds if its == kind]
        if not alike:
            made.append(Made(kind, equation.primitive.name, *here))
        before = alike or [read for its, read in kinds if its]
        if not before:
            return made, None
        variable = min(before, key=lambda read: -1 if isinstance(read, core.Literal) else makers.get(read, -1))
    if isinstance(variable, core.Literal) or variable not in jaxpr.invars:
        return made, None
    return made, jaxpr.invars.index(variable)


def _read(values: dict[Any, Any], variable: Any) -> Any:
    return variable.val if isinstance(variable, core.Literal) else values[variable]


def _apply(jaxpr: core.Jaxpr, equation: core.JaxprEqn, values: dict[Any, Any]) -> dict[Any, Any]:
    """The values of an equation of `jaxpr`, by variable."""
    reads = list(dict.fromkeys(read for read in equation.invars if not isinstance(read, core.Literal)))
    writes = [variable for variable in equation.outvars if not isinstance(variable, core.DropVar)]
    alone = jaxpr.replace(constvars=[], invars=reads, outvars=writes, eqns=[equation])
    results = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*(values[read] for read in reads))
    return dict(zip(writes, results, strict=True))


def _enter(equation: core.JaxprEqn, reads: Sequence[Any], output: int, place: _Place) -> Way:
    """The same within what the operation calls or repeats; None also for one that does neither."""
    name, parameters = equation.primitive.name, equation.params
    if name == "scan":
        return _trace_loop(parameters, reads, output, place)
    if name == "cond":
        branch = parameters["branches"][int(reads[0])]
        way = _trace(branch, reads[1:], output, place)
        return way and (way[0], None if way[1] is None else way[1] + 1)
    if name not in CALLS:
        return None
    inner = parameters["jaxpr"] if "jaxpr" in parameters else parameters["call_jaxpr"]
    return _trace(inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ()), reads, output, place)


def _trace(jaxpr: core.ClosedJaxpr, arguments: Sequence[Any], output: int, place: _Place) -> Way:
    return _follow(jaxpr.jaxpr, _compute(jaxpr.jaxpr, jaxpr.consts, arguments), output, place)


def _trace_loop(parameters: dict[str, Any], reads: Sequence[Any], output: int, place: _Place) -> Way:
    """The same within a scan: in the first iteration that makes the output bad, and back through what it carries."""
    body, fixed, carried = parameters["jaxpr"], parameters["num_consts"], parameters["num_carry"]
    consts, carry, rows = reads[:fixed], list(reads[fixed : fixed + carried]), reads[fixed + carried :]
    order = range(parameters["length"])[:: -1 if parameters["reverse"] else 1]
    step = jax.jit(core.jaxpr_as_fun(body))
    history: list[list[Any]] = []
    for iteration in order:
        history.append([*consts, *carry, *(row[iteration] for row in rows)])
        results = step(*history[-1])
        carry = results[:carried]
        if kind_of(results[output]):
            break
    made: list[Made] = []
    for time in reversed(range(len(history))):
        within = f"iteration {order[time]} of the loop at {place.frames[0]}" if place.frames else f"iteration {time}"
        way = _trace(body, history[time], output, place._replace(loops=(*place.loops, within)))
        if way is None:
            return None
        made, argument = made + way[0], way[1]
        if argument is None or not fixed <= argument < fixed + carried or time == 0:
            return made, argument
        output = argument - fixed
    return made, None


def _place_of(equation: core.JaxprEqn, outside: _Place) -> _Place:
    """Where an operation stands; one of a library's own function stands where that was called."""
    frames = tuple(_frames(equation))[:MOST_FRAMES] or outside.frames
    is_backward = outside.is_backward or "transpose(" in str(equation.source_info.name_stack)
    return _Place(frames, is_backward, outside.loops)


def _frames(equation: core.JaxprEqn) -> Iterator[str]:
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith((*LIBRARIES, "<")):
            yield f"{frame.file_name}:{frame.line_num} in {frame.function_name.rpartition('.')[2]}"
