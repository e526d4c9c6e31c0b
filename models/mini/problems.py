"""Seeded generator of grade-school word problems with worked answers.

Every problem is drawn from one of the templates below. A template picks names, objects, numbers and a phrasing,
and writes the worked answer line by line. The arithmetic is written so that each "=" asks for one small step:

* sums and differences move one place value at a time:   347 + 285 = 547 + 85 = 627 + 5 = 632
* products split the larger factor into tens and ones:   7 * 46 = 280 + 42 = 320 + 2 = 322
* quotients are times-table facts or halves:             84 / 7 = 12

The worked answer is a function of the question alone (there is one way to write each), and its last line is
``#### <integer>``. All quantities are integers in 0..999.

Problems are split into train and held-out sets by a hash of the question text, so no question is ever in both.
Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HELD_OUT_MODULUS = 50
"""One question in this many belongs to the held-out set."""

MAX_VALUE = 999
"""Largest value of any operand, intermediate result or answer."""

NAMES = (
    "Ada", "Alex", "Amir", "Anna", "Ben", "Bella", "Carlos", "Chen", "Clara", "Dan", "Diego", "Ella", "Emma", "Eva",
    "Finn", "Grace", "Hana", "Hugo", "Ines", "Ivan", "Jack", "Jana", "Kofi", "Lena", "Leo", "Lily", "Luca", "Maria",
    "Max", "Mia", "Nina", "Noah", "Nora", "Omar", "Oscar", "Paul", "Priya", "Rosa", "Sam", "Sara", "Tara", "Theo",
    "Tom", "Vera", "Yuki", "Zoe",
)  # fmt: skip

ITEMS = (
    "apples", "balloons", "beads", "books", "buttons", "cards", "coins", "cookies", "cups", "eggs", "flowers",
    "lemons", "marbles", "masks", "nails", "notebooks", "oranges", "pears", "pencils", "pens", "photos", "pins",
    "plates", "plums", "postcards", "ribbons", "rings", "rocks", "seeds", "shells", "spoons", "stamps", "stickers",
    "stones", "tickets", "tiles", "toys",
)  # fmt: skip

GOODS = (
    "bag", "ball", "basket", "belt", "blanket", "book", "cake", "candle", "chair", "clock", "game", "hat", "jacket",
    "kite", "lamp", "mug", "pillow", "plant", "puzzle", "scarf", "shirt", "toy",
)  # fmt: skip

CONTAINERS = ("bags", "baskets", "bins", "boxes", "cartons", "crates", "jars", "packs", "trays")

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True)
class Problem:
    """One word problem."""

    template: str
    """Name of the template that made it."""
    question: str
    """The text a user would send."""
    worked: str
    """The full answer: one line per step, then ``#### <integer>``."""
    answer: str
    """The final integer in decimal."""
    expression: str
    """The same result as a Python integer expression over the question's numbers, for independent checking."""


# --- arithmetic, written out ------------------------------------------------------------------------------------


def _place_values(number: int) -> list[int]:
    """Non-zero place values of ``number``, largest first: 205 -> [200, 5]."""
    digits = str(number)
    values = [int(digit) * 10 ** (len(digits) - 1 - i) for i, digit in enumerate(digits)]
    return [value for value in values if value] or [0]


def _chain(first: int, second: int, sign: int) -> tuple[str, int]:
    """Write ``first ± second`` moving one place value of ``second`` at a time; returns (text, result)."""
    symbol = "+" if sign > 0 else "-"
    text = f"{first} {symbol} {second}"
    for value in _place_values(second):
        first, second = first + sign * value, second - value
        text += f" = {first} {symbol} {second}" if second else f" = {first}"
    return text, first


def add(first: int, second: int) -> tuple[str, int]:
    """Write a sum. The number with more digits goes first, so the moved places line up."""
    if len(str(second)) > len(str(first)):
        first, second = second, first
    return _chain(first, second, 1)


def subtract(first: int, second: int) -> tuple[str, int]:
    """Write a difference; ``first`` must not be smaller than ``second``."""
    return _chain(first, second, -1)


def multiply(digit: int, number: int) -> tuple[str, int]:
    """Write ``digit * number`` for a one-digit and an up to two-digit factor."""
    text = f"{digit} * {number}"
    parts = [digit * value for value in _place_values(number)]
    if len(parts) == 1:
        return f"{text} = {parts[0]}", parts[0]
    sum_text, total = _chain(parts[0], parts[1], 1)
    return f"{text} = {sum_text}", total


def divide(number: int, digit: int) -> tuple[str, int]:
    """Write an exact quotient; templates use facts of the times table up to 12 and halves of two-digit numbers."""
    return f"{number} / {digit} = {number // digit}", number // digit


# --- helpers for templates --------------------------------------------------------------------------------------


def _finish(template: str, question: str, lines: list[str], result: int, expression: str) -> Problem:
    """Assemble a problem from its parts."""
    worked = "\n".join([*lines, f"#### {result}"])
    return Problem(template, question, worked, str(result), expression)


def _two_names(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(NAMES, 2)
    return first, second


def _number(rng: random.Random, low: int, high: int) -> int:
    """An integer in low..high; a wide range gives up to two digits in 40 % of draws, else three."""
    if low < 100 and high >= 200:
        return rng.randint(low, 99) if rng.random() < 0.4 else rng.randint(100, high)
    return rng.randint(low, high)


# --- templates --------------------------------------------------------------------------------------------------

TEMPLATES: dict[str, Callable[[random.Random], Problem]] = {}


def template(function: Callable[[random.Random], Problem]) -> Callable[[random.Random], Problem]:
    """Register a template under its function name."""
    TEMPLATES[function.__name__] = function
    return function


@template
def gain_then_lose(rng: random.Random) -> Problem:
    """a + b - c."""
    name, other = _two_names(rng)
    item = rng.choice(ITEMS)
    a = _number(rng, 12, 600)
    b = _number(rng, 5, MAX_VALUE - a)
    c = _number(rng, 5, a + b - 2)
    question = rng.choice((
        f"{name} has {a} {item}. {name} finds {b} more and then gives {c} to {other}. "
        f"How many {item} does {name} have now?",
        f"{name} starts the week with {a} {item}, collects {b} more and sells {c} of them. "
        f"How many {item} does {name} have at the end?",
        f"{name} had {a} {item} and bought {b} more. Later {name} gave {other} {c} {item}. "
        f"How many {item} are left for {name}?",
    ))  # fmt: skip
    first, total = add(a, b)
    second, result = subtract(total, c)
    lines = [f"First {name} has {first} {item}.", f"Then {name} has {second} {item}."]
    return _finish("gain_then_lose", question, lines, result, f"{a} + {b} - {c}")


@template
def more_on_second_day(rng: random.Random) -> Problem:
    """a + (a + b)."""
    name = rng.choice(NAMES)
    item = rng.choice(ITEMS)
    one, two = rng.sample(DAYS, 2)
    a = _number(rng, 11, 420)
    b = _number(rng, 3, min(400, MAX_VALUE - 2 * a))
    question = rng.choice((
        f"{name} sold {a} {item} on {one} and {b} more than that on {two}. "
        f"How many {item} did {name} sell on both days?",
        f"On {one} {name} packed {a} {item}. On {two} {name} packed {b} more {item} than on {one}. "
        f"How many {item} did {name} pack in total?",
        f"{name} counted {a} {item} on {one}. On {two} there were {b} more. "
        f"How many {item} did {name} count on the two days together?",
    ))  # fmt: skip
    first, second_day = add(a, b)
    second, result = add(a, second_day)
    lines = [f"On {two} it is {first} {item}.", f"Both days together make {second} {item}."]
    return _finish("more_on_second_day", question, lines, result, f"{a} + ({a} + {b})")


@template
def fewer_than_friend(rng: random.Random) -> Problem:
    """a + (a - b)."""
    name, other = _two_names(rng)
    item = rng.choice(ITEMS)
    a = _number(rng, 20, 500)
    b = _number(rng, 3, a - 5)
    question = rng.choice((
        f"{name} has {a} {item}. {other} has {b} fewer {item} than {name}. How many {item} do they have together?",
        f"{name} brought {a} {item} to the fair, and {other} brought {b} fewer. How many {item} did they bring in all?",
        f"{other} owns {b} fewer {item} than {name}, who owns {a}. How many {item} do {name} and {other} own in all?",
    ))  # fmt: skip
    first, fewer = subtract(a, b)
    second, result = add(a, fewer)
    lines = [f"{other} has {first} {item}.", f"Together they have {second} {item}."]
    return _finish("fewer_than_friend", question, lines, result, f"{a} + ({a} - {b})")


@template
def two_kinds_of_packs(rng: random.Random) -> Problem:
    """a * b + c * d."""
    name = rng.choice(NAMES)
    item, other_item = rng.sample(ITEMS, 2)
    pack, other_pack = rng.sample(CONTAINERS, 2)
    a, c = rng.randint(2, 9), rng.randint(2, 9)
    b, d = rng.randint(4, 60), rng.randint(4, 49)
    question = rng.choice((
        f"{name} buys {a} {pack} of {b} {item} and {c} {other_pack} of {d} {other_item}. "
        f"How many things does {name} buy?",
        f"A shop has {a} {pack} with {b} {item} each and {c} {other_pack} with {d} {other_item} each. "
        f"How many {item} and {other_item} are there in total?",
        f"{name} fills {a} {pack} with {b} {item} each. Then {name} fills {c} {other_pack} with {d} {other_item} "
        f"each. How many things did {name} use?",
    ))  # fmt: skip
    first, kind_one = multiply(a, b)
    second, kind_two = multiply(c, d)
    third, result = add(kind_one, kind_two)
    lines = [f"There are {first} {item}.", f"There are {second} {other_item}.", f"The total is {third}."]
    return _finish("two_kinds_of_packs", question, lines, result, f"{a} * {b} + {c} * {d}")


@template
def change_from_payment(rng: random.Random) -> Problem:
    """c - a * b."""
    name = rng.choice(NAMES)
    good = rng.choice(GOODS)
    a, b = rng.randint(2, 9), rng.randint(3, 98)
    c = _number(rng, a * b + 1, MAX_VALUE)
    question = rng.choice((
        f"A {good} costs {b} dollars. {name} buys {a} of them and has {c} dollars. "
        f"How many dollars does {name} have left?",
        f"{name} pays for {a} {good}s at {b} dollars each out of {c} dollars. How much change is left?",
        f"{name} has {c} dollars and buys {a} {good}s. Each {good} costs {b} dollars. "
        f"How much money does {name} still have?",
    ))  # fmt: skip
    first, cost = multiply(a, b)
    second, result = subtract(c, cost)
    lines = [f"The {good}s cost {first} dollars.", f"{name} has {second} dollars left."]
    return _finish("change_from_payment", question, lines, result, f"{c} - {a} * {b}")


@template
def boxes_given_away(rng: random.Random) -> Problem:
    """a * b - c + d."""
    name, other = _two_names(rng)
    item = rng.choice(ITEMS)
    pack = rng.choice(CONTAINERS)
    a, b = rng.randint(2, 9), rng.randint(6, 90)
    c = _number(rng, 3, a * b - 2)
    d = rng.randint(3, min(99, MAX_VALUE - a * b + c))
    question = rng.choice((
        f"{name} has {a} {pack} with {b} {item} in each. {name} gives {c} {item} to {other} and then gets {d} more. "
        f"How many {item} does {name} have?",
        f"A store received {a} {pack} of {b} {item}. It sold {c} {item}, and later {d} were returned. "
        f"How many {item} does the store have now?",
        f"There are {b} {item} in each of {a} {pack}. {other} takes out {c} {item} and {name} puts in {d}. "
        f"How many {item} are there now?",
    ))  # fmt: skip
    first, total = multiply(a, b)
    second, left = subtract(total, c)
    third, result = add(left, d)
    lines = [f"The {pack} hold {first} {item}.", f"Then there are {second}.", f"At the end there are {third} {item}."]
    return _finish("boxes_given_away", question, lines, result, f"{a} * {b} - {c} + {d}")


@template
def pages_left(rng: random.Random) -> Problem:
    """c - a * b - d."""
    name = rng.choice(NAMES)
    a, b = rng.randint(2, 9), rng.randint(4, 60)
    c = rng.randint(a * b + 30, MAX_VALUE)
    d = rng.randint(3, min(99, c - a * b - 3))
    unit, question = rng.choice((
        ("pages", f"A book has {c} pages. {name} reads {b} pages a day for {a} days and then {d} pages on the weekend. "
         f"How many pages are left?"),
        ("pages", f"{name} is reading a book of {c} pages. For {a} days {name} reads {b} pages each day. "
         f"The next day {name} reads {d} pages. How many pages does {name} still have to read?"),
        ("kilometers", f"{name} must walk {c} kilometers. {name} walks {b} kilometers a day for {a} days and after "
         f"that {d} kilometers more. How many kilometers remain?"),
    ))  # fmt: skip
    first, done = multiply(a, b)
    second, left = subtract(c, done)
    third, result = subtract(left, d)
    lines = [f"In {a} days that is {first} {unit}.", f"Then {second} are left.", f"At the end {third} {unit} are left."]
    return _finish("pages_left", question, lines, result, f"{c} - {a} * {b} - {d}")


@template
def share_then_add(rng: random.Random) -> Problem:
    """(a + b) / c + d."""
    name, other = _two_names(rng)
    item = rng.choice(ITEMS)
    c, share = rng.randint(2, 9), rng.randint(3, 12)
    a = rng.randint(2, c * share - 2)
    b = c * share - a
    d = _number(rng, 11, 900)
    question = rng.choice((
        f"{name} has {a} {item} and {other} has {b}. They share all of them equally among {c} children. "
        f"One child already had {d} {item}. How many {item} does that child have now?",
        f"{name} puts {a} red {item} and {b} blue {item} into {c} equal groups. {other} adds {d} {item} "
        f"to one group. How many {item} are in that group?",
    ))  # fmt: skip
    first, total = add(a, b)
    second, quotient = divide(total, c)
    third, result = add(d, quotient)
    lines = [f"There are {first} {item}.", f"Each part is {second} {item}.", f"With the others it is {third} {item}."]
    return _finish("share_then_add", question, lines, result, f"({a} + {b}) // {c} + {d}")


@template
def train_stops(rng: random.Random) -> Problem:
    """a - b + c - d."""
    vehicle = rng.choice(("train", "ferry", "ship", "tram"))
    a = _number(rng, 30, 880)
    b = rng.randint(3, min(99, a - 4))
    c = rng.randint(3, 99)
    d = rng.randint(2, min(99, a - b + c - 2))
    question = rng.choice((
        f"A {vehicle} carries {a} people. At the first stop {b} get off and {c} get on. "
        f"At the next stop {d} get off. How many people are on the {vehicle} now?",
        f"There are {a} people on a {vehicle}. First {b} leave, then {c} come in, then {d} leave. "
        f"How many people are still on the {vehicle}?",
    ))  # fmt: skip
    first, one = subtract(a, b)
    second, two = add(one, c)
    third, result = subtract(two, d)
    lines = [f"First there are {first} people.", f"Then there are {second} people.", f"At the end there are {third}."]
    return _finish("train_stops", question, lines, result, f"{a} - {b} + {c} - {d}")


@template
def saving_for_a_purchase(rng: random.Random) -> Problem:
    """a + b * c - d."""
    name = rng.choice(NAMES)
    good = rng.choice(GOODS)
    b, c = rng.randint(2, 9), rng.randint(4, 60)
    a = _number(rng, 10, 400)
    d = _number(rng, 5, a + b * c - 2)
    unit = rng.choice(("week", "month", "day"))
    question = rng.choice((
        f"{name} has {a} dollars and saves {c} dollars a {unit} for {b} {unit}s. Then {name} buys a {good} "
        f"for {d} dollars. How many dollars are left?",
        f"{name} earns {c} dollars each {unit}. After {b} {unit}s {name} adds the {a} dollars from a gift and pays "
        f"{d} dollars for a {good}. How much money does {name} have left?",
    ))  # fmt: skip
    first, saved = multiply(b, c)
    second, total = add(a, saved)
    third, result = subtract(total, d)
    lines = [f"In {b} {unit}s it is {first} dollars.", f"In total it is {second} dollars.", f"There are {third} left."]
    return _finish("saving_for_a_purchase", question, lines, result, f"{a} + {b} * {c} - {d}")


@template
def times_as_many(rng: random.Random) -> Problem:
    """a * b + a, or a * b - c."""
    name, other = _two_names(rng)
    third_name = rng.choice([candidate for candidate in NAMES if candidate not in (name, other)])
    item = rng.choice(ITEMS)
    b, a = rng.randint(2, 9), rng.randint(6, 80)
    if rng.random() < 0.5:
        question = rng.choice((
            f"{name} has {a} {item}. {other} has {b} times as many. How many {item} do they have together?",
            f"{other} has {b} times as many {item} as {name}. {name} has {a}. How many {item} do both have in total?",
        ))  # fmt: skip
        first, many = multiply(b, a)
        second, result = add(many, a)
        lines = [f"{other} has {first} {item}.", f"Together they have {second} {item}."]
        return _finish("times_as_many", question, lines, result, f"{b} * {a} + {a}")
    c = _number(rng, 3, a * b - 3)
    question = rng.choice((
        f"{name} has {a} {item}. {other} has {b} times as many, and {third_name} has {c} fewer than {other}. "
        f"How many {item} does {third_name} have?",
        f"{third_name} has {c} fewer {item} than {other}. {other} has {b} times as many as {name}, who has {a}. "
        f"How many {item} does {third_name} have?",
    ))  # fmt: skip
    first, many = multiply(b, a)
    second, result = subtract(many, c)
    lines = [f"{other} has {first} {item}.", f"{third_name} has {second} {item}."]
    return _finish("times_as_many", question, lines, result, f"{b} * {a} - {c}")


@template
def fence_around_garden(rng: random.Random) -> Problem:
    """2 * (a + b) + c."""
    name = rng.choice(NAMES)
    a = rng.randint(5, 80)
    b = rng.randint(3, 98 - a)
    c = _number(rng, 5, MAX_VALUE - 2 * (a + b))
    place = rng.choice(("garden", "field", "yard", "park"))
    question = rng.choice((
        f"A {place} is {a} meters long and {b} meters wide. {name} needs wire to go around it and {c} meters more. "
        f"How many meters of wire does {name} need?",
        f"{name} walks once around a {place} that is {a} meters long and {b} meters wide, and then {c} meters home. "
        f"How many meters does {name} walk?",
    ))  # fmt: skip
    first, half = add(a, b)
    second, around = multiply(2, half)
    third, result = add(around, c)
    lines = [f"Two sides are {first} meters.", f"Around it is {second} meters.", f"In total it is {third} meters."]
    return _finish("fence_around_garden", question, lines, result, f"2 * ({a} + {b}) + {c}")


@template
def hours_and_minutes(rng: random.Random) -> Problem:
    """60 * a + b + c."""
    name = rng.choice(NAMES)
    a = rng.randint(2, 9)
    b = rng.randint(2, 59)
    c = rng.randint(5, 300)
    what, again = rng.choice((("film", "show"), ("trip", "walk"), ("concert", "talk"), ("lesson", "game")))
    question = rng.choice((
        f"A {what} takes {a} hours and {b} minutes. After it there is a {again} of {c} minutes. "
        f"How many minutes do both take?",
        f"{name} spends {a} hours and {b} minutes on a {what} and {c} minutes on a {again}. "
        f"How many minutes is that in total?",
    ))  # fmt: skip
    first, minutes = multiply(a, 60)
    second, one = add(minutes, b)
    third, result = add(one, c)
    lines = [f"{a} hours are {first} minutes.", f"The {what} takes {second} minutes.", f"Both take {third} minutes."]
    return _finish("hours_and_minutes", question, lines, result, f"60 * {a} + {b} + {c}")


@template
def half_then_more(rng: random.Random) -> Problem:
    """a / 2 + b - c."""
    name, other = _two_names(rng)
    item = rng.choice(ITEMS)
    a = 2 * rng.randint(4, 49)
    b = _number(rng, 10, MAX_VALUE - a)
    c = rng.randint(2, min(99, a // 2 + b - 2))
    question = rng.choice((
        f"{name} has {a} {item} and gives half of them to {other}. {other} already had {b} {item} and then loses {c}. "
        f"How many {item} does {other} have?",
        f"Half of the {a} {item} in a bag are broken and thrown away. {name} puts in {b} new {item} and "
        f"takes out {c}. How many {item} are in the bag?",
    ))  # fmt: skip
    first, half = divide(a, 2)
    second, total = add(b, half)
    third, result = subtract(total, c)
    lines = [f"Half is {first} {item}.", f"Then it is {second} {item}.", f"At the end it is {third} {item}."]
    return _finish("half_then_more", question, lines, result, f"{a} // 2 + {b} - {c}")


@template
def plain_arithmetic(rng: random.Random) -> Problem:
    """A bare expression of two or three operations."""
    lead = rng.choice(("What is", "Calculate", "Compute", "Work out", "Find"))
    end = "?" if lead == "What is" else "."
    kind = rng.randrange(4)
    if kind == 0:
        a = _number(rng, 10, 700)
        b = _number(rng, 5, MAX_VALUE - a)
        c = _number(rng, 5, a + b - 1)
        steps, expression = (("+", b), ("-", c)), f"{a} + {b} - {c}"
    elif kind == 1:
        a = _number(rng, 20, MAX_VALUE)
        b = _number(rng, 5, a - 5)
        c = _number(rng, 5, MAX_VALUE - a + b)
        steps, expression = (("-", b), ("+", c)), f"{a} - {b} + {c}"
    else:
        digit, number = rng.randint(2, 9), rng.randint(6, 99)
        product = digit * number
        symbol = "+" if kind == 2 else "-"
        c = _number(rng, 5, MAX_VALUE - product if kind == 2 else product - 1)
        a, expression = digit, f"{digit} * {number} {symbol} {c}"
        steps = (("*", number), (symbol, c))
    operations = {"+": add, "-": subtract, "*": multiply}
    lines, value = [], a
    for lead_in, (symbol, operand) in zip(("First:", "Then:"), steps, strict=True):
        text, value = operations[symbol](value, operand)
        lines.append(f"{lead_in} {text}.")
    return _finish("plain_arithmetic", f"{lead} {expression}{end}", lines, value, expression)


# --- streams and the split --------------------------------------------------------------------------------------


def is_held_out(question: str) -> bool:
    """Whether the question text belongs to the held-out set."""
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_MODULUS == 0


def generate(seed: int) -> Iterator[Problem]:
    """Endless stream of problems of both sets; the same seed always gives the same stream."""
    rng = random.Random(seed)
    makers = list(TEMPLATES.values())
    while True:
        yield rng.choice(makers)(rng)


def train_problems(seed: int) -> Iterator[Problem]:
    """Endless stream of training problems."""
    return (problem for problem in generate(seed) if not is_held_out(problem.question))


def held_out_problems(seed: int, count: int) -> list[Problem]:
    """``count`` held-out problems with distinct questions."""
    chosen: dict[str, Problem] = {}
    for problem in generate(seed):
        if is_held_out(problem.question):
            chosen.setdefault(problem.question, problem)
            if len(chosen) == count:
                break
    return list(chosen.values())


def extract_answer(text: str) -> str | None:
    """The integer after the last ``####`` of ``text``, or None."""
    _, mark, tail = text.rpartition("####")
    words = tail.split()
    return words[0].rstrip(".") if mark and words else None


def main() -> None:
    """Print problems as JSON lines."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true", help="print held-out problems instead of training ones")
    parser.add_argument("--worked", action="store_true", help="include the worked answer")
    args = parser.parse_args()
    if args.held_out:
        problems = held_out_problems(args.seed, args.count)
    else:
        stream = train_problems(args.seed)
        problems = [next(stream) for _ in range(args.count)]
    for problem in problems:
        record = {"question": problem.question, "answer": problem.answer}
        if args.worked:
            record |= {"template": problem.template, "worked": problem.worked}
        print(json.dumps(record))


if __name__ == "__main__":
    main()
