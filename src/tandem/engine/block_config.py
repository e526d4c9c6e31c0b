"""What a checkpoint says about its blocks: how many tokens are found together, and what stands for an unknown one."""

from dataclasses import dataclass

from tandem.core.values import MAX_BLOCK_TOKENS
from tandem.engine.documents import Fields, ModelError


@dataclass(frozen=True, slots=True)
class BlockConfig:
    block_tokens: int  # attention sees the whole block of a query, and all before it
    mask_id: int  # the token in whose place something is to be found; it is never sampled


def read_blocks(config: Fields, *, vocab_size: int) -> BlockConfig:
    """Raises ModelError."""
    size, mask = (config.integer("block_size", most=MAX_BLOCK_TOKENS), config.integer("mask_token_id", most=1 << 31))
    if size & (size - 1) != 0:
        raise ModelError(f"config.json: block_size {size} is no power of two, as pages are; choose another checkpoint")
    if mask >= vocab_size:
        raise ModelError(
            f"config.json: mask_token_id {mask} is not in the vocabulary of {vocab_size}; the file is broken"
        )
    return BlockConfig(size, mask)
