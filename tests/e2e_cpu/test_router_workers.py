"""Which workers a router uses, over real sockets: circuit breakers, and workers that come and go."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from router_fakes import Answer, FakeWorker, Fleet, Refuse, Reject, eventually, fleet

from tandem.core.settings import Role
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


def test_what_is_under_way_is_told_for_as_long_as_it_is() -> None:
    with fleet() as made, ThreadPoolExecutor() as pool:
        decode, go_on = made.decodes[0], threading.Event()
        decode.behaves(Reject(400, once=go_on.is_set))
        asked = pool.submit(ask, made, text=["x", "y"])
        eventually(lambda: decode.generations, "it is there")
        assert CLIENT.get(made.url + "/load").json() == {"server_load": 2}
        assert metric(made, "worker_active_prompts", decode) == 2
        assert "tandem:router_active_requests 1.0" in CLIENT.get(made.url + "/metrics").text
        go_on.set()
        assert asked.result().status_code == 400
        assert metric(made, "worker_active_prompts", decode) == 0


# --- workers that come and go -----------------------------------------------------------------------------------------


def add(made: Fleet, worker: FakeWorker, **fields: Any) -> httpx.Response:
    body = {"url": worker.url, "worker_type": worker.role.value} | fields
    return CLIENT.post(made.url + "/workers", json=body)


def known(made: Fleet) -> dict[str, dict[str, Any]]:
    document = CLIENT.get(made.url + "/workers").json()
    assert document["total"] == len(document["workers"])
    return {worker["url"]: worker for worker in document["workers"]}


def test_a_worker_that_is_added_is_used_and_one_that_is_removed_is_not() -> None:
    with fleet() as made:
        old, new = made.decodes[0], FakeWorker(Role.DECODE)
        accepted = add(made, new)
        assert (accepted.status_code, accepted.json()["url"]) == (202, new.url)
        page = made.url + accepted.headers["location"]
        eventually(lambda: CLIENT.get(page).json()["is_healthy"], "it joins")
        assert add(made, new).json()["worker_id"] == accepted.json()["worker_id"], "the same one"
        counts = {"prefill_count": 1, "decode_count": 2, "regular_count": 0}
        assert CLIENT.get(made.url + "/workers").json()["stats"] == counts
        gone = CLIENT.delete(f"{made.url}/workers/{known(made)[old.url]['id']}")
        assert (gone.status_code, gone.json()["status"]) == (202, "accepted")
        assert set(known(made)) == {made.prefills[0].url, new.url}
        gauges = [line for line in CLIENT.get(made.url + "/metrics").text.splitlines() if "router_worker_live{" in line]
        assert len(gauges) == 2
        assert not any(old.url in line for line in gauges)
        assert [ask(made).status_code for _ in range(3)] == [200] * 3
        assert (len(old.generations), len(new.generations)) == (0, 3)
        assert metric(made, "worker_live", new) == 1
        new.kill()


def test_a_worker_answers_what_it_has_before_it_is_gone() -> None:
    with fleet(decodes=2) as made:
        busy = made.decodes[0]
        go_on = threading.Event()
        busy.behaves(Reject(400, code="late", once=go_on.is_set))
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(ask, made) for _ in made.decodes]
            eventually(lambda: busy.generations, "one of them is at the first")
            worker_id = known(made)[busy.url]["id"]
            assert CLIENT.delete(f"{made.url}/workers/{worker_id}").status_code == 202
            assert known(made)[busy.url]["is_leaving"]
            assert [ask(made).status_code for _ in range(4)] == [200] * 4
            assert len(busy.generations) == 1
            go_on.set()
            assert sorted(it.result().status_code for it in asked) == [200, 400], "its own answer"
        eventually(lambda: busy.url not in known(made), "it has left")
        assert CLIENT.get(f"{made.url}/workers/{worker_id}").status_code == 404


def test_an_abort_by_name_reaches_who_is_to_leave_and_who_drains() -> None:
    with fleet(prefills=2, decodes=2) as made, ThreadPoolExecutor() as pool:
        go_on = threading.Event()
        for worker in made.prefills + made.decodes:
            worker.behaves(Reject(400, once=go_on.is_set))
        asked = pool.submit(ask, made, rid="mine")
        leaving, draining = eventually(lambda: made.seen()[1:] and (made.prefills[0], made.decodes[0]))
        assert leaving.generations
        assert draining.generations
        CLIENT.delete(f"{made.url}/workers/{known(made)[leaving.url]['id']}")
        draining.is_healthy = False
        eventually(lambda: not known(made)[draining.url]["is_healthy"], "it gets no more requests")
        assert CLIENT.post(made.url + "/abort_request", json={"rid": "mine"}).status_code == 200
        told = [worker for worker in (leaving, draining) if any(it.path == "/abort_request" for it in worker.seen)]
        go_on.set()
        asked.result()
        assert told == [leaving, draining]


def test_a_worker_is_the_same_one_however_its_url_is_written() -> None:
    with fleet() as made:
        new = FakeWorker(Role.DECODE)
        for url in (new.url, f"127.0.0.1:{new.port}", f"HTTP://127.0.0.1:0{new.port}/"):
            params = {"url": url, "worker_type": "decode"}
            assert CLIENT.post(made.url + "/add_worker", params=params).json()["url"] == new.url
        assert len(known(made)) == 3
        assert CLIENT.post(made.url + "/remove_worker", params={"url": f"127.0.0.1:{new.port}"}).status_code == 202
        eventually(lambda: new.url not in known(made), "it has left")
        new.kill()


def test_prefills_bring_their_bootstrap_port() -> None:
    with fleet() as made:
        new = FakeWorker(Role.PREFILL)
        made.decodes[0].prefills.append(new)
        add(made, new, bootstrap_port=7777)
        eventually(lambda: known(made)[new.url]["is_healthy"], "it joins")
        CLIENT.post(made.url + "/remove_worker", params={"url": made.prefills[0].url})
        eventually(lambda: made.prefills[0].url not in known(made), "it has left")
        assert ask(made).status_code == 200
        assert new.generations[-1].body["bootstrap_port"] == 7777
        new.kill()


def test_a_prefill_that_is_known_is_the_same_without_a_port_and_another_one_with_another() -> None:
    with fleet() as made:
        known_as = {"url": made.prefills[0].url, "worker_type": "prefill"}
        assert CLIENT.post(made.url + "/workers", json=known_as).status_code == 202
        refused = CLIENT.post(made.url + "/workers", json=known_as | {"bootstrap_port": 7777})
        assert refused.status_code == 400
        assert "it is known as prefill with bootstrap port" in refused.json()["error"]["message"]


def test_the_older_names_do_the_same() -> None:
    with fleet() as made:
        new = FakeWorker(Role.PREFILL)
        params = {"url": new.url, "worker_type": "prefill", "bootstrap_port": 7777}
        assert CLIENT.post(made.url + "/add_worker", params=params).status_code == 202
        assert new.url in CLIENT.get(made.url + "/list_workers").json()["urls"]
        assert known(made)[new.url]["bootstrap_port"] == 7777
        assert CLIENT.post(made.url + "/remove_worker", params={"url": new.url}).status_code == 202
        eventually(lambda: new.url not in known(made), "it has left")
        assert CLIENT.post(made.url + "/remove_worker", params={"url": new.url}).status_code == 404
        new.kill()


NOT_WORKERS: list[tuple[dict[str, Any], str]] = [
    ({}, "url"),
    ({"url": "http://127.0.0.1:1", "worker_type": "regular"}, "worker_type"),
    ({"url": "ftp://127.0.0.1:1", "worker_type": "decode"}, "url"),
    ({"url": "http://user:word@127.0.0.1:1", "worker_type": "decode"}, "url"),
    ({"url": "http://127.0.0.1:1", "worker_type": "decode", "bootstrap_port": 8998}, "bootstrap_port"),
    ({"url": "http://127.0.0.1:1", "worker_type": "prefill", "bootstrap_port": 0}, "bootstrap_port"),
]


def test_what_is_no_worker_is_refused_by_its_field() -> None:
    with fleet() as made:
        for body, param in NOT_WORKERS:
            for refused in (
                CLIENT.post(made.url + "/workers", json=body),
                CLIENT.post(made.url + "/add_worker", params=body),
            ):
                error = refused.json()["error"]
                assert (refused.status_code, error["code"]) == (400, "invalid_value"), refused.text
                assert param in error["message"]
        assert add(made, made.decodes[0], worker_type="prefill").status_code == 400, "it keeps its role"
        assert CLIENT.delete(made.url + "/workers/nobody").status_code == 404
        assert len(known(made)) == 2


def test_only_the_admin_key_changes_workers() -> None:
    with fleet(api_key="user", admin_api_key="boss") as made:
        body = {"url": "http://127.0.0.1:1", "worker_type": "decode"}
        for key, status in (("", 401), ("user", 401), ("boss", 202)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert CLIENT.post(made.url + "/workers", json=body, headers=headers).status_code == status
            assert CLIENT.get(made.url + "/workers", headers=headers).status_code == (200 if key == "boss" else 401)


def test_without_an_admin_key_nobody_from_elsewhere_changes_workers() -> None:
    """A proxy on this machine speaks for others."""
    with fleet(api_key="user") as made:
        body = {"url": "http://127.0.0.1:1", "worker_type": "decode"}
        headers = {"authorization": "Bearer user"}
        through = headers | {"x-forwarded-for": "10.0.0.7"}
        assert CLIENT.post(made.url + "/workers", json=body, headers=through).status_code == 403
        assert CLIENT.delete(made.url + "/workers/0", headers=through).status_code == 403
        assert CLIENT.post(made.url + "/workers", json=body, headers=headers).status_code == 202
