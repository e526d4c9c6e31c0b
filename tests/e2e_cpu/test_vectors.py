"""Embeddings, rerank and scores through servers as users run them, against transformers."""

import base64
import re
import subprocess
import sys
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import torch
from cluster import Cluster, HttpError, Server, cluster, eventually
from reference import use_one_thread
from tiny_models import make_bert, make_cross_encoder, make_qwen3
from transformers import PreTrainedModel
from vector_models import CLS, SEP, ids_of, last_vector, mean_vector, pair_score, text_of, write_tokenizer

LENGTHS = (1, 2, 14, 15, 30, 61, 100, 126)
IDENTITY = "torch.nn.modules.linear.Identity"


@dataclass
class Served:
    server: Server
    theirs: PreTrainedModel
    where: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=60)

    @property
    def model(self) -> str:
        return str(self.where)


def serving(where: Path, theirs: PreTrainedModel, *flags: str) -> Iterator[Served]:
    use_one_thread()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_LOG_FORWARD_ITERS", "1")
        with cluster(unified=True, model=str(where), flags=["--max-running-requests", "8", *flags]) as it:
            assert it.unified is not None
            yield Served(it.unified, theirs, where)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    where = tmp_path_factory.mktemp("bert")
    theirs = make_bert(where, pooling="mean_tokens")
    write_tokenizer(where, is_pairwise=True)
    yield from serving(where, theirs)


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    where = tmp_path_factory.mktemp("cross")
    theirs = make_cross_encoder(where, activation=IDENTITY)
    write_tokenizer(where, is_pairwise=True)
    yield from serving(where, theirs, "--tp-size", "2", "--pp-size", "2")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    where = tmp_path_factory.mktemp("qwen")
    theirs = make_qwen3(where).model
    write_tokenizer(where, is_pairwise=False)
    yield from serving(where, theirs, "--is-embedding", "--chunked-prefill-size", "64")


def assert_close(vector: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(vector), expected, rtol=0, atol=1e-3)


def test_an_encoder_answers_the_openai_sdk_with_the_vectors_of_transformers(bert: Served) -> None:
    texts = [text_of(length) for length in LENGTHS]

    whole = bert.client.embeddings.create(model=bert.model, input=texts)  # the SDK asks for base64
    plain = bert.client.embeddings.create(model=bert.model, input=texts[3], encoding_format="float")

    assert [one.index for one in whole.data] == list(range(len(texts)))
    for text, one in zip(texts, whole.data, strict=True):
        assert_close(one.embedding, mean_vector(bert.theirs, [CLS, *ids_of(text), SEP]))
    assert_close(plain.data[0].embedding, torch.tensor(whole.data[3].embedding))
    assert whole.usage.prompt_tokens == whole.usage.total_tokens == sum(LENGTHS) + 2 * len(LENGTHS)


def test_ids_lists_of_ids_base64_and_dimensions(bert: Served) -> None:
    prompts = [[CLS, *ids_of(text_of(length)), SEP] for length in (3, 40)]
    one = bert.client.embeddings.create(model=bert.model, input=prompts[1], encoding_format="float")
    both = bert.client.embeddings.create(model=bert.model, input=prompts, dimensions=16, encoding_format="float")
    raw = bert.server.call("POST", "/v1/embeddings", {"input": prompts, "encoding_format": "base64"})

    assert_close(one.data[0].embedding, mean_vector(bert.theirs, prompts[1]))
    for prompt, found, coded in zip(prompts, both.data, raw["data"], strict=True):
        states = mean_vector(bert.theirs, prompt)
        assert_close(found.embedding, torch.nn.functional.normalize(states[:16], dim=0))
        assert_close(array("f", base64.b64decode(coded["embedding"])).tolist(), states)


def test_many_at_once_share_batches_whose_lines_carry_the_numbers_of_their_launch(bert: Served) -> None:
    texts = [text_of(1 + 5 * index % 120, seed=index) for index in range(48)]
    with ThreadPoolExecutor(12) as pool:
        asked = [
            pool.submit(bert.client.embeddings.create, model=bert.model, input=texts[i : i + 4])
            for i in range(0, 48, 4)
        ]
        answers = [one.embedding for each in asked for one in each.result().data]

    for text, vector in zip(texts, answers, strict=True):
        assert_close(vector, mean_vector(bert.theirs, [CLS, *ids_of(text), SEP]))
    found = re.findall(
        r"Prefill batch \[(\d+)\], #new-seq: (\d+), #new-token: (\d+), #cached-token: 0,", bert.server.log
    )
    numbers = [int(number) for number, _, _ in found]
    assert numbers == list(range(1, len(numbers) + 1))
    assert max(int(rows) for _, rows, _ in found) > 1
    assert max(int(tokens) for _, _, tokens in found) <= 512
    assert "Decode batch" not in bert.server.log


def test_nothing_is_left_behind_and_the_metrics_count_prompts_only(bert: Served) -> None:
    bert.client.embeddings.create(model=bert.model, input=[text_of(20)] * 3)
    eventually(bert.server.is_idle, what=lambda: str(bert.server.state()))
    assert bert.server.state()["pages"]["cached"] == 0  # an encoder's pages are worth nothing to another prompt
    with bert.server.open("GET", "/metrics") as reply:
        page = reply.read().decode()
    found = dict(re.findall(r"^sglang:(prompt_tokens_total|generation_tokens_total)\{[^}]*\} (\S+)$", page, re.M))
    assert float(found["prompt_tokens_total"]) > 0
    assert float(found["generation_tokens_total"]) == 0
    assert bert.server.get("/model_info")["is_generation"] is False
    assert "/v1/embeddings" in bert.server.get("/openapi.json")["paths"]
    assert "/v1/completions" not in bert.server.get("/openapi.json")["paths"]
    assert bert.server.get("/health_generate")["checked"] in ("request", "engine")


def test_a_decoder_answers_with_its_last_tokens_state_whatever_is_cached_and_cut(qwen: Served) -> None:
    """Prompts of several chunks, the second time from the prefix cache."""
    texts = [text_of(length) for length in (1, 63, 64, 200, 300)]
    for _ in range(2):
        found = qwen.client.embeddings.create(model=qwen.model, input=texts)
        for text, one in zip(texts, found.data, strict=True):
            assert_close(one.embedding, last_vector(qwen.theirs, [*ids_of(text), SEP]))
    short = qwen.client.embeddings.create(model=qwen.model, input=texts[3], dimensions=8)
    assert_close(short.data[0].embedding, last_vector(qwen.theirs, [*ids_of(texts[3]), SEP], 8))
    assert re.search(r"#cached-token: [1-9]", qwen.server.log)
    eventually(qwen.server.is_idle)


def test_an_embedding_model_ranks_by_the_product_of_vectors(qwen: Served) -> None:
    query, documents = text_of(9), [text_of(length, seed=3) for length in (4, 20, 70)]
    vectors = [last_vector(qwen.theirs, [*ids_of(text), SEP]) for text in (query, *documents)]
    expected = [float(vectors[0] @ vector) for vector in vectors[1:]]

    scored = qwen.server.call("POST", "/v1/score", {"text_1": query, "text_2": documents})
    ranked = qwen.server.call("POST", "/rerank", {"query": query, "documents": documents})

    assert [one["score"] for one in scored["data"]] == pytest.approx(expected, abs=1e-3)
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [one["index"] for one in ranked["results"]] == order
    assert [one["document"]["text"] for one in ranked["results"]] == [documents[index] for index in order]


@pytest.mark.slow
def test_a_cross_encoder_cut_into_four_workers_scores_as_transformers(cross: Served) -> None:
    query, documents = text_of(9), [text_of(length, seed=3) for length in (1, 4, 20, 70, 110)]
    expected = [pair_score(cross.theirs, query, document) for document in documents]

    scored = cross.server.call("POST", "/score", {"text_1": query, "text_2": documents})
    ranked = cross.server.call(
        "POST",
        "/v1/rerank",
        {"query": query, "documents": [{"text": text} for text in documents], "top_n": 2, "return_documents": False},
    )
    pairs = cross.server.call("POST", "/v1/score", {"text_1": documents[:2], "text_2": documents[1:3]})

    assert [one["score"] for one in scored["data"]] == pytest.approx(expected, abs=1e-3)
    best = sorted(range(5), key=lambda index: -expected[index])[:2]
    assert [one["index"] for one in ranked["results"]] == best
    assert [one["relevance_score"] for one in ranked["results"]] == [pytest.approx(expected[i], abs=1e-3) for i in best]
    assert all("document" not in one for one in ranked["results"])
    assert scored["usage"]["total_tokens"] == 5 * (9 + 3) + 205
    assert [one["score"] for one in pairs["data"]] == pytest.approx(
        [pair_score(cross.theirs, documents[i], documents[i + 1]) for i in range(2)], abs=1e-3
    )
    eventually(cross.server.is_idle)


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(server: Server, path: str, body: dict[str, object]) -> dict[str, object]:
    with pytest.raises(HttpError) as error:
        server.call("POST", path, body)
    assert error.value.status == 400
    return error.value.error


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        ({}, "invalid_value", "input: is missing"),
        ({"input": []}, "invalid_value", "input: is missing or empty"),
        ({"input": ""}, "invalid_value", "input: a text is empty"),
        ({"input": ["w5", ""]}, "invalid_value", "input: a text is empty"),
        ({"input": [[]]}, "invalid_value", "input: a prompt has no tokens"),
        ({"input": [7, "w5"]}, "invalid_value", "mixes"),
        ({"input": [300]}, "invalid_value", "300 is not a token id"),
        ({"input": ["w5"] * 1025}, "invalid_value", "at most 1024"),
        ({"input": text_of(127)}, "context_length_exceeded", "129 tokens > 128 maximum"),
        ({"input": "w5", "dimensions": 49}, "invalid_value", "this model has 48"),
        ({"input": "w5", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "w5", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "w5", "normalize": False}, "unsupported", "normalize"),
        ({"input": "w5", "stream": True}, "unsupported", "stream"),
        ({"input": "w5", "truncate_prompt_tokens": 3}, "unsupported", "truncate_prompt_tokens"),
    ],
)
def test_what_is_wrong_with_an_embedding_request_is_said(
    bert: Served, body: dict[str, object], code: str, named: str
) -> None:
    error = refused(bert.server, "/v1/embeddings", body)
    assert error["code"] == code
    assert named in str(error["message"])


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/rerank", {"documents": ["w5"]}, "query: is missing"),
        ("/v1/rerank", {"query": "w5", "documents": []}, "documents: is missing"),
        ("/v1/rerank", {"query": "w5", "documents": [""]}, "documents: a text is empty"),
        ("/v1/rerank", {"query": "w5", "documents": ["w6"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": text_of(60), "documents": [text_of(70)]}, "133 tokens"),
        ("/v1/score", {"text_1": ["w5", "w6"], "text_2": ["w5", "w6", "w7"]}, "2 texts for 3"),
        ("/v1/embeddings", {"input": "w5"}, "cross-encoder, which makes no embeddings"),
        ("/v1/completions", {"prompt": "w5"}, "no tokens: ask /v1/rerank and /v1/score"),
    ],
)
def test_what_is_wrong_with_a_pair_is_said(cross: Served, path: str, body: dict[str, object], named: str) -> None:
    assert named in str(refused(cross.server, path, body)["message"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/v1/responses"])
def test_an_embedding_server_generates_nothing(qwen: Served, path: str) -> None:
    error = refused(qwen.server, path, {"prompt": "w5", "text": "w5", "input": "w5"})
    assert error["code"] == "wrong_task"
    assert "without --is-embedding" in str(error["message"])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score"])
def test_router_prefill_decode_and_whoever_generates_have_no_vectors(common: Cluster, path: str) -> None:
    assert common.router is not None
    assert common.unified is not None
    body = {"input": "x", "query": "x", "documents": ["x"], "text_1": "x", "text_2": "x"}
    for server, named in (
        (common.router, "a router has pairs"),
        (common.prefills[0], "generates tokens"),
        (common.decodes[0], "generates tokens"),
        (common.unified, "--is-embedding"),
    ):
        error = refused(server, path, body)
        assert error["code"] == "wrong_task"
        assert named in str(error["message"])


def test_flags_that_do_not_go_with_vectors_are_refused_at_start(bert: Served, qwen: Served) -> None:
    for where, flags, named in (
        (bert.where, ["--disaggregation-mode", "prefill"], "leave --disaggregation-mode out"),
        (bert.where, ["--deterministic"], "--deterministic is measured on scores of tokens"),
        (bert.where, ["--disable-radix-cache"], "--disable-radix-cache does nothing for an encoder"),
        (bert.where, ["--enable-hierarchical-cache"], "--enable-hierarchical-cache does nothing for an encoder"),
        (qwen.where, ["--is-embedding", "--disaggregation-mode", "decode"], "leave --disaggregation-mode out"),
        (qwen.where, ["--is-embedding", "--tool-call-parser", "hermes"], "--tool-call-parser does nothing"),
    ):
        words = [sys.executable, "-m", "tandem.cli.main", "serve", str(where), *flags]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2
        assert named in ended.stderr


@pytest.mark.slow
def test_an_encoders_prompt_has_to_fit_one_batch(bert: Served) -> None:
    """Of either replica."""
    flags = ["--chunked-prefill-size", "64", "--dp-size", "2"]
    with cluster(unified=True, model=bert.model, flags=flags) as it:
        assert it.unified is not None
        error = refused(it.unified, "/v1/embeddings", {"input": ["w5", text_of(63)]})
        assert error["code"] == "context_length_exceeded"
        assert "65 tokens are more than one batch of 64 (--chunked-prefill-size)" in str(error["message"])
        found = it.unified.call("POST", "/v1/embeddings", {"input": [text_of(62), text_of(62, seed=1)]})
        assert_close(found["data"][1]["embedding"], mean_vector(bert.theirs, [CLS, *ids_of(text_of(62, seed=1)), SEP]))
