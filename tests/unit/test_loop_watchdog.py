"""A hang of the API's event loop is noticed from outside of it, with where it hangs."""

import asyncio
import logging
import subprocess
import sys
import threading

import pytest

from tandem.core.stall_detector import TICKS
from tandem.server.api.loop_watchdog import LoopWatchdog

NEVER_S = 3600.0
HANGS = """
import asyncio, logging, time
from tandem.server import logs
from tandem.server.api.loop_watchdog import LoopWatchdog, end_process

async def main():
    logs.set_up("text", process="api")
    LoopWatchdog(timeout_s=0.3, fire=end_process).start()
    {hangs}

asyncio.run(main())
"""


def test_a_loop_that_hangs_is_named_with_the_stack_of_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    fired = threading.Event()

    def fire(line: str) -> None:
        said.append(line)
        fired.set()

    def hangs_for_ever() -> None:
        assert fired.wait(20)

    async def main() -> None:
        watchdog = LoopWatchdog(timeout_s=0.01, fire=fire)
        watchdog.start()
        hangs_for_ever()
        watchdog.stop()

    with caplog.at_level(logging.CRITICAL, "tandem.api"):
        asyncio.run(main())
    assert said == ["the API process hangs: no turn of its event loop for 0.01 s"]
    assert "hangs_for_ever" in caplog.text


def test_a_turn_between_two_ticks_begins_the_count_anew() -> None:
    async def main() -> None:
        watchdog = LoopWatchdog(timeout_s=NEVER_S, fire=lambda line: None)
        for _ in range(3):
            assert not any(watchdog.tick() for _ in range(TICKS))
            await asyncio.sleep(0)
        assert not any(watchdog.tick() for _ in range(TICKS))
        assert watchdog.tick()

    asyncio.run(main())


def test_a_loop_that_hangs_in_its_log_because_nobody_reads_that_ends_too() -> None:
    writes = "while True: logging.warning('x' * 1000)"
    with subprocess.Popen([sys.executable, "-c", HANGS.format(hangs=writes)], stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(30) == 1
        finally:
            process.kill()


def test_a_loop_that_hangs_ends_though_the_disk_of_its_log_is_full() -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen([sys.executable, "-c", HANGS.format(hangs="time.sleep(3600)")], stderr=full)
    try:
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.wait()
