"""Which objects of a schema are closed, and that those that are put together stay what they were."""

from typing import Any

import pytest

from tandem.closed_schemas import closed

NO_OTHERS = {"additionalProperties": False}
A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
CLOSED_A, CLOSED_B = A | NO_OTHERS, B | NO_OTHERS


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        ({"properties": {"a": A}, "required": ["a"]}, {"properties": {"a": CLOSED_A}, "required": ["a"]} | NO_OTHERS),
        ({"items": A}, {"items": CLOSED_A}),
        ({"prefixItems": [A, True]}, {"prefixItems": [CLOSED_A, True]}),
        ({"additionalProperties": A}, {"additionalProperties": CLOSED_A}),
        ({"anyOf": [A, B]}, {"anyOf": [CLOSED_A, CLOSED_B]}),
        ({"allOf": [A]}, {"allOf": [CLOSED_A]}),
        (
            {"$ref": "#/$defs/Tree", "$defs": {"Tree": {"properties": {"left": {"$ref": "#/$defs/Tree"}}}}},
            {
                "$ref": "#/$defs/Tree",
                "$defs": {"Tree": {"properties": {"left": {"$ref": "#/$defs/Tree"}}} | NO_OTHERS},
            },
        ),
    ],
)
def test_an_object_that_names_its_properties_has_no_others(schema: Any, expected: Any) -> None:
    before = repr(schema)
    assert closed(schema) == expected
    assert repr(schema) == before, "whoever sent it may send it again"


OPEN = [
    True,
    {"type": "object"},
    A | {"additionalProperties": True},
    A | {"additionalProperties": {"type": "string"}},
    A | {"patternProperties": {"^x": True}},
    A | {"required": ["other"]},
    A | {"minProperties": 2},
    A | {"anyOf": [B, {"required": ["c"]}]},
    {"allOf": [A, B]},
    {"allOf": [{"properties": {"x": A}}, {"properties": {"x": B}}]},
    {"anyOf": [A, B], "allOf": [{"required": ["a"]}]},
    {"not": A},
    {"if": A, "then": B},
    A | {"$ref": "#/$defs/B", "$defs": {"B": B}},
    {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": {"$ref": "#/$defs/Base"}, "Base": A}},
    {"allOf": [{"$ref": "#/properties/x"}, B], "properties": {"x": A}},
]


ODD = ([], {}, 5, "x", None, [[]], [{}], {"a": 5}, {"a": []})
KEYWORDS = ("properties", "required", "minProperties", "$ref", "$defs", "allOf", "anyOf", "items", "prefixItems", "not")


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_what_is_no_schema_is_left_to_who_compiles_it(keyword: str) -> None:
    for odd in ODD:
        for beside in ({}, A, {"allOf": [A, {"$ref": odd}]}, {"$defs": {"A": odd}, "$ref": "#/$defs/A"}):
            closed(beside | {keyword: odd})


@pytest.mark.parametrize("schema", OPEN, ids=repr)
def test_what_is_put_together_or_says_so_itself_stays_open(schema: Any) -> None:
    assert closed(schema) == schema
