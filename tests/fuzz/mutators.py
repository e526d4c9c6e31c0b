"""How corpus entries are changed: blindly, or with an eye for their format. The same random numbers, the same changes.

A mutator takes a source of random numbers, an entry, and another entry of the same target to borrow from. The edits
work on spans of the text that is there, not on parsed documents: what no encoder writes (duplicate keys, numbers of 400
digits, lone surrogates, lengths that lie) is what decoders have to survive.
"""

import re
import struct
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import Any  # decoded documents

import msgspec

MAX_INPUT_BYTES = 1 << 17
LONG_BYTES = 1 << 13
REMEMBERED = 256  # entries whose spans were looked for before
DEPTHS = (1, 3, 70, 1_200, 20_000)
LENGTHS = (0, 1, 2, 255, 4_096)
EDGES = (0, 1, 2, 3, 16, 127, 128, 255, 256, 32767, 32768, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32)
EDGES_64 = ((1 << 53) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)

Mutator = Callable[[Random, bytes, bytes], bytes]


def apply(random: Random, edits: Sequence[Mutator], entry: bytes, other: bytes) -> bytes:
    """A few edits, one after another; mostly one. What has become long is long enough."""
    for _ in range(min(6, int(random.expovariate(1.2)) + 1)):
        entry = random.choice(edits)(random, entry, other)[:MAX_INPUT_BYTES]
        if len(entry) > LONG_BYTES:
            break
    return entry


def span_of(random: Random, entry: bytes) -> tuple[int, int]:
    """Short spans are more likely than long ones."""
    start = random.randrange(len(entry) + 1)
    return start, min(len(entry), start + int(2 ** random.uniform(0, 10)))


# --- bytes -----------------------------------------------------------------------------------------------------------


def flip_a_bit(random: Random, entry: bytes, other: bytes) -> bytes:
    if not entry:
        return b"\0"
    at = random.randrange(len(entry))
    return entry[:at] + bytes([entry[at] ^ 1 << random.randrange(8)]) + entry[at + 1 :]


def set_a_byte(random: Random, entry: bytes, other: bytes) -> bytes:
    at = random.randrange(len(entry) + 1)
    return entry[:at] + random.choice((b"\0", b"\x7f", b"\x80", b"\xff", random.randbytes(1))) + entry[at + 1 :]


def put_an_integer(random: Random, entry: bytes, other: bytes) -> bytes:
    """An edge of some range, over what is there, in either byte order."""
    width = random.choice((1, 2, 4, 8))
    number = random.choice(EDGES + EDGES_64) % (1 << 8 * width)
    at = random.randrange(len(entry) + 1)
    return entry[:at] + number.to_bytes(width, random.choice(("big", "little"))) + entry[at + width :]


def drop_a_span(random: Random, entry: bytes, other: bytes) -> bytes:
    start, stop = span_of(random, entry)
    return entry[:start] + entry[stop:]


def repeat_a_span(random: Random, entry: bytes, other: bytes) -> bytes:
    start, stop = span_of(random, entry)
    return entry[:stop] + entry[start:stop] * random.choice((1, 1, 1, 2, 50)) + entry[stop:]


def insert_noise(random: Random, entry: bytes, other: bytes) -> bytes:
    at = random.randrange(len(entry) + 1)
    return entry[:at] + random.randbytes(random.choice((1, 2, 4, 8, 300))) + entry[at:]


def cut(random: Random, entry: bytes, other: bytes) -> bytes:
    return entry[: random.randrange(len(entry) + 1)]


def splice(random: Random, entry: bytes, other: bytes) -> bytes:
    return entry[: random.randrange(len(entry) + 1)] + other[random.randrange(len(other) + 1) :]


def append(random: Random, entry: bytes, other: bytes) -> bytes:
    return entry + other


BYTE_EDITS: tuple[Mutator, ...] = (
    flip_a_bit,
    set_a_byte,
    put_an_integer,
    drop_a_span,
    repeat_a_span,
    insert_noise,
    cut,
    splice,
    append,
)


def mutate_bytes(random: Random, entry: bytes, other: bytes) -> bytes:
    return apply(random, BYTE_EDITS, entry, other)


def mostly(edits: Sequence[Mutator]) -> Mutator:
    """With an eye for the format, but for one time in ten."""

    def mutate(random: Random, entry: bytes, other: bytes) -> bytes:
        if random.random() < 0.1:
            return mutate_bytes(random, entry, other)
        return apply(random, edits, entry, other)

    return mutate


# --- spans of values, whatever the format ----------------------------------------------------------------------------


class Spans:
    """Where the values of an entry begin and end, and its members (key and value) and keys. `None` where it has none.

    The next one that begins behind a random place is chosen: that is as good as any, and quick in a long entry.
    """

    def __init__(self, values: list[tuple[int, int]], members: list[tuple[int, int]], keys: list[tuple[int, int]]):
        self.values, self.members, self.keys = sorted(values), sorted(members), sorted(keys)

    @staticmethod
    def choose(random: Random, spans: list[tuple[int, int]]) -> tuple[int, int] | None:
        if not spans:
            return None
        if random.random() < 0.5:
            return random.choice(spans)
        return spans[bisect(spans, (random.randrange(spans[-1][0] + 1), 0)) - 1]


def borrowed(random: Random, entry: bytes, own: Spans, other: bytes, others: Spans) -> bytes:
    """With a value of the other in place of one of its own."""
    found, given = Spans.choose(random, own.values), Spans.choose(random, others.values)
    if found is None or given is None:
        return other
    return entry[: found[0]] + other[given[0] : given[1]] + entry[found[1] :]


# --- JSON ------------------------------------------------------------------------------------------------------------

JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+0-9.eE]+|true|false|null|NaN|-?Infinity|[\[\]{},:]', re.DOTALL)
JSON_LITERALS: tuple[tuple[bytes, ...], ...] = (  # by kind, so that each kind is drawn as often
    (b"1" + b"0" * 30, b"-1" + b"0" * 30, b"9" * 400, b"%d" % (1 << 64), b"%d" % (1 << 63), b"%d" % (-(1 << 63) - 1)),
    tuple(b"%d" % number for number in (*EDGES, *EDGES_64, -1, -1, -1, -2, -(1 << 31), -(1 << 63))),
    (b"0.5", b"-0.0", b"1e-320", b"1e30", b"1e308", b"1e999", b"-1e999", b"NaN", b"Infinity"),
    (
        *(b'""', b'"0"', b'"-1"', b'"a"', b'"1' + b"0" * 30 + b'"', b'"\\u0000"', b'"\\r\\n\\u001b[31m"', b'"\n"'),
        *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"' + b"a" * 5_000 + b'"'),
        *(b'"../../debug/state"', b'"127.0.0.1"', b'"::1"', '"\U0001f642\u202e"'.encode()),
    ),
    (b"true", b"false", b"null", b"[]", b"{}", b"[[]]", b"[null]", b"[{}]"),
)


def json_literal(random: Random) -> bytes:
    return random.choice(random.choice(JSON_LITERALS))


@lru_cache(REMEMBERED)
def json_spans(text: bytes) -> Spans:
    values: list[tuple[int, int]] = []
    members: list[tuple[int, int]] = []
    keys: list[tuple[int, int]] = []
    opened: list[int] = []  # where the values that are not yet closed begin
    key_at: list[int | None] = [None]  # per depth: where the key of the value that comes next begins
    for token in JSON_TOKEN.finditer(text):
        kind = token[0][:1]
        if kind in b"{[":
            opened.append(token.start())
            key_at.append(None)
            continue
        if kind == b",":
            continue
        if kind == b":":
            if values:
                keys.append(values.pop())
                key_at[-1] = keys[-1][0]
            continue
        start = token.start()
        if kind in b"}]":
            if not opened:
                continue
            start = opened.pop()
            key_at.pop()
        values.append((start, token.end()))
        if (begun := key_at[-1]) is not None:
            members.append((begun, token.end()))
            key_at[-1] = None
    return Spans(values, members, keys)


def replace_a_value(random: Random, text: bytes, other: bytes) -> bytes:
    found = Spans.choose(random, json_spans(text).values)
    if found is None:
        return json_literal(random)
    start, stop = found
    return text[:start] + json_literal(random) + text[stop:]


def borrow_a_value(random: Random, text: bytes, other: bytes) -> bytes:
    return borrowed(random, text, json_spans(text), other, json_spans(other))


def borrow_a_member(random: Random, text: bytes, other: bytes) -> bytes:
    """Add a member of another document, perhaps of a key that is there already."""
    found = Spans.choose(random, json_spans(text).members)
    given = Spans.choose(random, json_spans(other).members)
    if found is None or given is None:
        return other
    return text[: found[0]] + other[given[0] : given[1]] + b"," + text[found[0] :]


def drop_a_member(random: Random, text: bytes, other: bytes) -> bytes:
    found = Spans.choose(random, json_spans(text).members)
    if found is None:
        return text
    start, stop = found
    after = text[stop:].lstrip()
    if after.startswith(b","):
        return text[:start] + after[1:]
    return text[:start].rstrip().removesuffix(b",") + after


def repeat_a_member(random: Random, text: bytes, other: bytes) -> bytes:
    """The same key again, with another value."""
    found = Spans.choose(random, json_spans(text).members)
    if found is None:
        return text
    start, stop = found
    key = text[start:stop].partition(b":")[0]
    return text[:stop] + b"," + key + b":" + json_literal(random) + text[stop:]


def nest_a_value(random: Random, text: bytes, other: bytes) -> bytes:
    found = Spans.choose(random, json_spans(text).values)
    if found is None:
        return text
    start, stop = found
    depth = random.choice(DEPTHS)
    left, right = random.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return text[:start] + left * depth + text[start:stop] + right * depth + text[stop:]


def repeat_a_value(random: Random, text: bytes, other: bytes) -> bytes:
    """A list of it, as long as some bound."""
    found = Spans.choose(random, json_spans(text).values)
    if found is None:
        return text
    start, stop = found
    count = random.choice((0, 1, 2, 17, 129, 4_097))
    return text[:start] + b"[" + b",".join([text[start:stop]] * count) + b"]" + text[stop:]


def add_an_unknown_member(random: Random, text: bytes, other: bytes) -> bytes:
    found = Spans.choose(random, json_spans(text).members)
    if found is None:
        return text
    depth = random.choice(DEPTHS)
    return text[: found[0]] + b'"unknown":' + b"[" * depth + b"]" * depth + b"," + text[found[0] :]


JSON_EDITS: tuple[Mutator, ...] = (
    replace_a_value,
    replace_a_value,
    replace_a_value,
    borrow_a_value,
    borrow_a_member,
    borrow_a_member,
    drop_a_member,
    repeat_a_member,
    nest_a_value,
    repeat_a_value,
    add_an_unknown_member,
)


mutate_json = mostly(JSON_EDITS)


# --- MessagePack -----------------------------------------------------------------------------------------------------

MSGPACK_NUMBERS = (
    *(b"\xcf" + struct.pack(">Q", number) for number in (*EDGES, *EDGES_64)),
    *(b"\xd3" + struct.pack(">q", number) for number in (-1, -2, -(1 << 31), -(1 << 63))),
    *(b"\xcb" + struct.pack(">d", number) for number in (0.0, -0.5, 1e308, float("inf"), float("nan"))),
)
MSGPACK_LITERALS = (
    *MSGPACK_NUMBERS,
    *(b"\xc0", b"\xc2", b"\xc3", b"\x80", b"\x90", b"\xa0", b"\xc4\x00", b"\x91\x00", b"\x00", b"\xff"),
    b"\xc4\x08" + bytes(8),
    b"\xda\x03\xe8" + b"a" * 1_000,
    b"\xa3\xed\xa0\x80",  # a lone surrogate
    b"\xa2\xff\xfe",  # no UTF-8
    b"\xa5\r\n\x1b[m",
    b"\xc7\x01\x05a",  # an extension type
    b"\xd6\xff\x00\x00\x00\x01",  # a time
    b"\xdd\xff\xff\xff\xff",  # lengths beyond the end
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
)
FIXED_BYTES = {
    **dict.fromkeys((0xC0, 0xC1, 0xC2, 0xC3), 0),
    **dict(enumerate((4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17), start=0xCA)),
}
SIZED_BYTES = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
SIZED_BYTES |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}


def msgpack_head(data: bytes, at: int) -> tuple[int, int, bool]:
    """Of the value at `at`: where its head and own bytes stop, how many values are inside, whether they are a map."""
    first = data[at]
    if first < 0x80 or first >= 0xE0:
        return at + 1, 0, False
    if first < 0x90:
        return at + 1, 2 * (first & 15), True
    if first < 0xA0:
        return at + 1, first & 15, False
    if first < 0xC0:
        return at + 1 + (first & 31), 0, False
    if first in FIXED_BYTES:
        return at + 1 + FIXED_BYTES[first], 0, False
    if first in SIZED_BYTES:
        width, extra = SIZED_BYTES[first]
        return at + 1 + width + extra + int.from_bytes(data[at + 1 : at + 1 + width]), 0, False
    width = 2 if first in (0xDC, 0xDE) else 4
    count = int.from_bytes(data[at + 1 : at + 1 + width])
    is_map = first >= 0xDE
    return at + 1 + width, (2 if is_map else 1) * count, is_map


@lru_cache(REMEMBERED)
def msgpack_spans(data: bytes) -> Spans:
    """As far as the bytes make sense. Members are those of maps; keys are not told apart from values."""
    values: list[tuple[int, int]] = []
    members: list[tuple[int, int]] = []
    opened: list[list[int]] = []  # start, values still inside, is a map, where the value before the next one begins
    at = 0
    while at < len(data):
        start = at
        at, inside, is_map = msgpack_head(data, at)
        if at > len(data):
            break
        opened.append([start, inside, is_map, 0])
        while opened and opened[-1][1] == 0:
            begun = opened.pop()[0]
            values.append((begun, at))
            if opened:
                around = opened[-1]
                around[1] -= 1
                if around[2] and around[1] % 2 == 0:
                    members.append((around[3], at))
                around[3] = begun
    return Spans(values, members, [])


def replace_packed(random: Random, data: bytes, other: bytes) -> bytes:
    found = Spans.choose(random, msgpack_spans(data).values)
    if found is None:
        return random.choice(MSGPACK_LITERALS)
    return data[: found[0]] + random.choice(MSGPACK_LITERALS) + data[found[1] :]


def renumber_packed(random: Random, data: bytes, other: bytes) -> bytes:
    """Another number where one was: the message stays well typed more often."""
    numbers = [
        span for span in msgpack_spans(data).values if data[span[0]] < 0x80 or data[span[0]] in range(0xCC, 0xD4)
    ]
    found = Spans.choose(random, numbers)
    if found is None:
        return data
    number = random.choice((*MSGPACK_NUMBERS, b"\x00", b"\x01", b"\x02", b"\x03", b"\x07", b"\xff"))
    return data[: found[0]] + number + data[found[1] :]


def borrow_packed(random: Random, data: bytes, other: bytes) -> bytes:
    return borrowed(random, data, msgpack_spans(data), other, msgpack_spans(other))


def nest_packed(random: Random, data: bytes, other: bytes) -> bytes:
    found = Spans.choose(random, msgpack_spans(data).values)
    if found is None:
        return data
    return data[: found[0]] + random.choice((b"\x91", b"\x81\xa1a")) * random.choice(DEPTHS) + data[found[0] :]


def add_packed_member(random: Random, data: bytes, other: bytes) -> bytes:
    """One member more in some map that can count it: unknown and deep, or one that was there already."""
    spans = msgpack_spans(data)
    maps = [start for start, _ in spans.values if 0x80 <= data[start] < 0x8F]
    if not maps:
        return data
    at = random.choice(maps)
    member = b"\xa7unknown" + b"\x91" * random.choice(DEPTHS) + random.choice(MSGPACK_LITERALS)
    if spans.members and random.random() < 0.4:
        start, stop = random.choice(spans.members)
        member = data[start:stop]
    return data[:at] + bytes([data[at] + 1]) + member + data[at + 1 :]


MSGPACK_EDITS: tuple[Mutator, ...] = (
    replace_packed,
    replace_packed,
    renumber_packed,
    renumber_packed,
    renumber_packed,
    borrow_packed,
    nest_packed,
    add_packed_member,
)


mutate_msgpack = mostly(MSGPACK_EDITS)


# --- MessagePack that stays well typed: values of the kind that was there --------------------------------------------

INTEGERS = (*EDGES, *EDGES_64, -1, -1, -2, -(1 << 31), -(1 << 63))


def mutate_typed(random: Random, entry: bytes, other: bytes) -> bytes:
    """Numbers, bytes and lists change, and texts come from elsewhere in the two entries.

    What is no object, or nested too deeply to be walked through, changes as `mutate_msgpack` has it.
    """
    try:
        tree, given = msgspec.msgpack.decode(entry), msgspec.msgpack.decode(other)
        texts = [value for value in (*leaves(tree), *leaves(given)) if isinstance(value, str)]
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            tree = change_one(random, tree, texts)
        return msgspec.msgpack.encode(tree)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return mutate_msgpack(random, entry, other)


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, list)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(part)
    else:
        yield tree


def change_one(random: Random, tree: Any, texts: Sequence[str]) -> Any:
    """The same tree with one value changed, somewhere."""
    if isinstance(tree, dict) and tree:
        key = random.choice(list(tree))
        return {**tree, key: change_one(random, tree[key], texts)}
    if isinstance(tree, list):
        return change_list(random, tree, texts)
    if isinstance(tree, bool):
        return not tree
    if isinstance(tree, int):
        number = random.choice((*INTEGERS, tree + 1, tree - 1, 2 * tree))
        return number if -(1 << 63) <= number < 1 << 64 else tree
    if isinstance(tree, bytes):
        return random.choice((b"", tree[:-1], tree + b"\0", tree * 2, tree[:-8], bytes(len(tree)), random.randbytes(4)))
    return random.choice(texts) if texts and random.random() < 0.9 else random.choice(("", "a" * 300, "a\nb\x1b[31m"))


def change_list(random: Random, items: list[Any], texts: Sequence[str]) -> list[Any]:
    draw = random.randrange(6)
    if draw == 0 or not items:
        return random.choice(([], items[:-1], items[1:], items + items, items[:1] * random.choice((1, 2, 300))))
    if draw == 1:
        return random.sample(items, len(items))
    at = random.randrange(len(items))
    return [*items[:at], change_one(random, items[at], texts), *items[at + 1 :]]


# --- a stream of frames ----------------------------------------------------------------------------------------------

FRAME_HEAD_BYTES = 4


def join_frames(bodies: Sequence[bytes]) -> bytes:
    return b"".join(len(body).to_bytes(FRAME_HEAD_BYTES) + body for body in bodies)


def split_frames(stream: bytes) -> list[bytes]:
    """Bodies in order; the last one is what is left, however long it says it is."""
    bodies: list[bytes] = []
    at = 0
    while at < len(stream):
        size = int.from_bytes(stream[at : at + FRAME_HEAD_BYTES])
        bodies.append(stream[at + FRAME_HEAD_BYTES : at + FRAME_HEAD_BYTES + size])
        at += FRAME_HEAD_BYTES + size
    return bodies


def framed(mutate_body: Mutator) -> Mutator:
    """Streams of frames with a 4-byte length: changes bodies and keeps their lengths right, or changes the order."""

    def change_a_body(random: Random, stream: bytes, other: bytes) -> bytes:
        bodies, others = split_frames(stream), split_frames(other)
        if not bodies or not others:
            return other
        at = random.randrange(len(bodies))
        bodies[at] = mutate_body(random, bodies[at], random.choice(others))
        return join_frames(bodies)

    def change_the_order(random: Random, stream: bytes, other: bytes) -> bytes:
        bodies = split_frames(stream) + split_frames(other)[: random.choice((0, 0, 1, 2))]
        for _ in range(random.randint(1, 3)):
            if bodies and random.random() < 0.5:
                del bodies[random.randrange(len(bodies))]
            elif bodies:
                bodies.insert(random.randrange(len(bodies) + 1), random.choice(bodies))
        return join_frames(bodies)

    return mostly((change_a_body, change_a_body, change_a_body, change_the_order))


# --- HTTP/1 ----------------------------------------------------------------------------------------------------------

BLANK = b"\r\n\r\n"
HEADER_VALUES = (
    *(b"", b"0", b"-1", b"1" + b"0" * 30, b"1e999", b"nan", b"0x10", b"+5", b"5, 6", b"chunked", b"gzip", b"h2c"),
    *(b"Bearer ", b"Bearer x", b"Basic x", b"\xff\xfe", b"a" * 9_000, b"x/health?", b"127.0.0.1", b"100-continue"),
)
HEADER_NAMES = (
    *(b"content-length", b"transfer-encoding", b"host", b"connection", b"upgrade", b"expect", b"authorization"),
    *(b"x-request-id", b"x-request-timeout-ms", b"x-forwarded-for", b"content-type", b"x-data-parallel-rank"),
)
PATH_PIECES = (
    *(b"/..", b"/../../debug/state", b"//", b"/%2e%2e", b"%00", b"%ff", b"?x=1", b"?prefill_dp_rank=1" + b"0" * 30),
    *(b"#", b"/" + b"a" * 3_000, b"*", b"http://x/", b"\\", b";", b" ", b"\t", b"%zz", b"\xc3\xa4"),
)


def change_the_target(random: Random, head: bytes, other: bytes) -> bytes:
    """Of the request line, or the status of an answer."""
    line, mark, rest = head.partition(b"\r\n")
    words = line.split(b" ")
    if len(words) < 2:
        return head
    piece = random.choice(PATH_PIECES)
    at = random.randrange(len(words[1]) + 1)
    words[1] = random.choice((piece, words[1] + piece, words[1][:at] + piece + words[1][at:]))
    return b" ".join(words) + mark + rest


def change_the_method(random: Random, head: bytes, other: bytes) -> bytes:
    methods = (b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"TRACE", b"CONNECT", b"PRI", b"get", b"\xff")
    return random.choice(methods) + head[len(head.split(b" ")[0]) :]


def add_a_header(random: Random, head: bytes, other: bytes) -> bytes:
    return head + b"\r\n" + random.choice(HEADER_NAMES) + b": " + random.choice(HEADER_VALUES)


def change_a_header(random: Random, head: bytes, other: bytes) -> bytes:
    lines = head.split(b"\r\n")
    if len(lines) < 2:
        return head
    at = random.randrange(1, len(lines))
    name = lines[at].partition(b":")[0]
    changed = (name + b": " + random.choice(HEADER_VALUES), b" folded", name, b":", b"")
    lines[at] = random.choices(changed, (8, 1, 1, 1, 1))[0]
    return b"\r\n".join(lines)


def drop_a_header(random: Random, head: bytes, other: bytes) -> bytes:
    lines = head.split(b"\r\n")
    if len(lines) > 1:
        del lines[random.randrange(1, len(lines))]
    return b"\r\n".join(lines)


HEAD_EDITS: tuple[Mutator, ...] = (
    change_the_target,
    change_the_method,
    add_a_header,
    change_a_header,
    drop_a_header,
    mutate_bytes,
)
CONTENT_LENGTH = re.compile(rb"content-length:[^\r\n]*", re.IGNORECASE)


def mutate_http(random: Random, entry: bytes, other: bytes) -> bytes:
    """One message, or several one after another. The length is right most of the time: else few bodies were read."""
    draw = random.random()
    if draw < 0.05:
        return mutate_bytes(random, entry, other)
    if draw < 0.08:
        return entry + other
    head, blank, body = entry.partition(BLANK)
    other_head, _, other_body = other.partition(BLANK)
    if body and random.random() < 0.85:
        body = mutate_json(random, body, other_body)
    else:
        head = apply(random, HEAD_EDITS, head, other_head)
    if random.random() < 0.95:
        head = CONTENT_LENGTH.sub(b"content-length: %d" % len(body), head, count=1)
    return head + blank + body
