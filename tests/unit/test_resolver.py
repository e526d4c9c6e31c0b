"""Names are looked up beside each other: one that nobody answers holds up itself."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from loop_waits import until
from tandem.server.api.resolver import MAX_LOOKUPS, REMEMBERED_S, NoThread, Resolver


class NameServer:
    """Answers at once, but for names that begin with `silent`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = threading.Event()

    def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        if name.startswith("silent"):
            self.answers.wait(20)
        if name.startswith("unknown"):
            raise OSError("no such name")
        return ["10.1.0.4"]


def test_a_silent_name_holds_up_no_other_and_threads_are_bounded() -> None:
    names = NameServer()

    async def story() -> None:
        now = 0.0
        it = Resolver(names, clock=lambda: now)
        assert await it("prefill") == ["10.1.0.4"]
        waiting = [asyncio.create_task(it(f"silent{number}")) for number in range(MAX_LOOKUPS - 1)]
        await until(lambda: len(names.asked) == MAX_LOOKUPS)
        assert await it("another") == ["10.1.0.4"]
        waiting.append(asyncio.create_task(it("silent")))
        await until(lambda: len(names.asked) == MAX_LOOKUPS + 2)
        with pytest.raises(OSError, match="other names are being looked up"):
            await it("new")
        assert await it("prefill") == ["10.1.0.4"], "where it was"
        now = REMEMBERED_S
        with pytest.raises(OSError, match="other names are being looked up"):
            await it("prefill")
        names.answers.set()
        assert await asyncio.gather(*waiting) == [["10.1.0.4"]] * MAX_LOOKUPS
        assert await it("new") == ["10.1.0.4"]

    asyncio.run(story())


def test_a_name_under_way_is_asked_for_once_and_who_gives_up_leaves_the_answer_to_the_others() -> None:
    names = NameServer()

    async def story() -> None:
        it = Resolver(names)
        first, second = (asyncio.create_task(it("silent")) for _ in range(2))
        await until(lambda: names.asked)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        names.answers.set()
        assert await second == ["10.1.0.4"]
        assert names.asked == ["silent"]

    asyncio.run(story())


def test_what_is_not_found_is_an_error_and_asked_again_next_time() -> None:
    names = NameServer()

    async def story() -> None:
        it = Resolver(names)
        for _ in range(2):
            with pytest.raises(OSError, match="no such name"):
                await it("unknown")

    asyncio.run(story())
    assert names.asked == ["unknown", "unknown"]


def test_a_look_up_that_outlives_its_loop_ends_quietly() -> None:
    names = NameServer()

    async def story() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Resolver(names)("silent"), 0.01)

    asyncio.run(story())
    names.answers.set()
    for thread in threading.enumerate():
        if thread.name == "lookup":
            thread.join(20)


def test_a_name_for_which_there_was_no_thread_can_be_looked_up_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def story() -> None:
        it = Resolver(NameServer())
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            for _ in range(2):
                with pytest.raises(NoThread):
                    await asyncio.wait_for(it("prefill"), 20)
        assert await it("prefill") == ["10.1.0.4"]

    asyncio.run(story())
