"""The fake model: KV content and tokens as pure functions of everything that the row has read.

The KV of a position is a 64-bit number made of its token, its position and the sum of all KV before it; the sampled
token is made of the sum of all KV of its row. So one wrong, stale or foreign slot anywhere in the pages of a request
changes every token after it, and a sum over whole pages is enough to read them.

A page also holds that sum as it was behind the last token that was written into it: its state, as a model with
state-space layers has one. Who goes on behind a page reads both, so one that was copied without its state shows, and so
does a token that was computed twice.

A cell of the KV (one head and layer: `core/kv_parts.py`) holds the content times its weight (1, 3, 5, ...): what
belongs into one cell is nonsense in another. Odd numbers have an inverse modulo 2^64, so every cell gives the content
back, and one that is wrong shows.
"""

from functools import cache

MASK = (1 << 64) - 1
EOS_TOKEN = 2
FIRST_TOKEN = 10  # ordinary tokens are [FIRST_TOKEN, FIRST_TOKEN + VOCABULARY)
VOCABULARY = 30_000


def kv_content(*, sum_before: int, token: int, position: int) -> int:
    """KV of one position, given the sum of the KV of all positions before it."""
    mixed = (sum_before * 0x9E3779B97F4A7C15 + token * 0xC2B2AE3D27D4EB4F + position * 0x165667B19E3779F9 + 1) & MASK
    return ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & MASK


def sample(*, kv_sum: int, position: int, eos_one_in: int) -> int:
    """The token that follows `position`, given the sum of the KV of [0, position].

    eos_one_in: about one token in so many is end-of-sequence; 0 means never.
    """
    number = mixed(kv_sum, position)
    if eos_one_in and number % eos_one_in == 0:
        return EOS_TOKEN
    return FIRST_TOKEN + (number >> 8) % VOCABULARY


def mixed(kv_sum: int, position: int) -> int:
    """The number of 64 bits by which the token is chosen that follows."""
    number = ((kv_sum ^ (kv_sum >> 31)) * 0x94D049BB133111EB + position) & MASK
    return number ^ (number >> 33)


def cell_weight(cell: int) -> int:
    return 2 * cell + 1


@cache
def _inverse(cell: int) -> int:
    return pow(cell_weight(cell), -1, 1 << 64)


def content_of(sum_in_cell: int, cell: int) -> int:
    """What lies in a cell, without its weight."""
    return sum_in_cell * _inverse(cell) & MASK if cell else sum_in_cell & MASK
