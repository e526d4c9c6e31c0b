"""A chat template that shows the second, on a prefill and a decode in two time zones: the answer is one engine's.

Through our router both halves render at the time that it stamps. A gateway that stamps none sends its two halves more
than a second apart: then decode's second counts, and prefill renders its prompt again.
"""

import datetime
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # JSON documents

import pytest
from cluster import START_S, Server, eventually, show_logs

import tandem
from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports

BUNDLED = Path(tandem.__file__).parent / "bundled" / "mini"
CLOCK = "<|im_start|>system\nIt is {{ strftime_now('%Y-%m-%d %H:%M:%S') }}.<|im_end|>\n"
SHOWN = re.compile(r"It is (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.")
KOLKATA, NEWFOUNDLAND, TONGA = "Asia/Kolkata", "America/St_Johns", "Pacific/Tongatapu"
CHAT = {
    "messages": [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does he have?"}],
    "max_tokens": 24,
    "temperature": 0,
    "stream": True,
    "return_token_ids": True,
}
RETRIES = re.compile(r"^sglang:num_prefill_retries_total\{(.*)\} (\S+)$", re.MULTILINE)


@dataclass
class Servers:
    prefill: Server
    decode: Server
    unified: Server
    router: Server
    bootstrap_port: int

    @property
    def pair(self) -> list[Server]:
        return [self.prefill, self.decode]


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Every server in a zone of its own, half an hour beside the others."""
    folder = tmp_path_factory.mktemp("clock")
    model = folder / "model"
    shutil.copytree(BUNDLED, model)
    template = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    (model / "chat_template.jinja").write_text(CLOCK + template)
    left, bootstrap, right, alone, front = free_ports(5)
    fleet = Fleet(folder, engines=3)

    def start(name: str, zone: str, port: int, *words: str) -> Server:
        command = ("env", f"TZ={zone}", sys.executable, "-m", "tandem.cli.main", *words)
        return Server(fleet.start_program(name, command, port=port))

    def serve(name: str, zone: str, port: int, *flags: str) -> Server:
        return start(name, zone, port, *serve_words(str(model), port, "--deterministic", *flags))

    with fleet:
        mode = "--disaggregation-mode"
        prefill = serve("prefill", KOLKATA, left, mode, "prefill", "--disaggregation-bootstrap-port", str(bootstrap))
        decode = serve("decode", NEWFOUNDLAND, right, mode, "decode")
        unified = serve("unified", TONGA, alone)
        pair = ("--prefill", prefill.url, str(bootstrap), "--decode", decode.url)
        router = start("router", TONGA, front, "router", "--port", str(front), *pair)
        found = Servers(prefill, decode, unified, router, bootstrap)
        try:
            fleet.wait_ready(timeout_s=START_S)
            yield found
        except BaseException:
            show_logs(fleet)
            raise


@pytest.fixture(autouse=True)
def _leaves_nothing(it: Servers) -> Iterator[None]:
    yield
    for server in it.pair:
        eventually(server.is_idle, what=server.state)


@dataclass
class Answer:
    path: str | None
    prompt: list[int]
    tokens: list[int]


def ask(server: Server, **fields: Any) -> Answer:
    with server.open("POST", "/v1/chat/completions", CHAT | fields) as reply:
        body = reply.read().decode()
        assert reply.status == 200, body
        path = reply.headers["x-tandem-path"]
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    prompt, choices = events[0]["prompt_token_ids"], [event["choices"][0] for event in events]
    return Answer(path, prompt, [token for choice in choices for token in choice.get("token_ids", [])])


def shown_time(server: Server, prompt: list[int]) -> int:
    """The second that a prompt shows, read as UTC."""
    text = server.call("POST", "/detokenize", {"tokens": prompt, "skip_special_tokens": False})["text"]
    (found,) = SHOWN.findall(text)
    return int(datetime.datetime.fromisoformat(found).replace(tzinfo=datetime.UTC).timestamp())


def retries(server: Server) -> dict[str, float]:
    with server.open("GET", "/metrics") as reply:
        rows = RETRIES.findall(reply.read().decode())
    return {re.findall(r'reason="(\w+)"', labels)[0]: float(count) for labels, count in rows}


def room_of(it: Servers, number: int) -> dict[str, Any]:
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": it.bootstrap_port, "bootstrap_room": number}


def wait_for_the_next_second(early: Server) -> int:
    """Wait until a request has been rendered there, and then until no clock shows that second. Returns it."""
    eventually(lambda: not early.is_idle(), what=early.state)
    shown = int(time.time())
    eventually(lambda: time.time() >= shown + 1)
    return shown


def test_two_zones_behind_our_router_render_one_prompt(it: Servers) -> None:
    before, began = retries(it.prefill), int(time.time())
    ours = ask(it.router)
    stamp = shown_time(it.decode, ours.prompt)
    assert began <= stamp <= time.time()
    theirs = ask(it.unified, rendered_at=stamp)
    assert (ours.path, ours.prompt, ours.tokens) == ("remote", theirs.prompt, theirs.tokens)
    assert retries(it.prefill) == before


def test_a_time_given_by_the_client_is_that_of_both_halves(it: Servers) -> None:
    before, midnight = retries(it.prefill), 1_767_225_600  # 1 January 2026, 00:00:00 UTC
    ours, theirs = ask(it.router, rendered_at=midnight), ask(it.unified, rendered_at=midnight)
    assert (ours.path, ours.prompt, ours.tokens) == ("remote", theirs.prompt, theirs.tokens)
    assert shown_time(it.decode, ours.prompt) == midnight
    assert retries(it.prefill) == before


def test_a_prompt_that_prefill_has_rendered_a_second_earlier_is_rendered_again(it: Servers) -> None:
    before, room = retries(it.prefill), room_of(it, 71)
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(ask, it.prefill, **room)
        second = wait_for_the_next_second(it.prefill)
        eventually(lambda: it.prefill.state()["queues"]["parked"], what=it.prefill.state)
        answer = ask(it.decode, **room)
    shown = shown_time(it.decode, answer.prompt)
    assert shown > second
    theirs = ask(it.unified, rendered_at=shown)
    assert (answer.path, answer.prompt, answer.tokens) == ("remote", theirs.prompt, theirs.tokens)
    assert prefill.result().tokens == theirs.tokens[:1]
    assert retries(it.prefill) == before | {"rendered": before["rendered"] + 1}


def test_a_prompt_that_decode_has_rendered_a_second_earlier_is_rendered_again(it: Servers) -> None:
    room = room_of(it, 72)
    with ThreadPoolExecutor(1) as pool:
        decode = pool.submit(ask, it.decode, **room)
        second = wait_for_the_next_second(it.decode)
        prefill = ask(it.prefill, **room)
    answer = decode.result()
    shown = shown_time(it.decode, answer.prompt)
    assert shown <= second
    theirs = ask(it.unified, rendered_at=shown)
    assert (answer.path, answer.prompt, answer.tokens) == ("remote", theirs.prompt, theirs.tokens)
    assert prefill.tokens == theirs.tokens[:1]


def test_every_sample_of_a_chat_is_rendered_at_decodes_second(it: Servers) -> None:
    body = CHAT | {"n": 2, "stream": False, "temperature": 1, "seed": 5}
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(it.prefill.call, "POST", "/v1/chat/completions", body | room_of(it, 73))
        first = wait_for_the_next_second(it.prefill) + 1
        answer = it.decode.call("POST", "/v1/chat/completions", body | room_of(it, 73))
    last = int(time.time())
    alone = [
        it.unified.call("POST", "/v1/chat/completions", body | {"rendered_at": second})
        for second in range(first, last + 1)
    ]
    assert texts_of(answer) in map(texts_of, alone)
    assert prefill.result()["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def texts_of(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]
