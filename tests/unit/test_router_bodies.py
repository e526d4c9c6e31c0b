"""What the router makes of a client's body: its own fields in place of the client's, everything else as it was."""

from typing import Any

import msgspec
import pytest

from tandem.server.api.errors import Refusal
from tandem.server.router.shell import encode_rest, with_fields


@pytest.mark.parametrize("body", [{}, {"a": 1}, {"bootstrap_room": 7, "timeout": 2}, {"a": [1], "b": {"c": None}}])
def test_own_fields_take_the_place_of_those_that_came(body: dict[str, Any]) -> None:
    own = {"bootstrap_room": 5, "timeout": 1.5}
    assert msgspec.json.decode(with_fields(own, encode_rest(body))) == body | own


def test_what_can_be_read_but_not_written_is_refused_before_anything_begins() -> None:
    body: dict[str, object] = {}
    for _ in range(100_000):
        body = {"x": body}
    with pytest.raises(Refusal) as found:
        encode_rest(body)
    assert found.value.failure.code == "invalid_json"
