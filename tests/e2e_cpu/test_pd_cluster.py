"""Router, prefill, decode and a unified server as processes: same tokens, everything freed, all replayable."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # JSON documents

import pytest
from cluster import Cluster, HttpError, Server, cluster, eventually

from tandem.cli import replay
from tandem.server.node.record import records_at

SMALL = ("--max-total-tokens", "8192", "--flight-record-max-bytes", "100000")  # so that records are rotated
PROMPTS = {
    "one token": [500],
    "one page": list(range(100, 116)),
    "one page and a token": list(range(100, 117)),
    "a word problem": "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "two chunks": [7 + index % 450 for index in range(700)],
    "many chunks": [11 + index * 7 % 480 for index in range(2500)],
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flight")


@pytest.fixture(scope="module")
def it(records: Path) -> Iterator[Cluster]:
    with cluster(prefills=1, decodes=1, unified=True, flags=["--flight-record", str(records), *SMALL]) as it:
        yield it


@pytest.mark.parametrize("name", list(PROMPTS))
def test_prefill_and_decode_give_the_tokens_of_one_engine(router: Server, unified: Server, name: str) -> None:
    ours, theirs = router.generate(PROMPTS[name]), unified.generate(PROMPTS[name])
    assert ours["output_ids"] == theirs["output_ids"]
    assert (ours["meta_info"]["path"], theirs["meta_info"]["path"]) == ("remote", "unified")


def test_sampled_tokens_are_the_same_too_because_only_seed_and_position_matter(router: Server, unified: Server) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 4711, "ignore_eos": True}
    ours = router.generate(PROMPTS["a word problem"], sampling_params=sampling)
    theirs = unified.generate(PROMPTS["a word problem"], sampling_params=sampling)
    assert len(ours["output_ids"]) == 32
    assert ours["output_ids"] == theirs["output_ids"]


def test_the_answer_says_where_its_kv_came_from_and_where_the_time_went(router: Server, it: Cluster) -> None:
    tokens = [400 + index for index in range(100)]  # seven pages, in no cache yet
    meta = router.generate(tokens)["meta_info"]
    page_bytes = meta["kv_bytes"] // meta["kv_pages"]
    assert meta["kv_pages"] == 7
    assert page_bytes == 4 * 4 * 2 * 16 * 32 * 4  # heads, layers, key and value, tokens, numbers, bytes
    assert {"edge_receive", "peer_wire", "edge_send"} <= set(meta["ttft_ledger"])
    assert sum(meta["ttft_ledger"].values()) == pytest.approx(meta["ttft"], abs=1e-6)
    assert it.decodes[0].generate([5, 6, 7])["meta_info"]["path"] == "local"


def test_what_decode_has_cached_does_not_travel_again(router: Server) -> None:
    begun = [300 + index % 150 for index in range(200)]  # twelve full pages, and a few tokens
    first = router.generate(begun)["meta_info"]
    longer = router.generate(begun + [7] * 40)["meta_info"]
    assert (first["path"], first["kv_pages"]) == ("remote", 13)
    assert (longer["path"], longer["kv_pages"]) == ("remote", 15 - 12)


def test_full_pages_of_several_samples_travel_once(router: Server, unified: Server) -> None:
    prompt = [310 + index % 140 for index in range(201)]  # twelve full pages, and a few tokens
    sampling = {"n": 4, "temperature": 1.0, "sampling_seed": 11, "ignore_eos": True}
    ours, theirs = ([*server.generate(prompt, sampling_params=sampling)] for server in (router, unified))
    assert [answer["output_ids"] for answer in ours] == [answer["output_ids"] for answer in theirs]
    assert sum(answer["meta_info"]["kv_pages"] for answer in ours) == 13 + 3 * 1


def test_many_at_once_all_get_their_tokens_and_leave_nothing(router: Server, it: Cluster) -> None:
    answers: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        prompt = [20 + number] * (30 + 17 * number)
        sampling = {"ignore_eos": True}
        answers[number] = router.generate(prompt, max_new_tokens=12, sampling_params=sampling)["output_ids"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: len(tokens) for number, tokens in answers.items()} == dict.fromkeys(range(12), 12)
    for server in it.servers:
        eventually(server.is_idle, what=server.state)


def test_a_client_that_leaves_frees_both_halves(router: Server, it: Cluster) -> None:
    stream = router.stream(PROMPTS["a word problem"], max_new_tokens=5000, sampling_params={"ignore_eos": True})
    assert stream.next() is not None
    assert not it.decodes[0].is_idle()
    stream.close()
    for server in it.servers:
        eventually(server.is_idle, what=server.state)


def test_a_client_that_leaves_before_the_first_token_frees_both_halves(router: Server, it: Cluster) -> None:
    for _ in range(5):
        router.open_stream(PROMPTS["many chunks"]).close()
    for server in it.servers:
        eventually(server.is_idle, what=server.state)


def test_a_half_whose_partner_never_comes_ends_at_its_deadline_with_the_stage(it: Cluster) -> None:
    prefill, decode = it.prefills[0], it.decodes[0]
    bootstrap = int(prefill.get("/server_info")["disaggregation_bootstrap_port"])
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap, "timeout": 0.5}
    with pytest.raises(HttpError) as alone:
        decode.generate([5, 6, 7], bootstrap_room=77, **pair)
    assert alone.value.status == 504
    assert alone.value.error["code"] == "deadline_exceeded"
    eventually(decode.is_idle, what=decode.state)
    stream = prefill.stream([5, 6, 7], bootstrap_room=78, **pair)
    assert stream.rest()[-1]["error"]["code"] == "deadline_exceeded"
    eventually(prefill.is_idle, what=prefill.state)


def test_two_requests_for_one_room_only_the_second_is_refused(it: Cluster) -> None:
    prefill = it.prefills[0]
    first = prefill.stream([5, 6, 7], bootstrap_room=79, timeout=1)
    second = prefill.stream([5, 6, 7], bootstrap_room=79, timeout=1)
    assert second.rest()[-1]["error"]["code"] == "duplicate_room"
    assert first.rest()[-1]["error"]["code"] == "deadline_exceeded"


def test_a_bootstrap_address_where_nobody_is_ends_the_request_with_a_cause(it: Cluster) -> None:
    with pytest.raises(HttpError) as unknown:
        it.decodes[0].generate([5, 6], bootstrap_host="127.0.0.1", bootstrap_port=9, bootstrap_room=80, timeout=0.7)
    assert unknown.value.error["code"] in ("peer_unknown", "deadline_exceeded")
    assert unknown.value.error["stage"] == "peer"
    assert "127.0.0.1:9" in unknown.value.error["message"]


def test_what_all_nodes_did_replays_identically(
    router: Server, unified: Server, it: Cluster, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[dict[str, Any]] = []

    def each_is_long_enough() -> bool:
        """Whoever rotates may delete an older segment of another: of that one only what came later is left."""
        for server in (router, unified):
            server.generate(PROMPTS["two chunks"])
        for server in it.servers:
            eventually(server.is_idle, what=server.state)
        capsys.readouterr()
        assert replay.compare(records_at(records), as_json=True) == 0
        found[:] = json.loads(capsys.readouterr().out)["records"]
        assert len(found) == 3
        steps = [record["steps"] for record in found]
        return min(steps) > 0 and sum(steps) > 60 and any(record["segments"] == 2 for record in found)

    eventually(each_is_long_enough, within_s=60.0, what=lambda: found)
