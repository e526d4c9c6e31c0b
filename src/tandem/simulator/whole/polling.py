"""`selectors`, `select.epoll` and `select.poll` over virtual descriptors; level-triggered, as the kernel's are."""

import select
import selectors
from collections.abc import Iterator, Mapping
from typing import Any  # what a selector keeps for whoever registers

from tandem.core.values import SECOND
from tandem.simulator.whole.kernel import Deadlock, Killed
from tandem.simulator.whole.network import Poll
from tandem.simulator.whole.sockets import Machine

NS_PER_MS = 1_000_000
MAX_TURNS = 2_000  # that find the same to do, one after the other, of which nothing is done


def ready_mask(description: Any, wanted: int) -> int:
    """Of EPOLLIN and EPOLLOUT, those that are wanted and would not block; a broken stream is both."""
    mask = 0
    if wanted & select.EPOLLIN and description.is_readable:
        mask |= select.EPOLLIN
    if wanted & select.EPOLLOUT and description.is_writable:
        mask |= select.EPOLLOUT
    return mask


class VirtualEpoll:
    """`select.epoll`. Registered descriptors that are closed meanwhile fall out."""

    def __init__(self, sizehint: int = -1, flags: int = 0) -> None:
        self._process = Machine.kernel.current().process
        self._wanted: dict[int, tuple[Any, int]] = {}
        self._poll = Poll()
        self._found: list[tuple[int, int, int]] = []  # and how often each has been used
        self._num_alike = 0
        self._alike_since = 0

    def register(self, fd: Any, eventmask: int = select.EPOLLIN | select.EPOLLOUT) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        description = self._process.fds.get(number)
        if description is None:
            raise OSError(9, "Bad file descriptor")
        self._wanted[number] = (description, eventmask)
        description.polls[self._poll] = None  # type: ignore[attr-defined]  # every kind has polls

    def modify(self, fd: Any, eventmask: int) -> None:
        self.register(fd, eventmask)

    def unregister(self, fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        found = self._wanted.pop(number, None)
        if found is not None:
            found[0].polls.pop(self._poll, None)

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        """`timeout` in seconds; None or less than 0: for ever."""
        kernel = Machine.kernel
        endless = timeout is None or timeout < 0
        deadline = None if endless else kernel.now + int((timeout or 0) * SECOND) + bool(timeout)
        kernel.pause()
        self._poll.thread = kernel.current()
        try:
            while not (found := self._ready()):
                if deadline is not None and kernel.now >= deadline:
                    break
                kernel.block(deadline)
        finally:
            self._poll.thread = None
        self._check_use(found)
        return found

    def _check_use(self, found: list[tuple[int, int]]) -> None:
        """Who is told again and again what there is to do, and neither does it nor waits, will never do it."""
        kernel = Machine.kernel
        seen = [(number, mask, self._wanted[number][0].num_used) for number, mask in found]
        if not seen or seen != self._found:
            self._found, self._num_alike, self._alike_since = seen, 0, kernel.now
            return
        self._num_alike += 1
        if self._num_alike > MAX_TURNS and kernel.now - self._alike_since < self._num_alike * NS_PER_MS:
            thread = kernel.current()
            name = f"{thread.process.name} {thread.name}"
            kernel.fail(Deadlock(f"{name} is told again and again of {found}, and does nothing about it"))
            raise Killed(1)

    def _ready(self) -> list[tuple[int, int]]:
        found = []
        for number, (known, wanted) in list(self._wanted.items()):
            description = self._process.fds.get(number)
            if description is None:
                self.unregister(number)
                continue
            if description is not known:  # the socket has dialled since
                self.register(number, wanted)
            if mask := ready_mask(description, wanted):
                found.append((number, mask))
        return found

    def close(self) -> None:
        for number in list(self._wanted):
            self.unregister(number)

    def __enter__(self) -> "VirtualEpoll":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VirtualPoll(VirtualEpoll):
    """`select.poll`, which counts in milliseconds."""

    def __init__(self) -> None:
        super().__init__()

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        try:
            return super().poll(None if timeout is None else timeout / 1000)
        finally:
            self.close()  # nobody uses one twice, and nobody closes one


class VirtualSelector(selectors.BaseSelector):
    """`selectors.DefaultSelector`."""

    def __init__(self) -> None:
        self._epoll = VirtualEpoll()
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if number < 0:
            raise ValueError(f"Invalid file descriptor: {number}")
        if number in self._keys:
            raise KeyError(f"{fileobj!r} is registered")
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._epoll.register(number, _mask_of(events))
        self._keys[number] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = self._keys.pop(self._number(fileobj))
        self._epoll.unregister(key.fd)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[self._number(fileobj)]
        key = key._replace(events=events, data=data)
        self._epoll.register(key.fd, _mask_of(events))
        self._keys[key.fd] = key
        return key

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[self._number(fileobj)]

    def _number(self, fileobj: Any) -> int:
        """Raises KeyError. A closed socket is found by itself, as it has no number any more."""
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if number >= 0:
            return number
        for key in self._keys.values():
            if key.fileobj is fileobj:
                return key.fd
        raise KeyError(f"{fileobj!r} is not registered")

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        timeout = None if timeout is None else max(0.0, timeout)
        found = []
        for number, mask in self._epoll.poll(timeout):
            key = self._keys.get(number)
            if key is not None:
                events = (selectors.EVENT_READ if mask & select.EPOLLIN else 0) | (
                    selectors.EVENT_WRITE if mask & select.EPOLLOUT else 0
                )
                found.append((key, events & key.events))
        return found

    def close(self) -> None:
        self._epoll.close()
        self._keys.clear()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return Registered(self, self._keys)


class Registered(Mapping[Any, selectors.SelectorKey]):
    """By whatever `get_key` takes: asyncio looks here, since Python 3.13."""

    def __init__(self, selector: VirtualSelector, keys: Mapping[int, selectors.SelectorKey]) -> None:
        self._selector, self._keys = selector, keys

    def __getitem__(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.get_key(fileobj)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _mask_of(events: int) -> int:
    return (select.EPOLLIN if events & selectors.EVENT_READ else 0) | (
        select.EPOLLOUT if events & selectors.EVENT_WRITE else 0
    )
