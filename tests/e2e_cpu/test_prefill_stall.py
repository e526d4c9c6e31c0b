"""Prompts that come while others decode are computed in parts as small as `--max-prefill-stall-ms` has them."""

import re

from cluster import cluster, eventually
from reference import NEAR_TIE, parting, real_prompts

CHUNK, FEWEST, LENGTH, SHORT = 512, 64, 1000, 100


def test_a_prompt_beside_a_stream_comes_in_small_chunks_with_the_same_tokens() -> None:
    text = [token for prompt in real_prompts(100)[10:] for token in prompt]
    prompt = text[:LENGTH]
    flags = ["--max-prefill-stall-ms", "1", "--chunked-prefill-size", str(CHUNK), "--disable-radix-cache"]
    with cluster(unified=True, flags=flags) as running:
        server = running.unified
        assert server is not None
        alone = server.generate(prompt, max_new_tokens=8)
        eventually(lambda: sum(chunks(server.log)) == LENGTH)
        assert max(chunks(server.log)) == CHUNK
        stream = server.stream(text[-SHORT:], max_new_tokens=7000, sampling_params={"ignore_eos": True})
        assert stream.next() is not None
        eventually(lambda: sum(chunks(server.log)) == LENGTH + SHORT)
        before = len(chunks(server.log))
        beside = server.generate(prompt, max_new_tokens=8)
        stream.close()
        eventually(lambda: sum(chunks(server.log)[before:]) == LENGTH)
        assert max(chunks(server.log)[before:]) == FEWEST
        assert server.state()["costs"]["prompt_token_us"] > 0
        for answer in (alone, beside):
            found = parting(tuple(prompt), tuple(answer["output_ids"]))
            assert found is None or found.gap < NEAR_TIE, f"{found}"
        eventually(server.is_idle)


def chunks(log: str) -> list[int]:
    return [int(found) for found in re.findall(r"Prefill batch.*?#new-token: (\d+)", log)]
