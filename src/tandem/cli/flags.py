"""From the fields of a class of settings to command-line flags, and back to a configuration."""

import argparse
import contextlib
import math
from collections.abc import Callable
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints  # Any: what a value is, its field says

import msgspec

from tandem.cli.failure import CommandFailed
from tandem.cli.flag_groups import in_order
from tandem.cli.flag_synonyms import ROUTER_SYNONYMS, SYNONYMS
from tandem.cli.main import Parser
from tandem.config import ServerConfig, flags, violations
from tandem.environment import environment_complaints
from tandem.flag_roles import without_effect
from tandem.server.keys import Config, KeyProblem, with_keys

METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", tuple: "X"}


class Collect(argparse.Action):
    """A flag that may be repeated. Words may stand between commas or as a list in JSON, numbers behind each other; of
    some flags words, too.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parts: list[object] = []
        for value in values if isinstance(values, list) else [values]:
            found = words_of(value) if isinstance(value, str) else [value]
            if found is None:
                raise argparse.ArgumentError(self, f"{value!r} is no list of words in JSON")
            parts += found
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), *parts))


def words_of(text: str) -> list[str] | None:
    """None: it begins as a list in JSON, which vLLM's flags take, and is none of words."""
    if not text.startswith("["):
        return [part.strip() for part in text.split(",")]
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=list[str])
    return None


def add_flags(parser: argparse.ArgumentParser, settings: type = ServerConfig) -> None:
    """In groups; what their synonyms are called is told to a parser that wants to know."""
    fields = {field.name: (name, field) for name, field in flags(settings)}
    for title, names in in_order(list(fields)).items():
        group = parser.add_argument_group(title)
        for field_name in names:
            _add_flag(group, *fields[field_name], settings)
    if isinstance(parser, Parser):
        parser.synonyms = SYNONYMS if settings is ServerConfig else ROUTER_SYNONYMS


def _add_flag(group: Any, name: str, field: Any, settings: type) -> None:
    kind, words = kind_of(field.name, settings), words_instead(field.name, settings)
    options: dict[str, Any] = {"default": field.default, "help": help_text(field)}
    if kind is bool:
        options["action"] = "store_true" if field.default is False else argparse.BooleanOptionalAction
    else:
        options |= {"action": Collect, **collected(field, settings)} if kind is tuple else {"type": scalar(kind, words)}
        options["metavar"] = field.metadata["metavar"] or (None if field.metadata["choices"] else METAVARS[kind])
    if field.metadata["choices"]:
        options["choices"] = field.metadata["choices"]
    if other_words := field.metadata["other_words"]:
        options["type"] = lambda text: other_words.get(text, text)
    group.add_argument(name, *field.metadata["aliases"], **options)


def config_of(args: argparse.Namespace) -> ServerConfig:
    """Raises CommandFailed with every rule that the combination breaks, every flag that would do nothing, and all that
    is wrong with the environment."""
    config = ServerConfig(model=args.model, **values_of(args, ServerConfig))
    if broken := [*violations(config), *without_effect(config), *environment_complaints()]:
        raise CommandFailed("; ".join(broken), is_wrong_usage=True)
    return keyed(config)


def values_of(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for _, field in flags(settings)}


def keyed(config: Config) -> Config:
    """With all keys read. Raises CommandFailed."""
    try:
        return with_keys(config)
    except KeyProblem as problem:
        raise CommandFailed(str(problem), is_wrong_usage=True) from None


def kind_of(name: str, settings: type = ServerConfig) -> type:
    """`int | None` is an int that may be left out; `tuple[str, ...]` is a tuple."""
    kind = get_type_hints(settings)[name]
    if get_origin(kind) is tuple:
        return tuple
    if get_origin(kind) in (Union, UnionType):
        (kind,) = [part for part in get_args(kind) if isinstance(part, type) and part is not type(None)]
    return kind


def words_instead(name: str, settings: type) -> tuple[str, ...]:
    """Of `float | Literal["auto"] | None`: what may be said instead of a number."""
    parts = get_args(get_type_hints(settings)[name])
    return tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))


def scalar(kind: type, words: tuple[str, ...]) -> Callable[[str], object]:
    """What argparse makes a value with."""
    if words:
        return lambda text: text if text in words else number_or(text, words)
    return finite if kind is float else integer if kind is int else kind


def integer(text: str) -> int:
    """Settings go to other processes in messages, which carry 64 bits."""
    with contextlib.suppress(ValueError):
        if abs(value := int(text)) < 1 << 63:
            return value
    raise argparse.ArgumentTypeError(f"invalid int value: {text[:40]!r}")


def finite(text: str) -> float:
    """No flag has a use for `nan` or `inf`, and JSON knows neither."""
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"invalid float value: {text!r}")


def number_or(text: str, words: tuple[str, ...]) -> float:
    with contextlib.suppress(argparse.ArgumentTypeError):
        return finite(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is neither a number nor {' or '.join(words)}")


def whole(text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def natural(text: str) -> int:
    return whole(text, least=0)


def count(text: str) -> int:
    return whole(text, least=1)


def collected(field: Any, settings: type = ServerConfig) -> dict[str, Any]:
    """What a tuple is made of: `tuple[float, ...]` takes several words, as SGLang's lists do."""
    part = get_args(get_type_hints(settings)[field.name])[0]
    is_one_word = part is str and not field.metadata["stand_in_row"]
    return {"type": part} if is_one_word else {"type": part, "nargs": "+"}


def help_text(field: Any) -> str:
    text: str = field.metadata["help"].replace("%", "%%")
    return text if field.default in (None, False, ()) else f"{text} (default: {field.default})"
