"""However many ask, the engine is probed once at a time and once per interval."""

import asyncio
from dataclasses import dataclass, field

import pytest
from api_fakes import Script, ids, world
from test_api_failures import run, until

from tandem.server.api.errors import Problem, Refusal
from tandem.server.api.probe import SharedProbe


@dataclass
class Probed:
    """A probe that ends when it is told to, and a clock that stands still until it is set."""

    now: int = 0
    runs: int = 0
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        self.runs += 1
        number = self.runs
        await self.may_end.wait()
        if number == 3:
            raise Refusal(Problem.NOT_READY, "the third one fails")
        return number

    def shared(self) -> SharedProbe[int]:
        return SharedProbe(self.run, interval_ns=1000, now_ns=lambda: self.now)


def test_all_who_ask_meanwhile_share_one_probe() -> None:
    async def story() -> None:
        probed = Probed()
        shared = probed.shared()
        asking = [asyncio.ensure_future(shared.answer()) for _ in range(50)]
        await asyncio.sleep(0)
        probed.now = 10_000  # one that takes long is not doubled
        asking += [asyncio.ensure_future(shared.answer())]
        await asyncio.sleep(0)
        probed.may_end.set()
        assert await asyncio.gather(*asking) == [1] * 51
        assert probed.runs == 1

    asyncio.run(story())


def test_the_next_one_begins_an_interval_after_the_last_one_did() -> None:
    async def story() -> None:
        probed = Probed()
        probed.may_end.set()
        shared = probed.shared()
        found = []
        for probed.now in (0, 1, 999, 1000, 1999, 2500):
            try:
                found.append(await shared.answer())
            except Refusal as refusal:
                found.append(refusal.failure.code)
        assert found == [1, 1, 1, 2, 2, Problem.NOT_READY]
        probed.now = 3000
        with pytest.raises(Refusal):
            await shared.answer()
        assert probed.runs == 3

    asyncio.run(story())


def test_who_leaves_takes_the_probe_from_nobody() -> None:
    async def story() -> None:
        probed = Probed()
        shared = probed.shared()
        first, second = (asyncio.ensure_future(shared.answer()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        probed.may_end.set()
        assert await second == 1
        assert await shared.answer() == 1

    asyncio.run(story())


def test_a_crowd_without_a_key_costs_the_engine_one_step() -> None:
    async def story(w, http) -> None:
        asking = [asyncio.ensure_future(http.get("/health_generate")) for _ in range(40)]
        await until(lambda: w.node.submits)
        request = w.node.submits[0].request.id
        w.node.end(request, w.node.finish(request, Script(ids("a"))))
        answers = await asyncio.gather(*asking)
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["checked"] for answer in answers} == {"engine"}
        assert len(w.node.submits) == 1
        assert (await http.get("/health_generate")).status_code == 200
        assert len(w.node.submits) == 1
        assert w.client.num_live == 0

    run(story, world(lambda request, payload: Script(is_silent=True)))
