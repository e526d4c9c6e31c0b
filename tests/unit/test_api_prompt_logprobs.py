"""Log-probabilities of prompts as clients ask for them and are told: `echo` with `logprobs`, and SGLang's names."""

from typing import Any  # bodies

import msgspec
import pytest
from api_fakes import World, ids, prompt_of, says, sse, world
from starlette.testclient import TestClient

from tandem.core.request import Request
from tandem.sampling import Payload

SCORE = -0.5  # of every token, by the fake node


def asked(http: TestClient, path: str, body: dict[str, Any]) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def complete(w: World, **fields: Any) -> list[dict[str, Any]]:
    with w.http() as http:
        choices: list[dict[str, Any]] = asked(http, "/v1/completions", {"echo": True, "logprobs": 1} | fields)[
            "choices"
        ]
    return choices


def submitted(w: World) -> tuple[Request, Payload]:
    return w.node.submits[-1].request, w.node.submits[-1].payload


# --- /v1/completions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["abc", ids("abc")])
def test_echo_with_logprobs_tells_of_prompt_and_answer(prompt: Any) -> None:
    w = world(says("ok"))
    (choice,) = complete(w, prompt=prompt)
    assert choice["text"] == "abcok"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "o", "k", "</s>"]
    assert choice["logprobs"]["token_logprobs"] == [None, *[SCORE] * 5]
    assert choice["logprobs"]["top_logprobs"] == [None, *({name: SCORE} for name in ("b", "c", "o", "k", "</s>"))]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]
    request, payload = submitted(w)
    assert (request.prompt_logprobs_from, payload.sampling.prompt_logprobs_from) == (0, 0)


def test_without_echo_or_without_logprobs_nothing_is_asked_of_the_prompt() -> None:
    w = world(says("ok"))
    (told,) = complete(w, prompt="abc", echo=False)
    assert told["logprobs"]["tokens"] == ["o", "k", "</s>"]
    (plain,) = complete(w, prompt="abc", logprobs=None)
    assert (plain["text"], plain["logprobs"]) == ("abcok", None)
    assert [submit.request.prompt_logprobs_from for submit in w.node.submits] == [None, None]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_no_tokens_at_all_are_a_prompt_that_is_told_of(is_streamed: bool) -> None:
    """What lm-eval's loglikelihood asks. The node samples one token, as it does for every prompt; nobody sees it."""
    w = world(says("ok"))
    body = {"prompt": ["ab", "xyz"], "echo": True, "logprobs": 1, "max_tokens": 0, "stream": is_streamed}
    with w.http() as http:
        if is_streamed:
            events = sse(http.post("/v1/completions", json=body).text)
            choices = [choice for event in events for choice in event["choices"]]
        else:
            choices = asked(http, "/v1/completions", body)["choices"]
    for index, text in enumerate(("ab", "xyz")):
        mine = [choice for choice in choices if choice["index"] == index]
        told = [choice["logprobs"] for choice in mine if choice["logprobs"] is not None]
        assert "".join(choice["text"] for choice in mine) == text
        assert [token for one in told for token in one["tokens"]] == list(text)
        assert [lp for one in told for lp in one["token_logprobs"]] == [None, *[SCORE] * (len(text) - 1)]
        assert mine[-1]["finish_reason"] == "length"
    assert [submit.request.max_new_tokens for submit in w.node.submits] == [1, 1]


def test_no_tokens_count_none_and_end_for_their_length_whatever_was_sampled() -> None:
    w = world(says(""))  # the end token
    with w.http() as http:
        answer = asked(http, "/v1/completions", {"prompt": "ab", "max_tokens": 0})
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0


def test_a_stream_tells_of_the_prompt_first() -> None:
    w = world(says("ok"))
    with w.http() as http:
        body = {"prompt": "abc", "echo": True, "logprobs": 2, "stream": True}
        first, *rest = [event["choices"][0] for event in sse(http.post("/v1/completions", json=body).text)]
    assert (first["text"], first["logprobs"]["tokens"]) == ("abc", ["a", "b", "c"])
    assert first["logprobs"]["token_logprobs"] == [None, SCORE, SCORE]
    assert len(first["logprobs"]["top_logprobs"][1]) == 2
    offsets = [offset for choice in rest for offset in (choice["logprobs"] or {}).get("text_offset", ())]
    assert offsets == [3, 4, 5]


def test_each_sample_tells_of_its_prompt() -> None:
    choices = complete(world(says("ok")), prompt=["ab", "x"], n=2)
    assert [choice["logprobs"]["tokens"][: -len("ok") - 1] for choice in choices] == [*[["a", "b"]] * 2, *[["x"]] * 2]


def test_scores_that_are_lacking_are_none() -> None:
    """As of a peer that tells of fewer tokens than the prompt has."""
    w = world(says("ok"))
    told = msgspec.msgpack.encode([(-0.25, (), ())])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("api_fakes.prompt_scores", lambda payload: (told,))
        (choice,) = complete(w, prompt="abc")
    assert choice["logprobs"]["token_logprobs"][:3] == [None, -0.25, None]


# --- vLLM's prompt_logprobs ------------------------------------------------------------------------------------------


def entry(char: str, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": char}


@pytest.mark.parametrize("most", [0, 2])
def test_prompt_logprobs_are_told_by_id_with_the_best_alternatives(most: int) -> None:
    """The fake node says of a token that it is the best, the next id half a nat behind it."""
    w = world(says("ok"))
    (choice,) = complete(w, prompt="abc", echo=False, logprobs=None, prompt_logprobs=most)
    told = choice["prompt_logprobs"]
    assert (choice["text"], choice["logprobs"], told[0], len(told)) == ("ok", None, None, 3)
    (b,), (c,) = ids("b"), ids("c")
    best = {str(b): entry("b", SCORE, 1), str(c): entry("c", SCORE - 1, 2)}
    assert told[1] == (best if most else {str(b): entry("b", SCORE, None)})
    assert submitted(w)[1].sampling.prompt_top_logprobs == most
    assert not submitted(w)[1].sampling.logprobs, "nothing is asked of the answer"


def test_prompt_and_answer_may_want_different_numbers_of_alternatives() -> None:
    (choice,) = complete(world(says("ok")), prompt="abc", echo=True, logprobs=1, prompt_logprobs=3)
    assert [len(tops) for tops in choice["logprobs"]["top_logprobs"][1:]] == [1] * 5
    assert [len(told) for told in choice["prompt_logprobs"][1:]] == [3] * 2
    (choice,) = complete(world(says("ok")), prompt="abc", echo=True, logprobs=3, prompt_logprobs=1)
    assert [len(tops) for tops in choice["logprobs"]["top_logprobs"][1:]] == [3] * 5
    assert [len(told) for told in choice["prompt_logprobs"][1:]] == [1] * 2


def test_a_chat_tells_them_once_beside_its_choices() -> None:
    w = world(says("ok"))
    with w.http() as http:
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "prompt_logprobs": 1}
        answer = asked(http, "/v1/chat/completions", body)
    prompt = prompt_of(w.node.submits[-1])
    assert [told if told is None else list(told) for told in answer["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in prompt[1:]),
    ]
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "wish", [{"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}]
)
def test_prompt_logprobs_that_cannot_be_told_are_refused(path: str, wish: dict[str, Any]) -> None:
    about = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    with world(says("ok")).http() as http:
        response = http.post(path, json=about | wish)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_nobody_is_told_of_a_prompt_who_has_not_asked() -> None:
    (choice,) = complete(world(says("ok")), prompt="abc")
    assert "prompt_logprobs" not in choice


# --- /generate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "told"), [(0, "abcd"), (1, "bcd"), (3, "d"), (4, ""), (9, ""), (-1, ""), (None, "")])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_input_logprobs_begin_where_the_client_says(start: int | None, told: str, is_streamed: bool) -> None:
    w = world(says("ok"))
    fields = {
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
    }
    with w.http() as http:
        body = {"text": "abcd", "stream": is_streamed} | fields
        metas = (
            [event["meta_info"] for event in sse(http.post("/generate", json=body).text)]
            if is_streamed
            else [asked(http, "/generate", body)["meta_info"]]
        )
    right = [[None if at == 0 else SCORE, ids(char)[0], char] for at, char in enumerate(told)]
    for meta in (metas[0], metas[-1]):  # of a stream the first and the last event, however many there are
        assert meta["input_token_logprobs"] == right
        assert meta["input_top_logprobs"] == [None if entry[0] is None else [entry] for entry in right]
    assert len(metas[-1]["output_token_logprobs"]) == 3
    assert submitted(w)[0].prompt_logprobs_from == (start if told else None)


def test_without_return_logprob_a_start_says_nothing() -> None:
    w = world(says("ok"))
    with w.http() as http:
        meta = asked(http, "/generate", {"text": "abcd", "logprob_start_len": 0})["meta_info"]
    assert "input_token_logprobs" not in meta
    assert submitted(w)[0].prompt_logprobs_from is None


def test_a_prefill_tells_nothing_for_decode_does() -> None:
    w = world(says("ok"), disaggregation_mode="prefill")
    body = {"text": "abcd", "return_logprob": True, "logprob_start_len": 0, "bootstrap_room": 7}
    with w.http() as http:
        assert asked(http, "/generate", body)["meta_info"]["input_token_logprobs"] == []
    assert submitted(w)[0].prompt_logprobs_from == 0, "decode has it from there"


def test_both_halves_mean_the_same_request_only_if_they_want_the_same_of_its_prompt() -> None:
    digests = set()
    for fields in ({}, {"echo": True, "logprobs": 1}, {"logprobs": 1}):
        w = world(says("ok"), digest_secret=b"s" * 32)
        with w.http() as http:
            asked(http, "/v1/completions", {"prompt": "abc", "seed": 1} | fields)
        digests.add(submitted(w)[0].prompt_digest)
    assert len(digests) == 2


def test_halves_that_tell_of_other_tokens_mean_the_same_request() -> None:
    digests = set()
    for fields in ({}, {"top_logprobs_num": 3}, {"token_ids_logprob": [5]}):
        w = world(says("ok"), digest_secret=b"s" * 32)
        with w.http() as http:
            body = {"text": "abc", "sampling_params": {"sampling_seed": 1}, "return_logprob": True}
            asked(http, "/generate", body | fields)
        digests.add(submitted(w)[0].prompt_digest)
    assert len(digests) == 1


# --- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [5] * 20_000, "echo": True, "logprobs": 20}),
        ("/v1/completions", {"prompt": [[5] * 10_000] * 60, "echo": True, "logprobs": 1}),
        ("/generate", {"input_ids": [5] * 300_000, "return_logprob": True, "logprob_start_len": 0}),
    ],
    ids=["one message", "one request", "generate"],
)
def test_more_than_travels_is_refused_before_anything_is_computed(path: str, fields: dict[str, Any]) -> None:
    w = world(says("ok"), context_length=1 << 20)
    with w.http() as http:
        response = http.post(path, json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs"), response.text
    assert w.node.submits == []


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    w = world(says("ok"))
    (choice,) = complete(w, prompt=[5], max_tokens=0)
    assert choice["logprobs"]["token_logprobs"] == [None]
    assert prompt_of(w.node.submits[-1]) == [5]
