"""The prefill delayers of ranks that step together: `DelayerSync` on the event loop of who started them."""

import asyncio
from collections.abc import Callable

from tandem.core.commands import GatherLoad
from tandem.core.events import LoadsGathered, LoadWanted
from tandem.core.scheduler.delayer_sync import DelayerSync, Mail
from tandem.core.settings import DelayerSettings
from tandem.core.values import SECOND, Nanos


class Gathering:
    """`send` takes a message to the node of a rank. Where a rank is silent a timer closes the pass."""

    def __init__(
        self,
        settings: DelayerSettings,
        send: Callable[[int, LoadWanted | LoadsGathered], None],
        now: Callable[[], Nanos],
    ) -> None:
        self._sync = DelayerSync(settings)
        self._send = send
        self._now = now
        self._timer: asyncio.TimerHandle | None = None

    def say(self, rank: int, command: GatherLoad) -> None:
        self._post(self._sync.say(rank, command.number, command.load, self._now()))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._post(self._sync.tick(self._now()))

    def _post(self, mail: Mail) -> None:
        for rank, event in mail:
            self._send(rank, event)
        self.close()
        if self._sync.closes_at is not None:
            left_s = max(0, self._sync.closes_at - self._now()) / SECOND
            self._timer = asyncio.get_running_loop().call_later(left_s, self._tick)
