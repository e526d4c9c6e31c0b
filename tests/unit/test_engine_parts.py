"""Small parts of the engine by themselves: rotary frequencies, tiles, the tokens and hashes of a request."""

from array import array

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.batch_tables import PlanError
from tandem.core.values import PageId
from tandem.engine.layers.activation import Activation, gelu_tanh_and_mul, silu, silu_and_mul
from tandem.engine.layers.rotary import BLOCK_POSITIONS, RotaryTable, inverse_frequencies
from tandem.engine.native import library
from tandem.engine.rope_config import RopeConfig
from tandem.engine.rows import TILE_ROWS, tile_places
from tandem.engine.sequence import EngineSequence
from tandem.pagehash import prompt_hashes
from tandem.sampling import Payload, SamplingParams

HEAD_DIM = 32
ROOT = bytes(16)

SCALINGS: dict[str, dict] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn, betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 12.0,
        "beta_slow": 2.0,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "truncate": False,
    },
    "yarn, empty ramp": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 0.8,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_transformers(scaling: str) -> None:
    given = {**SCALINGS[scaling], "rope_theta": 5000.0}
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=1024, rope_parameters=dict(given)
    )
    theirs, their_scale = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, torch.device("cpu"))

    ours, scale = inverse_frequencies(
        RopeConfig(kind=given["rope_type"], theta=5000.0, parameters=given), head_dim=HEAD_DIM
    )

    torch.testing.assert_close(ours, theirs)
    assert scale == pytest.approx(their_scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [10, 2752, 11008, 40001])
def test_a_gate_of_one_tile_does_not_show_the_number_of_threads(features: int, dtype: torch.dtype) -> None:
    x = torch.linspace(-9, 9, TILE_ROWS * features).view(TILE_ROWS, features).to(dtype)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 5, 7):
            torch.set_num_threads(threads)
            results.append(silu(x.clone()))
    finally:
        torch.set_num_threads(before)

    assert all(torch.equal(results[0], other) for other in results[1:])
    torch.testing.assert_close(results[0], torch.nn.functional.silu(x))


@pytest.mark.parametrize("activation", [silu_and_mul, gelu_tanh_and_mul])
@pytest.mark.parametrize("rows", [1, TILE_ROWS])
def test_a_gate_that_workers_share_is_what_one_computes(
    activation: Activation, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of the features each of them has."""
    monkeypatch.setattr(library, "fitting", lambda *tensors: None)
    gate, up = torch.linspace(-9, 9, rows * 300).view(rows, 300), torch.ones(rows, 300)
    whole = activation(gate.clone(), up)
    for width in (48, 75, 100, 150):
        parts = [activation(part.clone(), torch.ones_like(part)) for part in gate.split(width, dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), whole)


def test_a_rotary_table_that_grows_keeps_its_answers() -> None:
    def table() -> RotaryTable:
        rope = RopeConfig(kind="default", theta=1e4, parameters={})
        return RotaryTable(rope, head_dim=HEAD_DIM, dtype=torch.float32, device="cpu")

    positions = torch.tensor([0, 7, BLOCK_POSITIONS - 1])
    growing = table()
    before = growing.at(positions, last_position=BLOCK_POSITIONS - 1)
    last = 3 * BLOCK_POSITIONS
    growing.at(torch.tensor([last]), last_position=last)
    at_once = table().at(torch.tensor([*positions.tolist(), last]), last_position=last)

    for early, late, whole in zip(before, growing.at(positions, last_position=last), at_once, strict=True):
        assert torch.equal(early, late)
        assert torch.equal(early, whole[:3])


def test_a_token_sits_in_the_row_of_its_position_and_alone() -> None:
    positions = np.array([0, 16, 5, 5, 21, 3, 15, 100, 5])

    places, num_rows = tile_places(positions)

    assert (places % TILE_ROWS == positions % TILE_ROWS).all()
    assert len(set(places.tolist())) == len(positions)
    assert places.max() < num_rows == 4 * TILE_ROWS, "four tokens share row 5"


def test_an_aligned_span_fills_its_tiles_in_order() -> None:
    places, num_rows = tile_places(np.arange(32, 80))

    assert places.tolist() == list(range(48))
    assert num_rows == 48


def sequence_of(prompt: list[int], **params: float) -> EngineSequence:
    payload = Payload(1, array("i", prompt).tobytes(), SamplingParams(**params), ROOT)
    return EngineSequence.of(payload, page_size=4)


def test_tokens_that_are_sampled_anew_have_new_hashes() -> None:
    sequence = sequence_of([1, 2, 3])
    for token in (4, 5, 6, 7, 8, 9):
        sequence.append(token)
    sequence.take_hashes(9)

    sequence.cut(6)
    for token in (70, 80, 90):
        sequence.append(token)

    assert sequence.take_hashes(9) == prompt_hashes(ROOT, [1, 2, 3, 4, 5, 6, 70, 80], page_size=4)[1:]


def test_tokens_that_are_sampled_anew_no_longer_count_for_penalties() -> None:
    sequence = sequence_of([1, 1], frequency_penalty=1.0)
    for token in (5, 6, 5):
        sequence.append(token)

    sequence.cut(4)

    assert sequence.history is not None
    counts = dict(zip(sequence.history.ids, sequence.history.counts, strict=True))
    assert counts == {1: 0, 5: 1, 6: 1}


def test_a_prompt_is_never_cut() -> None:
    with pytest.raises(PlanError):
        sequence_of([1, 2, 3]).cut(2)


def test_a_page_table_has_no_gaps() -> None:
    sequence = sequence_of([1])
    sequence.set_pages(0, [PageId(7), PageId(8), PageId(9)])
    sequence.set_pages(1, [PageId(5)])

    assert sequence.pages == [7, 5]
    with pytest.raises(PlanError, match="cannot be cut to 3"):
        sequence.set_pages(3, [PageId(1)])
