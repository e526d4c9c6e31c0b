"""What a plan means to the engine: who is in the decode set, whose pages, which tokens, which hashes."""

from array import array
from pathlib import Path

import msgspec
import pytest
import torch
from engine_world import ROOT, EngineWorld, prompt_of
from tiny_models import make_llama

from tandem.core.batch import BatchKind, BatchPlan, Join, Row, TokenFlag
from tandem.core.values import BatchId, PageId, RequestId
from tandem.engine.kv_memory import page_bytes, pages_for_memory
from tandem.pagehash import hash_of, page_link, prompt_hashes
from tandem.sampling import Payload, SamplingParams, TokenScore


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_llama(tmp_path)
    return tmp_path


def test_outcomes_come_rows_first_then_the_decode_set_in_join_order(model_dir: Path) -> None:
    world = EngineWorld(model_dir)
    short, long, new = world.add(prompt_of(5)), world.add(prompt_of(60)), world.add(prompt_of(20))
    world.run((short, 0, 5), (long, 0, 60))
    world.run(decodes=True, join=[short, long])

    outcome = world.run((new, 0, 20), decodes=True)

    alone = EngineWorld(model_dir)
    expected = [alone.generate(prompt_of(20), 2)[0], alone.generate(prompt_of(5), 3)[2]]
    expected.append(alone.generate(prompt_of(60), 3)[2])
    assert list(array("i", outcome.tokens)) == expected
    assert outcome.iteration == world.iteration


def test_a_span_that_does_not_sample_has_no_entry(model_dir: Path) -> None:
    world = EngineWorld(model_dir)
    request = world.add(prompt_of(20))

    outcome = world.run((request, 0, 12))

    assert outcome.tokens == b""
    assert outcome.flags == b""


def test_a_plan_of_changes_only_runs_nothing(model_dir: Path) -> None:
    world = EngineWorld(model_dir)
    request = world.add(prompt_of(20))
    world.prefill(request)

    outcome = world.run(join=[request])

    assert outcome.tokens == b""
    assert len(world.recording.batches) == 1


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "seed": 9, "frequency_penalty": 0.5}], ids=str)
def test_kv_computed_by_one_engine_serves_another(model_dir: Path, params: dict) -> None:
    prompt = prompt_of(37)
    prefill, decode = EngineWorld(model_dir), EngineWorld(model_dir)
    decode.free.reverse()
    sender, receiver = prefill.add(prompt, **params), decode.add(prompt, **params)
    prefill.prefill(sender)
    pages = decode.free[-3:][::-1]
    for source, destination in zip(prefill.tables[sender], pages, strict=True):
        decode.engine.kv.page(destination)[:] = prefill.engine.kv.page(source)

    decode.run(decodes=True, join=[receiver], first_token=prefill.tokens[sender][-1])
    decode.decode(30)

    assert decode.tables[receiver][:3] == pages
    assert decode.tokens[receiver][37:] == EngineWorld(model_dir).generate(prompt, 32, **params)


def test_a_retracted_request_goes_on_as_if_it_had_never_left(model_dir: Path) -> None:
    expected = EngineWorld(model_dir).generate(prompt_of(30), 40)
    world = EngineWorld(model_dir)
    request, other = world.add(prompt_of(30)), world.add(prompt_of(11))
    world.run((request, 0, 30), (other, 0, 11))
    world.run(decodes=True, join=[request, other])
    world.decode(10)

    world.retract(request)
    world.decode(5)
    world.prefill(request, chunk=19)
    world.run(decodes=True, join=[request])
    world.decode(26)

    assert world.tokens[request][30:] == expected


def test_a_token_that_was_sampled_but_never_told_is_sampled_again(model_dir: Path) -> None:
    expected = EngineWorld(model_dir).generate(prompt_of(30), 20, frequency_penalty=1.5)
    world = EngineWorld(model_dir)
    request = world.add(prompt_of(30), frequency_penalty=1.5)
    world.prefill(request)
    world.run(decodes=True, join=[request])
    world.decode(6)
    world.retract(request)
    del world.tokens[request][-2:]  # the node had retracted it before these came back

    world.prefill(request)
    world.run(decodes=True, join=[request])
    world.decode(12)

    assert world.tokens[request][30:] == expected


def test_a_prompt_may_run_twice(model_dir: Path) -> None:
    expected = EngineWorld(model_dir).generate(prompt_of(30), 5)
    world = EngineWorld(model_dir)
    request = world.add(prompt_of(30))
    world.prefill(request)
    world.tokens[request].pop()

    world.prefill(request, start=16)
    world.run(decodes=True, join=[request])
    world.decode(3)

    assert world.tokens[request][30:] == expected


def test_a_cached_prefix_is_not_computed_again(model_dir: Path) -> None:
    world = EngineWorld(model_dir)
    first, second = world.add(prompt_of(48)), world.add(prompt_of(48))
    world.prefill(first)
    world.tables[second] = world.tables[first][:2]

    world.prefill(second, start=32)

    assert world.tokens[second] == world.tokens[first]
    own, others = world.tables[second][2], world.tables[first][2]
    assert own != others
    torch.testing.assert_close(world.engine.kv.tensor[own], world.engine.kv.tensor[others])


def test_scores_travel_beside_the_tokens_that_asked_for_them(model_dir: Path) -> None:
    world = EngineWorld(model_dir)
    silent, asking = world.add(prompt_of(5)), world.add(prompt_of(9), logprobs=True, top_logprobs=2)
    world.run((silent, 0, 5), (asking, 0, 9))

    outcome = world.run(decodes=True, join=[silent, asking])

    ((request, extra),) = outcome.extras
    score = msgspec.msgpack.decode(extra, type=TokenScore)
    assert request == asking
    assert score.top_ids[0] == world.tokens[asking][-1]
    assert score.logprob == pytest.approx(float(world.logits[asking].log_softmax(0).max()))


def test_the_end_tokens_of_the_checkpoint_are_flagged(tmp_path: Path) -> None:
    make_llama(tmp_path)
    first = EngineWorld(tmp_path).generate(prompt_of(30), 2)[0]
    make_llama(tmp_path, eos_token_id=[first, 299])
    world = EngineWorld(tmp_path)
    plain, long, ignoring = (
        world.add(prompt_of(30), **params) for params in ({}, {"min_tokens": 1}, {"ignore_eos": True})
    )

    world.run((plain, 0, 30), (long, 0, 30), (ignoring, 0, 30))

    assert world.flags == {plain: TokenFlag.EOS, long: 0, ignoring: 0}
    assert world.tokens[long][-1] != first


def test_a_seed_gives_the_same_tokens_after_a_retraction(model_dir: Path) -> None:
    params = {"temperature": 1.0, "seed": 12, "top_p": 0.9, "repetition_penalty": 1.1}
    expected = EngineWorld(model_dir).generate(prompt_of(30), 30, **params)
    world = EngineWorld(model_dir)
    request = world.add(prompt_of(30), **params)
    world.prefill(request, chunk=8)
    world.run(decodes=True, join=[request])
    world.decode(10)

    world.retract(request)
    world.prefill(request)
    world.run(decodes=True, join=[request])
    world.decode(16)

    assert world.tokens[request][30:] == expected


def test_output_that_comes_back_as_a_prompt_is_continued_alike(model_dir: Path) -> None:
    params = {"temperature": 1.0, "seed": 4}
    tokens = EngineWorld(model_dir).generate(prompt_of(20), 30, **params)

    again = EngineWorld(model_dir).generate(prompt_of(20) + tokens[:10], 20, **params)

    assert again == tokens[10:]


def test_hashes_of_pages_with_output_continue_the_chain_of_the_prompt(model_dir: Path) -> None:
    world = EngineWorld(model_dir)
    # The payload's hash is that of the last full prompt page: what the edge would send for these prompts.
    lengths = {"no full page": 10, "three full pages": 48, "two and a half": 40}
    requests = {world.add(prompt_of(length)): length for length in lengths.values()}
    world.run(*[(request, 0, length) for request, length in requests.items()])
    world.run(decodes=True, join=list(requests))
    world.decode(40)

    for request, length in requests.items():
        first = length // 16 * 16
        tokens = world.tokens[request][:-1]
        assert world.hashes[request] == prompt_hashes(ROOT, tokens[first:], page_size=16)
        assert len(world.hashes[request]) >= 2


def test_a_page_hash_is_told_when_its_last_slot_is_written(model_dir: Path) -> None:
    world = EngineWorld(model_dir)
    request = world.add(prompt_of(14))
    world.prefill(request)
    world.run(decodes=True, join=[request])  # writes position 14
    assert request not in world.hashes

    world.run(decodes=True)  # writes position 15

    assert world.hashes[request] == [hash_of(page_link(ROOT, world.tokens[request][:16]))]


def test_each_page_is_told_once_also_when_it_is_recomputed(model_dir: Path) -> None:
    world = EngineWorld(model_dir)
    request = world.add(prompt_of(20))
    world.prefill(request)
    world.run(decodes=True, join=[request])
    world.decode(26)  # 48 tokens, KV of 47: two pages, one of them with output, were told
    assert len(world.tokens[request]) == 48

    world.retract(request)
    world.prefill(request, chunk=30)  # fills the third page as a span
    world.run(decodes=True, join=[request])
    world.decode(20)

    assert world.hashes[request] == prompt_hashes(ROOT, world.tokens[request][16:-1], page_size=16)


def test_what_a_broken_request_left_in_a_page_harms_nobody(model_dir: Path) -> None:
    expected = EngineWorld(model_dir).generate(prompt_of(5), 30)
    world = EngineWorld(model_dir, num_pages=12)
    world.finish(world.add(prompt_of(3)))
    victim, bystander = world.add(prompt_of(60)), world.add(prompt_of(5))
    world.run((victim, 0, 60), (bystander, 0, 5))
    world.engine.kv.tensor[world.tables[victim][0]] = float("nan")
    world.run(decodes=True, join=[victim, bystander])
    assert world.flags == {victim: TokenFlag.INVALID, bystander: 0}
    world.run(decodes=True)  # one more batch was launched before the node knew
    world.finish(victim)

    assert world.generate(prompt_of(5), 30) == expected
    world.decode(27)
    assert world.tokens[bystander][5:35] == expected


def test_a_forgotten_request_leaves_the_decode_set_and_its_id_is_free(model_dir: Path) -> None:
    world = EngineWorld(model_dir)
    first, second = world.add(prompt_of(5)), world.add(prompt_of(6))
    world.run((first, 0, 5), (second, 0, 6))
    world.run(decodes=True, join=[first, second])

    world.finish(first)
    world.engine.add(Payload(first, array("i", prompt_of(7)).tobytes(), SamplingParams(), ROOT))
    outcome = world.run(decodes=True)

    assert len(outcome.flags) == 1
    assert world.tokens[second][6:] == EngineWorld(model_dir).generate(prompt_of(6), 3)


def test_forgetting_somebody_unknown_is_harmless(model_dir: Path) -> None:
    EngineWorld(model_dir).engine.forget([17])


def test_a_span_without_pages_is_refused(model_dir: Path) -> None:
    world = EngineWorld(model_dir)
    request = RequestId(world.add(prompt_of(20)))
    plan = BatchPlan(BatchId(1), 1, BatchKind.PREFILL, rows=(Row(request, 0, 20, 0, (PageId(1),), samples=True),))

    with pytest.raises(AssertionError, match="every token of a span has a page"):
        world.engine.run(plan)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_decoding_row_without_a_page_is_refused_and_harms_no_page(model_dir: Path, deterministic: bool) -> None:
    world = EngineWorld(model_dir, deterministic=deterministic)
    request, other = world.add(prompt_of(16)), world.add(prompt_of(40))
    world.run((request, 0, 16), (other, 0, 40))
    first, pages = world.take_pages(other, 41)
    before = world.engine.kv.tensor.clone()
    joins = (Join(RequestId(other), first, pages), Join(RequestId(request), 1, ()))

    with pytest.raises(AssertionError, match="has a page"):
        world.engine.run(BatchPlan(BatchId(2), 2, BatchKind.DECODE, decodes=True, join=joins))

    torch.testing.assert_close(world.engine.kv.tensor, before, rtol=0, atol=0, equal_nan=True)


def test_pages_for_memory_counts_whole_pages(model_dir: Path) -> None:
    shape = EngineWorld(model_dir).engine.model.kv_shape
    one = page_bytes(shape, page_size=16, dtype=torch.float32)

    assert one == 2 * 2 * 2 * 16 * 8 * 4
    assert pages_for_memory(shape, page_size=16, dtype=torch.float32, budget_bytes=10 * one - 1) == 9
    assert pages_for_memory(shape, page_size=16, dtype=torch.bfloat16, budget_bytes=10 * one) == 20
