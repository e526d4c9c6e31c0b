"""One server on two hosts, which are two addresses of this machine: two `tandem serve`, ended whatever happens."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import MODEL, START_S, Server, eventually, show_logs

from tandem.cli.fleet import Fleet, Member, serve_words
from tandem.cli.ports import free_ports

POOL = ("--max-total-tokens", "8192")
ADDRESSES = ("127.0.0.1", "127.0.0.2")


@dataclass
class TwoHosts:
    fleet: Fleet
    leader: Server
    follower: Server
    meeting: str

    @property
    def members(self) -> list[Member]:
        return [self.leader.member, self.follower.member]


def host_words(node_rank: int, meeting: str, port: int, flags: Sequence[str], model: str = MODEL) -> list[str]:
    spread = ("--nnodes", "2", "--node-rank", str(node_rank), "--dist-init-addr", meeting)
    return serve_words(model, port, "--host", ADDRESSES[node_rank % 2], *POOL, *spread, *flags)


def start_hosts(
    fleet: Fleet, flags: Sequence[str], *, name: str = "server", follower_flags: Sequence[str] | None = None
) -> TwoHosts:
    """Not waited for."""
    port, other_port, meeting_port = free_ports(3)
    meeting = f"127.0.0.1:{meeting_port}"
    words = host_words(0, meeting, port, flags), host_words(1, meeting, other_port, follower_flags or flags)
    leader = Server(fleet.start(f"{name}-rank0", words[0], port=port))
    follower = Server(fleet.start(f"{name}-rank1", words[1], port=other_port))
    return TwoHosts(fleet, leader, follower, meeting)


@contextmanager
def two_hosts(folder: Path, *flags: str) -> Iterator[TwoHosts]:
    """Ready."""
    with Fleet(folder, engines=1) as fleet:
        try:
            found = start_hosts(fleet, flags)
            eventually(found.leader.is_ready, within_s=START_S)
            yield found
        except BaseException:
            show_logs(fleet)
            raise


def error_line(server: Server) -> str:
    (line,) = [line for line in server.log.splitlines() if line.startswith("tandem: error: ")]
    return line.removeprefix("tandem: error: ")


def ends(server: Server, code: int, *, within_s: float = 60.0) -> None:
    """Raises AssertionError, with its log, unless it ends with this code."""
    eventually(lambda: server.member.process.poll() is not None, within_s=within_s, what=lambda: server.log)
    if server.member.process.returncode != code:
        print(server.log, file=sys.stderr)
    assert server.member.process.returncode == code
