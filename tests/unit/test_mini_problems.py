"""The bundled model's problem generator: determinism, split, arithmetic, and the shipped directory."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import operator
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL_DIRECTORY = ROOT / "src" / "tandem" / "bundled" / "mini"
SAMPLE_SIZE = 20_000
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
CHAIN = re.compile(r"\d+(?: [-+*/=] \d+)+")


def _load(path: Path) -> ModuleType:
    """Import a script by path; it is registered first because dataclasses look their module up by name."""
    spec = importlib.util.spec_from_file_location("mini_problems", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


problems = _load(ROOT / "models" / "mini" / "problems.py")


@pytest.fixture(scope="module")
def sample() -> list:
    return list(itertools.islice(problems.generate(11), SAMPLE_SIZE))


@pytest.fixture(scope="module")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))


def _value(text: str) -> int:
    """Value of an integer expression whose divisions are exact."""
    value = _computed(ast.parse(text, mode="eval").body)
    assert value == int(value)
    return int(value)


def _computed(node: ast.expr) -> float:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        assert isinstance(node.op, ast.USub)
        return -_computed(node.operand)
    assert isinstance(node, ast.BinOp)
    return OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right))


def test_same_seed_gives_the_same_problems():
    first = list(itertools.islice(problems.generate(3), 200))
    assert first == list(itertools.islice(problems.generate(3), 200))
    assert first != list(itertools.islice(problems.generate(4), 200))


def test_there_are_at_least_eight_templates(sample):
    counts = Counter(problem.template for problem in sample)
    assert set(counts) == set(problems.TEMPLATES)
    assert len(counts) >= 8
    assert min(counts.values()) > SAMPLE_SIZE / len(counts) / 2


def test_train_and_held_out_questions_are_disjoint():
    train = {problem.question for problem in itertools.islice(problems.train_problems(5), 5000)}
    held_out = {problem.question for problem in problems.held_out_problems(5, 300)}
    assert len(held_out) == 300
    assert not train & held_out
    assert all(problems.is_held_out(question) for question in held_out)
    assert not any(problems.is_held_out(question) for question in train)


def test_answers_match_the_expression_recomputed(sample):
    for problem in sample:
        assert _value(problem.expression) == int(problem.answer), problem


def test_expression_uses_only_numbers_of_the_question(sample):
    constants = {"hours_and_minutes": {"60"}, "fence_around_garden": {"2"}, "half_then_more": {"2"}}
    for problem in sample:
        used = set(re.findall(r"\d+", problem.expression)) - constants.get(problem.template, set())
        assert used <= set(re.findall(r"\d+", problem.question)), problem


def test_every_equality_of_the_worked_answer_holds(sample):
    for problem in sample:
        *lines, last = problem.worked.split("\n")
        assert 2 <= len(lines) <= 4
        assert last == f"#### {problem.answer}"
        assert problems.extract_answer(problem.worked) == problem.answer
        for line in lines:
            chain = CHAIN.search(line).group()
            assert len({_value(part) for part in chain.split(" = ")}) == 1, (problem, line)
        assert chain.endswith(f" {problem.answer}")


def test_numbers_stay_in_range(sample):
    for problem in sample:
        numbers = [int(number) for number in re.findall(r"\d+", f"{problem.question} {problem.worked}")]
        assert max(numbers) <= problems.MAX_VALUE


def test_no_constant_answer_scores_well(sample):
    counts = Counter(problem.answer for problem in sample)
    assert len(counts) > 500
    assert counts.most_common(1)[0][1] < 0.02 * len(sample)


def test_worked_answers_have_the_promised_token_count(sample, tokenizer):
    lengths = [len(tokenizer.encode(problem.worked).ids) for problem in sample[:3000]]
    assert min(lengths) >= 20
    assert max(lengths) <= 150


@pytest.mark.parametrize("text", ["12 + 345 = 357", "héllo 世界 🙂\r\n\t  two  spaces ", "\x00\x7f ﷽ e\u0301", " "])
def test_tokenizer_round_trips_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_digit_is_its_own_token(tokenizer):
    assert [t for t in tokenizer.encode("a907 55").tokens if t.isdigit()] == list("90755")
    assert not [token for token in tokenizer.get_vocab() if len(token) > 1 and any(c.isdigit() for c in token)]


def test_shipped_configuration():
    config = json.loads((MODEL_DIRECTORY / "config.json").read_text())
    assert config["num_hidden_layers"] in (4, 8)
    for key in ("num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert config[key] % 4 == 0
    assert config["max_position_embeddings"] >= 8192


def test_shipped_directory_is_small():
    assert sum(path.stat().st_size for path in MODEL_DIRECTORY.rglob("*") if path.is_file()) <= 8_000_000


def test_shipped_held_out_problems_are_held_out():
    lines = (MODEL_DIRECTORY / "heldout.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 500
    assert len({record["question"] for record in records}) == 500
    for record in records:
        assert set(record) == {"question", "answer"}
        assert problems.is_held_out(record["question"])
        assert str(int(record["answer"])) == record["answer"]
