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
from dataclasses import dataclass
from pathlib import Path

import problems
from problems import Problem
from words import (
    COLORS,
    GAINS,
    HOLDERS,
    HOLDS,
    KINDS,
    LOSSES,
    PEOPLE,
    PLACES,
    THINGS,
    Who,
    counted,
    number,
    other_person,
    plural,
    somebody,
)  # fmt: skip

NEWCOMER = Path(__file__).with_name("newcomer.jsonl")
"""Questions that were written by hand before this generator; no training question is one of them."""
WARM_UP = ("Hi", "Hello", "Hey", "Please help", "Quick question", "Can you help me", "Help")
LEADS = {1: ("It is",), 2: ("First it is", "Then it is"), 3: ("First it is", "Then it is", "At the end it is")}
Step = tuple[str, int, int]
"""A sign and its two operands."""


@dataclass(frozen=True)
class Story:
    """A question in parts, with the steps that answer it."""

    clauses: list[str]
    """Statements without a full stop."""
    ask: str
    """The question without its mark."""
    steps: list[Step]
    expression: str


STORIES: dict[str, tuple[float, Callable[[random.Random], Story]]] = {}


def story(weight: float) -> Callable[[Callable[[random.Random], Story]], Callable[[random.Random], Story]]:
    """Register a kind of story with how often it is drawn."""

    def register(make: Callable[[random.Random], Story]) -> Callable[[random.Random], Story]:
        STORIES[make.__name__] = (weight, make)
        return make

    return register


# --- parts ------------------------------------------------------------------------------------------------------


def small(rng: random.Random, low: int = 2, high: int = 999) -> int:
    """A number as people use them: mostly below 20, often below 100, now and then above; within ``low``..``high``."""
    kind = rng.random()
    top = 12 if kind < 0.4 else 30 if kind < 0.65 else 100 if kind < 0.92 else 400
    found = rng.randint(low, max(low, min(top, high)))
    return found // 5 * 5 if found >= 20 and found // 5 * 5 >= low and rng.random() < 0.3 else found


def factors(rng: random.Random) -> tuple[int, int]:
    """Two factors of which the first has one digit, or is ten."""
    first = rng.randint(2, 10)
    second = rng.randint(2, 12) if rng.random() < 0.7 else rng.choice((rng.randint(11, 60), 10 * rng.randint(1, 9)))
    return first, second


def fact(rng: random.Random) -> tuple[int, int]:
    """Divisor and quotient of a division without a remainder."""
    divisor, quotient = rng.randint(2, 10), rng.randint(2, 12)
    return divisor, 10 * quotient if quotient < 10 and rng.random() < 0.08 else quotient


def noun(rng: random.Random) -> str:
    return rng.choice(THINGS)


def kind_of(rng: random.Random, one: str) -> str:
    """The noun, sometimes with an adjective."""
    return f"{rng.choice(KINDS)} {one}" if rng.random() < 0.1 else one


def change(rng: random.Random, who: Who, past: bool, count: int, one: str, gain: bool, subject: str) -> str:
    """A clause in which somebody gets or loses ``count``."""
    base, third, gone, rest = rng.choice(GAINS if gain else LOSSES)
    verb = who.does((base, third, gone), past)
    text = rest.replace("{o}", other_person(rng, who))
    shown = number(count, rng)
    if rng.random() < 0.3 and rest in ("{n}", "{n} more"):
        text = text.replace("{n} more", f"{shown} more {one if count == 1 else plural(one)}")
        text = text.replace("{n}", f"{shown} {one if count == 1 else plural(one)}")
    return f"{subject} {verb} {text}".replace("{n}", shown)


def passive_change(rng: random.Random, count: int, one: str, gain: bool, past: bool) -> str:
    """A clause in which things or beings come and go by themselves or by nobody named."""
    shown = number(count, rng)
    few = rng.random() < 0.5
    if gain:
        ends = (("come", "came"), ("arrive", "arrived"), ("join them", "joined them"), ("are added", "were added"),
                ("are put in", "were put in"), ("are bought", "were bought"), ("are brought", "were brought"),
                ("are delivered", "were delivered"), ("get in", "got in"), ("come in", "came in"))  # fmt: skip
        return f"{shown} more{'' if few else ' ' + plural(one)} {rng.choice(ends)[past]}"
    ends = (("leave", "left"), ("go away", "went away"), ("are taken", "were taken"), ("are sold", "were sold"),
            ("are eaten", "were eaten"), ("break", "broke"), ("run away", "ran away"), ("are lost", "were lost"),
            ("are used", "were used"), ("are given away", "were given away"), ("go home", "went home"),
            ("get out", "got out"), ("fall down", "fell down"), ("are stolen", "were stolen"))  # fmt: skip
    return f"{shown}{rng.choice(('', ' of them')) if few else ' ' + plural(one)} {rng.choice(ends)[past]}"


def how_many(rng: random.Random, who: Who, past: bool, one: str, is_less: bool, is_total: bool = False) -> str:
    """The question how many of them somebody has."""
    many = plural(one)
    subject = who.asks(False) if who.is_plural or rng.random() < 0.6 else f"does {who.pronoun}"
    ends = [" now", "", " now", ""]
    if is_less:
        ends = [" left", " left", " now", "", " still"]
    elif is_total:
        ends = [" in total", " altogether", " in all", "", " now", " all together"]
    kind = rng.random()
    if kind < 0.6:
        end = rng.choice(ends)
        return f"how many {many} {subject}{' still' if end == ' still' else ''} have{'' if end == ' still' else end}"
    if kind < 0.7:
        return f"how many {many} are {'left' if is_less else rng.choice(('there', 'there now', 'there in total'))}"
    if kind < 0.76:
        return rng.choice(("how many are left", "how many left", f"how many {many} remain", "how many are there still")
                          if is_less else ("how many are there", "how many is that", "how many in total"))  # fmt: skip
    if kind < 0.84:
        return "how many" if rng.random() < 0.6 else f"how many {many}"
    if kind < 0.9:
        has = f"{who.name} {'have' if who.is_plural else 'has'}"
        return f"{rng.choice(('find', 'tell me', 'what is', 'calculate'))} the number of {many} {has}"
    if past and rng.random() < 0.5:
        return f"how many {many} did {who.name} have {rng.choice(('at the end', 'then', 'after that', 'in the end'))}"
    return f"what is the number of {many} {'left' if is_less else 'now'}"


def again(rng: random.Random, who: Who) -> str:
    """The subject when it comes up again."""
    return who.pronoun if rng.random() < 0.6 else who.name


def start(rng: random.Random, who: Who, past: bool, count: int, one: str) -> str:
    """The clause that says how many there are at first."""
    kind = rng.random()
    shown = counted(count, one, rng)
    if kind < 0.8:
        return f"{who.name} {who.does(rng.choice(HOLDS), past)} {shown}{_where(rng, 0.12)}"
    return f"there {'were' if past else 'are'} {shown}{_where(rng, 0.7)}"


def _where(rng: random.Random, share: float) -> str:
    return f" {rng.choice(PLACES)}" if rng.random() < share else ""


# --- stories ----------------------------------------------------------------------------------------------------


@story(4)
def changes(rng: random.Random) -> Story:
    """Some, then one or two changes."""
    who, one, past = somebody(rng), kind_of(rng, noun(rng)), rng.random() < 0.5
    value = small(rng, 3)
    count = 1 if rng.random() < 0.6 else 2
    clauses, steps, expression = [start(rng, who, past, value, one)], [], str(value)
    loses = False
    for place in range(count):
        loses = rng.random() < 0.55 and value > 2
        amount = small(rng, 1, value - 1 if loses else 999 - value)
        clause = change(rng, who, past, amount, one, not loses, again(rng, who))
        if place and rng.random() < 0.5:
            clause = f"{rng.choice(('then', 'later', 'after that', 'the next day', 'finally'))} {clause}"
        clauses.append(clause)
        steps.append(("-" if loses else "+", value, amount))
        value += -amount if loses else amount
        expression += f" {'-' if loses else '+'} {amount}"
    return Story(clauses, how_many(rng, who, past, one, loses), steps, expression)


@story(2)
def comings_and_goings(rng: random.Random) -> Story:
    """Things or people at a place, of which some come and some go."""
    one, past = rng.choice(PEOPLE) if rng.random() < 0.4 else noun(rng), rng.random() < 0.5
    value, place = small(rng, 3), rng.choice(PLACES)
    opening = rng.choice((
        f"there {'were' if past else 'are'} {counted(value, one, rng)} {place}",
        f"{counted(value, one, rng)} {'were' if past else 'are'} {place}",
        f"{rng.choice(('a bus', 'a train', 'a ship', 'a room', 'a park', 'a shop', 'a box', 'a shelf'))} "
        f"{'had' if past else 'has'} {counted(value, one, rng)}",
    ))  # fmt: skip
    clauses, steps, expression, loses = [opening], [], str(value), False
    for _ in range(1 if rng.random() < 0.6 else 2):
        loses = rng.random() < 0.6 and value > 2
        amount = small(rng, 1, value - 1 if loses else 999 - value)
        clauses.append(passive_change(rng, amount, one, not loses, past))
        steps.append(("-" if loses else "+", value, amount))
        value += -amount if loses else amount
        expression += f" {'-' if loses else '+'} {amount}"
    many = plural(one)
    still = ("are left", "are still there", "are there now", "remain", f"are still {place}", "stayed")
    now = ("are there now", "are there", f"are {place} now", "are there in total", f"are {place}")
    return Story(clauses, f"how many{rng.choice((' ' + many, ' ' + many, ''))} {rng.choice(still if loses else now)}",
                 steps, expression)  # fmt: skip


@story(3)
def parts(rng: random.Random) -> Story:
    """Two or three amounts of kinds, people, days or places, taken together."""
    one, past, many_parts = noun(rng), rng.random() < 0.5, 2 if rng.random() < 0.7 else 3
    amounts = [small(rng, 1, 300) for _ in range(many_parts)]
    who = somebody(rng)
    many, form = plural(one), rng.randrange(5)
    has = who.does(rng.choice(HOLDS), past)
    if form == 0:
        kinds = rng.sample(COLORS if rng.random() < 0.7 else KINDS, many_parts)
        listed = _list([f"{number(n, rng)} {kind} {many if n > 1 else one}" for n, kind in zip(amounts, kinds)])
        opening = f"{who.name} {has}" if rng.random() < 0.6 else f"there {'were' if past else 'are'}"
        clauses = [f"{opening} {listed}"]
        ask = how_many(rng, who, past, one, False, is_total=True)
    elif form == 1:
        nouns = rng.sample(THINGS, many_parts)
        clauses = [f"{who.name} {has} {_list([counted(n, thing, rng) for n, thing in zip(amounts, nouns)])}"]
        them = rng.choice(("things", "items", " and ".join(plural(thing) for thing in nouns), "of them"))
        ask = rng.choice((f"how many {them} {who.asks(False)} have", f"how many {them} is that in total",
                          f"how many {them} are there {rng.choice(('altogether', 'in all', 'in total'))}"))  # fmt: skip
    elif form == 2:
        people = [who]
        while len(people) < many_parts:
            people.append(somebody(rng, people[-1].name))
        verb = rng.choice(HOLDS)
        clauses = [
            f"{person.name} {person.does(verb, past)} {counted(n, one, rng)}" for person, n in zip(people, amounts)
        ]
        ask = rng.choice((f"how many {many} do they have together", f"how many {many} do they have",
                          f"how many {many} do they have {rng.choice(('in all', 'altogether', 'in total', 'combined'))}",
                          f"how many {many} are there", f"what is the total number of {many}",
                          f"how many {many} {'did' if past else 'do'} they {verb[0]} together"))  # fmt: skip
    elif form == 3:
        verb = rng.choice((*HOLDS[6:], ("sell", "sells", "sold"), ("read", "reads", "read"), ("eat", "eats", "ate"),
                           ("use", "uses", "used"), ("wash", "washes", "washed"), ("paint", "paints", "painted")))  # fmt: skip
        days = rng.choice(
            (list(rng.sample(problems.DAYS, many_parts)), ["the first day", "the second day", "the third day"])
        )
        days = [f"on {day}" for day in days]
        if rng.random() < 0.4:
            days = rng.choice((["in the morning", "in the afternoon", "in the evening"],
                               ["yesterday", "today", "this evening"], ["last week", "this week", "after that"],
                               ["in March", "in April", "in May"], ["the first time", "the second time", "then"]))  # fmt: skip
        pairs = [f"{number(n, rng)}{(' ' + many) if not i or rng.random() < 0.3 else ''} {day}"
                 for i, (n, day) in enumerate(zip(amounts, days))]  # fmt: skip
        clauses = [f"{who.name} {who.does(verb, past)} {_list(pairs)}"]
        if rng.random() < 0.3:
            clauses = [f"{days[i].capitalize() if i else days[i]} {who.name} {who.does(verb, past)} {counted(n, one, rng)}"
                       for i, n in enumerate(amounts)]  # fmt: skip
        asked = f"{'did' if past else 'do' if who.is_plural else 'does'} {who.name} {verb[0]}"
        ask = f"how many {many} {asked}{rng.choice((' in total', ' altogether', ' in all', '', ' together'))}"
    else:
        places = rng.sample(PLACES, many_parts)
        listed = [f"{number(n, rng)}{(' ' + many) if not i or rng.random() < 0.3 else ''} {place}"
                  for i, (n, place) in enumerate(zip(amounts, places))]  # fmt: skip
        clauses = [f"there {'were' if past else 'are'} {_list(listed)}"]
        ask = f"how many {many} {'were' if past else 'are'} there{rng.choice((' in total', ' altogether', '', ' in all'))}"
    steps, total = [], amounts[0]
    for amount in amounts[1:]:
        steps.append(("+", total, amount))
        total += amount
    return Story(clauses, ask, steps, " + ".join(map(str, amounts)))


def _list(parts_: list[str]) -> str:
    return f"{', '.join(parts_[:-1])} and {parts_[-1]}"


@story(2)
def rest_of_a_whole(rng: random.Random) -> Story:
    """A total of which one part is known."""
    one = rng.choice(PEOPLE) if rng.random() < 0.4 else noun(rng)
    total = small(rng, 4)
    part = small(rng, 1, total - 1)
    many, form = plural(one), rng.randrange(4)
    first, second = rng.sample((*KINDS, "young", "tall", "happy", "tired", "wet", "dry", "clean", "dirty"), 2)
    steps: list[Step] = [("-", total, part)]
    if form == 0:
        clauses = [f"there are {counted(total, one, rng)}{_where(rng, 0.6)}",
                   f"{number(part, rng)} of {rng.choice(('them', 'the ' + many))} are {first}"]  # fmt: skip
        ask = f"how many {rng.choice((many, ''))} are {rng.choice(('not ' + first, second, 'not', second))}".replace(
            "  ", " "
        )
        clauses[1] += f" and the {rng.choice(('rest', 'others'))} are {second}"
    elif form == 1:
        who, other = somebody(rng), somebody(rng)
        clauses = [f"{who.name} and {other.name} have {counted(total, one, rng)} {rng.choice(('together', 'in total'))}",
                   f"{who.name} {'have' if who.is_plural else 'has'} {number(part, rng)}"]  # fmt: skip
        ask = f"how many{rng.choice((' ' + many, ''))} {other.asks(False)} have"
    elif form == 2:
        who = somebody(rng)
        need, have = ("need", "needs"), ("have", "has")
        goal = rng.choice((need, ("want", "wants"), ("have to make", "has to make"), ("want to get", "wants to get")))
        clauses = [f"{who.name} {who.does((*goal, ''), False)} {counted(total, one, rng)}",
                   f"{again(rng, who)} {rng.choice(('already ', '', 'only '))}{who.does((*have, ''), False)} {number(part, rng)}"]  # fmt: skip
        ask = f"how many more {rng.choice((many + ' ', ''))}{who.asks(False)} need"
    else:
        who = somebody(rng)
        verb, noun_, done = rng.choice((("read", "page", "a book"), ("solve", "task", "a test"), ("walk", "mile", "a trail"),
                                        ("climb", "step", "a tower"), ("drive", "kilometer", "a trip"),
                                        ("swim", "lap", "a training"), ("clean", "room", "a hotel")))  # fmt: skip
        past_form = {"read": "read", "solve": "solved", "walk": "walked", "climb": "climbed", "drive": "drove",
                     "swim": "swum", "clean": "cleaned"}[verb]  # fmt: skip
        clauses = [f"{done} has {counted(total, noun_, rng)}",
                   f"{who.name} {'have' if who.is_plural else 'has'} {rng.choice(('already ', ''))}{past_form} {number(part, rng)}"]  # fmt: skip
        ask = rng.choice((f"how many {plural(noun_)} are left", f"how many {plural(noun_)} are left to {verb}",
                          f"how many more {plural(noun_)} must {who.name} {verb}"))  # fmt: skip
    return Story(clauses, ask, steps, f"{total} - {part}")


@story(3)
def comparison(rng: random.Random) -> Story:
    """One has more or fewer than another, or times as many."""
    who = somebody(rng)
    other = somebody(rng, who.name)
    one, form = noun(rng), rng.randrange(5)
    many = plural(one)
    verb, other_verb = (f"{person.does(('have', 'has', 'had'), False)}" for person in (who, other))
    if form <= 1:
        loses = rng.random() < 0.4
        value = small(rng, 4)
        amount = small(rng, 1, value - 1 if loses else (999 - value) // 2)
        word = rng.choice(("fewer", "less")) if loses else "more"
        clauses = [f"{who.name} {verb} {counted(value, one, rng)}",
                   f"{other.name} {other_verb} {number(amount, rng)} {word}{rng.choice(('', ' ' + many))} than {who.name}"]  # fmt: skip
        if rng.random() < 0.15:
            clauses.reverse()
        steps: list[Step] = [("-" if loses else "+", value, amount)]
        result = value - amount if loses else value + amount
        if form == 0 and value + result < 1000:
            return Story(clauses, _together(rng, many), [*steps, ("+", value, result)],
                         f"{value} + ({value} {'-' if loses else '+'} {amount})")  # fmt: skip
        return Story(
            clauses, f"how many {many} {other.asks(False)} have", steps, f"{value} {'-' if loses else '+'} {amount}"
        )
    if form == 2:
        larger = small(rng, 3)
        less = small(rng, 1, larger - 1)
        pair = [f"{who.name} {verb} {counted(larger, one, rng)}", f"{other.name} {other_verb} {number(less, rng)}"]
        ask = rng.choice((f"how many more {many} {who.asks(False)} have than {other.name}",
                          f"how many more {who.asks(False)} have", f"how many fewer {many} {other.asks(False)} have",
                          "what is the difference", f"how many {many} more than {other.name} {who.asks(False)} have"))  # fmt: skip
        rng.shuffle(pair)
        return Story(pair, ask, [("-", larger, less)], f"{larger} - {less}")
    times, value = factors(rng)
    if form == 3 and rng.random() < 0.5:  # the other way round
        amount = small(rng, 1, 60)
        larger = amount + small(rng, 1, 60)
        is_more = rng.random() < 0.5
        known, sign = (larger, "-") if is_more else (larger - amount, "+")
        that = f"{rng.choice(('that is', 'this is', 'these are'))} {amount} {'more' if is_more else 'fewer'} than {other.name} {other_verb}"
        ask = f"how many {many} {other.asks(False)} have"
        return Story([f"{who.name} {verb} {counted(known, one, rng)}", that], ask, [(sign, known, amount)],
                     f"{known} {sign} {amount}")  # fmt: skip
    times = times if rng.random() < 0.5 else 2
    word = (
        rng.choice(("twice", "twice", "two times", "2 times", "double"))
        if times == 2
        else f"{number(times, rng)} times"
    )
    as_many = f"{other.name} {other_verb} {word} as many{rng.choice(('', ' ' + many))}"
    as_many += rng.choice(("", f" as {who.name}"))
    clauses = [f"{who.name} {verb} {counted(value, one, rng)}", as_many]
    if as_many.endswith(who.name) and rng.random() < 0.3:
        clauses.reverse()
    if form == 4:
        return Story(clauses, _together(rng, many), [("*", times, value), ("+", times * value, value)],
                     f"{value} + {times} * {value}")  # fmt: skip
    return Story(clauses, f"how many {many} {other.asks(False)} have", [("*", times, value)], f"{times} * {value}")


def _together(rng: random.Random, many: str) -> str:
    return rng.choice((f"how many {many} do they have together", f"how many {many} do they have in total",
                       f"how many {many} do both have", f"how many {many} are there altogether",
                       f"how many {many} do they have in all", f"what is the total number of {many}"))  # fmt: skip


@story(4)
def equal_groups(rng: random.Random) -> Story:
    """Holders with the same number in each, and sometimes a few more or fewer."""
    one = rng.choice(PEOPLE) if rng.random() < 0.15 else noun(rng)
    holder, who, past = rng.choice(HOLDERS), somebody(rng), rng.random() < 0.35
    groups, each = factors(rng)
    if rng.random() < 0.3 and groups < 10 and each < 100:
        groups, each = each, groups
    many, has = (
        plural(one),
        who.does(rng.choice(HOLDS[:5] + (("buy", "buys", "bought"), ("fill", "fills", "filled"))), past),
    )
    n, each_shown = counted(groups, holder, rng), counted(each, one, rng)
    inside = rng.choice(("in each", f"in each {holder}", "each", f"per {holder}", f"in every {holder}", "inside each"))
    opening = rng.choice((
        [f"{who.name} {has} {n} with {each_shown} {inside}"], [f"there are {n} with {each_shown} {inside}"],
        [f"there are {n}", f"{rng.choice(('each', 'every', 'one'))} {holder} {rng.choice(('has', 'holds', 'contains'))} {each_shown}"],
        [f"{who.name} {has} {n}", f"there are {each_shown} {inside if inside != 'each' else 'in each'}"],
        [f"{who.name} {has} {n} of {many if each < 100 else many}", f"each {holder} {rng.choice(('has', 'holds'))} {each_shown}"],
        [f"a {holder} {rng.choice(('has', 'holds', 'contains'))} {each_shown}", f"{who.name} {has} {n}"],
        [f"{who.name} {has} {n} of {each_shown}{rng.choice(('', ' each'))}"],
        [f"each of {n} {rng.choice(('has', 'holds', 'contains'))} {each_shown}"],
    ))  # fmt: skip
    total: Step = ("*", groups, each)
    ask = rng.choice((f"how many {many} are there", f"how many {many} are there in total", f"how many {many} {who.asks(False)} have",
                      f"how many {many} is that", f"how many {many}", f"how many {many} are there {rng.choice(('altogether', 'in all'))}",
                      f"how many {many} are in all {plural(holder)}", "how many"))  # fmt: skip
    if rng.random() < 0.12:
        ask = f"how many {many} are {rng.choice(('in', 'on'))} {n}"
        return Story(
            [f"a {holder} {rng.choice(('has', 'holds', 'contains'))} {each_shown}"], ask, [total], f"{groups} * {each}"
        )
    if rng.random() < 0.6:
        return Story(opening, ask, [total], f"{groups} * {each}")
    product = groups * each
    loses = rng.random() < 0.6
    amount = small(rng, 1, product - 1 if loses else min(90, 999 - product)) if product < 990 else 5
    loses = loses or product >= 990
    extra = (change(rng, who, past, amount, one, not loses, again(rng, who)) if rng.random() < 0.6
             else passive_change(rng, amount, one, not loses, past))  # fmt: skip
    return Story([*opening, extra], how_many(rng, who, past, one, loses), [total, ("-" if loses else "+", product, amount)],
                 f"{groups} * {each} {'-' if loses else '+'} {amount}")  # fmt: skip


@story(3)
def sharing(rng: random.Random) -> Story:
    """A number divided into groups or by people, sometimes after a change."""
    one, who = noun(rng), somebody(rng)
    divisor, quotient = fact(rng)
    total = divisor * quotient
    many, past = plural(one), rng.random() < 0.4
    steps: list[Step] = [("/", total, divisor)]
    people = rng.choice(PEOPLE)
    holder = rng.choice(HOLDERS)
    first, expression, amount = counted(total, one, rng), f"{total} / {divisor}", total
    clauses: list[str] = []
    before = rng.random()
    if before < 0.12:
        amount = small(rng, 1, 60)
        steps.insert(0, ("-", total + amount, amount))
        first, expression = f"the {rng.choice(('rest', 'others'))}", f"({total + amount} - {amount}) / {divisor}"
        clauses = [f"{who.name} {who.does(HOLDS[0], past)} {counted(total + amount, one, rng)}",
                   change(rng, who, past, amount, one, False, again(rng, who))]  # fmt: skip
    elif before < 0.2:
        groups = rng.choice([n for n in range(2, 11) if total % n == 0] or [0])
        if groups and total // groups < 100:
            steps.insert(0, ("*", groups, total // groups))
            clauses = [
                f"{who.name} {who.does(HOLDS[0], past)} {counted(groups, holder, rng)} of {counted(total // groups, one, rng)}"
            ]
            first, expression = (
                rng.choice(("all of them", f"the {many}", "them")),
                f"{groups} * {total // groups} / {divisor}",
            )
    fairly = rng.choice(("", " equally", " evenly", " fairly", " equally"))
    verb = who.does(
        rng.choice((("share", "shares", "shared"), ("divide", "divides", "divided"), ("split", "splits", "split"))),
        past,
    )
    if rng.random() < 0.55:
        group = counted(divisor, people, rng)
        told = [f"{who.name} {verb} {first}{fairly} {rng.choice(('among', 'between', 'with'))} {group}"]
        if not clauses and rng.random() < 0.6:
            told = rng.choice((
                [f"{group} share {first}{fairly}"], [f"{first} are {rng.choice(('shared', 'divided', 'split'))}{fairly} among {group}"],
                [f"there are {first} and {group}"], [f"{first} {rng.choice(('for', 'and'))} {group}"],
                [f"{who.name} {'have' if who.is_plural else 'has'} {first} for {group}"],
            ))  # fmt: skip
        ask = rng.choice((f"how many {many} does each {people} get", "how many does each get", f"how many {many} does each one get",
                          f"how many {many} does every {people} get", f"how many for each {people}",
                          f"how many {many} per {people}", f"how many {many} does one {people} get"))  # fmt: skip
    elif rng.random() < 0.5:
        put = who.does(
            rng.choice((("put", "puts", "put"), ("pack", "packs", "packed"), ("place", "places", "placed"))), past
        )
        told = [f"{who.name} {put} {first} {rng.choice(('into', 'in'))} {counted(divisor, holder, rng)}{fairly}"]
        if not clauses and rng.random() < 0.5:
            told = rng.choice(([f"{first} are {rng.choice(('put', 'packed', 'placed'))}{fairly} in {counted(divisor, holder, rng)}"],
                               [f"there are {first} in {counted(divisor, holder, rng)}", f"each {holder} has the same number"],
                               [f"{counted(divisor, holder, rng)} hold {first}{fairly}"]))  # fmt: skip
        ask = rng.choice((f"how many {many} are in each {holder}", f"how many {many} are in one {holder}", "how many are in each",
                          f"how many {many} per {holder}", f"how many {many} does each {holder} have"))  # fmt: skip
    else:
        told = rng.choice((
            [f"{who.name} {who.does(HOLDS[0], past)} {first}", f"{again(rng, who)} {who.does(('put', 'puts', 'put'), past)} {number(divisor, rng)} in each {holder}"],
            [f"{who.name} {who.does(('pack', 'packs', 'packed'), past)} {first}", f"{number(divisor, rng)} {many} fit in {rng.choice(('a', 'one', 'each'))} {holder}"],
            [f"there are {first}", f"one {holder} holds {number(divisor, rng)}"],
            [f"{first} are put in {plural(holder)} of {number(divisor, rng)}"],
            [f"{who.name} {who.does(('make', 'makes', 'made'), past)} {plural(holder)} of {number(divisor, rng)} {many} from {first}"],
        ))  # fmt: skip
        ask = rng.choice((f"how many {plural(holder)} {rng.choice(('are there', 'are needed', 'is that', 'does it take'))}",
                          f"how many {plural(holder)} {who.asks(False)} need", f"how many {plural(holder)}",
                          f"how many {plural(holder)} {who.asks(past)} {rng.choice(('use', 'fill', 'get'))}"))  # fmt: skip
    return Story([*clauses, *told], ask, steps, expression)


@story(4)
def money(rng: random.Random) -> Story:
    """Prices, change, wages and savings."""
    who, one = somebody(rng), noun(rng)
    unit = rng.choice(("dollars", "dollars", "dollars", "dollars", "euros", "cents", "coins"))
    count, price = factors(rng)
    past, form, many = rng.random() < 0.5, rng.randrange(9), plural(one)
    costs = rng.choice(("costs", "is", "sells for"))
    buys = who.does(
        rng.choice((("buy", "buys", "bought"), ("get", "gets", "got"), ("order", "orders", "ordered"))), past
    )
    spend = rng.choice((f"how much {who.asks(past)} {rng.choice(('pay', 'spend'))}", "how much is that", "what is the total",
                        "how much does it cost", f"how many {unit} {who.asks(past)} {rng.choice(('pay', 'spend'))} in total",
                        "what is the total cost", "how much in total", f"how many {unit} is that"))  # fmt: skip
    left = rng.choice((f"how much money {who.asks(False)} have left", f"how much {rng.choice(('money ', ''))}is left",
                       f"how many {unit} are left", f"how many {unit} {who.asks(False)} have {rng.choice(('left', 'now', 'still'))}",
                       f"how much {who.asks(False)} have left", "what is left"))  # fmt: skip
    shown, cost = f"{number(price, rng)} {unit}", count * price
    if form == 0:
        clauses = [f"{rng.choice(('a', 'one', 'each'))} {one} {costs} {shown}"]
        ask = rng.choice((f"how much {rng.choice(('do', 'are'))} {counted(count, one, rng)}" + " cost", f"what do {counted(count, one, rng)} cost",
                          f"how much does {who.name} pay for {counted(count, one, rng)}",
                          f"what is the price of {counted(count, one, rng)}"))  # fmt: skip
        return Story(clauses, ask.replace("are ", "do ", 1), [("*", count, price)], f"{count} * {price}")
    if form == 1:
        each = rng.choice((f"for {shown} each", f"at {shown} each", f"that cost {shown} each"))
        clauses = [f"{who.name} {buys} {counted(count, one, rng)} {each}"]
        if rng.random() < 0.4:
            clauses = [
                f"{who.name} {buys} {counted(count, one, rng)}",
                f"{rng.choice(('each', 'one', 'every'))} {one} {costs} {shown}",
            ]
        return Story(clauses, spend, [("*", count, price)], f"{count} * {price}")
    if form == 2:  # change
        cash = cost + small(rng, 1, 999 - cost) if cost < 900 else cost + 10
        cash = (cash // 10 + 1) * 10 if cash < 980 and rng.random() < 0.4 else cash
        money_first = f"{who.name} {who.does(HOLDS[0], past)} {cash} {unit}"
        bought = f"{again(rng, who)} {buys} {counted(count, one, rng)} {rng.choice(('for', 'at'))} {shown} each"
        if rng.random() < 0.3:
            money_first, bought = (
                f"{who.name} {buys} {counted(count, one, rng)} at {shown} each",
                f"{again(rng, who)} {who.does(('pay', 'pays', 'paid'), past)} with {cash} {unit}",
            )
        return Story([money_first, bought], left if rng.random() < 0.7 else "how much change is there",
                     [("*", count, price), ("-", cash, cost)], f"{cash} - {count} * {price}")  # fmt: skip
    other = noun(rng)
    if form == 3:  # two kinds, one step or two
        second = small(rng, 1, 90)
        if rng.random() < 0.5:
            clauses = rng.choice((
                [f"{who.name} {buys} a {one} for {shown} and a {other} for {number(second, rng)} {unit}"],
                [f"a {one} {costs} {shown} and a {other} {costs} {number(second, rng)} {unit}", f"{who.name} {buys} both"],
                [f"the {one} {costs} {shown}", f"the {other} {costs} {number(second, rng)} {unit}"],
            ))  # fmt: skip
            return Story(clauses, spend, [("+", price, second)], f"{price} + {second}")
        clauses = rng.choice((
            [f"{who.name} {buys} {counted(count, one, rng)} at {shown} each and a {other} for {number(second, rng)} {unit}"],
            [f"a {one} {costs} {shown} and a {other} {costs} {number(second, rng)} {unit}", f"{who.name} {buys} {counted(count, one, rng)} and one {other}"],
            [f"{who.name} {buys} {counted(count, one, rng)} for {shown} each", f"{again(rng, who)} also {buys} a {other} for {number(second, rng)} {unit}"],
        ))  # fmt: skip
        return Story(clauses, spend, [("*", count, price), ("+", cost, second)], f"{count} * {price} + {second}")
    if form == 4:  # spend once or twice
        cash = small(rng, 10)
        first = small(rng, 1, cash - 2)
        bought = rng.choice((f"{who.does(('spend', 'spends', 'spent'), past)} {number(first, rng)}{rng.choice(('', ' ' + unit))} on {rng.choice(('a ' + one, many, 'food', 'games', 'clothes'))}",
                             f"{buys} a {one} for {number(first, rng)} {unit}", f"{who.does(('pay', 'pays', 'paid'), past)} {number(first, rng)} {unit} for a {one}"))  # fmt: skip
        clauses = [f"{who.name} {who.does(HOLDS[0], past)} {cash} {unit}", f"{again(rng, who)} {bought}"]
        steps: list[Step] = [("-", cash, first)]
        expression = f"{cash} - {first}"
        if rng.random() < 0.4 and cash - first > 2:
            second = small(rng, 1, cash - first - 1)
            clauses[1] += f" and {number(second, rng)} {unit} {rng.choice(('on', 'for'))} a {other}"
            steps.append(("-", cash - first, second))
            expression += f" - {second}"
        return Story(clauses, left, steps, expression)
    if form == 5:  # wages and savings
        span = rng.choice(("hour", "day", "week", "month"))
        verb = rng.choice(
            (
                ("earn", "earns", "earned"),
                ("save", "saves", "saved"),
                ("make", "makes", "made"),
                ("get", "gets", "got"),
                ("spend", "spends", "spent"),
            )
        )
        clauses = [
            f"{who.name} {who.does(verb, False)} {shown} {rng.choice(('a', 'an' if span == 'hour' else 'a', 'per', 'each', 'every'))} {span}"
        ]
        clauses[0] = clauses[0].replace(" a hour", " an hour")
        ask = rng.choice((f"how much {who.asks(False)} {verb[0]} in {counted(count, span, rng)}",
                          f"how many {unit} {who.asks(False)} {verb[0]} in {counted(count, span, rng)}"))  # fmt: skip
        return Story(clauses, ask, [("*", count, price)], f"{count} * {price}")
    if form == 6:  # how many for the money
        divisor, quotient = fact(rng)
        clauses = [
            f"{who.name} {'have' if who.is_plural else 'has'} {divisor * quotient} {unit}",
            f"{rng.choice(('a', 'one', 'each'))} {one} {costs} {number(divisor, rng)} {unit}",
        ]
        if rng.random() < 0.3:
            clauses.reverse()
        return Story(clauses, rng.choice((f"how many {many} can {who.name} buy", f"how many {many} can {who.pronoun} get",
                                          f"how many {many} is that")), [("/", divisor * quotient, divisor)],
                     f"{divisor * quotient} / {divisor}")  # fmt: skip
    if form == 7:  # unit price
        divisor, quotient = fact(rng)
        total = divisor * quotient
        clauses = rng.choice(
            (
                [f"{counted(divisor, one, rng)} cost {total} {unit}"],
                [
                    f"{who.name} {who.does(('pay', 'pays', 'paid'), past)} {total} {unit} for {counted(divisor, one, rng)}"
                ],
            )
        )
        return Story(clauses, rng.choice((f"how much does one {one} cost", f"what is the price of one {one}", f"how much is each {one}",
                                          f"what does a {one} cost")), [("/", total, divisor)], f"{total} / {divisor}")  # fmt: skip
    goal = small(rng, 10)
    has = small(rng, 1, goal - 1)
    clauses = rng.choice((
        [f"{who.name} {who.does(('want', 'wants', ''), False)} {rng.choice(('to buy ', ''))}a {one} that costs {goal} {unit}", f"{again(rng, who)} {who.does(('have', 'has', ''), False)} {has} {unit}"],
        [f"a {one} {costs} {goal} {unit}", f"{who.name} {'have' if who.is_plural else 'has'} {rng.choice(('only ', 'already ', ''))}{has}"],
        [f"{who.name} {'are' if who.is_plural else 'is'} saving {goal} {unit} for a {one}".replace("I are", "I am"), f"{again(rng, who)} {'have' if who.is_plural else 'has'} {has} so far"],
    ))  # fmt: skip
    return Story(clauses, rng.choice((f"how much more {rng.choice(('money ', ''))}{who.asks(False)} need", f"how many {unit} are missing",
                                      f"how many more {unit} {who.asks(False)} need", f"how much {rng.choice(('is missing', 'more is needed'))}")),
                 [("-", goal, has)], f"{goal} - {has}")  # fmt: skip


@story(3)
def per_time(rng: random.Random) -> Story:
    """So many a day, an hour or a week, for so long."""
    who, one = somebody(rng), noun(rng)
    verb, unit = rng.choice((
        (("walk", "walks"), "mile"), (("run", "runs"), "kilometer"), (("drive", "drives"), "mile"), (("ride", "rides"), "km"),
        (("read", "reads"), "page"), (("bake", "bakes"), one), (("eat", "eats"), one), (("make", "makes"), one),
        (("sell", "sells"), one), (("paint", "paints"), one), (("write", "writes"), "letter"), (("wash", "washes"), one),
        (("drink", "drinks"), "cup"), (("practice", "practices"), "minute"), (("sleep", "sleeps"), "hour"),
        (("work", "works"), "hour"), (("use", "uses"), one), (("plant", "plants"), one), (("swim", "swims"), "lap"),
        (("collect", "collects"), one), (("need", "needs"), one), (("fly", "flies"), "km"), (("learn", "learns"), "word"),
    ))  # fmt: skip
    many = unit if unit == "km" else plural(unit)
    span = rng.choice(("day", "day", "day", "week", "hour", "month", "minute", "morning", "evening", "night"))
    times, each = factors(rng)
    if rng.random() < 0.15:
        who = Who(
            rng.choice(("a machine", "a car", "a train", "a bus", "a factory", "a bird", "a bike", "a boat")),
            "it",
            "its",
            False,
        )
    amount = f"{number(each, rng)} {many if each != 1 else unit}"
    per = rng.choice(
        (f"every {span}", f"each {span}", f"a {span}".replace("a hour", "an hour"), f"per {span}", f"in one {span}")
    )
    clause = f"{who.name} {who.does((*verb, ''), False)} {amount} {per}"
    long = counted(times, span, rng)
    week = span == "day" and rng.random() < 0.2
    if week:
        times, long = 7, rng.choice(("a week", "one week"))
    ask = rng.choice((f"how many {many} {who.asks(False)} {verb[0]} in {long}", f"how many {many} is that in {long}",
                      f"how many {many} in {long}", f"how many {many} {who.asks(False)} {verb[0]} {'in' if week else 'after'} {long}"))  # fmt: skip
    if rng.random() < 0.2 and not week:
        clause, ask = f"{clause} for {long}", rng.choice((f"how many {many} is that", f"how many {many} is that in total",
                                                           f"how many {many} {who.asks(False)} {verb[0]}"))  # fmt: skip
    if rng.random() < 0.15:  # backwards
        divisor, quotient = fact(rng)
        clause = f"{who.name} {who.does((*verb, ''), False)} {number(divisor, rng)} {many} {per}"
        goal = f"{divisor * quotient} {many}"
        return Story([clause], rng.choice((f"how many {span}s {'do' if who.is_plural else 'does'} {who.name} need for {goal}",
                                           f"how many {span}s does it take to {verb[0]} {goal}", f"how long does it take for {goal}")),
                     [("/", divisor * quotient, divisor)], f"{divisor * quotient} / {divisor}")  # fmt: skip
    steps: list[Step] = [("*", times, each)]
    if rng.random() < 0.2 and times * each < 900:
        extra = small(rng, 1, 90)
        clauses = [f"{clause} for {long}" if " for " not in clause else clause,
                   f"{rng.choice(('then', 'after that', 'later', 'and then'))} {again(rng, who)} {who.does((*verb, ''), False)} {number(extra, rng)} more"]  # fmt: skip
        ask = rng.choice(
            (
                f"how many {many} is that in total",
                f"how many {many} is that",
                f"how many {many} {who.asks(False)} {verb[0]} in all",
            )
        )
        return Story(clauses, ask, [*steps, ("+", times * each, extra)], f"{times} * {each} + {extra}")
    return Story([clause], ask, steps, f"{times} * {each}")


@story(2)
def measures(rng: random.Random) -> Story:
    """Ages, heights, distances, weights, temperatures and times that grow, shrink or are compared."""
    what, unit, more, less = rng.choice((
        ("tall", "cm", "taller", "shorter"), ("long", "meters", "longer", "shorter"), ("old", "years", "older", "younger"),
        ("heavy", "kg", "heavier", "lighter"), ("deep", "meters", "deeper", "shallower"), ("high", "feet", "higher", "lower"),
        ("old", "years", "older", "younger"), ("wide", "inches", "wider", "narrower"),
    ))  # fmt: skip
    value = small(rng, 4, 200)
    loses = rng.random() < 0.45
    amount = small(rng, 1, value - 1 if loses else 200)
    sign, word = ("-", less) if loses else ("+", more)
    steps: list[Step] = [(sign, value, amount)]
    expression, form = f"{value} {sign} {amount}", rng.randrange(5)
    who, other = somebody(rng), somebody(rng)
    if form == 0:
        a, b = (who.name, other.name) if what in ("old", "tall") else (f"the {noun(rng)}", f"the {noun(rng)}")
        be, be_other = (
            "am" if name == "I" else "are" if name in ("we", "they", "my friends") else "is" for name in (a, b)
        )
        size = f" {what}" if rng.random() < 0.8 or what != "old" else ""
        return Story([f"{a} {be} {value} {unit}{size}", f"{b} {be_other} {amount} {unit} {word}{rng.choice(('', ' than ' + a))}"],
                     f"how {what} {be_other} {b}", steps, expression)  # fmt: skip
    if form == 1:
        up, down = rng.choice(((("grow", "grew", "grows"), ("shrink", "shrank", "shrinks")), (("rise", "rose", "rises"), ("fall", "fell", "falls")),
                               (("go up", "went up", "goes up"), ("go down", "went down", "goes down"))))  # fmt: skip
        subject = rng.choice(
            (
                "a tree",
                "a plant",
                "the water",
                "the temperature",
                "the snow",
                "a tower",
                "the river",
                "the price",
                "the child",
            )
        )
        unit = (
            "degrees"
            if subject == "the temperature"
            else "dollars"
            if subject == "the price"
            else rng.choice(("cm", "inches", "meters"))
        )
        again_ = rng.choice(("it", "it", subject.replace("a ", "the ")))
        clauses = [f"{subject} {rng.choice(('was', 'is'))} {value} {unit}{rng.choice(('', ' high')) if unit not in ('degrees', 'dollars') else ''}",
                   f"{again_} {rng.choice((down if loses else up)[1:])} {rng.choice(('by ', ''))}{amount}{rng.choice(('', ' ' + unit))}"]  # fmt: skip
        return Story(clauses, rng.choice((f"how {'high' if unit not in ('degrees', 'dollars') else 'much'} is it now", "what is it now", f"how many {unit} is it now",
                                          "what is the new value")), steps, expression)  # fmt: skip
    if form == 2:
        unit = rng.choice(("miles", "km", "kilometers", "meters"))
        verb = rng.choice(
            (
                ("walk", "walks", "walked"),
                ("drive", "drives", "drove"),
                ("ride", "rides", "rode"),
                ("run", "runs", "ran"),
                ("hike", "hikes", "hiked"),
            )
        )
        first, second = small(rng, 2, 300), small(rng, 2, 300)
        where = rng.choice((("to school", "to the park"), ("in the morning", "in the evening"), ("on Monday", "on Tuesday"), ("north", "east"), ("first", "then"),
                            ("to the city", "back"), ("before lunch", "later"), ("to the lake", "to the village")))  # fmt: skip
        clauses = [
            f"{who.name} {who.does(verb, True)} {first} {unit} {where[0]} and {rng.choice(('', 'then '))}{second} {unit} {where[1]}"
        ]
        return Story(clauses, rng.choice((f"how far did {who.name} {verb[0]}", f"how many {unit} did {who.name} {verb[0]}", f"how many {unit} is that",
                                          "how far is that in total")), [("+", first, second)], f"{first} + {second}")  # fmt: skip
    if form == 3:
        unit = rng.choice(("liters", "kg", "meters", "minutes", "hours", "grams", "pounds", "gallons"))
        whole = rng.choice(
            ("a tank", "a sack", "a roll", "a lesson", "a bottle", "a rope", "a barrel", "a film", "a pool", "a board")
        )
        value = small(rng, 4, 300)
        amount = small(rng, 1, value - 1)
        gone = rng.choice(
            (
                f"{amount} {unit} are {rng.choice(('used', 'gone', 'cut off', 'taken', 'over'))}",
                f"{who.name} {who.does(('use', 'uses', 'used'), True)} {amount} {unit}",
            )
        )
        return Story([f"{whole} {rng.choice(('has', 'holds', 'lasts', 'is'))} {value} {unit}", gone],
                     rng.choice((f"how many {unit} are left", "how much is left", f"how many {unit} remain")), [("-", value, amount)], f"{value} - {amount}")  # fmt: skip
    divisor, quotient = fact(rng)
    whole, piece = rng.choice(
        (
            ("a rope", "piece"),
            ("a ribbon", "piece"),
            ("a board", "part"),
            ("a road", "part"),
            ("a cake", "slice"),
            ("a cable", "part"),
            ("a stick", "piece"),
        )
    )
    unit = rng.choice(("cm", "meters", "feet", "inches"))
    clauses = [f"{whole} {rng.choice(('of', 'is'))} {divisor * quotient} {unit}{' long'}".replace(" of ", " is "),
               f"{rng.choice(('it is cut', who.name + ' ' + who.does(('cut', 'cuts', 'cut'), False) + ' it'))} into {counted(divisor, piece, rng)}{rng.choice(('', ' of the same length'))}"]  # fmt: skip
    return Story(clauses, rng.choice((f"how long is {rng.choice(('one', 'each', 'every'))} {piece}", f"how many {unit} is {rng.choice(('one', 'each'))} {piece}")),
                 [("/", divisor * quotient, divisor)], f"{divisor * quotient} / {divisor}")  # fmt: skip


@story(1)
def known_counts(rng: random.Random) -> Story:
    """What everybody knows: legs, wheels, days of a week, months, a dozen."""
    whole, part, each = rng.choice((
        ("dog", "leg", 4), ("cat", "leg", 4), ("bird", "leg", 2), ("hen", "leg", 2), ("car", "wheel", 4), ("bike", "wheel", 2),
        ("week", "day", 7), ("year", "month", 12), ("dozen", "egg", 12), ("hand", "finger", 5), ("person", "eye", 2), ("cow", "leg", 4),
        ("horse", "leg", 4), ("ant", "leg", 6), ("hour", "minute", 60), ("child", "hand", 2), ("truck", "wheel", 6),
    ))  # fmt: skip
    count = rng.randint(2, 9)
    n, parts_ = counted(count, whole, rng), plural(part)
    told = [f"{rng.choice(('a', 'one', 'each', 'every'))} {whole} has {each} {parts_}"] if rng.random() < 0.6 else []
    asks = [
        f"how many {parts_} do {n} have",
        f"how many {parts_} are {'in' if whole in ('week', 'year', 'dozen', 'hour') else 'on'} {n}",
        f"how many {parts_} have {n}",
    ]
    if not told and rng.random() < 0.5:
        told, asks = (
            [f"there are {n}"],
            [f"how many {parts_} are there", f"how many {parts_} do they have", f"how many {parts_} is that"],
        )
    return Story(told, rng.choice(asks), [("*", count, each)], f"{count} * {each}")


@story(2)
def bare(rng: random.Random) -> Story:
    """A bare expression, in signs or in words."""
    sign = rng.choice("+-*/")
    if sign == "*":
        first, second = factors(rng)
        if rng.random() < 0.4:
            first, second = second, first
    elif sign == "/":
        second, quotient = fact(rng)
        first = second * quotient
    else:
        first = small(rng, 2)
        second = small(rng, 1, first if sign == "-" else 999 - first)
    words = {"+": ("plus", "+", "and", "+"), "-": ("minus", "-", "take away", "-"), "*": ("times", "*", "x", "multiplied by"),
             "/": ("divided by", "/", ":", "over")}[sign]  # fmt: skip
    middle = rng.choice(words)
    gap = "" if middle in "+-*/:x" and rng.random() < 0.25 else " "
    text = f"{number(first, rng) if gap else first}{gap}{middle}{gap}{number(second, rng) if gap else second}"
    ask = rng.choice((f"what is {text}", f"how much is {text}", f"calculate {text}", text, f"{text} =", f"{text} = ", f"what's {text}",
                      f"compute {text}", f"can you tell me what {text} is", f"{text} is what", f"solve {text}", f"what do you get for {text}"))  # fmt: skip
    return Story([], ask, [(sign, first, second)], f"{first} {sign} {second}")


# --- from stories to problems -----------------------------------------------------------------------------------


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
        name, (_, maker) = rng.choices(list(STORIES.items()), [weight for weight, _ in STORIES.values()])[0]
        told = maker(rng)
        worked = [_worked_step(step) for step in told.steps]
        numbers = [n for _, first, second in told.steps for n in (first, second)] + [result for _, result in worked]
        if max(numbers) > problems.MAX_VALUE or any(sign == "*" and min(a, b) > 10 for sign, a, b in told.steps):
            continue
        lines = [f"{lead} {text}." for lead, (text, _) in zip(LEADS[len(worked)], worked, strict=True)]
        result = worked[-1][1]
        text = "\n".join([*lines, f"#### {result}"])
        return Problem(name, _joined(rng, told), text, str(result), told.expression)


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
