"""Hosts of a test: network namespaces of their own, each joined to every other by a cable that can be pulled.

    with several_hosts("left", "right", "front") as hosts:
        with hosts["front"].inside():  # what this thread connects to, and starts, is on that host
            ...
        with unplugged(hosts["left"], hosts["right"]):
            ...

Needs what only root may do, and `ip` of iproute2.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")


@dataclass(frozen=True)
class Host:
    name: str
    namespace: str
    address: str  # where all others find it

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread only. Sockets stay on the host on which they were made."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(NAMESPACES / self.namespace)
            try:
                yield
            finally:
                _enter(Path(f"/proc/self/fd/{before}"))
        finally:
            os.close(before)

    def cable_to(self, other: "Host") -> str:
        """The name of its end of it."""
        return f"to-{other.name}"


@contextmanager
def several_hosts(*names: str) -> Iterator[dict[str, Host]]:
    """Skips the test where this machine lets us make none."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("hosts of its own need root and `ip` (iproute2)")
    found = {
        name: Host(name, f"tandem-{os.getpid()}-{name}", f"10.98.0.{number}") for number, name in enumerate(names, 1)
    }
    with ExitStack() as ends:
        for host in found.values():
            done = ip("netns", "add", host.namespace, check=False)
            if done.returncode:
                pytest.skip(f"hosts of its own: {done.stderr.strip()}")
            ends.callback(ip, "netns", "del", host.namespace)
            ip("-n", host.namespace, "link", "set", "lo", "up")
            ip("-n", host.namespace, "address", "add", f"{host.address}/32", "dev", "lo")
        for one, other in combinations(found.values(), 2):
            ends_of_it = (one.cable_to(other), "netns", one.namespace), (other.cable_to(one), "netns", other.namespace)
            ip("link", "add", *ends_of_it[0], "type", "veth", "peer", "name", *ends_of_it[1])
            plug(one, other)
        yield found


@contextmanager
def unplugged(one: Host, other: Host) -> Iterator[None]:
    """What is sent is lost, and nobody is told."""
    ip("-n", one.namespace, "link", "set", one.cable_to(other), "down")
    try:
        yield
    finally:
        plug(one, other)


def plug(one: Host, other: Host) -> None:
    for here, there in ((one, other), (other, one)):
        ip("-n", here.namespace, "link", "set", here.cable_to(there), "up")
    for here, there in ((one, other), (other, one)):  # routes go with a cable that is pulled
        route = (f"{there.address}/32", "dev", here.cable_to(there), "src", here.address)
        ip("-n", here.namespace, "route", "replace", *route)


def ip(*words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


def _enter(namespace: Path) -> None:
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(descriptor)
