"""`/v1/responses` through the OpenAI SDK: the unified server and the router in front of a pair say and keep the same.

The pair keeps nothing: what a conversation is, the router knows.
"""

import json
from typing import Any  # the SDK's parameters

import openai
import pytest
from cluster import MODEL, Cluster, Server
from openai.types.responses import Response
from router_fakes import Answer, Die, fleet

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
ADD = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": True,
}


def sdk(server: Server | str, key: str = "none") -> openai.OpenAI:
    url = server if isinstance(server, str) else server.url
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture
def router(common: Cluster) -> openai.OpenAI:
    assert common.router is not None
    return sdk(common.router)


@pytest.fixture
def unified(common: Cluster) -> openai.OpenAI:
    assert common.unified is not None
    return sdk(common.unified)


@pytest.fixture(params=["router", "unified"])
def client(request: pytest.FixtureRequest) -> openai.OpenAI:
    found: openai.OpenAI = request.getfixturevalue(request.param)
    return found


def asked(client: openai.OpenAI, **fields: Any) -> Response:
    return client.responses.create(
        **{"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 24} | fields
    )


def streamed(client: openai.OpenAI, **fields: Any) -> Response:
    fields = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 24} | fields
    with client.responses.stream(**fields) as stream:
        *_, last = stream
    assert last.type in ("response.completed", "response.incomplete")
    return last.response


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "extra_body": {"seed": 3}}, {"instructions": "Be brief."}])
def test_pair_and_engine_say_the_same_whole_and_streamed(
    router: openai.OpenAI, unified: openai.OpenAI, fields: dict[str, Any]
) -> None:
    answers = [ask(front, **fields) for front in (router, unified) for ask in (asked, streamed)]
    assert answers[0].output_text
    assert len({answer.output_text for answer in answers}) == 1
    assert len({answer.status for answer in answers}) == 1
    assert len({answer.id for answer in answers}) == 4


def test_a_forced_call_is_the_same_on_pair_and_engine(router: openai.OpenAI, unified: openai.OpenAI) -> None:
    fields = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    calls = []
    for answer in (asked(router, **fields), streamed(router, **fields), asked(unified, **fields)):
        (call,) = answer.output
        assert call.type == "function_call"
        assert set(json.loads(call.arguments)) == {"a"}
        calls.append((call.name, call.arguments))
    assert len(set(calls)) == 1


def test_a_schema_is_followed(client: openai.OpenAI) -> None:
    format = {"type": "json_schema", "name": "a", "schema": ADD["parameters"], "strict": True}
    answer = asked(client, text={"format": format}, max_output_tokens=100)
    assert set(json.loads(answer.output_text)) == {"a"}


@pytest.mark.parametrize("ask", [asked, streamed])
def test_a_conversation_goes_on_where_it_was(client: openai.OpenAI, ask: Any) -> None:
    first = ask(client)
    assert first.store is True
    second = ask(client, input="And 2 more?", previous_response_id=first.id)
    sent = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "And 2 more?"}]
    alone = ask(client, input=sent, store=False)
    assert (second.output_text, second.previous_response_id) == (alone.output_text, first.id)
    assert second.usage is not None
    assert alone.usage is not None
    assert second.usage.input_tokens == alone.usage.input_tokens
    assert second.usage.input_tokens > (first.usage.input_tokens if first.usage is not None else 0)
    more = {"input": "And 2 more?", "previous_response_id": first.id}
    assert client.responses.input_tokens.count(model=MODEL, **more).input_tokens == second.usage.input_tokens
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    again = ask(client, input=[sent[0], *named, sent[-1]])
    assert (again.output_text, again.usage.input_tokens) == (alone.output_text, alone.usage.input_tokens)
    said = client.responses.input_items.list(second.id, order="asc").data
    assert [item.content[0].text for item in said] == [QUESTION, first.output_text, "And 2 more?"]
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.retrieve(second.id)
    assert gone.value.code == "response_not_found"


def test_what_is_not_stored_or_is_of_another_key_is_not_there(client: openai.OpenAI) -> None:
    made = asked(client, store=False)
    kept = asked(client)
    for wrong, asker in ((made.id, client), (kept.id, client.with_options(api_key="another"))):
        with pytest.raises(openai.NotFoundError):
            asker.responses.retrieve(wrong)
        with pytest.raises(openai.BadRequestError) as refused:
            asked(asker, previous_response_id=wrong)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


def test_the_halves_of_a_pair_keep_nothing(common: Cluster, router: openai.OpenAI) -> None:
    made = asked(router)
    for half in (*common.prefills, *common.decodes):
        with pytest.raises(openai.NotFoundError):
            sdk(half).responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        asked(sdk(common.decodes[0]), previous_response_id=made.id)
    assert refused.value.param == "previous_response_id"


def test_what_cannot_be_is_a_400_through_the_router(router: openai.OpenAI) -> None:
    wrongs: dict[str, Any] = {"background": True, "tools": [{"type": "web_search"}], "input": 7, "conversation": "c"}
    for name, wrong in wrongs.items():
        with pytest.raises(openai.BadRequestError) as refused:
            asked(router, **{name: wrong})
        assert refused.value.param == name
    with pytest.raises(openai.BadRequestError) as refused:
        asked(router, extra_body={"kept_items": []})
    assert refused.value.param == "kept_items"


# --- the router alone, in front of fake workers


def response_of(id: str, text: str) -> dict[str, Any]:
    output = [
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    ]
    return {"id": id, "object": "response", "status": "completed", "store": True, "output": output}


def stream_of(document: dict[str, Any]) -> tuple[bytes, ...]:
    raw = b'event: response.created\ndata: {"type":"response.created"}\n\n' + b"event: response.completed\ndata: "
    raw += json.dumps({"type": "response.completed", "response": document}).encode() + b"\n\n"
    return tuple(raw[at : at + 50] for at in range(0, len(raw), 50))


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def is_streamed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def create(url: str, **fields: Any) -> None:
    made = sdk(url).responses.create(**{"model": "toy", "input": "one"} | fields)
    for _ in made if fields.get("stream") else ():
        pass


def test_any_pair_gets_all_that_was_said_so_far(is_streamed: bool) -> None:
    with fleet(prefills=2, decodes=2) as made:
        for worker in made.decodes:
            worker.behaves(Answer(response_of("r1", "1"), stream_of(response_of("r1", "1"))))
        create(made.url, stream=is_streamed)
        create(made.url, stream=is_streamed, input=[{"role": "user", "content": "two"}], previous_response_id="r1")
        bodies = sorted((seen.body for seen in made.seen()), key=lambda body: len(body["kept_items"]))
        assert len(bodies) == 4
        assert [body["kept_items"] for body in bodies[:2]] == [[], []]
        assert len({body["bootstrap_room"] for body in bodies}) == 2
        for body in bodies[2:]:
            texts = [item["content"][0]["text"] for item in body["kept_items"]]
            assert (texts, body["previous_response_id"]) == (["one", "1"], "r1")
            assert body["input"] == [{"role": "user", "content": "two"}]


def test_items_that_are_named_are_sent_to_both_halves(is_streamed: bool) -> None:
    with fleet() as made:
        response = response_of("r1", "1")
        made.decodes[0].behaves(Answer(response, stream_of(response)))
        create(made.url, stream=is_streamed)
        create(made.url, stream=is_streamed, input=[{"type": "item_reference", "id": "msg_1"}])
        inputs = [seen.body["input"] for seen in made.seen()]
        assert [inputs.count("one"), inputs.count(response["output"])] == [2, 2]
        with pytest.raises(openai.NotFoundError) as gone:
            create(made.url, stream=is_streamed, input=[{"type": "item_reference", "id": "msg_2"}])
        assert (gone.value.code, gone.value.param) == ("response_not_found", "input")


def test_a_stream_that_breaks_is_not_kept() -> None:
    with fleet() as made:
        made.decodes[0].behaves(Die((b'event: response.created\ndata: {"type":"response.created"}\n\n',)))
        with pytest.raises(openai.APIError):
            create(made.url, stream=True)
        with pytest.raises(openai.NotFoundError):
            sdk(made.url).responses.retrieve("r1")


def test_an_answer_that_is_none_is_passed_on_and_not_kept(is_streamed: bool) -> None:
    with fleet() as made:
        made.decodes[0].behaves(Answer({"id": "r1"}, (b"event: response.completed\ndata: {}\n\n",)))
        create(made.url, stream=is_streamed)
        with pytest.raises(openai.NotFoundError):
            sdk(made.url).responses.retrieve("r1")
