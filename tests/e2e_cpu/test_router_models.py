"""Workers that serve different models behind one router: over real sockets, and as processes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import HttpError, Server, eventually
from router_fakes import FakeWorker, Fleet, fleet
from router_fakes import eventually as soon

from tandem.cli import fleet as processes
from tandem.cli.fleet import listen, serve_words
from tandem.cli.ports import free_ports

CLIENT = httpx.Client(timeout=20)  # making one takes longer than a request
MESSAGES = [{"role": "user", "content": "x"}]


@contextmanager
def two_models() -> Iterator[Fleet]:
    """The first prefill and decode serve `a` and `both`, the others `b` and `both`."""
    with fleet(prefills=2, decodes=2, enable_igw=True) as made:
        for workers in (made.prefills, made.decodes):
            for worker, name in zip(workers, "ab", strict=True):
                worker.models = [name, "both"]
        soon(lambda: made.router.router.registry.paired_models() == ["a", "both", "b"], "all names")
        yield made


def chat(made: Fleet, **fields: Any) -> httpx.Response:
    return CLIENT.post(made.url + "/v1/chat/completions", json={"messages": MESSAGES} | fields)


def served(made: Fleet) -> list[int]:
    return [len(worker.generations) for worker in (*made.prefills, *made.decodes)]


def test_requests_go_to_the_pair_that_serves_their_model() -> None:
    with two_models() as made:
        assert [chat(made, model="b").status_code for _ in range(3)] == [200] * 3
        assert served(made) == [0, 3, 0, 3]
        assert [chat(made, model="a").status_code for _ in range(2)] == [200] * 2
        assert served(made) == [2, 3, 2, 3]
        assert [chat(made, model="both").status_code for _ in range(4)] == [200] * 4
        assert sum(served(made)) == 2 * 9


def test_who_names_none_gets_the_first() -> None:
    with two_models() as made:
        assert [chat(made).status_code for _ in range(3)] == [200] * 3
        assert served(made) == [3, 0, 3, 0]
        body = {"text": "x", "model": "unknown"}  # as gateways say it there
        assert CLIENT.post(made.url + "/generate", json=body).status_code == 200


def test_an_unknown_model_is_404_and_one_whose_workers_are_gone_is_503() -> None:
    with two_models() as made:
        refused = chat(made, model="c")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"].endswith("'a', 'both', 'b'")
        assert served(made) == [0, 0, 0, 0]
        made.decodes[1].kill()
        soon(lambda: made.router.router.registry.paired_models() == ["a", "both"], "b has no pair")
        gone = chat(made, model="b")
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "no_live_pair")
        assert chat(made, model="both").status_code == 200
        made.decodes[1].start()


def test_the_models_of_all_pairs_are_listed_and_shown_one_by_one() -> None:
    with two_models() as made:
        listed = CLIENT.get(made.url + "/v1/models").json()
        assert [(model["id"], model["of"]) for model in listed["data"]] == [
            ("a", made.decodes[0].url),
            ("both", made.decodes[0].url),
            ("b", made.decodes[1].url),
        ]
        assert CLIENT.get(made.url + "/v1/models/").json() == listed
        made.decodes[1].seen.clear()
        CLIENT.get(made.url + "/v1/models/b")
        assert "/v1/models/b" in [seen.path for seen in made.decodes[1].seen]
        assert CLIENT.get(made.url + "/v1/models/c").status_code == 404
        assert CLIENT.post(made.url + "/tokenize", json={"prompt": "x", "model": "b"}).status_code == 200
        assert [seen.path for seen in made.decodes[1].seen].count("/tokenize") == 1
        assert CLIENT.post(made.url + "/tokenize", json={"prompt": "x", "model": "c"}).status_code == 404
        workers = {it["url"]: it["models"] for it in CLIENT.get(made.url + "/workers").json()["workers"]}
        assert workers[made.prefills[1].url] == ["b", "both"]


def test_a_worker_that_tells_no_names_serves_any() -> None:
    with fleet(enable_igw=True) as made:
        for worker in (*made.prefills, *made.decodes):
            worker.models = []
        new = FakeWorker(made.decodes[0].role)
        new.models, new.prefills = [], made.prefills
        told = {"url": new.url, "worker_type": "decode"}
        page = made.url + CLIENT.post(made.url + "/workers", json=told).headers["location"]
        soon(lambda: CLIENT.get(page).json()["is_healthy"], "it joins")
        CLIENT.post(made.url + "/remove_worker", params={"url": made.decodes[0].url})
        assert chat(made, model="anything").status_code == 200
        assert chat(made, model="fake").status_code == 200
        assert len(new.generations) == 2
        new.kill()


def test_without_the_flag_nobody_is_asked_and_any_name_goes_anywhere() -> None:
    with fleet(decodes=2) as made:
        assert [chat(made, model=name).status_code for name in ("x", "fake")] == [200, 200]
        assert not any(seen.path == "/v1/models" for worker in made.prefills + made.decodes for seen in worker.seen)


# --- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def two_pairs(names: tuple[str, str]) -> Iterator[Server]:
    """A router in front of two pairs of the bundled model, which each serve it under a name of their own."""
    with tempfile.TemporaryDirectory(prefix="tandem-test-") as folder, processes.Fleet(Path(folder), engines=4) as made:
        listener = listen(0)
        words = ["router", "--enable-igw"]
        for name in names:
            left, bootstrap, right = free_ports(3)
            mode = ("--served-model-name", name, "--disaggregation-mode")
            port = str(bootstrap)
            prefill = serve_words("tandem/mini", left, *mode, "prefill", "--disaggregation-bootstrap-port", port)
            made.start(f"prefill-{name}", prefill, port=left)
            made.start(f"decode-{name}", serve_words("tandem/mini", right, *mode, "decode"), port=right)
            words += ["--prefill", f"http://127.0.0.1:{left}", port, "--decode", f"http://127.0.0.1:{right}"]
        router = Server(made.start_router(words, listener))
        made.wait_ready(timeout_s=120)
        yield router


@pytest.mark.slow
def test_two_pairs_answer_for_their_models_and_for_no_other() -> None:
    with two_pairs(("small", "other")) as router:
        eventually(lambda: [it["id"] for it in router.get("/v1/models")["data"]] == ["small", "other"])
        body = {"prompt": "How many?", "max_tokens": 4, "temperature": 0}
        answers = [router.call("POST", "/v1/completions", body | {"model": name}) for name in ("small", "other") * 2]
        assert [answer["model"] for answer in answers] == ["small", "other"] * 2
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        with pytest.raises(HttpError, match="model_not_found") as refused:
            router.call("POST", "/v1/completions", body | {"model": "neither"})
        assert refused.value.status == 404
