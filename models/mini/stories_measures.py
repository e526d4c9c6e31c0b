"""Stories about sizes, distances and ages, and bare expressions."""

from __future__ import annotations

import random

from story_parts import (
    Step,
    Story,
    fact,
    factors,
    noun,
    small,
)
from words import (
    counted,
    number,
    somebody,
)


def measures(rng: random.Random) -> Story:
    """Ages, heights, distances, weights, temperatures and times that grow, shrink or are compared."""
    what, unit, more, less = rng.choice(
        (
            ("tall", "cm", "taller", "shorter"),
            ("long", "meters", "longer", "shorter"),
            ("old", "years", "older", "younger"),
            ("heavy", "kg", "heavier", "lighter"),
            ("deep", "meters", "deeper", "shallower"),
            ("high", "feet", "higher", "lower"),
            ("old", "years", "older", "younger"),
            ("wide", "inches", "wider", "narrower"),
        )
    )
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
        return Story(
            [
                f"{a} {be} {value} {unit}{size}",
                f"{b} {be_other} {amount} {unit} {word}{rng.choice(('', ' than ' + a))}",
            ],
            f"how {what} {be_other} {b}",
            steps,
            expression,
        )
    if form == 1:
        up, down = rng.choice(
            (
                (("grow", "grew", "grows"), ("shrink", "shrank", "shrinks")),
                (("rise", "rose", "rises"), ("fall", "fell", "falls")),
                (("go up", "went up", "goes up"), ("go down", "went down", "goes down")),
            )
        )
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
        clauses = [
            f"{subject} {rng.choice(('was', 'is'))} {value} "
            f"{unit}{rng.choice(('', ' high')) if unit not in ('degrees', 'dollars') else ''}",
            f"{again_} {rng.choice((down if loses else up)[1:])} "
            f"{rng.choice(('by ', ''))}{amount}{rng.choice(('', ' ' + unit))}",
        ]
        return Story(
            clauses,
            rng.choice(
                (
                    f"how {'high' if unit not in ('degrees', 'dollars') else 'much'} is it now",
                    "what is it now",
                    f"how many {unit} is it now",
                    "what is the new value",
                )
            ),
            steps,
            expression,
        )
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
        where = rng.choice(
            (
                ("to school", "to the park"),
                ("in the morning", "in the evening"),
                ("on Monday", "on Tuesday"),
                ("north", "east"),
                ("first", "then"),
                ("to the city", "back"),
                ("before lunch", "later"),
                ("to the lake", "to the village"),
            )
        )
        clauses = [
            f"{who.name} {who.does(verb, True)} {first} {unit} {where[0]} and "
            f"{rng.choice(('', 'then '))}{second} {unit} {where[1]}"
        ]
        return Story(
            clauses,
            rng.choice(
                (
                    f"how far did {who.name} {verb[0]}",
                    f"how many {unit} did {who.name} {verb[0]}",
                    f"how many {unit} is that",
                    "how far is that in total",
                )
            ),
            [("+", first, second)],
            f"{first} + {second}",
        )
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
        return Story(
            [f"{whole} {rng.choice(('has', 'holds', 'lasts', 'is'))} {value} {unit}", gone],
            rng.choice((f"how many {unit} are left", "how much is left", f"how many {unit} remain")),
            [("-", value, amount)],
            f"{value} - {amount}",
        )
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
    clauses = [
        f"{whole} {rng.choice(('of', 'is'))} {divisor * quotient} {unit}{' long'}".replace(" of ", " is "),
        f"{rng.choice(('it is cut', who.name + ' ' + who.does(('cut', 'cuts', 'cut'), False) + ' it'))} "
        f"into {counted(divisor, piece, rng)}{rng.choice(('', ' of the same length'))}",
    ]
    return Story(
        clauses,
        rng.choice(
            (
                f"how long is {rng.choice(('one', 'each', 'every'))} {piece}",
                f"how many {unit} is {rng.choice(('one', 'each'))} {piece}",
            )
        ),
        [("/", divisor * quotient, divisor)],
        f"{divisor * quotient} / {divisor}",
    )


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
    words = {
        "+": ("plus", "+", "and", "+"),
        "-": ("minus", "-", "take away", "-"),
        "*": ("times", "*", "x", "multiplied by"),
        "/": ("divided by", "/", ":", "over"),
    }[sign]
    middle = rng.choice(words)
    gap = "" if middle in "+-*/:x" and rng.random() < 0.25 else " "
    text = f"{number(first, rng) if gap else first}{gap}{middle}{gap}{number(second, rng) if gap else second}"
    ask = rng.choice(
        (
            f"what is {text}",
            f"how much is {text}",
            f"calculate {text}",
            text,
            f"{text} =",
            f"{text} = ",
            f"what's {text}",
            f"compute {text}",
            f"can you tell me what {text} is",
            f"{text} is what",
            f"solve {text}",
            f"what do you get for {text}",
        )
    )
    return Story([], ask, [(sign, first, second)], f"{first} {sign} {second}")
