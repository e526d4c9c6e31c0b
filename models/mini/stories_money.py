"""Stories about prices, change, wages and savings."""

from __future__ import annotations

import random

from story_parts import (
    Step,
    Story,
    again,
    fact,
    factors,
    noun,
    small,
)
from words import (
    HOLDS,
    counted,
    number,
    plural,
    somebody,
)


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
    spend = rng.choice(
        (
            f"how much {who.asks(past)} {rng.choice(('pay', 'spend'))}",
            "how much is that",
            "what is the total",
            "how much does it cost",
            f"how many {unit} {who.asks(past)} {rng.choice(('pay', 'spend'))} in total",
            "what is the total cost",
            "how much in total",
            f"how many {unit} is that",
        )
    )
    left = rng.choice(
        (
            f"how much money {who.asks(False)} have left",
            f"how much {rng.choice(('money ', ''))}is left",
            f"how many {unit} are left",
            f"how many {unit} {who.asks(False)} have {rng.choice(('left', 'now', 'still'))}",
            f"how much {who.asks(False)} have left",
            "what is left",
        )
    )
    shown, cost = f"{number(price, rng)} {unit}", count * price
    if form == 0:
        clauses = [f"{rng.choice(('a', 'one', 'each'))} {one} {costs} {shown}"]
        ask = rng.choice(
            (
                f"how much {rng.choice(('do', 'are'))} {counted(count, one, rng)}" + " cost",
                f"what do {counted(count, one, rng)} cost",
                f"how much does {who.name} pay for {counted(count, one, rng)}",
                f"what is the price of {counted(count, one, rng)}",
            )
        )
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
        return Story(
            [money_first, bought],
            left if rng.random() < 0.7 else "how much change is there",
            [("*", count, price), ("-", cash, cost)],
            f"{cash} - {count} * {price}",
        )
    other = noun(rng)
    if form == 3:  # two kinds, one step or two
        second = small(rng, 1, 90)
        if rng.random() < 0.5:
            clauses = rng.choice(
                (
                    [f"{who.name} {buys} a {one} for {shown} and a {other} for {number(second, rng)} {unit}"],
                    [
                        f"a {one} {costs} {shown} and a {other} {costs} {number(second, rng)} {unit}",
                        f"{who.name} {buys} both",
                    ],
                    [f"the {one} {costs} {shown}", f"the {other} {costs} {number(second, rng)} {unit}"],
                )
            )
            return Story(clauses, spend, [("+", price, second)], f"{price} + {second}")
        clauses = rng.choice(
            (
                [
                    f"{who.name} {buys} {counted(count, one, rng)} at {shown} each and a {other} for "
                    f"{number(second, rng)} {unit}"
                ],
                [
                    f"a {one} {costs} {shown} and a {other} {costs} {number(second, rng)} {unit}",
                    f"{who.name} {buys} {counted(count, one, rng)} and one {other}",
                ],
                [
                    f"{who.name} {buys} {counted(count, one, rng)} for {shown} each",
                    f"{again(rng, who)} also {buys} a {other} for {number(second, rng)} {unit}",
                ],
            )
        )
        return Story(clauses, spend, [("*", count, price), ("+", cost, second)], f"{count} * {price} + {second}")
    if form == 4:  # spend once or twice
        cash = small(rng, 10)
        first = small(rng, 1, cash - 2)
        bought = rng.choice(
            (
                f"{who.does(('spend', 'spends', 'spent'), past)} "
                f"{number(first, rng)}{rng.choice(('', ' ' + unit))} on "
                f"{rng.choice(('a ' + one, many, 'food', 'games', 'clothes'))}",
                f"{buys} a {one} for {number(first, rng)} {unit}",
                f"{who.does(('pay', 'pays', 'paid'), past)} {number(first, rng)} {unit} for a {one}",
            )
        )
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
            f"{who.name} {who.does(verb, False)} {shown} "
            f"{rng.choice(('a', 'an' if span == 'hour' else 'a', 'per', 'each', 'every'))} {span}"
        ]
        clauses[0] = clauses[0].replace(" a hour", " an hour")
        ask = rng.choice(
            (
                f"how much {who.asks(False)} {verb[0]} in {counted(count, span, rng)}",
                f"how many {unit} {who.asks(False)} {verb[0]} in {counted(count, span, rng)}",
            )
        )
        return Story(clauses, ask, [("*", count, price)], f"{count} * {price}")
    if form == 6:  # how many for the money
        divisor, quotient = fact(rng)
        clauses = [
            f"{who.name} {'have' if who.is_plural else 'has'} {divisor * quotient} {unit}",
            f"{rng.choice(('a', 'one', 'each'))} {one} {costs} {number(divisor, rng)} {unit}",
        ]
        if rng.random() < 0.3:
            clauses.reverse()
        return Story(
            clauses,
            rng.choice(
                (
                    f"how many {many} can {who.name} buy",
                    f"how many {many} can {who.pronoun} get",
                    f"how many {many} is that",
                )
            ),
            [("/", divisor * quotient, divisor)],
            f"{divisor * quotient} / {divisor}",
        )
    if form == 7:  # unit price
        divisor, quotient = fact(rng)
        total = divisor * quotient
        clauses = rng.choice(
            (
                [f"{counted(divisor, one, rng)} cost {total} {unit}"],
                [
                    f"{who.name} {who.does(('pay', 'pays', 'paid'), past)} {total} {unit} for "
                    f"{counted(divisor, one, rng)}"
                ],
            )
        )
        return Story(
            clauses,
            rng.choice(
                (
                    f"how much does one {one} cost",
                    f"what is the price of one {one}",
                    f"how much is each {one}",
                    f"what does a {one} cost",
                )
            ),
            [("/", total, divisor)],
            f"{total} / {divisor}",
        )
    goal = small(rng, 10)
    has = small(rng, 1, goal - 1)
    clauses = rng.choice(
        (
            [
                f"{who.name} {who.does(('want', 'wants', ''), False)} {rng.choice(('to buy ', ''))}a "
                f"{one} that costs {goal} {unit}",
                f"{again(rng, who)} {who.does(('have', 'has', ''), False)} {has} {unit}",
            ],
            [
                f"a {one} {costs} {goal} {unit}",
                f"{who.name} {'have' if who.is_plural else 'has'} {rng.choice(('only ', 'already ', ''))}{has}",
            ],
            [
                f"{who.name} {'are' if who.is_plural else 'is'} saving {goal} {unit} for a {one}".replace(
                    "I are", "I am"
                ),
                f"{again(rng, who)} {'have' if who.is_plural else 'has'} {has} so far",
            ],
        )
    )
    return Story(
        clauses,
        rng.choice(
            (
                f"how much more {rng.choice(('money ', ''))}{who.asks(False)} need",
                f"how many {unit} are missing",
                f"how many more {unit} {who.asks(False)} need",
                f"how much {rng.choice(('is missing', 'more is needed'))}",
            )
        ),
        [("-", goal, has)],
        f"{goal} - {has}",
    )
