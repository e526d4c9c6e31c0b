"""Laws of a pair that only an awkward moment shows: a frozen worker, a full pool, a foreign prompt, a fallback.

Nobody stands in front of the halves. A law that is broken shows within seconds: no wait here is longer than `SOON_S`.
The tests share one pair. `tests/mutants/test_real_server.py` names the bugs that they are there for.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any  # JSON documents

import pytest
from cluster import HttpError, Server, bootstrap_port, eventually, frozen, halves

SOON_S = 5.0
FLAGS = ("--deterministic", "--enable-fault-injection", "--stall-timeout", "5")
ROOM = {
    "prefill": ("--max-total-tokens", "512"),
    "decode": ("--max-total-tokens", "640", "--schedule-conservativeness", "0"),
}
PROMPT = [400 - index for index in range(100)]  # six pages and a part of one
FOREVER = {"ignore_eos": True}
rooms = count(1)


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Both have little room; prefill has less."""
    folder = tmp_path_factory.mktemp("laws")
    with halves(folder, (*FLAGS, *ROOM["prefill"]), (*FLAGS, *ROOM["decode"])) as found:
        yield found


@pytest.fixture
def prefill(it: tuple[Server, Server]) -> Server:
    return it[0]


@pytest.fixture
def decode(it: tuple[Server, Server]) -> Server:
    return it[1]


def pair_with(prefill: Server) -> dict[str, Any]:
    room = {"bootstrap_port": bootstrap_port(prefill), "bootstrap_room": next(rooms)}
    return {"bootstrap_host": "127.0.0.1", "timeout": SOON_S, **room}


def through_both(it: tuple[Server, Server], prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Both halves have to end well, each by itself: decode's answer."""
    prefill, decode = it
    pair = pair_with(prefill)
    with ThreadPoolExecutor(1) as pool:
        half = pool.submit(prefill.generate, prompt, **pair, **fields)
        answer = decode.generate(prompt, **pair, **fields)
        ended = half.result()
    assert ended.get("output_ids") == answer["output_ids"][:1], ended
    return answer


def forget_prefixes(it: tuple[Server, Server]) -> None:
    for server in it:
        eventually(server.is_idle, within_s=SOON_S, what=server.state)
        server.open("POST", "/flush_cache").close()


def quarantined(server: Server) -> int:
    found: int = server.state()["pages"]["quarantined"]
    return found


# --- what two requests share ------------------------------------------------------------------------------------------


def test_tokens_are_the_same_whatever_is_in_the_caches(it: tuple[Server, Server]) -> None:
    prompts = [PROMPT[:length] for length in (100, 40, 33, 64, 90)]

    def answers() -> Iterator[tuple[list[int], str]]:
        for prompt in prompts:  # each finds pages of those before it
            reply = through_both(it, prompt, max_new_tokens=8)
            yield reply["output_ids"], reply["meta_info"]["path"]

    fresh = []
    for prompt in prompts:
        forget_prefixes(it)
        fresh.append((it[1].generate(prompt, max_new_tokens=8)["output_ids"], "remote"))
    forget_prefixes(it)
    assert list(answers()) == fresh


def test_answers_that_push_each_other_back_are_those_of_each_alone(it: tuple[Server, Server]) -> None:
    prompts = [[30 + 9 * number, *PROMPT[number : 40 + 7 * number]] for number in range(6)]

    def ask(prompt: list[int]) -> list[int]:
        answer: list[int] = through_both(it, prompt, max_new_tokens=90, sampling_params=FOREVER)["output_ids"]
        return answer

    alone = [ask(prompt) for prompt in prompts]
    before = it[1].metric("sglang:num_retracted_requests_total{")
    for _ in range(20):  # on a busy machine some may have ended before the others come
        forget_prefixes(it)
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(ask, prompts)) == alone
        if it[1].metric("sglang:num_retracted_requests_total{") > before:
            break
    else:
        pytest.fail("nobody was ever pushed back")
    for _ in range(2):  # what was left behind shows here, and once more
        forget_prefixes(it)
        assert [ask(prompt) for prompt in prompts] == alone
    forget_prefixes(it)


def test_one_room_is_no_proof_of_one_prompt(prefill: Server, decode: Server) -> None:
    """A room that two clients drew: nobody gets the answer to the prompt of the other, or ends its half."""
    mine, theirs = PROMPT, PROMPT[::-1]
    pair = pair_with(prefill)
    half = prefill.open_stream(theirs, **pair)
    with pytest.raises(HttpError) as refused:
        decode.generate(mine, **pair)
    assert refused.value.error["code"] == "protocol"
    assert "another prompt" in refused.value.error["message"]
    assert decode.generate(theirs, **pair)["meta_info"]["path"] == "remote"
    assert half.getresponse().status == 200
    half.close()


# --- what is held, and by whom ----------------------------------------------------------------------------------------


def test_pages_that_a_worker_may_still_touch_belong_to_nobody_else(prefill: Server, decode: Server) -> None:
    """Both clients leave while the workers, frozen, could at any moment read the one's pages and write the other's."""
    pair = pair_with(prefill)
    with frozen(decode, "worker_process"):
        connections = [server.open_stream(PROMPT[50:] + PROMPT[:50], **pair) for server in (prefill, decode)]
        eventually(lambda: prefill.metric("tandem:worker_pinned_pages{") == 7, within_s=SOON_S, what=prefill.state)
        with frozen(prefill, "worker_process"):
            for connection in connections:
                connection.close()
            for server in (prefill, decode):
                eventually(lambda server=server: quarantined(server), within_s=SOON_S, what=server.state)
    for server in (prefill, decode):
        eventually(server.is_idle, within_s=SOON_S, what=server.state)
    assert prefill.metric("tandem:worker_live_rooms{") == 0


def test_a_request_that_runs_does_not_wait_in_any_queue(decode: Server) -> None:
    stream = decode.stream(PROMPT, max_new_tokens=500, sampling_params=FOREVER)
    assert stream.next() is not None
    seen = {name: decode.metric(f"sglang:num_{name}_reqs{{") for name in ("running", "queue")}
    stream.close()
    assert seen == {"running": 1, "queue": 0}


# --- how a half ends --------------------------------------------------------------------------------------------------


def test_what_prefill_refuses_decode_does_not_wait_for(prefill: Server, decode: Server) -> None:
    pair, prompt = pair_with(prefill), PROMPT * 6
    half = prefill.open_stream(prompt, **pair)
    with pytest.raises(HttpError) as refused:
        decode.generate(prompt, **pair)
    half.close()
    assert refused.value.error["code"] == "context_length_exceeded"


def test_the_ledger_of_a_request_that_fell_back_has_the_time_that_it_waited_before(
    it: tuple[Server, Server],
) -> None:
    """Not only their sum: what no stage of the node has would appear as the time of sending."""
    prefill, decode = it
    forget_prefixes(it)
    decode.call("PUT", "/debug/faults", {"disagg_failure_prob": 1})
    pair = pair_with(prefill)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode.generate, PROMPT, **pair)
        eventually(lambda: waited(decode, "arriving") > 0.2, within_s=SOON_S, what=decode.state)
        half = prefill.open_stream(PROMPT, **pair)
        meta = answer.result()["meta_info"]
    half.close()
    decode.call("PUT", "/debug/faults", {"disagg_failure_prob": 0})
    assert meta["path"] == "fallback"
    assert meta["ttft_ledger"].get("decode_transferred", 0) > 0.2


def waited(server: Server, state: str) -> float:
    """Seconds that a request has been in that state."""
    return max((wait["age_seconds"] for wait in server.get("/debug/waits") if wait["state"] == state), default=0)
