"""Everyday questions of one to three steps, put together from parts: who, what, how much, which verb, which question.

Where ``problems.py`` has fifteen templates whose answers are told in words, a question here is a few clauses that are
drawn and joined independently, in present or past, as statements, with "if", in lower case or without a last mark. The
worked answer is short and the same for every wording. Split by the same hash of the question.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import problems
from problems import Problem
from stories_counts import changes, comings_and_goings, comparison, parts, rest_of_a_whole
from stories_groups import equal_groups, known_counts, per_time, sharing
from stories_measures import bare, measures
from stories_money import money
from story_parts import Step, Story

STORIES: tuple[tuple[float, Callable[[random.Random], Story]], ...] = (
    (4, changes),
    (2, comings_and_goings),
    (3, parts),
    (2, rest_of_a_whole),
    (3, comparison),
    (4, equal_groups),
    (3, sharing),
    (4, money),
    (3, per_time),
    (2, measures),
    (1, known_counts),
    (2, bare),
)
"""Each kind of story with how often it is drawn."""
NEWCOMER = Path(__file__).with_name("newcomer.jsonl")
"""Questions that were written before this generator and not by it; no training question is one of them."""
WARM_UP = ("Hi", "Hello", "Hey", "Please help", "Quick question", "Can you help me", "Help")
LEADS = {1: ("It is",), 2: ("First it is", "Then it is"), 3: ("First it is", "Then it is", "At the end it is")}


def _worked_step(step: Step) -> tuple[str, int]:
    sign, first, second = step
    if sign == "*":
        return problems.multiply(first, second) if first <= 9 else problems.multiply(second, first)
    return {"+": problems.add, "-": problems.subtract, "/": problems.divide}[sign](first, second)


def _joined(rng: random.Random, told: Story) -> str:
    """The clauses and the question as one text."""
    clauses, ask = list(told.clauses), told.ask
    if ask.endswith("= "):
        return ask + rng.choice(("", "?"))
    mark = (
        ""
        if rng.random() < 0.06
        else "?"
        if ask.startswith(("how", "what", "can", "do", "1", "2", "3"))
        else rng.choice(".?")
    )
    kind = rng.random()
    if kind < 0.07 and 1 <= len(clauses) <= 2:
        text = f"if {' and '.join(clauses)}, {ask}{mark}"
    elif kind < 0.12 and clauses:
        text = f"{', '.join(clauses)}, {ask}{mark}"
    elif kind < 0.15 and clauses:
        text = f"{ask}{mark or '?'} {'. '.join(_capital(clause) for clause in clauses)}."
    else:
        text = ""
        while clauses:
            clause = clauses.pop(0)
            if clauses and rng.random() < 0.3:
                clause += f"{rng.choice((' and ', ', and ', ', ', ' and then ', '; '))}{clauses.pop(0)}"
            text += f"{_capital(clause)}{'!' if rng.random() < 0.01 else '.'} "
        text += f"{_capital(ask)}{mark}"
    text = _capital(text)
    if rng.random() < 0.03:
        text = f"{rng.choice(WARM_UP)}{rng.choice((', ', '! ', ': '))}{text}"
    return text.lower() if rng.random() < 0.12 else text


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def make(rng: random.Random) -> Problem:
    """One everyday problem whose numbers all lie in 0..999."""
    while True:
        _, maker = rng.choices(STORIES, [weight for weight, _ in STORIES])[0]
        told = maker(rng)
        worked = [_worked_step(step) for step in told.steps]
        numbers = [n for _, first, second in told.steps for n in (first, second)] + [result for _, result in worked]
        if max(numbers) > problems.MAX_VALUE or any(sign == "*" and min(a, b) > 10 for sign, a, b in told.steps):
            continue
        lines = [f"{lead} {text}." for lead, (text, _) in zip(LEADS[len(worked)], worked, strict=True)]
        result = worked[-1][1]
        text = "\n".join([*lines, f"#### {result}"])
        return Problem(maker.__name__, _joined(rng, told), text, str(result), told.expression)


def generate(seed: int) -> Iterator[Problem]:
    """Endless stream of everyday problems of both sets."""
    rng = random.Random(f"everyday-{seed}")
    while True:
        yield make(rng)


def train_problems(seed: int) -> Iterator[Problem]:
    """Endless stream of training problems: neither held out nor, in any case of letters, one of the newcomer's."""
    asked = {line["question"].lower() for line in map(json.loads, NEWCOMER.read_text().splitlines())}
    return (
        problem
        for problem in generate(seed)
        if not problems.is_held_out(problem.question) and problem.question.lower() not in asked
    )


def held_out_problems(seed: int, count: int) -> list[Problem]:
    """``count`` held-out problems."""
    return list(
        itertools.islice((problem for problem in generate(seed) if problems.is_held_out(problem.question)), count)
    )
