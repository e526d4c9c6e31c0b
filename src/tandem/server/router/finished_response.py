"""What a decode has answered to `/v1/responses`, as far as whoever keeps responses wants it.

A worker is another program: an answer that cannot be read is passed on and not kept.
"""

import logging

import msgspec
from msgspec import Raw, Struct

from tandem.server.api.body import NOT_JSON
from tandem.server.api.bounds import MAX_BODY_BYTES
from tandem.server.api.response_store import PendingResponse

ENDINGS = (b"event: response.completed\n", b"event: response.incomplete\n")

log = logging.getLogger("tandem.router")


class Ending(Struct, frozen=True):
    response: Raw


class LastEvent:
    """Finds the event of a stream that has the whole response. Holds one event at most, none but that one for long."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, piece: bytes) -> bytes:
        """The data of that event once all of it has come; else nothing."""
        start = max(0, len(self._held) - 1)
        self._held += piece
        found = b""
        while (end := self._held.find(b"\n\n", start)) >= 0:
            if self._held.startswith(ENDINGS):
                found = bytes(self._held[:end]).partition(b"\ndata: ")[2]
            del self._held[: end + 2]
            start = 0
        if len(self._held) > MAX_BODY_BYTES:  # no event of a server that keeps to its own bounds
            self._held.clear()
        return found


def keep_event(conversation: PendingResponse, data: bytes) -> None:
    """In any thread."""
    try:
        document = bytes(msgspec.json.decode(data, type=Ending).response)
    except NOT_JSON as error:
        log.warning("a response is not kept: %s", error)
        return
    keep_document(conversation, document)


def keep_document(conversation: PendingResponse, document: bytes) -> None:
    """In any thread."""
    try:
        conversation.keep(document)
    except NOT_JSON as error:
        log.warning("a response is not kept: %s", error)
