"""Prompt tokens that are shared out among ranks: all of them, once, in order, in runs that are as equal as can be."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from tandem.batch_tables import Sequence, TokenSpan, shared_out
from tandem.core.values import RequestId


def span_of(number: int, start: int, length: int, samples: bool, pools: bool) -> TokenSpan[Sequence]:
    tokens = array("i", [0] * (start + length))
    sequence = Sequence(request=RequestId(number), prompt_len=len(tokens), page_size=4, tokens=tokens, prompt_hash=b"")
    return TokenSpan(sequence, start, start + length, samples, pools)


spans = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=6
).map(lambda drawn: [span_of(number, *one) for number, one in enumerate(drawn)])


def tokens_of(some: list[TokenSpan[Sequence]]) -> list[tuple[int, int]]:
    return [(span.sequence.request, position) for span in some for position in range(span.start, span.stop)]


def ends_of(some: list[TokenSpan[Sequence]]) -> list[tuple[int, int, bool, bool]]:
    """What is wanted behind which token."""
    found = ((span.sequence.request, span.stop, span.samples, span.pools) for span in some)
    return [one for one in found if one[2] or one[3]]


@given(some=spans, num_ranks=st.integers(2, 7))
def test_every_token_has_one_rank_and_ends_stay_where_they_are(some: list[TokenSpan[Sequence]], num_ranks: int) -> None:
    parts = shared_out(some, num_ranks)
    if parts is None:
        assert len(tokens_of(some)) < num_ranks
        return
    assert len(parts) == num_ranks
    joined = [span for part in parts for span in part]
    assert tokens_of(joined) == tokens_of(some)
    assert ends_of(joined) == ends_of(some)
    sizes = [len(tokens_of(part)) for part in parts]
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 1


@given(some=spans)
def test_one_rank_shares_nothing_out(some: list[TokenSpan[Sequence]]) -> None:
    assert shared_out(some, 1) is None
