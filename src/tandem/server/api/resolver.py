"""Names of hosts to addresses, off the event loop, so that no name holds up another.

A look-up cannot be cancelled: a name server that keeps silent holds its thread for half a minute. So each look-up has a
thread of its own, of which there are `MAX_LOOKUPS`, and not a place in a queue; who finds none is told so at once,
unless the name was found lately: then it is where it was. Who asks for a name under way gets the same answer.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

MAX_LOOKUPS = 32  # threads
MAX_REMEMBERED = 1024
REMEMBERED_S = 600.0

Addresses = Sequence[str]


def addresses_of(name: str) -> Addresses:
    """Blocks. Raises OSError, UnicodeError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class NoThread(Exception):
    """It says nothing of the name: whoever asks again may be answered."""


@dataclass(slots=True, eq=False)
class Resolver:
    """Of one event loop."""

    look_up: Callable[[str], Addresses] = addresses_of  # in a thread
    clock: Callable[[], float] = time.monotonic
    _under_way: "dict[str, asyncio.Future[Addresses]]" = field(default_factory=dict)
    _found: dict[str, tuple[float, Addresses]] = field(default_factory=dict)  # until when; the oldest first

    async def __call__(self, name: str) -> Addresses:
        """Raises OSError, UnicodeError, NoThread."""
        answer = self._under_way.get(name)
        if answer is None:
            if len(self._under_way) >= MAX_LOOKUPS:
                return self._remembered(name)
            answer = self._start(name)
        return await asyncio.shield(answer)  # who gives up does not take the answer from the others

    def _start(self, name: str) -> asyncio.Future[Addresses]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Addresses] = loop.create_future()
        answer.add_done_callback(lambda done: done.exception())  # perhaps nobody waits any more
        self._under_way[name] = answer

        def run() -> None:
            try:
                found: Addresses | BaseException = self.look_up(name)
            except Exception as error:
                found = error
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._end, name, found)

        try:
            threading.Thread(target=run, name="lookup", daemon=True).start()
        except RuntimeError as error:
            del self._under_way[name]  # nobody will ever answer
            raise NoThread(f"the system has no thread left to look {name!r} up") from error
        return answer

    def _end(self, name: str, found: "Addresses | BaseException") -> None:
        answer = self._under_way.pop(name)
        if answer.done():
            return
        if isinstance(found, BaseException):
            answer.set_exception(found)
            return
        self._found.pop(name, None)
        while len(self._found) >= MAX_REMEMBERED:
            del self._found[next(iter(self._found))]
        self._found[name] = (self.clock() + REMEMBERED_S, found)
        answer.set_result(found)

    def _remembered(self, name: str) -> Addresses:
        until, found = self._found.get(name, (0.0, ()))
        if until <= self.clock():
            raise OSError(f"{MAX_LOOKUPS} other names are being looked up")
        return found
