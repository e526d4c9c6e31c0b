"""Documents of other servers, checked once, at the door: what comes out of here needs no second look.

Whoever answers at a bootstrap address, or may write to one, chooses every byte. So each document has a type whose
fields are bounded (`wire.ReplicaInfo`, `wire.DataEndpoint`), and what a type cannot say is said here: a prefill has a
shard, an address is a number, an id is one, names are text that may stand in a log line.

Whatever goes wrong while foreign bytes are read is one exception, `BadDocument`: they cost their sender its answer and
nothing else. Its text is one line, about `MAX_QUOTED_CHARS` long at most, and names the field.
"""

import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tandem.core.settings import MAX_DP_SIZE, PrefillInfo
from tandem.core.values import Incarnation, Nanos, Room
from tandem.logtext import visible
from tandem.server.wire import DataEndpoint, ReplicaInfo

MAX_QUOTED_CHARS = 200
MAX_NAME_CHARS = 300  # of a server: its host's name and a port
MAX_ZONE_CHARS = 15  # of an IPv6 address: an interface's name
INCARNATION_ID = re.compile(r"[0-9a-f]{32}")
ZONE = re.compile(rf"[0-9A-Za-z_.-]{{1,{MAX_ZONE_CHARS}}}")
FIELD = re.compile(r"at `(?:key` in `)?\$\.?([\w.\[\]]*)")
AGE = re.compile(rb"[0-9]{1,18}")
MISSING = re.compile(r"missing required field `(\w+)`")

RankOfRoom = dict[
    Annotated[str, Meta(pattern="^[0-9]+$", max_length=19)], Annotated[int, Meta(ge=0, lt=MAX_DP_SIZE)]
]  # the answer of POST /query_dp_ranks
PREFILL_HEADER = "x-tandem-prefill"  # beside it: a `PrefillInfo`, what the server's ranks say of it
AGE_HEADER = "x-tandem-age-ns"  # and for how long that server has been there
Document = TypeVar("Document")


class BadDocument(Exception):
    """Why a document is refused, in one line. `field` is None where it is none of one field."""

    def __init__(self, reason: str, field: str | None = None, *, is_json: bool = True) -> None:
        super().__init__(one_line(f"{field}: {reason}" if field else reason))
        self.field = field
        self.is_json = is_json


def one_line(text: str) -> str:
    """What others wrote, for logs and errors."""
    return visible(text, most=MAX_QUOTED_CHARS)


def read_document(raw: bytes, kind: type[Document]) -> Document:
    """Raises BadDocument."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise BadDocument(str(error).partition(" - at `")[0], _field_of(str(error))) from None
    except Exception as error:  # no JSON, no UTF-8, nested too deep, a number too long, no memory: theirs, all of it
        raise BadDocument(f"it is not valid JSON: {error}", is_json=False) from None


def read_replica(raw: bytes) -> ReplicaInfo:
    """A DP rank of a prefill as GET and PUT /route bring it. Raises BadDocument."""
    replica = read_document(raw, ReplicaInfo)
    _check(replica.role == "prefill", "role", "a prefill is wanted here")
    check_incarnation(replica.incarnation)
    _check(is_name(replica.layout), "layout", "must be printable text")
    for name, value in replica.layout_fields.items():
        _check(is_name(name) and value.isprintable(), "layout_fields", "names and values must be printable text")
    _check(is_numeric_host(replica.control_host), "control_host", "must be an IP address")
    _check(replica.control_port > 0, "control_port", "must lie between 1 and 65535")
    _check(bool(replica.shards), "shards", "must name at least one")
    for index, shard in enumerate(replica.shards):
        check_endpoint(shard, f"shards[{index}]")
    _check(replica.dp_rank < replica.prefill.dp_size, "dp_rank", f"there is no such rank of {replica.prefill.dp_size}")
    return replica


def read_ranks(raw: bytes, asked: Iterable[Room]) -> dict[Room, int]:
    """What POST /query_dp_ranks answers, for rooms that were asked for. Raises BadDocument."""
    told = read_document(raw, RankOfRoom)
    return {room: told[str(room)] for room in asked if str(room) in told}


def read_prefill(raw: bytes | None) -> PrefillInfo | None:
    """What POST /query_dp_ranks says beside its answer; None: nothing. Raises BadDocument."""
    return None if raw is None else read_document(raw, PrefillInfo)


def read_age(raw: bytes | None) -> Nanos | None:
    """The same of the server's age. Raises BadDocument."""
    if raw is None:
        return None
    _check(AGE.fullmatch(raw) is not None, AGE_HEADER, "must be a number of nanoseconds")
    return Nanos(int(raw))


def check_incarnation(who: Incarnation) -> None:
    """Raises BadDocument."""
    _check(INCARNATION_ID.fullmatch(who.id) is not None, "incarnation.id", "must be 32 lowercase hex digits")
    _check(is_name(who.name), "incarnation.name", f"must be printable text of 1 to {MAX_NAME_CHARS} characters")


def check_endpoint(endpoint: DataEndpoint, field: str) -> None:
    """Raises BadDocument."""
    _check(is_numeric_host(endpoint.host), f"{field}.host", "must be an IP address")
    _check(endpoint.port > 0, f"{field}.port", "must lie between 1 and 65535")
    _check(endpoint.unix.isprintable(), f"{field}.unix", "must be printable text")


def is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable()


def is_numeric_host(text: str) -> bool:
    """An IP address, which nobody has to look up. Empty: where the document was found."""
    address, percent, zone = text.partition("%")
    if percent and (":" not in address or ZONE.fullmatch(zone) is None):
        return False
    try:
        return text == "" or ip_address(address) is not None
    except ValueError:
        return False


def _check(holds: bool, field: str, reason: str) -> None:
    if not holds:
        raise BadDocument(reason, field)


def _field_of(message: str) -> str | None:
    """Where msgspec says the trouble is, as the sender would write it."""
    at, missing = FIELD.search(message), MISSING.search(message)
    path = at.group(1) if at else ""
    return ".".join(part for part in (path, missing.group(1) if missing else "") if part) or None
