"""Which workers a router uses, over real sockets: circuit breakers."""

from typing import Any

import httpx
from router_fakes import Answer, FakeWorker, Fleet, Refuse, Reject, eventually, fleet

from tandem.core.values import Cause

CLIENT = httpx.Client(timeout=20)  # making one takes longer than a request
BODY = {"text": "x"}


def ask(made: Fleet, **fields: Any) -> httpx.Response:
    return CLIENT.post(made.url + "/generate", json=BODY | fields)


def metric(made: Fleet, name: str, worker: FakeWorker) -> float:
    lines = CLIENT.get(made.url + "/metrics").text.splitlines()
    (line,) = [it for it in lines if it.startswith(f"tandem:router_{name}{{") and worker.url in it]
    return float(line.split()[-1])


def test_a_decode_that_fails_its_requests_is_left_alone_until_it_does_better() -> None:
    with fleet(decodes=2, cb_failure_threshold=2, cb_success_threshold=1, cb_timeout_duration_secs=0.5) as made:
        bad, good = made.decodes
        bad.behaves(Reject(500))
        while metric(made, "worker_cb_state", bad) == 0:
            assert ask(made).status_code == 200
        failed = len(bad.generations)
        assert failed == 2, "as often as it may fail"
        assert metric(made, "worker_live", bad) == 1
        bad.behaves(Answer())
        eventually(
            lambda: ask(made).status_code == 200 and metric(made, "worker_cb_state", bad) == 0, "it is used again"
        )
        assert len(bad.generations) > failed
        assert metric(made, "worker_cb_state", good) == 0


def test_an_open_breaker_keeps_requests_away_as_long_as_there_is_another_worker() -> None:
    with fleet(decodes=2, cb_failure_threshold=1, cb_timeout_duration_secs=3600.0) as made:
        bad, good = made.decodes
        bad.behaves(Reject(500))
        while not bad.generations:
            assert ask(made).status_code == 200
        served = len(good.generations)
        for _ in range(6):
            assert ask(made).status_code == 200
        assert (len(bad.generations), len(good.generations)) == (1, served + 6)
        workers = {it["url"]: it for it in CLIENT.get(made.url + "/server_info").json()["workers"]}
        assert workers[bad.url]["circuit_breaker"] == "open"
        bad.behaves(Answer())
        good.kill()
        eventually(lambda: ask(made).status_code == 200, "the last one is used whatever its breaker says")
        assert len(bad.generations) > 1


def test_what_a_worker_says_of_its_load_or_its_peer_opens_no_breaker() -> None:
    with fleet(decodes=2, cb_failure_threshold=1, cb_timeout_duration_secs=3600.0) as made:
        made.decodes[0].behaves(Refuse(Cause.QUEUE_FULL), Refuse(Cause.TRANSFER_FAILED), Reject(400), Answer())
        for _ in range(8):
            ask(made)
        assert [metric(made, "worker_cb_state", decode) for decode in made.decodes] == [0, 0]
        assert len(made.decodes[0].generations) >= 4


def test_a_router_without_breakers_exports_none() -> None:
    with fleet(disable_circuit_breaker=True) as made:
        assert "router_worker_cb_state{" not in CLIENT.get(made.url + "/metrics").text
