"""Messages to begin with, made from their types: a field that is added tomorrow is fuzzed tomorrow."""

from collections.abc import Iterable
from typing import Any, get_args

import msgspec
from msgspec import inspect

SCALARS: dict[type, Any] = {
    inspect.IntType: 1,
    inspect.FloatType: 0.5,
    inspect.StrType: "a",
    inspect.BytesType: b"abcdefgh",
    inspect.BoolType: True,
    inspect.NoneType: None,
    inspect.AnyType: None,
    inspect.RawType: msgspec.Raw(msgspec.msgpack.encode(None)),
}


def example_of(kind: Any) -> Any:
    """One instance of a type, with every optional field set."""
    return msgspec.convert(_plain(inspect.type_info(kind)), kind, builtin_types=(bytes,))


def examples_of(union: Any) -> dict[str, Any]:
    """One of each member, by name."""
    return {member.__name__: example_of(member) for member in members_of(union)}


def members_of(union: Any) -> Iterable[Any]:
    return get_args(union) or (union,)


def _plain(info: Any) -> Any:
    if type(info) in SCALARS:
        least = getattr(info, "ge", None)
        return SCALARS[type(info)] if least is None else max(least, SCALARS[type(info)])
    match info:
        case inspect.StructType(fields=fields, tag=tag, tag_field=tag_field):
            made = {field.encode_name: _plain(field.type) for field in fields}
            return made | ({tag_field: tag} if tag_field is not None else {})
        case inspect.UnionType(types=types):
            return _plain(next(kind for kind in types if not isinstance(kind, inspect.NoneType)))
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item) | inspect.SetType(item_type=item):
            return [_plain(item)]
        case inspect.FrozenSetType(item_type=item):
            return [_plain(item)]
        case inspect.TupleType(item_types=items):
            return [_plain(item) for item in items]
        case inspect.DictType(key_type=key, value_type=value):
            return {_plain(key): _plain(value)}
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case inspect.CustomType(cls=cls):
            raise TypeError(f"no example of {cls}")
    raise TypeError(f"no example of {info}")
