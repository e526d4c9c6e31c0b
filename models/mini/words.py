"""Words of everyday problems: who acts, what is counted, and the verbs that change how much there is."""

from __future__ import annotations

import random
from dataclasses import dataclass

GIRLS = (
    "Abby", "Alice", "Amelia", "Amina", "Ava", "Beth", "Carla", "Cathy", "Chloe", "Daisy", "Diana", "Dora", "Elena",
    "Elsa", "Fatima", "Fiona", "Gina", "Hannah", "Heidi", "Helen", "Iris", "Ivy", "Jasmine", "Jenny", "Jill", "Judy",
    "Karen", "Kelly", "Laura", "Leila", "Lina", "Lucy", "Mary", "Megan", "Mila", "Molly", "Nadia", "Nancy", "Olga",
    "Paula", "Penny", "Rachel", "Ruby", "Sally", "Sofia", "Susan", "Tina", "Wendy", "Anna", "Emma", "Maria", "Sara",
    "Mrs. Lopez", "Mrs. Brown", "Ms. Kim", "Aunt May", "the girl", "my sister", "Mom", "Grandma", "the queen",
)  # fmt: skip
BOYS = (
    "Adam", "Ahmed", "Andy", "Arthur", "Bill", "Brian", "Charlie", "Daniel", "Eric", "Felix", "Frank", "Gary", "Harry",
    "Ian", "Jake", "James", "Jason", "Jerry", "Joe", "Kevin", "Kyle", "Larry", "Liam", "Lucas", "Luke", "Marco",
    "Martin", "Matt", "Milo", "Nick", "Oliver", "Owen", "Pedro", "Pete", "Ralph", "Ravi", "Rick", "Roy", "Ryan", "Sean",
    "Simon", "Steve", "Ted", "Tim", "Toby", "Tony", "Victor", "Walter", "Tom", "Ben", "Jack", "Sam", "Mr. Hill",
    "Mr. Fox", "Uncle Bob", "the boy", "my brother", "Dad", "Grandpa", "the king", "the farmer", "the baker",
)  # fmt: skip
GROUPS = ("the children", "my friends", "the workers", "the players", "they", "the twins", "the neighbors", "the kids")
NEUTRAL = (
    "a shop", "the store", "the school", "a bakery", "the museum", "a museum", "the market", "the kitchen", "the team",
    "a club", "the hotel", "the teacher", "a driver", "a student", "the doctor", "the cat", "a squirrel", "the company",
)  # fmt: skip

THINGS = (
    "apple", "orange", "banana", "pear", "plum", "lemon", "peach", "melon", "cherry", "grape", "strawberry", "carrot",
    "tomato", "potato", "onion", "egg", "cookie", "cake", "muffin", "donut", "pancake", "candy", "chocolate", "bun",
    "sandwich", "pizza", "bottle", "cup", "glass", "plate", "bowl", "spoon", "fork", "knife", "book", "notebook",
    "pencil", "pen", "crayon", "marker", "eraser", "ruler", "page", "letter", "stamp", "postcard", "photo", "picture",
    "sticker", "card", "coin", "marble", "bead", "button", "ribbon", "ring", "shell", "stone", "rock", "leaf", "flower",
    "rose", "tulip", "tree", "bush", "seed", "ball", "balloon", "toy", "doll", "puzzle", "kite", "block", "car",
    "truck",
    "bike", "boat", "train", "plane", "bus", "chair", "table", "lamp", "bed", "box", "bag", "basket", "shirt", "dress",
    "sock", "shoe", "hat", "scarf", "coat", "glove", "dog", "cat", "puppy", "kitten", "bird", "duck", "hen", "fish",
    "frog", "rabbit", "mouse", "horse", "cow", "sheep", "pig", "goat", "lion", "monkey", "bee", "ant", "butterfly",
    "star", "key", "nail", "brick", "tile", "window", "door", "ticket", "badge", "medal", "game", "song", "movie",
    "video", "message", "poster", "magnet", "necklace", "candle", "pillow", "blanket", "towel", "brush", "nut", "pie",
    "snack", "watch", "phone", "hammer", "screw", "rope", "stick", "drum", "flag", "cupcake", "waffle", "pumpkin",
)  # fmt: skip
IRREGULAR = {"leaf": "leaves", "knife": "knives", "mouse": "mice", "fish": "fish", "sheep": "sheep"}
PEOPLE = (
    "child", "student", "boy", "girl", "friend", "player", "guest", "visitor", "worker", "teacher", "kid", "person",
    "passenger", "dancer", "singer", "pupil", "runner", "tourist", "customer", "adult", "cousin", "neighbor",
)  # fmt: skip
IRREGULAR |= {"child": "children", "person": "people"}
COLORS = ("red", "blue", "green", "yellow", "white", "black", "pink", "purple", "brown", "orange", "gray")
KINDS = (
    *COLORS,
    "big",
    "small",
    "old",
    "new",
    "long",
    "short",
    "round",
    "sweet",
    "fresh",
    "broken",
    "wooden",
    "plastic",
)
HOLDERS = (
    "bag", "box", "basket", "jar", "crate", "tray", "shelf", "row", "pack", "bowl", "drawer", "case", "carton",
    "bucket",
    "plate", "stack", "tank", "cage", "room", "table", "bus", "team", "page", "van", "boat", "house", "garden", "tent",
    "bunch", "pile", "can", "bottle", "truck", "branch", "wagon", "pocket", "vase", "album", "column", "packet",
    "folder",
)  # fmt: skip
IRREGULAR |= {"shelf": "shelves"}
PLACES = (
    "on the table", "in the garden", "in a box", "in the fridge", "in a tree", "at the park", "on the shelf",
    "in the bag",
    "in the room", "on the bus", "in a jar", "on the farm", "in the pond", "at the zoo", "in the class", "at school",
    "in the drawer", "in the basket", "on the playground", "at the party", "in the store", "on a plate", "in the field",
    "on the street", "in the box", "in the barn", "in the pool", "on the beach", "in the kitchen", "in the cage",
)  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip

# base, third person, past; {n} is the amount, and the rest of the phrase follows the verb
Verb = tuple[str, str, str, str]
GAINS: tuple[Verb, ...] = (
    ("buy", "buys", "bought", "{n} more"), ("get", "gets", "got", "{n} more"), ("find", "finds", "found", "{n} more"),
    ("find", "finds", "found", "{n}"), ("buy", "buys", "bought", "{n}"), ("get", "gets", "got", "another {n}"),
    ("pick", "picks", "picked", "{n} more"), ("collect", "collects", "collected", "{n} more"),
    ("receive", "receives", "received", "{n}"), ("win", "wins", "won", "{n}"), ("make", "makes", "made", "{n} more"),
    ("get", "gets", "got", "{n} from {o}"), ("receive", "receives", "received", "{n} more from {o}"),
    ("add", "adds", "added", "{n}"), ("take", "takes", "took", "{n} more"), ("earn", "earns", "earned", "{n} more"),
    ("borrow", "borrows", "borrowed", "{n} from {o}"), ("bring", "brings", "brought", "{n} more"),
    ("order", "orders", "ordered", "{n} more"), ("put in", "puts in", "put in", "{n} more"),
    ("pick up", "picks up", "picked up", "{n}"), ("gather", "gathers", "gathered", "{n} more"),
    ("buy", "buys", "bought", "{n} new ones"), ("catch", "catches", "caught", "{n} more"),
)  # fmt: skip
LOSSES: tuple[Verb, ...] = (
    ("give", "gives", "gave", "{n} to {o}"), ("give away", "gives away", "gave away", "{n}"),
    ("give", "gives", "gave", "{o} {n}"), ("lose", "loses", "lost", "{n}"), ("sell", "sells", "sold", "{n}"),
    ("lose", "loses", "lost", "{n} of them"), ("use", "uses", "used", "{n}"), ("sell", "sells", "sold", "{n} of them"),
    ("break", "breaks", "broke", "{n}"), ("throw away", "throws away", "threw away", "{n}"),
    ("drop", "drops", "dropped", "{n}"), ("share", "shares", "shared", "{n} with {o}"), ("eat", "eats", "ate", "{n}"),
    ("eat", "eats", "ate", "{n} of them"), ("send", "sends", "sent", "{n} to {o}"), ("use", "uses", "used",
    "{n} of them"),
    ("take out", "takes out", "took out", "{n}"), ("lend", "lends", "lent", "{n} to {o}"), ("hide", "hides", "hid",
    "{n}"),
    ("give", "gives", "gave", "{n} of them to {o}"), ("return", "returns", "returned", "{n}"),
    ("remove", "removes", "removed", "{n}"), ("leave", "leaves", "left", "{n} at school"),
)  # fmt: skip
HOLDS: tuple[tuple[str, str, str], ...] = (
    ("have", "has", "had"), ("have", "has", "had"), ("have", "has", "had"), ("have", "has", "had"),
    ("own", "owns", "owned"), ("start with", "starts with", "started with"), ("buy", "buys", "bought"),
    ("collect", "collects", "collected"), ("find", "finds", "found"), ("make", "makes", "made"),
    ("pick", "picks", "picked"), ("get", "gets", "got"), ("see", "sees", "saw"), ("count", "counts", "counted"),
    ("plant", "plants", "planted"), ("bake", "bakes", "baked"), ("win", "wins", "won"), ("draw", "draws", "drew"),
)  # fmt: skip


@dataclass(frozen=True)
class Who:
    """Somebody who acts, with the words that stand for them."""

    name: str
    pronoun: str
    possessive: str
    is_plural: bool
    """Takes the base form of a verb: I, we, you, they."""

    def does(self, forms: tuple[str, ...], past: bool) -> str:
        """A verb in the form that this subject takes."""
        return forms[2] if past else forms[0 if self.is_plural else 1]

    def asks(self, past: bool) -> str:
        """The subject of a question with its auxiliary: "does Tom", "did they"."""
        return f"{'did' if past else 'do' if self.is_plural else 'does'} {self.name}"


ME, WE = Who("I", "I", "my", True), Who("we", "we", "our", True)


def somebody(rng: random.Random, other_than: str = "") -> Who:
    """A person, mostly by name."""
    kind = rng.random()
    if kind < 0.42:
        found = Who(rng.choice(GIRLS), "she", "her", False)
    elif kind < 0.84:
        found = Who(rng.choice(BOYS), "he", "his", False)
    elif kind < 0.92:
        found = ME
    elif kind < 0.95:
        found = WE
    elif kind < 0.97:
        found = Who(rng.choice(GROUPS), "they", "their", True)
    else:
        found = Who(rng.choice(NEUTRAL), "it", "its", False)
    return somebody(rng, other_than) if found.name == other_than else found


def other_person(rng: random.Random, who: Who) -> str:
    """Somebody else, to whom things are given."""
    kind = rng.random()
    if kind < 0.45:
        friend = rng.choice(("friend", "sister", "brother", "mother", "teacher", "cousin", "dad", "neighbor", "aunt"))
        return f"{who.possessive} {friend}"
    if kind < 0.55:
        return rng.choice(("a friend", "the neighbors", "a friend at school", "other children"))
    return rng.choice([name for name in (GIRLS + BOYS) if name != who.name])


def plural(one: str) -> str:
    """The plural of a noun in the lists above."""
    if one in IRREGULAR:
        return IRREGULAR[one]
    if one.endswith(("s", "sh", "ch", "x", "to")):
        return one + "es"
    if one.endswith("y") and one[-2] not in "aeiou":
        return one[:-1] + "ies"
    return one + "s"


def counted(count: int, one: str, rng: random.Random) -> str:
    """A number with its noun: "1 apple", "7 apples", sometimes "seven apples"."""
    return f"{number(count, rng)} {one if count == 1 else plural(one)}"


def number(count: int, rng: random.Random) -> str:
    """Digits, or for a small number now and then its word."""
    return NUMBER_WORDS[count] if count < len(NUMBER_WORDS) and rng.random() < 0.06 else str(count)
