"""Hosts of a test: network namespaces of their own, each joined to every other by a cable that can be pulled.

    with several_hosts("left", "right", "front") as hosts:
        with hosts["front"].inside():  # what this thread connects to, and starts, is on that host
            ...
        with unplugged(hosts["left"], hosts["right"]):
            ...
        with poor(hosts["left"], hosts["right"]):  # late, and not all of it
            ...

Needs what only root may do, and `ip` and `tc` of iproute2.
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
NETEM = ("netem", "delay", "10ms", "5ms", "loss", "2%")
NARROW = ("tbf", "rate", "4mbit", "burst", "8kb", "limit", "12kb")


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
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("hosts of its own need root, `ip` and `tc` (iproute2)")
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


@contextmanager
def poor(one: Host, other: Host) -> Iterator[Callable[[], int]]:
    """Packets are late and some are lost, in both directions; how many, says what is yielded.

    By netem where the kernel has it. Elsewhere the cable is narrow, and loses what its short queue has no room for.
    """
    ends = ((one, one.cable_to(other)), (other, other.cable_to(one)))
    for host, cable in ends:
        queue = ("-n", host.namespace, "qdisc", "replace", "dev", cable, "root")
        if tc(*queue, *NETEM, check=False).returncode:
            tc(*queue, *NARROW)
    try:
        yield lambda: sum(num_lost(host, cable) for host, cable in ends)
    finally:
        for host, cable in ends:
            tc("-n", host.namespace, "qdisc", "del", "dev", cable, "root")


def num_lost(host: Host, cable: str) -> int:
    told = tc("-n", host.namespace, "-s", "qdisc", "show", "dev", cable).stdout
    return sum(map(int, re.findall(r"dropped (\d+)", told)))


def plug(one: Host, other: Host) -> None:
    for here, there in ((one, other), (other, one)):
        ip("-n", here.namespace, "link", "set", here.cable_to(there), "up")
    for here, there in ((one, other), (other, one)):  # routes go with a cable that is pulled
        route = (f"{there.address}/32", "dev", here.cable_to(there), "src", here.address)
        ip("-n", here.namespace, "route", "replace", *route)


def ip(*words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


def tc(*words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["tc", *words], capture_output=True, text=True, check=check)


def _enter(namespace: Path) -> None:
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(descriptor)
