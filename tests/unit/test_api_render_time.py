"""What a chat template renders depends on the request alone; prefill renders anew where decode showed another time."""

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import httpx
import jinja2
import msgspec
import pytest
from api_fakes import Script, World, ids, load_tokenizer, prompt_of, world

from tandem.core import commands, events
from tandem.core.commands import FinishReason
from tandem.core.values import MAX_RENDERED_AT, SECOND, Cause
from tandem.server import wire
from tandem.server.api.errors import Refusal
from tandem.server.api.render_time import RenderTime
from tandem.server.api.tokenizer import Tokenizer, environment

CLOCK = "{{ strftime_now('%H:%M:%S') }} {{ messages[0]['content'] }}"
NOON = 1_700_049_600  # 15 November 2023, 12:00:00 UTC
ROOM = {"bootstrap_room": 7}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def rendered(template: str, at: int = NOON, **variables: object) -> str:
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = load_tokenizer(template)
    return tokenizer.render_chat(messages, add_generation_prompt=True, variables=variables, rendered_at=at).text


# --- the time of a request -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "shown"),
    [
        ("%d %b %Y", "15 Nov 2023"),
        ("%Y-%m-%d %H:%M:%S", "2023-11-15 12:00:00"),
        ("%A, %B %-d", "Wednesday, November 15"),
        ("%s %%s", f"{NOON} %s"),
        ("%12s|%-s|%05s", f"{NOON}|{NOON}|{NOON}"),
        ("%Z %z", "UTC +0000"),
        ("%c", "Wed Nov 15 12:00:00 2023"),
        ("100%", "100%"),
    ],
)
def test_the_time_is_shown_in_utc(format: str, shown: str) -> None:
    assert RenderTime(NOON)(format) == shown


ELSEWHERE = """
from tandem.server.api.render_time import RenderTime
print(RenderTime(1700049600)("%c %x %X %p %A %a %B %b %j %U %V %Z %z %s %10s"))
"""


def test_zone_locale_and_environment_of_a_server_do_not_show() -> None:
    """Half an hour beside the full one, a day ahead, and languages, where the machine has them."""
    texts = {
        subprocess.run(
            [sys.executable, "-c", ELSEWHERE],
            env={**os.environ, "TZ": zone, "LC_ALL": language, "LANG": language, "LC_TIME": language},
            capture_output=True,
            check=True,
        ).stdout
        for zone, language in (("UTC", "C"), ("Asia/Kolkata", "de_DE.UTF-8"), ("Pacific/Kiritimati", "tr_TR.UTF-8"))
    }
    assert len(texts) == 1


def test_a_template_that_asks_for_no_time_has_none() -> None:
    tokenizer = load_tokenizer("{% if strftime_now is defined %}x{% endif %}")
    assert tokenizer.render_chat([], add_generation_prompt=True, variables={}, rendered_at=NOON) == ("x", 0)


def test_a_template_that_asks_for_the_time_says_so() -> None:
    tokenizer = load_tokenizer("{% set date = strftime_now('%Y') %}x")
    assert tokenizer.render_chat([], add_generation_prompt=True, variables={}, rendered_at=NOON) == ("x", NOON)


def test_times_far_away_are_shown() -> None:
    assert RenderTime(1)("%Y") == "1970"
    assert RenderTime(MAX_RENDERED_AT)("%F %T") == "9999-12-31 23:59:59"


def test_nothing_else_that_a_template_is_offered_gives_another_text_each_time() -> None:
    """All of jinja2's globals and filters are functions of their arguments; the two that draw are not offered."""
    known = {"range", "dict", "cycler", "joiner", "namespace", "raise_exception"}
    assert set(environment().globals) == known
    assert "random" not in environment().filters
    for template in ("{{ [1, 2, 3] | random }}", "{{ lipsum(1) }}"):
        with pytest.raises((Refusal, jinja2.TemplateError), match=r"random|lipsum"):
            rendered(template)


# --- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clock() -> Tokenizer:
    return load_tokenizer(CLOCK)


def only_submit(made: World) -> wire.Submit:
    (submit,) = made.node.submits
    return submit


def test_a_stamped_time_is_rendered(clock: Tokenizer) -> None:
    made = world(tokenizer=clock)
    with made.http() as http:
        assert http.post("/v1/chat/completions", json=CHAT | {"rendered_at": NOON}).status_code == 200
    submit = only_submit(made)
    assert prompt_of(submit) == ids("12:00:00 hi")
    assert submit.request.rendered_at == NOON


@pytest.mark.parametrize("stamp", [{}, {"rendered_at": None}])
def test_without_a_stamp_it_is_the_time_of_the_arrival(clock: Tokenizer, stamp: dict[str, Any]) -> None:
    made = world(tokenizer=clock)
    before = int(time.time())
    with made.http() as http:
        assert http.post("/v1/chat/completions", json=CHAT | stamp).status_code == 200
    assert before <= only_submit(made).request.rendered_at <= int(time.time())


def test_a_prompt_that_shows_no_time_carries_none() -> None:
    made = world()
    with made.http() as http:
        http.post("/v1/chat/completions", json=CHAT | {"rendered_at": NOON})
        http.post("/v1/completions", json={"model": "toy", "prompt": "hi", "rendered_at": NOON})
        http.post("/generate", json={"text": "hi", "rendered_at": NOON})
    assert [submit.request.rendered_at for submit in made.node.submits] == [0, 0, 0]


def test_a_continued_message_shows_the_time_too(clock: Tokenizer) -> None:
    made = world(tokenizer=clock)
    messages = [*CHAT["messages"], {"role": "assistant", "content": "and"}]
    with made.http() as http:
        body = CHAT | {"messages": messages, "rendered_at": NOON, "continue_final_message": True}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert prompt_of(only_submit(made)) == ids("12:00:00 hiand")
    assert only_submit(made).request.rendered_at == NOON


@pytest.mark.parametrize("bad", [0, -5, MAX_RENDERED_AT + 1, 10**30, 1.5, "now", True, [NOON]])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_what_is_no_time_is_refused_by_name(path: str, bad: object) -> None:
    made = world()
    bodies = {"/v1/chat/completions": CHAT, "/v1/completions": {"model": "toy", "prompt": "hi"}}
    with made.http() as http:
        body = bodies.get(path, {"text": "hi"}) | {"rendered_at": bad}
        answer = http.post(path, content=json.dumps(body))  # an encoder that knows no bounds
    assert answer.status_code == 400
    assert "rendered_at" in answer.json()["error"]["message"]
    assert made.node.submits == []


def test_tokenize_shows_the_time_that_it_is_given(clock: Tokenizer) -> None:
    made = world(tokenizer=clock)
    with made.http() as http:
        answer = http.post("/tokenize", json={"messages": CHAT["messages"], "rendered_at": NOON})
        assert answer.json()["tokens"] == ids("12:00:00 hi")
        assert http.post("/tokenize", json={"messages": CHAT["messages"], "rendered_at": 0}).status_code == 400


# --- prefill renders again -------------------------------------------------------------------------------------------


ONE = NOON + 3600


def prefill(clock: Tokenizer, **settings: Any) -> World:
    script = settings.pop("script", Script(ids("x"), FinishReason.LENGTH, wants_time=ONE))
    return world(lambda request, payload: script, tokenizer=clock, disaggregation_mode="prefill", **settings)


def test_prefill_renders_again_for_the_same_request(clock: Tokenizer) -> None:
    made = prefill(clock)
    with made.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT | ROOM | {"rendered_at": NOON})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == len(ids("13:00:00 hi"))
    (rendered,) = made.node.rendered
    first = only_submit(made)
    assert prompt_of(rendered) == ids("13:00:00 hi")
    assert rendered.request.rendered_at == ONE
    assert (rendered.request.id, rendered.request.room) == (first.request.id, first.request.room)
    assert rendered.payload.request == first.request.id
    assert rendered.request.timeout_ns <= first.request.timeout_ns
    assert rendered.request.prompt_digest != first.request.prompt_digest


def test_it_is_one_request_in_log_and_counters(clock: Tokenizer) -> None:
    made = prefill(clock)
    with made.http() as http:
        http.post("/v1/chat/completions", json=CHAT | ROOM | {"rendered_at": NOON, "stream": True})
        (line,) = [msgspec.json.decode(line) for line in made.log.getvalue().splitlines()]
        numbers = http.get("/metrics").text
    assert (line["outcome"], line["prompt_tokens"]) == ("length", len(ids("13:00:00 hi")))
    (count,) = [row for row in numbers.splitlines() if row.startswith("sglang:num_requests_total")]
    assert count.endswith(" 1.0")
    assert made.client.num_live == 0


def test_every_sample_is_rendered_again_under_its_own_room(clock: Tokenizer) -> None:
    made = prefill(clock)
    with made.http() as http:
        assert http.post("/v1/chat/completions", json=CHAT | ROOM | {"rendered_at": NOON, "n": 3}).status_code == 200
    assert {message.request.room for message in made.node.rendered} == {
        submit.request.room for submit in made.node.submits
    }
    assert [prompt_of(message) for message in made.node.rendered] == [ids("13:00:00 hi")] * 3


def test_what_has_ended_is_not_rendered_again(clock: Tokenizer) -> None:
    async def story() -> None:
        made = prefill(clock, script=Script(is_silent=True))
        transport = httpx.ASGITransport(made.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            body = CHAT | ROOM | {"rendered_at": NOON, "rid": "mine"}
            running = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            while not (made.node.submits or running.done()):
                await asyncio.sleep(0)
            await http.post("/abort_request", json={"rid": "mine"})
            made.client.receive(commands.RenderAgain(only_submit(made).request.id, ONE))
            assert "aborted" in (await running).text
            made.client.receive(commands.RenderAgain(only_submit(made).request.id, ONE))
        assert made.node.rendered == []
        assert made.client.num_live == 0

    asyncio.run(story())


def test_a_template_that_refuses_another_time_ends_the_request_with_a_cause() -> None:
    picky = load_tokenizer("{% if strftime_now('%H') != '12' %}{{ raise_exception('only at noon') }}{% endif %}x")
    made = prefill(picky)
    with made.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT | ROOM | {"rendered_at": NOON})
    assert answer.json()["error"]["code"] == "protocol"
    (abort,) = made.node.sent
    assert abort == events.AbortRequested(only_submit(made).request.id, Cause.PROTOCOL)


def test_a_prompt_that_is_too_long_at_another_time_ends_the_request_with_its_cause() -> None:
    growing = load_tokenizer("{% if strftime_now('%H') != '12' %}{{ 'x' * 20 }}{% endif %}x")
    made = prefill(growing, context_length=20)
    with made.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT | ROOM | {"rendered_at": NOON})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert made.node.rendered == []


def test_no_more_time_is_given_for_it_than_is_left(clock: Tokenizer) -> None:
    made = prefill(clock)
    with made.http() as http:
        http.post("/v1/chat/completions", json=CHAT | ROOM | {"rendered_at": NOON, "timeout": 5})
    (rendered,) = made.node.rendered
    assert 0 < rendered.request.timeout_ns < 5 * SECOND
