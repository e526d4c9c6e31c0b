"""KV events of real servers, read as a cache-aware router reads them: what it knows is what each prefix cache holds."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import Server, bootstrap_port, children_of, cluster, eventually, halves

from kv_subscriber import AllBlocksCleared, Subscriber, pages_of
from tandem.cli.fleet import Fleet, Member
from tandem.cli.ports import free_ports

TANDEM = [sys.executable, "-m", "tandem.cli.main"]
PROMPT = list(range(100, 180))
OTHER = list(range(300, 341))


def free_run(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        ports = free_ports(count)
        if ports == list(range(ports[0], ports[0] + count)):
            return ports[0]


def flag_for(port: int, replay_port: int, **more: object) -> str:
    asked = {"publisher": "zmq", "topic": "kv-events", "endpoint": f"tcp://*:{port}"}
    return json.dumps({**asked, "replay_endpoint": f"tcp://*:{replay_port}", **more})


@dataclass
class Reader:
    """One DP rank by its events."""

    subscriber: Subscriber

    def prefixes(self) -> set[tuple[int, ...]]:
        return self.subscriber.index().prefixes

    def comes_to(self, prefixes: set[tuple[int, ...]]) -> None:
        """An answer may be there before its events."""
        eventually(lambda: self.prefixes() == prefixes, what=lambda: self.prefixes() ^ prefixes)


@contextmanager
def reader(port: int, replay_port: int, rank: int = 0) -> Iterator[Reader]:
    with Subscriber(port + rank, replay_port=replay_port + rank, topic="kv-events") as subscriber:
        yield Reader(subscriber)


def cached_pages(server: Server) -> list[int]:
    return [state["pages"]["cached"] for state in server.states()]


def test_events_follow_the_cache_of_a_server_through_use_pressure_and_flush() -> None:
    port, replay_port = free_ports(2)
    flags = ["--max-total-tokens", "256", "--kv-events-config", flag_for(port, replay_port)]
    with cluster(unified=True, flags=flags) as it, reader(port, replay_port) as by_events:
        assert it.unified is not None
        assert "whoever reads them reads prompts' tokens" in it.unified.log
        by_events.comes_to(set())
        answer = it.unified.generate(PROMPT, max_new_tokens=40, sampling_params={"ignore_eos": True})
        whole = [*PROMPT, *answer["output_ids"]]
        by_events.comes_to(pages_of(whole[:-1]))  # what was said is cached too, but for the last token
        for seed in range(8):  # each takes nearly all of the pool
            prompt = [seed * 17 + index % 90 + 10 for index in range(150)]
            it.unified.generate(prompt, max_new_tokens=20, sampling_params={"ignore_eos": True})
            eventually(it.unified.is_idle)
            eventually(lambda: [len(by_events.prefixes())] == cached_pages(it.unified))
        assert pages_of(prompt) <= by_events.prefixes()
        assert not pages_of(whole) <= by_events.prefixes()
        it.unified.open("POST", "/flush_cache").read()
        by_events.comes_to(set())
        last = list(by_events.subscriber.replay())[-1][1]
        assert [type(event).__name__ for event in last.events] == ["AllBlocksCleared"]
        assert last.data_parallel_rank == 0


@pytest.mark.slow
def test_each_dp_rank_publishes_at_a_port_of_its_own() -> None:
    port, replay_port = free_run(2), free_run(2)
    flags = ["--dp-size", "2", "--kv-events-config", flag_for(port, replay_port)]
    with cluster(unified=True, flags=flags) as it:
        assert it.unified is not None
        for rank, prompt in enumerate((PROMPT, OTHER)):
            it.unified.generate(prompt, max_new_tokens=1, routed_dp_rank=rank)
        for rank, prompt in enumerate((PROMPT, OTHER)):
            with reader(port, replay_port, rank) as by_events:
                by_events.comes_to(pages_of(prompt))
                batches = [batch for _, batch in by_events.subscriber.replay()]
                assert {batch.data_parallel_rank for batch in batches} == {rank}
        kill_worker(it.unified, 1)
        eventually(lambda: it.unified is not None and "DP rank 1 serves again" in it.unified.log, within_s=60)
        with reader(port, replay_port, 1) as anew, reader(port, replay_port) as other:
            (begun,) = dict(anew.subscriber.replay()).items()
            assert begun[0] == 0
            assert begun[1].events == [AllBlocksCleared()]
            it.unified.generate(OTHER, max_new_tokens=1, routed_dp_rank=1)
            anew.comes_to(pages_of(OTHER))
            other.comes_to(pages_of(PROMPT))


def kill_worker(server: Server, dp_rank: int) -> None:
    """Replicas are started in order, each with its worker first."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children_of(server.member.process.pid)}
    os.kill([pid for pid, command in commands.items() if "worker_process" in command][dp_rank], signal.SIGKILL)


@pytest.mark.slow
def test_up_publishes_what_prefill_and_decode_hold(tmp_path: Path) -> None:
    """Prefill has the prompt; decode has what it pulled, and what it has said itself."""
    (router_port,) = free_ports(1)
    port, replay_port = free_run(2), free_run(2)
    output = tmp_path / "up.log"
    words = ["up", "--port", str(router_port), "--kv-events-config", flag_for(port, replay_port)]
    with output.open("wb") as log:
        up = subprocess.Popen([*TANDEM, *words], stdout=log, stderr=log)
    try:
        eventually(
            lambda: "tandem: ready" in output.read_text() or up.poll() is not None,
            within_s=60,
            what=output.read_text,
        )
        member = Member("router", (), up, router_port, output)  # type: ignore[arg-type]  # text, and not bytes
        router = Server(member)
        with reader(port, replay_port) as prefill, reader(port, replay_port, 1) as decode:
            answer = router.generate(PROMPT, max_new_tokens=40, sampling_params={"ignore_eos": True})
            prefill.comes_to(pages_of(PROMPT))
            decode.comes_to(pages_of([*PROMPT, *answer["output_ids"]][:-1]))
            router.generate(PROMPT[:64] + OTHER, max_new_tokens=1)
            prefill.comes_to(pages_of(PROMPT) | pages_of(PROMPT[:64] + OTHER))
        up.send_signal(signal.SIGINT)
        assert up.wait(30) == 0
    finally:
        up.kill()
        up.wait()


@pytest.mark.slow
def test_a_server_whose_endpoint_is_taken_does_not_start(tmp_path: Path) -> None:
    port, replay_port, http = free_ports(3)
    flags = ["--kv-events-config", flag_for(port, replay_port)]
    with cluster(unified=True, flags=flags), Fleet(tmp_path, engines=1) as fleet:
        words = ["serve", "tandem/mini", "--port", str(http), *flags]
        second = fleet.start("second", words, port=http)
        assert second.process.wait(60) == 1
        assert f"cannot publish KV events at tcp://*:{port}: Address already in use" in (second.cause_of_end() or "")


def test_what_a_prefill_gives_back_for_want_of_a_decode_is_in_the_events(tmp_path: Path) -> None:
    port, replay_port = free_ports(2)
    flags = ["--kv-events-config", flag_for(port, replay_port), "--optimistic-prefill-policy", "retry"]
    with halves(tmp_path, flags) as (prefill, decode), reader(port, replay_port) as by_events:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 7}
        lonely = prefill.open_stream(PROMPT, **where)
        by_events.comes_to(pages_of(PROMPT))
        lonely.close()
        eventually(prefill.is_idle)
        by_events.comes_to(pages_of(PROMPT))
        assert (cached_pages(prefill), cached_pages(decode)) == ([5], [0])
