"""Peers that accept connections and say nothing, beside one that is well."""

import select
import socket
from contextlib import ExitStack

from transfer_world import eventually, pair

from data_planes import introduce
from tandem.core.events import TransferFailed
from tandem.core.values import Incarnation

IO_TIMEOUT_S = 4.0


def test_frozen_peers_do_not_hold_up_a_healthy_one() -> None:
    """As many as there are threads, each with many requests: none of these has failed when the healthy one is done."""
    with ExitStack() as stack:
        owner, reader = stack.enter_context(pair(io_timeout_s=IO_TIMEOUT_S, max_transfers=4))
        for number in range(4):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            frozen = Incarnation(f"frozen-{number}", "1")
            introduce(reader.transfer, frozen, "127.0.0.1", listener.getsockname()[1], "")
            for request in range(100 * number, 100 * number + 10):
                reader.pull(1000 + request, [0], [1 + number], bytes(8), peer=frozen)
        reader.pull(1, [0], [0], owner.publish(1, [0]))
        reader.wait_landed(1, 1)
        assert not [event for event in reader.events if isinstance(event, TransferFailed)]


def test_what_waits_behind_a_frozen_peer_gives_up_with_it() -> None:
    """Many times as many as threads: nobody who came before a job began tries again what has frozen that job, so that
    all have failed after two timeouts at most."""
    with ExitStack() as stack:
        _, reader = stack.enter_context(pair(io_timeout_s=1.0, max_transfers=2))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        frozen = Incarnation("frozen", "1")
        introduce(reader.transfer, frozen, "127.0.0.1", listener.getsockname()[1], "")
        for request in range(20):
            reader.pull(request, [0], [request], bytes(8), peer=frozen)
        eventually(lambda: sum(isinstance(e, TransferFailed) for e in reader.events) == 20, "all have failed")
        ready, _, _ = select.select([listener], [], [], 0)
        accepted = 0
        while ready:
            listener.accept()[0].close()
            accepted += 1
            ready, _, _ = select.select([listener], [], [], 0)
        assert 2 <= accepted <= 4, "two at once, and two more for those who came while these had begun"


def test_who_comes_while_a_peer_is_frozen_has_a_turn_after_it() -> None:
    """The thread that met the frozen peer is one too many then, and ends: another one has to hear of it."""
    with ExitStack() as stack:
        _, reader = stack.enter_context(pair(io_timeout_s=0.5, max_transfers=1))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        frozen = Incarnation("frozen", "1")
        introduce(reader.transfer, frozen, "127.0.0.1", listener.getsockname()[1], "")
        reader.pull(1, [0], [1], bytes(8), peer=frozen)
        with listener.accept()[0]:
            reader.pull(2, [0], [2], bytes(8), peer=frozen)
            reader.wait_failed(1)
            reader.wait_failed(2)
