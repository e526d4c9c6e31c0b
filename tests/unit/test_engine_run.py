"""What one batch of the engine does to its KV memory, beside the tokens that it says."""

from array import array
from pathlib import Path

import tandem
from tandem.core.batch import BatchKind, BatchPlan, Join, Row
from tandem.core.values import BatchId, PageId, RequestId
from tandem.engine.engine import Engine
from tandem.engine.weights import load
from tandem.sampling import Payload, SamplingParams

MODEL = Path(tandem.__file__).parent / "bundled" / "mini"
PAGE_SIZE = 8
REQUEST = RequestId(1)
STRANGE = 7.0  # what another request has left


def test_pages_that_a_request_writes_first_show_nothing_of_who_had_them_before() -> None:
    engine = Engine(load(MODEL), page_size=PAGE_SIZE, num_pages=4)
    kv = engine.kv.tensor  # page, head, layer, key and value, slot
    kv.fill_(STRANGE)
    prompt = array("i", range(20, 33))
    engine.add(Payload(REQUEST, prompt.tobytes(), SamplingParams(temperature=0.0, ignore_eos=True), bytes(16)))

    row = Row(REQUEST, 0, len(prompt), 0, (PageId(2), PageId(0), PageId(3)), samples=True)
    engine.run(BatchPlan(BatchId(1), 1, BatchKind.PREFILL, rows=(row,)))
    left = len(prompt) - PAGE_SIZE
    assert not (kv[2] == STRANGE).any(), "a page that the prompt fills"
    assert kv[0, :, :, :, :left].any()
    assert not kv[0, :, :, :, left:].any(), "the page that it ends in"
    assert (kv[[1, 3]] == STRANGE).all(), "pages that nobody has, or that nothing is written to yet"

    prompt_kv = kv[0, :, :, :, :left].clone()
    for number in range(left, PAGE_SIZE + 1):  # up to the first slot of the next page
        join = (Join(REQUEST, 3, ()),) if number == left else ()
        engine.run(BatchPlan(BatchId(number), number, BatchKind.DECODE, decodes=True, join=join))
    assert (kv[0, :, :, :, :left] == prompt_kv).all(), "what was written stays"
    assert kv[3, :, :, :, 0].any()
    assert not kv[3, :, :, :, 1:].any(), "the page that an answer comes to"
    assert (kv[1] == STRANGE).all()
    engine.close()
