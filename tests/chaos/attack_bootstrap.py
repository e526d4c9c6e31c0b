"""A bootstrap server of an attacker, and the requests that make decodes ask it.

What it tells: the genuine document with other endpoints, documents out of bounds, silence, floods. Behind the endpoints
that it names listens somebody who says nothing and is to hear nothing but who calls.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from arena import Arena
from attacks import Attack, Attacks
from proxy import LOOPBACK

HUGE = 10**30
ROOM_BITS = 62
LIMIT_S = 3.0  # of the requests that an attacker sends


class HostileBootstrap:
    """Listens on two ports: as a bootstrap server, and as the endpoints that it names."""

    def __init__(self, it: Arena, attacks: Attacks) -> None:
        self._it, self._attacks = it, attacks
        self._random = attacks.random
        self._servers: list[asyncio.Server] = []
        self.port = self._endpoint = 0
        self._tell: Callable[[], bytes | None] = self._nothing

    async def __aenter__(self) -> "HostileBootstrap":
        for serve in (self._serve, self._listen):
            self._servers.append(await asyncio.start_server(serve, LOOPBACK, 0))
        self.port, self._endpoint = (server.sockets[0].getsockname()[1] for server in self._servers)
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()

    def kinds(self) -> Mapping[str, Attack]:
        tells = {
            "other endpoints": self._other_endpoints,
            "no shards": self._no_shards,
            "out of bounds": self._out_of_bounds,
            "no document": self._junk,
            "no answer": self._nothing,
        }
        return {name: self._lured(name, tell) for name, tell in tells.items()}

    def _lured(self, name: str, tell: Callable[[], bytes | None]) -> Attack:
        async def attack() -> None:
            """A few requests to one decode, whose peers are all to be learned from us."""
            self._tell = tell
            decode = self._random.choice(self._it.of("decode"))
            async with httpx.AsyncClient(timeout=LIMIT_S + 2, trust_env=False, verify=False) as http:
                asks = [http.post(f"{decode.server.url}/generate", json=self._body()) for _ in range(4)]
                for answer in await asyncio.gather(*asks, return_exceptions=True):
                    if isinstance(answer, httpx.Response) and answer.status_code == 500:
                        self._attacks.violate(name, f"answered {answer.status_code}: {answer.text[:200]}")

        return attack

    def _body(self) -> dict[str, Any]:
        """A prompt of its own: whatever its pages hold is for nobody else."""
        prompt = [self._random.randrange(300, 1_000) for _ in range(self._random.randint(20, 60))]
        return {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 4},
            "timeout": LIMIT_S,
            "bootstrap_host": LOOPBACK,
            "bootstrap_port": self.port,
            "bootstrap_room": self._random.getrandbits(ROOM_BITS) | 1,
        }

    # --- what it tells ------------------------------------------------------------------------------------------------

    def _genuine(self) -> dict[str, Any]:
        documents = self._it.known_documents()
        return json.loads(json.dumps(self._random.choice(documents))) if documents else {}

    def _other_endpoints(self) -> bytes:
        document = self._genuine()
        document |= {"control_host": LOOPBACK, "control_port": self._endpoint}
        document["shards"] = [{"host": LOOPBACK, "port": self._endpoint, "unix": ""}]
        return json.dumps(document).encode()

    def _no_shards(self) -> bytes:
        return json.dumps(self._genuine() | {"shards": []}).encode()

    def _out_of_bounds(self) -> bytes:
        document = self._genuine()
        field = self._random.choice(list(document) or ["role"])
        document[field] = self._random.choice((HUGE, -1, "\n" * 9_000, [HUGE], {"id": HUGE}, None, [[]] * 100))
        return json.dumps(document).encode()

    def _junk(self) -> bytes:
        return self._random.choice((b"[" * 100_000, b"\xff\xfe", b"{", b'"' + b"a" * 2_000_000, b"null", b"<html>"))

    def _nothing(self) -> None:
        return None

    # --- connections --------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(2 * LIMIT_S):
                await reader.readuntil(b"\r\n\r\n")
                body = self._tell()
                if body is None:
                    await reader.read()
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.transport.abort()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Who calls says who it is. Nothing more is for whoever cannot prove to be a member."""
        heard = b""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                while piece := await reader.read(1 << 16):
                    heard += piece
        self._attacks.hear("other endpoints", heard)
        writer.transport.abort()
