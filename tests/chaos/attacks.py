"""Attackers beside the faults: programs on the same machine that reach every port and hold no secret.

    attack_ports.py       control and data ports: noise, silence, drips, deep nesting, hellos in the names of genuine
                          servers, recorded connections said again, reads of guessed rooms
    attack_bootstrap.py   a bootstrap server of theirs, and requests that send decodes there
    attack_http.py        hostile requests to router, servers and bootstrap servers

They check for themselves that they got nothing: what a connection heard beyond a handshake, a page of somebody else, an
answer that is not a refusal is a *violation*, told with the bytes. What they did to others is seen by the genuine
clients and by what is left behind, as with faults.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from proxy import LOOPBACK

HANDSHAKE_BYTES = 1024  # more than any handshake, less than a page
MAX_AT_ONCE = 12  # attacks
SHOWN_BYTES = 160
MAX_VIOLATIONS = 20
HUNG_UP = (OSError, TimeoutError, EOFError)  # as whoever is killed or paused does, and whoever defends himself

Attack = Callable[[], Awaitable[None]]


@dataclass
class Attacks:
    """What was tried so far, and what should not have worked."""

    random: Random
    tried: Counter[str] = field(default_factory=Counter)
    connections: int = 0
    heard_bytes: int = 0
    violations: list[str] = field(default_factory=list)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_AT_ONCE))
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    def violate(self, kind: str, what: str) -> None:
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(f"{kind}: {what}")

    def hear(self, kind: str, heard: bytes) -> None:
        """A connection that proves nothing is told who is there, and nothing else."""
        self.heard_bytes += len(heard)
        if len(heard) > HANDSHAKE_BYTES:
            self.violate(kind, f"heard {len(heard)} bytes, among them {heard[-SHOWN_BYTES:]!r}")

    async def each_once(self, attacks: Mapping[str, Attack]) -> None:
        """All kinds, a few at a time."""
        kinds = list(attacks)
        self.random.shuffle(kinds)
        await asyncio.gather(*(self._run(kind, attacks[kind]) for kind in kinds))

    async def until(self, over: Callable[[], bool], attacks: Mapping[str, Attack], *, every_s: float) -> None:
        """One kind after another, not waiting for their ends but in the end."""
        while not over():
            kinds = list(attacks)
            self.random.shuffle(kinds)
            for kind in kinds:
                if over():
                    break
                task = asyncio.create_task(self._run(kind, attacks[kind]))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                await asyncio.sleep(every_s * self.random.uniform(0.5, 1.5))
        await asyncio.gather(*self._running)

    async def _run(self, kind: str, attack: Attack) -> None:
        async with self._slots:
            self.tried[kind] += 1
            try:
                await attack()
            except HUNG_UP:
                pass
            except Exception as error:
                self.violate(kind, f"the attack itself has failed: {error!r}")

    async def together(self, talks: Iterable[Awaitable[object]]) -> None:
        """All at once; some may be hung up on."""
        for error in await asyncio.gather(*talks, return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, HUNG_UP):
                raise error

    def words(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.tried.items()))
        return f"{kinds}; {self.connections} connections, {self.heard_bytes} bytes heard"

    @contextlib.asynccontextmanager
    async def connection(self, port: int):  # type: ignore[no-untyped-def]  # a context manager over both streams
        """Streams to a port on this machine; closed in any case."""
        reader, writer = await asyncio.wait_for(asyncio.open_connection(LOOPBACK, port), 5.0)
        self.connections += 1
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def talk(self, kind: str, port: int, *pieces: bytes, pause_s: float = 0.0, hold_s: float = 0.5) -> bytes:
        """Connect, say these pieces, and listen for a while. What was heard, which `hear` has judged."""
        heard = b""
        async with self.connection(port) as (reader, writer):
            with contextlib.suppress(OSError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    if pause_s:
                        await asyncio.sleep(pause_s)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(hold_s):
                    while len(heard) <= 1 << 20 and (piece := await reader.read(1 << 16)):
                        heard += piece
        self.hear(kind, heard)
        return heard
