"""The way to NIXL, which an extra brings: it is loaded when it is needed first, for that takes a second."""

import threading
from importlib import import_module
from typing import Any, Protocol  # a module that may not be there

from tandem.transfer.copy_source import CopySource
from tandem.transfer.protocol import Registered

_loading = threading.Lock()


class Unavailable(Exception):
    """NIXL is not to be had here, for a reason that it says."""


class RegisteredMemory(Protocol):
    """Of an owner."""

    registered: Registered

    def close(self) -> None:
        """Nothing reads it by NIXL after this."""
        ...


class NixlSource(CopySource, Protocol):
    """Of a reader: what one worker of a peer has registered."""

    num_links: int  # the caller's to count

    def may_end(self) -> bool:
        """Nothing is under way, and nothing is begun any more."""
        ...

    def end(self) -> None: ...


def try_out() -> None:
    """Raises Unavailable where it will not work, and else makes the next agent quick."""
    _load().Agent("127.0.0.1", is_owner=False).destroy()


def register(buffer: memoryview, *, host: str) -> RegisteredMemory:
    """host: the server's address. Raises Unavailable."""
    return _load().OwnerMemory(buffer, host=host)


def source(registered: Registered, *, page_bytes: int, host: str, slot_bytes: int, timeout_s: float) -> NixlSource:
    """host: this server's address; slot_bytes: that are read at once, at most. Raises Unavailable and Malformed."""
    settings = {"page_bytes": page_bytes, "host": host, "slot_bytes": slot_bytes, "timeout_s": timeout_s}
    return _load().ReadMemory(registered, **settings)


def _load() -> Any:
    try:
        with _loading:
            return import_module("tandem.transfer.nixl_memory")
    except ImportError as error:
        raise Unavailable(f"NIXL cannot be loaded: {error}") from error
