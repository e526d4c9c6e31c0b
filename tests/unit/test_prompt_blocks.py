"""What the router hashes of a body: its beginning and no other part, by who asks."""

from typing import Any

import pytest

from tandem.server.router.prompt_blocks import BLOCK_BYTES, HASH_BYTES, MAX_BLOCKS, PromptBlocks

BLOCKS_OF = PromptBlocks(b"secret")
LONG = "a long beginning that is the same in every turn " * 10


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def num_shared(left: dict[str, Any], right: dict[str, Any], key: str = "", other_key: str = "") -> int:
    pairs = zip(BLOCKS_OF(left, key), BLOCKS_OF(right, other_key), strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(map(len, blocks(left, right))))


def blocks(*bodies: dict[str, Any]) -> list[tuple[bytes, ...]]:
    return [BLOCKS_OF(body, "") for body in bodies]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"messages": said(LONG)}, {"messages": said(LONG, "an answer", "a question")}),
        ({"system": LONG, "messages": said("a")}, {"system": LONG, "messages": said("b")}),
        ({"prompt": LONG}, {"prompt": LONG + "more"}),
        ({"prompt": [LONG, "another"]}, {"prompt": LONG + "more"}),
        ({"text": LONG}, {"text": LONG + "more"}),
        ({"input_ids": list(range(500))}, {"input_ids": [*range(500), 7]}),
        ({"input_ids": [list(range(500)), [1]]}, {"input_ids": list(range(500))}),
        ({"input": LONG}, {"input": LONG + "more"}),
    ],
)
def test_what_goes_on_shares_all_blocks_but_the_last(before: dict[str, Any], after: dict[str, Any]) -> None:
    (first, _) = blocks(before, after)
    assert len(first) > 2
    assert num_shared(before, after) >= len(first) - 1


@pytest.mark.parametrize(
    ("body", "other"),
    [
        ({"prompt": LONG}, {"prompt": "x" + LONG}),
        ({"messages": said(LONG)}, {"messages": said(LONG), "tools": [{"name": "f"}]}),
        ({"prompt": LONG}, {"prompt": LONG, "cache_salt": "s"}),
        ({"prompt": LONG}, {"prompt": LONG, "extra_key": "s"}),
    ],
)
def test_another_beginning_shares_none(body: dict[str, Any], other: dict[str, Any]) -> None:
    assert num_shared(body, other) == 0


def test_what_is_no_part_of_the_prompt_changes_nothing() -> None:
    body = {"messages": said(LONG)}
    assert BLOCKS_OF(body, "") == BLOCKS_OF(body | {"temperature": 1, "stream": True, "rendered_at": 7}, "")


def test_nobody_shares_with_another_key_or_another_router() -> None:
    body = {"prompt": LONG}
    assert num_shared(body, body, "mine", "yours") == 0
    assert BLOCKS_OF(body, "mine")[0] != PromptBlocks(b"other")(body, "mine")[0]


def test_blocks_are_short_and_bounded() -> None:
    found = BLOCKS_OF({"prompt": "x" * (BLOCK_BYTES * MAX_BLOCKS * 2)}, "")
    assert (len(found), {len(block) for block in found}) == (MAX_BLOCKS, {HASH_BYTES})
    assert BLOCKS_OF({"prompt": "short"}, "") == ()
