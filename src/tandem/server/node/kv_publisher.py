"""KV events on a ZeroMQ socket, and the last ones again for who has missed some: vLLM's publisher, frame by frame.

    PUB      topic | number, 8 bytes big endian | batch, msgpack
    ROUTER   request: empty | first number wanted; answers: empty | number | batch, each; last: empty | -1 | nothing

Batches are numbered from 0 when the node gives them away, so whatever becomes of one, the next number shows that it is
missing. The first says AllBlocksCleared: a node that starts anew has nothing, and whoever reads from its number 0 on
knows all that it has. A thread encodes and sends; the node only appends to a bounded queue, and a batch that finds it
full is dropped. ZeroMQ drops, in the same way, what a slow subscriber does not take.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from tandem.core.commands import AnnounceCleared
from tandem.core.values import Incarnation
from tandem.kv_events_config import KvEventsConfig, at_rank
from tandem.server.node.kv_events import CannotPublish, KvAnnouncement, encode

END = (-1).to_bytes(8, "big", signed=True)
BUFFER_BYTES = 64 << 20  # of all batches that are kept to be told again, besides `buffer_steps`
CLOSE_S = 1.0
LINGER_MS = 200  # for what is on its way when the node ends
COMPLAIN_EVERY = 1000  # batches that were dropped


class KvPublisher:
    """Owns its sockets and its thread until `close`."""

    def __init__(
        self, config: KvEventsConfig, *, dp_rank: int, page_size: int, who: Incarnation, note: Callable[[str], None]
    ) -> None:
        """Raises CannotPublish where an endpoint is taken."""
        self._config = config
        self._dp_rank = dp_rank
        self._page_size = page_size
        self._note = note
        self._topic = config.topic.encode()
        self._waiting: deque[tuple[int, float, tuple[KvAnnouncement, ...]]] = deque()
        self._next_number = 0
        self.num_dropped = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._is_closed = False
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        self._open(self._pub, config.endpoint, binds=config.binds)
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.set_hwm(config.buffer_steps + 1)  # one answer to one who reads slowly
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._open(self._replay, config.replay_endpoint, binds=True)
        self._bell, self._ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self.publish([KvAnnouncement(AnnounceCleared())])
        note(
            f"KV events of {who.name} at {at_rank(config.endpoint, dp_rank)}: whoever reads them reads prompts' tokens"
        )

    def publish(self, announced: Sequence[KvAnnouncement]) -> None:
        """Number a batch and have it sent. Never blocks."""
        number, self._next_number = self._next_number, self._next_number + 1
        if len(self._waiting) >= self._config.max_queue_size:
            self.num_dropped += 1
            if self.num_dropped % COMPLAIN_EVERY == 1:
                self._note(f"KV events: {self.num_dropped} batches dropped, the thread that sends them lags behind")
            return
        self._waiting.append((number, time.time(), tuple(announced)))
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        self._wake()
        self._thread.join(CLOSE_S)

    def _open(self, sock: "zmq.Socket[bytes]", endpoint: str, *, binds: bool) -> None:
        place = at_rank(endpoint, self._dp_rank)
        sock.setsockopt(zmq.IPV6, int("[" in place))
        try:
            if binds:
                sock.bind(place)
            else:
                sock.connect(place)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            reason = zmq.strerror(error.errno or 0)
            raise CannotPublish(
                f"cannot publish KV events at {place}: {reason}; choose another endpoint in --kv-events-config"
            ) from None

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it has been rung often enough
            os.write(self._ring, b"\0")

    # --- in the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # the node serves on; its numbers stop
            self._note(f"KV events end: {type(error).__name__} {error}")
        finally:
            self._context.destroy(linger=LINGER_MS)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell in ready:
                os.read(self._bell, 1 << 16)
            self._send_waiting()
            if self._is_closed:
                return
            if self._replay is not None and self._replay in ready:
                self._tell_again(self._replay)

    def _send_waiting(self) -> None:
        while self._waiting:
            number, ts, announced = self._waiting.popleft()
            payload = encode(announced, ts=ts, page_size=self._page_size, dp_rank=self._dp_rank)
            self._keep(number, payload)
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    def _keep(self, number: int, payload: bytes) -> None:
        if self._replay is None:
            return
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._config.buffer_steps or self._kept_bytes > BUFFER_BYTES:
            _, oldest = self._kept.popleft()
            self._kept_bytes -= len(oldest)

    def _tell_again(self, replay: "zmq.Socket[bytes]") -> None:
        """All that is kept from a number on. Who goes, or does not read, gets no end and asks again."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        who, first = frames[0], int.from_bytes(frames[2], "big")
        try:
            for number, payload in self._kept:
                if number >= first:
                    replay.send_multipart((who, b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            replay.send_multipart((who, b"", END, b""), zmq.NOBLOCK)
        except zmq.ZMQError:
            return
