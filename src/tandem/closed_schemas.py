"""JSON schemas whose objects have no other properties than those they name.

JSON Schema lets an object have others unless `additionalProperties` says no, and models make use of it: they invent
keys that nobody reads. Whoever sends a schema for an answer means the keys that it names, so objects are closed where
nothing else is said, as they are by default in SGLang and vLLM (xgrammar's strict mode).

Open stays what says so, and what is put together with something else: parts of an `allOf`, an object beside `anyOf`,
what `not` or `if` speak of. There a property may be another part's.
"""

from collections.abc import Iterator
from typing import Any  # JSON schemas

# What says itself which other properties there may be.
OPENING = ("additionalProperties", "unevaluatedProperties", "patternProperties")
# What a schema with properties may be put together with.
COMBINING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # of objects of schemas, each on its own
HOLDING = (  # one schema, or a list
    *("items", "prefixItems", "additionalItems", "unevaluatedItems"),
    *("additionalProperties", "unevaluatedProperties"),
)


def closed(schema: Any) -> Any:
    """The schema, with `additionalProperties: false` where it is meant; nothing is changed in place."""
    kept = _kept_open(schema)
    return schema if kept is None else _closed(schema, "#", kept)


def _closed(schema: Any, place: str, kept: set[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key, each, is_combined in _parts(schema):
        if is_combined:
            continue
        if isinstance(each, list):
            made[key] = [_closed(part, f"{place}/{key}", kept) for part in each]
        elif key in NAMED and isinstance(each, dict):
            places = {name: f"{place}/{key}/{name}" for name in each}
            made[key] = {n: part if places[n] in kept else _closed(part, places[n], kept) for n, part in each.items()}
        else:
            made[key] = _closed(each, f"{place}/{key}", kept)
    if _names_all(schema):
        made["additionalProperties"] = False
    return made


def _names_all(schema: dict[str, Any]) -> bool:
    """Whether it stands for itself and names all properties that it means."""
    properties, required = schema.get("properties"), schema.get("required", [])
    least = schema.get("minProperties", 0)
    if not isinstance(properties, dict) or not isinstance(required, list) or not isinstance(least, int):
        return False
    says_more = any(key in schema for key in (*OPENING, *COMBINING))
    names_all = all(isinstance(name, str) and name in properties for name in required)
    return not says_more and names_all and least <= len(properties)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Keywords that hold schemas, what they hold, and whether that is put together with something else."""
    is_alone = not any(key in schema for key in ("properties", "$ref", *OPENING))
    for key, each in schema.items():
        if key in (*NAMED, *HOLDING):
            yield key, each, False
        elif key in ("anyOf", "oneOf", "allOf"):
            is_one = key != "allOf" or (isinstance(each, list) and len(each) == 1)
            yield key, each, not (is_alone and is_one and sum(other in schema for other in COMBINING) == 1)
        elif key in COMBINING and key != "$ref":
            yield key, each, True


def _kept_open(schema: Any) -> set[str] | None:
    """Definitions that are put together with something else somewhere; None where it cannot be told which those are."""
    found: set[str] = set()
    left = [(schema, False)]
    while left:
        each, is_combined = left.pop()
        if isinstance(each, list):
            left += [(part, is_combined) for part in each]
        if not isinstance(each, dict):
            continue
        reference = each.get("$ref")
        is_beside = any(key in each for key in ("properties", "required", *OPENING, *COMBINING[1:]))
        if isinstance(reference, str) and (is_combined or is_beside) and reference not in found:
            if (target := _definition(schema, reference)) is None:
                return None
            found.add(reference)
            left.append((target, True))
        for key, held, combines in _parts(each):
            parts = held.values() if key in NAMED and isinstance(held, dict) else (held,)
            left += [(part, is_combined or combines) for part in parts]
    return found


def _definition(schema: dict[str, Any], reference: str) -> Any:
    """What `#/$defs/NAME` means."""
    start, _, name = reference.rpartition("/")
    held = schema.get(start.removeprefix("#/")) if start in ("#/$defs", "#/definitions") else None
    return held.get(name) if isinstance(held, dict) else None
