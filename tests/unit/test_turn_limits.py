"""A burst is begun a little in each turn of the event loop, in its order."""

import asyncio
from collections import Counter
from collections.abc import Callable

from tandem.server.api.turn_limits import REQUESTS_PER_TURN, Turns

BURST = 80 * REQUESTS_PER_TURN


class One:
    """Begins with its number."""

    def __init__(self, begun: "Burst", number: int) -> None:
        self.begun, self.number = begun, number

    def begin(self, data: bytes) -> None:
        assert data == b"%d" % self.number
        self.begun.note(self.number)


class Burst:
    """Comes at once. What has begun, with its turn."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.found, self.turn = turns, list[tuple[int, int]](), 0
        self._tick()
        self.all = [One(self, number) for number in range(BURST)]
        for one in self.all:
            if turns.take():
                self.note(one.number)
            else:
                turns.hold(one, b"%d" % one.number)

    def _tick(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self._tick)

    def note(self, number: int) -> None:
        self.found.append((self.turn, number))


def begun(story: Callable[[Burst], object], count: int) -> list[tuple[int, int]]:
    async def main() -> list[tuple[int, int]]:
        burst = Burst(Turns())
        story(burst)
        async with asyncio.timeout(20):
            while len(burst.found) < count:
                await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0)
        assert burst.turns.take()  # nobody waits, and a new turn has begun
        return burst.found

    return asyncio.run(main())


def test_a_turn_begins_a_few_requests_in_their_order() -> None:
    found = begun(lambda burst: None, BURST)
    assert [number for _, number in found] == list(range(BURST))
    assert max(Counter(turn for turn, _ in found).values()) == REQUESTS_PER_TURN


def test_who_leaves_while_it_waits_takes_nobodys_turn() -> None:
    def story(burst: Burst) -> None:
        for one in burst.all[:-1]:
            burst.turns.drop(one)
        assert len(burst.turns) == 1

    found = begun(story, REQUESTS_PER_TURN + 1)
    assert [number for _, number in found] == [*range(REQUESTS_PER_TURN), BURST - 1]
    assert found[-1][0] == found[0][0] + 1


def test_nobody_overtakes_who_waits() -> None:
    def story(burst: Burst) -> None:
        assert not burst.turns.take()

    assert len(begun(story, BURST)) == BURST
