"""sglang-router in front of our prefill and decode: it takes them for SGLang's own, and its clients get our tokens.

What it does to a request (adds the bootstrap fields, drops what it does not know, merges logprobs, retries a 5xx with
another room) is its business; what a client of it sees must be what our unified server says.
"""

import http.client
import json
import threading
import time
from typing import Any  # JSON documents

import pytest
from cluster import MODEL, Cluster, HttpError, Server, cluster, eventually, generate_body
from gateway import bootstrap_port, sglang_router

WORDS = "Tom has 3 apples and buys 4 more. How many apples does he have?"
TWO_CHUNKS = [7 + index % 450 for index in range(700)]
LONG = [11 + index * 7 % 480 for index in range(3000)]
PROMPTS = {"words": WORDS, "one page": list(range(100, 116)), "two chunks": TWO_CHUNKS}
FOREVER = {"ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 4711, "ignore_eos": True}
RUNNING = "sglang_num_running_reqs{"
BOUND_S = 25.0  # for an error: what a gateway needs to see that a server is gone, not what a request may take


@pytest.fixture(scope="module")
def gateway(common_gateway: Server) -> Server:
    return common_gateway


def is_idle(it: Cluster) -> bool:
    return all(server.is_idle() for server in it.servers)


def states(it: Cluster) -> dict[str, Any]:
    return {server.member.name: server.state() for server in it.servers}


def chat_body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": WORDS}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 12, **FOREVER} | fields


def raw(server: Server, path: str, body: dict[str, Any]) -> tuple[http.client.HTTPResponse, bytes]:
    with server.open("POST", path, body) as reply:
        return reply, reply.read()


def sse(data: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, which must have ended as one should."""
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def refused(server: Server, path: str, body: dict[str, Any]) -> HttpError:
    with pytest.raises(HttpError) as found:
        server.call("POST", path, body)
    return found.value


def same_scores(ours: Any, theirs: Any) -> None:
    """Two JSON values that may differ in the last digits of a logprob, and nowhere else."""
    if isinstance(ours, float) and isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-3)
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            same_scores(left, right)
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        same_scores(list(ours.values()), list(theirs.values()))
    else:
        assert ours == theirs


def test_it_takes_both_servers_for_what_they_are(gateway: Server, it: Cluster) -> None:
    workers = {worker["worker_type"]: worker for worker in gateway.get("/workers")["workers"]}
    prefill, decode = workers["prefill"], workers["decode"]
    assert (prefill["url"], decode["url"]) == (it.prefills[0].url, it.decodes[0].url)
    assert prefill["bootstrap_port"] == bootstrap_port(it.prefills[0])
    assert prefill["is_healthy"]
    assert decode["is_healthy"]
    for worker, mode in ((prefill, "prefill"), (decode, "decode")):
        assert worker["model_id"] == MODEL
        known = {name: worker["metadata"][name] for name in ("disaggregation_mode", "model_type", "dp_size", "tp_size")}
        assert known == {"disaggregation_mode": mode, "model_type": "llama", "dp_size": "1", "tp_size": "1"}
    assert [model["id"] for model in gateway.get("/v1/models")["data"]] == [MODEL]
    assert gateway.get("/get_model_info") == it.prefills[0].get("/model_info")


@pytest.mark.parametrize("name", list(PROMPTS))
def test_generate_gives_the_tokens_of_one_engine(gateway: Server, unified: Server, name: str) -> None:
    reply, data = raw(gateway, "/generate", generate_body(PROMPTS[name], 24))
    ours, theirs = json.loads(data), unified.generate(PROMPTS[name], max_new_tokens=24)
    assert (reply.status, reply.headers["x-tandem-path"], ours["meta_info"]["path"]) == (200, "remote", "remote")
    assert (ours["text"], ours["output_ids"]) == (theirs["text"], theirs["output_ids"])
    assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]


def test_a_stream_is_passed_on_as_it_comes(gateway: Server, it: Cluster) -> None:
    stream = gateway.stream(WORDS, max_new_tokens=5000, sampling_params=FOREVER)
    counts = [event["meta_info"]["completion_tokens"] for event in (stream.next(), stream.next()) if event]
    stream.close()
    assert 0 < counts[0] < counts[1] < 5000
    eventually(lambda: is_idle(it), what=lambda: states(it))


def test_a_stream_ends_with_the_same_tokens(gateway: Server, unified: Server) -> None:
    reply, data = raw(gateway, "/generate", generate_body(WORDS, 24, sampling_params=SAMPLED, stream=True))
    events = sse(data)
    assert (reply.headers["x-tandem-path"], reply.headers["content-type"]) == ("remote", "text/event-stream")
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert events[-1]["output_ids"] == unified.generate(WORDS, max_new_tokens=24, sampling_params=SAMPLED)["output_ids"]


def test_logprobs_survive_its_merging_of_both_answers_the_first_tokens_too(gateway: Server, unified: Server) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 3, "sampling_params": FOREVER}
    ours, theirs = (server.generate(WORDS, max_new_tokens=8, **asked)["meta_info"] for server in (gateway, unified))
    assert len(ours["output_token_logprobs"]) == len(ours["output_top_logprobs"]) == 8
    assert ours["input_token_logprobs"] == theirs["input_token_logprobs"] == []
    for name in ("output_token_logprobs", "output_top_logprobs"):
        same_scores(ours[name], theirs[name])


def test_logprobs_of_a_stream_are_those_of_one_engine(gateway: Server, unified: Server) -> None:
    body = generate_body(WORDS, 8, return_logprob=True, stream=True, sampling_params=FOREVER)
    ours, theirs = (sse(raw(server, "/generate", body)[1])[-1]["meta_info"] for server in (gateway, unified))
    assert len(ours["output_token_logprobs"]) == 8
    same_scores(ours["output_token_logprobs"], theirs["output_token_logprobs"])


def test_a_batch_of_prompts_on_generate_is_answered_in_order(gateway: Server, unified: Server) -> None:
    prompts = [PROMPTS["one page"], [500], TWO_CHUNKS]
    body = {"input_ids": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
    replies = gateway.call("POST", "/generate", body)
    assert [reply["meta_info"]["path"] for reply in replies] == ["remote"] * 3
    alone = [unified.generate(prompt, max_new_tokens=6)["output_ids"] for prompt in prompts]
    assert [reply["output_ids"] for reply in replies] == alone


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("prompt", [WORDS, ["Tom has", "Anna buys 3"]], ids=["text", "texts"])
def test_completions_are_those_of_one_engine(gateway: Server, unified: Server, prompt: Any, samples: int) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0.8, "seed": 5, "n": samples}
    ours, theirs = (server.call("POST", "/v1/completions", body) for server in (gateway, unified))
    assert len(ours["choices"]) == samples * (1 if prompt == WORDS else len(prompt))
    assert ours["choices"] == theirs["choices"]
    assert ours["usage"]["total_tokens"] == theirs["usage"]["total_tokens"]


def test_logprobs_of_completions_come_for_every_prompt_and_sample(gateway: Server, unified: Server) -> None:
    body = {"model": MODEL, "prompt": ["Tom has", "Anna buys 3"], "max_tokens": 5, "temperature": 0, **FOREVER}
    ours, theirs = (
        server.call("POST", "/v1/completions", body | {"logprobs": 2, "n": 2})["choices"]
        for server in (gateway, unified)
    )
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in ours] == [5] * 4
    same_scores([choice["logprobs"] for choice in ours], [choice["logprobs"] for choice in theirs])


@pytest.mark.parametrize("samples", [1, 3])
def test_chat_is_that_of_one_engine(gateway: Server, unified: Server, samples: int) -> None:
    body = chat_body(n=samples, temperature=0.7, seed=11, max_tokens=16)
    reply, data = raw(gateway, "/v1/chat/completions", body)
    theirs = unified.call("POST", "/v1/chat/completions", body)
    assert (reply.status, reply.headers["x-tandem-path"]) == (200, "remote")
    assert len(json.loads(data)["choices"]) == samples
    assert json.loads(data)["choices"] == theirs["choices"]


@pytest.mark.parametrize("samples", [1, 2])
def test_a_streamed_chat_is_that_of_one_engine(gateway: Server, unified: Server, samples: int) -> None:
    body = chat_body(n=samples, stream=True, logprobs=True, top_logprobs=2, stream_options={"include_usage": True})
    ours, theirs = (sse(raw(server, "/v1/chat/completions", body)[1]) for server in (gateway, unified))
    for index in range(samples):
        same_scores(parts_of(ours, index), parts_of(theirs, index))
    assert ours[-1]["usage"]["completion_tokens"] == 12 * samples


def parts_of(events: list[dict[str, Any]], index: int) -> tuple[str, list[Any], list[Any]]:
    """Text, logprobs and reason of one sample of a streamed chat, however it was cut into events."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    scores = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    return text, scores, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


@pytest.mark.parametrize(
    ("path", "wrong", "word"),
    [
        ("/generate", {"input_ids": [1, 2, 99999]}, "input_ids"),
        ("/generate", {"input_ids": []}, "no tokens"),
        ("/generate", {"input_ids": [5] * 9000}, "9000 tokens"),
        ("/generate", {"text": "x", "sampling_params": {"temperature": -1}}, "temperature"),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1, "min_new_tokens": 2}}, "min_new_tokens"),
        ("/generate", {"text": "x", "sampling_params": {"regex": "a("}}, "regex"),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "logprobs": 99}, "logprobs"),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "stop": ["a"] * 99}, "stop"),
        ("/v1/chat/completions", chat_body(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
        ("/v1/chat/completions", chat_body(top_logprobs=2, logprobs=False), "top_logprobs"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_client_did_wrong_reaches_it_as_a_400(
    gateway: Server, path: str, wrong: dict[str, Any], word: str, stream: bool
) -> None:
    error = refused(gateway, path, wrong | {"stream": stream})
    assert error.status == 400
    assert word in error.body.decode()


def test_a_model_that_is_not_there_reaches_it_as_a_404(gateway: Server) -> None:
    error = refused(gateway, "/v1/chat/completions", chat_body(model="nobody"))
    assert error.status == 404
    assert "nobody" in error.error["message"]


def test_many_clients_at_once_all_get_the_tokens_of_one_engine(gateway: Server, unified: Server, it: Cluster) -> None:
    prompts = [[20 + number] * (30 + 41 * number) for number in range(10)]
    answers: dict[int, dict[str, Any]] = {}

    def ask(number: int) -> None:
        answers[number] = gateway.generate(prompts[number], max_new_tokens=10, sampling_params=FOREVER)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answers[number]["meta_info"]["path"] for number in range(10)} == {"remote"}
    for number, prompt in enumerate(prompts):
        alone = unified.generate(prompt, max_new_tokens=10, sampling_params=FOREVER)
        assert answers[number]["output_ids"] == alone["output_ids"]
    eventually(lambda: is_idle(it), what=lambda: states(it))


def test_a_client_that_leaves_it_frees_both_halves(gateway: Server, it: Cluster) -> None:
    stream = gateway.stream(WORDS, max_new_tokens=5000, sampling_params=FOREVER)
    assert stream.next() is not None
    assert not it.decodes[0].is_idle()
    stream.close()
    eventually(lambda: is_idle(it), what=lambda: states(it))


def test_a_client_that_leaves_it_before_the_first_token_frees_both_halves(gateway: Server, it: Cluster) -> None:
    for prompt in (LONG, LONG[1:]):
        connection = http.client.HTTPConnection("127.0.0.1", gateway.member.port)
        body = json.dumps(generate_body(prompt, 500, stream=True))
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        eventually(lambda: it.prefills[0].state()["queues"]["computing"], what=lambda: states(it))
        connection.close()
        eventually(lambda: is_idle(it), what=lambda: states(it))


def test_its_flush_reaches_both_halves(gateway: Server, it: Cluster) -> None:
    gateway.generate(TWO_CHUNKS, max_new_tokens=2)
    eventually(lambda: is_idle(it), what=lambda: states(it))
    assert it.prefills[0].state()["pages"]["cached"] > 0
    with gateway.open("POST", "/flush_cache") as reply:
        assert reply.status == 200
    assert [server.state()["pages"]["cached"] for server in (it.prefills[0], it.decodes[0])] == [0, 0]


def test_it_collects_our_metrics_under_its_own_names(gateway: Server, it: Cluster) -> None:
    with gateway.open("GET", "/engine_metrics") as reply:
        page = reply.read().decode()
    for server in (it.prefills[0], it.decodes[0]):
        (line,) = [line for line in page.splitlines() if line.startswith(RUNNING) and server.url in line]
        assert line.endswith(" 0")


@pytest.mark.slow
def test_a_decode_that_dies_ends_its_streams_and_what_comes_after_with_errors_at_once() -> None:
    with cluster(prefills=1, decodes=1) as it:
        gateway, prefill = sglang_router(it), it.prefills[0]
        endless = generate_body(WORDS, 5000, sampling_params=FOREVER, stream=True)
        with gateway.open("POST", "/generate", endless) as reply:
            assert reply.readline().startswith(b"data: ")
            it.decodes[0].member.process.kill()
            began = time.monotonic()
            with pytest.raises(http.client.IncompleteRead) as torn:
                reply.read()
            assert b"[DONE]" not in torn.value.partial
        for body in (generate_body(WORDS, 4), generate_body(WORDS, 4, stream=True)):
            assert refused(gateway, "/generate", body).status in (502, 503)
        assert time.monotonic() - began < BOUND_S
        eventually(prefill.is_idle, what=prefill.state)


@pytest.mark.slow
def test_a_prefill_that_dies_leaves_its_prompt_to_decode_and_what_comes_after_fails_at_once() -> None:
    with cluster(prefills=1, decodes=1, flags=["--deterministic"]) as it:
        gateway, prefill, decode = sglang_router(it), it.prefills[0], it.decodes[0]
        assert gateway.generate(WORDS, max_new_tokens=2)["meta_info"]["path"] == "remote"  # the two have met
        alone = decode.generate(LONG, max_new_tokens=4)
        decode.open("POST", "/flush_cache").close()
        answers: list[dict[str, Any]] = []
        asking = threading.Thread(target=lambda: answers.append(gateway.generate(LONG, max_new_tokens=4)))
        asking.start()
        eventually(lambda: any(prefill.state()["queues"].values()), what=prefill.state)  # its head is on the way
        eventually(lambda: decode.state()["queues"]["arriving"], what=decode.state)
        prefill.member.process.kill()
        asking.join()
        assert [answer["meta_info"]["path"] for answer in answers] == ["fallback"]
        assert (answers[0]["meta_info"]["computed_tokens"], alone["meta_info"]["path"]) == (len(LONG), "local")
        assert answers[0]["output_ids"] == alone["output_ids"]
        began = time.monotonic()
        for body in (generate_body(WORDS, 4), generate_body(WORDS, 4, stream=True)):
            assert refused(gateway, "/generate", body).status in (502, 503)
        assert time.monotonic() - began < BOUND_S
        eventually(decode.is_idle, what=decode.state)
