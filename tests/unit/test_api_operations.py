"""Endpoints for operators and gateways, the keys, and what the pages are generated from."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_fakes import END, TEMPLATE, Script, default_tokenizer, ids, load_tokenizer, prompt_of, says, world
from starlette.testclient import TestClient

from errors_page import PAGE, errors_page
from tandem import __version__
from tandem.core.scheduler.request_state import State
from tandem.core.values import Cause
from tandem.server.api import errors, ops
from tandem.server.api.errors import RULES, Problem, Refusal
from tandem.server.api.limits import Task
from tandem.server.api.node_rank import NodeRank
from tandem.server.api.openapi import OF_PAIR, behind_router, bounds, openapi_document, schema_of
from tandem.server.api.openapi_bodies import KEEPS, KEEPS_NONE

CHAT = {"messages": [{"role": "user", "content": "a"}]}
NUMBERS = {
    "num_running_reqs": 2,
    "num_queue_reqs": 3,
    "num_used_tokens": 160,
    "max_total_num_tokens": 1600,
    "token_usage": 0.1,
    "num_prefill_retries_total{reason=forced}": 4,
    "num_prefill_retries_total{reason=not_ready}": 1,
}


def test_health_follows_readiness_and_draining() -> None:
    w = world()
    with w.http() as http:
        assert [http.get(path).status_code for path in ("/health", "/ready", "/ping")] == [200] * 3
        assert http.get("/health").content == b""
        w.client.drain()
        assert [http.get(path).status_code for path in ("/health", "/ready", "/ping")] == [503] * 3
        assert http.post("/ping").status_code == 503


@pytest.mark.parametrize(("mode", "role"), [("null", "unified"), ("prefill", "prefill"), ("decode", "decode")])
def test_health_says_which_role_a_router_has_here(mode: str, role: str) -> None:
    with world(disaggregation_mode=mode).http() as http:
        assert http.get("/health").headers["x-tandem-role"] == role


def test_health_of_a_prefill_says_where_its_bootstrap_server_listens() -> None:
    with world(disaggregation_mode="prefill", disaggregation_bootstrap_port=8999).http() as http:
        assert http.get("/health").headers["x-tandem-bootstrap-port"] == "8999"
    with world(disaggregation_mode="decode", disaggregation_bootstrap_port=8999).http() as http:
        assert "x-tandem-bootstrap-port" not in http.get("/health").headers


def test_health_tells_which_process_makes_no_progress() -> None:
    w = world()
    with w.http() as http:
        w.client.ranks[0].trouble = "the worker process hangs"
        for path in ("/health", "/ready", "/health_generate"):
            answer = http.get(path)
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the worker process hangs")
        assert http.get("/server_info").json()["status"] == "not_ready"
        w.client.ranks[0].trouble = ""
        assert http.get("/health").status_code == 200
    assert w.node.submits == []


def test_a_request_that_has_just_succeeded_spares_the_canary() -> None:
    w = world()
    with w.http() as http:
        assert http.post("/generate", json={"text": "x"}).status_code == 200
        answer = http.get("/health_generate").json()
    assert (answer["checked"], answer["path"]) == ("request", "unified")
    assert len(w.node.submits) == 1


def test_neither_a_canary_nor_a_failure_spares_the_next_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "PROBE_NS", 0)
    w = world(lambda request, payload: Script(failure=Cause.ENGINE_FAILED) if request.max_new_tokens > 1 else Script())
    with w.http() as http:
        assert http.post("/generate", json={"text": "x"}).status_code == 500
        assert [http.get("/health_generate").json()["checked"] for _ in range(2)] == ["engine", "engine"]
    assert len(w.node.submits) == 3


def test_an_old_success_spares_no_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "FRESH_NS", 0)
    w = world()
    with w.http() as http:
        http.post("/generate", json={"text": "x"})
        assert http.get("/health_generate").json()["checked"] == "engine"


def test_health_generate_generates_a_token() -> None:
    w = world()
    with w.http() as http:
        answer = http.get("/health_generate")
    assert (answer.status_code, answer.json()["checked"]) == (200, "engine")
    assert w.node.submits[0].request.max_new_tokens == 1
    assert w.log.getvalue() == ""


def test_health_generate_says_why_it_failed() -> None:
    with world(lambda request, payload: Script(failure=Cause.WORKER_LOST)).http() as http:
        answer = http.get("/health_generate")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")


def test_health_generate_asks_the_node_where_a_prompt_would_need_a_peer() -> None:
    w = world(disaggregation_mode="prefill", answers={"state": {}})
    with w.http() as http:
        assert http.get("/health_generate").json() == {"checked": "node"}
    assert w.node.submits == []


def test_server_info_has_what_gateways_read_and_no_keys() -> None:
    with world(api_key="s3cret", admin_api_key="t0p", answers={"metrics": NUMBERS}).http() as http:
        for path in ("/server_info", "/get_server_info"):
            response = http.get(path, headers={"authorization": "Bearer s3cret"})
            info = response.json()
            assert "s3cret" not in response.text
            assert "t0p" not in response.text
            assert (info["disaggregation_mode"], info["dp_size"], info["tp_size"]) == ("null", 1, 1)
            assert (info["served_model_name"], info["tokenizer_path"]) == ("toy", "/models/toy")
            assert info["max_total_num_tokens"] == 1600
            assert info["internal_states"][0]["last_gen_throughput"] == 0, "nothing runs"
            assert info["dp_ranks"] == [{"dp_rank": 0, "status": "ready"}]


def test_model_info_and_models_describe_the_model() -> None:
    with world(served_model_name=("small",)).http() as http:
        assert http.get("/model_info").json() == http.get("/get_model_info").json()
        assert http.get("/model_info").json()["is_generation"] is True
        (card,) = http.get("/v1/models").json()["data"]
        assert (card["id"], card["root"], card["max_model_len"]) == ("small", "/models/toy", 4096)
        assert http.get("/v1/models/small").json() == card
        assert http.get("/v1/models/other").status_code == 404


def test_a_model_is_known_by_each_of_its_names() -> None:
    with world(says("ok"), served_model_name=("small", "its-family")).http() as http:
        cards = http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["small", "its-family"]
        assert http.get("/v1/models/its-family").json() == cards[1]
        for asked, told in (("small", "small"), ("its-family", "its-family"), (None, "small")):
            body = {"prompt": "hi"} | ({"model": asked} if asked else {})
            assert http.post("/v1/completions", json=body).json()["model"] == told
        refused = http.post("/v1/completions", json={"prompt": "hi", "model": "other"}).json()["error"]
        assert (refused["param"], "'small', 'its-family'" in refused["message"]) == ("model", True)
        assert http.get("/server_info").json()["served_model_name"] == "small"


def test_models_without_a_name_are_all_of_them() -> None:
    with world(served_model_name=("small",)).http() as http:
        assert http.get("/v1/models/").json() == http.get("/v1/models").json()


def test_the_model_card_names_the_dialect_by_which_gateways_pair_servers() -> None:
    """smg takes who has both /version and /server_info for a vLLM, which is paired in another way."""
    with world().http() as http:
        assert http.get("/v1/models").json()["data"][0]["owned_by"] == "sglang"


def test_loads_come_from_the_node() -> None:
    with world(answers={"metrics": NUMBERS}).http() as http:
        (load,) = http.get("/v1/loads?include=core,queues").json()["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (2, 3, 5)
        assert http.get("/get_load").json() == [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 3, "num_tokens": 160}]
        assert http.get("/load").json() == {"server_load": 5}


def test_who_is_computed_before_ready_is_one_request_of_the_load() -> None:
    early = {"num_running_reqs": 2, "num_prefill_bootstrap_queue_reqs": 6, "tandem:num_prefill_early_reqs": 2}
    with world(answers={"metrics": early}).http() as http:
        (load,) = http.get("/v1/loads").json()["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (2, 4, 6)
        assert http.get("/get_load").text.count(".") == 0  # gateways parse integers
        assert http.get("/v1/loads?dp_rank=1").status_code == 400
        assert "sglang:num_running_reqs" in http.get("/v1/loads?format=prometheus").text
        assert http.get("/v1/loads?format=json").json()["dp_rank_count"] == 1
        assert http.get("/v1/loads?format=xml").json()["error"]["param"] == "format"


def test_a_gateway_says_by_a_header_which_dp_rank_gets_a_request_whatever_the_body_says() -> None:
    with world(ranks=3).http() as http:

        def dp_rank(header: str, **fields: int) -> Any:
            answer = http.post("/generate", json={"text": "x"} | fields, headers={"X-Data-Parallel-Rank": header})
            return answer.json().get("meta_info", {}).get("dp_rank", answer.json().get("error", {}).get("param"))

        assert [dp_rank(str(rank), routed_dp_rank=1, data_parallel_rank=2) for rank in (2, 0, 1)] == [2, 0, 1]
        assert dp_rank("3") == "routed_dp_rank"
        for header in ("", "-1", "x", "1.0", "0,1", "1" * 5000, "1024"):
            assert dp_rank(header) == "X-Data-Parallel-Rank"


def test_flush_and_debug_ask_the_node() -> None:
    with world(answers={"flush": {}, "waits": [{"reason": "PEER"}], "state": {"pages": 1}}).http() as http:
        assert http.post("/flush_cache").status_code == 200
        assert http.get("/debug/waits").json() == [{"reason": "PEER"}]
        assert http.get("/debug/state").json() == {"pages": 1}


def test_a_cache_that_nobody_has_flushed_is_not_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_silent(self: NodeRank, what: str, **_: object) -> bytes:
        raise Refusal(Problem.NODE_SILENT, "the node did not answer")

    with world(is_ready=False).http() as http:
        loading = http.post("/flush_cache")
    monkeypatch.setattr(NodeRank, "query", is_silent)
    with world(ranks=2).http() as http:
        silent = http.post("/flush_cache")
    assert [answer.status_code for answer in (loading, silent)] == [503, 503]
    assert loading.json()["error"]["code"] == "not_ready"
    assert (silent.json()["error"]["code"], silent.json()["error"]["message"]) == (
        "node_silent",
        "DP rank 0, 1 did not answer, and may not have flushed its cache",
    )


def test_loads_of_a_rank_that_is_gone_are_not_said_to_be_of_none() -> None:
    with (w := world(ranks=2, answers={"metrics": NUMBERS})).http() as http:
        w.client.lose("DP rank 1: killed", 1)
        assert http.get("/v1/loads?dp_rank=0").status_code == 200
        gone, never = (http.get(f"/v1/loads?dp_rank={number}") for number in (1, 2))
    assert (gone.status_code, gone.json()["error"]["message"]) == (503, "DP rank 1: killed")
    assert (never.status_code, never.json()["error"]["param"]) == (400, "dp_rank")


def test_debug_is_for_the_own_machine_only() -> None:
    with TestClient(world(answers={"state": {}}).app, client=("10.1.2.3", 9)) as http:
        assert http.get("/debug/state").status_code == 403
        assert http.get("/version").status_code == 200


# keys

OPEN = ["/health", "/ready", "/ping", "/metrics"]
GUARDED = ["/v1/models", "/server_info", "/version", "/get_load", "/load", "/health_generate"]
ADMIN = ["/flush_cache", "/debug/state"]
ANSWERS = {"metrics": {}, "flush": {}, "state": {}}


def statuses(paths: list[str], key: str | None, **settings: object) -> set[int]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with world(answers=ANSWERS, **settings).http() as http:
        return {http.get(path, headers=headers).status_code for path in paths}


def test_without_keys_everything_is_open() -> None:
    assert statuses([*OPEN, *GUARDED, "/debug/state"], None) == {200}


@pytest.mark.parametrize("key", [None, "wrong", "", "us", "user2", "üser"])
def test_a_missing_or_wrong_key_opens_only_probes_and_metrics(key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    with world(answers=ANSWERS, api_key="user").http() as http:
        assert {http.get(path, headers=headers).status_code for path in OPEN} == {200}
        for path in [*GUARDED, *ADMIN]:
            response = http.get(path, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "unauthorized")
        refused = http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert refused.status_code == 401
        assert http.options("/v1/completions").status_code != 401


def test_the_key_opens_and_the_admin_key_is_needed_for_orders() -> None:
    assert statuses([*OPEN, *GUARDED, *ADMIN], "user", api_key="user") == {200}
    both = {"api_key": "user", "admin_api_key": "boss"}
    assert statuses(GUARDED, "user", **both) == {200}
    assert statuses(ADMIN, "user", **both) == {401}
    assert statuses([*GUARDED, *ADMIN], "boss", **both) == {200}


def test_an_admin_key_alone_guards_only_orders() -> None:
    assert statuses(GUARDED, None, admin_api_key="boss") == {200}
    assert statuses(ADMIN, None, admin_api_key="boss") == {401}


# tokens


def test_tokenize_and_detokenize_are_inverse() -> None:
    with world().http() as http:
        for text in ("Grüße 😀", ["a", "bc"]):
            answer = http.post("/tokenize", json={"prompt": text}).json()
            assert answer["max_model_len"] == 4096
            assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["text"] == text
        assert http.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3


def test_tokenize_and_detokenize_have_names_below_v1_too() -> None:
    with world().http() as http:
        assert http.post("/v1/tokenize", json={"prompt": "abc"}).json()["tokens"] == ids("abc")
        assert http.post("/v1/detokenize", json={"tokens": ids("abc")}).json()["text"] == "abc"


def test_tokenize_tells_tokens_as_the_vocabulary_spells_them_where_it_is_asked_to() -> None:
    with world().http() as http:
        asked = {"return_token_strs": True}
        assert http.post("/tokenize", json={"prompt": "a b"} | asked).json()["token_strs"] == ["a", "Ġ", "b"]
        assert http.post("/tokenize", json={"prompt": ["é", "b"]} | asked).json()["token_strs"] == [["Ã", "©"], ["b"]]
        chat = http.post("/tokenize", json=CHAT | asked).json()
        assert "".join(chat["token_strs"]) == "<s>user:a</s><s>assistant:"
        assert "token_strs" not in http.post("/tokenize", json={"prompt": "a"}).json()


def test_tokenize_renders_messages() -> None:
    with world().http() as http:
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert http.post("/tokenize", json=body).json()["tokens"] == ids("<s>user:x</s><s>assistant:")


SHOWS_ALL = TEMPLATE + "{{ tools | length if tools else 0 }},{{ enable_thinking }},{{ kind }}"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"chat_template_kwargs": {"kind": "x"}},
        {"reasoning_effort": "none"},
        {"add_generation_prompt": False},
        {"messages": [*CHAT["messages"], {"role": "assistant", "content": "b"}], "continue_final_message": True},
    ],
)
def test_tokenize_makes_the_prompt_that_the_same_chat_has(fields: dict[str, Any]) -> None:
    with (w := world(tokenizer=load_tokenizer(SHOWS_ALL))).http() as http:
        told = http.post("/tokenize", json=CHAT | fields).json()
        assert http.post("/v1/chat/completions", json=CHAT | fields).status_code == 200
    assert told["tokens"] == prompt_of(w.node.submits[0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template": "x"}, "chat_template"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"messages": []}, "messages"),
    ],
)
def test_tokenize_refuses_what_such_a_chat_is_refused_for(fields: dict[str, Any], param: str) -> None:
    with world().http() as http:
        for path in ("/tokenize", "/v1/chat/completions"):
            refused = http.post(path, json=CHAT | fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), path


def test_detokenize_can_show_special_tokens_and_refuses_what_is_no_token() -> None:
    with world().http() as http:
        tokens = [*ids("a"), END]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["text"] == "a"
        shown = http.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": False})
        assert shown.json()["text"] == "a</s>"
        for bad in ({}, {"tokens": [999]}, {"tokens": [-1]}, {"tokens": [1, [2]]}, {"tokens": "a"}):
            assert http.post("/detokenize", json=bad).status_code == 400
        assert http.post("/tokenize", json={}).status_code == 400


# pages


def test_a_wrong_method_of_the_test_hooks_is_answered_with_the_right_ones() -> None:
    with world().http() as http:
        assert set(http.delete("/debug/faults").headers["allow"].split(", ")) == {"GET", "HEAD", "PUT"}


def test_every_cause_and_problem_has_a_row_in_the_table_and_the_page_is_up_to_date() -> None:
    assert set(RULES) == {*Cause, *Problem}
    assert PAGE.read_text() == errors_page(), "python -m tests.errors_page refreshes it"


def test_the_table_says_router_of_every_problem_that_a_router_names() -> None:
    server = Path(errors.__file__).parents[1]
    shared = [server / "api" / name for name in ("access.py", "body_store.py", "endpoint_parts.py", "http1.py")]
    text = "\n".join(path.read_text() for path in (*server.glob("router/*.py"), *shared))
    named = {Problem[name] for name in re.findall(r"\bProblem\.([A-Z_]+)", text)}
    named.remove(Problem.NODE_SILENT)  # which a worker says of its health
    assert len(named) > 10
    assert [problem for problem in named if "router" not in RULES[problem].said_by] == []


def test_the_offered_schema_lists_real_paths_and_no_refused_fields() -> None:
    w = world(says("x"), answers=ANSWERS | {"waits": [], "flow": []})
    with w.http() as http:
        document = http.get("/openapi.json").json()
        expected = openapi_document("unified", vocab_size=default_tokenizer().vocab_size)
        assert document == msgspec.json.decode(msgspec.json.encode(expected))
        for path, methods in document["paths"].items():
            for method in methods:
                answer = http.request(method, path.replace("{id}", "toy"), json={})
                absent = answer.status_code == 404 and answer.json()["error"]["code"] != "response_not_found"
                assert not absent, path
                assert answer.status_code != 405, path
    served = {route.path.replace("{id:path}", "{id}") for route in w.app.routes}
    aliases = {"/get_server_info", "/get_model_info", "/openapi.json", "/v1/tokenize", "/v1/detokenize"}
    elsewhere = {path for path in served if path.rpartition("/")[2] in ("embeddings", "rerank", "score")}
    assert len(elsewhere) == 6
    assert set(document["paths"]) == served - aliases - elsewhere
    chat = document["components"]["schemas"]["ChatBody"]["properties"]
    assert "messages" in chat
    assert "num_predict" not in chat


def test_a_router_offers_what_its_decode_does_but_for_the_pair_and_the_debug_pages() -> None:
    of_decode = openapi_document("decode", needs_room=True)
    offered = behind_router(msgspec.json.decode(msgspec.json.encode(of_decode)))
    assert set(of_decode["paths"]) - set(offered["paths"]) == {path for path in of_decode["paths"] if "debug" in path}
    routing, its_own = (it["components"]["schemas"]["Routing"] for it in (of_decode, offered))
    assert routing["required"] == ["bootstrap_room"]
    assert its_own["required"] == []
    assert set(routing["properties"]) - set(its_own["properties"]) == set(OF_PAIR)
    parts, routed = (schema_of(it["paths"]["/v1/responses"]["post"])["allOf"] for it in (of_decode, offered))
    assert [part for part in routed if part not in parts] == [KEEPS]
    assert [part for part in parts if part not in routed] == [KEEPS_NONE]


@pytest.mark.parametrize("item", [5, {"post": 5}, {"post": {"requestBody": []}}, {"get": {}}])
def test_what_a_worker_says_in_another_shape_stays_as_it_is(item: object) -> None:
    document = {"paths": {"/x": item}, "components": {"schemas": [item]}}
    assert behind_router(document) == document


def test_the_address_says_what_this_is_and_what_it_offers() -> None:
    w = world(says("x"))
    with w.http() as http:
        told = http.get("/").json()
        assert (told["name"], told["version"], told["role"], told["models"]) == (
            "tandem",
            __version__,
            "unified",
            ["toy"],
        )
        assert all(http.get(told[page]).status_code == 200 for page in ("docs", "openapi"))
        offered = http.get("/openapi.json").json()["paths"]
        wanted = {f"{method.upper()} {path}" for path, item in offered.items() for method in item}
        assert wanted <= {entry.replace("{id:path}", "{id}") for entry in told["endpoints"]}


def test_the_page_of_the_api_shows_every_path_and_field_and_needs_nothing_from_elsewhere() -> None:
    w = world(says("x"), api_key="user")
    with w.http() as http:
        reply = http.get("/docs")
        assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        document = openapi_document("unified")
        shown = [*document["paths"], *document["components"]["schemas"]["ChatBody"]["properties"], "≤ 20"]
        assert [name for name in shown if name not in reply.text] == []
        assert not re.search(r"<script|<link|<img|(src|href)=.?(https?:)?//", reply.text)


def test_the_page_of_the_pair_knows_every_state_and_runs_no_other_script() -> None:
    w = world(says("abc"), answers={"metrics": {}, "flow": [{"rid": "r", "state": "running"}]})
    with w.http() as http:
        page = http.get("/debug/pd")
        http.post("/v1/completions", json={"prompt": "xy", "rid": "mine"})
        told = http.get("/debug/pd/data").json()
    assert {state.name for state in State} - set(re.findall(r"\b[A-Z]+\b", page.text)) == {"DRAINING", "DONE"}
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    assert not re.search(r"<link|<img|innerHTML|(src|href)=|https?://(?!www\.w3\.org/2000/svg)", page.text)
    assert (told["role"], told["flow"]) == ("unified", [{"rid": "r", "state": "running"}])
    (record,) = told["recent"]
    assert (record["rid"], record["completion_tokens"], record["is_failed"]) == ("mine", 4, False)
    assert sum(seconds for _, seconds in record["stages"]) == pytest.approx(record["ttft_seconds"])


@pytest.mark.parametrize("task", [Task.EMBEDDINGS, Task.SCORES])
def test_a_server_of_vectors_offers_what_it_answers(task: Task) -> None:
    w = world(task=task)
    with w.http() as http:
        document = http.get("/openapi.json").json()
        bodies = {
            "/v1/embeddings": {"input": "x"},
            "/v1/rerank": {"query": "x", "documents": ["y", {"text": "z"}]},
            "/v1/score": {"text_1": "x", "text_2": ["y", "z"]},
            "/v1/completions": {"prompt": "x"},
        }
        for path, body in bodies.items():
            is_offered = path in document["paths"]
            assert is_offered == (path != "/v1/completions" and (path != "/v1/embeddings" or task is Task.EMBEDDINGS))
            answer = http.post(path, json=body)
            assert answer.status_code == (200 if is_offered else 400), answer.text
            assert is_offered or answer.json()["error"]["code"] == "wrong_task"
            assert http.post(path, json={}).status_code == 400
        assert http.get("/model_info").json()["is_generation"] is False
        assert http.get("/health_generate").status_code == 200


def test_a_body_without_what_it_is_about_does_not_fit_its_schema() -> None:
    """What the server refuses for it, the schema must not offer."""
    document = openapi_document("unified")
    with world(says("x")).http() as http:
        for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"):
            _, about, *_ = parts_of(document, path)
            fields = [choice["required"][0] for choice in about.get("oneOf", about.get("anyOf"))]
            for body in ({}, dict.fromkeys(fields)):
                assert http.post(path, json=body).status_code == 400, (path, body)


def test_the_bounds_in_the_schema_are_those_of_the_server() -> None:
    steps = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0}
    with world(says("x")).http() as http:
        for name, limits in bounds(dp_size=1, vocab_size=default_tokenizer().vocab_size).items():
            for bound, value in limits.items():
                beyond, within = value + steps[bound], value + (0.5 if bound == "exclusiveMinimum" else 0)
                assert status_with(http, name, beyond) == 400, (name, beyond)
                assert status_with(http, name, within) == 200, (name, within)


def status_with(http: TestClient, name: str, value: float) -> int:
    """Of a request to the first endpoint whose body has such a field."""
    if name in ("max_new_tokens", "min_new_tokens", "sampling_seed"):
        return http.post("/generate", json={"text": "x", "sampling_params": {name: value}}).status_code
    if name in ("prompt", "input_ids", "tokens"):
        path = {"prompt": "/v1/completions", "input_ids": "/generate", "tokens": "/detokenize"}[name]
        return http.post(path, json={name: [value]}).status_code
    if name == "token_ids_logprob":
        return http.post("/generate", json={"text": "x", name: [value]}).status_code
    if name == "top_logprobs_num":
        return http.post("/generate", json={"text": "x", "return_logprob": True, name: value}).status_code
    if name == "logprobs":
        return http.post("/v1/completions", json={"prompt": "x", name: value}).status_code
    logprobs = {"logprobs": True} if name == "top_logprobs" else {}
    messages = [{"role": "user", "content": "x"}]
    value = [value] if name == "stop_token_ids" else value
    return http.post("/v1/chat/completions", json={"messages": messages, **logprobs, name: value}).status_code


def test_a_prefill_offers_nothing_without_a_room() -> None:
    assert openapi_document("prefill")["components"]["schemas"]["Routing"]["required"] == ["bootstrap_room"]


def parts_of(document: dict, path: str) -> list[dict]:
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["allOf"]
