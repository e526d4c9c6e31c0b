"""Stop strings: where the text is cut, and that grouping of tokens does not matter."""

from api_fakes import END, ids, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from tandem.server.api.detokenizer import detokenizer
from tandem.server.api.text import StopScanner, TextStream

TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def cut(text: str, stops: list[str], keeps: bool) -> tuple[str, str | None]:
    """What the scanner should do, said plainly: the first end of a stop string, the earliest start for it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if keeps else end - len(stop)], stop
    return text, None


@given(text=TEXTS, stops=STOPS, keeps=st.booleans(), sizes=st.lists(st.integers(1, 5), min_size=30, max_size=30))
def test_grouping_does_not_change_where_the_text_is_cut(text, stops, keeps, sizes) -> None:
    scanner = StopScanner(stops, keeps=keeps)
    shown, position = "", 0
    for size in sizes:
        shown += scanner.feed(text[position : position + size])
        position += size
    if scanner.matched is None:
        shown += scanner.finish()
    assert (shown, scanner.matched) == cut(text[:position], stops, keeps)


@given(text=TEXTS, stops=STOPS)
def test_nothing_is_shown_that_must_be_taken_back(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops, keeps=False)
    final, _ = cut(text, stops, False)
    shown = ""
    for char in text:
        shown += scanner.feed(char)
        assert final.startswith(shown)


def stream(*, stops: tuple[str, ...] = (), keeps_stop: bool = False) -> TextStream:
    made = detokenizer(tokenizer(), skip_special_tokens=False)
    return TextStream(made, stops=stops, stop_tokens=frozenset({END}), keeps_stop=keeps_stop)


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    text = stream(stops=("xyz",))
    assert [text.feed(ids(char)) for char in "axyaxyz!"] == ["a", "", "", "xya", "", "", "", ""]
    assert (text.matched, text.num_tokens) == ("xyz", 7)


def test_a_held_back_beginning_is_shown_when_nothing_follows() -> None:
    text = stream(stops=("xyz",))
    assert text.feed(ids("axy")) + text.finish(is_stopped=False) == "axy"


def test_a_stop_token_that_was_not_the_last_one_is_text() -> None:
    text = stream()
    assert text.feed([*ids("a"), END]) == "a"
    assert text.feed(ids("b")) == "</s>b"
    assert text.finish(is_stopped=True) == ""
    assert text.matched is None


def test_a_stop_token_at_the_end_is_named_and_left_out() -> None:
    text = stream()
    assert text.feed([*ids("a"), END]) + text.finish(is_stopped=True) == "a"
    assert text.matched == END


def test_a_last_token_that_did_not_stop_is_shown() -> None:
    text = stream()
    assert text.feed([*ids("a"), END]) + text.finish(is_stopped=False) == "a</s>"
    assert text.matched is None


def test_an_unfinished_character_is_shown_as_such_at_the_end() -> None:
    text = stream()
    assert text.feed(ids("é")[:1]) == ""
    assert text.finish(is_stopped=False) == "�"
