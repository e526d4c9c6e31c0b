"""Attacks on control and data ports. Both are found as any program on the machine can find them: they listen."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from arena import Arena, Target
from attacks import Attack, Attacks
from leaks import processes
from proxy import Link

from attackers import framed, hello_of, nested
from data_planes import pack_read
from tandem.core.values import Incarnation
from tandem.transfer import protocol

LISTENS = "0A"
FLOOD = 40
DRIP_S = 0.05
HOLD_S = 3.0
GUESSED_ROOMS = 16


def listening(pid: int) -> list[int]:
    """TCP ports on which a process listens."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{entry}").removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS and row[9] in inodes]


def ports_of(target: Target) -> dict[str, int]:
    """`control` and `data` of one server, as far as it runs.

    Not the workers that are about to meet: gloo takes whoever comes then, and keeps a descriptor of each for as long as
    the worker lives. Those of a server that has started take nobody any more.
    """
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for name, pid in processes(target.pid):
            kind = {"process": "control", "worker_process": "data"}.get(name)
            if kind == "data" and target.has_groups and target.is_impaired:
                continue
            for port in listening(pid) if kind else ():
                found[str(kind)] = port
    return found


class PortAttacks:
    def __init__(self, it: Arena, attacks: Attacks) -> None:
        self._it, self._attacks = it, attacks
        self._random = attacks.random

    def kinds(self) -> Mapping[str, Attack]:
        return {
            "noise": self.noise,
            "silence": self.silence,
            "drip": self.drip,
            "nested hello": self.nested_hello,
            "another's name": self.another_name,
            "recorded": self.recorded,
            "guessed rooms": self.guessed_rooms,
        }

    def _ports(self, kind: str | None = None) -> Iterator[int]:
        """Of a server that is chosen now; all of them, or those of one kind."""
        found = ports_of(self._random.choice(self._it.targets))
        yield from (port for name, port in found.items() if kind in (None, name))

    async def _everywhere(self, name: str, *pieces: bytes, kind: str | None = None, **options: float) -> None:
        ports = list(self._ports(kind))
        await self._attacks.together(self._attacks.talk(name, port, *pieces, **options) for port in ports)

    async def noise(self) -> None:
        sizes = [self._random.choice((1, 4, 60, 1_000, 100_000)) for _ in range(FLOOD)]
        ports = list(self._ports())
        talks = [self._attacks.talk("noise", port, self._random.randbytes(size)) for port in ports for size in sizes]
        await self._attacks.together(talks)

    async def silence(self) -> None:
        """As many connections as a server keeps for those who have said nothing yet, and more."""
        ports = list(self._ports())
        talks = [self._attacks.talk("silence", port, hold_s=HOLD_S) for port in ports for _ in range(3 * FLOOD)]
        await self._attacks.together(talks)

    async def drip(self) -> None:
        """A hello, byte by byte."""
        hello = framed(msgspec.msgpack.encode(hello_of(Incarnation("drip", "d" * 32))))
        pieces = [hello[at : at + 1] for at in range(len(hello))]
        ports = list(self._ports())
        talks = [self._attacks.talk("drip", port, *pieces, pause_s=DRIP_S) for port in ports for _ in range(8)]
        await self._attacks.together(talks)

    async def nested_hello(self) -> None:
        depth = self._random.choice((100, 1_200, 5_000))
        await self._everywhere("nested hello", nested(depth), kind="control")

    async def another_name(self) -> None:
        """In the name of a server that is there, which its prefill's bootstrap server tells everybody."""
        for who in self._it.known_incarnations():
            hello = framed(msgspec.msgpack.encode(hello_of(who)))
            await self._everywhere("another's name", hello, framed(b"\xc0" * 60), kind="control")

    async def recorded(self) -> None:
        """What a genuine dialler has said on a link, once more, to the same port."""
        links: list[Link] = [link for link in self._it.links.values() if link.is_damageable and link.recorded]
        for link in self._random.sample(links, min(2, len(links))):
            said = self._random.choice(list(link.recorded))
            await self._attacks.talk("recorded", link.target_port, bytes(said))

    async def guessed_rooms(self) -> None:
        """Reads without a proof: by rooms that may be there, and with a secret that is none."""
        digest = self._random.randbytes(protocol.DIGEST_BYTES)
        hello = protocol.Hello(
            version=protocol.VERSION,
            page_bytes=1 << 14,
            incarnation=protocol.incarnation_digest(self._random.choice(self._it.known_incarnations() or [NOBODY])),
            reader=digest,
            challenge=bytes(protocol.CHALLENGE_BYTES),
            proof=self._random.randbytes(protocol.PROOF_BYTES),
        )
        secret = self._random.randbytes(protocol.GRANT_SECRET_BYTES)
        rooms = [self._random.randrange(1, 1 << 10) for _ in range(GUESSED_ROOMS)]
        reads = [pack_read(room, secret, tuple(range(8)), (1,) * 8) for room in rooms]
        await self._everywhere("guessed rooms", protocol.pack_hello(hello), *reads, kind="data")


NOBODY = Incarnation("nobody", "0" * 32)
