"""Prefill, decode and router on hosts of their own: what a cable carries, and what becomes of requests without it."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import MODEL, START_S, HttpError, Server, eventually, secret_flags, show_logs
from several_hosts import Host, poor, several_hosts, unplugged

from tandem.cli.fleet import Fleet, serve_words

PORT, BOOTSTRAP_PORT = 8000, 8998  # every host has all its ports to itself
PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
PROMPTS = [
    f"Ann has {number} pens and loses 2 of them on her way. How many pens does she have?" for number in range(5, 37)
]
TIMEOUT_S = 10
LOST_S = 3  # for a request that is not expected to get through
CAUSES = {
    *("bootstrap_timeout", "waiting_timeout", "deadline_exceeded", "lease_expired", "transfer_failed"),
    *("peer_lost", "peer_unknown", "peer_aborted", "no_live_pair", "worker_unreachable", "connection_lost"),
}


@dataclass
class Pair:
    hosts: dict[str, Host]
    prefill: Server
    decode: Server
    router: Server

    def state(self, name: str) -> dict[str, object]:
        """As its own host sees it."""
        with self.hosts[name].inside():
            return getattr(self, name).state()

    def is_idle(self, name: str) -> bool:
        with self.hosts[name].inside():
            return getattr(self, name).is_idle()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        hosts = stack.enter_context(several_hosts("prefill", "decode", "router"))
        fleet = stack.enter_context(Fleet(folder, engines=2))
        try:
            yield started(fleet, hosts, folder)
        except BaseException:
            show_logs(fleet)
            raise


def started(fleet: Fleet, hosts: dict[str, Host], folder: Path) -> Pair:
    everywhere = ("--host", "0.0.0.0", *secret_flags(folder))
    commands = {
        "prefill": serve_words(
            MODEL,
            PORT,
            "--disaggregation-mode",
            "prefill",
            "--disaggregation-bootstrap-port",
            str(BOOTSTRAP_PORT),
            *everywhere,
        ),
        "decode": serve_words(
            MODEL, PORT, "--disaggregation-mode", "decode", "--disaggregation-allow", "10.98.0.0/24", *everywhere
        ),
        "router": [
            *("router", "--port", str(PORT)),
            *("--prefill", f"http://{hosts['prefill'].address}:{PORT}", str(BOOTSTRAP_PORT)),
            *("--decode", f"http://{hosts['decode'].address}:{PORT}"),
        ],
    }
    found: dict[str, Server] = {}
    for name, words in commands.items():
        with hosts[name].inside():
            found[name] = Server(fleet.start(name, words, port=PORT))
    for name, server in found.items():
        with hosts[name].inside():
            eventually(server.is_ready, within_s=START_S, what=lambda: fleet.members)
    return Pair(hosts, found["prefill"], found["decode"], found["router"])


def path_of(pair: Pair, timeout_s: float = TIMEOUT_S) -> str:
    """Of one request through the router; the cause where it fails."""
    with pair.hosts["router"].inside():
        try:
            return pair.router.generate(PROMPT, timeout=timeout_s)["meta_info"]["path"]
        except HttpError as error:
            return error.error["code"]


def recovers(pair: Pair) -> None:
    eventually(lambda: path_of(pair) == "remote", within_s=60)
    for name in ("prefill", "decode"):
        eventually(lambda name=name: pair.is_idle(name), what=lambda name=name: pair.state(name))


def test_the_tokens_are_those_of_one_engine(pair: Pair) -> None:
    with pair.hosts["decode"].inside():
        alone = pair.decode.generate(PROMPT)
    with pair.hosts["router"].inside():
        together = pair.router.generate(PROMPT)
    assert (alone["meta_info"]["path"], together["meta_info"]["path"]) == ("local", "remote")
    assert together["output_ids"] == alone["output_ids"]


def test_without_the_cable_between_them_requests_end_and_with_it_they_go_together_again(pair: Pair) -> None:
    with unplugged(pair.hosts["prefill"], pair.hosts["decode"]):
        began = time.monotonic()
        found = path_of(pair, LOST_S)
        assert time.monotonic() - began < LOST_S + 5
        assert found in CAUSES | {"fallback"}
    recovers(pair)


def test_a_cable_that_is_pulled_and_put_back_while_a_stream_decodes_changes_no_token(pair: Pair) -> None:
    long = {"max_new_tokens": 200, "sampling_params": {"ignore_eos": True}}
    with pair.hosts["router"].inside():
        whole = pair.router.generate(PROMPT, **long)["output_ids"]
        stream = pair.router.stream(PROMPT, **long)
    assert stream.next() is not None
    with unplugged(pair.hosts["prefill"], pair.hosts["decode"]):
        assert stream.rest()[-1]["output_ids"] == whole
    recovers(pair)


@pytest.mark.slow
def test_over_a_cable_that_delays_and_loses_packets_every_request_goes_remote_and_has_its_tokens(pair: Pair) -> None:
    prompts = [number * prompt for number, prompt in enumerate(PROMPTS[:6], 1)]  # of up to a dozen pages
    with pair.hosts["decode"].inside():
        alone = [pair.decode.generate(prompt)["output_ids"] for prompt in prompts]
        with pair.decode.open("POST", "/flush_cache") as reply:
            assert reply.status == 200
    with pair.hosts["router"].inside(), poor(pair.hosts["prefill"], pair.hosts["decode"]) as num_lost:
        answers = [pair.router.generate(prompt, timeout=60) for prompt in prompts]
        assert num_lost() > 0
    assert [answer["output_ids"] for answer in answers] == alone
    assert {answer["meta_info"]["path"] for answer in answers} == {"remote"}
    recovers(pair)


@pytest.mark.slow
def test_a_prefill_that_no_cable_reaches_is_done_without_or_named_and_comes_back(pair: Pair) -> None:
    prefill = pair.hosts["prefill"]
    with unplugged(prefill, pair.hosts["decode"]), unplugged(prefill, pair.hosts["router"]):
        began = time.monotonic()
        assert path_of(pair, LOST_S) in CAUSES | {"fallback"}
        assert time.monotonic() - began < LOST_S + 5
    recovers(pair)


@pytest.mark.slow
def test_whatever_a_bad_cable_does_every_request_ends_with_its_tokens_or_a_cause(pair: Pair) -> None:
    def ask(prompt: str) -> list[int] | str:
        with pair.hosts["router"].inside():
            try:
                return pair.router.generate(prompt, timeout=TIMEOUT_S)["output_ids"]
            except HttpError as error:
                return error.error["code"]

    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(ask, prompt) for prompt in PROMPTS]
        while not all(request.done() for request in asked):
            with unplugged(pair.hosts["prefill"], pair.hosts["decode"]):
                time.sleep(0.2)
            time.sleep(0.1)
    recovers(pair)
    for prompt, request in zip(PROMPTS, asked, strict=True):
        found = request.result()
        if isinstance(found, str):
            assert found in CAUSES
            continue
        with pair.hosts["decode"].inside():
            assert found == pair.decode.generate(prompt)["output_ids"]
