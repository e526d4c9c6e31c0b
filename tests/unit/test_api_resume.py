"""A stream is cut behind any of its frames and goes on at another server: the client cannot tell from its bytes."""

import asyncio
import re
from array import array
from collections.abc import Callable, Sequence
from random import Random
from typing import Any  # JSON documents

import msgspec
import pytest
from api_fakes import Script, World, ids, load_tokenizer, prompt_of, says, tokenizer, world
from test_api_tools import ADD, CALL, END, OTHER, SUB, THINKS

from tandem.core.commands import FinishReason, FinishRequest
from tandem.core.request import Request
from tandem.core.values import Cause
from tandem.sampling import Payload
from tandem.server import wire
from tandem.server.api.errors import Failure
from tandem.server.api.live_requests import IncomingRequest, LiveRequests
from tandem.server.api.resume import (
    ASKS,
    FIELD,
    REASONS,
    TELLS,
    FrameReader,
    Opening,
    PieceKind,
    Proofs,
    Resume,
    ResumeFrame,
    Told,
    pieces_in,
)
from tandem.server.api.telling import Teller
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
LISTS = {"bootstrap_host": ["127.0.0.1"] * 3, "bootstrap_port": [8998] * 3, "bootstrap_room": [77, 80, 81]}
OTHER_LISTS = LISTS | {"bootstrap_room": [78, 82, 83]}
USAGE = {"stream_options": {"include_usage": True}}
SEVERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "samples of a chat": ("/v1/chat/completions", {"messages": USER, "n": 3, **USAGE}),
    "samples with counts and ids": (
        "/v1/chat/completions",
        {"messages": USER, "n": 3, "return_token_ids": True, "stream_options": {"continuous_usage_stats": True}},
    ),
    "samples with calls": ("/v1/chat/completions", {"messages": USER, "n": 3, "tools": [ADD, SUB]}),
    "samples of a completion": ("/v1/completions", {"prompt": "hi", "n": 3, "logprobs": 1, "echo": False, **USAGE}),
    "samples that are cut": ("/v1/completions", {"prompt": "hi", "n": 3, "max_tokens": 7, "stop": ["ne t"], **USAGE}),
    "prompts": ("/v1/completions", {"prompt": ["hi", "you", "there"], "echo": True, **USAGE}),
}
SAYINGS = (TORN, "I", f"one two {CALL}")  # of which the second ends early


def decode_that_says(*sayings: list[int], template: str = THINKS, **script: Any) -> World:
    """Of a cluster; it goes on behind what was said before, as an engine does. sayings: of each choice."""

    def rest(request: Request, payload: Payload) -> Script:
        tokens = sayings[choice_of(request) if len(sayings) > 1 else 0]
        return Script(tokens[payload.num_said :], is_patient=True, **script)

    found: Callable[[Request, Payload], Script] = rest
    own: Tokenizer = load_tokenizer(template)
    return world(found, tokenizer=own, disaggregation_mode="decode", digest_secret=SECRET, page_size=4)


def choice_of(request: Request) -> int:
    return int(request.rid.rpartition("_")[2])


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


def said_in(frames: list[tuple[ResumeFrame, bytes]]) -> dict[int, tuple[list[int], bool]]:
    """Of each choice: its tokens, and whether it has ended."""
    found: dict[int, tuple[list[int], bool]] = {}
    for piece in pieces_in(b"".join(frame.said for frame, _ in frames)):
        tokens, has_ended = found.get(piece.choice, ([], False))
        assert not has_ended
        is_begin = piece.kind is PieceKind.BEGINS
        assert is_begin is (piece.choice not in found)
        found[piece.choice] = (tokens + ([] if is_begin else [*piece.numbers]), piece.kind in REASONS)
    return found


def by_choice(data: bytes) -> dict[int, list[bytes]]:
    """Events, of each choice in their order; -1: of none."""
    found: dict[int, list[bytes]] = {}
    for event in data.split(b"\n\n"):
        index = re.search(rb'"index":(\d+)', event)
        found.setdefault(-1 if index is None else int(index[1]), []).append(event)
    return found


def shown(frames: list[tuple[ResumeFrame, bytes]]) -> bytes:
    """Without the one time that is of the end and not of the beginning."""
    return re.sub(rb'"completed_at":\d+', b"", b"".join(data for _, data in frames))


def test_a_stream_may_move_of_which_its_router_asks_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, seen = LiveRequests.submit, list[bool]()

    def submitted(requests: LiveRequests, arrivals: Sequence[IncomingRequest], *rest: Any, **more: Any) -> Any:
        seen.extend(arrival.may_move for arrival in arrivals)
        return submit(requests, arrivals, *rest, **more)

    monkeypatch.setattr(LiveRequests, "submit", submitted)
    w = decode_that_says(ids("one"))
    with w.http() as http:
        for headers in ({ASKS: "1"}, {}):
            http.post("/v1/completions", json={"prompt": "hi", "stream": True} | PAIR, headers=headers)
    assert seen == [True, False]


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
        said, _ = said_in(whole[:cut])[0]
        assert [submit.payload.num_said for submit in w.node.submits] in (
            [len(said)],
            [],
        )  # []: it had been said to its end
        # ... and it can be cut once more.
        if len(rest) > 1:
            again = frames_of(decode_that_says(tokens), path, PAIR | fields | resume_of(whole[:cut] + rest[:1]))
            assert shown(whole[:cut] + rest[:1] + again) == shown(whole), f"cut behind frames {cut} and {cut + 1}"


@pytest.mark.parametrize("form", SEVERAL)
def test_each_choice_of_several_goes_on_behind_its_own_tokens(form: str) -> None:
    path, fields = SEVERAL[form]
    pair, other = (LISTS, OTHER_LISTS) if form == "prompts" else (PAIR, OTHER_PAIR)
    pair, other = pair | {"rendered_at": PAIR["rendered_at"]}, other | {"rendered_at": PAIR["rendered_at"]}
    sayings = [[*ids(text), END] for text in SAYINGS]
    first = decode_that_says(*sayings)
    whole = frames_of(first, path, pair | fields)
    seeds = {choice_of(submit.request): submit.payload.sampling.seed for submit in first.node.submits}
    prompts = {choice_of(submit.request): prompt_of(submit) for submit in first.node.submits}
    rooms = {submit.request.room for submit in first.node.submits}
    assert len(set(seeds.values())) == len(rooms) == len(SAYINGS)
    num_with_ended = 0
    for cut in sorted({1, 2, 3, 4, len(whole) - 1, *Random(2).sample(range(1, len(whole)), 2)}):
        w = decode_that_says(*sayings)
        rest = frames_of(w, path, other | fields | resume_of(whole[:cut]))
        assert by_choice(shown(whole[:cut] + rest)) == by_choice(shown(whole)), f"cut behind frame {cut}"
        said = said_in(whole[:cut])
        submits = {choice_of(submit.request): submit for submit in w.node.submits}
        for choice, submit in submits.items():
            tokens, has_ended = said.get(choice, ([], False))
            assert not has_ended
            assert prompt_of(submit) == prompts[choice] + tokens
            assert submit.payload.num_said == len(tokens)
            assert submit.payload.sampling.seed == seeds[choice]
            assert submit.request.room not in rooms
        num_with_ended += 0 < len(submits) < len(SAYINGS)
        if len(rest) > 1:
            again = frames_of(decode_that_says(*sayings), path, pair | fields | resume_of(whole[:cut] + rest[:1]))
            assert by_choice(shown(whole[:cut] + rest[:1] + again)) == by_choice(shown(whole)), f"{cut} and {cut + 1}"
    assert num_with_ended > 1


def test_what_was_opened_before_it_had_a_token_is_not_opened_again() -> None:
    """Choices are opened in their order, and come in any."""
    path, fields = SEVERAL["samples of a chat"]
    sayings = [[*ids(text), END] for text in SAYINGS]
    first = decode_that_says(*sayings)
    send, tell, held = first.node.send, first.node.tell, list[wire.Submit]()

    def send_last(message: wire.ApiToNode) -> None:
        if isinstance(message, wire.SubmitAll):
            *held[:], last = message.submits
            message = wire.SubmitAll((last,))
        send(message)

    def tell_and_send(message: wire.NodeToApi) -> None:
        tell(message)
        if isinstance(message, FinishRequest) and held:
            others, held[:] = tuple(held), ()
            send(wire.SubmitAll(others))

    first.node.send, first.node.tell = send_last, tell_and_send  # type: ignore[method-assign]  # of this node only
    whole = frames_of(first, path, PAIR | fields)
    assert whole[0][1].count(b'"role"') == 3
    assert said_in(whole[:1]) == {2: (ids("o"), False)}
    for cut in range(1, len(whole)):
        rest = frames_of(decode_that_says(*sayings), path, OTHER_PAIR | fields | resume_of(whole[:cut]))
        assert by_choice(shown(whole[:cut] + rest)) == by_choice(shown(whole)), f"cut behind frame {cut}"


def test_events_of_several_choices_are_told_in_the_order_in_which_they_were_written() -> None:
    """... in whatever order the tokens come, and with all that one frame has of them."""
    sayings = [[*ids(text), END] for text in SAYINGS]
    body = {"prompt": "hi", "n": 3, "return_token_ids": True}
    for frame, data in frames_of(decode_that_says(*sayings), "/v1/completions", PAIR | body):
        events = [event for event in data.split(b"\n\n") if b'"token_ids"' in event and b'"prompt_token' not in event]
        written = [(int(index[1]), ids_in(event)) for event in events if (index := re.search(rb'"index":(\d)', event))]
        told = [piece for piece in pieces_in(frame.said) if piece.kind is not PieceKind.BEGINS]
        assert [(piece.choice, [*piece.numbers]) for piece in told] == written


def ids_in(event: bytes) -> list[int]:
    found = re.search(rb'"token_ids":(\[[^]]*\])', event)
    assert found is not None
    return msgspec.json.decode(found[1])


def test_a_stream_of_which_only_the_end_is_missing_asks_no_node() -> None:
    """Every choice has ended, and the client lacks what closes the stream. Prefill has nothing to do either."""
    sayings = [[*ids(text), END] for text in SAYINGS]
    body = {"prompt": "hi", "n": 3, **USAGE}
    whole = frames_of(decode_that_says(*sayings), "/v1/completions", PAIR | body)
    *before, (last, data) = whole
    closing = data[data.rindex(b"data: {") :]
    cut = [*before, (msgspec.structs.replace(last, is_last=False), data.removesuffix(closing))]
    w = decode_that_says(*sayings)
    rest = frames_of(w, "/v1/completions", OTHER_PAIR | body | resume_of(cut))
    assert (shown(cut + rest), w.node.submits) == (shown(whole), [])
    asyncio.run(asyncio.wait_for(w.client.wait_idle(), 5))
    prefill = world(says("one"), disaggregation_mode="prefill", digest_secret=SECRET, page_size=4)
    with prefill.http() as http:
        sent = OTHER_PAIR | body | resume_of(cut) | {"stream": True}
        assert http.post("/v1/completions", json=sent, headers={ASKS: "1"}).status_code == 200
    assert prefill.node.submits == []


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
    cut = [frame for frame in whole[:-1] if len(said_in(whole[:-1])[0][0]) == len(tokens)]
    assert cut, "the end comes behind the last token"
    w = decode_that_says(tokens * 2)
    rest = frames_of(w, "/v1/completions", OTHER_PAIR | body | resume_of(cut))
    assert w.node.submits == []
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
    numbers = array("i", made.said)
    wrong = [
        msgspec.structs.replace(made, said=array("i", [*numbers[:-1], numbers[-1] + 1]).tobytes()),
        msgspec.structs.replace(made, said=made.said[:-16]),
        msgspec.structs.replace(made, said=made.said[:-1]),
        msgspec.structs.replace(made, proof=bytes(16)),
        msgspec.structs.replace(made, opening=msgspec.structs.replace(made.opening, rooms=(5,))),
        msgspec.structs.replace(made, opening=msgspec.structs.replace(made.opening, rooms=())),
        msgspec.structs.replace(made, opening=msgspec.structs.replace(made.opening, made_at=0)),
        msgspec.structs.replace(made, said=array("i", [*numbers[:3], 0, *numbers[4:]]).tobytes()),
        msgspec.structs.replace(made, said=b""),
    ]
    bodies = [OTHER_PAIR | body | {FIELD: msgspec.to_builtins(one)} for one in wrong]
    bodies.append(OTHER_PAIR | {"prompt": "ho"} | {FIELD: right})
    bodies.append(OTHER_PAIR | body | {"temperature": 0.5} | {FIELD: right})
    bodies.append(OTHER_PAIR | body | {"n": 2} | {FIELD: right})
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
        ("/v1/completions", {"prompt": ["abc", "b"], "echo": True, "logprobs": 1, "bootstrap_room": [1, 2]}),
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
    assert (bool(last.gives_up), last.code) == (may_go_on, cause.value)
    assert last.serves_on is (cause is Cause.WORKER_LOST)
    assert cause.value in data.decode()


@pytest.mark.parametrize("serves", [True, False])
def test_whether_a_rank_is_left_is_said_of_a_stream_whose_rank_was_lost(serves: bool) -> None:
    teller = Teller(Proofs(b"key", Opening("nonce", 0, ()), ()), None, (), lambda: serves)
    ((last, _),) = FrameReader().feed(teller.last_frame(b"", Failure(Cause.WORKER_LOST, "gone")))
    assert (last.gives_up, last.serves_on) == ("gone", serves)


def test_frames_out_of_bounds_are_none() -> None:
    for raw in (b'{"size":-1}\n', b'{"size":1,"said":"AAA="}\n', b"data: {}\n", b"x" * (9 << 20)):
        with pytest.raises(ValueError, match="frame") as raised:
            list(FrameReader().feed(raw))
        assert type(raised.value) is ValueError, "whatever it is that msgspec raises"


def test_the_tokenizer_of_these_tests_has_a_token_for_each_byte() -> None:
    assert len(ids(TORN)) == len(TORN.encode())
    assert tokenizer().decode(ids(TORN)) == TORN


def test_a_router_passes_no_field_of_a_client_on() -> None:
    assert encode_rest({"prompt": "x", FIELD: {"said": ""}}) == b'{"prompt":"x"}'
