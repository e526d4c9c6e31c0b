"""The engine with attention by Triton: against the CPU's, against transformers in bf16, and by graphs.

Without a device the kernels are interpreted, and graphs compute again; what only a device can show is skipped.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import cluster, eventually
from engine_world import EngineWorld, prompt_of
from gpu_world import DEVICE, HAS_CUDA, needs_cuda, needs_triton
from tiny_models import make_gemma2, make_llama, reference_logits, relative_error

import repeated_graphs
from tandem.core.batch import BatchOutcome
from tandem.engine.cuda_graphs import CudaGraph

GRAPHS: dict[str, Any] = {"graph_rows": 2, "new_graph": CudaGraph if HAS_CUDA else repeated_graphs.RepeatedGraph}
ALMOST = 2.0  # a type of 16 bits may cost us so many times what it costs transformers


class Tokens(EngineWorld):
    """Tokens only: logits of a graph are where it keeps them."""

    def _settle(self, outcome: BatchOutcome, sampling: Sequence[int]) -> None:
        for request, token in zip(sampling, outcome.tokens_by_row(), strict=True):
            self.tokens[request] += array("i", token)


def spoken(world: EngineWorld) -> list[list[int]]:
    """By two requests that decode together, then one alone; prompts and answers."""
    for length in (21, 9):
        world.prefill(world.add(prompt_of(length)), chunk=16)
    world.run(decodes=True, join=[0, 1])
    world.decode(3)
    world.finish(0)
    world.decode(2)
    return list(world.tokens.values())


@needs_triton
@pytest.mark.parametrize("make", [make_llama, make_gemma2])
def test_tokens_are_those_of_the_cpu_with_graphs_and_without(make: Any, tmp_path: Path) -> None:
    make(tmp_path)
    expected = spoken(EngineWorld(tmp_path, attention="torch_native"))  # which refuses near-ties

    assert spoken(Tokens(tmp_path, attention="triton", device=DEVICE)) == expected
    assert spoken(Tokens(tmp_path, attention="triton", device=DEVICE, **GRAPHS)) == expected


@needs_cuda
def test_auto_is_triton_where_it_is_installed(tmp_path: Path) -> None:
    make_llama(tmp_path)

    assert "TritonAttention, decoding by CUDA graphs" in EngineWorld(tmp_path, device=DEVICE, **GRAPHS).engine.kernels


@needs_cuda
def test_bf16_is_as_far_from_the_truth_as_that_of_transformers(tmp_path: Path) -> None:
    theirs, tokens = make_llama(tmp_path), prompt_of(150)
    truth = reference_logits(theirs, tokens)[-1]
    rounded = theirs.to(DEVICE, torch.bfloat16)
    with torch.inference_mode():
        cost = relative_error(rounded(torch.tensor([tokens], device=DEVICE)).logits[0, -1].float().cpu(), truth)
    world = EngineWorld(tmp_path, device=DEVICE, dtype="bfloat16")

    world.prefill(request := world.add(tokens), chunk=64)

    assert relative_error(world.logits[request].cpu(), truth) < ALMOST * cost


@needs_cuda
def test_a_server_says_the_same_with_graphs_and_without_and_its_lines_say_which() -> None:
    said = []
    for flags, word in (([], "True"), (["--disable-cuda-graph"], "False")):
        with cluster(unified=True, flags=["--device", DEVICE, *flags]) as it:
            server = it.unified
            assert server is not None
            said.append(server.generate("Tom has 3 apples.", max_new_tokens=50, sampling_params={"ignore_eos": True}))
            eventually(lambda server=server, word=word: f"cuda graph: {word}, gen " in server.log)

    assert said[0]["text"] == said[1]["text"]
