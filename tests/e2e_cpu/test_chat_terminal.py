"""`tandem chat` on a terminal, in front of a router with fake workers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from router_fakes import Answer, FallSilent, Fleet, Reject, eventually, fleet
from terminal import CTRL_C, CTRL_D, ENTER, PASTE_BEGINS, PASTE_ENDS, UP, Terminal


def said(*pieces: str, tokens: int = 7) -> Answer:
    return Answer(chunks=(*map(event, pieces), usage(tokens), b"data: [DONE]\n\n"))


def event(piece: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': piece}}]})}\n\n".encode()


def usage(tokens: int) -> bytes:
    return f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': tokens}})}\n\n".encode()


@contextmanager
def chat(
    *behaviours: Any, history: Path | str = "off", words: tuple[str, ...] = ()
) -> Iterator[tuple[Terminal, Fleet]]:
    with fleet() as made:
        made.decodes[0].behaves(*behaviours)
        with Terminal("chat", "--url", made.url, "--history", str(history), *words) as terminal:
            terminal.waits()
            yield terminal, made


def questions(made: Fleet) -> list[str]:
    return [seen.body["messages"][-1]["content"] for seen in made.decodes[0].generations]


def test_control_c_stops_an_answer_and_twice_leaves() -> None:
    with chat(FallSilent((event("forty"),)), said("forty", "-two")) as (terminal, made):
        terminal.type("one?" + ENTER)
        terminal.shows("forty")
        terminal.type(CTRL_C)
        terminal.shows("[stopped; first token after")
        eventually(lambda: made.decodes[0].generations[0].is_closed, "the stopped answer closed")
        terminal.waits()
        terminal.type("two?" + ENTER)  # who types on does not leave with the next one
        terminal.shows("forty-two")
        terminal.waits()
        terminal.type("what is not sent" + CTRL_C)
        terminal.waits()
        assert terminal.process.poll() is None
        terminal.type(CTRL_C)
        terminal.shows("Ctrl+C again leaves, and so")
        terminal.waits()
        terminal.type(CTRL_C)
        assert terminal.ends() == 0
        assert questions(made) == ["one?", "two?"]


def test_control_c_again_behind_a_stopped_answer_leaves() -> None:
    with chat(FallSilent((event("forty"),))) as (terminal, _):
        terminal.type("one?" + ENTER)
        terminal.shows("forty")
        terminal.type(CTRL_C)
        terminal.shows("Ctrl+C again leaves")
        terminal.waits()
        terminal.type(CTRL_C)
        assert terminal.ends() == 0


def test_an_answer_comes_with_its_times_in_words_and_the_place_where_its_prompt_was_computed() -> None:
    with chat(said("forty", "-two", tokens=19)) as (terminal, _):
        terminal.type("one?" + ENTER)
        shown = terminal.shows("prefill server]")
        assert "[first token after 0." in shown
        assert "tokens per second, 19 tokens in all, its prompt was computed by a prefill server]" in shown


def test_a_model_cannot_have_the_terminal_do_anything() -> None:
    """Title, clipboard, colours, cursor, clearing: whole, torn over pieces, in both forms, and one that never ends."""
    hostile = said(
        "A\x1b]0;owned\x07B\x1b]2;ow",
        "ned\x1b",
        "\\C\x9d0;owned\x9cD\x1b[31mE\x1b[2J\x1b[H\x9b1mF\r\x08\x7fG\x1b",
        "]52;c;b3duZWQ=\x07H\u202eI\x1bcJ\x1b]0;never ends\nK",
    )
    with chat(hostile, said("fine")) as (terminal, _):
        terminal.type("one?" + ENTER)
        shown = terminal.shows("first token after")
        assert "ABCDEFGHIJ]0;never ends\nK\n" in shown
        assert terminal.screen.title == ""
        assert b"]0;owned" not in terminal.raw
        assert b"\x1b]52" not in terminal.raw
        terminal.waits()
        terminal.type("two?" + ENTER)
        terminal.shows("fine")


def test_a_paste_of_several_lines_is_one_question() -> None:
    with chat(said("yes")) as (terminal, made):
        terminal.type(f"{PASTE_BEGINS}first line\nsecond line\n\nlast line{PASTE_ENDS}")
        terminal.shows("last line")
        assert not questions(made)
        terminal.type(ENTER)
        terminal.shows("yes")
        assert questions(made) == ["first line\nsecond line\n\nlast line"]


def test_a_line_can_be_edited_and_earlier_ones_come_back_after_a_restart(tmp_path: Path) -> None:
    history = tmp_path / "made" / "history"
    with chat(said("yes"), history=history) as (terminal, made):
        terminal.type("wo?\x01t\x05" + ENTER)  # Ctrl+A, Ctrl+E: begin and end of the line
        terminal.shows("yes")
        terminal.waits()
        terminal.type(CTRL_D)
        assert terminal.ends() == 0
        assert questions(made) == ["two?"]
    assert history.stat().st_mode & 0o077 == 0
    with chat(said("again"), history=history) as (terminal, made):
        terminal.type(UP + ENTER)
        terminal.shows("again")
        assert questions(made) == ["two?"]


def test_commands_change_the_conversation_and_are_not_sent(tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with chat(said("yes"), said("no"), said("maybe"), words=("--system", "Be brief.")) as (terminal, made):
        for line, answer in (
            ("/help", "forget the conversation"),
            ("one?", "yes"),
            ("/system Be long.", "system message: Be long."),
            ("two?", "no"),
            (f"/save {saved}", "saved 5 messages in"),
            (f"/save {saved}", "not saved"),
            ("/clear", "forgotten"),
            ("/system off", "system message: none"),
            ("/sistem", "there is no /sistem; did you mean /system?"),
            ("/etc/hosts: what is it?", "maybe"),
        ):
            terminal.type(line + ENTER)
            terminal.shows(answer)
            terminal.waits()
        first, second, third = (
            [message["content"] for message in seen.body["messages"]] for seen in made.decodes[0].generations
        )
        assert first == ["Be brief.", "one?"]
        assert second == ["Be long.", "one?", "yes", "two?"]
        assert third == ["/etc/hosts: what is it?"]
        assert [message["content"] for message in json.loads(saved.read_text())["messages"]] == [*second, "no"]
        terminal.type("/exit" + ENTER)
        assert terminal.ends() == 0


def test_what_a_server_refuses_is_one_plain_line_and_the_conversation_goes_on() -> None:
    with chat(Reject(400, "bad\x1b]0;owned\x07"), said("yes")) as (terminal, made):
        terminal.type("one?" + ENTER)
        terminal.shows("told to")
        terminal.waits()
        assert terminal.screen.title == ""
        terminal.type("two?" + ENTER)
        terminal.shows("yes")
        assert [len(seen.body["messages"]) for seen in made.decodes[0].generations] == [1, 1]
