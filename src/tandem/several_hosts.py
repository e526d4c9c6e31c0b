"""One server on several hosts: which of its workers run where, and what is wrong with the flags that say so.

Workers are numbered as SGLang does, DP rank by DP rank, stage by stage, shard by shard, and spread evenly over the
hosts in this order. Node rank 0 has the API and the nodes, whatever workers it has.
"""

from ipaddress import ip_address
from typing import Protocol

NAMES = "--nnodes, --node-rank and --dist-init-addr"


class Spread(Protocol):
    """What a configuration says of it."""

    @property
    def nnodes(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def dist_init_addr(self) -> str | None: ...
    @property
    def dist_timeout(self) -> float: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def sizes(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def cluster_secret_file(self) -> str | None: ...


def host_of(worker: int, *, num_workers: int, nnodes: int) -> int:
    """The node rank of the host on which this worker runs; `worker`: its number among those of all replicas."""
    return worker // (num_workers // nnodes)


def address(text: str) -> tuple[str, int] | None:
    """`HOST:PORT`, an IPv6 address in brackets; None: it is not that."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    return (host, int(port)) if host and is_port else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach who listens there. Other names are not looked up: they count as reachable."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def complaints(config: Spread) -> list[str]:
    """A sentence for each rule that is broken."""
    if config.nnodes < 1:
        return ["--nnodes must be at least 1"]
    if config.nnodes == 1:
        is_alone = config.node_rank == 0 and config.dist_init_addr is None
        return [] if is_alone else [f"{NAMES} go together: without --nnodes a server is on one host"]
    found: list[str] = []
    if not 0 <= config.node_rank < config.nnodes:
        found.append(f"--node-rank must be from 0 to {config.nnodes - 1}, one less than --nnodes")
    if config.num_workers % config.nnodes:
        found.append(
            f"{config.num_workers} workers ({config.sizes}) cannot be spread evenly over --nnodes {config.nnodes} hosts"
        )
    if config.dist_timeout <= 0:
        found.append("--dist-timeout must be positive")
    where = None if config.dist_init_addr is None else address(config.dist_init_addr)
    if where is None:
        found.append("--nnodes needs --dist-init-addr HOST:PORT, where node rank 0 is found by all hosts")
    elif not is_loopback(where[0]):
        found += _open_to_others(config)
    return found


def _open_to_others(config: Spread) -> list[str]:
    found: list[str] = []
    if config.cluster_secret_file is None:
        found.append("a server on several hosts needs --cluster-secret-file, the same on all of them")
    if config.role != "unified" and is_loopback(config.host):
        found.append(
            f"KV of a worker at --host {config.host} is out of reach of other hosts: give every host an address of "
            "its own, or 0.0.0.0"
        )
    return found
