"""Stories about how many there are: changes, parts of a whole, and comparisons."""

from __future__ import annotations

import random

import problems
from story_parts import (
    Step,
    Story,
    again,
    change,
    factors,
    how_many,
    kind_of,
    listed,
    noun,
    passive_change,
    small,
    start,
    where,
)
from words import (
    COLORS,
    HOLDS,
    KINDS,
    PEOPLE,
    PLACES,
    THINGS,
    counted,
    number,
    plural,
    somebody,
)


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


def comings_and_goings(rng: random.Random) -> Story:
    """Things or people at a place, of which some come and some go."""
    one, past = rng.choice(PEOPLE) if rng.random() < 0.4 else noun(rng), rng.random() < 0.5
    value, place = small(rng, 3), rng.choice(PLACES)
    opening = rng.choice(
        (
            f"there {'were' if past else 'are'} {counted(value, one, rng)} {place}",
            f"{counted(value, one, rng)} {'were' if past else 'are'} {place}",
            f"{rng.choice(('a bus', 'a train', 'a ship', 'a room', 'a park', 'a shop', 'a box', 'a shelf'))} "
            f"{'had' if past else 'has'} {counted(value, one, rng)}",
        )
    )
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
    return Story(
        clauses,
        f"how many{rng.choice((' ' + many, ' ' + many, ''))} {rng.choice(still if loses else now)}",
        steps,
        expression,
    )


def parts(rng: random.Random) -> Story:
    """Two or three amounts of kinds, people, days or places, taken together."""
    one, past, many_parts = noun(rng), rng.random() < 0.5, 2 if rng.random() < 0.7 else 3
    amounts = [small(rng, 1, 300) for _ in range(many_parts)]
    who = somebody(rng)
    many, form = plural(one), rng.randrange(5)
    has = who.does(rng.choice(HOLDS), past)
    if form == 0:
        kinds = rng.sample(COLORS if rng.random() < 0.7 else KINDS, many_parts)
        told = listed(
            [f"{number(n, rng)} {kind} {many if n > 1 else one}" for n, kind in zip(amounts, kinds, strict=False)]
        )
        opening = f"{who.name} {has}" if rng.random() < 0.6 else f"there {'were' if past else 'are'}"
        clauses = [f"{opening} {told}"]
        ask = how_many(rng, who, past, one, False, is_total=True)
    elif form == 1:
        nouns = rng.sample(THINGS, many_parts)
        clauses = [
            f"{who.name} {has} {listed([counted(n, thing, rng) for n, thing in zip(amounts, nouns, strict=False)])}"
        ]
        them = rng.choice(("things", "items", " and ".join(plural(thing) for thing in nouns), "of them"))
        ask = rng.choice(
            (
                f"how many {them} {who.asks(False)} have",
                f"how many {them} is that in total",
                f"how many {them} are there {rng.choice(('altogether', 'in all', 'in total'))}",
            )
        )
    elif form == 2:
        people = [who]
        while len(people) < many_parts:
            people.append(somebody(rng, people[-1].name))
        verb = rng.choice(HOLDS)
        clauses = [
            f"{person.name} {person.does(verb, past)} {counted(n, one, rng)}"
            for person, n in zip(people, amounts, strict=False)
        ]
        ask = rng.choice(
            (
                f"how many {many} do they have together",
                f"how many {many} do they have",
                f"how many {many} do they have {rng.choice(('in all', 'altogether', 'in total', 'combined'))}",
                f"how many {many} are there",
                f"what is the total number of {many}",
                f"how many {many} {'did' if past else 'do'} they {verb[0]} together",
            )
        )
    elif form == 3:
        verb = rng.choice(
            (
                *HOLDS[6:],
                ("sell", "sells", "sold"),
                ("read", "reads", "read"),
                ("eat", "eats", "ate"),
                ("use", "uses", "used"),
                ("wash", "washes", "washed"),
                ("paint", "paints", "painted"),
            )
        )
        days = rng.choice(
            (list(rng.sample(problems.DAYS, many_parts)), ["the first day", "the second day", "the third day"])
        )
        days = [f"on {day}" for day in days]
        if rng.random() < 0.4:
            days = rng.choice(
                (
                    ["in the morning", "in the afternoon", "in the evening"],
                    ["yesterday", "today", "this evening"],
                    ["last week", "this week", "after that"],
                    ["in March", "in April", "in May"],
                    ["the first time", "the second time", "then"],
                )
            )
        pairs = [
            f"{number(n, rng)}{(' ' + many) if not i or rng.random() < 0.3 else ''} {day}"
            for i, (n, day) in enumerate(zip(amounts, days, strict=False))
        ]
        clauses = [f"{who.name} {who.does(verb, past)} {listed(pairs)}"]
        if rng.random() < 0.3:
            clauses = [
                f"{days[i].capitalize() if i else days[i]} {who.name} {who.does(verb, past)} {counted(n, one, rng)}"
                for i, n in enumerate(amounts)
            ]
        asked = f"{'did' if past else 'do' if who.is_plural else 'does'} {who.name} {verb[0]}"
        ask = f"how many {many} {asked}{rng.choice((' in total', ' altogether', ' in all', '', ' together'))}"
    else:
        places = rng.sample(PLACES, many_parts)
        shown = [
            f"{number(n, rng)}{(' ' + many) if not i or rng.random() < 0.3 else ''} {place}"
            for i, (n, place) in enumerate(zip(amounts, places, strict=False))
        ]
        clauses = [f"there {'were' if past else 'are'} {listed(shown)}"]
        ask = (
            f"how many {many} {'were' if past else 'are'} "
            f"there{rng.choice((' in total', ' altogether', '', ' in all'))}"
        )
    steps, total = [], amounts[0]
    for amount in amounts[1:]:
        steps.append(("+", total, amount))
        total += amount
    return Story(clauses, ask, steps, " + ".join(map(str, amounts)))


def rest_of_a_whole(rng: random.Random) -> Story:
    """A total of which one part is known."""
    one = rng.choice(PEOPLE) if rng.random() < 0.4 else noun(rng)
    total = small(rng, 4)
    part = small(rng, 1, total - 1)
    many, form = plural(one), rng.randrange(4)
    first, second = rng.sample((*KINDS, "young", "tall", "happy", "tired", "wet", "dry", "clean", "dirty"), 2)
    steps: list[Step] = [("-", total, part)]
    if form == 0:
        clauses = [
            f"there are {counted(total, one, rng)}{where(rng, 0.6)}",
            f"{number(part, rng)} of {rng.choice(('them', 'the ' + many))} are {first}",
        ]
        ask = f"how many {rng.choice((many, ''))} are {rng.choice(('not ' + first, second, 'not', second))}".replace(
            "  ", " "
        )
        clauses[1] += f" and the {rng.choice(('rest', 'others'))} are {second}"
    elif form == 1:
        who, other = somebody(rng), somebody(rng)
        clauses = [
            f"{who.name} and {other.name} have {counted(total, one, rng)} {rng.choice(('together', 'in total'))}",
            f"{who.name} {'have' if who.is_plural else 'has'} {number(part, rng)}",
        ]
        ask = f"how many{rng.choice((' ' + many, ''))} {other.asks(False)} have"
    elif form == 2:
        who = somebody(rng)
        need, have = ("need", "needs"), ("have", "has")
        goal = rng.choice((need, ("want", "wants"), ("have to make", "has to make"), ("want to get", "wants to get")))
        clauses = [
            f"{who.name} {who.does((*goal, ''), False)} {counted(total, one, rng)}",
            f"{again(rng, who)} {rng.choice(('already ', '', 'only '))}{who.does((*have, ''), False)} "
            f"{number(part, rng)}",
        ]
        ask = f"how many more {rng.choice((many + ' ', ''))}{who.asks(False)} need"
    else:
        who = somebody(rng)
        verb, noun_, done = rng.choice(
            (
                ("read", "page", "a book"),
                ("solve", "task", "a test"),
                ("walk", "mile", "a trail"),
                ("climb", "step", "a tower"),
                ("drive", "kilometer", "a trip"),
                ("swim", "lap", "a training"),
                ("clean", "room", "a hotel"),
            )
        )
        past_form = {
            "read": "read",
            "solve": "solved",
            "walk": "walked",
            "climb": "climbed",
            "drive": "drove",
            "swim": "swum",
            "clean": "cleaned",
        }[verb]
        clauses = [
            f"{done} has {counted(total, noun_, rng)}",
            f"{who.name} {'have' if who.is_plural else 'has'} "
            f"{rng.choice(('already ', ''))}{past_form} {number(part, rng)}",
        ]
        ask = rng.choice(
            (
                f"how many {plural(noun_)} are left",
                f"how many {plural(noun_)} are left to {verb}",
                f"how many more {plural(noun_)} must {who.name} {verb}",
            )
        )
    return Story(clauses, ask, steps, f"{total} - {part}")


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
        clauses = [
            f"{who.name} {verb} {counted(value, one, rng)}",
            f"{other.name} {other_verb} {number(amount, rng)} {word}{rng.choice(('', ' ' + many))} than {who.name}",
        ]
        if rng.random() < 0.15:
            clauses.reverse()
        steps: list[Step] = [("-" if loses else "+", value, amount)]
        result = value - amount if loses else value + amount
        if form == 0 and value + result < 1000:
            return Story(
                clauses,
                _together(rng, many),
                [*steps, ("+", value, result)],
                f"{value} + ({value} {'-' if loses else '+'} {amount})",
            )
        return Story(
            clauses, f"how many {many} {other.asks(False)} have", steps, f"{value} {'-' if loses else '+'} {amount}"
        )
    if form == 2:
        larger = small(rng, 3)
        less = small(rng, 1, larger - 1)
        pair = [f"{who.name} {verb} {counted(larger, one, rng)}", f"{other.name} {other_verb} {number(less, rng)}"]
        ask = rng.choice(
            (
                f"how many more {many} {who.asks(False)} have than {other.name}",
                f"how many more {who.asks(False)} have",
                f"how many fewer {many} {other.asks(False)} have",
                "what is the difference",
                f"how many {many} more than {other.name} {who.asks(False)} have",
            )
        )
        rng.shuffle(pair)
        return Story(pair, ask, [("-", larger, less)], f"{larger} - {less}")
    times, value = factors(rng)
    if form == 3 and rng.random() < 0.5:  # the other way round
        amount = small(rng, 1, 60)
        larger = amount + small(rng, 1, 60)
        is_more = rng.random() < 0.5
        known, sign = (larger, "-") if is_more else (larger - amount, "+")
        that = (
            f"{rng.choice(('that is', 'this is', 'these are'))} {amount} "
            f"{'more' if is_more else 'fewer'} than {other.name} {other_verb}"
        )
        ask = f"how many {many} {other.asks(False)} have"
        return Story(
            [f"{who.name} {verb} {counted(known, one, rng)}", that],
            ask,
            [(sign, known, amount)],
            f"{known} {sign} {amount}",
        )
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
        return Story(
            clauses,
            _together(rng, many),
            [("*", times, value), ("+", times * value, value)],
            f"{value} + {times} * {value}",
        )
    return Story(clauses, f"how many {many} {other.asks(False)} have", [("*", times, value)], f"{times} * {value}")


def _together(rng: random.Random, many: str) -> str:
    return rng.choice(
        (
            f"how many {many} do they have together",
            f"how many {many} do they have in total",
            f"how many {many} do both have",
            f"how many {many} are there altogether",
            f"how many {many} do they have in all",
            f"what is the total number of {many}",
        )
    )
