"""A socket that listens lets nobody in any more, and who is in stays."""

import socket
import subprocess
import sys

PROGRAM = """
import socket, sys
from tandem.engine.closed_doors import close_doors
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
known, _ = server.accept()
assert close_doors() == 1
later = socket.create_server(("127.0.0.1", 0))
known.sendall(str(later.getsockname()[1]).encode())
print(known.recv(10).decode(), flush=True)
newcomer, _ = later.accept()
newcomer.sendall(b"welcome")
sys.stdin.read()
"""


def test_who_is_in_stays_and_nobody_else_gets_in_but_at_doors_that_open_later() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdin is not None
    assert program.stdout is not None
    port = int(program.stdout.readline())
    with socket.create_connection(("127.0.0.1", port), timeout=10) as known:
        later = int(known.recv(10))
        with socket.socket() as other:
            other.setblocking(False)
            other.connect_ex(("127.0.0.1", port))
            known.sendall(b"still here")
            assert program.stdout.readline() == "still here\n"
            with socket.create_connection(("127.0.0.1", later), timeout=10) as newcomer:
                assert newcomer.recv(10) == b"welcome"
            assert other.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            assert is_connecting(other), "the kernel has dropped its first packet"
    program.stdin.close()
    assert program.wait(10) == 0


def is_connecting(sock: socket.socket) -> bool:
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == 2  # TCP_SYN_SENT
