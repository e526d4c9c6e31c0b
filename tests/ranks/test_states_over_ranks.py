"""State-space layers over several workers: each has the states of its heads and of its stage's layers, and sends them.

The model is a small random Granite 4 with the tokenizer of the bundled one; the reference is transformers. Most of it
is in `make ranks` only.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from cluster import HttpError, Server, cluster, eventually
from reference import NEAR_TIE, PAGE, parting_of, real_prompts
from served_models import SIZES, served
from tiny_models import make_granite
from transformers import PreTrainedModel

POOL = ("--page-size", str(PAGE), "--chunked-prefill-size", "128", "--max-total-tokens", "16384")
ONE, TP2, PP2, BOTH = (), ("--tp", "2"), ("--pp", "2"), ("--tp", "2", "--pp", "2")
TOGETHER = ("--dp", "2", "--tp", "2", "--enable-dp-attention")
MORE_PAIRS = [(PP2, PP2), (BOTH, BOTH), (ONE, TP2), (BOTH, PP2), (TOGETHER, ONE)]
PAIRS = [(TP2, ONE), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_PAIRS)]
OUTPUT = 24


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    where = tmp_path_factory.mktemp("granite")
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_n_groups": 2}
    return where, served(where, make_granite(where, **SIZES, **sizes))


def ask(server: Server, prompt: list[int]) -> dict:
    return server.generate(prompt, max_new_tokens=OUTPUT, sampling_params={"ignore_eos": True})


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=lambda flags: "-".join(flags).replace("--", "") or "one")
def test_a_pair_says_what_transformers_says(
    granite: tuple[Path, PreTrainedModel], prefill: tuple[str, ...], decode: tuple[str, ...]
) -> None:
    where, model = granite
    flags = {"prefill_flags": prefill, "decode_flags": decode}
    prompts = real_prompts(16)
    with cluster(prefills=1, decodes=1, model=str(where), flags=POOL, **flags) as running:
        assert running.router is not None
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(partial(ask, running.router), prompts), *map(partial(ask, running.router), prompts)]
        for server in running.servers:
            eventually(server.is_idle, what=server.states)
    for prompt, answer in zip(prompts * 2, answers, strict=True):
        assert answer["meta_info"]["path"] == "remote"
        found = parting_of(model, tuple(prompt), tuple(answer["output_ids"]))
        assert found is None or found.gap < NEAR_TIE, f"prompt of {len(prompt)} tokens: {found}"


@pytest.mark.slow
def test_sides_with_other_stages_are_refused_and_the_field_is_named(granite: tuple[Path, PreTrainedModel]) -> None:
    flags = {"prefill_flags": PP2, "decode_flags": ("--strict-remote",)}
    with cluster(prefills=1, decodes=1, model=str(granite[0]), flags=POOL, **flags) as running:
        assert running.router is not None
        with pytest.raises(HttpError) as refused:
            ask(running.router, [3, 4, 5])
        error = refused.value.error
        assert error["code"] == "layout_mismatch"
        assert "pp_size" in error["message"]
