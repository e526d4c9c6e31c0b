"""A model that others trained, as the file that they publish: served by a pair, and held against transformers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster import Cluster, Server, cluster
from reference import NEAR_TIE, TEXT, parting_of, use_one_thread
from transformers import AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.slow  # and by `make published` only
ANSWER, CHATS = 48, 24
EXACT = 1e-3  # between logprobs in fp32
QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def pair(smollm2: Path) -> Iterator[Cluster]:
    with cluster(prefills=1, decodes=1, model=str(smollm2), flags=["--dtype", "float32"]) as it:
        yield it


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> PreTrainedModel:
    use_one_thread()
    where = {"pretrained_model_name_or_path": str(smollm2.parent), "gguf_file": smollm2.name}
    return AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()


def questions() -> list[str]:
    return [json.loads(line)["question"] for line in TEXT.read_text().splitlines()[:CHATS]]


def prompt(server: Server, text: str) -> list[int]:
    """A question as the model's own template puts it."""
    return server.call("POST", "/tokenize", {"messages": [{"role": "user", "content": text}]})["tokens"]


def test_tokens_and_their_scores_are_those_of_transformers(pair: Cluster, reference: PreTrainedModel) -> None:
    near_ties = 0
    for question in questions():
        ids = prompt(pair.router, question)
        sampling = {"ignore_eos": True}
        answer = pair.router.generate(ids, max_new_tokens=ANSWER, sampling_params=sampling, return_logprob=True)
        assert answer["meta_info"]["path"] == "remote"
        said = answer["output_ids"]
        found = parting_of(reference, tuple(ids), tuple(said))
        assert found is None or found.gap < NEAR_TIE, f"{question}: {found}"
        near_ties += found is not None
        with torch.inference_mode():
            scores = reference(torch.tensor([ids + said[:-1]])).logits[0, len(ids) - 1 :].log_softmax(-1)
        told = [score for score, _, _ in answer["meta_info"]["output_token_logprobs"]]
        meant = scores.gather(1, torch.tensor(said)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(told), meant, rtol=0, atol=EXACT)
    assert near_ties <= 1


def test_it_knows_what_it_was_taught_and_ends_its_turn(pair: Cluster) -> None:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    choice = pair.router.call("POST", "/v1/chat/completions", {**body, "max_tokens": 64})["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_it_keeps_to_a_schema(pair: Cluster) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "Name a person, as JSON."}]}
    body |= {"temperature": 0, "max_tokens": 64, "response_format": form}
    choice = pair.router.call("POST", "/v1/chat/completions", body)["choices"][0]
    assert json.loads(choice["message"]["content"]).keys() == {"name", "age"}


def test_what_is_cut_after_a_digit_goes_on_with_the_next(pair: Cluster) -> None:
    """Its tokenizer takes digits one by one, which the file says by a name only."""
    tokens = pair.router.call("POST", "/tokenize", {"prompt": "a 1234"})["tokens"]
    assert len(tokens) == 6
