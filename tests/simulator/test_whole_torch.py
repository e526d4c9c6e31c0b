"""Whole clusters whose workers compute with the product's own engine and the bundled model."""

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from random import Random

import pytest
from msgspec import structs

from tandem.cli.main import main
from tandem.config import ServerConfig
from tandem.sampling import SamplingParams
from tandem.simulator.hunt import run_each
from tandem.simulator.report import SeedResult
from tandem.simulator.whole import world
from tandem.simulator.whole.clients import SAMPLING, Answers, ClientRequest, draw_sampling
from tandem.simulator.whole.cuts import CONTEXTS, SIDES
from tandem.simulator.whole.forms import FORMS, FormedAsk
from tandem.simulator.whole.options import TORCH, Options, draw_options
from tandem.simulator.whole.random_models import GRANITE, SDAR
from tandem.simulator.whole.torch_engine import TimedEngine, alone, with_torch
from tandem.simulator.whole.world import World, run_seed

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=True)
PAIR, SINGLE = 455, 62  # in calm: several requests at a time on decode; a unified server
QUANTISED = (20_026, 20_010, 10_363)  # weights of 8 bits; KV of 8 bits; that of four shards on one side
FORMED = 11_093  # a pair, nearly all of whose answers have a form, on all pages
SAMPLED = 10_004  # off the record: clients say how tokens are to be chosen
SEEDS = (
    8,  # two prefills and two decodes; bytes are spoiled, batches fail
    12,  # replicas of two stages
    24,  # two shards on one side, and two stages on the other
    33,  # replicas of two shards, with host memory
    19,  # a prefill of four workers, which share out prompts, and pages that come in small pieces
    55,  # a folder of pages
    74,  # two replicas, killed processes, forks that fail
    20_051,  # three shards that wait for each other dozens of times in a batch, and few pages
)


def test_a_pair_says_what_one_engine_says_and_the_same_seed_gives_the_same_bytes() -> None:
    result = run_seed(PAIR, engine=TORCH, watches=True)
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 0
    assert result.occurred["Path remote"] > 0
    assert result.occurred["PagesLanded"] > 0
    assert run_seed(PAIR, engine=TORCH).log_hash == result.log_hash


def test_answers_in_a_form_are_those_of_one_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(with_torch(draw_options(FORMED)))
    result = world.run()
    assert not result.invariant, f"{result.line}: {result.detail}"
    formed = [one for one in world.answers if isinstance(one.ask, FormedAsk) and one.is_whole and one.error is None]
    assert {one.ask.path for one in formed} == set(FORMS)
    assert any(right.calls for one in formed for right in one.rights)


def test_a_worker_that_follows_no_grammar_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedEngine, "_matcher_of", lambda engine, payload: None)
    assert run_seed(FORMED, engine=TORCH).invariant == "S14"


@pytest.mark.slow
def test_clients_sample_and_whoever_draws_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_seed(SAMPLED, engine=TORCH)
    assert not result.invariant, f"{result.line}: {result.detail}"
    params_of = ClientRequest.params

    def of_another_draw(ask: ClientRequest, sample: int) -> SamplingParams:
        params = params_of(ask, sample)
        return structs.replace(params, seed=params.seed + 1)

    monkeypatch.setattr(ClientRequest, "params", of_another_draw)
    assert run_seed(SAMPLED, engine=TORCH).invariant == "S14"


@pytest.mark.slow
@pytest.mark.parametrize("seed", QUANTISED)
def test_what_is_of_few_bits_is_as_with_one_engine_that_has_it_too(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_seed(seed, engine=TORCH)
    assert not result.invariant, f"{result.line}: {result.detail}"
    monkeypatch.setattr(world, "alone", lambda flags, folder: alone({"page_size": flags["page_size"]}, folder))
    assert run_seed(seed, engine=TORCH).invariant == "S14"


def test_how_clients_sample_is_drawn_of_everything_that_they_may_say() -> None:
    drawn = [draw_sampling(Random(f"sampling {seed}")) for seed in range(200)]
    assert {name for one in drawn for name in one} == {*SAMPLING, "temperature", "logit_bias"}
    assert 40 < sum(not one for one in drawn) < 100
    assert {one["temperature"] for one in drawn if one} == {0.0, 0.5, 1.0, 1.5}


def test_one_engine_alone_says_the_same_again_and_stops_where_it_ends() -> None:
    say, prompt = alone({"page_size": 8}), [*range(40, 60)]
    answer = say(prompt, 24, GREEDY)
    assert len(answer) == 24
    assert [token for token, _ in say(prompt, 9, GREEDY)] == [token for token, _ in answer[:9]]
    assert say(answer_of_one(say, prompt, 5), 19, GREEDY) == answer[5:]
    assert all(logprob <= 0 for _, logprob in answer)


def answer_of_one(say: Answers, prompt: list[int], count: int) -> list[int]:
    """The prompt, and so much of the answer."""
    return prompt + [token for token, _ in say(prompt, count, GREEDY)]


@pytest.fixture(scope="module")
def results() -> dict[int, SeedResult]:
    return {result.seed: result for result in run_each(SEEDS, partial(run_seed, engine=TORCH), are_long=True)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_ends_as_promised(results: dict[int, SeedResult], seed: int) -> None:
    result = results[seed]
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.num_finished > 0


@pytest.mark.slow
def test_other_processes_have_given_the_same_bytes(results: dict[int, SeedResult]) -> None:
    found = {seed: run_seed(seed, engine=TORCH).log_hash for seed in SEEDS[:3]}
    assert found == {seed: results[seed].log_hash for seed in found}


def test_what_the_other_engine_has_not_is_drawn_apart_and_the_rest_of_a_seed_stays() -> None:
    may_differ = {"engine", "model", "flags", "roles", "tcp_capacity", "narrows"}
    cuts, cuts_of_bits = set(), set()
    for seed in range(10_000, 10_400):
        drawn = draw_options(seed)
        given = with_torch(drawn)
        differ = {one.name for one in fields(Options) if getattr(drawn, one.name) != getattr(given, one.name)}
        assert differ <= may_differ
        for flags in given.roles.values() if given.layout == "pairs" else ({},):
            config = ServerConfig(model="tandem/mini", **{**given.flags, **flags})
            assert config.cpu_threads == 1
            is_refused = config.enable_dp_attention or config.is_embedding or config.kv_cache_dtype != "auto"
            assert config.deterministic == (not is_refused and given.model not in (GRANITE, SDAR))
            if config.kv_cache_dtype != "auto":
                cuts_of_bits.add((config.tp_size, config.pp_size, config.attn_cp_size))
            cuts.add((config.tp_size, config.pp_size, config.attn_cp_size))
    assert cuts >= {cut.sizes for cut in (*SIDES, *CONTEXTS)}, "replicas of several workers stay"
    assert {(1, 1, 1), (2, 1, 1), (1, 2, 1), (4, 1, 1), (1, 1, 2)} <= cuts_of_bits


def test_the_seeds_on_record_have_the_bundled_model_and_nobody_asks_for_a_form() -> None:
    drawn = [draw_options(seed) for seed in range(100)]
    assert any(one.formed for one in drawn)
    assert any(one.block_tokens > 1 for one in drawn)
    assert any(one.vectors for one in drawn)
    for one in map(with_torch, drawn):
        assert (one.model, one.block_tokens, one.window_tokens, one.vectors, one.formed) == ("", 1, 0, "", 0.0)
        assert one.flags["deterministic"]
        assert not {"enable_dp_attention", "is_embedding", "tool_call_parser"} & {*one.flags}


def test_the_command_says_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--engine", "torch", "--seed", "2"]) == 2
    assert "--whole" in capsys.readouterr().err
    assert SeedResult(7, is_whole=True, engine=TORCH).line == "tandem simulate --whole --engine torch --seed 7 --trace"
    assert main(["simulate", "--whole", "--engine", "torch", "--seed", str(SINGLE), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["violations"] == []
