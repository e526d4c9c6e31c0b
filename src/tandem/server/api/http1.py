"""HTTP/1.1 as uvicorn speaks it, for clients that offer to change to HTTP/2.

Java's own client, and what builds on it, sends `Upgrade: h2c` with each first request and takes an answer in HTTP/1.1
as a no. But the parser takes the offer for an agreement and never reads the body. So the offer is made unreadable.
"""

import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

OFFER = re.compile(rb"\r\nupgrade:(?=[ \t]*h2c[ \t]*\r\n)", re.IGNORECASE)


class Http1(HttpToolsProtocol):
    """No valid JSON body holds such a line, so only heads are changed; a head that comes in two parts may escape."""

    def data_received(self, data: bytes) -> None:
        super().data_received(OFFER.sub(b"\r\nrefused:", data) if b"h2c" in data else data)
