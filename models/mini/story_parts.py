"""Parts that everyday stories are made of: numbers, clauses in which amounts change, and questions."""

from __future__ import annotations

import random
from dataclasses import dataclass

from words import GAINS, HOLDS, KINDS, LOSSES, PLACES, THINGS, Who, counted, number, other_person, plural

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
        ends = (
            ("come", "came"),
            ("arrive", "arrived"),
            ("join them", "joined them"),
            ("are added", "were added"),
            ("are put in", "were put in"),
            ("are bought", "were bought"),
            ("are brought", "were brought"),
            ("are delivered", "were delivered"),
            ("get in", "got in"),
            ("come in", "came in"),
        )
        return f"{shown} more{'' if few else ' ' + plural(one)} {rng.choice(ends)[past]}"
    ends = (
        ("leave", "left"),
        ("go away", "went away"),
        ("are taken", "were taken"),
        ("are sold", "were sold"),
        ("are eaten", "were eaten"),
        ("break", "broke"),
        ("run away", "ran away"),
        ("are lost", "were lost"),
        ("are used", "were used"),
        ("are given away", "were given away"),
        ("go home", "went home"),
        ("get out", "got out"),
        ("fall down", "fell down"),
        ("are stolen", "were stolen"),
    )
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
        return rng.choice(
            ("how many are left", "how many left", f"how many {many} remain", "how many are there still")
            if is_less
            else ("how many are there", "how many is that", "how many in total")
        )
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
        return f"{who.name} {who.does(rng.choice(HOLDS), past)} {shown}{where(rng, 0.12)}"
    return f"there {'were' if past else 'are'} {shown}{where(rng, 0.7)}"


def where(rng: random.Random, share: float) -> str:
    return f" {rng.choice(PLACES)}" if rng.random() < share else ""


def listed(parts_: list[str]) -> str:
    return f"{', '.join(parts_[:-1])} and {parts_[-1]}"
