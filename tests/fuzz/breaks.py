"""Guards of decoders, left out one at a time: the fixed work of a target has to notice.

Each is a target of its own name, which breaks the code in its own process before it begins.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import msgspec
from engine import Run, Target
from targets import TARGETS

from tandem import page_files
from tandem.core.kv_parts import KvShard, Runs
from tandem.server import channel, documents, record_file
from tandem.server.node import session
from tandem.transfer import protocol
from tandem.transfer.lender import Lender
from tandem.transfer.protocol import Read

PutIn = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Break:
    target: str
    says: str  # in what is found
    put_in: PutIn


def frames_are_decoded_without_a_net() -> contextlib.AbstractContextManager[Any]:
    """Only msgspec's own errors cost the connection: what is nested too deeply costs the process."""

    def decoded(decoder: "msgspec.msgpack.Decoder[Any]", body: bytes) -> Any:
        try:
            return decoder.decode(body)
        except msgspec.DecodeError as error:
            raise channel.MalformedFrame(str(error)) from error

    return patch.object(session, "decoded", decoded)


def records_are_decoded_without_a_net() -> contextlib.AbstractContextManager[Any]:
    """The name that is caught is another one."""
    return patch.object(record_file, "RecursionError", ZeroDivisionError, create=True)


def a_read_may_name_any_number_of_pages() -> contextlib.AbstractContextManager[Any]:
    def unpack_read(header: bytes | bytearray, kv: KvShard) -> Read:
        _, count, room, secret, *_ = protocol._fields(protocol._READ, header)
        return Read(room=room, secret=secret, count=count, runs=Runs(0, kv.page_bytes, kv.page_bytes, 1))

    return patch.object(protocol, "unpack_read", unpack_read)


def a_run_may_reach_beyond_its_page() -> contextlib.AbstractContextManager[Any]:
    def unpack_read(header: bytes | bytearray, kv: KvShard) -> Read:
        _, count, room, secret, *numbers = protocol._fields(protocol._READ, header)
        runs = Runs(*numbers)
        if not (0 < count <= protocol.MAX_READ_PAGES and 0 < runs.size <= runs.stride and 0 < runs.count <= 16):
            raise protocol.Malformed("all but the end of the page is checked")
        return Read(room=room, secret=secret, count=count, runs=runs)

    return patch.object(protocol, "unpack_read", unpack_read)


def a_grant_is_no_secret() -> contextlib.AbstractContextManager[Any]:
    lease = Lender.lease

    def lease_to_anybody(self: Lender[Any], link: Any, room: int, *, secret: bytes, **named: Any) -> Any:
        grants = self.grants(room)
        return lease(self, link, room, secret=next((grant.secret for grant in grants), secret), **named)

    return patch.object(Lender, "lease", lease_to_anybody)


def a_prefill_may_have_no_shards() -> contextlib.AbstractContextManager[Any]:
    check = documents._check

    def check_all_but_shards(holds: bool, field: str, reason: str) -> None:
        check(holds or field == "shards", field, reason)

    return patch.object(documents, "_check", check_all_but_shards)


def a_page_is_whatever_lies_under_its_name() -> contextlib.AbstractContextManager[Any]:
    """Its head is compared, and nothing behind that."""

    class Anything(bytes):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = bytes.__hash__

    return patch.object(page_files, "digest", lambda head, page: Anything(16))


BREAKS: dict[str, Break] = {
    made.__name__: Break(target, says, made)
    for target, says, made in (
        ("control_member", "RecursionError", frames_are_decoded_without_a_net),
        ("flight_record", "RecursionError", records_are_decoded_without_a_net),
        ("data_member", "MemoryError", a_read_may_name_any_number_of_pages),
        ("data_member", "was not granted", a_grant_is_no_secret),
        ("data_member", "was not granted", a_run_may_reach_beyond_its_page),
        ("page_file", "nobody has written", a_page_is_whatever_lies_under_its_name),
        ("replica_document", "AssertionError", a_prefill_may_have_no_shards),
    )
}


def broken_target(name: str) -> Target:
    broken = BREAKS[name]
    target = TARGETS[broken.target]

    def open_broken() -> Run:
        broken.put_in().__enter__()  # until the process ends
        return target.open()

    return replace(target, name=name, open=open_broken, seeds=target.entries, max_findings=1)


BROKEN_TARGETS = {name: broken_target(name) for name in BREAKS}
