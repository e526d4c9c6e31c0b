"""Two servers that cannot exchange KV: the user is told in which field they differ."""

import pytest

from core_driver import World, assert_nothing_is_held
from tandem.core.disagg.layout_check import differences
from tandem.core.events import PeerLearned
from tandem.core.values import Cause

FIELDS = {"dtype": "bfloat16", "page_size": "16", "weights": "a" * 64}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"page_size": "32"}, "page_size is 16 at prefill and 32 at decode"),
        (
            {"page_size": "32", "dtype": "float32"},
            "dtype is bfloat16 at prefill and float32 at decode; page_size is 16 at prefill and 32 at decode",
        ),
        ({"weights": "b" * 64}, f"weights is {'a' * 16}... at prefill and {'b' * 16}... at decode"),
        ({"heads": "8"}, "heads is not told at prefill and 8 at decode"),
    ],
)
def test_every_field_that_differs_is_named_with_both_values(changes: dict[str, str], words: str) -> None:
    assert differences(FIELDS, FIELDS | changes, them="prefill", us="decode") == words


def test_the_request_ends_with_the_field_in_its_error() -> None:
    world = World()
    prefill, decode = world.prefill(layout="a"), world.decode(layout="b")
    decode.holds.add(PeerLearned)
    left, right = world.pair(prefill, decode)
    world.run()
    decode.held.clear()
    decode.holds.clear()
    world.send(decode, PeerLearned(prefill.address, prefill.name, "a", "page_size is 16 at prefill and 32 at decode"))
    world.run()
    assert decode.cause(right) is Cause.LAYOUT_MISMATCH
    assert decode.ended[right].detail == "page_size is 16 at prefill and 32 at decode"
    assert prefill.cause(left) is Cause.LAYOUT_MISMATCH
    later = world.submit(decode, room=world.room(), peer=prefill.address)
    world.run()
    assert decode.ended[later].detail == decode.ended[right].detail, "what was learned is remembered"
    assert_nothing_is_held([prefill, decode])
