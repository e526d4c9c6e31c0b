"""Frozen settings of one server: every flag of `tandem serve`, its default, its meaning, and what excludes what.

The command line and `docs/flags.md` are generated from here; a flag that is not here does not exist. Names are
SGLang's where it has them.
"""

import os
from dataclasses import dataclass, field, fields
from typing import Any  # values of dataclass metadata, whose shape the standard library leaves open


def flag(default: Any, text: str, *, choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    """A field of `ServerConfig` that is also a command-line flag `--like-this`."""
    return field(default=default, metadata={"help": text, "choices": choices, "metavar": metavar})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server: an API process, a node process and a worker process.

    A `bool` field with default False is a switch. `None` means: derived, see the help text.
    """

    model: str
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(30000, "HTTP port; 0 picks a free one")
    api_key: str | None = flag(None, "clients must send it as a bearer token", metavar="KEY")
    admin_api_key: str | None = flag(
        None, "key for flush, abort and debug endpoints (default: the API key)", metavar="KEY"
    )
    served_model_name: str | None = flag(None, "model name in the API (default: MODEL as given)", metavar="NAME")
    dtype: str = flag("auto", "weights and activations; auto: as stored", choices=("auto", "float32", "bfloat16"))
    device: str = flag("cpu", "torch device", metavar="DEVICE")
    cpu_threads: int = flag(0, "threads of the engine; 0: cores divided by the engines on this machine")
    context_length: int | None = flag(None, "longest prompt plus output (default: the model's)", metavar="TOKENS")
    page_size: int = flag(16, "tokens per KV page")
    max_total_tokens: int | None = flag(
        None, "KV pool in tokens (default: from --mem-fraction-static)", metavar="TOKENS"
    )
    mem_fraction_static: float = flag(0.1, "share of the machine's memory for the KV pool")
    max_running_requests: int = flag(32, "rows of the running batch")
    max_queued_requests: int = flag(2048, "requests beyond that are refused with 503")
    chunked_prefill_size: int = flag(512, "prompt tokens computed in one batch")
    enable_mixed_chunk: bool = flag(False, "decode rows ride along with prompt chunks")
    disable_radix_cache: bool = flag(False, "keep no prefix cache")
    disable_overlap_schedule: bool = flag(False, "launch a batch only after the one before has returned")
    schedule_conservativeness: float = flag(0.3, "share of running requests' expected output that admission keeps free")
    enable_prefill_delayer: bool = flag(False, "hold prompts back until they are worth a stall of those who decode")
    prefill_delayer_max_delay_passes: int = flag(30, "after so many batches prompts begin whatever the gates say")
    prefill_delayer_token_usage_low_watermark: float | None = flag(
        None, "share of the KV pool in use below which no prompt waits", metavar="F"
    )
    prefill_delayer_queue_min_ratio: float | None = flag(
        None, "wait for this share of the running requests, at most for a usual batch (default: off)", metavar="F"
    )
    prefill_delayer_max_delay_ms: float = flag(5000.0, "how long --prefill-delayer-queue-min-ratio may hold prompts")
    deterministic: bool = flag(
        False, "a row's logits depend on its own tokens only, not on batch, chunking or cache hits"
    )
    log_format: str = flag("text", "format of log lines", choices=("text", "json"))
    disaggregation_mode: str = flag("null", "role of this server", choices=("null", "prefill", "decode"))
    disaggregation_bootstrap_port: int = flag(8998, "where the prefill's bootstrap server listens; 0 picks a free port")
    cluster_secret_file: str | None = flag(
        None,
        "prefill: writes to the bootstrap server must be signed with it (default: none are taken from afar)",
        metavar="PATH",
    )
    disaggregation_transfer_backend: str = flag("auto", "how KV travels", choices=("auto", "sock"))
    num_reserved_decode_tokens: int = flag(512, "tokens a running request is assumed to need still, at most")
    disaggregation_metadata_slots: int | None = flag(
        None, "rows of the prefill's result table (default: 2 x max running)", metavar="N"
    )
    disaggregation_park_max_tokens: int = flag(1 << 20, "prompt tokens that may wait, computed, for READY")
    optimistic_prefill_policy: str | None = flag(
        None,
        "what prefill does before decode's READY: off, retry or park (default park)",
        choices=("off", "retry", "park"),
    )
    optimistic_prefill_retries: int | None = flag(None, "selects retry with this many requeues; 0: off", metavar="N")
    kv_load_failure_policy: str = flag("recompute", "after a failed transfer", choices=("recompute", "fail"))
    strict_remote: bool = flag(False, "decode never computes a prompt itself: a failed transfer fails the request")
    request_timeout: float = flag(600.0, "seconds until the first token, unless the request says otherwise")
    stall_timeout: float = flag(30.0, "seconds between two tokens")
    drain_timeout: float = flag(60.0, "seconds that running requests get after SIGTERM")
    flight_record: str | None = flag(None, "directory for the flight record of the node", metavar="DIR")
    flight_record_max_bytes: int = flag(256 << 20, "the older of two segments is dropped beyond that")

    @property
    def role(self) -> str:
        return "unified" if self.disaggregation_mode == "null" else self.disaggregation_mode

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination that is refused at start, and the sentence that tells the user why."""

    broken: Any  # Callable[[ServerConfig], bool]
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(lambda c: c.page_size < 1 or c.page_size & (c.page_size - 1) != 0, "--page-size must be a power of two"),
    Rule(lambda c: c.chunked_prefill_size < c.page_size, "--chunked-prefill-size must be at least one page"),
    Rule(lambda c: c.max_running_requests < 1, "--max-running-requests must be at least 1"),
    Rule(lambda c: c.max_queued_requests < 1, "--max-queued-requests must be at least 1"),
    Rule(lambda c: not 0 < c.mem_fraction_static < 1, "--mem-fraction-static must lie between 0 and 1"),
    Rule(lambda c: c.request_timeout <= 0 or c.stall_timeout <= 0, "timeouts must be positive"),
    Rule(
        lambda c: not c.enable_prefill_delayer and _changes_delayer(c),
        "--prefill-delayer-* flags need --enable-prefill-delayer",
    ),
    Rule(
        lambda c: c.enable_prefill_delayer and c.disaggregation_mode == "decode",
        "--enable-prefill-delayer is not for decode servers: their prompts are computed by prefill servers",
    ),
    Rule(
        lambda c: c.prefill_delayer_max_delay_ms != 5000 and c.prefill_delayer_queue_min_ratio is None,
        "--prefill-delayer-max-delay-ms is for the queue gate: give --prefill-delayer-queue-min-ratio",
    ),
    Rule(
        lambda c: c.prefill_delayer_max_delay_passes < 1 or c.prefill_delayer_max_delay_ms <= 0,
        "--prefill-delayer-max-delay-passes and --prefill-delayer-max-delay-ms must be positive",
    ),
    Rule(
        lambda c: (
            c.prefill_delayer_token_usage_low_watermark is not None
            and not 0 < c.prefill_delayer_token_usage_low_watermark <= 1
        ),
        "--prefill-delayer-token-usage-low-watermark must lie between 0 and 1",
    ),
    Rule(
        lambda c: c.prefill_delayer_queue_min_ratio is not None and c.prefill_delayer_queue_min_ratio <= 0,
        "--prefill-delayer-queue-min-ratio must be positive; leave it out for no queue gate",
    ),
    Rule(
        lambda c: c.optimistic_prefill_policy in ("off", "park") and (c.optimistic_prefill_retries or 0) > 0,
        "--optimistic-prefill-retries N selects retry; leave --optimistic-prefill-policy out or make it retry",
    ),
    Rule(
        lambda c: c.optimistic_prefill_policy == "retry" and c.optimistic_prefill_retries == 0,
        "--optimistic-prefill-retries 0 means off; it contradicts --optimistic-prefill-policy retry",
    ),
    Rule(
        lambda c: c.cluster_secret_file is not None and c.disaggregation_mode != "prefill",
        "--cluster-secret-file is for prefill servers: only they run a bootstrap server",
    ),
    Rule(
        lambda c: c.strict_remote and c.disaggregation_mode != "decode",
        "--strict-remote is for decode servers",
    ),
)


def _changes_delayer(config: ServerConfig) -> bool:
    defaults = {f.name: f.default for f in fields(ServerConfig) if f.name.startswith("prefill_delayer_")}
    return any(getattr(config, name) != default for name, default in defaults.items())


def violations(config: ServerConfig) -> list[str]:
    """All rules that this configuration breaks, reported together."""
    return [rule.reason for rule in RULES if rule.broken(config)]


def environment_switch(name: str) -> bool:
    """`TANDEM_<name>`, with `SGLANG_<name>` as an alias, as a truth value."""
    value = os.environ.get(f"TANDEM_{name}", os.environ.get(f"SGLANG_{name}", ""))
    return value.lower() in ("1", "true", "yes", "on")


FORCED_RETRIES = "TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB"  # test hook of the seed: share of requests retried once


def environment_number(name: str) -> float:
    """`TANDEM_<name>`, with `SGLANG_<name>` as an alias; 0 when it is not set. Raises ValueError with a sentence."""
    text = os.environ.get(f"TANDEM_{name}") or os.environ.get(f"SGLANG_{name}") or "0"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"the environment variable TANDEM_{name} must be a number, not {text!r}") from None


def flags() -> list[tuple[str, Any]]:
    """(`--flag-name`, field) in the order of declaration."""
    return [("--" + f.name.replace("_", "-"), f) for f in fields(ServerConfig) if f.name != "model"]
