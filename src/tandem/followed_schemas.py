r"""JSON schemas in words that llguidance follows to the letter.

Two things it takes for others, and would let through what a schema forbids. Both are said here in another way:

- In a pattern, a class with all control characters is given all escapes of JSON, `\"` and `\\` too, so `[^"]` would be
  a quotation mark as well. No class has U+0000 then, which no answer needs.
- Between a whole number that is excluded and another bound before the next one stands the excluded one too: `0` where
  more than 0 and at most 0.5 is asked for. What is excluded is then the number next to it, or 2**-52 beside 0.
"""

import math
import re
from collections.abc import Iterator
from typing import Any  # JSON schemas

from tandem.closed_schemas import NAMED

VALUES = ("const", "enum", "default", "examples")  # keywords that hold values and not schemas
# The begin of a class, and of a range in it; other escapes are no class, whatever is behind them.
CLASS = re.compile(r"\[\^([\]-]?)|\[\\x00(?=-)|\\.", re.DOTALL)
WITHOUT_NUL = r"[^\x00"
LEAST_STEP = math.ulp(1.0)  # the least number that there is would have too many digits
LEAST, MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def followed(schema: Any) -> Any:
    """The schema in such words; nothing is changed in place."""
    fractions = {abs(bound) for bound in _bounds(schema) if bound % 1}

    def said(part: Any) -> Any:
        if isinstance(part, list):
            return [said(each) for each in part]
        if not isinstance(part, dict):
            return part
        made: dict[str, Any] = {}
        for key, each in part.items():
            if key == "pattern" and isinstance(each, str):
                made[key] = CLASS.sub(_without_nul, each)
            elif key == "patternProperties" and isinstance(each, dict):
                made[key] = {CLASS.sub(_without_nul, name): said(inner) for name, inner in each.items()}
            elif key in NAMED and isinstance(each, dict):
                made[key] = {name: said(inner) for name, inner in each.items()}
            else:
                made[key] = each if key in VALUES else said(each)
        for keys, sign in ((LEAST, 1), (MOST, -1)):
            made |= _excluded(part, *keys, sign, fractions)
        return made

    return said(schema)


def _without_nul(found: re.Match[str]) -> str:
    r"""The begin of a class that has no U+0000. `]` and `-` mean themselves at the front of a class only."""
    begin = found[0]
    if begin.startswith("[^"):
        return WITHOUT_NUL + ("\\" + found[1] if found[1] else "")
    return r"[\x01" if begin.startswith("[") else begin


def _excluded(part: dict[str, Any], keep: str, exclude: str, sign: float, fractions: set[float]) -> dict[str, Any]:
    """A bound that is excluded, as one that is no whole number; nothing where that makes no difference."""
    given = part.get(exclude)
    bound = _number(part.get(keep)) if given is True else _number(given)
    if bound is None or bound % 1 or not any(abs(bound) < one < abs(bound) + 1 for one in fractions):
        return {}
    return {exclude: bound + sign * max(math.ulp(bound), LEAST_STEP)}


def _number(value: Any) -> float | None:
    return None if isinstance(value, bool) or not isinstance(value, int | float) else value


def _bounds(schema: Any) -> Iterator[float]:
    """Of numbers, all that may be some, wherever they stand."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.values()
            yield from (each for key in (*LEAST, *MOST) if (each := _number(part.get(key))) is not None)
        elif isinstance(part, list):
            left += part
