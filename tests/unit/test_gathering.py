"""The gathering of the delayers of ranks that step together, on the event loop."""

import asyncio

from tandem.core.commands import GatherLoad
from tandem.core.events import LoadsGathered, LoadWanted
from tandem.core.rank_load import DelayHistory, RankLoad
from tandem.core.settings import DelayerSettings
from tandem.core.values import MILLISECOND, Nanos
from tandem.server.api.bootstrap import monotonic_now
from tandem.server.api.gathering import Gathering

WANTS, BUSY = RankLoad(is_prefillable=True, num_waiting=3), RankLoad(is_prefillable=False, num_running=2)
Mail = asyncio.Queue[tuple[int, LoadWanted | LoadsGathered]]


def gathering(mail: Mail, *, timeout_ms: int) -> Gathering:
    settings = DelayerSettings(num_ranks=2, gather_timeout_ns=Nanos(timeout_ms * MILLISECOND))
    return Gathering(settings, lambda rank, event: mail.put_nowait((rank, event)), monotonic_now)


def test_all_ranks_hear_what_all_have_said() -> None:
    async def run() -> None:
        mail: Mail = asyncio.Queue()
        it = gathering(mail, timeout_ms=1_000_000)
        it.say(1, GatherLoad(None, WANTS))
        assert await mail.get() == (0, LoadWanted(1))
        it.say(0, GatherLoad(1, BUSY))
        said = LoadsGathered(1, (BUSY, WANTS), DelayHistory())
        assert [await mail.get() for _ in range(2)] == [(0, said), (1, said)]
        it.close()

    asyncio.run(run())


def test_a_rank_that_says_nothing_is_left_out_at_the_deadline() -> None:
    async def run() -> None:
        mail: Mail = asyncio.Queue()
        it = gathering(mail, timeout_ms=1)
        it.say(0, GatherLoad(None, WANTS))
        assert await mail.get() == (1, LoadWanted(1))
        said = LoadsGathered(1, (WANTS,), DelayHistory())
        async with asyncio.timeout(30):
            assert [await mail.get() for _ in range(2)] == [(0, said), (1, said)]
        it.say(0, GatherLoad(None, WANTS))
        assert await mail.get() == (1, LoadWanted(2)), "asked all the same, but nobody waits for it"
        assert await mail.get() == (0, LoadsGathered(2, (WANTS,), DelayHistory()))
        it.close()

    asyncio.run(run())
