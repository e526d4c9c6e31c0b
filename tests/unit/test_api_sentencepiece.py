"""Tokenizers that drop the space before the first token: the answer keeps the one between it and its prompt."""

from functools import cache

import pytest
from api_fakes import Script, World, sse, tokenizer_of, world
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tandem.server.api.tokenizer import Tokenizer

WORDS = ("the", "cat", "sat", "on", "a", "mat", "</s>")
PROMPT, ANSWER = "the cat", " sat on a mat é."
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
    "/v1/completions": {"prompt": PROMPT},
    "/generate": {"text": PROMPT},
}


@cache
def made(kind: str) -> Tokenizer:
    """Words with their space, and bytes for the rest. Two ways in which published models drop the first space."""
    vocabulary = {name: id for id, name in enumerate(["<s>", "</s>", "<unk>"])}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in ("▁", *"thecasonm.:us", *(f"▁{word}" for word in WORDS)):
        vocabulary.setdefault(piece, len(vocabulary))
    scored = [(piece, -1.0 if len(piece) > 1 else -10.0) for piece in vocabulary]
    if kind == "metaspace":
        raw = RawTokenizer(models.Unigram(scored, unk_id=2, byte_fallback=True))
        raw.pre_tokenizer = pre_tokenizers.Metaspace()
        raw.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    else:
        raw = RawTokenizer(models.Unigram(scored, unk_id=2, byte_fallback=True))
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        raw.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    raw.add_special_tokens(["<s>", "</s>"])
    template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
    return tokenizer_of(raw, {"eos_token": "</s>", "chat_template": template, "add_bos_token": False})


@pytest.fixture(params=["metaspace", "stripped"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return made(request.param)


def answering(tokenizer: Tokenizer) -> World:
    """Says what comes after the prompt, token by token."""
    both = tokenizer.encode(PROMPT + ANSWER)
    tokens = both[len(tokenizer.encode(PROMPT)) :]
    assert tokenizer.encode(PROMPT) + tokens == both
    script = Script([*tokens, tokenizer.encode("</s>", add_special_tokens=False)[-1]])
    return world(lambda request, payload: script, tokenizer=tokenizer)


def text_of(choice: dict) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_the_tokenizer_of_this_test_drops_the_first_space(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("the cat")
    assert tokenizer.decode(tokens) == "the cat"
    assert tokenizer.decode(tokens[1:]) == "cat"


@pytest.mark.parametrize("path", BODIES)
def test_whole_and_streamed_answers_keep_the_space_after_the_prompt(path: str, tokenizer: Tokenizer) -> None:
    w = answering(tokenizer)
    with w.http() as http:
        whole = http.post(path, json=BODIES[path]).json()
        events = sse(http.post(path, json=BODIES[path] | {"stream": True}).text)
    if path == "/generate":
        assert whole["text"] == events[-1]["text"] == ANSWER
    else:
        assert text_of(whole["choices"][0]) == ANSWER
        choices = [choice for event in events for choice in event["choices"]]
        assert "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices) == ANSWER


@pytest.mark.parametrize("prompt", [PROMPT, list(range(3))], ids=["text", "ids"])
def test_an_echoed_prompt_and_its_answer_are_one_text(prompt: object, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT) if isinstance(prompt, list) else prompt
    with answering(tokenizer).http() as http:
        whole = http.post("/v1/completions", json={"prompt": prompt, "echo": True}).json()
        events = sse(http.post("/v1/completions", json={"prompt": prompt, "echo": True, "stream": True}).text)
    assert whole["choices"][0]["text"] == PROMPT + ANSWER
    assert "".join(event["choices"][0]["text"] for event in events) == PROMPT + ANSWER


def test_the_tokens_of_logprobs_make_the_text(tokenizer: Tokenizer) -> None:
    with answering(tokenizer).http() as http:
        chat = http.post(
            "/v1/chat/completions", json=BODIES["/v1/chat/completions"] | {"logprobs": True, "top_logprobs": 2}
        ).json()
        completion = http.post("/v1/completions", json=BODIES["/v1/completions"] | {"logprobs": 2}).json()
        native = http.post(
            "/generate",
            json={"text": PROMPT, "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True},
        ).json()
    entries = chat["choices"][0]["logprobs"]["content"][:-1]  # the last one is the stop token
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == ANSWER
    names = [entry["token"] for entry in entries]
    assert "".join(names).replace("��", "é") == ANSWER
    assert [entry["top_logprobs"][0]["token"] for entry in entries] == names
    shown = completion["choices"][0]["logprobs"]
    assert shown["tokens"][:-1] == names
    assert all(name in tops for name, tops in zip(shown["tokens"], shown["top_logprobs"], strict=True))
    assert shown["text_offset"][:3] == [0, len(names[0]), len(names[0] + names[1])]
    scores = native["meta_info"]["output_token_logprobs"][:-1]
    assert [text for _, _, text in scores] == names
    assert [tops[0][2] for tops in native["meta_info"]["output_top_logprobs"][:-1]] == names


def test_detokenize_gives_back_prompt_and_answer_as_one_text(tokenizer: Tokenizer) -> None:
    with answering(tokenizer).http() as http:
        tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
        answer = http.post("/generate", json={"input_ids": tokens}).json()
        both = http.post("/detokenize", json={"tokens": tokens + answer["output_ids"]}).json()["text"]
        alone = http.post("/detokenize", json={"tokens": tokens}).json()["text"]
    assert alone == PROMPT
    assert both == PROMPT + answer["text"] == PROMPT + ANSWER


def test_a_stop_string_may_begin_with_the_space_after_the_prompt(tokenizer: Tokenizer) -> None:
    with answering(tokenizer).http() as http:
        choice = http.post("/v1/completions", json={"prompt": PROMPT, "stop": [" sat"]}).json()["choices"][0]
    assert (choice["text"], choice["matched_stop"]) == ("", " sat")
