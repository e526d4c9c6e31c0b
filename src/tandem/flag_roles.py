"""Which flags do something on which servers. One that would do nothing is refused at start with the reason.

A flag that is not in `ROLES` is read in every role. Only a value that differs from the default can be refused: asking
for what happens anyway is harmless.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tandem import otlp
from tandem.config import ServerConfig, flags, keeps_prefixes, optimistic_wishes

UNIFIED, PREFILL, DECODE = "unified", "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Only:
    """The roles in which some code reads a flag, and why none does in the others."""

    roles: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return " and ".join(self.roles)


PAIRED = Only((PREFILL, DECODE), "a unified one has no peers")
DECODES = Only((UNIFIED, DECODE), "a prefill server decodes nothing")
SENDS = Only((PREFILL,), "elsewhere nothing waits for a decode server's READY")
RECEIVES = Only((DECODE,), "elsewhere nothing is received from a prefill server")

KEEPS = Only((UNIFIED,), "the router keeps what prefill and decode servers answer together")

ROLES: dict[str, Only] = {
    "--max-stored-responses": KEEPS,
    "--stored-responses-max-bytes": KEEPS,
    "--disaggregation-bootstrap-port": PAIRED,
    "--disaggregation-allow": PAIRED,
    "--disaggregation-transfer-backend": PAIRED,
    "--enable-fault-injection": Only((PREFILL, DECODE), "the test hooks concern pairs"),
    "--disable-cuda-graph": DECODES,
    "--cuda-graph-max-bs": DECODES,
    "--enable-mixed-chunk": DECODES,
    "--max-prefill-stall-ms": DECODES,
    "--pp-min-micro-batch-size": DECODES,
    "--num-reserved-decode-tokens": DECODES,
    "--schedule-conservativeness": DECODES,
    "--priority-scheduling-preemption-threshold": DECODES,
    "--enable-prefill-delayer": Only(
        (UNIFIED,),
        "on a prefill server nobody decodes whom a prompt could stall, "
        "and prompts of a decode server are computed by prefill servers",
    ),
    "--optimistic-prefill-policy": SENDS,
    "--optimistic-prefill-retries": SENDS,
    "--optimistic-prefill-attempts": SENDS,
    "--disaggregation-park-max-tokens": SENDS,
    "--disaggregation-metadata-slots": Only((PREFILL,), "only they have result slots"),
    "--disaggregation-dp-rank-conflict": Only((PREFILL,), "decode learns it from them"),
    "--disaggregation-local-prefill": Only((DECODE,), "elsewhere no prompt could be computed by somebody else"),
    "--disaggregation-decode-allocation-policy": RECEIVES,
    "--disaggregation-decode-enable-radix-cache": Only((DECODE,), "elsewhere there is --disable-radix-cache"),
    "--kv-load-failure-policy": RECEIVES,
    "--strict-remote": RECEIVES,
}


@dataclass(frozen=True, slots=True)
class Need:
    """A flag that does nothing unless something else is so."""

    flag: str
    is_met: Callable[[ServerConfig], bool]
    reason: str


GENERATES = (  # flags that say something of how tokens are made, or become answers
    "--chat-template",
    "--cuda-graph-max-bs",
    "--disable-cuda-graph",
    "--enable-mixed-chunk",
    "--enable-prefill-delayer",
    "--max-prefill-stall-ms",
    "--max-stored-responses",
    "--num-reserved-decode-tokens",
    "--pp-min-micro-batch-size",
    "--priority-scheduling-preemption-threshold",
    "--reasoning-parser",
    "--sampling-defaults",
    "--schedule-conservativeness",
    "--stored-responses-max-bytes",
    "--tool-call-parser",
)

NO_STORAGE = "needs --hicache-storage-backend"
NO_PREFIXES = "which is off (--disable-radix-cache or --no-disaggregation-decode-enable-radix-cache)"
SEVERAL = "--tp-size, --pp-size, --attn-cp-size or --enable-dp-attention"
VECTORS = "an embedding server (--is-embedding, or an encoder)"
NEEDS: tuple[Need, ...] = (
    *(
        Need(name, lambda c: not c.is_embedding, f"does nothing on {VECTORS}, which generates no token")
        for name in GENERATES
    ),
    *(
        Need(name, lambda c: c.device != "cpu", "needs an NVIDIA device, where CUDA graphs are: give --device cuda")
        for name in ("--disable-cuda-graph", "--cuda-graph-max-bs")
    ),
    *(
        Need(name, lambda c: c.computes_alone, f"does nothing where several workers compute a batch ({SEVERAL})")
        for name in ("--disable-cuda-graph", "--cuda-graph-max-bs")
    ),
    Need("--cuda-graph-max-bs", lambda c: not c.disable_cuda_graph, "does nothing beside --disable-cuda-graph"),
    Need("--disaggregation-dp-rank-conflict", lambda c: c.dp_size > 1, "needs several DP ranks: give --dp-size"),
    Need(
        "--cluster-secret-file",
        lambda c: c.role != "unified" or c.nnodes > 1,
        "is for prefill and decode servers, and for servers on several hosts: others have no peers",
    ),
    Need(
        "--pp-min-micro-batch-size",
        lambda c: c.pp_size > 1 and not c.disable_overlap_schedule,
        "needs several pipeline stages and batches that overlap: give --pp-size",
    ),
    Need("--dist-timeout", lambda c: c.nnodes > 1, "is for servers on several hosts: give --nnodes"),
    Need("--load-balance-method", lambda c: c.dp_size > 1, "needs several DP ranks: give --dp-size"),
    Need(
        "--disaggregation-park-max-tokens",
        lambda c: optimistic_wishes(c) <= {"park"},
        "needs --optimistic-prefill-policy park, and neither --optimistic-prefill-retries nor "
        "--optimistic-prefill-attempts 0: nothing else is parked",
    ),
    Need(
        "--prefill-delayer-max-delay-ms",
        lambda c: not c.enable_prefill_delayer or c.prefill_delayer_queue_min_ratio is not None,
        "is for the queue gate: give --prefill-delayer-queue-min-ratio",
    ),
    Need(
        "--prefill-delayer-max-delay-passes",
        lambda c: c.prefill_delayer_max_delay_passes != 1,
        "1 holds nothing back: give 2 or more, or leave --enable-prefill-delayer out",
    ),
    Need(
        "--mem-fraction-static",
        lambda c: c.max_total_tokens is None,
        "does nothing beside --max-total-tokens, which says the size of the pool",
    ),
    Need(
        "--num-reserved-decode-tokens",
        lambda c: c.schedule_conservativeness != 0,
        "does nothing with --schedule-conservativeness 0, which reserves nothing",
    ),
    Need(
        "--stored-responses-max-bytes",
        lambda c: c.max_stored_responses > 0,
        "does nothing with --max-stored-responses 0, which keeps none",
    ),
    Need(
        "--schedule-policy",
        lambda c: c.schedule_policy != "lpm" or keeps_prefixes(c),
        f"lpm goes by the prefix cache, {NO_PREFIXES}: leave it out",
    ),
    Need(
        "--schedule-policy",
        lambda c: c.schedule_policy != "lof" or not c.is_embedding,
        f"lof goes by the length of answers, and {VECTORS} generates no token: leave it out",
    ),
    *(
        Need(name, lambda c: c.enable_priority_scheduling, "needs --enable-priority-scheduling")
        for name in ("--schedule-low-priority-values-first", "--priority-scheduling-preemption-threshold")
    ),
    Need("--otlp-traces-endpoint", lambda c: c.enable_trace, otlp.UNUSED),
    Need("--kv-events-config", keeps_prefixes, f"tells of the prefix cache, {NO_PREFIXES}"),
    Need(
        "--allowed-host",
        lambda c: c.api_key is None and c.api_key_file is None,
        "does nothing beside an API key (--api-key or --api-key-file), which no web page has",
    ),
    *(
        Need(name, lambda c: bool(c.allowed_origins), "is for web pages of --allowed-origins: name one")
        for name in ("--allow-credentials", "--allowed-methods", "--allowed-headers")
    ),
    *(
        Need(name, lambda c: c.enable_hierarchical_cache, "needs --enable-hierarchical-cache")
        for name in ("--hicache-ratio", "--hicache-size", "--hicache-write-policy", "--hicache-storage-backend")
    ),
    *(
        Need(f"--hicache-storage-{name}", lambda c: c.hicache_storage_backend is not None, NO_STORAGE)
        for name in ("dir", "size", "prefetch-policy", "backend-extra-config")
    ),
    Need(
        "--hicache-ratio",
        lambda c: c.hicache_size == 0,
        "does nothing beside --hicache-size, which says the size",
    ),
    Need(
        "--flight-record-max-bytes",
        lambda c: c.flight_record is not None,
        "needs --flight-record: nothing is recorded",
    ),
)

NO_KV = "does nothing for an encoder, which keeps no KV"
ENCODERS: dict[str, str] = {
    "--disable-radix-cache": "does nothing for an encoder: its attention looks both ways, so prompts share no prefix",
    "--enable-hierarchical-cache": NO_KV,
    "--disable-hybrid-swa-memory": NO_KV,
    "--kv-cache-dtype": NO_KV,
    "--kv-events-config": NO_KV,
    "--mem-fraction-static": NO_KV,
    "--schedule-policy": "does nothing for an encoder, whose prompts share no prefix and have no output",
    "--swa-full-tokens-ratio": NO_KV,
}

STATES: dict[str, str] = {
    "--attn-cp-size": "shares out the tokens of a prompt, and a state-space layer needs them one after the other",
    "--deterministic": "cannot be kept: what a state-space layer sums depends on how a prompt is cut into chunks",
}

NOT_CUT = "cuts layers or batches, and those of this model are computed by transformers as a whole"
TRANSFORMERS: dict[str, str] = {
    "--attn-cp-size": NOT_CUT,
    "--deterministic": "cannot be kept: transformers promises no bits, and computes the layers of this model",
    "--enable-dp-attention": NOT_CUT,
    "--pp-size": NOT_CUT,
    "--quantization": "is for Tandem's own layers, and those of this model are computed by transformers",
    "--tp-size": NOT_CUT,
}

NOT_WITH_BLOCKS = "is not there for models of block diffusion"
BLOCKS: dict[str, str] = {
    "--attention-backend": "has no choice for models of block diffusion",
    "--attn-cp-size": NOT_WITH_BLOCKS,
    "--deterministic": NOT_WITH_BLOCKS,
    "--enable-dp-attention": NOT_WITH_BLOCKS,
    "--is-embedding": "wants vectors, of which a model of block diffusion makes none",
    "--kv-cache-dtype": NOT_WITH_BLOCKS,
}


def impossible(config: ServerConfig, reasons: dict[str, str]) -> list[str]:
    """What a model of some kind cannot do: `STATES`, `TRANSFORMERS` or `BLOCKS`."""
    return [f"{name} {reason}: leave it out" for name, reason in reasons.items() if name in given(config)]


def impossible_with_blocks(config: ServerConfig, block_tokens: int) -> list[str]:
    """What a model of block diffusion cannot do; and what does nothing for any other (blocks of one token)."""
    if block_tokens == 1:
        is_given = "--dllm-threshold" in given(config)
        return ["--dllm-threshold is for models of block diffusion: leave it out"] if is_given else []
    found = impossible(config, BLOCKS)
    if config.page_tokens % block_tokens != 0:
        found.append(
            f"--page-size {config.page_tokens} cuts the model's blocks of {block_tokens} tokens, whose KV is final, "
            "and may be shared, only together: give a multiple"
        )
    return found


def without_effect_on_encoders(config: ServerConfig) -> list[str]:
    """As `without_effect`, of a server whose model is one; what that is, is known later."""
    return [f"{name} {reason}" for name, reason in ENCODERS.items() if name in given(config)]


def without_effect(config: ServerConfig) -> list[str]:
    """The flags that were given and would do nothing, each with the reason."""
    names = given(config)
    elsewhere = [name for name in names if name in ROLES and config.role not in ROLES[name].roles]
    found = [f"{name} is for {ROLES[name]} servers: {ROLES[name].reason}" for name in elsewhere]
    lacking = [need for need in NEEDS if need.flag in names and need.flag not in elsewhere and not need.is_met(config)]
    return found + [f"{need.flag} {need.reason}" for need in lacking]


def given(config: ServerConfig) -> list[str]:
    """The flags whose values differ from the defaults."""
    return [name for name, field in flags() if getattr(config, field.name) != field.default]
