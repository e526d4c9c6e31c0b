"""What the bundled model was shown beside its templates: everyday questions, calls of a calculator, JSON."""

import itertools
import json
import re
from pathlib import Path

import pytest

from mini_scripts import script
from tandem.server.api.tokenizer import environment

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "src" / "tandem" / "bundled" / "mini"
SAMPLE_SIZE = 10_000
CHAIN = re.compile(r"\d+(?: [-+*/=] \d+)+")


everyday, problems, rows, calculator = map(script, ("everyday", "problems", "rows", "calculator"))


@pytest.fixture(scope="module")
def sample() -> list:
    return list(itertools.islice(everyday.generate(11), SAMPLE_SIZE))


def test_answers_of_everyday_questions_are_their_expressions_and_every_equality_holds(sample: list) -> None:
    for problem in sample:
        assert calculator.value_of(problem.expression) == int(problem.answer), problem
        *lines, last = problem.worked.split("\n")
        assert last == f"#### {problem.answer}"
        for line in lines:
            (chain,) = CHAIN.findall(line)
            assert len({calculator.value_of(part) for part in chain.split(" = ")}) == 1, (problem, line)


def test_everyday_questions_are_of_many_kinds_and_hardly_one_comes_twice(sample: list) -> None:
    assert {problem.template for problem in sample} == {make.__name__ for _, make in everyday.STORIES}
    assert len({problem.question for problem in sample}) > 0.98 * SAMPLE_SIZE
    numbers = [int(number) for problem in sample for number in re.findall(r"\d+", problem.question + problem.worked)]
    assert max(numbers) <= problems.MAX_VALUE
    assert sum(number <= 20 for number in numbers) > len(numbers) / 3


def test_no_training_question_is_held_out_or_a_newcomers() -> None:
    asked = [json.loads(line) for line in everyday.NEWCOMER.read_text().splitlines()]
    assert len({row["question"] for row in asked}) == 100
    assert all(str(int(row["answer"])) == row["answer"] for row in asked)
    newcomers = {row["question"].lower() for row in asked}
    for problem in itertools.islice(everyday.train_problems(3), SAMPLE_SIZE):
        assert not problems.is_held_out(problem.question)
        assert problem.question.lower() not in newcomers


def test_a_newcomers_question_that_the_generator_makes_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = next(everyday.train_problems(3))
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"question": first.question.upper(), "answer": first.answer}))
    monkeypatch.setattr(everyday, "NEWCOMER", asked)
    assert next(everyday.train_problems(3)) != first


def test_rows_with_a_calculator_are_what_the_template_renders() -> None:
    """A training row is the prompt of a server, token by token, or the model would meet something new there."""
    template = environment().from_string(json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"])
    maker = rows.RowMaker(5)
    rendered = 0
    while rendered < 50:
        head, turn = "".join(text for text, _ in maker.tools()), maker.tool_turn()
        if len(turn) < 6:  # small talk
            continue
        rendered += 1
        system, _, told = head.removeprefix("<|im_start|>system\n").rpartition("<tools>\n")
        call = json.loads(turn[3][0].partition("\n")[2].partition("\n")[0])
        result = turn[4][0].partition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
        messages = [{"role": "system", "content": system.removesuffix("\n")}] if system else []
        messages += [
            {"role": "user", "content": turn[1][0]},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": result},
        ]
        tools = [json.loads(told.partition("\n")[0])]
        prompt = template.render(messages=messages, tools=tools, add_generation_prompt=True)
        assert prompt == head + "".join(text for text, _ in turn[:-1])
        assert calculator.answer(call["arguments"]["expression"]) == turn[-1][0][5:].removesuffix("<|im_end|>")


def test_json_on_request_is_an_object_with_the_answer() -> None:
    maker = rows.RowMaker(6)
    for _ in range(300):
        question, reply = maker.json_request()
        found = json.loads(reply)
        assert "JSON" in question or "json" in question or "{" in question
        assert isinstance(found.pop("answer"), int)
        assert set(found) <= {"steps"}
