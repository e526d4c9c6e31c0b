"""What is wrong with a request is said with status 400 and the field, and the node never hears of it."""

import asyncio

import pytest
from api_fakes import ids, load_tokenizer, says, world

from tandem.core.values import SECOND, RequestId
from tandem.pagehash import hash_of
from tandem.server import wire
from tandem.server.api import generation_request
from tandem.server.api.limits import ModelLimits, Task
from tandem.server.api.sample_requests import SampleRequest
from tandem.server.api.tokenizer import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [258]}, "stop_token_ids"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"ebnf": "root ::= x"}, "ebnf"),
    ({"guided_json": {"type": "nope"}}, "guided_json"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": -3}, "timeout"),
    ({"echo": True}, "echo"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"logprobs": True, "logprob_token_ids": [5]}, "logprob_token_ids"),
    ({"watermarking": True}, "watermarking"),
    ({"return_prompt_text": True}, "return_prompt_text"),
    ({"return_meta_info": True}, "return_meta_info"),
    ({"return_prompt_token_ids": True}, "return_prompt_token_ids"),
    ({"rid": ["a", "b"]}, "rid"),
    ({"rid": "line\nbreak"}, "rid"),
    ({"rid": "grün"}, "rid"),
    ({"tools": [{"type": "function", "function": {"name": "line\nbreak"}}]}, "tools"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]}, "messages"),
    ({"routed_dp_rank": 1}, "routed_dp_rank"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"input_ids": [1, 2]}, "input_ids"),  # SGLang's: instead of what the template makes
]
GOOD_CHATS = [
    {"prediction": {"type": "content", "content": "Hello!"}},  # which may make an answer sooner, and never another one
    {"tools": []},
    {"tools": None},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"tools": [{"type": "function", "function": {"name": "grün"}}]},
    {"tool_choice": "auto"},
    {"response_format": {"type": "text"}},
    {"response_format": None},
    {"logprobs": False, "top_logprobs": None},
    {"logprobs": False, "top_logprobs": 0},
    {"temperature": 0, "top_k": -1},
    {"temperature": 1, "top_p": 1},
    {"routed_dp_rank": 0, "data_parallel_rank": 0, "disagg_prefill_dp_rank": None},
    {"model": "toy"},
    {"model": None},
    {"unknown": 1, "user": "me", "metadata": {}, "parallel_tool_calls": True},
    {"seed": -5},
    {"echo": False, "add_special_tokens": False, "watermarking": None, "logprob_token_ids": None},
    {"return_prompt_token_ids": False, "return_prompt_text": False},
    {"reasoning_effort": "low", "separate_reasoning": True},
    {"bootstrap_host": "8.8.8.8", "bootstrap_room": 0},  # a unified server ignores them
]
BAD_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5, [5]]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": [258]}, "prompt"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "best_of": 3}, "best_of"),
    ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
    ({"prompt": "x", "logprob_token_ids": [5]}, "logprob_token_ids"),
    ({"prompt": "x", "prompt_embeds": "AAAA"}, "prompt_embeds"),
]


@pytest.mark.parametrize(("extra", "param"), BAD_CHATS)
def test_a_bad_chat_request_is_a_400_that_names_the_field(extra: dict, param: str) -> None:
    with (w := world()).http() as http:
        response = http.post("/v1/chat/completions", json=CHAT | extra)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"], error["stage"]) == (param, "invalid_request_error", "edge")
    assert error["request_id"] == response.headers["x-request-id"]
    assert error["message"]
    assert w.node.submits == []


@pytest.mark.parametrize(
    ("task", "path", "body"),
    [
        (Task.TOKENS, "/v1/chat/completions", CHAT),
        (Task.TOKENS, "/v1/completions", {"prompt": "hi"}),
        (Task.TOKENS, "/generate", {"text": "hi"}),
        (Task.TOKENS, "/v1/messages", CHAT | {"max_tokens": 1}),
        (Task.EMBEDDINGS, "/v1/embeddings", {"input": "hi"}),
        (Task.SCORES, "/v1/rerank", {"query": "hi", "documents": ["hi"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_token_that_only_the_tokenizer_has_is_refused(task: Task, path: str, body: dict) -> None:
    """Its row of the embedding is not there, and everybody in the batch would end with it."""
    with (w := world(vocab_size=10, task=task)).http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert "is not a token id; the vocabulary has 10" in response.text
    assert w.node.submits == []


@pytest.mark.parametrize(
    ("path", "body", "mode", "text"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "hi"}]}]},
            "null",
            "only parts of type text",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "null",
            "only text, input_text, output_text",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"max_tokens": 1},
            "prefill",
            "kv_transfer_params on /v1/chat/completions or /v1/completions, as vLLM's do",
        ),
    ],
    ids=["part of responses", "part of chats", "a room"],
)
def test_who_speaks_another_dialect_is_told_the_word_of_this_one(path: str, body: dict, mode: str, text: str) -> None:
    with world(disaggregation_mode=mode).http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert text in response.json()["error"]["message"]


@pytest.mark.parametrize("extra", GOOD_CHATS)
def test_an_acceptable_chat_request_is_answered(extra: dict) -> None:
    with world().http() as http:
        response = http.post("/v1/chat/completions", json=CHAT | extra)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS)
def test_a_bad_completion_request_is_a_400_that_names_the_field(body: dict, param: str) -> None:
    with (w := world()).http() as http:
        response = http.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert w.node.submits == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 5000])
def test_a_body_that_is_no_json_object_is_a_400(raw: bytes) -> None:
    with world().http() as http:
        response = http.post("/v1/completions", content=raw)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] in ("invalid_json", "invalid_value")


def test_a_whole_number_may_be_written_with_a_point() -> None:
    with (w := world()).http() as http:
        assert (
            http.post("/generate", json={"input_ids": [5.0, 6], "sampling_params": {"top_k": 3.0}}).status_code == 200
        )
        error = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2.5}).json()["error"]
    assert w.node.submits[0].payload.sampling.top_k == 3
    assert error["param"] == "max_tokens"


def test_the_content_type_does_not_matter() -> None:
    with world().http() as http:
        response = http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert response.status_code == 200


@pytest.mark.parametrize(("coding", "status"), [("gzip", 400), ("zstd", 400), ("Identity", 200), ("", 200)])
def test_a_compressed_body_is_refused_by_the_name_of_its_header(coding: str, status: int) -> None:
    with world().http() as http:
        response = http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-encoding": coding})
    assert response.status_code == status
    if status == 400:
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported", "content-encoding")


def test_an_unknown_model_is_a_404_but_not_on_generate() -> None:
    with world().http() as http:
        refused = http.post("/v1/completions", json={"prompt": "x", "model": "other"})
        accepted = http.post("/generate", json={"text": "x", "model": "other"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert accepted.status_code == 200


def test_a_prompt_that_fills_the_context_is_refused_and_a_shorter_one_gets_what_is_left() -> None:
    with (w := world(says("x" * 50), context_length=20)).http() as http:
        refused = http.post("/v1/completions", json={"prompt": ids("y" * 20)})
        answer = http.post("/v1/completions", json={"prompt": ids("y" * 17), "max_tokens": 100}).json()
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    for words in ("prompt is too long: 20 tokens > 19 maximum", "This model's maximum context length is 20 tokens"):
        assert words in refused.json()["error"]["message"]  # by which programs know that they have to shorten it
    assert answer["usage"]["completion_tokens"] == 3
    assert [submit.request.max_new_tokens for submit in w.node.submits] == [3]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 10_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 10_000}]}),
        ("/generate", {"text": ["x", "x" * 10_000]}),
    ],
)
def test_a_text_that_cannot_fit_the_context_is_refused_without_being_tokenized(
    path: str, body: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **_: encoded.append(len(text)) or [2] * len(text))
    with world(context_length=100).http() as http:
        response = http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert max(encoded, default=0) < 10_000


def test_the_deadline_bounds_tokenization(monkeypatch: pytest.MonkeyPatch) -> None:
    async def takes_forever(self: Tokenizer, text: str, **_: object) -> list[int]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(Tokenizer, "encode_anywhere", takes_forever)
    with world().http() as http:
        response = http.post("/v1/completions", json={"prompt": "x", "timeout": 0.01})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_a_deadline_that_passes_while_a_request_is_read_says_how_long_that_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = generation_request.submission

    def late(ask: SampleRequest, request: RequestId, arrival_ns: int, limits: ModelLimits) -> wire.Submit:
        return made(ask, request, arrival_ns - 2 * SECOND, limits)

    monkeypatch.setattr(generation_request, "submission", late)
    with world().http() as http:
        response = http.post("/v1/completions", json={"prompt": "x", "timeout": 1})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["stage"]) == (504, "deadline_exceeded", "edge")
    assert error["waited_seconds"] >= 2


def test_a_model_without_template_refuses_chat_and_says_what_to_do() -> None:
    with world(tokenizer=load_tokenizer(None)).http() as http:
        error = http.post("/v1/chat/completions", json=CHAT).json()["error"]
    assert error["code"] == "no_chat_template"
    assert "/v1/completions" in error["remedy"]


def test_a_template_that_refuses_is_the_users_mistake() -> None:
    with world(tokenizer=load_tokenizer("{{ raise_exception('roles must alternate') }}")).http() as http:
        response = http.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with world(tokenizer=load_tokenizer(template)).http() as http:
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 400


def test_a_body_beyond_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.server.api.endpoint_parts.MAX_BODY_BYTES", 1000)
    with world().http() as http:
        announced = http.post("/v1/completions", json={"prompt": "x" * 1000})
        chunked = http.post("/v1/completions", content=iter([b'{"prompt": "', b"x" * 1000, b'"}']))
    for response in (announced, chunked):
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_more_samples_than_the_queue_holds_are_refused_at_once() -> None:
    with (w := world(max_queued_requests=5)).http() as http:
        response = http.post("/v1/completions", json={"prompt": ["x"] * 3, "n": 2})
    assert response.status_code == 400
    assert w.node.submits == []


def test_the_deadline_travels_from_the_body_or_the_header_as_time_remaining() -> None:
    with (w := world(request_timeout=9.0)).http() as http:
        http.post("/v1/completions", json={"prompt": "x", "timeout": 2.5}, headers={"x-request-timeout-ms": "7000"})
        http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-timeout-ms": "7000"})
        http.post("/v1/completions", json={"prompt": "x"})
        refused = http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-timeout-ms": "soon"})
    for submit, seconds in zip(w.node.submits, (2.5, 7.0, 9.0), strict=True):
        assert seconds - 1 < submit.request.timeout_ns / 1e9 < seconds
    assert refused.json()["error"]["param"] == "X-Request-Timeout-Ms"


def test_a_wrong_path_or_method_is_told_in_the_same_shape() -> None:
    with world().http() as http:
        missing, method = http.get("/nowhere"), http.get("/v1/completions")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")


def test_sampling_numbers_reach_the_worker_as_given() -> None:
    body = {
        "prompt": "x",
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -2},
        "seed": 42,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 2,
        "logprobs": 4,
    }
    with (w := world()).http() as http:
        http.post("/v1/completions", json=body)
    (submit,) = w.node.submits
    sampling = submit.payload.sampling
    for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos"):
        assert getattr(sampling, name) == body[name]
    assert (sampling.repetition_penalty, sampling.logit_bias, sampling.seed) == (1.1, {5: -2.0}, 42)
    assert (sampling.stop_token_ids, sampling.min_tokens) == ((9,), 2)
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 4)


def test_page_hashes_cover_full_pages_and_depend_on_the_tenant() -> None:
    with (w := world(page_size=4)).http() as http:
        for extra in ({}, {}, {"cache_salt": "tenant"}):
            http.post("/v1/completions", json={"prompt": "0123456789"} | extra)
    first, again, other = (submit.request.page_hashes for submit in w.node.submits)
    assert len(first) == 2
    assert first == again
    assert not set(first) & set(other)
    assert hash_of(w.node.submits[0].payload.last_hash) == first[-1]
