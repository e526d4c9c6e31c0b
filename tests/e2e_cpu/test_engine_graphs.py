"""Decoding by graphs says what decoding without them says, whoever comes and goes; on the CPU, by graphs that compute
again. Those of CUDA are in `tests/gpu`.
"""

from pathlib import Path

import pytest
import torch
from engine_world import EngineWorld, prompt_of
from msgspec import UNSET
from tiny_models import make_llama, make_mixtral

import repeated_graphs
from tandem.engine.attention.table import ATTENTION_BACKENDS
from tandem.engine.cuda_graphs import buckets

LENGTHS = (5, 40, 17, 33, 64)
MOST_ROWS = 4


@pytest.fixture(autouse=True)
def reserving_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, repeated_graphs.NAME, repeated_graphs.WHERE)


def by_graphs(model_dir: Path, *, rows: int = MOST_ROWS) -> EngineWorld:
    return EngineWorld(
        model_dir, attention=repeated_graphs.NAME, graph_rows=rows, new_graph=repeated_graphs.RepeatedGraph
    )


def play(world: EngineWorld) -> list[object]:
    """One to five rows decode; they come beside prompts, and leave. What each batch said of graphs."""
    said: list[object] = []
    for index, length in enumerate(LENGTHS):
        request = world.add(prompt_of(length))
        said.append(world.run((request, 0, length), decodes=index == 3).cuda_graph)
        said.append(world.run(decodes=True, join=[request]).cuda_graph)
        said += [world.run(decodes=True).cuda_graph for _ in range(2)]
    for request in (3, 0):
        world.finish(request)
        said.append(world.run(decodes=True, leave=[request]).cuda_graph)
    return said


def test_tokens_and_pages_are_those_without_graphs(tmp_path: Path) -> None:
    make_llama(tmp_path)
    plain, graphs = EngineWorld(tmp_path, attention="torch_native"), by_graphs(tmp_path)

    assert set(play(plain)) == {UNSET}
    play(graphs)

    assert graphs.tokens == plain.tokens
    own = graphs.engine.kv.tensor[: len(plain.engine.kv.tensor)]
    torch.testing.assert_close(own, plain.engine.kv.tensor, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_graph_takes_what_only_decodes_and_fits(tmp_path: Path) -> None:
    make_llama(tmp_path)
    few = [False, True, True, True]  # a prompt, then rows that decode

    assert play(by_graphs(tmp_path)) == [*few * 4, False, False, False, False, True, True]
    assert play(by_graphs(tmp_path, rows=8)) == [*few * 5, True, True]


def test_padding_writes_to_a_page_that_no_request_has(tmp_path: Path) -> None:
    make_llama(tmp_path)
    plain, graphs = EngineWorld(tmp_path, attention="torch_native"), by_graphs(tmp_path)

    for world in (plain, graphs):
        world.engine.kv.tensor.fill_(7.0)
        for length in LENGTHS[:3]:
            world.prefill(world.add(prompt_of(length)))
        world.run(decodes=True, join=[0, 1, 2])  # by the graph of four rows
    *pages, scratch = graphs.engine.kv.tensor

    torch.testing.assert_close(torch.stack(pages), plain.engine.kv.tensor, rtol=1e-4, atol=1e-4)
    first, *others = (scratch != 7.0).flatten(0, 2).any(dim=0).any(dim=-1).tolist()
    assert (first, any(others)) == (True, False), "one token of it"


@pytest.mark.parametrize(
    ("most", "expected"),
    [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (32, [1, 2, 4, 8, 16, 32]), (40, [1, 2, 4, 8, 16, 32, 40])],
)
def test_rows_come_in_powers_of_two_up_to_the_most(most: int, expected: list[int]) -> None:
    assert buckets(most) == expected


def test_models_whose_steps_ask_the_host_run_without_graphs(tmp_path: Path) -> None:
    make_mixtral(tmp_path)
    world = by_graphs(tmp_path)

    assert set(play(world)) == {UNSET}
    assert world.engine.kv.num_pages == 256


def test_attention_that_cannot_be_captured_runs_without_graphs(tmp_path: Path) -> None:
    make_llama(tmp_path)

    assert set(play(EngineWorld(tmp_path, graph_rows=4, new_graph=repeated_graphs.RepeatedGraph))) == {False}
