"""Whole clusters whose clients ask for answers in a form, and what clusters leave on record."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any  # a connection with a number

import pytest

from tandem.server.api.connections import BoundedHttp1
from tandem.server.node.record import records_at
from tandem.simulator.oracle import Violation
from tandem.simulator.whole.clients import Answer, Conduct
from tandem.simulator.whole.forms import FORMS, FormedAsk, Said, check_form
from tandem.simulator.whole.options import RING_FOLDER, draw_options
from tandem.simulator.whole.templates import tokenizer
from tandem.simulator.whole.world import World, run_options, run_seed, violation_of_records

PARSERS = (("hermes", "none"), ("llama3", "qwen3"), ("mistral", "deepseek-r1"))  # of tools, of thoughts
SEEDS = (9, 19, 22)  # nearly all of their requests are answered
FORMED_SEED = 10_113  # prompts that routers look at, too
STOPPED_SEED = 1  # its servers end in the middle of requests
RING_SEED = 7  # a cause of ours, so that server and node leave a record


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    answers: list[Answer] = []
    with pytest.MonkeyPatch.context() as patch:
        for seed, (tools, thoughts) in zip(SEEDS, PARSERS, strict=True):
            options = draw_options(seed)
            flags = {**options.flags, "tool_call_parser": tools, "reasoning_parser": thoughts}
            patch.chdir(tmp_path_factory.mktemp(str(seed)))
            world = World(replace(options, flags=flags, formed=0.9, num_requests=64))
            result = world.run()
            assert not result.invariant, f"{result.line}: {result.detail}"
            answers += [answer for answer in world.answers if answer.error is None]
    return answers


def test_what_another_seed_has_compiled_changes_nothing() -> None:
    """All seeds of a process share one vocabulary, and the grammars in it."""
    tokenizer.cache_clear()
    hashes = [run_seed(FORMED_SEED).log_hash for _ in range(2)]
    assert hashes[0] == hashes[1]


@pytest.mark.slow
def test_answers_in_every_form_are_those_of_one_engine(answered: list[Answer]) -> None:
    found = {(answer.ask.path, answer.ask.form) for answer in answered if isinstance(answer.ask, FormedAsk)}
    assert found == {(path, index) for path, forms in FORMS.items() for index in range(len(forms))}
    rights = [right for answer in answered for right in answer.rights or ()]
    assert {name for right in rights for name, _ in right.calls} == {"weather", "rest"}
    assert any(right.thought for right in rights)
    assert any(right.text for right in rights)


@pytest.mark.slow
def test_an_answer_that_is_another_or_a_call_against_its_schema_is_noticed(answered: list[Answer]) -> None:
    called = next(answer for answer in answered if answer.rights and answer.rights[0].calls)
    (right,) = called.rights
    check_form(called, [right])
    with pytest.raises(Violation, match=r"not \[Said"):
        check_form(called, [replace(right, text=right.text + ".")])
    ask = FormedAsk(1, "/generate", (), "a", 9, False, False, 3.0, Conduct.PATIENT)
    said = Answer(ask, 0, status=200, body=bytearray(b'{"text": "1"}'), is_whole=True)
    with pytest.raises(Violation, match=r"not \[Said"):
        check_form(said, [Said("1", calls=(("weather", {"city": "Bonn", "days": 1}),))])
    called.rights = [replace(right, calls=(("weather", {"city": "Bonn", "days": 1}),))]
    with pytest.raises(Violation, match="weather"):
        check_form(called, called.rights)


@pytest.mark.slow
def test_servers_close_connections_in_the_same_order_whatever_their_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are addresses, so that a set of them yields another order in another process."""
    options = draw_options(STOPPED_SEED)
    flags = {**options.flags, "tool_call_parser": "hermes", "reasoning_parser": "none"}
    options = replace(options, flags=flags, formed=0.8, has_rings=True)
    hashes = set()
    for step in (1, -1):
        monkeypatch.setattr(BoundedHttp1, "__hash__", numbered(count(1 << 20, step)))
        hashes.add(run_options(options).log_hash)
    assert len(hashes) == 1


def numbered(numbers: Iterator[int]) -> Callable[[object], int]:
    """A hash: the next number for each object."""

    def hash_of(connection: Any) -> int:
        if not hasattr(connection, "number"):
            connection.number = next(numbers)
        return connection.number

    return hash_of


def test_a_record_that_is_not_decided_again_as_it_was_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = World(replace(draw_options(RING_SEED), has_rings=True)).run()
    assert not result.invariant, result.detail
    (segment, *_) = [path for record in records_at(Path(RING_FOLDER)) for path in record.segments]
    assert violation_of_records() is None
    data = bytearray(segment.read_bytes())
    for at in range(len(data) // 2, len(data), 64):  # some of it says what was decided, whatever lies where
        data[at] ^= 1
    segment.write_bytes(data)
    assert violation_of_records() is not None
