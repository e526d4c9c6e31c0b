"""Log-probabilities of prompts through processes: a pair tells what one engine tells, which transformers says, too.

Asked as lm-eval does, with the OpenAI SDK, and as SGLang's clients do, through our router and through sglang-router.
"""

from typing import Any  # JSON

import openai
import pytest
import torch
from cluster import MODEL, Cluster, Server, cluster
from reference import model, real_prompts

PROMPTS = [prompt for prompt in real_prompts(16) if 2 <= len(prompt) <= 300]
CLOSE = 1e-3


@pytest.fixture(scope="module")
def servers(common: Cluster, common_gateway: Server) -> dict[str, Server]:
    assert common.router is not None
    assert common.unified is not None
    return {"router": common.router, "unified": common.unified, "sglang-router": common_gateway}


def right(prompt: list[int]) -> list[float]:
    """Of each token but the first."""
    with torch.inference_mode():
        logprobs = model()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return [float(logprobs[at, token]) for at, token in enumerate(prompt[1:])]


def scored(server: Server, prompts: Any, **fields: Any) -> list[list[float | None]]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234} | fields
    answer = client.completions.create(prompt=prompts, **asked)
    found = []
    for choice in sorted(answer.choices, key=lambda choice: choice.index):
        assert choice.logprobs is not None
        found.append(choice.logprobs.token_logprobs)
    return found


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("front", ["router", "unified"])  # sglang-router takes no lists of token ids
def test_what_lm_eval_asks_is_what_transformers_says(servers: dict[str, Server], front: str, max_tokens: int) -> None:
    for _ in range(2):  # the second time every prompt is cached
        found = scored(servers[front], PROMPTS, max_tokens=max_tokens)
        for prompt, logprobs in zip(PROMPTS, found, strict=True):
            assert len(logprobs) == len(prompt) + max_tokens
            assert logprobs[0] is None
            assert logprobs[1 : len(prompt)] == pytest.approx(right(prompt), abs=CLOSE)


def test_pair_and_engine_tell_the_same_bits(servers: dict[str, Server]) -> None:
    """They are deterministic here."""
    ours, alone = (scored(servers[front], PROMPTS, max_tokens=4) for front in ("router", "unified"))
    assert ours == alone


def told(server: Server, path: str, **body: Any) -> list[dict[str, dict[str, Any]] | None]:
    """As vLLM's clients read it."""
    answer = server.call("POST", path, {"model": MODEL, "temperature": 0, "max_tokens": 2, "prompt_logprobs": 3} | body)
    found: list[dict[str, dict[str, Any]] | None] = (
        answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    )
    return found


@pytest.mark.parametrize("front", ["router", "unified"])
def test_vllms_prompt_logprobs_are_what_transformers_says(servers: dict[str, Server], front: str) -> None:
    prompt = PROMPTS[-1]
    for _ in range(2):  # the second time it is cached
        first, *rest = told(servers[front], "/v1/completions", prompt=prompt)
        assert first is None
        with torch.inference_mode():
            rows = model()(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for row, token, found in zip(rows, prompt[1:], rest, strict=False):
            assert found is not None
            assert found[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=CLOSE)
            best = [one["logprob"] for one in sorted(found.values(), key=lambda one: one["rank"] or 9)][:3]
            assert best == pytest.approx(row.topk(3).values.tolist(), abs=CLOSE)
        assert len(rest) == len(prompt) - 1


def test_a_pair_tells_a_chat_the_same_of_its_prompt_as_one_engine(servers: dict[str, Server]) -> None:
    messages = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many?"}]
    ours, alone = (told(servers[front], "/v1/chat/completions", messages=messages) for front in ("router", "unified"))
    assert ours == alone
    assert len(ours) > 10


@pytest.mark.parametrize("front", ["router", "sglang-router", "unified"])
@pytest.mark.parametrize("start", [0, 7, 20])
def test_sglangs_clients_get_each_of_them_once(servers: dict[str, Server], front: str, start: int) -> None:
    prompt = PROMPTS[-1]
    assert len(prompt) > 40
    servers[front].generate(prompt, max_new_tokens=2)  # it is cached
    asked = {"return_logprob": True, "logprob_start_len": start, "token_ids_logprob": prompt[start + 1 : start + 3]}
    meta = servers[front].generate(prompt, max_new_tokens=2, **asked)["meta_info"]
    by_id = meta["input_token_ids_logprobs"]
    assert (by_id[0], by_id[1][0], by_id[2][1]) == (None, *meta["input_token_logprobs"][1:3])
    told = meta["input_token_logprobs"]
    assert [token for _, token, _ in told] == prompt[start:]
    assert told[0][0] is None
    assert [logprob for logprob, _, _ in told[1:]] == pytest.approx(right(prompt)[start:], abs=CLOSE)
    assert len(meta["output_token_logprobs"]) == 2


def test_a_stream_through_the_pair_tells_them_in_its_first_and_its_last_event(servers: dict[str, Server]) -> None:
    prompt = PROMPTS[-1]
    with_scores = {"return_logprob": True, "logprob_start_len": 0}
    events = servers["router"].stream(prompt, max_new_tokens=4, **with_scores).rest()
    for event in (events[0], events[-1]):
        assert [token for _, token, _ in event["meta_info"]["input_token_logprobs"]] == prompt
    assert not any("input_token_logprobs" in event["meta_info"] for event in events[1:-1]), "they may be large"


def test_what_is_before_comes_from_the_cache(servers: dict[str, Server]) -> None:
    prompt = PROMPTS[-1]
    unified = servers["unified"]
    unified.generate(prompt, max_new_tokens=1)
    for start, most in ((0, 0), (20, 16), (-1, len(prompt))):
        meta = unified.generate(prompt, max_new_tokens=1, return_logprob=True, logprob_start_len=start)["meta_info"]
        assert meta["cached_tokens"] <= most
        assert (meta["cached_tokens"] > 0) is (start != 0)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--tp-size", "2"], marks=pytest.mark.slow),
        pytest.param(["--pp-size", "2"], marks=pytest.mark.slow),
        ["--disaggregation-local-prefill", "auto"],
    ],
)
def test_pairs_of_several_workers_and_a_decode_that_computes_it_itself_tell_the_same(flags: list[str]) -> None:
    sides: dict[str, Any] = {"decode_flags" if "local" in flags[0] else "flags": flags}
    with cluster(prefills=1, decodes=1, **sides) as it:
        assert it.router is not None
        prompts = [PROMPTS[0], PROMPTS[-1], PROMPTS[-1][:20]]
        for prompt, logprobs in zip(prompts, scored(it.router, prompts), strict=True):
            assert logprobs[1 : len(prompt)] == pytest.approx(right(prompt), abs=CLOSE)
