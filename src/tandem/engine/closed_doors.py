"""Sockets that listen and are to accept nobody any more, although the library that owns them will not close them.

A classic BPF filter on a listening socket sees the packets of newcomers only: connections that are established have
sockets of their own. One that takes zero bytes of every packet drops them: nobody gets in, the owner notices nothing.
"""

import ctypes
import os
import socket
import struct
from collections.abc import Iterator

SO_ATTACH_FILTER, SO_LOCK_FILTER = 26, 44  # linux/socket.h; the standard library has no names for them
BPF_RET = 0x06
DROP = struct.pack("HBBI", BPF_RET, 0, 0, 0)  # one instruction: return 0


def close_doors() -> int:
    """Of this process, all TCP sockets that listen now. Returns how many. Raises OSError."""
    program = ctypes.create_string_buffer(DROP)
    fprog = struct.pack("HP", 1, ctypes.addressof(program))
    count = 0
    for sock in listening():
        with sock:
            sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, fprog)
            sock.setsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER, 1)
            count += 1
    return count


def listening() -> Iterator[socket.socket]:
    """Duplicates, to be closed by the caller."""
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket, or gone since
            continue
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
        if is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield sock
        else:
            sock.close()
