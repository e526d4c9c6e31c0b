"""Puts a link between a decode and the data plane of its prefill, which says itself where its pages are read.

It says so in its greeting, sealed. Who holds the cluster's secret, as the tests do, and sees both hellos pass, can open
the greeting, name the link instead, and seal it again. All else passes as it is.
"""

from collections.abc import Mapping

import msgspec
from cryptography.exceptions import InvalidTag

from tandem.membership import ClusterSecret
from tandem.server.channel import HEAD_BYTES
from tandem.server.node.session import FROM_ACCEPTOR, PURPOSE, Greeting, Seal


class Regreeter:
    """One control connection."""

    def __init__(self, secret: ClusterSecret, ports: Mapping[int, int], *, keeps_unix: bool = False) -> None:
        """ports: of the link by that of the data plane behind it

        keeps_unix: who is on this host reaches the data plane itself, by its unix socket
        """
        self._keeps_unix = keeps_unix
        self._secret = secret
        self._ports = ports
        self._from_dialler = bytearray()  # until its hello is whole
        self._from_acceptor = bytearray()  # what has not been passed on
        self._dialler_hello: bytes | None = None
        self._acceptor_hello: bytes | None = None
        self._is_done = False

    def see_dialler(self, piece: bytes) -> None:
        """What reaches the one that accepted."""
        if self._dialler_hello is None:
            self._from_dialler += piece
            self._dialler_hello = take(self._from_dialler)

    def pass_acceptor(self, piece: bytes) -> bytes:
        """What the one that dialled is to get instead."""
        if self._is_done:
            return piece
        self._from_acceptor += piece
        passed = b""
        while not self._is_done and (body := take(self._from_acceptor)) is not None:
            passed += self._frame(body)
        if self._is_done:
            passed += self._from_acceptor
        return passed

    def _frame(self, body: bytes) -> bytes:
        unchanged = len(body).to_bytes(HEAD_BYTES) + body
        if self._acceptor_hello is None:
            self._acceptor_hello = body
            return unchanged
        self._is_done = True
        key = self._secret.key(PURPOSE, self._dialler_hello or b"", self._acceptor_hello, FROM_ACCEPTOR)
        try:
            greeting = msgspec.msgpack.decode(Seal(key).open(body), type=Greeting)
        except InvalidTag:  # a hello was changed on its way; the dialler finds that too
            return unchanged
        shards = tuple(
            msgspec.structs.replace(
                shard, port=self._ports.get(shard.port, shard.port), unix=shard.unix if self._keeps_unix else ""
            )
            for shard in greeting.shards
        )
        return Seal(key).frame(msgspec.msgpack.encode(msgspec.structs.replace(greeting, shards=shards)))


def take(buffer: bytearray) -> bytes | None:
    """The body of the first frame, out of the buffer; None while it is cut."""
    stop = HEAD_BYTES + int.from_bytes(buffer[:HEAD_BYTES])
    if len(buffer) < max(HEAD_BYTES, stop):
        return None
    body = bytes(buffer[HEAD_BYTES:stop])
    del buffer[:stop]
    return body
