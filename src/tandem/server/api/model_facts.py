"""What the API process knows of the model it serves."""

import os
from pathlib import Path

from msgspec import Struct

from tandem.config import ServerConfig
from tandem.page_files import DiskFolder, FolderRefused
from tandem.sampling import SamplingDefaults
from tandem.server.api.bounds import MAX_INT, MAX_SAMPLES, MIN_INT
from tandem.server.api.limits import HashKeys, ModelLimits, Task
from tandem.server.processes import ServerFailure

SECRET_BYTES = 32


class ModelFacts(Struct):
    """From the model directory and the flags, before anything starts."""

    model_path: str
    architectures: list[str]
    model_type: str
    context_length: int  # tokens, prompt and output together
    page_size: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: str
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # those that the server was told to take
    chat_template: str = ""  # in place of the model's own
    task: Task = Task.TOKENS
    dimensions: int = 0  # of an embedding
    is_encoder: bool = False
    has_states: bool = False  # of state-space layers
    library: str = ""  # that computes its layers, with its version; Tandem itself, unless named
    block_tokens: int = 1  # that are found together
    window: int | None = None  # tokens that layers with a window see; None: every layer sees all


def page_secret(config: ServerConfig) -> bytes:
    """The key of page hashes: where pages outlive this server, that of the folder in which they lie.

    Raises ServerFailure.
    """
    if config.hicache_storage_dir is None:
        return os.urandom(SECRET_BYTES)
    try:
        return DiskFolder(Path(config.hicache_storage_dir)).secret()
    except (OSError, FolderRefused) as error:
        raise ServerFailure(f"no storage of pages in {config.hicache_storage_dir}: {error}") from error


def unsaid_priority(config: ServerConfig) -> int | None:
    """Of a request that says none: the least urgent there is, as SGLang has it. None: priorities do not count."""
    if not config.enable_priority_scheduling:
        return None
    return MAX_INT if config.schedule_low_priority_values_first else MIN_INT


def limits_of(config: ServerConfig, model: ModelFacts, *, digest_secret: bytes | None) -> ModelLimits:
    """What requests are checked against.

    `digest_secret` is one that both halves of a pair have, and nobody else; None: there is no other half.
    """
    pages = page_secret(config)
    return ModelLimits(
        role=config.role,
        context_length=model.context_length,
        page_size=model.page_size,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_samples=min(config.max_queued_requests, MAX_SAMPLES),
        bootstrap_port=config.disaggregation_bootstrap_port,
        is_strict_remote=config.strict_remote,
        dp_size=config.dp_size,
        defaults=model.sampling_defaults,
        task=model.task,
        dimensions=model.dimensions,
        one_batch_tokens=config.chunked_prefill_size if model.is_encoder else None,
        block_tokens=model.block_tokens,
        unsaid_priority=unsaid_priority(config),
        keys=HashKeys(pages=pages, digests=pages if digest_secret is None else digest_secret),
    )
