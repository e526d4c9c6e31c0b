"""Models whose layers transformers computes, through servers: their KV is cached, sent and kept as any other."""

from functools import partial
from pathlib import Path

import pytest
from borrowed_models import make
from cluster import cluster, eventually
from reference import PAGE, real_prompts
from served_models import POOL, SIZES, ask, assert_same, prompts_of, served, storage_flags
from transformers import PreTrainedModel

from tandem.cli import serve
from tandem.cli.main import main
from tandem.engine.model_config import read_config
from tandem.engine.transformers_facts import examined_here


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """Positions are embeddings: one that is counted from the begin of a batch shows."""
    where = tmp_path_factory.mktemp("gpt2")
    return where, served(where, make("gpt2", where, **SIZES))


def test_a_pair_says_what_transformers_says_and_goes_on_behind_what_is_cached(
    gpt2: tuple[Path, PreTrainedModel],
) -> None:
    where, model = gpt2
    with cluster(prefills=1, decodes=1, model=str(where), flags=POOL) as running:
        assert running.router is not None
        prompts = real_prompts(3)
        first = ask(running.router, prompts)
        assert_same(model, prompts, first)
        assert {answer["meta_info"]["path"] for answer in first} == {"remote"}
        turns = [[*prompt, *one["output_ids"], 7, 11] for prompt, one in zip(prompts, first, strict=True)]
        second = ask(running.router, turns)
        assert_same(model, turns, second)
        cached = sum(answer["meta_info"]["cached_tokens"] for answer in second)
        assert cached > sum(len(prompt) for prompt in prompts) / 2
        for server in running.servers:
            assert "GPT2LMHeadModel is not one of Tandem's own: transformers" in server.log
            assert "engine: layers by transformers" in server.log
            assert server.call("GET", "/model_info")["architectures"] == ["GPT2LMHeadModel"]
            eventually(server.is_idle, what=server.states)


@pytest.mark.slow
def test_pages_come_back_from_host_memory_and_after_an_end_from_storage(
    gpt2: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """The pool holds forty pages, a third of what is asked about."""
    where, model = gpt2
    flags = [*POOL, "--max-total-tokens", "640", "--hicache-ratio", "8", *storage_flags(tmp_path)]
    prompts = prompts_of(24, salt=0)
    for tier in ("host", "storage"):
        with cluster(unified=True, model=str(where), flags=flags) as running:
            server = running.unified
            assert server is not None
            if tier == "host":
                assert_same(model, prompts, ask(server, prompts))
            answers = ask(server, prompts)
            assert_same(model, prompts, answers)
            assert sum(one["meta_info"]["cached_tokens_details"][tier] for one in answers) > 24 * PAGE
            eventually(lambda server=server: not server.state()["copies"] and not server.state()["storage"])


@pytest.mark.slow
def test_every_dp_rank_computes_with_a_model_of_its_own(gpt2: tuple[Path, PreTrainedModel]) -> None:
    where, model = gpt2
    flags = [*POOL, "--dp-size", "2", "--load-balance-method", "round_robin"]
    with cluster(unified=True, model=str(where), flags=flags) as running:
        assert running.unified is not None
        prompts = real_prompts(8)
        answers = ask(running.unified, prompts)
        assert_same(model, prompts, answers)
        assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}


@pytest.mark.parametrize(
    "flags",
    [
        ["--deterministic"],
        ["--tp-size", "2"],
        ["--pp-size", "2"],
        ["--attn-cp-size", "2"],
        ["--quantization", "int8"],
        ["--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"],
    ],
)
def test_what_layers_of_transformers_do_not_allow_is_refused_by_name(
    gpt2: tuple[Path, PreTrainedModel],
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "read_config", partial(read_config, examine=examined_here))
    assert main(["serve", str(gpt2[0]), *flags]) == 2

    said = capsys.readouterr().err
    assert f"{flags[0]} " in said
    assert "computed by transformers" in said or "transformers promises no bits" in said


def test_an_architecture_that_nobody_can_serve_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("gpt2", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"gpt2"', '"bloom"').replace("GPT2LMHeadModel", "BloomForCausalLM"))

    assert main(["serve", str(tmp_path)]) == 1

    said = capsys.readouterr().err
    assert "the architecture 'BloomForCausalLM' is not supported: its attention in transformers cannot be" in said
