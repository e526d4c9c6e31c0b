"""Pairs of which a half has its KV where no socket reaches it, as on a GPU: they say what one engine says, and hold
nothing afterwards.

Such a half is forced on the CPU (TANDEM_TEST_STAGED_KV): the copies are torch's, as on any device.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from cluster import START_S, Cluster, Server, bootstrap_port, eventually, show_logs, start_half

from tandem.cli.fleet import Fleet

# A pool that is not mapped is all there from the start: the default one would be a tenth of the machine's memory.
FLAGS = ("--deterministic", "--enable-fault-injection", "--max-total-tokens", "16384")
PAGE, CHUNK = 16, 64
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * CHUNK + 5)
NUM_FAILING = 12
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


def ask(pair: tuple[Server, Server], prompts: Sequence[list[int]]) -> list[tuple[list[int], str]]:
    """At once: the tokens, and how the KV came. Nothing was cached, so all pages travel; and nothing is held then."""
    prefill, decode = pair
    for server in pair:
        server.open("POST", "/flush_cache").close()
    at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill)}
    rooms = [at | {"bootstrap_room": next(ROOMS)} for _ in prompts]
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        for prompt, room in zip(prompts, rooms, strict=True):
            pool.submit(lambda *one: prefill.stream(one[0], max_new_tokens=12, **one[1]).rest(), prompt, room)
        answers = list(
            pool.map(lambda prompt, room: decode.generate(prompt, max_new_tokens=12, **room), prompts, rooms)
        )
    for server in pair:
        eventually(server.is_idle, what=server.state)
        eventually(lambda it=server: set(held(it).values()) == {0.0}, what=lambda it=server: held(it))
    return [(answer["output_ids"], answer["meta_info"]["path"]) for answer in answers]


def held(server: Server) -> dict[str, float]:
    """By the data plane of its worker."""
    with server.open("GET", "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    names = tuple(f"tandem:worker_{name}{{" for name in ("live_rooms", "pinned_pages", "open_transfers"))
    found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(names)}
    assert len(found) == len(names)
    return found


def alone(common: Cluster, prompt: Sequence[int]) -> list[int]:
    assert common.unified is not None
    found: list[int] = common.unified.generate(prompt, max_new_tokens=12)["output_ids"]
    return found


def test_a_pair_with_staged_kv_says_what_one_engine_says(pair: tuple[Server, Server], common: Cluster) -> None:
    for prompt in map(prompt_of, LENGTHS):
        assert ask(pair, [prompt]) == [(alone(common, prompt), "remote")], len(prompt)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_transfers_of_staged_kv_that_fail_change_no_token_and_hold_nothing(
    pair: tuple[Server, Server], staged: tuple[Server, Server], common: Cluster, share: float
) -> None:
    prompts = [prompt_of(2 * CHUNK + number) for number in range(NUM_FAILING)]
    failing = [server for server in pair if server in staged]
    try:
        for server in failing:
            server.call("PUT", "/debug/faults", {"disagg_failure_prob": share})
        answers = ask(pair, prompts)
    finally:
        for server in failing:
            server.call("PUT", "/debug/faults", {"disagg_failure_prob": 0.0})
    assert [tokens for tokens, _ in answers] == [alone(common, prompt) for prompt in prompts]
    paths = {path for _, path in answers}
    assert paths == {"fallback"} if share == 1 else paths <= {"remote", "fallback"}


def test_who_stages_says_so_and_sends_bytes(staged: tuple[Server, Server], common: Cluster) -> None:
    """Also where the other half would lend its memory."""
    for left, right in (staged, (common.prefills[0], staged[1])):
        assert ask((left, right), [prompt_of(50)])[0][1] == "remote"
    for server in staged:
        assert SAYS_SO in server.log
        found = server.get("/server_info")["kv_connections"]
        assert (found["shm"], found["nixl"]) == (0, 0)
    assert SAYS_SO not in common.prefills[0].log + common.decodes[0].log
