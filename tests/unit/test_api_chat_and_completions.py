"""OpenAI's endpoints over a fake node: what comes back, streamed and whole."""

from typing import Any

import pytest
from api_fakes import END, Script, ids, load_tokenizer, prompt_of, says, sse, world

from tandem.core import events
from tandem.core.commands import FinishReason, Path
from tandem.core.values import Cause
from tandem.server import wire
from tandem.server.api.bounds import LOOP_BYTES
from tandem.server.router.answer import passed_headers

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def chat_text(events: list[dict], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_a_chat_answer_holds_text_reason_and_usage() -> None:
    with (w := world(says("Grüße 😀"))).http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Grüße 😀",
        "tool_calls": None,
        "reasoning_content": None,
    }
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", END)
    prompt_tokens, output_tokens = len(prompt_of(w.node.submits[0])), len(ids("Grüße 😀")) + 1
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == output_tokens
    assert answer["usage"]["total_tokens"] == prompt_tokens + output_tokens
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert (answer["object"], answer["model"]) == ("chat.completion", "toy")


@pytest.mark.parametrize("num_bytes", [10, 2 * LOOP_BYTES])
def test_a_whole_number_may_be_written_with_a_point_however_large_the_body_is(num_bytes: int) -> None:
    """JSON schemas know no difference, and clients whose language has one kind of number write it so."""
    body = {**CHAT, "user": "u" * num_bytes, "max_tokens": 7.0, "top_logprobs": 2.0, "logprobs": True}
    with (w := world()).http() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        refused = http.post("/v1/chat/completions", json=body | {"max_tokens": 7.5})
    assert w.node.submits[0].request.max_new_tokens == 7
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_a_chat_prompt_is_the_rendered_template() -> None:
    with (w := world()).http() as http:
        http.post("/v1/chat/completions", json=CHAT)
    assert prompt_of(w.node.submits[0]) == ids("<s>user:hi</s><s>assistant:")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, ",,"),
        ({"reasoning_effort": "none"}, "none,False,False"),
        ({"reasoning_effort": "low"}, "low,True,True"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none,True,False"),
    ],
)
def test_an_effort_says_whether_there_is_thinking(fields: dict[str, Any], shown: str) -> None:
    """In the variables of templates that know on and off only, as vLLM and SGLang do; the body's own win."""
    tokenizer = load_tokenizer("{{ reasoning_effort }},{{ enable_thinking }},{{ thinking }}")
    with (w := world(tokenizer=tokenizer)).http() as http:
        assert http.post("/v1/chat/completions", json=CHAT | fields).status_code == 200
    assert prompt_of(w.node.submits[0]) == ids(shown)


def test_parts_of_text_are_joined_and_a_last_message_can_be_continued() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "Once"},
    ]
    with (w := world()).http() as http:
        body = {"messages": messages, "continue_final_message": True}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert prompt_of(w.node.submits[0]) == ids("<s>user:a\nb</s><s>assistant:Once")


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_a_part_of_text_is_one_by_the_name_of_either_api(kind: str) -> None:
    turn = {"role": "user", "content": [{"type": kind, "text": "a"}]}
    with (w := world()).http() as http:
        for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
            response = http.post(path, json={field: [turn]})
            assert response.status_code == 200, response.text
    assert [prompt_of(it) for it in w.node.submits] == [ids("<s>user:a</s><s>assistant:")] * 2


def test_a_part_may_be_a_bare_text() -> None:
    with (w := world()).http() as http:
        body = {"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert prompt_of(w.node.submits[0]) == ids("<s>user:a\nb</s><s>assistant:")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"reasoning_content": "Hm."}, "Hm."),
        ({"reasoning": "Hm."}, "Hm."),  # as vLLM says it
        ({"reasoning_content": "Hm.", "reasoning": "Oh."}, "Hm."),
        ({"reasoning": {"effort": "low"}}, ""),
    ],
)
def test_a_thought_of_before_reaches_the_template_by_either_name(fields: dict[str, Any], shown: str) -> None:
    tokenizer = load_tokenizer("{% for message in messages %}:{{ message.reasoning_content }}{% endfor %}")
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Yes.", **fields}, *CHAT["messages"]]
    with (w := world(tokenizer=tokenizer)).http() as http:
        assert http.post("/v1/chat/completions", json=CHAT | {"messages": messages}).status_code == 200
    assert prompt_of(w.node.submits[0]) == ids(f"::{shown}:")


def test_a_last_message_that_calls_tools_cannot_be_continued() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {
        "messages": [*CHAT["messages"], {"role": "assistant", "content": "Once", "tool_calls": [call]}],
        "continue_final_message": True,
    }
    with world().http() as http:
        refused = http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


def test_a_chat_stream_has_role_text_reason_usage_and_done() -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    with world(says("Grüße 😀")).http() as http:
        response = http.post("/v1/chat/completions", json=body)
    assert response.text.endswith("data: [DONE]\n\n")
    events = sse(response.text)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
    assert chat_text(events) == "Grüße 😀"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], len(ids("Grüße 😀")) + 1)
    assert all("usage" not in event for event in events[:-1])
    assert len({event["id"] for event in events}) == 1


def test_usage_comes_with_every_event_when_asked() -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    with world(says("abc")).http() as http:
        events = sse(http.post("/v1/completions", json=body).text)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_a_stream_without_the_option_has_no_usage() -> None:
    with world().http() as http:
        assert "usage" not in http.post("/v1/completions", json={"prompt": "x", "stream": True}).text


def test_a_completion_counts_its_length_and_says_so() -> None:
    with world(says("abcdef")).http() as http:
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).json()
    assert answer["choices"][0] == {
        "index": 0,
        "text": "abc",
        "logprobs": None,
        "finish_reason": "length",
        "matched_stop": None,
        "stop_reason": None,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_answer(stream: bool) -> None:
    with world(says("ok")).http() as http:
        response = http.post("/v1/completions", json={"prompt": "ask: ", "echo": True, "stream": stream})
    events = sse(response.text) if stream else [response.json()]
    assert "".join(event["choices"][0]["text"] for event in events) == "ask: ok"


def test_prompts_may_be_text_texts_ids_or_lists_of_ids() -> None:
    prompts = ["ab", ["ab"], ids("ab"), [ids("ab")], ["ab", "c"], [ids("ab"), ids("c")]]
    with (w := world()).http() as http:
        for prompt in prompts:
            assert http.post("/v1/completions", json={"prompt": prompt}).status_code == 200
    sent = [prompt_of(submit) for submit in w.node.submits]
    assert sent == [ids("ab")] * 4 + [ids("ab"), ids("c")] * 2


def test_samples_of_prompts_are_numbered_in_order() -> None:
    def script(request, payload) -> Script:
        return Script([*ids(str(request.id)), END])

    with world(script).http() as http:
        answer = http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2}).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "1"),
        (1, "2"),
        (2, "3"),
        (3, "4"),
    ]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 8


def test_a_stream_of_several_samples_keeps_them_apart() -> None:
    def script(request, payload) -> Script:
        return Script([*ids("sample" * int(request.id)), END])

    with world(script).http() as http:
        events = sse(http.post("/v1/chat/completions", json={**CHAT, "n": 3, "stream": True}).text)
    assert [chat_text(events, index) for index in range(3)] == ["sample", "sample" * 2, "sample" * 3]


@pytest.mark.parametrize("first", range(3))
def test_choices_begin_in_their_order_whichever_comes_first(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a pair any may. OpenAI's client takes the first that it sees to be number 0, the next to be number 1."""
    w = world(says("hi"))
    send = w.node.send

    def turned(message: wire.ApiToNode) -> None:
        if isinstance(message, wire.SubmitAll):
            message = wire.SubmitAll((*message.submits[first:], *message.submits[:first]))
        send(message)

    monkeypatch.setattr(w.node, "send", turned)
    with w.http() as http:
        events = sse(http.post("/v1/chat/completions", json={**CHAT, "n": 3, "stream": True}).text)
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["index"] for choice in choices if choice["delta"].get("role")] == [0, 1, 2]
    assert list(dict.fromkeys(choice["index"] for choice in choices)) == [0, 1, 2]
    assert next(choice["index"] for choice in choices if choice["delta"].get("content")) == first
    assert [chat_text(events, index) for index in range(3)] == ["hi"] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_the_stop_string_even_across_tokens(stream: bool) -> None:
    body = {**CHAT, "stop": ["STOP", "never"], "stream": stream}
    with (w := world(says("keep STO this STOP and not this", is_silent=True))).http() as http:
        response = http.post("/v1/chat/completions", json=body)
    if stream:
        parts = sse(response.text)
        text, choice = chat_text(parts), parts[-1]["choices"][0]
    else:
        choice = response.json()["choices"][0]
        text = choice["message"]["content"]
    assert text == "keep STO this "
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "STOP")
    assert w.node.sent == [events.StopMatched(w.node.submits[0].request.id)]


def test_a_stop_string_is_kept_when_asked() -> None:
    body = {"prompt": "x", "stop": "END", "no_stop_trim": True}
    with world(says("the END of it")).http() as http:
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "the END"


def test_no_stop_string_counts_before_min_tokens() -> None:
    body = {"prompt": "x", "stop": "a", "min_tokens": 3}
    with world(says("aaaaa")).http() as http:
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "aa"


def test_a_stop_string_that_comes_as_the_node_fails_still_completes_the_answer() -> None:
    def script(request, payload) -> Script:
        return Script(ids("yes."), failure=Cause.PEER_LOST)

    with world(script).http() as http:
        answer = http.post("/v1/completions", json={"prompt": "x", "stop": "."}).json()
    assert answer["choices"][0]["text"] == "yes"


def test_the_end_token_shows_only_when_special_tokens_are_kept() -> None:
    def script(request, payload) -> Script:
        return Script([*ids("a"), 0, *ids("b"), END])

    shown = []
    with world(script).http() as http:
        for extra in ({}, {"skip_special_tokens": False}, {"skip_special_tokens": False, "no_stop_trim": True}):
            shown.append(http.post("/v1/completions", json={"prompt": "x"} | extra).json()["choices"][0]["text"])
    assert shown == ["ab", "a<s>b", "a<s>b</s>"]


def test_ignored_end_tokens_do_not_end_the_text() -> None:
    def script(request, payload) -> Script:
        return Script([*ids("a"), END, *ids("b")], reason=FinishReason.LENGTH)

    body = {"prompt": "x", "ignore_eos": True, "skip_special_tokens": False}
    with world(script).http() as http:
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "a</s>b"


def test_chat_logprobs_have_one_entry_per_token_whether_streamed_or_not() -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    with world(says("hé")).http() as http:
        whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
        events = sse(http.post("/v1/chat/completions", json=body | {"stream": True}).text)
    parts = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == whole
    assert [bytes(entry["bytes"]) for entry in whole] == [b"h", b"\xc3", b"\xa9", b"</s>"]
    assert (whole[0]["token"], whole[0]["logprob"]) == ("h", -0.5)
    assert [top["logprob"] for top in whole[0]["top_logprobs"]] == [-0.5, -1.5]


def test_the_text_of_an_event_is_that_of_its_tokens_and_the_end_token_has_its_own() -> None:
    """As with vLLM: guidance puts the texts together of the tokens that an event tells of, where those are several."""
    with world(says("hello", is_burst=True)).http() as http:
        body = {**CHAT, "logprobs": True, "return_token_ids": True, "stream": True}
        choices = [event["choices"][0] for event in sse(http.post("/v1/chat/completions", json=body).text)]
    told = [choice for choice in choices if choice["logprobs"]]
    assert [choice["delta"]["content"] for choice in told] == ["hello", ""]
    assert [[entry["token"] for entry in choice["logprobs"]["content"]] for choice in told] == [[*"hello"], ["</s>"]]
    assert [choice["token_ids"] for choice in told] == [ids("hello"), [END]]


def test_completion_logprobs_have_the_old_shape() -> None:
    with world(says("ab")).http() as http:
        body = {"prompt": "x", "logprobs": 2, "max_tokens": 2}
        logprobs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        events = sse(http.post("/v1/completions", json=body | {"stream": True}).text)
    assert logprobs == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}],
        "text_offset": [0, 1],
    }
    offsets = [event["choices"][0]["logprobs"] for event in events]
    assert [offset for part in offsets for offset in part["text_offset"]] == [0, 1]


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_of_one_character_begin_where_it_does(echo: bool) -> None:
    with world(says("añ😀b")).http() as http:
        body = {"prompt": "é", "logprobs": 0, "echo": echo}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        events = sse(http.post("/v1/completions", json=body | {"stream": True}).text)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == [0] * 2 * echo + [echo + at for at in (0, 1, 1, 2, 2, 2, 2, 3, 4)]
    assert choice["text"][offsets[-2]] == "b"
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [offset for part in parts for offset in part["text_offset"]] == offsets


def test_token_ids_come_when_asked() -> None:
    body = {"prompt": "x", "return_token_ids": True}
    with world(says("ab")).http() as http:
        whole = http.post("/v1/completions", json=body).json()["choices"][0]
        events = sse(http.post("/v1/completions", json=body | {"stream": True}).text)
    assert (whole["token_ids"], whole["prompt_token_ids"]) == ([*ids("ab"), END], ids("x"))
    assert [id for event in events for id in event["choices"][0].get("token_ids", [])] == whole["token_ids"]
    assert events[0]["choices"][0]["prompt_token_ids"] == ids("x")


def test_tokens_are_shown_by_id_where_that_is_asked_for() -> None:
    """vLLM's `return_tokens_as_token_ids`: two tokens can have one text, and no token two ids."""
    asked = {"return_tokens_as_token_ids": True, "echo": True, "logprobs": 1}
    with world(says("ab")).http() as http:
        body = {"prompt": "x"} | asked
        shown = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        events = sse(http.post("/v1/completions", json=body | {"stream": True}).text)
        more = {"logprobs": True, "top_logprobs": 1}
        chat = http.post("/v1/chat/completions", json=CHAT | asked | {"echo": False} | more).json()
    names = [f"token_id:{id}" for id in [*ids("xab"), END]]
    assert shown["tokens"] == names
    assert all(name in best for name, best in zip(names[1:], shown["top_logprobs"][1:], strict=True))
    assert [name for event in events for name in event["choices"][0]["logprobs"]["tokens"]] == names
    entries = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == names[1:]
    assert entries[0]["bytes"] == list(b"a"), "what it is, beside its id"
    assert all(best["token"].startswith("token_id:") for entry in entries for best in entry["top_logprobs"])


def test_the_first_event_of_a_chat_has_the_prompts_ids() -> None:
    """Beside its choices, as the whole answer has them, and vLLM's streams."""
    body = {**CHAT, "return_token_ids": True, "n": 2}
    with (w := world(says("ab"))).http() as http:
        whole = http.post("/v1/chat/completions", json=body).json()
        events = sse(http.post("/v1/chat/completions", json=body | {"stream": True}).text)
    assert whole["prompt_token_ids"] == prompt_of(w.node.submits[0])
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in choice for event in events for choice in event["choices"])


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x", "echo": True})],
)
def test_an_event_that_shows_nothing_of_the_answer_counts_nothing_of_it(path: str, body: dict[str, Any]) -> None:
    """However much of it there is by then: who divides text by tokens would have some that nobody has seen."""
    more = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    with world(says("abc")).http() as http:
        events = sse(http.post(path, json=body | more).text)
    opening = events[0]["usage"]
    assert (opening["completion_tokens"], opening["total_tokens"]) == (0, opening["prompt_tokens"])
    assert events[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_of_what_ended_an_answer_the_clients_own_stops_are_named(path: str, stream: bool) -> None:
    """vLLM's `stop_reason`: the stop string or token id of the request, and null where the model ended by itself."""
    body = (CHAT if "chat" in path else {"prompt": "x"}) | {"stream": stream}
    told = []
    for output, more in (("ab", {}), ("abc", {"stop": "b"}), ("ab", {"stop_token_ids": ids("b")})):
        script = Script(ids(output) if "stop_token_ids" in more else [*ids(output), END])
        with world(lambda request, payload, script=script: script).http() as http:
            answer = http.post(path, json=body | more)
        (last,) = (sse(answer.text) if stream else [answer.json()])[-1]["choices"]
        told.append((last["finish_reason"], last["stop_reason"]))
    assert told == [("stop", None), ("stop", "b"), ("stop", ids("b")[0])]


@pytest.mark.parametrize("echo", [False, True])
def test_every_event_of_a_completion_has_the_lists_that_were_asked_for(echo: bool) -> None:
    """The opening, too, which shows the prompt alone: clients add up what is in each one."""
    body = {"prompt": "x", "echo": echo, "logprobs": 1, "return_token_ids": True, "stream": True}
    with world(says("ab")).http() as http:
        choices = [event["choices"][0] for event in sse(http.post("/v1/completions", json=body).text)]
    assert [id for choice in choices for id in choice["token_ids"]] == [*ids("ab"), END]
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == ["x"] * echo + ["a", "b", "</s>"]


def test_the_path_is_in_the_head_of_streams_and_answers() -> None:
    with world(says("a", path=Path.REMOTE)).http() as http:
        for stream in (False, True):
            response = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
            assert response.headers["x-tandem-path"] == "remote"


def test_proxies_are_told_not_to_collect_a_stream() -> None:
    with world(says("a")).http() as http:
        for stream, said in ((False, None), (True, "no")):
            response = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
            assert response.headers.get("x-accel-buffering") == said
            passed = passed_headers(response.headers)
            assert passed.get("x-accel-buffering") == said, "also behind a router"


def test_the_request_id_of_the_client_comes_back() -> None:
    with world().http() as http:
        for path in ("/v1/completions", "/nowhere"):
            response = http.post(path, json={"prompt": "x"}, headers={"x-request-id": "mine-1"})
            assert response.headers["x-request-id"] == "mine-1"
        assert http.get("/health").headers["x-request-id"]
