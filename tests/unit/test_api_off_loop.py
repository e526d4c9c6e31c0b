"""What takes long leaves the event loop, and what is short but many gives others their turn."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from api_fakes import END, Script, World, ids, says, tokenizer, world

from tandem.server.api import generation_request
from tandem.server.api.bounds import LOOP_CHARS, LOOP_IDS, LOOP_SCORES, MAX_SAMPLES, MAX_TEXT_CHARS
from tandem.server.api.generate import GenerateReply
from tandem.server.api.tokenizer import Tokenizer


def is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.fixture
def on_loop(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(what, how large) of everything that was done on the event loop itself."""
    done: list[tuple[str, int]] = []

    def watch(owner: Any, name: str, size: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            if is_on_loop():
                done.append((name, size(*arguments)))
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(Tokenizer, "encode", lambda self, text: len(text))
    watch(Tokenizer, "decode", lambda self, row: len(row))
    watch(generation_request, "submission", lambda ask, *_: len(ask.prompt.tokens))
    watch(GenerateReply, "whole", lambda self, samples: sum(len(sample.tokens) for sample in samples))
    return done


def posted(it: World, path: str, body: dict[str, Any]) -> httpx.Response:
    async def story() -> httpx.Response:
        transport = httpx.ASGITransport(app=it.app, client=("127.0.0.1", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=60) as http:
            return await http.post(path, json=body)

    return asyncio.run(story())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"text": ["x" * 9000] * 20}),
        ("/generate", {"text": ["x" * 9000] * 20}),
        ("/v1/completions", {"prompt": ["x" * 9000] * 20}),
        ("/generate", {"input_ids": [[5] * 9000] * 20}),
        ("/detokenize", {"tokens": [[5] * 9000] * 20}),
    ],
)
def test_long_texts_and_lists_leave_the_loop(path: str, body: dict[str, Any], on_loop: list[tuple[str, int]]) -> None:
    it = world(says("ok"), context_length=1 << 16)
    assert posted(it, path, body).status_code == 200
    assert [size for what, size in on_loop if what == "encode" and size > LOOP_CHARS] == []
    assert sum(size for what, size in on_loop if what in ("submission", "decode")) <= LOOP_IDS


def test_an_answer_with_many_scores_is_written_off_the_loop(on_loop: list[tuple[str, int]]) -> None:
    tokens = [*ids("x" * 30), END]
    it = world(lambda request, payload: Script(tokens, is_burst=True))
    sampling = {"n": 16, "max_new_tokens": 40}
    body = {"text": "x", "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 5}
    answers = posted(it, "/generate", body).json()
    assert [len(answer["meta_info"]["output_top_logprobs"]) for answer in answers] == [len(tokens)] * 16
    assert 16 * len(tokens) * 6 > LOOP_SCORES
    assert [size for what, size in on_loop if what == "whole"] == []


def test_a_small_answer_is_written_where_it_is(on_loop: list[tuple[str, int]]) -> None:
    posted(world(says("ok")), "/generate", {"text": "x"})
    assert {what for what, _ in on_loop} == {"encode", "submission", "whole"}


def test_many_short_texts_let_others_have_their_turn() -> None:
    """Each is too short for a thread; a thousand of them are not."""
    turns = 0

    async def story() -> None:
        nonlocal turns
        texts = ["x" * (LOOP_CHARS // 2)] * 100
        work = asyncio.create_task(encode_all(texts))
        while not work.done():
            turns += 1
            await asyncio.sleep(0)

    async def encode_all(texts: list[str]) -> None:
        for text in texts:
            await tokenizer().encode_anywhere(text)

    asyncio.run(story())
    assert turns >= 40


def test_all_texts_of_one_request_have_a_bound_together() -> None:
    response = posted(world(), "/tokenize", {"text": ["x" * 1024] * (MAX_TEXT_CHARS // 1024 + 1)})
    assert response.status_code == 400


def test_the_samples_of_one_request_have_a_bound() -> None:
    body = {"prompt": ["x"] * 16, "n": 128}
    error = posted(world(), "/v1/completions", body).json()["error"]
    assert (error["param"], str(MAX_SAMPLES) in error["message"]) == ("n", True)
