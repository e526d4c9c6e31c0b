"""Whatever ends a request, and wherever that reaches it, every worker of both sides lets go of it.

Pairs of several workers each: pipeline stages, tensor-parallel shards, and shards that send to stages. Aborts come
before READY, while a prompt is computed, while pages move and after; halves come without the other; transfers fail,
before READY too (`failing_workers`); a decode dies. Afterwards each worker counts from its own tables that it holds
nothing, and the pair says the tokens that it said before. The tests run in the order of this file;
`tests/mutants/test_real_server.py` names the bugs that they are there for.
"""

import contextlib
import http.client
import os
import random
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any  # JSON documents

import pytest
from cluster import Cluster, HttpError, Server, bootstrap_port, cluster, eventually, failing, stopped, workers_of
from rank_gauges import held_by_workers

SOON_S = 10.0
NUM_STORMED = 40
FLAGS = ("--enable-fault-injection", "--max-total-tokens", "8192", "--chunked-prefill-size", "64")
STRICT = ("--kv-load-failure-policy", "fail")  # a transfer that failed is an error, not a prompt computed again
PROMPT = "Tom has 3 apples and buys 4 more. How many apples does he have?"
STAGES, SHARDS, CONTEXT = ("--pp", "2"), ("--tp", "2"), ("--attn-cp-size", "2")
CUTS = {
    "pp2": (STAGES, STAGES),
    "tp2": (SHARDS, SHARDS),
    "tp2 to pp2": (SHARDS, STAGES),
    "cp2 to tp2": (CONTEXT, SHARDS),
}
WORKERS = r"worker (TP0 PP[01]|TP1 PP0|TP0 CP[01] PP0)"  # of any of these servers
rooms = count(1)


@pytest.fixture(scope="module")
def failing_shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Workers of the shards in this file report failures before READY."""
    file = tmp_path_factory.mktemp("failing") / "shards"
    file.write_text("")
    folders = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).with_name("failing_workers"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_TEST_FAILING_SHARDS", str(file))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
        yield file


@pytest.fixture(
    scope="module",
    params=["pp2", "tp2 to pp2", *(pytest.param(it, marks=pytest.mark.slow) for it in ("tp2", "cp2 to tp2"))],
)
def it(request: pytest.FixtureRequest, failing_shards: Path) -> Iterator[Cluster]:
    prefill, decode = CUTS[request.param]
    with cluster(prefills=1, decodes=1, flags=FLAGS, prefill_flags=prefill, decode_flags=[*STRICT, *decode]) as it:
        yield it


@pytest.fixture(scope="module")
def tokens(it: Cluster) -> list[list[int]]:
    """What the pair says before anything has happened to it."""
    return tokens_of(it)


def assert_nothing_is_left(it: Cluster, tokens: list[list[int]]) -> None:
    """Nothing is held, and the pair works as before."""
    assert_nothing_is_held(it)
    eventually(lambda: serves(it), within_s=SOON_S)
    assert tokens_of(it) == tokens


def assert_nothing_is_held(it: Cluster) -> None:
    for server in it.servers:
        eventually(server.is_idle, within_s=SOON_S, what=server.state)
        eventually(lambda server=server: is_empty(held_by_workers(server)), within_s=SOON_S, what=held_by(server))


def held_by(server: Server) -> Any:
    return lambda: (server.member.name, held_by_workers(server))


def is_empty(held: dict[str, dict[tuple[str, str], float]]) -> bool:
    """Each number of two workers, and it is 0."""
    return all(len(by_rank) == 2 and not any(by_rank.values()) for by_rank in held.values())


def tokens_of(it: Cluster) -> list[list[int]]:
    """Through both halves."""
    assert it.router is not None
    answers = [it.router.generate(prompt, max_new_tokens=12) for prompt in (PROMPT, prompt_of(1000, 150))]
    assert {answer["meta_info"]["path"] for answer in answers} == {"remote"}
    return [answer["output_ids"] for answer in answers]


def serves(it: Cluster) -> bool:
    """Both halves are there for a router that has missed one of them, while it stood still."""
    try:
        return bool(tokens_of(it))
    except (HttpError, AssertionError):
        return False


def prompt_of(number: int, length: int) -> list[int]:
    """No prompt begins as another one."""
    return [20 + number % 400, *(30 + (index * (number + 3)) % 400 for index in range(length))]


def pair_with(prefill: Server) -> dict[str, Any]:
    room = {"bootstrap_port": bootstrap_port(prefill), "bootstrap_room": next(rooms)}
    return {"bootstrap_host": "127.0.0.1", "timeout": 20, **room}


@contextmanager
def failing_before_ready(file: Path, *shards: int) -> Iterator[None]:
    """Of both servers, of which only those that compute a prompt before READY have anything to fail."""
    file.write_text(" ".join(map(str, shards)))
    try:
        yield
    finally:
        file.write_text("")


def lines_of(server: Server, rid: str) -> list[str]:
    """What the log says of the end of this request."""
    return [line for line in server.log.splitlines() if f" api] request {rid} " in line]


def error_of(server: Server, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Of a request that fails; a prefill may have sent the head of its answer before."""
    try:
        answer = server.generate(prompt, **fields)
    except HttpError as failed:
        return failed.error
    assert "error" in answer, answer
    error: dict[str, Any] = answer["error"]
    return error


# --- storms ----------------------------------------------------------------------------------------------------------


@dataclass
class Half:
    """One half of a request of a storm, as its client sees it."""

    server: Server
    rid: str
    prompt: list[int]
    fields: dict[str, Any]
    connection: http.client.HTTPConnection | None = None

    def send(self) -> None:
        self.connection = self.server.open_stream(self.prompt, rid=self.rid, **self.fields)

    def leave(self) -> None:
        assert self.connection is not None
        self.connection.close()

    def order(self) -> None:
        """As an operator; it may have ended, or be on its way still."""
        with contextlib.suppress(HttpError):
            self.server.call("POST", "/abort_request", {"rid": self.rid})

    def read(self) -> None:
        """Until its end, which has to come."""
        assert self.connection is not None
        if self.connection.sock is not None:
            with contextlib.suppress(http.client.HTTPException):
                self.connection.getresponse().read()
            self.connection.close()


@dataclass
class Storm:
    """Requests whose halves come in any order, or not at all, and aborts that come in between."""

    it: Cluster
    draw: random.Random
    halves: list[Half] = field(default_factory=list)

    def actions(self) -> list[Any]:
        """What happens to one request, in its order."""
        fields = pair_with(self.it.prefills[0])
        prompt = prompt_of(fields["bootstrap_room"], self.draw.choice((20, 150, 700)))
        sides = {"p": self.it.prefills[0], "d": self.it.decodes[0]}
        present = self.draw.choice(("pd", "dp", "pd", "dp", "p", "d"))
        halves = [Half(sides[side], f"{fields['bootstrap_room']}-{side}", prompt, fields) for side in present]
        self.halves += halves
        ends = [getattr(half, how) for half in halves if (how := self.draw.choice(("leave", "order", "read", "")))]
        if len(present) == 1:
            ends = ends or [halves[0].leave]
            ends = [halves[0].leave if end == halves[0].read else end for end in ends]
        return [*(half.send for half in halves), *(end for end in ends if end.__name__ != "read")]

    def blow(self) -> None:
        """All in one order that keeps that of each request: few are under way at a time, at any stage of theirs."""
        waiting = [self.actions() for _ in range(NUM_STORMED)]
        window: list[list[Any]] = []
        while waiting or window:
            while waiting and len(window) < 8:
                window.append(waiting.pop())
            actions = self.draw.choice(window)
            actions.pop(0)()
            if not actions:
                window.remove(actions)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(Half.read, self.halves))


def test_after_a_storm_of_aborts_no_rank_holds_anything(it: Cluster, tokens: list[list[int]]) -> None:
    storm = Storm(it, random.Random(1))
    storm.blow()
    assert_nothing_is_left(it, tokens)
    for half in storm.halves:
        assert len(lines_of(half.server, half.rid)) == 1, half.rid


def test_after_a_storm_of_aborts_and_failures_no_rank_holds_anything(it: Cluster, tokens: list[list[int]]) -> None:
    storm = Storm(it, random.Random(2))
    with failing(*it.servers, prob=0.3):
        storm.blow()
    assert_nothing_is_left(it, tokens)
    failed = [line for half in storm.halves for line in lines_of(half.server, half.rid) if " transfer_failed " in line]
    assert failed, "no transfer failed"
    for line in failed:
        assert re.search(rf"shard [01]: {WORKERS}: injected", line), line


def test_after_a_storm_of_aborts_and_of_failures_before_ready_no_rank_holds_anything(
    it: Cluster, tokens: list[list[int]], failing_shards: Path
) -> None:
    storm = Storm(it, random.Random(3))
    alone = [half_alone(it.prefills[0]) for _ in range(6)]
    storm.halves += alone
    with failing_before_ready(failing_shards, 0, 1):
        for half in alone:
            half.send()
        storm.blow()
    assert_nothing_is_left(it, tokens)
    for half in storm.halves:
        (line,) = lines_of(half.server, half.rid)
        assert half not in alone or re.search(
            rf" transfer_failed .*shard [01]: {WORKERS}: the data plane is gone", line
        )


def half_alone(prefill: Server) -> Half:
    """Whose decode never comes."""
    pair = pair_with(prefill)
    return Half(prefill, f"{pair['bootstrap_room']}-alone", prompt_of(pair["bootstrap_room"], 300), pair)


# --- awkward moments -------------------------------------------------------------------------------------------------


@contextmanager
def both_halves(it: Cluster, *, first: str = "prefill", **fields: Any) -> Iterator[list[http.client.HTTPConnection]]:
    """Under way, with the last page of one shard still missing; they leave at the end."""
    prefill, decode = it.prefills[0], it.decodes[0]
    pair = pair_with(prefill)
    order = (prefill, decode) if first == "prefill" else (decode, prefill)
    halves = [server.open_stream(prompt_of(pair["bootstrap_room"], 500), **pair, **fields) for server in order]
    try:
        yield halves
    finally:
        for half in halves:
            half.close()


TRIES = 20  # to leave while pages move


def drains(decode: Server) -> bool:
    """Whether who has left had asked for pages: on a busy machine decode may hear of it before it hears the offer."""

    def is_over() -> bool:
        queues = decode.state()["queues"]
        return bool(queues["draining"]) or not any(queues.values())

    eventually(is_over, within_s=SOON_S, what=decode.state)
    return bool(decode.state()["queues"]["draining"])


@pytest.mark.parametrize("shard", [0, 1])
def test_an_abort_while_pages_move_and_one_shard_stands_still_reaches_every_shard(
    it: Cluster, tokens: list[list[int]], shard: int
) -> None:
    prefill, decode = it.prefills[0], it.decodes[0]
    with stopped(workers_of(decode)[shard]):
        for _ in range(TRIES):
            with both_halves(it):
                eventually(lambda: prefill.state()["queues"]["sending"], within_s=SOON_S, what=prefill.state)
            if drains(decode):
                break
        assert decode.state()["pages"]["quarantined"] > 0, "a shard that has not said so may still write"
    assert_nothing_is_left(it, tokens)


@pytest.mark.parametrize("shard", [0, 1])
def test_an_abort_while_a_batch_is_on_one_worker_reaches_every_worker(
    it: Cluster, tokens: list[list[int]], shard: int
) -> None:
    prefill = it.prefills[0]
    with stopped(workers_of(prefill)[shard]):
        with both_halves(it):
            eventually(lambda: prefill.state()["window"], within_s=SOON_S, what=prefill.state)
        eventually(lambda: prefill.state()["queues"]["draining"], within_s=SOON_S, what=prefill.state)
        assert prefill.state()["window"]
    assert_nothing_is_left(it, tokens)


def test_a_half_that_leaves_before_ready_was_never_anywhere(it: Cluster, tokens: list[list[int]]) -> None:
    prefill = it.prefills[0]
    half = prefill.open_stream(prompt_of(7, 300), **pair_with(prefill))
    eventually(lambda: prefill.state()["rooms"], within_s=SOON_S, what=prefill.state)
    half.close()
    assert_nothing_is_left(it, tokens)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_failure_that_one_worker_reports_before_ready_ends_the_request_on_all_and_decode_hears_it(
    it: Cluster, tokens: list[list[int]], failing_shards: Path, shard: int
) -> None:
    prefill, decode = it.prefills[0], it.decodes[0]
    pair, rid = pair_with(prefill), f"early-{shard}"
    prompt = prompt_of(pair["bootstrap_room"], 300)
    says = rf"shard {shard}: {WORKERS}: the data plane is gone"
    with failing_before_ready(failing_shards, shard):
        error = error_of(prefill, prompt, rid=rid, **pair)
        assert error["code"] == "transfer_failed"
        assert re.search(says, error["message"]), error
        eventually(lambda: lines_of(prefill, rid))
        (line,) = lines_of(prefill, rid)
        assert re.search(says, line)
        assert_nothing_is_held(it)
        late = error_of(decode, prompt, rid=rid, **pair)
    assert late["code"] == "transfer_failed"
    assert re.search(says, late["message"]), late
    assert_nothing_is_left(it, tokens)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_transfer_that_fails_on_a_worker_is_told_once_and_names_the_worker(
    it: Cluster, tokens: list[list[int]], side: str
) -> None:
    prefill, decode = it.prefills[0], it.decodes[0]
    pair, rid = pair_with(prefill), f"failed-{side}"
    prompt = prompt_of(pair["bootstrap_room"], 300)
    with failing(prefill if side == "prefill" else decode, prob=1), ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(lambda server: error_of(server, prompt, rid=rid, **pair), (prefill, decode)))
    for server, error in zip((prefill, decode), errors, strict=True):
        assert error["code"] in ("transfer_failed", "peer_aborted")
        assert re.search(rf"shard [01]: {WORKERS}: injected", error["message"]), error
        eventually(lambda server=server: lines_of(server, rid))
        (line,) = lines_of(server, rid)
        assert re.search(rf"shard [01]: {WORKERS}: injected", line)
    assert_nothing_is_left(it, tokens)


def test_a_decode_that_is_killed_leaves_nothing_on_any_rank_of_its_prefill(
    it: Cluster, tokens: list[list[int]]
) -> None:
    prefill, decode = it.prefills[0], it.decodes[0]
    os.kill(workers_of(decode)[1], signal.SIGSTOP)  # the pages of this shard are not pulled
    with both_halves(it, rid="killed"):
        eventually(lambda: prefill.state()["queues"]["sending"], within_s=SOON_S, what=prefill.state)
        decode.member.process.kill()
        decode.member.process.wait()
        eventually(lambda: lines_of(prefill, "killed"), within_s=SOON_S, what=prefill.state)
    (line,) = lines_of(prefill, "killed")
    assert " peer_lost " in line
    eventually(prefill.is_idle, within_s=SOON_S, what=prefill.state)
    eventually(lambda: is_empty(held_by_workers(prefill)), within_s=SOON_S, what=held_by(prefill))
    it.fleet.restart(decode.member)
    it.fleet.wait_ready(timeout_s=60)
    eventually(lambda: serves(it), within_s=SOON_S)
    assert_nothing_is_left(it, tokens)
