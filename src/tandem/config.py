"""Frozen settings of one server: every flag of `tandem serve`, its default, its meaning, and what excludes what.

The command line and `docs/flags.md` are generated from here; a flag that is not here does not exist. Names are
SGLang's where it has them.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from math import inf
from typing import Any, Literal  # Any: values of dataclass metadata, whose shape the standard library leaves open

from tandem import kv_events_config, several_hosts, storage_config
from tandem.core.settings import MAX_DP_SIZE, Role
from tandem.core.values import MAX_SHARDS, MAX_TIMEOUT_SECONDS, PAGE_TOKENS, Cut
from tandem.door_config import DOOR_RULES, TOO_LATE, ConfigRule, DoorConfig, flag, is_network
from tandem.engine.attention.table import ATTENTION_BACKENDS, DEFAULT_ATTENTION_BACKEND
from tandem.engine.quantization_names import QUANTIZATIONS
from tandem.several_hosts import is_loopback

MOST_THREADS = 1024
MOST_RUNNING = 1 << 16  # tables of that many rows are made at start
MOST_DIGITS = 18
MOST_GB = 1e9  # in bytes well within 64 bits, in which settings travel
MOST_MS = MAX_TIMEOUT_SECONDS * 1e3


@dataclass(frozen=True, slots=True)
class ServerConfig(DoorConfig):
    """One server: an API process, a node process, and its worker processes.

    A `bool` field with default False is a switch, another one can be negated. `None` means: derived, see the help text.
    """

    model: str
    served_model_name: tuple[str, ...] = flag(
        (),
        "model name in the API (default: MODEL as given); of several, behind which MODEL cannot stand, the first is in "
        "metrics and answers to requests without one",
        metavar="NAME",
        stand_in_row=True,
    )
    dtype: str = flag(
        "auto",
        "weights and activations; auto: as stored, float16 as float32, or beside codes as bfloat16; half and float are "
        "float16 and float32",
        choices=("auto", "float32", "bfloat16", "float16"),
        other_words={"half": "float16", "float": "float32"},
    )
    quantization: str | None = flag(
        None,
        "linear layers in 8 or 4 bits, made when a plain checkpoint is loaded (w8a16, int8wo, w4a16, int4wo are "
        "the same); other names say what the checkpoint is already",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "keys and values; auto: as --dtype, int8: a scale for each token and head; the same on both halves of a pair",
        choices=("auto", "int8"),
    )
    device: str = flag(
        "cpu",
        "torch device; with cuda or cuda:N each of several workers has one of its own, from that one on",
        metavar="DEVICE",
    )
    attention_backend: str = flag(
        DEFAULT_ATTENTION_BACKEND, "how attention is computed", choices=tuple(ATTENTION_BACKENDS)
    )
    disable_cuda_graph: bool = flag(False, "on an NVIDIA device: launch every kernel of a decoding step by itself")
    cuda_graph_max_bs: int = flag(
        160, "on an NVIDIA device: up to so many rows decode by CUDA graphs, captured at start; 0: none"
    )
    cpu_threads: int = flag(0, "threads of the engine; 0: cores divided by the engines on this machine")
    tp_size: int = flag(
        1,
        "workers that share every layer (tensor parallel); with --enable-dp-attention they share MLPs only",
        aliases=("--tp", "--tensor-parallel-size"),
    )
    pp_size: int = flag(
        1,
        "stages that the layers are spread over, --tp-size workers each (pipeline parallel)",
        aliases=("--pp", "--pipeline-parallel-size"),
    )
    pp_min_micro_batch_size: int = flag(
        16,
        "running requests that are worth a micro-batch of their own: as long as there are fewer for each stage they "
        "decode in fewer micro-batches",
    )
    attn_cp_size: int = flag(
        1,
        "ranks that share out the tokens of each batch of prompts and all hold their KV, --tp-size x --pp-size workers "
        "each (context parallel); not on decode servers",
        aliases=("--attention-context-parallel-size",),
    )
    dp_size: int = flag(
        1,
        "replicas of the model behind this one address, --tp-size x --pp-size x --attn-cp-size workers each "
        "(data parallel)",
        aliases=("--dp", "--data-parallel-size"),
    )
    enable_dp_attention: bool = flag(
        False,
        "the --dp-size ranks step together: each attends to its own requests, all compute the MLPs and experts of all, "
        "of which each has a part; needs --tp-size equal to --dp-size",
    )
    nnodes: int = flag(1, "hosts that the workers of this server are spread over, in order of their ranks")
    node_rank: int = flag(0, "which of them this is; 0 has the API, and all others do as it says")
    dist_init_addr: str | None = flag(
        None,
        "where node rank 0 listens for the other hosts, the same on all of them",
        metavar="HOST:PORT",
        aliases=("--nccl-init-addr",),
    )
    dist_timeout: float = flag(300.0, "seconds until all hosts are there, and that one looks for node rank 0")
    load_balance_method: str = flag(
        "auto",
        "how a request finds its replica, unless it says routed_dp_rank; auto: a prefill server goes by the room, "
        "others take turns",
        choices=("auto", "round_robin", "follow_bootstrap_room", "total_requests", "total_tokens"),
    )
    context_length: int | None = flag(None, "longest prompt plus output (default: the model's)", metavar="TOKENS")
    page_size: int | None = flag(
        None,
        f"tokens per KV page (default: {PAGE_TOKENS}; more where the model has states, of which each page has one)",
        metavar="TOKENS",
    )
    max_total_tokens: int | None = flag(
        None, "KV pool in tokens (default: from --mem-fraction-static)", metavar="TOKENS"
    )
    mem_fraction_static: float = flag(0.1, "share of the machine's memory for the KV pool")
    max_running_requests: int = flag(32, "rows of the running batch")
    max_queued_requests: int = flag(2048, "requests beyond that are refused with 503")
    chunked_prefill_size: int = flag(512, "prompt tokens computed in one batch")
    prefill_max_requests: int | None = flag(None, "prompts computed in one batch (default: any number)", metavar="N")
    dllm_threshold: float = flag(
        0.95, "of models of block diffusion: how sure a pass has to be of a token to settle it beside the surest one"
    )
    enable_mixed_chunk: bool = flag(True, "decode rows ride along with prompt chunks")
    max_prefill_stall_ms: int = flag(
        80, "how long prompts may keep those who decode from their next token: chunks get that small; 0: whole chunks"
    )
    swa_full_tokens_ratio: float = flag(
        0.0, "share of the KV pool's tokens that layers with a window have memory for; 0: 0.8 if that keeps nobody out"
    )
    disable_hybrid_swa_memory: bool = flag(False, "layers with a sliding window keep the KV that nobody sees any more")
    disable_radix_cache: bool = flag(False, "keep no prefix cache")
    enable_hierarchical_cache: bool = flag(
        False, "pages that leave the KV pool go to host memory, and come back where that is cheaper than computing them"
    )
    hicache_ratio: float = flag(2.0, "host memory for them, in sizes of the KV pool")
    hicache_size: float = flag(0.0, "the same in GB for each worker; 0: as --hicache-ratio says", metavar="GB")
    hicache_write_policy: str = flag(
        "write_through",
        "when a page is copied to host memory: when it is computed, used a second time, or about to leave the pool",
        choices=("write_through", "write_through_selective", "write_back"),
    )
    hicache_storage_backend: str | None = flag(
        None,
        "what lies below host memory: file, a folder that servers share and that outlives them; nixl, the same by NIXL",
        metavar="{file,nixl}",
    )
    hicache_storage_dir: str | None = flag(
        None, "that folder: of your own, made where it is not there (needed with a backend)", metavar="DIR"
    )
    hicache_storage_size: float = flag(
        10.0, "bytes that are kept there, in GB, whoever writes: what was used least recently goes", metavar="GB"
    )
    hicache_storage_prefetch_policy: str = flag(
        "timeout",
        "how long a request waits for its pages from there: not at all, until all are there, or by its length",
        choices=("best_effort", "wait_complete", "timeout"),
    )
    hicache_storage_backend_extra_config: str | None = flag(
        None, f"tokens that a prompt has to lack, and the timeout, as JSON: {storage_config.EXAMPLE}", metavar="JSON"
    )
    disable_overlap_schedule: bool = flag(False, "launch a batch only after the one before has returned")
    schedule_policy: str = flag(
        "fcfs",
        "which queued request starts first: as they came, who has the longest cached prefix, or who may say most",
        choices=("fcfs", "lpm", "lof"),
    )
    enable_priority_scheduling: bool = flag(
        False,
        "requests may say a priority, and larger ones come first: into a full queue, out of it, and before those that "
        "run; the same on both halves of a pair",
    )
    schedule_low_priority_values_first: bool = flag(False, "smaller values of priority come first")
    priority_scheduling_preemption_threshold: int = flag(
        10,
        "who has a priority higher by more pushes back those who run, where no slot, or too few pages, is free",
    )
    schedule_conservativeness: float = flag(0.3, "share of running requests' expected output that admission keeps free")
    enable_prefill_delayer: bool = flag(False, "hold prompts back until they are worth a stall of those who decode")
    prefill_delayer_max_delay_passes: int = flag(30, "after so many batches prompts begin whatever the gates say")
    prefill_delayer_token_usage_low_watermark: float | None = flag(
        None, "share of the KV pool in use below which no prompt waits", metavar="F"
    )
    prefill_delayer_queue_min_ratio: float | Literal["auto"] | None = flag(
        None,
        "wait for this share of the running requests, at most for a usual batch; auto: for as many as are worth it by "
        "what batches cost here (docs/delayer.md; default: off)",
        metavar="F|auto",
    )
    prefill_delayer_max_delay_ms: float = flag(5000.0, "how long --prefill-delayer-queue-min-ratio may hold prompts")
    prefill_delayer_forward_passes_buckets: tuple[float, ...] = flag(
        (),
        "bounds of the histogram of waits in batches, as far as --prefill-delayer-max-delay-passes reaches; 0 and its "
        "last are there anyway (default: 5 20 50 100 200)",
        metavar="F",
    )
    prefill_delayer_wait_seconds_buckets: tuple[float, ...] = flag(
        (),
        "bounds of the histogram of waits in seconds; 0 is there anyway (default: 1 2 5 10 20 50 100 200 500)",
        metavar="F",
    )
    deterministic: bool = flag(
        False,
        "a row's logits depend on its own tokens only, not on batch, chunking, cache hits or threads; checked at start",
    )
    chat_template: str | None = flag(
        None,
        "a Jinja file, or the template itself, in place of the model's own; the same on both halves of a pair",
        metavar="FILE",
    )
    tool_call_parser: str = flag(
        "auto",
        "how the model writes calls of tools; auto: as its chat template does; the same on both halves of a pair",
        choices=(
            *("auto", "hermes", "qwen25", "qwen3_coder", "qwen3_xml", "llama3", "llama3_json", "mistral"),
            *("pythonic", "olmo3", "phi4_mini", "phi4_mini_json", "granite"),
        ),
    )
    reasoning_parser: str = flag(
        "auto",
        "where the model's thoughts end and its answer begins; auto: <think> where its chat template knows it; "
        "the same on both halves of a pair",
        choices=("auto", "none", "qwen3", "deepseek-r1"),
    )
    sampling_defaults: str = flag(
        "model",
        "temperature, top_k, top_p, min_p and repetition_penalty of requests that do not say; model: as its "
        "generation_config.json has them; openai: 1, off, 1, 0 and 1; the same on both halves of a pair",
        choices=("model", "openai"),
    )
    kv_events_config: str | None = flag(
        None,
        "publish which blocks of KV the prefix cache takes and drops, with their tokens, as vLLM and SGLang do: "
        f"{kv_events_config.EXAMPLE}; also buffer_steps, hwm and max_queue_size; ports rise by the DP rank",
        metavar="JSON",
    )
    is_embedding: bool = flag(
        False,
        "answer with vectors (/v1/embeddings, /v1/rerank, /v1/score) instead of tokens: of a decoder that of its last "
        "token; encoders do nothing else",
    )
    log_format: str = flag("text", "format of log lines", choices=("text", "json"))
    disaggregation_mode: str = flag("null", "role of this server", choices=("null", "prefill", "decode"))
    disaggregation_bootstrap_port: int = flag(8998, "where the prefill's bootstrap server listens; 0 picks a free port")
    cluster_secret_file: str | None = flag(
        None,
        "prefill, decode and --nnodes: the secret that all servers and hosts prove to each other; not readable by "
        "everybody (default: one of this user on this machine, made at first use)",
        metavar="PATH",
    )
    disaggregation_allow: tuple[str, ...] = flag(
        (), "networks in which a request may name a prefill (default: this host only); may be repeated", metavar="CIDR"
    )
    disaggregation_transfer_backend: str = flag(
        "auto",
        "how KV travels: shm: through shared memory, which needs both servers on one host, under one user; sock: over "
        "sockets; nixl: read by NIXL, over the network of --host or the devices that UCX_NET_DEVICES names; auto: shm "
        "where that can be, nixl with a server that is set to it, else sock",
        choices=("auto", "sock", "shm", "nixl"),
    )
    disaggregation_decode_enable_radix_cache: bool | None = flag(
        None, "decode: keep a prefix cache, so that only what it lacks travels (default: on)"
    )
    disaggregation_decode_allocation_policy: str = flag(
        "early",
        "decode: when it reserves pages for a prompt that a prefill computes: before that begins, so that they come "
        "while it goes on; or when it is complete, so that what waits there holds nothing here",
        choices=("early", "prefill_complete"),
    )
    disaggregation_local_prefill: str = flag(
        "off",
        "decode: compute prompts of which at most N tokens are not cached here; auto: up to an eighth of a chunk, "
        "while no other prompt is computed here",
        metavar="{off,auto,N}",
    )
    disaggregation_dp_rank_conflict: str = flag(
        "resolve",
        "prefill: what to do with a request on another DP rank than its room implies: announce the rank, or refuse it",
        choices=("resolve", "fail"),
    )
    num_reserved_decode_tokens: int = flag(512, "tokens a running request is assumed to need still, at most")
    disaggregation_metadata_slots: int | None = flag(
        None, "result slots of the prefill (default: 2 x max running)", metavar="N"
    )
    disaggregation_park_max_tokens: int = flag(1 << 20, "prompt tokens that may wait, computed, for READY")
    optimistic_prefill_policy: str | None = flag(
        None,
        "what prefill does before decode's READY: off, retry or park (default park)",
        choices=("off", "retry", "park"),
    )
    optimistic_prefill_retries: int | None = flag(None, "selects retry with this many requeues; 0: off", metavar="N")
    optimistic_prefill_attempts: int | None = flag(
        None,
        "selects park; so often a request gives its pages back under pressure until it waits for READY; 0: off",
        metavar="N",
    )
    kv_load_failure_policy: str | None = flag(
        None,
        "after a failed transfer: recompute the prompt on decode, or fail the request (default recompute)",
        choices=("recompute", "fail"),
    )
    strict_remote: bool = flag(False, "decode never computes a prompt itself: a failed transfer fails the request")
    request_timeout: float = flag(
        600.0, "seconds until the first token, unless the request, or the router before this server, says otherwise"
    )
    stall_timeout: float = flag(30.0, "seconds between two tokens")
    drain_timeout: float = flag(60.0, "seconds that running requests get after SIGTERM")
    watchdog_timeout: float = flag(
        30.0, "seconds without progress of the node or the worker until the server ends; /health says 503 after half"
    )
    flight_record: str | None = flag(None, "directory for the flight records of the node", metavar="DIR")
    flight_record_max_bytes: int = flag(
        256 << 20, "of all flight records in that directory, whoever wrote them; the oldest go first"
    )
    fault_records: str | None = flag(
        None,
        "directory for what each process did last before a fault of ours, which is written then; off: nothing is kept "
        "(default: tandem/faults in this user's state directory)",
        metavar="DIR|off",
    )
    enable_fault_injection: bool = flag(False, "test hooks may be changed while it runs: PUT /debug/faults")

    @property
    def role(self) -> Role:
        return Role.UNIFIED if self.disaggregation_mode == "null" else Role(self.disaggregation_mode)

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model,)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def num_workers(self) -> int:
        """Processes that compute, in all replicas."""
        return self.cut.num_shards * self.dp_size

    @property
    def sizes(self) -> str:
        """The flags whose product `num_workers` is."""
        if self.enable_dp_attention:
            return f"--dp-size {self.dp_size}"
        context = f" x --attn-cp-size {self.attn_cp_size}" if self.attn_cp_size > 1 else ""
        return f"--tp-size {self.tp_size} x --pp-size {self.pp_size}{context} x --dp-size {self.dp_size}"

    @property
    def cut(self) -> Cut:
        """Of one replica."""
        return Cut(self.replica_tp_size, self.pp_size, self.attn_cp_size)

    @property
    def num_workers_here(self) -> int:
        """Of them, those that share the machine of this host."""
        return max(1, self.num_workers // self.nnodes)

    @property
    def computes_alone(self) -> bool:
        """Whether no worker waits for another one within a batch."""
        return self.cut.num_shards == 1 and not self.enable_dp_attention

    @property
    def graph_rows(self) -> int:
        """Rows that decode by CUDA graphs, at most."""
        may = self.device != "cpu" and not self.disable_cuda_graph and self.role != "prefill"
        has_graphs = may and self.computes_alone
        return min(self.cuda_graph_max_bs, self.max_running_requests) if has_graphs else 0

    @property
    def window_depth(self) -> int:
        """Batches that are launched ahead."""
        return 1 if self.disable_overlap_schedule else self.pp_size + 1

    @property
    def page_tokens(self) -> int:
        """`page_size`, or what it is where nothing says it."""
        return PAGE_TOKENS if self.page_size is None else self.page_size

    @property
    def replica_tp_size(self) -> int:
        """Workers of one replica that share its attention."""
        return self.tp_size // self.dp_size if self.enable_dp_attention else self.tp_size


RULES: tuple[ConfigRule, ...] = (
    *DOOR_RULES,
    ConfigRule(
        lambda c: c.page_tokens < 1 or c.page_tokens & (c.page_tokens - 1) != 0, "--page-size must be a power of two"
    ),
    ConfigRule(
        lambda c: c.chunked_prefill_size < c.page_tokens,
        "--chunked-prefill-size must be at least one page (--page-size)",
    ),
    ConfigRule(lambda c: not 0 < c.dllm_threshold <= 1, "--dllm-threshold must be above 0 and at most 1"),
    ConfigRule(
        lambda c: not 1 <= c.max_running_requests <= MOST_RUNNING,
        f"--max-running-requests must be at least 1 and at most {MOST_RUNNING}",
    ),
    ConfigRule(lambda c: c.max_queued_requests < 1, "--max-queued-requests must be at least 1"),
    ConfigRule(lambda c: not 0 < c.mem_fraction_static < 1, "--mem-fraction-static must lie between 0 and 1"),
    ConfigRule(
        lambda c: not all(0 <= port < 1 << 16 for port in (c.port, c.disaggregation_bootstrap_port)),
        "--port and --disaggregation-bootstrap-port take 0 to 65535",
    ),
    ConfigRule(
        lambda c: min(c.tp_size, c.pp_size, c.attn_cp_size) < 1 or c.tp_size * c.pp_size * c.attn_cp_size > MAX_SHARDS,
        f"--tp-size, --pp-size and --attn-cp-size must be at least 1, and their product at most {MAX_SHARDS}",
    ),
    ConfigRule(
        lambda c: c.attn_cp_size > 1 and c.disaggregation_mode == "decode",
        "--attn-cp-size shares out the tokens of prompts, which a decode server does not compute: leave it out there",
    ),
    ConfigRule(
        lambda c: c.attn_cp_size > 1 and c.is_embedding,
        "--attn-cp-size is for models that say tokens: leave it out of an embedding server (--is-embedding, or an "
        "encoder)",
    ),
    ConfigRule(lambda c: not 1 <= c.dp_size <= MAX_DP_SIZE, f"--dp-size must be at least 1 and at most {MAX_DP_SIZE}"),
    ConfigRule(
        lambda c: c.enable_dp_attention and not c.tp_size == c.dp_size > 1,
        "--enable-dp-attention needs a --dp-size of 2 or more and the same --tp-size: one worker attends for each rank",
    ),
    ConfigRule(
        lambda c: c.enable_dp_attention and c.pp_size * c.attn_cp_size > 1,
        "--enable-dp-attention cannot be combined with --pp-size or --attn-cp-size: its ranks step together through "
        "all layers, each with rows of its own",
    ),
    ConfigRule(
        lambda c: c.load_balance_method == "follow_bootstrap_room" and c.disaggregation_mode == "null",
        "--load-balance-method follow_bootstrap_room is for prefill and decode servers: others see no room",
    ),
    ConfigRule(
        lambda c: c.deterministic and c.enable_dp_attention,
        "--deterministic excludes --enable-dp-attention, which cuts the sums of MLPs: leave one of them out",
    ),
    ConfigRule(
        lambda c: c.deterministic and c.kv_cache_dtype != "auto",
        "--deterministic is measured with keys and values as they are computed: leave --kv-cache-dtype out",
    ),
    ConfigRule(
        lambda c: c.deterministic and c.is_embedding,
        "--deterministic is measured on scores of tokens, which an embedding server (--is-embedding, or an encoder) "
        "does not make: leave it out",
    ),
    ConfigRule(
        lambda c: c.is_embedding and c.disaggregation_mode != "null",
        "an embedding server (--is-embedding, or an encoder) has no decode side whom KV could be sent to: leave "
        "--disaggregation-mode out",
    ),
    ConfigRule(
        lambda c: c.device != "cpu" and c.nnodes > 1,
        "--nnodes needs --device cpu: NCCL is told of interfaces by name, and hosts know each other's addresses only",
    ),
    ConfigRule(lambda c: not 0 <= c.cpu_threads <= MOST_THREADS, f"--cpu-threads takes 0 to {MOST_THREADS}"),
    ConfigRule(
        lambda c: not 0 <= c.cuda_graph_max_bs <= MOST_RUNNING,
        f"--cuda-graph-max-bs must be at least 0 and at most {MOST_RUNNING}",
    ),
    ConfigRule(
        lambda c: c.prefill_max_requests is not None and c.prefill_max_requests < 1,
        "--prefill-max-requests must be at least 1",
    ),
    ConfigRule(
        lambda c: c.max_total_tokens is not None and c.max_total_tokens < 1, "--max-total-tokens must be at least 1"
    ),
    ConfigRule(
        lambda c: min(c.num_reserved_decode_tokens, c.schedule_conservativeness, c.drain_timeout) < 0,
        "--num-reserved-decode-tokens, --schedule-conservativeness and --drain-timeout must not be negative",
    ),
    ConfigRule(
        lambda c: c.priority_scheduling_preemption_threshold < 0,
        "--priority-scheduling-preemption-threshold must not be negative: equals would push each other back for ever",
    ),
    ConfigRule(
        lambda c: kv_events_config.complaint(c.kv_events_config, dp_size=c.dp_size) is not None,
        f"--kv-events-config takes JSON such as {kv_events_config.EXAMPLE}, with a port for every DP rank",
    ),
    ConfigRule(
        lambda c: c.kv_events_config is not None and not kv_events_config.is_installed(),
        "--kv-events-config needs pyzmq: pip install 'tandem-llm[kv-events]'",
    ),
    ConfigRule(lambda c: "" in c.served_model_name, "--served-model-name must not be empty"),
    ConfigRule(lambda c: c.flight_record_max_bytes < 1, "--flight-record-max-bytes must be at least 1"),
    ConfigRule(
        lambda c: min(c.request_timeout, c.stall_timeout, c.watchdog_timeout) <= 0,
        "timeouts must be positive",
    ),
    ConfigRule(
        lambda c: (
            max(c.request_timeout, c.stall_timeout, c.watchdog_timeout, c.drain_timeout, c.dist_timeout)
            > MAX_TIMEOUT_SECONDS
        ),
        TOO_LATE,
    ),
    ConfigRule(
        lambda c: c.enable_hierarchical_cache and (c.disable_radix_cache or c.device != "cpu"),
        "--enable-hierarchical-cache keeps pages of the prefix cache, and copies them on the CPU: it excludes "
        "--disable-radix-cache and needs --device cpu",
    ),
    ConfigRule(
        lambda c: c.enable_hierarchical_cache and c.disaggregation_decode_enable_radix_cache is False,
        "--enable-hierarchical-cache keeps pages of the prefix cache, which "
        "--no-disaggregation-decode-enable-radix-cache turns off",
    ),
    ConfigRule(
        lambda c: c.enable_hierarchical_cache and c.kv_events_config is not None,
        "--kv-events-config tells of the KV pool only, so it excludes --enable-hierarchical-cache",
    ),
    ConfigRule(
        lambda c: c.disaggregation_transfer_backend == "shm" and c.nnodes > 1,
        "--disaggregation-transfer-backend shm needs all workers on the host of their peers, so it excludes --nnodes",
    ),
    ConfigRule(
        lambda c: c.disaggregation_transfer_backend == "nixl" and not storage_config.is_nixl_installed(),
        "--disaggregation-transfer-backend nixl needs NIXL: pip install 'tandem-llm[nixl]'",
    ),
    ConfigRule(lambda c: c.pp_min_micro_batch_size < 1, "--pp-min-micro-batch-size must be at least 1"),
    ConfigRule(lambda c: c.max_prefill_stall_ms < 0, "--max-prefill-stall-ms must not be negative"),
    ConfigRule(
        lambda c: max(c.max_prefill_stall_ms, c.prefill_delayer_max_delay_ms) > MOST_MS,
        f"--max-prefill-stall-ms and --prefill-delayer-max-delay-ms are at most {MOST_MS:.0f}: "
        "no request may have more",
    ),
    ConfigRule(lambda c: not 0 <= c.swa_full_tokens_ratio < 1, "--swa-full-tokens-ratio must be between 0 and 1"),
    ConfigRule(
        lambda c: c.swa_full_tokens_ratio > 0 and c.disable_hybrid_swa_memory,
        "--swa-full-tokens-ratio does nothing beside --disable-hybrid-swa-memory; leave one of them out",
    ),
    ConfigRule(
        lambda c: c.hicache_ratio <= 0 or c.hicache_size < 0,
        "--hicache-ratio must be positive, and --hicache-size not negative",
    ),
    ConfigRule(
        lambda c: max(c.hicache_size, c.hicache_storage_size) > MOST_GB,
        f"--hicache-size and --hicache-storage-size are at most {MOST_GB:.0f} GB",
    ),
    ConfigRule(lambda c: c.hicache_storage_backend not in (None, *storage_config.BACKENDS), storage_config.REFUSED),
    ConfigRule(
        lambda c: c.hicache_storage_backend == "nixl" and not storage_config.is_nixl_installed(), storage_config.MISSING
    ),
    ConfigRule(
        lambda c: c.hicache_storage_backend is not None and c.hicache_storage_dir is None,
        "--hicache-storage-backend needs --hicache-storage-dir",
    ),
    ConfigRule(lambda c: c.hicache_storage_size <= 0, "--hicache-storage-size must be positive"),
    ConfigRule(
        lambda c: not storage_config.is_readable(c.hicache_storage_backend_extra_config),
        f"--hicache-storage-backend-extra-config takes JSON such as {storage_config.EXAMPLE}",
    ),
    ConfigRule(
        lambda c: not c.enable_prefill_delayer and _changes_delayer(c),
        "--prefill-delayer-* flags need --enable-prefill-delayer",
    ),
    ConfigRule(
        lambda c: c.prefill_delayer_max_delay_passes < 1 or c.prefill_delayer_max_delay_ms <= 0,
        "--prefill-delayer-max-delay-passes and --prefill-delayer-max-delay-ms must be positive",
    ),
    ConfigRule(
        lambda c: (
            c.prefill_delayer_token_usage_low_watermark is not None
            and not 0 < c.prefill_delayer_token_usage_low_watermark <= 1
        ),
        "--prefill-delayer-token-usage-low-watermark must lie between 0 and 1",
    ),
    ConfigRule(
        lambda c: c.prefill_delayer_queue_min_ratio not in (None, "auto") and c.prefill_delayer_queue_min_ratio <= 0,
        "--prefill-delayer-queue-min-ratio must be positive; leave it out for no queue gate",
    ),
    ConfigRule(
        lambda c: not are_bounds(c.prefill_delayer_forward_passes_buckets),
        "--prefill-delayer-forward-passes-buckets must be positive and rise",
    ),
    ConfigRule(
        lambda c: not are_bounds(c.prefill_delayer_wait_seconds_buckets),
        "--prefill-delayer-wait-seconds-buckets must be positive and rise",
    ),
    ConfigRule(
        lambda c: (
            c.disaggregation_metadata_slots is not None and not 1 <= c.disaggregation_metadata_slots <= 2 * MOST_RUNNING
        ),
        f"--disaggregation-metadata-slots must be at least 1 and at most {2 * MOST_RUNNING}",
    ),
    ConfigRule(
        lambda c: c.disaggregation_park_max_tokens < 0,
        "--disaggregation-park-max-tokens must not be negative; with 0 nothing is parked",
    ),
    ConfigRule(
        lambda c: min(c.optimistic_prefill_retries or 0, c.optimistic_prefill_attempts or 0) < 0,
        "--optimistic-prefill-retries and --optimistic-prefill-attempts must not be negative",
    ),
    ConfigRule(
        lambda c: len(optimistic_wishes(c)) > 1,
        "--optimistic-prefill-policy, --optimistic-prefill-retries (N: retry, 0: off) and "
        "--optimistic-prefill-attempts (N: park, 0: off) contradict each other: give one of them",
    ),
    ConfigRule(
        lambda c: any(not is_network(text) for text in c.disaggregation_allow),
        "--disaggregation-allow takes networks, such as 10.1.0.0/16 or fd00::/8, without bits behind the prefix",
    ),
    ConfigRule(
        lambda c: local_prefill_tokens(c.disaggregation_local_prefill) is None,
        "--disaggregation-local-prefill takes off, auto or a positive number of tokens",
    ),
    ConfigRule(
        lambda c: c.disaggregation_local_prefill != "off" and c.strict_remote,
        "--disaggregation-local-prefill computes prompts on decode, which --strict-remote forbids",
    ),
    ConfigRule(
        lambda c: c.kv_load_failure_policy == "recompute" and c.strict_remote,
        "--kv-load-failure-policy recompute computes prompts on decode, which --strict-remote forbids",
    ),
    ConfigRule(
        lambda c: c.disaggregation_decode_enable_radix_cache is True and c.disable_radix_cache,
        "--disaggregation-decode-enable-radix-cache contradicts --disable-radix-cache",
    ),
    ConfigRule(
        lambda c: c.cluster_secret_file is None and c.disaggregation_mode != "null" and not is_loopback(c.host),
        "a prefill or decode server that others can reach needs --cluster-secret-file, the same on all of them",
    ),
)


def keeps_prefixes(config: ServerConfig) -> bool:
    return not config.disable_radix_cache and config.disaggregation_decode_enable_radix_cache is not False


def _changes_delayer(config: ServerConfig) -> bool:
    defaults = {f.name: f.default for f in fields(ServerConfig) if f.name.startswith("prefill_delayer_")}
    return any(getattr(config, name) != default for name, default in defaults.items())


def are_bounds(values: tuple[float, ...]) -> bool:
    """Of a histogram that has 0 and infinity already."""
    return all(low < high for low, high in pairwise((0.0, *values, inf)))


def violations(config: ServerConfig) -> list[str]:
    """All rules that this configuration breaks, reported together."""
    return [rule.reason for rule in RULES if rule.broken(config)] + several_hosts.complaints(config)


def optimistic_wishes(config: ServerConfig) -> set[str]:
    """The policies that the flags select, each on its own. More than one is a contradiction."""
    retries, attempts = config.optimistic_prefill_retries, config.optimistic_prefill_attempts
    by_number = (("retry", retries), ("park", attempts))
    wishes = {policy if number > 0 else "off" for policy, number in by_number if number is not None}
    return wishes | ({config.optimistic_prefill_policy} if config.optimistic_prefill_policy is not None else set())


def local_prefill_tokens(text: str) -> int | None:
    """The number in `--disaggregation-local-prefill`, 0 for `off` and `auto`; None: it is none of the three."""
    if text in ("off", "auto"):
        return 0
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if is_number and int(text) > 0 else None


def public_settings(config: Any) -> dict[str, Any]:
    """The fields of a configuration that may be shown to whoever asks."""
    return {f.name: getattr(config, f.name) for f in fields(config) if not f.metadata.get("is_secret")}


def flags(kind: Any = ServerConfig) -> list[tuple[str, Any]]:
    """(`--flag-name`, field) of a class of settings, in the order of declaration."""
    return [(flag_of(f.name), f) for f in fields(kind) if "help" in f.metadata]


def flag_of(field: str) -> str:
    """Of a field, by its name."""
    return "--" + field.replace("_", "-")
