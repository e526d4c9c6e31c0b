"""What the edge must know of model and server to check a request.

On its own, for whoever starts a server: what checks requests takes a while to import, and the model loads meanwhile.
"""

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from tandem.core.settings import Role
from tandem.sampling import SamplingDefaults


@dataclass(frozen=True, slots=True, repr=False)
class HashKeys:
    """Secrets of what is hashed. Their bytes appear in no log line, error or `repr`."""

    pages: bytes  # drawn when the API process starts, or of the folder where pages are stored; nobody else has it
    digests: bytes  # the same on both halves of a pair: without it nobody can try out prompts


class Task(StrEnum):
    """What the model of a server is for."""

    TOKENS = "generation"
    EMBEDDINGS = "embeddings"
    SCORES = "scores of two texts"


class ModelLimits(Struct, frozen=True):
    """What the edge must know of model and server to check a request."""

    role: Role
    context_length: int
    page_size: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_samples: int  # core requests that one HTTP request may become
    bootstrap_port: int
    is_strict_remote: bool  # decode: no prompt is computed here
    keys: HashKeys
    dp_size: int = 1
    defaults: SamplingDefaults = SamplingDefaults()
    task: Task = Task.TOKENS
    dimensions: int = 0  # of an embedding
    one_batch_tokens: int | None = None  # of a model that computes a prompt in one batch: what that may hold
    block_tokens: int = 1  # that are found together
    unsaid_priority: int | None = None  # of a request that says none; None: priorities do not count
