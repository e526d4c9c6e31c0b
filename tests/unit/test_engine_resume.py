"""A request whose answer was begun elsewhere draws what it would have drawn there."""

from array import array
from collections.abc import Iterable

import torch

from tandem.engine.sampler import Draw, sample
from tandem.engine.sequence import EngineSequence
from tandem.sampling import Payload, SamplingParams

PROMPT, SAID, LATER = [1, 1, 7], [5, 6, 5, 7], [6, 8]
PARAMS = SamplingParams(
    temperature=0.8, seed=9, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3, min_tokens=6
)


class Followed:
    """In place of a matcher: what it was told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def restart(self, outputs: Iterable[int]) -> None:
        self.tokens = list(outputs)

    def accept(self, token: int) -> None:
        self.tokens.append(token)

    def allowed(self) -> bytes:
        return b"\xff" * 4


def sequence_of(tokens: list[int], num_said: int) -> tuple[EngineSequence, Followed]:
    matcher = Followed()
    payload = Payload(1, array("i", tokens).tobytes(), PARAMS, bytes(32), num_said=num_said)
    return EngineSequence.of(payload, page_size=4, matcher=matcher), matcher  # type: ignore[arg-type]  # a fake one


def test_counts_grammar_and_positions_begin_with_what_was_said() -> None:
    whole, followed = sequence_of(PROMPT, 0)
    for token in SAID:
        whole.append(token)
    rest, followed_on = sequence_of([*PROMPT, *SAID], len(SAID))
    logits = torch.randn((1, 32), generator=torch.Generator().manual_seed(3))
    for token in (*LATER, 9):
        ours, theirs = rest.draw(), whole.draw()
        assert counts(ours) == counts(theirs)
        assert (ours.position, ours.num_outputs) == (theirs.position, theirs.num_outputs)
        assert sample(logits, [ours], eos_ids=[2]).tokens == sample(logits, [theirs], eos_ids=[2]).tokens
        assert followed_on.tokens == followed.tokens
        rest.append(token)
        whole.append(token)


def test_what_is_sampled_anew_leaves_what_was_said() -> None:
    rest, followed = sequence_of([*PROMPT, *SAID], len(SAID))
    before = counts(rest.draw())
    for token in LATER:
        rest.append(token)
    rest.cut(len(PROMPT) + len(SAID))
    assert counts(rest.draw()) == before
    assert followed.tokens == SAID


def counts(draw: Draw) -> dict[int, int]:
    assert draw.history is not None
    return dict(zip(draw.history.ids, draw.history.counts, strict=True))
