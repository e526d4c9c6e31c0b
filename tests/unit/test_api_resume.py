"""A stream is cut behind any of its frames and goes on at another server: the client cannot tell from its bytes."""

import re
from array import array
from collections.abc import Callable
from random import Random
from typing import Any  # JSON documents

import msgspec
import pytest
from api_fakes import Script, World, ids, load_tokenizer, prompt_of, says, tokenizer, world
from test_api_tools import ADD, CALL, END, OTHER, SUB, THINKS

from tandem.core.commands import FinishReason
from tandem.core.request import Request
from tandem.core.values import Cause
from tandem.sampling import Payload
from tandem.server.api.resume import ASKS, FIELD, TELLS, FrameReader, Resume, ResumeFrame, Told
from tandem.server.api.tokenizer import Tokenizer
from tandem.server.router.shell import encode_rest

PAIR = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77, "rendered_at": 1_700_000_000}
OTHER_PAIR = PAIR | {"bootstrap_room": 78}
SECRET = b"s" * 32
USER = [{"role": "user", "content": "hi"}]
TORN = "ß and 雪 and more"  # characters of several tokens
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", TORN, {"messages": USER, "stream_options": {"include_usage": True}}),
    "chat with counts and ids": (
        "/v1/chat/completions",
        TORN,
        {"messages": USER, "return_token_ids": True, "stream_options": {"continuous_usage_stats": True}},
    ),
    "chat with logprobs": ("/v1/chat/completions", TORN, {"messages": USER, "logprobs": True, "top_logprobs": 2}),
    "thoughts and calls": (
        "/v1/chat/completions",
        f"<think>\nI add</think>Well {CALL}\n{OTHER}",
        {"messages": USER, "tools": [ADD, SUB]},
    ),
    "a stop string": ("/v1/chat/completions", "one STOP two", {"messages": USER, "stop": ["STOP"]}),
    "completion": ("/v1/completions", TORN, {"prompt": "hi", "echo": True, "stop": ["more"]}),
    "completion with offsets": ("/v1/completions", TORN, {"prompt": "hi", "logprobs": 1}),
    "completion cut at its length": ("/v1/completions", TORN, {"prompt": "hi", "max_tokens": 7}),
    "messages": ("/v1/messages", f"Well {CALL}", {"model": "toy", "messages": USER, "max_tokens": 900}),
    "responses": (
        "/v1/responses",
        f"<think>\nI add</think>Well {CALL}",
        {"model": "toy", "input": "hi", "tools": [{"type": "function", **ADD["function"]}]},
    ),
}


def decode_that_says(tokens: list[int], *, template: str = THINKS, **script: Any) -> World:
    """Of a cluster; it goes on behind what was said before, as an engine does."""

    def rest(request: Request, payload: Payload) -> Script:
        return Script(tokens[payload.num_said :], is_patient=True, **script)

    found: Callable[[Request, Payload], Script] = rest
    own: Tokenizer = load_tokenizer(template)
    return world(found, tokenizer=own, disaggregation_mode="decode", digest_secret=SECRET, page_size=4)


def frames_of(w: World, path: str, body: dict[str, Any]) -> list[tuple[ResumeFrame, bytes]]:
    with w.http() as http:
        response = http.post(path, json=body | {"stream": True}, headers={ASKS: "1"})
    assert response.status_code == 200, response.text
    assert response.headers[TELLS] == "1"
    reader = FrameReader()
    pieces = [response.content[at : at + 7] for at in range(0, len(response.content), 7)]
    return [frame for piece in pieces for frame in reader.feed(piece)]


def resume_of(frames: list[tuple[ResumeFrame, bytes]]) -> dict[str, Any]:
    told = Told()
    for frame, _ in frames:
        told.add(frame)
    return {FIELD: msgspec.to_builtins(told.resume())}


def shown(frames: list[tuple[ResumeFrame, bytes]]) -> bytes:
    """Without the one time that is of the end and not of the beginning."""
    return re.sub(rb'"completed_at":\d+', b"", b"".join(data for _, data in frames))


@pytest.mark.parametrize("form", FORMS)
def test_bytes_behind_any_frame_are_those_of_a_stream_that_was_not_cut(form: str) -> None:
    path, text, fields = FORMS[form]
    tokens = [*ids(text), END]
    whole = frames_of(decode_that_says(tokens), path, PAIR | fields)
    assert whole[-1][0].is_last
    assert len(whole) > 5
    # Wherever something begins or ends, and some of what is between.
    cuts = sorted({1, 2, 3, len(whole) - 2, len(whole) - 1, *Random(1).sample(range(1, len(whole)), 5)})
    for cut in cuts:
        w = decode_that_says(tokens)
        rest = frames_of(w, path, OTHER_PAIR | fields | resume_of(whole[:cut]))
        assert shown(whole[:cut] + rest) == shown(whole), f"cut behind frame {cut}"
        (submit,) = w.node.submits
        num_said = sum(len(frame.ids) // 4 for frame, _ in whole[:cut])
        assert submit.payload.num_said in (num_said, 0)  # 0: it had been said to its end
        # ... and it can be cut once more.
        if len(rest) > 1:
            again = frames_of(decode_that_says(tokens), path, PAIR | fields | resume_of(whole[:cut] + rest[:1]))
            assert shown(whole[:cut] + rest[:1] + again) == shown(whole), f"cut behind frames {cut} and {cut + 1}"


def test_prompt_and_what_was_said_are_computed_as_one_and_the_rest_is_what_is_left() -> None:
    tokens = [*ids("one two three"), END]
    body = {"prompt": "hi", "max_tokens": 10}
    whole = frames_of(decode_that_says(tokens), "/v1/completions", PAIR | body)
    w = decode_that_says(tokens)
    frames_of(w, "/v1/completions", OTHER_PAIR | body | resume_of(whole[:4]))
    (submit,) = w.node.submits
    assert prompt_of(submit) == ids("hi") + tokens[:4]
    assert (submit.request.prompt_len, submit.request.max_new_tokens, submit.payload.num_said) == (6, 6, 4)
    assert len(submit.request.page_hashes) == 1


def test_draws_go_on_with_the_seed_of_the_first_attempt() -> None:
    body = {"prompt": "hi", "temperature": 1.0}
    first, second = decode_that_says([*ids("one"), END]), decode_that_says([*ids("one"), END])
    whole = frames_of(first, "/v1/completions", PAIR | body)
    frames_of(second, "/v1/completions", OTHER_PAIR | body | resume_of(whole[:1]))
    (before,), (after,) = first.node.submits, second.node.submits
    assert after.payload.sampling == before.payload.sampling


@pytest.mark.parametrize("max_tokens", [4, 100])
def test_what_had_been_said_to_its_end_ends_without_another_token(max_tokens: int) -> None:
    """The last token came, and the word that it was the last did not."""
    tokens = [*ids("one"), END]
    body = {"prompt": "hi", "max_tokens": max_tokens, "stream_options": {"include_usage": True}}
    whole = frames_of(decode_that_says(tokens), "/v1/completions", PAIR | body)
    last, _ = whole[-1]
    assert last.is_last
    cut = [*whole[:-1], (msgspec.structs.replace(last, is_last=False), b"")]
    if not last.ids:
        cut = whole[:-1]
    rest = frames_of(decode_that_says(tokens * 2), "/v1/completions", OTHER_PAIR | body | resume_of(cut))
    text = shown(rest).decode()
    assert '"finish_reason":"stop"' in text
    assert '"completion_tokens":4' in text
    assert "one" not in text


def test_who_writes_the_field_himself_or_changes_it_is_refused() -> None:
    tokens = [*ids("one two three"), END]
    body = {"prompt": "hi"}
    whole = frames_of(decode_that_says(tokens), "/v1/completions", PAIR | body)
    right = resume_of(whole[:4])[FIELD]
    made = msgspec.convert(right, Resume)
    other_ids = array("i", [ids("x")[0], *array("i", made.ids)[1:]]).tobytes()
    wrong = [
        msgspec.structs.replace(made, ids=other_ids),
        msgspec.structs.replace(made, ids=made.ids[:-4], sizes=made.sizes[:-4]),
        msgspec.structs.replace(made, proof=bytes(16)),
        msgspec.structs.replace(made, opening=msgspec.structs.replace(made.opening, room=5)),
        msgspec.structs.replace(made, opening=msgspec.structs.replace(made.opening, cached_tokens=0)),
        msgspec.structs.replace(made, sizes=made.sizes[:-4]),
        msgspec.structs.replace(made, ids=b"", sizes=b""),
    ]
    bodies = [OTHER_PAIR | body | {FIELD: msgspec.to_builtins(one)} for one in wrong]
    bodies.append(OTHER_PAIR | {"prompt": "ho"} | {FIELD: right})
    bodies.append(OTHER_PAIR | body | {"temperature": 0.5} | {FIELD: right})
    for refused in bodies:
        w = decode_that_says(tokens)
        with w.http() as http:
            response = http.post("/v1/completions", json=refused | {"stream": True}, headers={ASKS: "1"})
        assert (response.status_code, w.node.submits) == (400, []), response.text
    # Without the head, which only routers send, the field is nobody's.
    w = decode_that_says(tokens)
    with w.http() as http:
        assert http.post("/v1/completions", json=OTHER_PAIR | body | {FIELD: right, "stream": True}).status_code == 200
    assert w.node.submits[0].payload.num_said == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "bootstrap_room": [1, 2]}),
        ("/v1/completions", {"prompt": "a", "n": 2}),
        ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 1}),
        ("/generate", {"text": "a", "return_logprob": True}),
    ],
)
def test_a_stream_that_nobody_else_could_go_on_with_has_no_frames(path: str, body: dict[str, Any]) -> None:
    lists = {"bootstrap_host": ["127.0.0.1"] * 2, "bootstrap_port": [8998] * 2} if "bootstrap_room" in body else {}
    w = decode_that_says([*ids("one"), END])
    with w.http() as http:
        response = http.post(path, json=PAIR | body | lists | {"stream": True}, headers={ASKS: "1"})
    assert response.status_code == 200, response.text
    assert TELLS not in response.headers
    assert response.text.startswith("data: ")


def test_a_stream_of_blocks_has_no_frames() -> None:
    """Who has seen a part of a block would have the rest of it found otherwise."""
    settings = {"disaggregation_mode": "decode", "digest_secret": SECRET, "page_size": 4}
    for block_tokens in (1, 4):
        w = world(says("one"), block_tokens=block_tokens, **settings)
        with w.http() as http:
            response = http.post("/v1/completions", json=PAIR | {"prompt": "hi", "stream": True}, headers={ASKS: "1"})
        assert response.status_code == 200, response.text
        assert (TELLS in response.headers) is (block_tokens == 1)


def test_nobody_who_has_not_asked_is_told() -> None:
    w = decode_that_says([*ids("one"), END])
    with w.http() as http:
        response = http.post("/v1/completions", json=PAIR | {"prompt": "hi", "stream": True})
    assert TELLS not in response.headers
    assert response.text.startswith("data: ")


@pytest.mark.parametrize(
    ("cause", "may_go_on"),
    [(Cause.DRAINING, True), (Cause.WORKER_LOST, True), (Cause.ABORTED, False), (Cause.DEADLINE_EXCEEDED, False)],
)
def test_a_stream_that_ends_with_an_error_says_whether_it_may_go_on_elsewhere(cause: Cause, may_go_on: bool) -> None:
    w = decode_that_says(ids("one"), failure=cause, reason=FinishReason.STOP)
    *_, (last, data) = frames_of(w, "/v1/completions", PAIR | {"prompt": "hi"})
    assert last.is_last
    assert bool(last.gives_up) is may_go_on
    assert cause.value in data.decode()


def test_frames_out_of_bounds_are_none() -> None:
    for raw in (b'{"size":-1}\n', b'{"size":1,"ids":"AAA="}\n', b"data: {}\n", b"x" * (2 << 20)):
        with pytest.raises(ValueError, match="frame") as raised:
            list(FrameReader().feed(raw))
        assert type(raised.value) is ValueError, "whatever it is that msgspec raises"


def test_the_tokenizer_of_these_tests_has_a_token_for_each_byte() -> None:
    assert len(ids(TORN)) == len(TORN.encode())
    assert tokenizer().decode(ids(TORN)) == TORN


def test_a_router_passes_no_field_of_a_client_on() -> None:
    assert encode_rest({"prompt": "x", FIELD: {"ids": ""}}) == b'{"prompt":"x"}'
