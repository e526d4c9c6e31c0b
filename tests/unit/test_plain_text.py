"""What a model says is shown without what a terminal would obey, however it is torn into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cli.plain_text import MOST_HELD, PlainText, plain

HOSTILE = "a\x1b]0;title\x07b\x1b]2;title\x1b\\c\x1b[31;1md\x9b2Je\x9d8;;url\x9cf\x1bPq\x1b\\g\x1b(Bh\x1bci\r\nj\tk\x08"


def test_sequences_go_whole_and_text_stays() -> None:
    assert plain(HOSTILE) == "abcdefghi\nj\tk"
    assert plain("süß 日本 👩‍👩‍👧 עברית") == "süß 日本 👩‍👩‍👧 עברית"


@pytest.mark.parametrize("text", ["\x1b]0;never ends\nb", "\x1bP never ends\nb", "a\x1b\nb"])
def test_what_only_begins_as_a_sequence_is_text_without_its_escape(text: str) -> None:
    assert plain(text).endswith("\nb")
    assert plain(text).isprintable() or "\n" in plain(text)


def test_an_answer_is_not_swallowed_by_a_sequence_that_never_ends() -> None:
    text = PlainText()
    assert "".join(text.feed("x" * 100) for _ in ["\x1b]0;", *range(100)]) != ""
    text.feed("\x1b]0;")
    assert len("".join(text.feed("x" * 100) for _ in range(100))) > 100 * 100 - MOST_HELD


ALPHABET = st.sampled_from("\x1b\x9b\x9d\x9c\x07\\[]P0;m(ab\n")


@given(st.lists(st.text(ALPHABET, max_size=4)))
def test_no_control_comes_through_and_pieces_give_what_the_whole_gives(pieces: list[str]) -> None:
    text = PlainText()
    shown = "".join(map(text.feed, pieces))
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert shown == plain("".join(pieces))
