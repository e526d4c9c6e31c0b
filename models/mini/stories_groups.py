"""Stories of equal groups, shares, and so many per day."""

from __future__ import annotations

import random

from story_parts import (
    Step,
    Story,
    again,
    change,
    fact,
    factors,
    how_many,
    noun,
    passive_change,
    small,
)
from words import (
    HOLDERS,
    HOLDS,
    PEOPLE,
    Who,
    counted,
    number,
    plural,
    somebody,
)


def equal_groups(rng: random.Random) -> Story:
    """Holders with the same number in each, and sometimes a few more or fewer."""
    one = rng.choice(PEOPLE) if rng.random() < 0.15 else noun(rng)
    holder, who, past = rng.choice(HOLDERS), somebody(rng), rng.random() < 0.35
    groups, each = factors(rng)
    if rng.random() < 0.3 and groups < 10 and each < 100:
        groups, each = each, groups
    many, has = (
        plural(one),
        who.does(rng.choice((*HOLDS[:5], ("buy", "buys", "bought"), ("fill", "fills", "filled"))), past),
    )
    n, each_shown = counted(groups, holder, rng), counted(each, one, rng)
    inside = rng.choice(("in each", f"in each {holder}", "each", f"per {holder}", f"in every {holder}", "inside each"))
    opening = rng.choice(
        (
            [f"{who.name} {has} {n} with {each_shown} {inside}"],
            [f"there are {n} with {each_shown} {inside}"],
            [
                f"there are {n}",
                f"{rng.choice(('each', 'every', 'one'))} {holder} "
                f"{rng.choice(('has', 'holds', 'contains'))} {each_shown}",
            ],
            [f"{who.name} {has} {n}", f"there are {each_shown} {inside if inside != 'each' else 'in each'}"],
            [
                f"{who.name} {has} {n} of {many}",
                f"each {holder} {rng.choice(('has', 'holds'))} {each_shown}",
            ],
            [f"a {holder} {rng.choice(('has', 'holds', 'contains'))} {each_shown}", f"{who.name} {has} {n}"],
            [f"{who.name} {has} {n} of {each_shown}{rng.choice(('', ' each'))}"],
            [f"each of {n} {rng.choice(('has', 'holds', 'contains'))} {each_shown}"],
        )
    )
    total: Step = ("*", groups, each)
    ask = rng.choice(
        (
            f"how many {many} are there",
            f"how many {many} are there in total",
            f"how many {many} {who.asks(False)} have",
            f"how many {many} is that",
            f"how many {many}",
            f"how many {many} are there {rng.choice(('altogether', 'in all'))}",
            f"how many {many} are in all {plural(holder)}",
            "how many",
        )
    )
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
    extra = (
        change(rng, who, past, amount, one, not loses, again(rng, who))
        if rng.random() < 0.6
        else passive_change(rng, amount, one, not loses, past)
    )
    return Story(
        [*opening, extra],
        how_many(rng, who, past, one, loses),
        [total, ("-" if loses else "+", product, amount)],
        f"{groups} * {each} {'-' if loses else '+'} {amount}",
    )


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
        clauses = [
            f"{who.name} {who.does(HOLDS[0], past)} {counted(total + amount, one, rng)}",
            change(rng, who, past, amount, one, False, again(rng, who)),
        ]
    elif before < 0.2:
        groups = rng.choice([n for n in range(2, 11) if total % n == 0] or [0])
        if groups and total // groups < 100:
            steps.insert(0, ("*", groups, total // groups))
            clauses = [
                f"{who.name} {who.does(HOLDS[0], past)} {counted(groups, holder, rng)} of "
                f"{counted(total // groups, one, rng)}"
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
            told = rng.choice(
                (
                    [f"{group} share {first}{fairly}"],
                    [f"{first} are {rng.choice(('shared', 'divided', 'split'))}{fairly} among {group}"],
                    [f"there are {first} and {group}"],
                    [f"{first} {rng.choice(('for', 'and'))} {group}"],
                    [f"{who.name} {'have' if who.is_plural else 'has'} {first} for {group}"],
                )
            )
        ask = rng.choice(
            (
                f"how many {many} does each {people} get",
                "how many does each get",
                f"how many {many} does each one get",
                f"how many {many} does every {people} get",
                f"how many for each {people}",
                f"how many {many} per {people}",
                f"how many {many} does one {people} get",
            )
        )
    elif rng.random() < 0.5:
        put = who.does(
            rng.choice((("put", "puts", "put"), ("pack", "packs", "packed"), ("place", "places", "placed"))), past
        )
        told = [f"{who.name} {put} {first} {rng.choice(('into', 'in'))} {counted(divisor, holder, rng)}{fairly}"]
        if not clauses and rng.random() < 0.5:
            told = rng.choice(
                (
                    [
                        f"{first} are {rng.choice(('put', 'packed', 'placed'))}{fairly} in "
                        f"{counted(divisor, holder, rng)}"
                    ],
                    [f"there are {first} in {counted(divisor, holder, rng)}", f"each {holder} has the same number"],
                    [f"{counted(divisor, holder, rng)} hold {first}{fairly}"],
                )
            )
        ask = rng.choice(
            (
                f"how many {many} are in each {holder}",
                f"how many {many} are in one {holder}",
                "how many are in each",
                f"how many {many} per {holder}",
                f"how many {many} does each {holder} have",
            )
        )
    else:
        told = rng.choice(
            (
                [
                    f"{who.name} {who.does(HOLDS[0], past)} {first}",
                    f"{again(rng, who)} {who.does(('put', 'puts', 'put'), past)} "
                    f"{number(divisor, rng)} in each {holder}",
                ],
                [
                    f"{who.name} {who.does(('pack', 'packs', 'packed'), past)} {first}",
                    f"{number(divisor, rng)} {many} fit in {rng.choice(('a', 'one', 'each'))} {holder}",
                ],
                [f"there are {first}", f"one {holder} holds {number(divisor, rng)}"],
                [f"{first} are put in {plural(holder)} of {number(divisor, rng)}"],
                [
                    f"{who.name} {who.does(('make', 'makes', 'made'), past)} {plural(holder)} of "
                    f"{number(divisor, rng)} {many} from {first}"
                ],
            )
        )
        ask = rng.choice(
            (
                f"how many {plural(holder)} {rng.choice(('are there', 'are needed', 'is that', 'does it take'))}",
                f"how many {plural(holder)} {who.asks(False)} need",
                f"how many {plural(holder)}",
                f"how many {plural(holder)} {who.asks(past)} {rng.choice(('use', 'fill', 'get'))}",
            )
        )
    return Story([*clauses, *told], ask, steps, expression)


def per_time(rng: random.Random) -> Story:
    """So many a day, an hour or a week, for so long."""
    who, one = somebody(rng), noun(rng)
    verb, unit = rng.choice(
        (
            (("walk", "walks"), "mile"),
            (("run", "runs"), "kilometer"),
            (("drive", "drives"), "mile"),
            (("ride", "rides"), "km"),
            (("read", "reads"), "page"),
            (("bake", "bakes"), one),
            (("eat", "eats"), one),
            (("make", "makes"), one),
            (("sell", "sells"), one),
            (("paint", "paints"), one),
            (("write", "writes"), "letter"),
            (("wash", "washes"), one),
            (("drink", "drinks"), "cup"),
            (("practice", "practices"), "minute"),
            (("sleep", "sleeps"), "hour"),
            (("work", "works"), "hour"),
            (("use", "uses"), one),
            (("plant", "plants"), one),
            (("swim", "swims"), "lap"),
            (("collect", "collects"), one),
            (("need", "needs"), one),
            (("fly", "flies"), "km"),
            (("learn", "learns"), "word"),
        )
    )
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
    ask = rng.choice(
        (
            f"how many {many} {who.asks(False)} {verb[0]} in {long}",
            f"how many {many} is that in {long}",
            f"how many {many} in {long}",
            f"how many {many} {who.asks(False)} {verb[0]} {'in' if week else 'after'} {long}",
        )
    )
    if rng.random() < 0.2 and not week:
        clause, ask = (
            f"{clause} for {long}",
            rng.choice(
                (
                    f"how many {many} is that",
                    f"how many {many} is that in total",
                    f"how many {many} {who.asks(False)} {verb[0]}",
                )
            ),
        )
    if rng.random() < 0.15:  # backwards
        divisor, quotient = fact(rng)
        clause = f"{who.name} {who.does((*verb, ''), False)} {number(divisor, rng)} {many} {per}"
        goal = f"{divisor * quotient} {many}"
        return Story(
            [clause],
            rng.choice(
                (
                    f"how many {span}s {'do' if who.is_plural else 'does'} {who.name} need for {goal}",
                    f"how many {span}s does it take to {verb[0]} {goal}",
                    f"how long does it take for {goal}",
                )
            ),
            [("/", divisor * quotient, divisor)],
            f"{divisor * quotient} / {divisor}",
        )
    steps: list[Step] = [("*", times, each)]
    if rng.random() < 0.2 and times * each < 900:
        extra = small(rng, 1, 90)
        clauses = [
            f"{clause} for {long}" if " for " not in clause else clause,
            f"{rng.choice(('then', 'after that', 'later', 'and then'))} {again(rng, who)} "
            f"{who.does((*verb, ''), False)} {number(extra, rng)} more",
        ]
        ask = rng.choice(
            (
                f"how many {many} is that in total",
                f"how many {many} is that",
                f"how many {many} {who.asks(False)} {verb[0]} in all",
            )
        )
        return Story(clauses, ask, [*steps, ("+", times * each, extra)], f"{times} * {each} + {extra}")
    return Story([clause], ask, steps, f"{times} * {each}")


def known_counts(rng: random.Random) -> Story:
    """What everybody knows: legs, wheels, days of a week, months, a dozen."""
    whole, part, each = rng.choice(
        (
            ("dog", "leg", 4),
            ("cat", "leg", 4),
            ("bird", "leg", 2),
            ("hen", "leg", 2),
            ("car", "wheel", 4),
            ("bike", "wheel", 2),
            ("week", "day", 7),
            ("year", "month", 12),
            ("dozen", "egg", 12),
            ("hand", "finger", 5),
            ("person", "eye", 2),
            ("cow", "leg", 4),
            ("horse", "leg", 4),
            ("ant", "leg", 6),
            ("hour", "minute", 60),
            ("child", "hand", 2),
            ("truck", "wheel", 6),
        )
    )
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
