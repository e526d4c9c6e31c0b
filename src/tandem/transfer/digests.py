"""Digests of pages as they travel: 8 bytes each, little-endian."""

import struct
from collections.abc import Sequence

from tandem.core.disagg.transfer_state import DIGEST_BYTES


def pack_digests(digests: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(digests)}Q", *digests)


def unpack_digests(packed: bytes) -> tuple[int, ...]:
    """Raises ValueError when it is no whole number of digests."""
    if len(packed) % DIGEST_BYTES:
        raise ValueError(f"{len(packed)} bytes of digests")
    return struct.unpack(f"<{len(packed) // DIGEST_BYTES}Q", packed)
