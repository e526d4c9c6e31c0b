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


class Deal:
    """What a story about money is told of, drawn at once; each method is one form of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.who, self.one = somebody(self.rng), noun(self.rng)
        self.unit = self.rng.choice(("dollars", "dollars", "dollars", "dollars", "euros", "cents", "coins"))
        self.count, self.price = factors(self.rng)
        self.past, self.form, self.many = self.rng.random() < 0.5, self.rng.randrange(9), plural(self.one)
        self.costs = self.rng.choice(("costs", "is", "sells for"))
        self.buys = self.who.does(
            self.rng.choice((("buy", "buys", "bought"), ("get", "gets", "got"), ("order", "orders", "ordered"))),
            self.past,
        )
        self.spend = self.rng.choice(
            (
                f"how much {self.who.asks(self.past)} {self.rng.choice(('pay', 'spend'))}",
                "how much is that",
                "what is the total",
                "how much does it cost",
                f"how many {self.unit} {self.who.asks(self.past)} {self.rng.choice(('pay', 'spend'))} in total",
                "what is the total cost",
                "how much in total",
                f"how many {self.unit} is that",
            )
        )
        self.left = self.rng.choice(
            (
                f"how much money {self.who.asks(False)} have left",
                f"how much {self.rng.choice(('money ', ''))}is left",
                f"how many {self.unit} are left",
                f"how many {self.unit} {self.who.asks(False)} have {self.rng.choice(('left', 'now', 'still'))}",
                f"how much {self.who.asks(False)} have left",
                "what is left",
            )
        )
        self.shown, self.cost = f"{number(self.price, self.rng)} {self.unit}", self.count * self.price
        self.other = noun(self.rng) if self.form >= 3 else ""

    def price_of_many(self) -> Story:
        """The price of one is known, that of many asked for."""
        clauses = [f"{self.rng.choice(('a', 'one', 'each'))} {self.one} {self.costs} {self.shown}"]
        ask = self.rng.choice(
            (
                f"how much {self.rng.choice(('do', 'are'))} {counted(self.count, self.one, self.rng)}" + " cost",
                f"what do {counted(self.count, self.one, self.rng)} cost",
                f"how much does {self.who.name} pay for {counted(self.count, self.one, self.rng)}",
                f"what is the price of {counted(self.count, self.one, self.rng)}",
            )
        )
        return Story(
            clauses, ask.replace("are ", "do ", 1), [("*", self.count, self.price)], f"{self.count} * {self.price}"
        )

    def many_at_a_price(self) -> Story:
        """Many are bought at a price."""
        each = self.rng.choice((f"for {self.shown} each", f"at {self.shown} each", f"that cost {self.shown} each"))
        clauses = [f"{self.who.name} {self.buys} {counted(self.count, self.one, self.rng)} {each}"]
        if self.rng.random() < 0.4:
            clauses = [
                f"{self.who.name} {self.buys} {counted(self.count, self.one, self.rng)}",
                f"{self.rng.choice(('each', 'one', 'every'))} {self.one} {self.costs} {self.shown}",
            ]
        return Story(clauses, self.spend, [("*", self.count, self.price)], f"{self.count} * {self.price}")

    def change(self) -> Story:
        """What is left of the money after many are bought."""
        cash = self.cost + small(self.rng, 1, 999 - self.cost) if self.cost < 900 else self.cost + 10
        cash = (cash // 10 + 1) * 10 if cash < 980 and self.rng.random() < 0.4 else cash
        money_first = f"{self.who.name} {self.who.does(HOLDS[0], self.past)} {cash} {self.unit}"
        bought = (
            f"{again(self.rng, self.who)} {self.buys} {counted(self.count, self.one, self.rng)} "
            f"{self.rng.choice(('for', 'at'))} {self.shown} each"
        )
        if self.rng.random() < 0.3:
            money_first, bought = (
                f"{self.who.name} {self.buys} {counted(self.count, self.one, self.rng)} at {self.shown} each",
                f"{again(self.rng, self.who)} {self.who.does(('pay', 'pays', 'paid'), self.past)} with "
                f"{cash} {self.unit}",
            )
        return Story(
            [money_first, bought],
            self.left if self.rng.random() < 0.7 else "how much change is there",
            [("*", self.count, self.price), ("-", cash, self.cost)],
            f"{cash} - {self.count} * {self.price}",
        )

    def two_kinds(self) -> Story:
        """Two things, or many of one and one of another."""
        second = small(self.rng, 1, 90)
        if self.rng.random() < 0.5:
            clauses = self.rng.choice(
                (
                    [
                        f"{self.who.name} {self.buys} a {self.one} for {self.shown} and a {self.other} for "
                        f"{number(second, self.rng)} {self.unit}"
                    ],
                    [
                        f"a {self.one} {self.costs} {self.shown} and a {self.other} {self.costs} "
                        f"{number(second, self.rng)} {self.unit}",
                        f"{self.who.name} {self.buys} both",
                    ],
                    [
                        f"the {self.one} {self.costs} {self.shown}",
                        f"the {self.other} {self.costs} {number(second, self.rng)} {self.unit}",
                    ],
                )
            )
            return Story(clauses, self.spend, [("+", self.price, second)], f"{self.price} + {second}")
        clauses = self.rng.choice(
            (
                [
                    f"{self.who.name} {self.buys} {counted(self.count, self.one, self.rng)} at "
                    f"{self.shown} each and a {self.other} for "
                    f"{number(second, self.rng)} {self.unit}"
                ],
                [
                    f"a {self.one} {self.costs} {self.shown} and a {self.other} {self.costs} "
                    f"{number(second, self.rng)} {self.unit}",
                    f"{self.who.name} {self.buys} {counted(self.count, self.one, self.rng)} and one {self.other}",
                ],
                [
                    f"{self.who.name} {self.buys} {counted(self.count, self.one, self.rng)} for {self.shown} each",
                    f"{again(self.rng, self.who)} also {self.buys} a {self.other} for "
                    f"{number(second, self.rng)} {self.unit}",
                ],
            )
        )
        return Story(
            clauses,
            self.spend,
            [("*", self.count, self.price), ("+", self.cost, second)],
            f"{self.count} * {self.price} + {second}",
        )

    def spent(self) -> Story:
        """Money that is spent once or twice."""
        cash = small(self.rng, 10)
        first = small(self.rng, 1, cash - 2)
        bought = self.rng.choice(
            (
                f"{self.who.does(('spend', 'spends', 'spent'), self.past)} "
                f"{number(first, self.rng)}{self.rng.choice(('', ' ' + self.unit))} on "
                f"{self.rng.choice(('a ' + self.one, self.many, 'food', 'games', 'clothes'))}",
                f"{self.buys} a {self.one} for {number(first, self.rng)} {self.unit}",
                f"{self.who.does(('pay', 'pays', 'paid'), self.past)} {number(first, self.rng)} "
                f"{self.unit} for a {self.one}",
            )
        )
        clauses = [
            f"{self.who.name} {self.who.does(HOLDS[0], self.past)} {cash} {self.unit}",
            f"{again(self.rng, self.who)} {bought}",
        ]
        steps: list[Step] = [("-", cash, first)]
        expression = f"{cash} - {first}"
        if self.rng.random() < 0.4 and cash - first > 2:
            second = small(self.rng, 1, cash - first - 1)
            clauses[1] += f" and {number(second, self.rng)} {self.unit} {self.rng.choice(('on', 'for'))} a {self.other}"
            steps.append(("-", cash - first, second))
            expression += f" - {second}"
        return Story(clauses, self.left, steps, expression)

    def over_time(self) -> Story:
        """Wages, savings or expenses of so many days."""
        span = self.rng.choice(("hour", "day", "week", "month"))
        verb = self.rng.choice(
            (
                ("earn", "earns", "earned"),
                ("save", "saves", "saved"),
                ("make", "makes", "made"),
                ("get", "gets", "got"),
                ("spend", "spends", "spent"),
            )
        )
        clauses = [
            f"{self.who.name} {self.who.does(verb, False)} {self.shown} "
            f"{self.rng.choice(('a', 'an' if span == 'hour' else 'a', 'per', 'each', 'every'))} {span}"
        ]
        clauses[0] = clauses[0].replace(" a hour", " an hour")
        ask = self.rng.choice(
            (
                f"how much {self.who.asks(False)} {verb[0]} in {counted(self.count, span, self.rng)}",
                f"how many {self.unit} {self.who.asks(False)} {verb[0]} in {counted(self.count, span, self.rng)}",
            )
        )
        return Story(clauses, ask, [("*", self.count, self.price)], f"{self.count} * {self.price}")

    def how_many_for(self) -> Story:
        """How many one gets for the money."""
        divisor, quotient = fact(self.rng)
        clauses = [
            f"{self.who.name} {'have' if self.who.is_plural else 'has'} {divisor * quotient} {self.unit}",
            f"{self.rng.choice(('a', 'one', 'each'))} {self.one} {self.costs} {number(divisor, self.rng)} {self.unit}",
        ]
        if self.rng.random() < 0.3:
            clauses.reverse()
        return Story(
            clauses,
            self.rng.choice(
                (
                    f"how many {self.many} can {self.who.name} buy",
                    f"how many {self.many} can {self.who.pronoun} get",
                    f"how many {self.many} is that",
                )
            ),
            [("/", divisor * quotient, divisor)],
            f"{divisor * quotient} / {divisor}",
        )

    def price_of_one(self) -> Story:
        """What one of many costs."""
        divisor, quotient = fact(self.rng)
        total = divisor * quotient
        clauses = self.rng.choice(
            (
                [f"{counted(divisor, self.one, self.rng)} cost {total} {self.unit}"],
                [
                    f"{self.who.name} {self.who.does(('pay', 'pays', 'paid'), self.past)} {total} {self.unit} for "
                    f"{counted(divisor, self.one, self.rng)}"
                ],
            )
        )
        return Story(
            clauses,
            self.rng.choice(
                (
                    f"how much does one {self.one} cost",
                    f"what is the price of one {self.one}",
                    f"how much is each {self.one}",
                    f"what does a {self.one} cost",
                )
            ),
            [("/", total, divisor)],
            f"{total} / {divisor}",
        )

    def missing(self) -> Story:
        """What is missing for a purchase."""
        goal = small(self.rng, 10)
        has = small(self.rng, 1, goal - 1)
        being = "am" if self.who.name == "I" else "are" if self.who.is_plural else "is"
        clauses = self.rng.choice(
            (
                [
                    f"{self.who.name} {self.who.does(('want', 'wants', ''), False)} "
                    f"{self.rng.choice(('to buy ', ''))}a "
                    f"{self.one} that costs {goal} {self.unit}",
                    f"{again(self.rng, self.who)} {self.who.does(('have', 'has', ''), False)} {has} {self.unit}",
                ],
                [
                    f"a {self.one} {self.costs} {goal} {self.unit}",
                    f"{self.who.name} {'have' if self.who.is_plural else 'has'} "
                    f"{self.rng.choice(('only ', 'already ', ''))}{has}",
                ],
                [
                    f"{self.who.name} {being} saving {goal} {self.unit} for a {self.one}",
                    f"{again(self.rng, self.who)} {'have' if self.who.is_plural else 'has'} {has} so far",
                ],
            )
        )
        return Story(
            clauses,
            self.rng.choice(
                (
                    f"how much more {self.rng.choice(('money ', ''))}{self.who.asks(False)} need",
                    f"how many {self.unit} are missing",
                    f"how many more {self.unit} {self.who.asks(False)} need",
                    f"how much {self.rng.choice(('is missing', 'more is needed'))}",
                )
            ),
            [("-", goal, has)],
            f"{goal} - {has}",
        )


FORMS = (
    Deal.price_of_many,
    Deal.many_at_a_price,
    Deal.change,
    Deal.two_kinds,
    Deal.spent,
    Deal.over_time,
    Deal.how_many_for,
    Deal.price_of_one,
    Deal.missing,
)


def money(rng: random.Random) -> Story:
    """Prices, change, wages and savings."""
    deal = Deal(rng)
    return FORMS[deal.form](deal)
