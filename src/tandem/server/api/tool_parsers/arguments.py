"""Arguments one by one, for formats that do not write them as one object: which there are, their types, and what a text
is in JSON.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any  # schemas are JSON

from tandem.server.api.tool_parsers.base import CallArguments, CallStart, Function, Piece, loaded
from tandem.server.api.tool_parsers.python_value import json_of_literal

Schema = dict[str, Any]
NOTES = {"$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples"}
FOLLOWED = NOTES | {"type", "properties", "required", "additionalProperties"}  # of a schema of all arguments
MOST_ARGUMENTS = 32  # that a grammar lets a model make up
COMBINING = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class Argument:
    name: str
    schema: Schema
    is_required: bool


class SpelledCall:
    """What is the same of all readers of a call whose arguments come one by one."""

    def __init__(self, index: int, opening: str) -> None:
        self._index = index
        self._raw = [opening]
        self._has_arguments = False
        self._said: list[str] = []  # JSON that nobody was told yet
        self.name: str | None = None
        self.is_done = self.is_broken = False

    def _is(self, name: str) -> None:
        """It is certain now that this is a call, and of which function."""
        self.name = name

    @property
    def raw(self) -> str:
        return "".join(self._raw) if self.name is None else ""

    def _pieces(self, *, was_named: bool) -> list[Piece]:
        """What there is to tell since it was asked last."""
        pieces: list[Piece] = [CallStart(self._index, self.name)] if self.name is not None and not was_named else []
        if self._said:
            pieces.append(CallArguments(self._index, "".join(self._said)))
            self._said = []
        return pieces


def arguments_of(function: Function, name: re.Pattern[str]) -> list[Argument]:
    """Those that have names, in their order; where none has one, any may be said. name: of a function or an argument
    that can be written. Raises `GrammarError`."""
    schema = function.schema
    beyond = sorted(set(schema) - FOLLOWED) if function.is_strict else []
    required = schema.get("required", [])
    required = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    names = [*dict.fromkeys([*own_properties(schema), *required])]
    unwritten = [each for each in (function.name, *names) if name.fullmatch(each) is None]
    if beyond or unwritten:
        raise function.refused(f"{(beyond + unwritten)[0]!r} cannot be followed in this format of calls")
    return [Argument(each, property_of(schema, each), each in required) for each in names]


def own_properties(schema: Schema) -> Schema:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def property_of(schema: Schema, name: str) -> Schema:
    """With the definitions that it may refer to."""
    own = own_properties(schema)
    found = own[name] if name in own else schema.get("additionalProperties")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**definitions, **found} if isinstance(found, dict) else {}


def parts_of(schema: Schema) -> Iterator[Schema]:
    """The schema, and all that it is put together from on this level, each once."""
    left: list[Any] = [schema]
    seen: set[str] = set()
    while left:
        each = left.pop()
        if not isinstance(each, dict):
            continue
        yield each
        for key in COMBINING:
            left += each[key] if isinstance(each.get(key), list) else []
        reference = each.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            left.append(found_at(schema, reference))


def types_of(schema: Schema) -> set[str]:
    """The types of JSON that it speaks of; none where it says nothing."""
    return set[str]().union(*map(own_types, parts_of(schema)))


def own_types(schema: Schema) -> set[str]:
    types = schema.get("type")
    if isinstance(types, str | list):
        return {types} if isinstance(types, str) else {kind for kind in types if isinstance(kind, str)}
    found = set[str]().union(*map(types_of_value, listed(schema) or ()))
    return found | ({"object"} if "properties" in schema else set()) | ({"array"} if "items" in schema else set())


def listed(schema: Schema) -> list[Any] | None:
    """The values that it may have, where it lists them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None and schema.get("type") == "null":
        return [None]
    return values if isinstance(values, list) else None


def texts_of(schema: Schema) -> list[str] | None:
    """What may be written for it, where that is listed; None: any text."""
    values: list[Any] = []
    for part in parts_of(schema):
        if (own := listed(part)) is not None:
            values += own
        elif not {"$ref", *COMBINING} & set(part):
            return None
    if not values or not all(value is None or isinstance(value, str) for value in values):
        return None
    return ["null" if value is None else value for value in values]


def bound_by(schema: Schema) -> set[str]:
    """What it says of a text beyond its type, and beyond a list of texts."""
    return set[str]().union(*parts_of(schema)) - NOTES - {"type", "enum", "const", "$ref", "anyOf", "oneOf"}


def found_at(schema: Schema, reference: str) -> Any:
    found: Any = schema
    for step in reference.split("/")[1:]:
        found = found.get(step) if isinstance(found, dict) else None
    return found


def types_of_value(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int() | float():
            return {"number", "integer"} if value == value // 1 else {"number"}
        case str():
            return {"string"}
        case _:
            return {"array" if isinstance(value, list) else "object"}


def json_of(text: str, types: set[str]) -> str:
    """A text that should be of one of these types. What is of none is a string."""
    stripped = text.strip()
    for found in (stripped, json_of_literal(stripped)):
        if found is None or ((value := loaded(found)) is None and found != "null"):
            continue
        if "string" not in types or (types_of_value(value) - {"string"}) & types:
            return found
    return json.dumps(text, ensure_ascii=False)
