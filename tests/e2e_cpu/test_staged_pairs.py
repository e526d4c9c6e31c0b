"""Pairs of which a half has its KV where no socket reaches it, as on a GPU: they say what one engine says, and hold
nothing afterwards.

Such a half is forced on the CPU (TANDEM_TEST_STAGED_KV): the copies are torch's, as on any device.
"""

import threading
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest
from cluster import START_S, Cluster, Server, bootstrap_port, eventually, show_logs, start_half

from tandem.cli.fleet import Fleet

FLAGS = ("--deterministic", "--enable-fault-injection")
PAGE, CHUNK = 16, 64
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * CHUNK + 5)
ROOMS = count(7001)
SAYS_SO = "pages travel by way of copies in host memory (staged)"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode."""
    fleet = Fleet(Path(tmp_path_factory.mktemp("staged")), engines=2)
    with pytest.MonkeyPatch.context() as patch, fleet:
        patch.setenv("TANDEM_TEST_STAGED_KV", "1")
        prefill = Server(start_half(fleet, "prefill", [*FLAGS, "--chunked-prefill-size", str(CHUNK)]))
        decode = Server(start_half(fleet, "decode", FLAGS))
        try:
            fleet.wait_ready(timeout_s=START_S)
            yield prefill, decode
        except BaseException:
            show_logs(fleet)
            raise


@pytest.fixture(params=["staged prefill", "staged decode", "both staged"])
def pair(request: pytest.FixtureRequest, staged: tuple[Server, Server], common: Cluster) -> tuple[Server, Server]:
    mapped = common.prefills[0], common.decodes[0]
    kinds = {"staged prefill": (staged, mapped), "staged decode": (mapped, staged), "both staged": (staged, staged)}
    left, right = kinds[request.param]
    return left[0], right[1]


def prompt_of(length: int) -> list[int]:
    return [20 + length % 250, *(30 + (7 * index) % 400 for index in range(length - 1))]


def ask(pair: tuple[Server, Server], prompt: Sequence[int]) -> tuple[list[int], str]:
    """The tokens, and how the KV came. Nothing is cached, so all pages travel."""
    prefill, decode = pair
    for server in pair:
        server.open("POST", "/flush_cache").close()
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": next(ROOMS)}
    other = threading.Thread(target=lambda: prefill.stream(prompt, max_new_tokens=12, **room).rest())
    other.start()
    answer = decode.generate(prompt, max_new_tokens=12, **room)
    other.join()
    for server in pair:
        eventually(server.is_idle, what=server.state)
    return answer["output_ids"], answer["meta_info"]["path"]


def alone(common: Cluster, prompt: Sequence[int]) -> list[int]:
    assert common.unified is not None
    found: list[int] = common.unified.generate(prompt, max_new_tokens=12)["output_ids"]
    return found


def test_a_pair_with_staged_kv_says_what_one_engine_says(pair: tuple[Server, Server], common: Cluster) -> None:
    for length in LENGTHS:
        prompt = prompt_of(length)
        assert ask(pair, prompt) == (alone(common, prompt), "remote"), length


def test_who_stages_says_so_and_sends_bytes(staged: tuple[Server, Server], common: Cluster) -> None:
    assert ask(staged, prompt_of(50))[1] == "remote"
    for server in staged:
        assert SAYS_SO in server.log
        found = server.get("/server_info")["kv_connections"]
        assert (found["shm"], found["nixl"]) == (0, 0)
    assert SAYS_SO not in common.prefills[0].log + common.decodes[0].log
