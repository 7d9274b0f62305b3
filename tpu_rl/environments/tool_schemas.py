"""JSON schemas of tools, from type hints and Google docstrings.

The schemas equal those of `transformers.utils.get_json_schema`, which TRL shows to the model. They
are made here because the processes that environments live in must not load transformers.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

SECTIONS = ("Args:", "Returns:", "Raises:")
NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
"""The types of JSON's scalars."""
CONTAINERS = {list: "array", tuple: "array", dict: "object"}


class SchemaError(Exception):
    """The reason why a function is no tool."""


def schema_of(function: Callable[..., Any], skip_first: bool = False) -> dict[str, Any]:
    """Return the schema of a function, as chat templates read it.

    Args:
        function: a function with type hints, and a docstring that describes each parameter.
        skip_first: whether the first parameter is the object that a method belongs to.

    Raises:
        SchemaError: if a type hint or a description is missing, or JSON has no such type.
    """
    docstring = inspect.getdoc(function)
    if not docstring:
        raise SchemaError("it has no docstring")
    sections = _sections(docstring)
    descriptions = _descriptions(sections.get("Args:", ""))
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # The hints are texts, which may be any expression.
        raise SchemaError(f"its type hints cannot be read: {error}") from None
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in list(inspect.signature(function).parameters.items())[skip_first:]:
        if name not in hints:
            raise SchemaError(f"its parameter {name!r} has no type hint")
        if name not in descriptions:
            raise SchemaError(f"its docstring does not describe the parameter {name!r}")
        properties[name] = _with_description(_type_schema(hints[name]), descriptions[name])
        if parameter.default is parameter.empty:
            required.append(name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    schema = {"name": function.__name__, "description": sections[""], "parameters": parameters}
    returns = _return_schema(hints, sections)
    if returns is not None:
        schema["return"] = returns
    return {"type": "function", "function": schema}


# --- docstrings ---


def _sections(docstring: str) -> dict[str, str]:
    """Return heading -> text of a Google docstring's sections; the description's heading is ""."""
    sections: dict[str, list[str]] = {"": []}
    heading = ""
    for line in docstring.splitlines():
        if line.strip() in SECTIONS:
            heading = line.strip()
            sections[heading] = []
        else:
            sections[heading].append(line)
    texts = {heading: "\n".join(lines) for heading, lines in sections.items()}
    return {
        heading: text if heading == "Args:" else text.strip() for heading, text in texts.items()
    }


def _descriptions(section: str) -> dict[str, str]:
    """Return parameter -> description of the section Args."""
    descriptions: dict[str, list[str]] = {}
    lines = [line for line in section.splitlines() if line.strip()]
    indent = _indent(lines[0]) if lines else 0
    name = ""
    for line in lines:
        entry = re.match(r"(\w+)(?:[ \t]*\([^()]*\))?:(.*)", line.strip())
        if entry and _indent(line) <= indent:
            name = entry[1]
            descriptions[name] = [entry[2].strip()]
        elif name:
            descriptions[name].append(line.strip())
    return {name: " ".join(filter(None, parts)) for name, parts in descriptions.items()}


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _with_description(schema: dict[str, Any], description: str) -> dict[str, Any]:
    """Return the schema with its description, whose end may be `(choices: ["a", "b"])`."""
    choices = re.search(r"\(choices:\s*(.*?)\)\s*$", description, re.IGNORECASE)
    if choices is None:
        return {**schema, "description": description}
    try:
        values = json.loads(choices[1])
    except ValueError:
        raise SchemaError(f"its choices are no JSON list: {choices[1]}") from None
    values = [value.strip() if isinstance(value, str) else value for value in values]
    return {**schema, "enum": values, "description": description[: choices.start()].strip()}


# --- types ---


def _return_schema(hints: dict[str, Any], sections: dict[str, str]) -> dict[str, Any] | None:
    """Return the schema of the result; None if JSON cannot say it, since no model writes it."""
    if "return" not in hints:
        return None
    try:
        schema = _type_schema(hints["return"])
    except SchemaError:
        return None
    return schema | ({"description": sections["Returns:"]} if "Returns:" in sections else {})


def _type_schema(hint: Any) -> dict[str, Any]:
    """Return the schema of a type hint."""
    origin = typing.get_origin(hint)
    arguments: Any = typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is None and isinstance(hint, type):
        if issubclass(hint, enum.Enum):
            return _choices([member.value for member in hint])
        name = NAMES.get(hint) or CONTAINERS.get(hint)
        if name is not None:
            return {"type": name}
    if origin is typing.Literal:
        return _choices(list(arguments))
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_type_schema(item) for item in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    raise SchemaError(f"JSON has no type for the hint {hint!r}")


def _choices(values: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of one of these values."""
    if not values or any(type(value) not in NAMES for value in values):
        raise SchemaError(f"its choices {list(values)} are not all numbers and texts")
    names = list(dict.fromkeys(NAMES[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}


def _union(alternatives: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of one of several types."""
    schemas = [_type_schema(hint) for hint in alternatives if hint is not type(None)]
    if len(schemas) == 1:
        union = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        union = {"type": names[0] if len(names) == 1 else names}
    else:
        union = {"anyOf": schemas}
    return union | ({"nullable": True} if type(None) in alternatives else {})
