"""asyncio's own event loop over virtual sockets; only what it asks of the operating system in person is different."""

import asyncio
import signal
import socket
from collections.abc import Callable
from typing import Any  # as asyncio has it

from tandem.simulator.whole.kernel import Killed
from tandem.simulator.whole.order import Tasks
from tandem.simulator.whole.polling import VirtualSelector
from tandem.simulator.whole.sockets import Machine

WORK_S = 0.002  # at most, that a call in an executor takes


class VirtualLoop(asyncio.SelectorEventLoop):
    """Of one virtual thread."""

    def __init__(self) -> None:
        super().__init__(VirtualSelector())
        self._process = Machine.kernel.current().process
        self.set_task_factory(Tasks())

    def run_forever(self) -> None:
        try:
            super().run_forever()
        except Killed:
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # it ends with its process
            raise

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
        self._process.handlers[sig] = lambda: self._signalled(callback, *args)

    def _signalled(self, callback: Callable[..., Any], *args: Any) -> None:
        if not self.is_closed():
            self.call_soon_threadsafe(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self._process.handlers.pop(signal.Signals(sig), None) is not None

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """A little later, in this thread: what is computed there has no effect but its result."""
        answer: asyncio.Future[Any] = self.create_future()
        self.call_later(Machine.kernel.random.random() * WORK_S, self._work, answer, func, args)
        return answer

    def _work(self, answer: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if answer.done():
            return
        try:
            answer.set_result(func(*args))
        except Exception as error:
            answer.set_exception(error)

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:  # type: ignore[override]  # asyncio names each option
        return await self.run_in_executor(None, lambda: _look_up(host, port))


def _look_up(host: Any, port: Any) -> Any:
    name = host.decode() if isinstance(host, bytes) else host
    return socket.getaddrinfo(name, port)
