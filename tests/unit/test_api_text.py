"""Stop strings: where the text is cut, and that grouping of tokens does not matter."""

import codecs

import pytest
from api_fakes import END, Script, ids, sse, tokenizer, world
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.commands import FinishReason
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


# the end of a stream


def test_a_stop_string_that_the_last_flush_completes_leaves_nothing_of_it() -> None:
    """The bytes of a character that is never completed become U+FFFD at the end only."""
    text = stream(stops=("x�",))
    assert [text.feed([token]) for token in ids("axé")[:-1]] == ["a", "", ""]
    assert (text.finish(is_stopped=False), text.matched) == ("", "x�")


def test_of_two_stop_strings_the_longer_one_may_be_completed_by_the_last_flush() -> None:
    text = stream(stops=("abx", "b�"))
    assert text.feed(ids("abé")[:-1]) + text.finish(is_stopped=False) == "a"
    assert text.matched == "b�"


def test_a_stop_token_that_was_none_may_complete_a_stop_string() -> None:
    text = stream(stops=("b</",))
    assert text.feed([*ids("ab"), END]) + text.finish(is_stopped=False) == "a"
    assert (text.matched, text.num_tokens) == ("b</", 3)


PIECES = [*ids("ab"), END, *ids("é")]  # also halves of a character, in any order
ANY_STOPS = st.lists(st.text("abé�</", min_size=1, max_size=3), max_size=2)


def certain(tokens: list[int]) -> str:
    """Text that no further token can change: no last stop token, no half of a character."""
    tokens = tokens[:-1] if tokens[-1:] == [END] else tokens
    data = b"".join(tokenizer().token_bytes(token) for token in tokens)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


class Reference:
    """What a client may see of a sample, said plainly: all tokens are there, and the text is looked at once per token.

    `is_stopped`: the node ended it at a stop token, which then is the last one.
    """

    def __init__(self, tokens: list[int], stops: list[str], *, keeps: bool, min_tokens: int, is_stopped: bool) -> None:
        ends_at_token = is_stopped and tokens[-1:] == [END]
        shown = tokens if keeps or not ends_at_token else tokens[:-1]
        self.text = tokenizer().decode(shown, skip_special_tokens=False)
        self.matched: str | int | None = END if ends_at_token else None
        if min_tokens > len(tokens):
            return
        begin = len(certain(tokens[: max(min_tokens - 1, 0)]))  # what was shown before stop strings were looked for
        found, match = cut(self.text[begin:], stops, keeps)
        if match is not None:
            self.text, self.matched = self.text[:begin] + found, match


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.sampled_from(PIECES), max_size=16),
    others=ANY_STOPS,
    at=st.none() | st.tuples(st.integers(0, 16), st.integers(1, 3)),
    last=st.integers(0, 3),
    keeps=st.booleans(),
    min_tokens=st.sampled_from((0, 0, 0, 1, 3)),
    is_stopped=st.booleans(),
    sizes=st.lists(st.integers(1, 5), min_size=16, max_size=16),
)
def test_what_is_shown_is_the_reference_however_the_tokens_come(
    tokens: list[int],
    others: list[str],
    at: tuple[int, int] | None,
    last: int,
    keeps: bool,
    min_tokens: int,
    is_stopped: bool,
    sizes: list[int],
) -> None:
    """Streamed or whole, in any chunks: no stop string is shown, nor its beginning once it is complete."""
    whole = tokenizer().decode(tokens, skip_special_tokens=False)
    found = "" if at is None else whole[at[0] :][: at[1]]  # most stop strings that are drawn are in no text
    stops = [stop for stop in (found, whole[len(whole) - last :], *others) if stop]
    reference = Reference(tokens, stops, keeps=keeps, min_tokens=min_tokens, is_stopped=is_stopped)
    for chunks in ([len(tokens)], [1] * len(tokens), sizes):
        text = TextStream(
            detokenizer(tokenizer(), skip_special_tokens=False),
            stops=tuple(stops),
            stop_tokens=frozenset({END}),
            keeps_stop=keeps,
            min_tokens=min_tokens,
        )
        shown, position = "", 0
        for size in chunks:
            shown += text.feed(tokens[position : position + size])
            position += size
            assert reference.text.startswith(shown), "nothing is taken back"
        if not isinstance(text.matched, str):
            shown += text.finish(is_stopped=is_stopped)
        assert (shown, text.matched) == (reference.text, reference.matched)
        if isinstance(text.matched, str) and not keeps and min_tokens <= 1:
            assert not any(stop in shown for stop in stops)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_an_answer_that_is_cut_for_its_length_hides_the_stop_string_at_its_end(path: str) -> None:
    w = world(lambda request, payload: Script(ids("axé"), reason=FinishReason.LENGTH))
    body = {"prompt": "y", "max_tokens": 3, "stop": ["x�"]}
    if path == "/generate":
        body = {"text": "y", "sampling_params": {"max_new_tokens": 3, "stop": ["x�"]}}
    with w.http() as http:
        whole = http.post(path, json=body).json()
        events = sse(http.post(path, json=body | {"stream": True}).text)
    if path == "/generate":
        finish = {"type": "stop", "matched": "x�"}
        assert [(found["text"], found["meta_info"]["finish_reason"]) for found in (whole, events[-1])] == [
            ("a", finish),
            ("a", finish),
        ]
        assert all(event["text"] == "a" for event in events)
    else:
        (choice,) = whole["choices"]
        assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("a", "stop", "x�")
        assert "".join(event["choices"][0]["text"] for event in events) == "a"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
