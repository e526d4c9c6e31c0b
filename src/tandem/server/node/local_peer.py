"""The other processes of this server, as its node sees them: one socket each, none of which it can do without."""

import contextlib
import selectors
import socket
from collections.abc import Callable
from typing import Any  # what a local peer says differs with the peer

import msgspec

from tandem.server.channel import ChannelClosed, ChannelFull, PolledChannel
from tandem.server.frames import MalformedFrame


class LocalPeerLost(Exception):
    """A process of this server is gone, or does not keep up: the server ends. An empty reason: it said nothing."""

    def __init__(self, who: str, reason: str) -> None:
        super().__init__(f"{who}: {reason}")
        self.who = who
        self.reason = reason


class SelectorPoller:
    """The sockets of a process and what to call when one is ready."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, sock: socket.socket, mask: int, ready: Callable[[int], None]) -> None:
        """Watch, or change what is watched."""
        try:
            self._selector.modify(sock, mask, ready)
        except KeyError:
            self._selector.register(sock, mask, ready)

    def unwatch(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # never watched, or closed
            self._selector.unregister(sock)

    def poll(self, timeout_s: float | None) -> None:
        for key, mask in self._selector.select(timeout_s):
            key.data(mask)


class LocalPeer:
    """A channel to another process of this server; its loss is the end of the server."""

    def __init__(
        self,
        name: str,
        channel: PolledChannel,  # of whatever this peer says
        poller: SelectorPoller,
        take: Callable[[Any], None],
    ) -> None:
        self._name = name
        self._channel = channel
        self._poller = poller
        self._take = take
        self._mask = 0
        self.is_read = True
        self.watch()

    @property
    def pending_bytes(self) -> int:
        return self._channel.pending_bytes

    def send(self, message: msgspec.Struct | msgspec.Raw) -> None:
        try:
            self._channel.send(message)
        except ChannelFull as error:
            raise LocalPeerLost(self._name, str(error)) from error

    def flush(self) -> None:
        try:
            self._channel.flush()
        except ChannelClosed as error:
            self._read_fatal_message()
            raise LocalPeerLost(self._name, "") from error
        self.watch()

    def watch(self) -> None:
        reads = selectors.EVENT_READ if self.is_read else 0
        mask = reads | (selectors.EVENT_WRITE if self._channel.pending_bytes else 0)
        if mask == self._mask:
            return
        self._mask = mask
        if mask:
            self._poller.watch(self._channel.sock, mask, self._ready)
        else:
            self._poller.unwatch(self._channel.sock)

    def _ready(self, mask: int) -> None:
        """What can be written is, by the `flush` that follows every poll."""
        if mask & selectors.EVENT_READ:
            self._read()

    def _read(self) -> None:
        try:
            messages = self._channel.receive()
        except ChannelClosed as error:
            raise LocalPeerLost(self._name, "") from error
        except MalformedFrame as error:
            raise LocalPeerLost(self._name, f"said something that is no message: {error}") from error
        for message in messages:
            self._take(message)

    def _read_fatal_message(self) -> None:
        """Somebody who closed may have said why."""
        while True:
            try:
                messages = self._channel.receive()
            except (ChannelClosed, MalformedFrame):
                return
            if not messages:
                return
            for message in messages:
                self._take(message)
