"""What the API of a model of block diffusion takes, and what it refuses by name, by every endpoint."""

import pytest
from api_fakes import says, world

from tandem.engine.model_config import page_tokens, parse_config

USER = [{"role": "user", "content": "hi"}]
COMPLETION, CHAT, NATIVE = "/v1/completions", "/v1/chat/completions", "/generate"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
REFUSED = {
    "logprobs of a completion": (COMPLETION, {"prompt": "hi", "logprobs": 1}, "logprobs"),
    "logprobs of a prompt": (COMPLETION, {"prompt": "hi", "echo": True, "logprobs": 1}, "logprobs"),
    "logprobs of a chat": (CHAT, {"messages": USER, "logprobs": True}, "logprobs"),
    "a penalty": (CHAT, {"messages": USER, "presence_penalty": 1}, "presence_penalty"),
    "another": (CHAT, {"messages": USER, "frequency_penalty": 1}, "frequency_penalty"),
    "the third": (NATIVE, {"text": "hi", "sampling_params": {"repetition_penalty": 2}}, "repetition_penalty"),
    "a schema": (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    "a tool that must be called": (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "required"}, "tools"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_speaks_of_one_token_behind_the_other_is_refused(what: str) -> None:
    path, body, name = REFUSED[what]
    w = world(says("ok"), block_tokens=4)
    with w.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 400
    assert name in response.text
    assert "finds the tokens of a block together" in response.text
    assert w.node.submits == []


def test_everything_else_of_sampling_is_taken() -> None:
    w = world(says("ok"), block_tokens=4)
    asked = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 4, "logit_bias": {"3": 1}, "stop": "x"}
    with w.http() as http:
        assert http.post(CHAT, json={"messages": USER, "min_tokens": 1, "max_tokens": 9, **asked}).status_code == 200


def test_a_page_is_as_large_as_a_block_unless_told() -> None:
    known = {
        "architectures": ["SDARForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "mask_token_id": 7,
    }
    sizes = {size: page_tokens(parse_config({**known, "block_size": size}, generation={})) for size in (4, 16, 32, 64)}
    assert sizes == {4: 16, 16: 16, 32: 32, 64: 64}
    assert parse_config(known, generation={}).blocks is not None
