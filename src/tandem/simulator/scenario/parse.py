"""Values in the words of a scenario, both ways: times, settings of a node, and chance.

Left to chance is whatever of `Options` and `LinkSettings` one line `name=value ...` says; what is not named in it does
not happen. `jitter=on` makes durations uneven, `classes=F10` gives every life a clock of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any  # a value of whatever type its field has

import msgspec

from tandem.core.kv_parts import KvGrid
from tandem.core.settings import NodeSettings, Role
from tandem.core.values import MILLISECOND, SECOND, Incarnation
from tandem.simulator.faults.options import Options
from tandem.simulator.network.links import LinkSettings
from tandem.simulator.workload import WorkloadSettings

SMALL = NodeSettings(
    role=Role.UNIFIED,
    incarnation=Incarnation("", ""),
    num_pages=16,
    page_size=4,
    layout="layout",
    max_running=4,
    chunk_tokens=8,
    result_slots=4,
)
CLOCKS = "F10"
GIVEN_BY_THE_LINE = ("role", "incarnation")
FOR_GOOD_NS = 3600 * SECOND
UNITS = (("ms", MILLISECOND), ("us", 1000), ("ns", 1), ("s", SECOND))
# A scenario has no routers.
ROUTED = ("num_gateways", "direct_share", "unified_share", "http_breaks", "http_silences", "error_heads", "has_encoder")
NO_CHANCES = (
    "seed",
    "num_prefills",
    "num_decodes",
    "num_unified",
    "num_shards",
    "hostility",
    "repeated_names",
    "misfits",
    *ROUTED,
)  # lines of their own


def quiet_options() -> Options:
    """A cluster in which nothing goes wrong by itself."""
    return Options(
        seed=0,
        classes=(),
        num_prefills=0,
        num_decodes=0,
        num_unified=0,
        num_shards=1,
        workload=WorkloadSettings(num_requests=0),
        links=LinkSettings(base_ns=200_000, spread=0.0),
        prefill=SMALL,
        decode=SMALL,
        page_read_ns=(100_000, 100_001),
        corruption=0.0,
        linger_ns=0,
        batch_failure=0.0,
        event_copies=0.0,
        hostility=0.0,
    )


# --- times -----------------------------------------------------------------------------------------------------------


def parse_ns(text: str) -> int:
    for unit, factor in UNITS:
        if text.endswith(unit):
            return round(float(text[: -len(unit)]) * factor)
    raise ValueError(f"{text!r} is not a time")


def ns_text(time_ns: int) -> str:
    """Exactly, in the largest unit that needs no fraction."""
    units = sorted(UNITS, key=lambda unit: -unit[1])
    unit, factor = next((unit, factor) for unit, factor in units if time_ns % factor == 0)
    return f"{time_ns // factor}{unit}"


# --- settings --------------------------------------------------------------------------------------------------------


def parse_setting(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    types = {known.name: known.type for known in msgspec.structs.fields(NodeSettings)}
    if name not in types:
        raise ValueError(f"no setting {name}")
    if name.endswith("_ns"):
        return name, parse_ns(value)
    if value[:1] in ("{", "[", '"'):
        return name, msgspec.json.decode(value, type=types[name])
    return name, value == "on" if types[name] is bool else msgspec.convert(value, types[name], strict=False)


def settings_words(settings: NodeSettings) -> Iterator[str]:
    """Those that are not `SMALL`'s."""
    for name in NodeSettings.__struct_fields__:
        value = getattr(settings, name)
        if name not in GIVEN_BY_THE_LINE and value != getattr(SMALL, name):
            yield f"{name}={_value_text(name, value)}"


def _value_text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and name.endswith("_ns"):
        return ns_text(value)
    if isinstance(value, int | float) or (isinstance(value, str) and value.isidentifier()):
        return str(value)
    return json_word(value)


def json_word(value: object) -> str:
    """JSON without blanks."""
    return msgspec.json.encode(value).decode().replace(" ", "\\u0020")


# --- chances ---------------------------------------------------------------------------------------------------------


def parse_chances(words: Iterable[str]) -> tuple[Options, bool]:
    """(options of the world, whether durations are uneven)"""
    given = dict(word.split("=", 1) for word in words)
    has_jitter = given.pop("jitter", "off") == "on"
    classes = tuple(given.pop("classes", "").split(","))
    grid = KvGrid(*map(int, given.pop("grid").split("x"))) if "grid" in given else None
    quiet = replace(quiet_options(), classes=classes)
    options, links = _chance_fields(quiet), _chance_fields(quiet.links)
    for name, text in given.items():
        if name in links:
            links[name] = _parse_like(links[name], name, text)
        elif name in options or name == "seed":
            options[name] = _parse_like(options.get(name, 0), name, text)
        else:
            raise ValueError(f"no chances {name}")
    return replace(quiet, links=LinkSettings(**links), grid=grid, **options), has_jitter


def chance_words(options: Options) -> list[str]:
    """What goes wrong by chance under these options."""
    quiet = quiet_options()
    words = ["jitter=on", *(f"classes={name}" for name in (CLOCKS,) if name in options.classes)]
    for usual, real in ((quiet, options), (quiet.links, options.links)):
        differing = {name: value for name, value in _chance_fields(real).items() if value != getattr(usual, name)}
        words += [f"{name}={_chance_text(name, value)}" for name, value in differing.items()]
    if options.grid is not None:
        words.append(f"grid={options.grid.num_layers}x{options.grid.num_kv_heads}")
    return words


def _chance_fields(settings: Options | LinkSettings) -> dict[str, Any]:
    names = [known.name for known in fields(settings) if known.name not in NO_CHANCES]
    values = {name: getattr(settings, name) for name in names}
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    is_range = isinstance(value, tuple) and len(value) == 2 and all(isinstance(end, int) for end in value)
    return is_range or (isinstance(value, int | float | str) and not isinstance(value, bool))


def _parse_like(usual: object, name: str, text: str) -> Any:
    if isinstance(usual, tuple):
        start, _, stop = text.partition("..")
        return parse_ns(start), parse_ns(stop)
    if isinstance(usual, str):
        return text
    if name.endswith("_ns"):
        return parse_ns(text)
    return int(text) if isinstance(usual, int) else float(text)


def _chance_text(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return f"{ns_text(value[0])}..{ns_text(value[1])}"
    return ns_text(value) if name.endswith("_ns") else str(value)
