"""Documents of other servers at their door: what is out of bounds is one exception that names the field."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.settings import PrefillInfo
from tandem.core.values import Incarnation, Room
from tandem.server import wire
from tandem.server.documents import (
    BadDocument,
    is_numeric_host,
    one_line,
    read_ranks,
    read_replica,
)

GOOD = wire.ReplicaInfo(
    Incarnation("host:30000", "0123456789abcdef" * 2),
    "prefill",
    "d" * 32,
    {"page_size": "16"},
    "10.0.0.1",
    5,
    (wire.DataEndpoint("10.0.0.1", 6, "@kv"),),
    30000,
    1,
    PrefillInfo(2),
)
HUGE = 10**30
LINE_CHARS = 240
SHARD = {"host": "10.0.0.1", "port": 6, "unix": ""}
MANY = {str(number): "" for number in range(65)}
FORGED = "x\n2026-01-01 ERROR all is lost"


def document(path: str, value: Any) -> bytes:
    """GOOD with another value at this place, for example `shards.0.port`."""
    made: Any = msgspec.to_builtins(GOOD)
    *parents, last = path.split(".")
    place = made
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    return msgspec.json.encode(made)


WRONG: dict[str, list[Any]] = {
    "shards": [[], None, {}, "x", [SHARD] * 257, [[]]],
    "shards.0.port": [0, -1, 65536, HUGE, "6", 6.0, True, None],
    "shards.0.host": ["prefill.example", "x" * 100_000, FORGED, 1, "127.0.0.1\n", "::1%\n", "1.2.3.4%eth0"],
    "shards.0.unix": ["x" * 108, FORGED, "\0kv", None],
    "control_host": ["prefill.example", "x" * 65, FORGED, None],
    "control_port": [0, -1, 65536, HUGE, "5", None],
    "http_port": [-1, 65536, HUGE, None],
    "dp_rank": [-1, 2, 1024, HUGE, True, "1"],
    "prefill.dp_size": [0, 1025, HUGE, None],
    "prefill.method": ["best", None, 3],
    "prefill.conflict": ["best", None],
    "role": ["decode", "unified", "x" * 17, FORGED, None],
    "layout": ["", "x" * 129, FORGED, 7],
    "layout_fields": [{"": "x"}, {"x" * 65: "x"}, {"x": "x" * 257}, {FORGED: "x"}, {"x": FORGED}, [], {"x": 1}, MANY],
    "incarnation": [None, "x", []],
    "incarnation.id": ["", "3", "g" * 32, "A" * 32, "a" * 31, "a" * 33, "a" * 31 + "\n", 4],
    "incarnation.name": ["", FORGED, "x" * 301, "\u202e", None],
}
NO_DOCUMENTS = {
    "nothing": b"",
    "no JSON": b"{",
    "nested arrays": b"[" * 100_000,
    "nested in an unknown field": b'{"x":' * 100_000,
    "no UTF-8": b'{"role":"\xff"}',
    "half a surrogate": b'{"role":"\\ud800"}',
    "a number of a million digits": b'{"http_port":' + b"9" * 1_000_000 + b"}",
    "not finite": b'{"http_port":1e999}',
    "another type": b"[]",
    "null": b"null",
}


def test_what_a_prefill_says_of_itself_comes_through_unchanged() -> None:
    assert read_replica(msgspec.json.encode(GOOD)) == GOOD
    everywhere = msgspec.structs.replace(GOOD, control_host="", shards=(wire.DataEndpoint("::", 6),))
    assert read_replica(msgspec.json.encode(everywhere)) == everywhere


@pytest.mark.parametrize("path", WRONG)
def test_a_value_out_of_bounds_is_refused_by_the_name_of_its_field(path: str) -> None:
    for value in WRONG[path]:
        with pytest.raises(BadDocument) as bad:
            read_replica(document(path, value))
        assert path.split(".")[0] in str(bad.value), value
        assert len(str(bad.value)) < LINE_CHARS
        assert str(bad.value).isprintable()


@pytest.mark.parametrize("field", [name for name in GOOD.__struct_fields__ if name not in ("http_port", "dp_rank")])
def test_a_field_that_is_missing_is_named(field: str) -> None:
    made = msgspec.to_builtins(GOOD)
    del made[field]
    with pytest.raises(BadDocument, match=field if field != "prefill" else "dp_rank"):
        read_replica(msgspec.json.encode(made))


@pytest.mark.parametrize("case", NO_DOCUMENTS)
def test_bytes_that_are_no_document_are_the_same_error(case: str) -> None:
    for read in (read_replica, lambda raw: read_ranks(raw, [Room(5)])):
        with pytest.raises(BadDocument) as bad:
            read(NO_DOCUMENTS[case])
        assert len(str(bad.value)) < LINE_CHARS
        assert str(bad.value).isprintable()


def outcome(raw: bytes) -> wire.ReplicaInfo | BadDocument:
    try:
        return read_replica(raw)
    except BadDocument as bad:
        return bad


@given(st.binary(max_size=400))
def test_any_bytes_are_a_document_or_that_error(raw: bytes) -> None:
    assert isinstance(outcome(raw), BadDocument)


@given(st.sampled_from(sorted(WRONG)), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_any_value_in_any_field_is_in_bounds_or_that_error(path: str, value: Any) -> None:
    found = outcome(document(path, value))
    if isinstance(found, BadDocument):
        assert str(found).isprintable()
        return
    assert found.shards
    assert all(0 < port < 65536 for port in (found.control_port, *(shard.port for shard in found.shards)))
    msgspec.msgpack.encode(found)


def test_ranks_are_told_of_rooms_that_were_asked_for() -> None:
    assert read_ranks(b'{"5": 1, "6": 0, "8": 2}', [Room(5), Room(6), Room(7)]) == {5: 1, 6: 0}


@pytest.mark.parametrize(
    "raw", ['{"5": -1}', '{"5": 1024}', '{"5": 1e3}', f'{{"5": {HUGE}}}', '{"5": true}', '{"5": "1"}']
)
def test_a_rank_out_of_bounds_is_refused(raw: str) -> None:
    with pytest.raises(BadDocument):
        read_ranks(raw.encode(), [Room(5)])


@pytest.mark.parametrize("name", ["", "-5", "5.0", "x\ny", "5" * 20, "\u0665"])
def test_a_room_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(BadDocument):
        read_ranks(msgspec.json.encode({name: 0}), [Room(5)])


def test_hosts_of_documents_are_numbers() -> None:
    for host in ("", "0.0.0.0", "127.0.0.1", "::1", "fe80::1%eth0"):
        assert is_numeric_host(host)
    for host in ("localhost", "1", "127.1", "::1%", "::1%a b", "127.0.0.1 ", "[::1]", "::1%" + "x" * 16):
        assert not is_numeric_host(host)


def test_what_is_quoted_stays_on_one_short_line() -> None:
    assert one_line("a\nb\x1b[2J\u2028c") == r"a\nb\x1b[2J\u2028c"
    assert len(one_line("x" * 1_000_000)) < LINE_CHARS
