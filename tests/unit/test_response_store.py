"""What is kept of responses: bounds, chains of turns, and who gives up first."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any  # items

import msgspec
import pytest

from tandem.server.api import response_store
from tandem.server.api.errors import Problem, Refusal
from tandem.server.api.response_store import PendingResponse, ResponseStore
from tandem.server.router.finished_response import LastEvent, keep_document, keep_event


def store(max_responses: int = 100, max_bytes: int = 1 << 20) -> ResponseStore:
    return ResponseStore(max_responses, max_bytes)


def document(id: str, text: str = "x", **fields: Any) -> bytes:
    output = [{"type": "message", "id": f"msg_{id}", "text": text}]
    return msgspec.json.encode({"id": id, "output": output, "status": "completed", "store": True} | fields)


def add(it: ResponseStore, id: str, *, after: str | None = None, owner: str = "a", given: str = "x") -> None:
    conversation = PendingResponse(it, owner)
    conversation.begin(after, given, None)
    conversation.keep(document(id))


def is_kept(it: ResponseStore, id: str, owner: str = "a") -> bool:
    try:
        it.find(owner, id)
    except Refusal as refusal:
        return refusal.failure.code is not Problem.RESPONSE_NOT_FOUND
    return True


def texts_before(it: ResponseStore, id: str, owner: str = "a") -> list[str]:
    items = msgspec.json.decode(PendingResponse(it, owner).begin(id, "next", None).before)
    return [item["text"] if "text" in item else item["content"][0]["text"] for item in items]


def test_the_oldest_go_when_there_are_too_many() -> None:
    it = store(max_responses=3)
    for id in "12345":
        add(it, id)
    assert [id for id in "12345" if is_kept(it, id)] == ["3", "4", "5"]


def test_who_has_most_gives_first() -> None:
    it = store(max_responses=4)
    add(it, "mine", owner="a")
    for id in "123456":
        add(it, id, owner="b")
    assert is_kept(it, "mine", "a")
    assert [id for id in "123456" if is_kept(it, id, "b")] == ["4", "5", "6"]


def test_who_has_most_bytes_gives_first_where_bytes_are_too_many() -> None:
    it = store(max_bytes=100_000)
    for id in "12345":
        add(it, id, owner="a")
    add(it, "large", owner="b", given="x" * 98_000)
    add(it, "more", owner="b", given="x" * 1500)
    assert all(is_kept(it, id, "a") for id in "12345")
    assert not is_kept(it, "large", "b")


def test_a_conversation_is_no_longer_than_a_body_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_BODY_BYTES", 3000)
    it = store()
    add(it, "1", given="x" * 1000)
    add(it, "2", after="1", given="x" * 1000)
    with pytest.raises(Refusal) as refused:
        add(it, "3", after="2", given="x" * 1000)
    assert refused.value.failure.code is Problem.BODY_TOO_LARGE


@pytest.mark.parametrize("output", [{}, "x", [7], [{"type": "message"}]])
def test_an_answer_whose_items_have_no_ids_is_not_kept(output: object) -> None:
    it = store()
    conversation = PendingResponse(it, "a")
    conversation.begin(None, "x", None)
    with pytest.raises(msgspec.ValidationError):
        conversation.keep(document("1", output=output))
    assert not is_kept(it, "1")


def test_bytes_are_those_of_what_is_kept_and_nothing_else() -> None:
    it = store()
    add(it, "1")
    one = it.num_bytes
    assert one > 0
    add(it, "2", after="1")
    it.delete("a", "1")
    assert it.num_bytes > one, "the turn is still needed"
    it.delete("a", "2")
    assert it.num_bytes == 0


def test_too_many_bytes_drop_the_oldest_and_what_is_too_large_alone_is_not_kept() -> None:
    it = store(max_bytes=10_000)
    for id in "1234":
        add(it, id, given="x" * 4000)
    assert [id for id in "1234" if is_kept(it, id)] == ["3", "4"]
    add(it, "5", given="x" * 20_000)
    assert not any(is_kept(it, id) for id in "12345")
    assert it.num_bytes == 0


def test_a_long_conversation_is_kept_once() -> None:
    it = store()
    sizes = []
    for number in range(20):
        add(it, str(number), after=str(number - 1) if number else None, given=f"{number:03}")
        sizes.append(it.num_bytes)
    steps = {after - before for before, after in pairwise(sizes[10:])}
    assert len(steps) == 1
    assert texts_before(it, "2") == ["000", "x", "001", "x", "002", "x"]


def test_a_turn_lives_as_long_as_one_that_follows_it() -> None:
    it = store()
    add(it, "1", given="first")
    add(it, "2", after="1", given="second")
    add(it, "3", after="1", given="third")
    it.delete("a", "1")
    assert texts_before(it, "2") == ["first", "x", "second", "x"]
    assert texts_before(it, "3") == ["first", "x", "third", "x"]


def test_what_is_gone_on_from_meanwhile_does_not_lose_its_beginning() -> None:
    it = store()
    add(it, "1", given="first")
    under_way = PendingResponse(it, "a")
    under_way.begin("1", "second", None)
    it.delete("a", "1")
    under_way.keep(document("2"))
    assert texts_before(it, "2") == ["first", "x", "second", "x"]
    it.delete("a", "2")
    assert it.num_bytes == 0


@pytest.mark.parametrize("fields", [{"store": False}, {"status": "failed"}, {"status": "in_progress"}])
def test_what_has_failed_or_shall_not_be_is_not_kept(fields: dict[str, Any]) -> None:
    it = store()
    conversation = PendingResponse(it, "a")
    conversation.begin(None, "x", None)
    conversation.keep(document("1", **fields))
    assert not is_kept(it, "1")


@pytest.mark.parametrize("given", [None, 7, {}, [7], ["x"], ""])
def test_an_input_that_is_none_is_left_to_who_reads_it(given: object) -> None:
    assert PendingResponse(store(), "a").begin(None, given, None) == (b"[]", given, 2)


def named(*ids: str) -> list[dict[str, str]]:
    return [{"type": "item_reference", "id": id} for id in ids]


def test_items_that_are_named_are_those_of_kept_responses() -> None:
    it = store()
    add(it, "1")
    add(it, "2", after="1")
    user = {"role": "user", "content": "next"}
    conversation = PendingResponse(it, "a")
    begun = conversation.begin(None, [*named("msg_2", "msg_1"), user, *named("msg_2")], None)
    one, two = ({"type": "message", "id": f"msg_{id}", "text": "x"} for id in "12")
    assert (begun.before, begun.given) == (b"[]", [two, one, user, two])
    assert begun.size == 2 + sum(len(msgspec.json.encode(item)) for item in (two, one, two))
    conversation.keep(document("3"))
    it.delete("a", "1")
    it.delete("a", "2")
    assert texts_before(it, "3") == ["x", "x", "next", "x", "x"], "what goes on from them has them, too"


@pytest.mark.parametrize(("owner", "id"), [("a", "msg_1"), ("b", "msg_2"), ("a", "3"), ("a", "resp_2")])
def test_an_item_that_is_gone_or_of_another_owner_is_not_there(owner: str, id: str) -> None:
    it = store()
    add(it, "1")
    add(it, "2", after="1")
    it.delete("a", "1")
    with pytest.raises(Refusal) as refused:
        PendingResponse(it, owner).begin(None, named(id), None)
    assert (refused.value.failure.code, refused.value.failure.param) == (Problem.RESPONSE_NOT_FOUND, "input")


def test_naming_an_item_again_and_again_makes_no_more_than_a_body_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    it = store()
    add(it, "1")
    monkeypatch.setattr(response_store, "MAX_BODY_BYTES", 3000)
    PendingResponse(it, "a").begin(None, named(*["msg_1"] * 10), None)
    monkeypatch.setattr(response_store, "encode", None)  # it is refused before it is made
    with pytest.raises(Refusal) as refused:
        PendingResponse(it, "a").begin(None, named(*["msg_1"] * 100), None)
    assert refused.value.failure.code is Problem.BODY_TOO_LARGE


EVENTS = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"1"}}\n\n'
    b'event: response.output_text.delta\ndata: {"delta":"event: response.completed"}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"2"}}\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_the_last_event_of_a_stream_is_found_in_whatever_pieces_it_comes(size: int) -> None:
    seeker = LastEvent()
    found = [data for at in range(0, len(EVENTS), size) if (data := seeker.feed(EVENTS[at : at + size]))]
    assert [msgspec.json.decode(data)["response"]["id"] for data in found] == ["2"]
    assert not LastEvent().feed(EVENTS.replace(b"completed", b"failed"))
    assert LastEvent().feed(EVENTS.replace(b"completed", b"incomplete"))


@pytest.mark.parametrize("keep", [keep_document, keep_event])
@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"response": 1', b'{"response": {}}', b"\xff"], ids=len)
def test_an_answer_that_cannot_be_read_is_not_kept_as_the_log_says(
    keep: Callable[[PendingResponse, bytes], None], answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    keep(PendingResponse(store(), "a"), answer)
    (line,) = caplog.messages
    assert line.startswith("a response is not kept: ")
