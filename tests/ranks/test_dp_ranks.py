"""Several replicas behind one address: who gets a request, what each of them tells, and one that is lost comes back."""

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any  # JSON documents

import pytest
from cluster import Cluster, HttpError, Server, bootstrap_port, cluster, eventually, failing, workers_of
from kept_servers import flush_cache

from tandem.core.disagg.dp_rank import FORCE_QUERY

FLAGS = ("--max-total-tokens", "8192")
FAULTS = ("--enable-fault-injection",)
FAILING = 0.7  # of the transfers of each rank
SOON_S = 10.0  # until the other half of one that was refused has ended, long before its deadline
PROMPTS = [f"{number} Tom has {number} apples and buys 4 more. How many apples does he have?" for number in range(24)]


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Both sides have two DP ranks; rooms name the rank of neither."""
    with cluster(
        prefills=1,
        decodes=1,
        unified=True,
        flags=FLAGS,
        prefill_flags=("--dp", "2", "--load-balance-method", "round_robin", *FAULTS),
        decode_flags=("--data-parallel-size", "2", *FAULTS),
    ) as it:
        yield it


@pytest.fixture(scope="module")
def replicas() -> Iterator[Server]:
    with cluster(unified=True, flags=[*FLAGS, "--dp-size", "2"]) as it:
        assert it.unified is not None
        yield it.unified


def ranks_of(answers: list[dict]) -> Counter[int]:
    return Counter(answer["meta_info"]["dp_rank"] for answer in answers)


def test_every_rank_of_both_sides_says_what_one_engine_says(pair: Cluster) -> None:
    assert pair.router is not None
    assert pair.unified is not None
    answers = ask_together(pair.router)

    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer["output_ids"] == pair.unified.generate(prompt, max_new_tokens=12)["output_ids"]
        assert answer["meta_info"]["path"] == "remote"
    assert ranks_of(answers) == {0: 12, 1: 12}
    for rank in (0, 1):
        assert f"node DP{rank}] Prefill batch" in pair.prefills[0].log
    for server in pair.servers:
        eventually(server.is_idle, what=server.states)


def test_a_prefill_takes_turns_where_its_flag_says_so(pair: Cluster) -> None:
    """By room, as it would without the flag, all would be on rank 0."""
    found = [both_halves_by_room(pair, PROMPTS[number], 100 + 2 * number) for number in range(4)]
    ranks = [half["meta_info"]["dp_rank"] for half, _ in found]
    assert ranks in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_transfers_may_fail_on_every_rank_of_both_sides_and_no_token_changes(pair: Cluster) -> None:
    """Hooks are told to all ranks; a request that failed is told with its own rank."""
    assert pair.router is not None
    router, (decode,) = pair.router, pair.decodes
    expected = [router.generate(prompt, max_new_tokens=12)["output_ids"] for prompt in PROMPTS]
    for server in pair.prefills + pair.decodes:
        flush_cache(server)
    with failing(*pair.prefills, decode, prob=FAILING):
        assert [(rank["dp_rank"], rank["disagg_failure_prob"]) for rank in faults_of(decode)] == [(0, 0.7), (1, 0.7)]
        answers = ask_together(router)
    assert [answer["output_ids"] for answer in answers] == expected
    failed = [answer for answer in answers if answer["meta_info"]["path"] == "fallback"]
    assert set(ranks_of(failed)) == {0, 1}
    for rank in (0, 1):
        line = re.compile(rf" api\] request \S+ /generate transfer_failed .* dp_rank={rank} ")
        eventually(lambda line=line: line.search(pair.prefills[0].log), what=lambda: pair.prefills[0].log)
    for server in pair.servers:
        eventually(server.is_idle, what=server.states)
    assert [rank["disagg_failure_prob"] for rank in faults_of(decode)] == [0, 0]


def faults_of(server: Server) -> list[dict[str, Any]]:
    """Of each rank."""
    found: list[dict[str, Any]] = server.get("/debug/faults")["dp_ranks"]
    return found


def test_a_request_that_names_its_rank_gets_it(replicas: Server) -> None:
    for field in ("routed_dp_rank", "data_parallel_rank"):
        answers = [replicas.generate(PROMPTS[0], max_new_tokens=2, **{field: 1}) for _ in range(3)]
        assert ranks_of(answers) == {1: 3}
    with pytest.raises(HttpError) as refused:
        replicas.generate(PROMPTS[0], routed_dp_rank=2)
    assert (refused.value.status, refused.value.error["param"]) == (400, "routed_dp_rank")
    with pytest.raises(HttpError) as refused:
        replicas.generate(PROMPTS[0], routed_dp_rank=1, data_parallel_rank=0)
    assert refused.value.status == 400


def test_loads_metrics_and_orders_speak_of_every_rank(replicas: Server) -> None:
    for rank in (0, 1):
        assert f" worker DP{rank}] engine: " in replicas.log
    assert [load["dp_rank"] for load in replicas.get("/v1/loads")["loads"]] == [0, 1]
    assert replicas.get("/v1/loads?dp_rank=1")["loads"][0]["dp_rank"] == 1
    assert [load["dp_rank"] for load in replicas.get("/get_load")] == [0, 1]
    info = replicas.get("/server_info")
    assert (info["dp_size"], info["load_balance_method"], len(info["internal_states"])) == (2, "round_robin", 2)
    with replicas.open("GET", "/metrics") as reply:
        page = reply.read().decode()
    for rank in (0, 1):
        assert any(
            line.startswith("sglang:num_running_reqs{") and f'dp_rank="{rank}"' in line for line in page.splitlines()
        )

    for rank in (0, 1):
        replicas.generate(PROMPTS[5], max_new_tokens=2, routed_dp_rank=rank)
        again = replicas.generate(PROMPTS[5], max_new_tokens=2, routed_dp_rank=rank)
        assert again["meta_info"]["cached_tokens"] > 0
    with replicas.open("POST", "/flush_cache") as reply:
        assert reply.status == 200
    for rank in (0, 1):
        found = replicas.generate(PROMPTS[5], max_new_tokens=2, routed_dp_rank=rank)
        assert found["meta_info"]["cached_tokens"] == 0, f"rank {rank} was told to flush"


def test_an_order_to_end_reaches_the_rank_that_has_the_request(replicas: Server) -> None:
    streams = [
        replicas.stream(PROMPTS[rank], max_new_tokens=4000, rid=f"r{rank}", routed_dp_rank=rank,
                        sampling_params={"ignore_eos": True})
        for rank in (0, 1)
    ]  # fmt: skip
    for stream in streams:
        assert stream.next() is not None
    for rank in (0, 1):
        assert replicas.call("POST", "/abort_request", {"rid": f"r{rank}"}) == {"aborted": 1}
    for stream in streams:
        assert "abort" in json.dumps(stream.rest()[-1])


def test_one_rank_that_dies_is_started_anew_while_the_others_serve(replicas: Server) -> None:
    tokens = replicas.generate(PROMPTS[0], max_new_tokens=8)["output_ids"]
    stream = replicas.stream(PROMPTS[1], max_new_tokens=4000, routed_dp_rank=1, sampling_params={"ignore_eos": True})
    assert stream.next() is not None
    os.kill(workers_of(replicas)[1], signal.SIGKILL)
    assert stream.rest()[-1]["error"]["code"] == "worker_lost"
    well, lost = replicas.get("/server_info")["dp_ranks"]
    assert well == {"dp_rank": 0, "status": "ready"}
    assert (lost["dp_rank"], lost["status"]) == (1, "not_ready")
    assert "the worker process was killed by signal SIGKILL" in lost["reason"]

    meanwhile = [replicas.generate(PROMPTS[0], max_new_tokens=8) for _ in range(4)]
    assert all(answer["output_ids"] == tokens for answer in meanwhile)
    assert replicas.is_ready()
    eventually(lambda: len(replicas.get("/v1/loads")["loads"]) == 2, within_s=60, what=lambda: replicas.log[-2000:])
    back = replicas.generate(PROMPTS[0], max_new_tokens=8, routed_dp_rank=1)
    assert (back["output_ids"], back["meta_info"]["dp_rank"]) == (tokens, 1)
    assert "DP rank 1 is lost: the worker process was killed by signal SIGKILL" in replicas.log
    eventually(lambda: "DP rank 1 serves again" in replicas.log)
    assert [rank["status"] for rank in replicas.get("/server_info")["dp_ranks"]] == ["ready", "ready"]


@pytest.mark.slow
def test_one_rank_that_hangs_is_left_out_and_started_anew_while_the_others_serve() -> None:
    flags = ("--dp", "2", "--tp", "2", "--watchdog-timeout", "3")
    with cluster(unified=True, flags=[*FLAGS, *flags]) as it:
        server = it.unified
        assert server is not None
        tokens = server.generate(PROMPTS[0], max_new_tokens=8)["output_ids"]
        os.kill(workers_of(server)[3], signal.SIGSTOP)
        hangs = "the worker TP1 PP0 process hangs: no answer for "
        eventually(lambda: hangs in server.get("/server_info")["dp_ranks"][1].get("reason", ""))
        assert "DP rank 1 is lost" not in server.log, "it is left out before it is given up"
        meanwhile = [server.generate(PROMPTS[0], max_new_tokens=8) for _ in range(4)]
        assert [(answer["output_ids"], answer["meta_info"]["dp_rank"]) for answer in meanwhile] == [(tokens, 0)] * 4
        assert server.is_ready()
        eventually(lambda: "DP rank 1 serves again" in server.log, within_s=60, what=lambda: server.log[-2000:])
        assert f"DP rank 1 is lost: {hangs}3 s, " in server.log
        assert "start the server again" not in server.log
        back = server.generate(PROMPTS[0], max_new_tokens=8, routed_dp_rank=1)
        assert (back["output_ids"], back["meta_info"]["dp_rank"]) == (tokens, 1)


def test_a_rank_of_either_side_may_die_and_every_request_gets_its_tokens() -> None:
    """Rooms name the rank of the prefill here: while that one is missing, another takes the request."""
    with cluster(prefills=1, decodes=1, flags=FLAGS, prefill_flags=("--dp", "2"), decode_flags=("--dp", "2")) as it:
        assert it.router is not None
        router, lost = it.router, [(it.prefills[0], 1), (it.decodes[0], 0)]
        expected = [router.generate(prompt, max_new_tokens=8)["output_ids"] for prompt in PROMPTS]
        with ThreadPoolExecutor(6) as pool:
            early = [pool.submit(router.generate, prompt, max_new_tokens=8) for prompt in PROMPTS[:8]]
            for server, dp_rank in lost:
                os.kill(workers_of(server)[dp_rank], signal.SIGKILL)
            late = [pool.submit(router.generate, prompt, max_new_tokens=8) for prompt in PROMPTS[8:]]
            assert [answer.result()["output_ids"] for answer in early + late] == expected
        for server, dp_rank in lost:
            eventually(lambda: f"DP rank {dp_rank} serves again" in server.log, within_s=60)  # noqa: B023  # done here
            eventually(server.is_idle, what=server.states)
        assert [router.generate(prompt, max_new_tokens=8)["output_ids"] for prompt in PROMPTS] == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", ["total_requests", "total_tokens"])
def test_a_request_goes_to_the_rank_that_has_least_to_do(method: str) -> None:
    with cluster(unified=True, flags=[*FLAGS, "--dp-size", "2", "--load-balance-method", method]) as it:
        assert it.unified is not None
        for busy in (0, 1):
            endless = {"max_new_tokens": 4000, "sampling_params": {"ignore_eos": True}}
            stream = it.unified.stream(PROMPTS[0], routed_dp_rank=busy, **endless)
            assert stream.next() is not None
            answers = [it.unified.generate(prompt, max_new_tokens=2) for prompt in PROMPTS[:4]]
            assert ranks_of(answers) == {1 - busy: 4}
            stream.close()
            eventually(it.unified.is_idle, what=it.unified.states)


SIDES = [(1, 2), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2), (4, 4)]  # two with two is above


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), SIDES)
def test_sides_may_have_unequal_numbers_of_ranks(prefill: int, decode: int) -> None:
    """Also while transfers fail. With nothing in its cache the decode alone says what one engine says."""
    sizes = {"prefill_flags": ("--dp", str(prefill), *FAULTS), "decode_flags": ("--dp", str(decode), *FAULTS)}
    with cluster(prefills=1, decodes=1, flags=FLAGS, **sizes) as it:
        assert it.router is not None
        router, (alone,) = it.router, it.decodes
        answers = ask_together(router)
        assert {answer["meta_info"]["path"] for answer in answers} == {"remote"}
        assert ranks_of(answers) == dict.fromkeys(range(decode), len(PROMPTS) // decode)
        flush_cache(alone)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer["output_ids"] == alone.generate(prompt, max_new_tokens=12)["output_ids"]
        for server in it.servers:
            flush_cache(server)
        with failing(*it.prefills, alone, prob=FAILING):
            others = ask_together(router)
        assert [answer["output_ids"] for answer in others] == [answer["output_ids"] for answer in answers]
        assert set(ranks_of([one for one in others if one["meta_info"]["path"] == "fallback"])) == set(range(decode))
        for server in it.servers:
            eventually(server.is_idle, what=server.states)


def ask_together(server: Server) -> list[dict]:
    """Eight at a time."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda prompt: server.generate(prompt, max_new_tokens=12), PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["early", "prefill_complete"])
def test_ranks_of_several_shards_lend_to_ranks_of_one(policy: str) -> None:
    """Each rank is a group of its own, whose workers name both where they log."""
    cut = ("--dp", "2", "--tp", "2", "--load-balance-method", "round_robin")
    decode = ("--dp", "2", "--disaggregation-decode-allocation-policy", policy)
    with cluster(prefills=1, decodes=1, unified=True, flags=FLAGS, prefill_flags=cut, decode_flags=decode) as it:
        assert it.router is not None
        assert it.unified is not None
        alone, (prefill,) = it.unified, it.prefills
        answers = ask_together(it.router)
        assert {answer["meta_info"]["path"] for answer in answers} == {"remote"}
        assert ranks_of(answers) == {0: 12, 1: 12}
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer["output_ids"] == alone.generate(prompt, max_new_tokens=12)["output_ids"]
        for rank in (0, 1):
            assert f" node DP{rank}] Prefill batch" in prefill.log
            for shard in (0, 1):
                assert f" worker TP{shard} PP0 DP{rank}] engine: " in prefill.log
        for server in it.servers:
            eventually(server.is_idle, what=server.states)


BY_TURNS = ("--load-balance-method", "round_robin")


@pytest.mark.parametrize(
    "lives",
    [
        pytest.param((("--dp", "4"), ("--dp", "2"), ("--dp", "4")), id="rooms name ranks"),
        pytest.param(
            (("--dp", "2", *BY_TURNS), ("--dp", "1"), ("--dp", "2", *BY_TURNS)),
            id="ranks are asked for",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_prefill_may_come_back_with_fewer_ranks_and_with_more(lives: tuple[tuple[str, ...], ...]) -> None:
    """Decode lives on. It has learned of ranks that are no more, by which it looks for rooms or asks for them."""
    with cluster(prefills=1, decodes=1, flags=FLAGS, prefill_flags=lives[0]) as it:
        assert it.router is not None
        (prefill,), router = it.prefills, it.router
        expected = [router.generate(prompt, max_new_tokens=8)["output_ids"] for prompt in PROMPTS]
        for former, flags in pairwise(lives):
            come_back_with(it, prefill, former, flags)
            found = [both_halves_by_room(it, prompt, 1000 + n) for n, prompt in enumerate(PROMPTS)]
            assert [answer["output_ids"] for _, answer in found] == expected
            assert {answer["meta_info"]["path"] for _, answer in found} == {"remote"}
            # By turns or by room, for the rooms follow each other.
            assert [half["meta_info"].get("dp_rank", 0) for half, _ in found] == [n % int(flags[1]) for n in range(24)]
            assert [router.generate(prompt, max_new_tokens=8)["output_ids"] for prompt in PROMPTS] == expected
        for server in it.servers:
            eventually(server.is_idle, what=server.states)


def come_back_with(it: Cluster, server: Server, former: tuple[str, ...], flags: tuple[str, ...]) -> None:
    """Killed, and started on the same ports with other flags in the place of some that it had."""
    member = server.member
    member.process.kill()
    member.process.wait()
    start = member.command.index(former[0])
    assert member.command[start : start + len(former)] == former
    member.command = (*member.command[:start], *flags, *member.command[start + len(former) :])
    it.fleet.restart(member)
    it.fleet.wait_ready(timeout_s=90)
    assert it.router is not None
    eventually(it.router.is_ready, what=lambda: member.name)  # it asks at intervals, and has seen the first life end


@pytest.fixture(scope="module")
def by_room() -> Iterator[Cluster]:
    """Rooms name the rank of the prefill, which has four, unless somebody routes a request elsewhere."""
    with cluster(prefills=1, decodes=1, flags=FLAGS, prefill_flags=("--dp", "4"), decode_flags=("--dp", "2")) as it:
        yield it


def both_halves(it: Cluster, prompt: str, room: int, *, rank: int) -> tuple[dict, dict]:
    """What prefill, routed to `rank`, and decode answer to a router that names ranks by itself."""
    left, right = {"data_parallel_rank": rank}, {"data_parallel_rank": room // 4 % 2}
    return both_halves_by_room(it, prompt, room, left, right)


def both_halves_by_room(
    it: Cluster, prompt: str, room: int, left: dict[str, int] | None = None, right: dict[str, int] | None = None
) -> tuple[dict, dict]:
    """What prefill and decode answer to a router. left, right: what it says to one of them only."""
    (prefill,), (decode,) = it.prefills, it.decodes
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": room}
    with ThreadPoolExecutor(1) as pool:
        half = pool.submit(prefill.generate, prompt, max_new_tokens=8, **pair, **left or {})
        answer = decode.generate(prompt, max_new_tokens=8, **pair, **right or {})
        return half.result(), answer


def test_a_router_that_names_ranks_may_contradict_the_rooms(by_room: Cluster) -> None:
    """Three rooms of four are on another rank than they imply; decode is sent on to it."""
    assert by_room.router is not None
    expected = [by_room.router.generate(prompt, max_new_tokens=8)["output_ids"] for prompt in PROMPTS]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda n: both_halves(by_room, PROMPTS[n], 1000 + n, rank=n // 4 % 4), range(24)))
    assert [answer["output_ids"] for _, answer in found] == expected
    assert {answer["meta_info"]["path"] for _, answer in found} == {"remote"}
    assert [half["meta_info"]["dp_rank"] for half, _ in found] == [n // 4 % 4 for n in range(24)]
    for server in by_room.servers:
        eventually(server.is_idle, what=server.states)


def test_a_half_that_decode_refuses_ends_that_of_prefill_wherever_it_was_routed(by_room: Cluster) -> None:
    """The room of the one names the rank that has it, the rooms of the others do not."""
    (prefill,), (decode,) = by_room.prefills, by_room.decodes
    for rank in range(4):
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "bootstrap_room": 2000 + rank}
        half = prefill.stream(PROMPTS[rank], data_parallel_rank=2, timeout=60, **pair)
        eventually(lambda: prefill.states()[2]["rooms"], what=prefill.states)
        began = time.monotonic()
        with pytest.raises(HttpError) as refused:
            decode.generate(PROMPTS[rank], routed_dp_rank=2, **pair)
        assert (refused.value.status, refused.value.error["param"]) == (400, "routed_dp_rank")
        assert half.rest()[-1]["error"]["code"] == "peer_aborted"
        assert time.monotonic() - began < SOON_S
    for server in by_room.servers:
        eventually(server.is_idle, what=server.states)


@pytest.fixture(scope="module")
def strict() -> Iterator[Cluster]:
    """Its prefill refuses whom a router has sent to another rank than the room implies."""
    flags = ("--dp", "2", "--disaggregation-dp-rank-conflict", "fail")
    with cluster(prefills=1, decodes=1, flags=FLAGS, prefill_flags=flags) as it:
        yield it


def test_a_route_that_is_refused_ends_both_halves_at_once(strict: Cluster) -> None:
    """Decode has said READY to the rank that the room implies, and hears from there whom to ask for the reason."""
    (prefill,), (decode,) = strict.prefills, strict.decodes
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port(prefill), "timeout": 60}
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        half = pool.submit(prefill.generate, PROMPTS[0], data_parallel_rank=0, bootstrap_room=7, **pair)
        answer = pool.submit(decode.generate, PROMPTS[0], bootstrap_room=7, **pair)
    assert time.monotonic() - began < SOON_S
    failed = answer.exception()
    assert isinstance(failed, HttpError)
    assert (failed.status, failed.error["code"]) == (400, "route_conflict")
    assert "bootstrap_room 7 implies dp_rank 1" in failed.error["message"]
    assert f"Set {FORCE_QUERY}=1 to allow mixed routing." in failed.error["message"]
    own = re.compile(r" route_conflict .* dp_rank=0 ")  # not the one that the room implies
    eventually(lambda: own.search(prefill.log), what=lambda: prefill.log)
    assert "implies dp_rank 1" in json.dumps(half.result() if half.exception() is None else str(half.exception()))


def test_a_rank_that_our_router_says_to_both_halves_contradicts_no_room(strict: Cluster) -> None:
    """Its rooms imply the other rank half of the time."""
    assert strict.router is not None
    answers = [strict.router.generate(PROMPTS[0], max_new_tokens=2, routed_dp_rank=0) for _ in range(12)]
    assert {answer["meta_info"]["path"] for answer in answers} == {"remote"}


@pytest.mark.slow
def test_who_is_forced_to_ask_finds_a_route_that_contradicts_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_QUERY, "1")
    flags = ("--dp", "2", "--disaggregation-dp-rank-conflict", "fail")
    with cluster(prefills=1, decodes=1, flags=FLAGS, prefill_flags=flags) as it:
        for room, rank in ((7, 0), (8, 1), (9, 1)):
            half, answer = both_halves_by_room(it, PROMPTS[room], room, {"data_parallel_rank": rank})
            assert (half["meta_info"]["dp_rank"], answer["meta_info"]["path"]) == (rank, "remote")
        for server in it.servers:
            eventually(server.is_idle, what=server.states)
