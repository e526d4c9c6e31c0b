"""What one seed is like: which servers with which flags, which requests, which faults. Printed when a seed fails."""

from dataclasses import dataclass, field, fields, replace
from functools import partial
from random import Random
from typing import Any  # values of flags

from tandem.config import ServerConfig
from tandem.core.kv_parts import KvGrid
from tandem.core.router.routing import CACHE_AWARE
from tandem.core.values import MILLISECOND
from tandem.server.router.config import RouterConfig
from tandem.simulator.actors.storage import StorageFaults
from tandem.simulator.faults.options import FIRST_OFF_RECORD, LATE_PAGES_ONE_IN
from tandem.simulator.whole import cluster
from tandem.simulator.whole.clients import PROMPT_LENGTHS
from tandem.simulator.whole.cluster import Server
from tandem.simulator.whole.cuts import (
    UNCUT,
    draw_context,
    draw_cut,
    draw_cuts,
    draw_num_hosts,
    draw_together,
    flags_of,
    grid_of,
    micro_batches,
)
from tandem.simulator.whole.network import LOCAL_CAPACITY, TCP_CAPACITY
from tandem.simulator.whole.templates import CLOCK, NONE, OWN

BOOTSTRAP_PORT = 8998
MEETING_OFFSET = 2_000  # from the port of a server, of the one where its hosts meet
DIST_TIMEOUT_S = 60.0
FAULT_KINDS = (
    "kill_process",
    "kill_server",
    "terminate",
    "freeze",
    "cut",
    "stall",
    "vanish",
    "partition",
    "corrupt",
    "dribble",
    "no_descriptors",
    "failed_batch",
    "abort_all",
)
STARVES = ("no_forks", "no_memory")
DECODER, ENCODER = "decoder", "encoder"
PLAIN, TORCH = "plain", "torch"  # `engine.py`, and that of the product (`torch_engine.py`)
RECORD_FOLDER, RING_FOLDER = "records", "faults"  # in that of the seed
API_KEY, ADMIN_KEY = "a-key-of-clients", "a-key-of-operators"
TIERS_ONE_IN = 6
STORAGE_SPARED = 0.3  # of them
STALLS_ONE_IN = 6
BLOCKS_ONE_IN = 6  # of the seeds that may have them
WINDOWS_ONE_IN = 8
QUEUES_ONE_IN = 6
CROWDED_ONE_IN = 8
BACKENDS_ONE_IN = 8
TEMPLATES_ONE_IN = 8
FORMED_TOKENS = 512  # that a pool holds at least where requests offer tools, which take some 300 of them in a prompt


@dataclass(frozen=True, slots=True)
class Narrows:
    """What is smaller than usual, so that little data takes many steps, and who comes to look what there is."""

    peer_capacity: int | None = None  # bytes in one direction of connections between nodes, and between workers
    page_delay_ns: int | None = None  # at most, of what is sent between workers
    pair_capacity: int = LOCAL_CAPACITY  # the same, between processes of one server
    frame_bytes: int | None = None  # of pages in one frame of the data plane
    read_pages: int | None = None  # that one Read may name
    num_strangers: int = 0  # who dial any port, say a few bytes or none, and leave
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS
    careless: float = 0.0  # at least so many clients are


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    layout: str  # unified, pairs
    num_prefills: int = 0
    num_decodes: int = 0
    is_one_machine: bool = True
    flags: dict[str, Any] = field(default_factory=dict)  # of all servers
    roles: dict[str, dict[str, Any]] = field(default_factory=dict)  # of prefill and of decode
    num_requests: int = 12
    spread_s: float = 6.0  # requests begin within
    careless: float = 0.3  # share of clients that leave, read slowly or stop in the middle of a body
    faults: tuple[str, ...] = ()  # kinds
    num_faults: int = 0
    dribbles: float = 0.0  # share of connections that move byte by byte
    base_s: float = 0.004  # of a batch
    timeouts: tuple[float, ...] = (3.0, 10.0, 20.0)  # of requests
    num_visits: int = 0  # by operators
    records: bool = False  # nodes write flight records
    is_by_name: bool = False  # machines are known by names
    max_transfers: int = 4  # that a worker pulls at the same time; few, so that some have to wait
    max_links: int = 64  # of readers of one worker
    starves: tuple[str, ...] = ()  # of what the machine of a server has nothing left for a while
    has_keys: bool = False  # servers and router know clients and operators by keys
    tcp_capacity: int = TCP_CAPACITY  # bytes in one direction; few, so that who sends has to wait
    formed: float = 0.0  # share of requests that ask for an answer in some form
    has_rings: bool = False  # what a fault of ours has left is written
    routing: dict[str, Any] = field(default_factory=dict)  # flags of the router
    narrows: Narrows = Narrows()
    vectors: str = ""  # what makes them, decoder or encoder, where the server makes nothing else
    block_tokens: int = 1  # that are found together
    window_tokens: int = 0  # that a query sees in some layers; 0: all
    grid: KvGrid = KvGrid()  # noqa: RUF009 - it never changes
    disk: StorageFaults = StorageFaults()  # noqa: RUF009 - it never changes; of the folder of pages, where there is one
    engine: str = PLAIN  # of all workers
    template: str = OWN  # for chats
    model: str = ""  # of the product's engine: which of `random_models.py`; none of them: the bundled one

    @property
    def keys(self) -> tuple[str, str]:
        """A client's and an operator's; empty where nobody needs one."""
        return (API_KEY, ADMIN_KEY) if self.has_keys else ("", "")

    @property
    def has_priorities(self) -> bool:
        return bool(self.flags.get("enable_priority_scheduling"))

    @property
    def is_crowded(self) -> bool:
        """The router refuses who is one too many, though nothing has gone wrong."""
        return self.layout == "pairs" and "max_active_requests" in self.routing

    def describe(self) -> str:
        return " ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self))


def _draw_scarcity(random: Random, *, has_faults: bool) -> dict[str, Any]:
    """What there is little of, and who asks for keys."""
    return {
        "max_transfers": random.choice((1, 2, 4)),
        "max_links": random.choice((8, 64)),
        "tcp_capacity": random.choice((512, TCP_CAPACITY, TCP_CAPACITY)),
        "starves": tuple(kind for kind in STARVES if random.random() < 0.2) if has_faults else (),
        "has_keys": random.random() < 0.2,
    }


def _draw_forms(random: Random) -> tuple[float, dict[str, Any]]:
    """The share of requests that ask for a form, and how servers read answers in it."""
    flags = {
        "tool_call_parser": random.choice(("auto", "hermes", "llama3", "mistral")),
        "reasoning_parser": random.choice(("none", "none", "qwen3", "deepseek-r1")),
    }
    return (random.choice((0.3, 0.9)), flags) if random.random() < 0.2 else (0.0, {})


def draw_narrows(seed: int) -> Narrows:
    """From randomness of their own: what else a seed is like does not depend on them."""
    random = Random(f"narrows {seed}")
    return Narrows(
        peer_capacity=random.choice((None, None, None, 60, 200, 700)),
        pair_capacity=random.choice((LOCAL_CAPACITY, LOCAL_CAPACITY, LOCAL_CAPACITY, 64)),
        frame_bytes=random.choice((None, None, 100, 250)),
        read_pages=random.choice((None, None, 3)),
        num_strangers=random.choice((0, 0, 0, 6, 20)),
        page_delay_ns=random.choice((None, None, 10 * MILLISECOND, 50 * MILLISECOND)),
        prompt_lengths=random.choice((PROMPT_LENGTHS, PROMPT_LENGTHS, (40, 90, 160))),
        careless=random.choice((0.0, 0.0, 0.6)),
    )


def draw_routing(seed: int) -> dict[str, Any]:
    """From randomness of their own, like `draw_narrows`."""
    random = Random(f"whole routing {seed}")
    flags: dict[str, Any] = {}
    if random.random() < 0.15:
        flags |= {"cb_failure_threshold": random.choice((1, 2)), "cb_timeout_duration_secs": random.choice((0.5, 5.0))}
    if Random(f"whole models {seed}").random() < 0.1:
        flags["enable_igw"] = True
    if random.random() < 0.75:
        return flags
    flags["policy"] = random.choice(("power_of_two", CACHE_AWARE, CACHE_AWARE))
    if flags["policy"] == CACHE_AWARE:
        flags |= {
            "cache_threshold": random.choice((0.0, 0.3)),
            "balance_abs_threshold": random.choice((0, 2, 64)),
            "max_tree_size": random.choice((1024, 1 << 20)),
        }
    return flags


def draw_crowd(seed: int) -> dict[str, Any]:
    """How few requests the router has under way at most, in some seeds. From randomness of its own, too."""
    random = Random(f"whole crowds {seed}")
    is_spacious = seed < FIRST_OFF_RECORD or random.randrange(CROWDED_ONE_IN)
    return {} if is_spacious else {"max_active_requests": random.choice((1, 2, 4))}


def draw_vectors(seed: int, *, is_unified: bool) -> tuple[str, dict[str, Any]]:
    """From randomness of their own, too: what makes vectors, and flags of that. Pairs have nothing to do with it."""
    random = Random(f"whole vectors {seed}")
    if not is_unified or random.random() < 0.7:
        return "", {}
    if random.random() < 0.5:
        return DECODER, {"is_embedding": True}
    return ENCODER, {"is_embedding": True, "chunked_prefill_size": 512}


def _draw_flags(random: Random) -> dict[str, Any]:
    """Of all servers."""
    page_size = random.choice((4, 8, 16))
    flags: dict[str, Any] = {
        "page_size": page_size,
        "max_total_tokens": page_size * random.choice((64, 128, 512)),
        "max_running_requests": random.choice((2, 4, 16)),
        "chunked_prefill_size": random.choice((16, 64, 512)),
        "disable_overlap_schedule": random.random() < 0.3,
        "disable_radix_cache": random.random() < 0.2,
        "enable_mixed_chunk": random.random() < 0.3,
        "num_reserved_decode_tokens": random.choice((8, 64)),
        "max_queued_requests": 256,
        "stall_timeout": 5.0,
        "watchdog_timeout": random.choice((4.0, 12.0)),
        "drain_timeout": 10.0,
        "request_timeout": 30.0,
    }
    if random.random() < 0.15:
        flags["dp_size"] = 2
        flags["load_balance_method"] = random.choice(("auto", "round_robin", "total_requests", "total_tokens"))
    if random.random() < 0.2:
        flags["log_format"] = "json"
    if random.random() < 0.3:
        flags["enable_fault_injection"] = True
    return flags


def draw_stall(seed: int) -> dict[str, Any]:
    """How long prompts may keep others from decoding, where it is not the default. From randomness of its own, too."""
    random = Random(f"whole prefill stalls {seed}")
    return {} if random.randrange(STALLS_ONE_IN) else {"max_prefill_stall_ms": random.choice((0, 1, 20))}


def draw_blocks(seed: int) -> int:
    """How many tokens a row samples at once. From randomness of its own, too."""
    random = Random(f"whole blocks {seed}")
    is_cut = draw_cut(seed) or draw_cuts(seed)[:2] != (UNCUT, UNCUT)
    is_older = seed < FIRST_OFF_RECORD  # of these, replicas of several workers had no blocks
    is_refused = draw_context(seed) != UNCUT or draw_together(seed)[0]
    if is_refused or (is_cut and is_older) or random.randrange(BLOCKS_ONE_IN):
        return 1
    return random.choice((2, 4))


def draw_allocation(seed: int) -> dict[str, Any]:
    """When decode reserves pages, where it is not before READY. From randomness of its own, too."""
    random = Random(f"whole late pages {seed}")
    is_early = seed < FIRST_OFF_RECORD or random.randrange(LATE_PAGES_ONE_IN)
    return {} if is_early else {"disaggregation_decode_allocation_policy": "prefill_complete"}


def draw_backends(seed: int, *, falls_back: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """How pages come, of prefills and of decodes, where that is not left to each connection. Some can't have it as they
    are set, and compute their prompts, if they do so. From randomness of its own, too."""
    random = Random(f"whole backends {seed}")
    if seed < FIRST_OFF_RECORD or random.randrange(BACKENDS_ONE_IN):
        return {}, {}
    ways = ("auto", "sock", "shm") if falls_back else ("auto", "sock")
    prefill, decode = ({"disaggregation_transfer_backend": random.choice(ways)} for _ in range(2))
    return prefill, decode


def draw_windows(seed: int) -> int:
    """How many tokens a query sees in some layers of the model; 0: all. From randomness of its own, too."""
    random = Random(f"whole windows {seed}")
    is_older = seed < FIRST_OFF_RECORD
    return 0 if is_older or random.randrange(WINDOWS_ONE_IN) else random.choice((1, 16, 40))


def draw_template(seed: int) -> str:
    """For chats. From randomness of its own, too."""
    random = Random(f"whole templates {seed}")
    is_own = seed < FIRST_OFF_RECORD or random.randrange(TEMPLATES_ONE_IN)
    return OWN if is_own else random.choice((CLOCK, CLOCK, NONE))


def draw_queue(seed: int, *, has_prefixes: bool) -> dict[str, Any]:
    """Another order of queues, where it is not the default. From randomness of its own, too."""
    random = Random(f"whole queues {seed}")
    if seed < FIRST_OFF_RECORD or random.randrange(QUEUES_ONE_IN):
        return {}
    policy = random.choice(("fcfs", "lpm", "lof"))
    flags: dict[str, Any] = {"schedule_policy": policy if has_prefixes or policy != "lpm" else "fcfs"}
    if random.random() < 0.7:
        flags |= {
            "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": random.random() < 0.3,
            "priority_scheduling_preemption_threshold": random.choice((0, 0, 1)),
        }
    return flags


def draw_priority(options: Options, number: int) -> int | None:
    """What a request says of it. None: nothing, as of all where it does not count."""
    random = Random(f"whole priority {options.seed} {number}")
    return random.choice((None, 0, 1, 2)) if options.has_priorities else None


def _draw_tier(seed: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Host memory below few pages, in some seeds. Whatever else a seed is like does not depend on it."""
    random = Random(f"whole host tiers {seed}")
    if random.randrange(TIERS_ONE_IN) or flags["disable_radix_cache"]:
        return {}
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": random.choice((0.5, 4.0)),
        "hicache_write_policy": random.choice(("write_through", "write_through_selective", "write_back")),
        "max_total_tokens": max(320, flags["max_total_tokens"] // 4),
    }


def _draw_storage(seed: int) -> tuple[dict[str, Any], StorageFaults]:
    """A folder of pages below host memory, in some of the seeds that have that. From randomness of its own, too."""
    random = Random(f"whole storage {seed}")
    if random.random() < STORAGE_SPARED:
        return {}, StorageFaults()
    flags = {
        "hicache_storage_backend": "file",
        "hicache_storage_dir": "/pages",
        "hicache_storage_prefetch_policy": random.choice(("best_effort", "wait_complete", "timeout")),
        "hicache_storage_backend_extra_config": '{"prefetch_threshold": 1}',
    }
    kinds = [one.name for one in fields(StorageFaults)]
    return flags, StorageFaults(**dict.fromkeys(random.sample(kinds, random.choice((0, 1, 2))), 0.1))


def _draw_roles(random: Random) -> dict[str, dict[str, Any]]:
    """Flags of prefill and of decode."""
    prefill: dict[str, Any] = {}
    if random.random() < 0.6:
        prefill["optimistic_prefill_policy"] = random.choice(("off", "retry", "park"))
    if random.random() < 0.3:
        prefill["enable_prefill_delayer"] = True
    decode: dict[str, Any] = {"disaggregation_local_prefill": random.choice(("off", "off", "auto", "24"))}
    if random.random() < 0.2:
        decode["kv_load_failure_policy"] = "fail"
    return {"prefill": prefill, "decode": decode}


def draw_options(seed: int) -> Options:
    random = Random(f"whole {seed}")
    is_unified = random.random() < 0.2
    flags = _draw_flags(random)
    roles = _draw_roles(random)
    prefill_cut, decode_cut, _ = draw_cuts(seed)
    roles["prefill"] |= flags_of(prefill_cut) | flags_of(draw_context(seed))
    roles["decode"] |= flags_of(decode_cut) | draw_allocation(seed)
    lends, reads = draw_backends(seed, falls_back="kv_load_failure_policy" not in roles["decode"])
    roles["prefill"] |= lends
    roles["decode"] |= reads
    formed, form_flags = _draw_forms(Random(f"whole forms {seed}"))
    together, delayer = draw_together(seed)
    vectors, vector_flags = ("", {}) if together else draw_vectors(seed, is_unified=is_unified)
    tier = {} if vectors else _draw_tier(seed, flags)
    storage, disk = _draw_storage(seed) if tier else ({}, StorageFaults())
    tier |= storage
    flags |= form_flags | draw_cut(seed) | tier | together | (delayer if is_unified else {}) | vector_flags
    roles["prefill"] |= delayer
    if not vectors:
        flags |= draw_queue(seed, has_prefixes=not flags["disable_radix_cache"])
        decoding = flags if is_unified else roles["decode"]
        decoding |= draw_stall(seed) | micro_batches({**flags, **decoding})
    if formed:
        flags["max_total_tokens"] = max(FORMED_TOKENS, flags["max_total_tokens"])
    has_faults = random.random() < 0.8
    kinds = tuple(kind for kind in FAULT_KINDS if random.random() < 0.4) if has_faults else ()
    num_prefills, num_decodes = (0 if is_unified else random.choice((1, 1, 2)) for _ in range(2))
    is_one_machine = random.random() < 0.4
    random.choice((2, 4, 8))  # of nothing: what follows is drawn after it, or all seeds would be other ones
    return Options(
        seed=seed,
        layout="unified" if is_unified else "pairs",
        num_prefills=num_prefills,
        num_decodes=num_decodes,
        is_one_machine=is_one_machine,
        flags=flags,
        roles=roles,
        num_requests=random.choice((6, 12, 24)),
        spread_s=random.choice((0.5, 4.0, 10.0)),
        careless=random.choice((0.0, 0.3)),
        faults=kinds,
        num_faults=random.randint(1, 6) if kinds else 0,
        dribbles=random.choice((0.0, 0.0, 0.1)) if has_faults else 0.0,
        base_s=random.choice((0.001, 0.01, 0.05)),
        num_visits=random.choice((0, 2, 8)),
        records=random.random() < 0.3,
        is_by_name=random.random() < 0.3,
        timeouts=(3.0, 10.0, 20.0) if kinds else (20.0,),
        formed=0.0 if vectors else formed,
        vectors=vectors,
        block_tokens=1 if formed or vectors else draw_blocks(seed),
        window_tokens=0 if vectors or draw_blocks(seed) > 1 else draw_windows(seed),
        has_rings=Random(f"whole rings {seed}").random() < 0.3,
        routing=draw_routing(seed) | draw_crowd(seed),
        narrows=draw_narrows(seed),
        grid=grid_of(seed),
        disk=disk,
        template=OWN if formed or vectors else draw_template(seed),
        **_draw_scarcity(random, has_faults=bool(kinds)),
    )


@dataclass(slots=True)
class Cluster:
    servers: list[Server]
    front: Server  # where clients go
    client_host: str
    further_hosts: list[Server]  # of servers that are on several

    @property
    def all_hosts(self) -> list[Server]:
        return [*self.servers, *self.further_hosts]

    @property
    def meeting_ports(self) -> set[int]:
        """Where the hosts of one server speak with each other."""
        return {host.port for host in self.further_hosts}


def make_cluster(options: Options, secret_file: str) -> Cluster:
    """Not started."""
    rings = RING_FOLDER if options.has_rings else "off"
    flags = {"fault_records": rings, **({"flight_record": RECORD_FOLDER} if options.records else {})}
    keys: dict[str, Any] = {"api_key": API_KEY, "admin_api_key": ADMIN_KEY} if options.has_keys else {}
    options = replace(options, flags={**options.flags, **flags, **keys})
    if options.layout == "unified":
        config = ServerConfig(model="tandem/mini", port=30_000, **options.flags)
        config, further = _spread("unified", config, options.seed, "127.0.0.1", "127.0.0.1", secret_file)
        one = cluster.server("unified", config, read_facts=_facts_of(options))
        return Cluster([one], one, "127.0.0.1", further)
    prefills = [_half(options, "prefill", number, secret_file) for number in range(options.num_prefills)]
    decodes = [_half(options, "decode", number, secret_file) for number in range(options.num_decodes)]
    further_hosts: list[Server] = []
    for halves, name, first in ((prefills, "prefill", 0), (decodes, "decode", 10)):
        for number, one in enumerate(halves):
            own, other = _machine(options, first + number), _machine(options, 50 + first + number)
            halves[number], further = _spread(f"{name}{number}", one, options.seed, own, other, secret_file)
            further_hosts += further
    machine = _machine(options, 100)
    config = RouterConfig(
        workers=cluster.router_workers(
            [(_name(options, number), one) for number, one in enumerate(prefills)],
            [(_name(options, 10 + number), one) for number, one in enumerate(decodes)],
        ),
        host="127.0.0.1" if options.is_one_machine else "0.0.0.0",
        port=31_000,
        stall_timeout=8.0,
        request_timeout=30.0,
        health_check_interval=1.0,
        drain_timeout=5.0,
        fault_records=rings,
        **options.routing,
        **keys,
    )
    front = cluster.router("router", config, machine=machine)
    servers = [
        *(
            cluster.server(f"prefill{number}", one, machine=_machine(options, number), read_facts=_facts_of(options))
            for number, one in enumerate(prefills)
        ),
        *(
            cluster.server(
                f"decode{number}", one, machine=_machine(options, 10 + number), read_facts=_facts_of(options)
            )
            for number, one in enumerate(decodes)
        ),
        front,
    ]
    return Cluster(servers, front, _machine(options, 200), further_hosts)


def _spread(
    name: str, config: ServerConfig, seed: int, own: str, other: str, secret_file: str
) -> tuple[ServerConfig, list[Server]]:
    """A server as it is on its first host, with its further hosts. own, other: machines"""
    nnodes = draw_num_hosts(seed, name, config.num_workers)
    if nnodes == 1:
        return config, []
    config = replace(
        config,
        nnodes=nnodes,
        dist_init_addr=f"{own}:{config.port + MEETING_OFFSET}",
        dist_timeout=DIST_TIMEOUT_S,
        cluster_secret_file=secret_file,
    )
    return config, [cluster.further_host(name, replace(config, node_rank=1), other)]


def _facts_of(options: Options) -> cluster.ReadFacts:
    plain = partial(cluster.facts, block_tokens=options.block_tokens)
    return plain if options.engine == PLAIN else cluster.facts_of_checkpoint


def _machine(options: Options, number: int) -> str:
    return "127.0.0.1" if options.is_one_machine else f"10.0.0.{number + 1}"


def _name(options: Options, number: int) -> str:
    """As other machines know it."""
    machine = _machine(options, number)
    return name_of(machine) if options.is_by_name and not options.is_one_machine else machine


def name_of(machine: str) -> str:
    return "machine-" + machine.replace(".", "-")


def _half(options: Options, role: str, number: int, secret_file: str) -> ServerConfig:
    offset = number if role == "prefill" else 10 + number
    return ServerConfig(
        model="tandem/mini",
        host="127.0.0.1" if options.is_one_machine else "0.0.0.0",
        port=30_000 + offset,
        disaggregation_mode=role,
        disaggregation_bootstrap_port=BOOTSTRAP_PORT + number,
        disaggregation_allow=() if options.is_one_machine else ("10.0.0.0/24",),
        cluster_secret_file=secret_file,
        **options.flags,
        **options.roles[role],
    )
