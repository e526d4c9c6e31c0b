"""Ports for servers that are about to start: two processes never get the same one."""

import socket
import subprocess
import sys

from tandem.cli.ports import BLOCK, PORTS, PortBlocks, free_ports, hold

TAKE = "from tandem.cli.ports import free_ports; print(*free_ports(30), flush=True); input()"


def test_processes_side_by_side_get_different_ports() -> None:
    words = [sys.executable, "-c", TAKE]
    others = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    taken = free_ports(30)
    for other in others:
        assert other.stdout is not None
        taken += map(int, other.stdout.readline().split())
    for other in others:
        other.communicate("\n", timeout=60)
    assert len(set(taken)) == len(taken) == 120
    assert set(taken) <= set(PORTS)


def test_a_process_gets_none_twice() -> None:
    taken = [port for _ in range(10) for port in free_ports(BLOCK // 3)]
    assert len(set(taken)) == len(taken)


def test_a_port_that_somebody_listens_on_is_left_out() -> None:
    blocks = PortBlocks()
    (first,) = blocks.take(1)
    with socket.create_server(("127.0.0.1", first + 1)):
        assert blocks.take(2) == [first + 2, first + 3]


def test_a_name_is_held_by_one_and_free_when_that_one_is_gone() -> None:
    held = hold("tandem-test")
    assert held is not None
    assert hold("tandem-test") is None
    held.close()
    again = hold("tandem-test")
    assert again is not None
    again.close()
