"""SGLang's /generate over a fake node."""

from itertools import pairwise

import pytest
from api_fakes import END, Script, ids, prompt_of, says, sse, world


def test_an_answer_has_text_ids_and_meta_info() -> None:
    with world(says("ok")).http() as http:
        answer = http.post("/generate", json={"text": "abc", "rid": "r1"}).json()
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == ("ok", [*ids("ok"), END])
    assert (meta["id"], meta["finish_reason"], meta["path"]) == ("r1", {"type": "stop", "matched": END}, "unified")
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 3, 3)
    assert (meta["kv_pages"], meta["kv_bytes"], meta["computed_tokens"]) == (2, 128, 5)
    assert 0 < meta["ttft"] <= meta["e2e_latency"]


def test_the_stages_of_the_ledger_add_up_to_the_time_to_the_first_token() -> None:
    with world().http() as http:
        meta = http.post("/generate", json={"text": "abc"}).json()["meta_info"]
    assert list(meta["ttft_ledger"]) == ["edge_receive", "queue", "forward", "edge_send"]
    assert sum(meta["ttft_ledger"].values()) == pytest.approx(meta["ttft"], abs=1e-9)
    assert all(seconds >= 0 for seconds in meta["ttft_ledger"].values())


def test_a_stream_is_cumulative_and_its_last_event_equals_the_whole_answer() -> None:
    body = {"text": "x", "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    with world(says('say "é😀"\n')).http() as http:
        whole = http.post("/generate", json=body).json()
        events = sse(http.post("/generate", json=body | {"stream": True}).text)
    for earlier, later in pairwise(events):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
        assert earlier["meta_info"]["input_token_logprobs"] == []
    assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    for key in ("output_token_logprobs", "output_top_logprobs", "completion_tokens", "finish_reason"):
        assert events[-1]["meta_info"][key] == whole["meta_info"][key]
    assert whole["meta_info"]["output_token_logprobs"][0] == [-0.5, ids("s")[0], "s"]


@pytest.mark.parametrize("top", [None, 1])
def test_tokens_are_told_of_that_are_asked_for_by_their_ids(top: int | None) -> None:
    body = {"text": "xyz", "return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [7, 5]}
    body |= {"top_logprobs_num": top, "return_text_in_logprobs": True}
    with (w := world(says("ok"))).http() as http:
        whole = http.post("/generate", json=body).json()
        *_, last = sse(http.post("/generate", json=body | {"stream": True}).text)
        scores = {"return_logprob": True, "token_ids_logprob": [[7], []]}
        lists = http.post("/generate", json={"text": ["x", "y"], **scores}).json()
        alone = http.post("/generate", json={"text": "x", "token_ids_logprob": [7]}).json()
        plain = http.post("/generate", json={"text": "x", "return_logprob": True}).json()
    for meta in (whole["meta_info"], last["meta_info"]):
        told = [[-0.5 - (top or 0), 7], [-1.5 - (top or 0), 5]]
        for name, count in (("output", 3), ("input", 2)):
            found = meta[f"{name}_token_ids_logprobs"]
            assert [each and [entry[:2] for entry in each] for each in found[-count:]] == [told] * count
            assert top is None or [len(each) for each in meta[f"{name}_top_logprobs"][-count:]] == [top] * count
        assert meta["input_token_ids_logprobs"][0] is None
        assert [entry[2] for entry in meta["output_token_ids_logprobs"][0]] == [
            entry[2] for entry in meta["input_token_ids_logprobs"][1]
        ]
    assert [len(each["meta_info"]["output_token_ids_logprobs"][0]) for each in lists] == [1, 0]
    assert "output_token_logprobs" not in alone["meta_info"]
    assert "output_token_ids_logprobs" not in plain["meta_info"]
    assert [submit.payload.sampling.logprob_ids for submit in w.node.submits[:2]] == [(7, 5)] * 2


@pytest.mark.parametrize("given", [[1 << 30], [-1], [7, [7]], [7] * 129, [[7], [7]], [[7] * 129], "7"], ids=str)
def test_ids_that_cannot_be_told_of_are_refused(given: object) -> None:
    with (w := world(says("ok"))).http() as http:
        body = {"text": "x", "return_logprob": True, "token_ids_logprob": given}
        response = http.post("/generate", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "token_ids_logprob")
    assert w.node.submits == []


def test_lists_are_answered_by_lists_and_streams_carry_the_index() -> None:
    def script(request, payload) -> Script:
        return Script([*ids(f"to {request.prompt_len}"), END])

    body = {"text": ["a", "bb"], "sampling_params": [{"max_new_tokens": 9}, {"max_new_tokens": 2}]}
    with (w := world(script)).http() as http:
        answers = http.post("/generate", json=body).json()
        events = sse(http.post("/generate", json=body | {"stream": True}).text)
    assert [answer["text"] for answer in answers] == ["to 1", "to"]
    assert answers[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    last = {event["index"]: event["text"] for event in events}
    assert last == {0: "to 1", 1: "to"}
    assert [prompt_of(submit) for submit in w.node.submits[:2]] == [ids("a"), ids("bb")]


def test_one_prompt_with_several_samples_is_answered_by_a_list() -> None:
    with world().http() as http:
        body = {"input_ids": ids("abc"), "sampling_params": {"n": 2}}
        answers = http.post("/generate", json=body).json()
    assert [answer["text"] for answer in answers] == ["ok", "ok"]


def test_what_gateways_add_is_accepted() -> None:
    added = {
        "model": "unknown",
        "return_text_in_logprobs": False,
        "stream": False,
        "log_metrics": True,
        "return_hidden_states": False,
        "background": False,
        "no_logs": False,
        "return_bytes": False,
        "return_entropy": False,
        "lora_path": None,
        "session_params": None,
        "input_ids": None,
        "foo": {"bar": [1]},
    }
    with world().http() as http:
        assert http.post("/generate", json={"text": "x"} | added).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [3]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [3, [4]]}, "input_ids"),
        ({"input_ids": [258]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"text": "x", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "x", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "x", "lora_path": "adapter"}, "lora_path"),
        ({"text": "x", "image_data": ["http://x"]}, "image_data"),
        ({"text": "x", "return_prompt_token_ids": True}, "return_prompt_token_ids"),
        ({"text": "x", "return_sampling_mask": True}, "return_sampling_mask"),
        ({"text": "x", "require_reasoning": True}, "require_reasoning"),
        ({"text": "x", "return_indexer_topk": True}, "return_indexer_topk"),
        ({"text": "x", "positional_embed_overrides": [{}]}, "positional_embed_overrides"),
        ({"text": "x", "return_hidden_states": True}, "return_hidden_states"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_field(body: dict, param: str) -> None:
    with (w := world()).http() as http:
        response = http.post("/generate", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert w.node.submits == []
