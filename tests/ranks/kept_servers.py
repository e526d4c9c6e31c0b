"""Servers that stay for the next pair: of all pairs of so many cuts, each server is started about once.

A start takes longer than what a pair is asked, the more so the more workers there are. And a prefill that lends to
decodes which are cut in every way, one after the other, is what a cluster has.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster import START_S, Cluster, Server, bootstrap_port, show_logs, start_half

from tandem.cli.fleet import Fleet, listen

COMPUTING = 2  # engines: those of the pair that is asked
KEPT = {"prefill": 8, "decode": 1}  # servers
Words = tuple[str, ...]  # flags of one server


@dataclass(slots=True)
class KeptServers:
    """As many of each mode as `KEPT` says: those that were asked last."""

    folder: Path  # for logs
    flags: Words  # of every server
    fleets: dict[tuple[str, Words], Fleet] = field(default_factory=dict[tuple[str, Words], Fleet])  # of one server each

    @contextmanager
    def pair(self, prefill: Sequence[str], decode: Sequence[str]) -> Iterator[Cluster]:
        """The two and a router of their own, ready, with nothing cached. After a failure they are started anew."""
        ours = ("prefill", tuple(prefill)), ("decode", tuple(decode))
        try:
            left, right = [ready(fleet) for fleet in [self._asked(*one) for one in ours]]
            flush_cache(left)
            flush_cache(right)
            with Fleet(self.folder, COMPUTING) as routers:
                urls = [left.url, str(bootstrap_port(left)), "--decode", right.url]
                routers.start_router(["router", "--prefill", *urls], listen(0))
                yield Cluster(routers, [left], [right], ready(routers))
        except BaseException:
            for one in ours:
                if one in self.fleets:
                    show_logs(self.fleets[one])
                    self._end(*one)
            raise

    def end(self) -> None:
        for one in list(self.fleets):
            self._end(*one)

    def _asked(self, mode: str, words: Words) -> Fleet:
        """Last of its mode now."""
        fleet = self.fleets.pop((mode, words), None) or self._start(mode, words)
        self.fleets[mode, words] = fleet
        alike = [one for one in self.fleets if one[0] == mode]
        for one in alike[: -KEPT[mode]]:
            self._end(*one)
        return fleet

    def _start(self, mode: str, words: Words) -> Fleet:
        fleet = Fleet(self.folder, COMPUTING)
        name = "-".join([mode, *(word.strip("-") for word in words)])
        start_half(fleet, mode, [*self.flags, *words], name=name)
        return fleet

    def _end(self, mode: str, words: Words) -> None:
        with self.fleets.pop((mode, words)):
            pass


def ready(fleet: Fleet) -> Server:
    """Its only member."""
    fleet.wait_ready(timeout_s=START_S)
    (member,) = fleet.members
    return Server(member)


def flush_cache(server: Server) -> None:
    with server.open("POST", "/flush_cache") as reply:
        assert reply.status == 200


@contextmanager
def kept_servers(*flags: str) -> Iterator[KeptServers]:
    """At the end nothing of it runs any more."""
    with tempfile.TemporaryDirectory(prefix="tandem-test-") as folder:
        kept = KeptServers(Path(folder), flags)
        try:
            yield kept
        finally:
            kept.end()
