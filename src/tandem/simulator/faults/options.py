"""Faults as distributions. A seed draws its option set: each class is on or off, and how bad it is when it is on.

    F1  message loss                        F13 aborts at random moments
    F2  delays and clogged links            F14 corrupted transfers
    F3  duplicates of messages and events   F15 transfers that end late after a cancel
    F4  duplicates from old connections     F17 repeated rooms, lost halves, wrong ranks, hostile messages
    F5  partitions                          F18 bursts of clients that leave
    F16 host memory that is full, slow,     F19 prefill and decode with different layouts
        short, stale or corrupted
    F6  crash and restart of servers,
        bootstrap servers and routers       F20 what devices and sockets refuse: batches, publishing, pulls, messages,
    F7  one shard or DP rank dies               requests; logits that are not finite
    F8  pauses of a node                    F21 scaling: servers that come late, are drained, return or not, or with
    F9  slow executors, slow shards, and        other DP ranks
        processes or batches that hang      F22 nodes replaced by their own snapshot
    F10 clocks that began elsewhere, drift  F23 connections that break and come back, or go silent
    F11 few result slots                    F24 operators at work: caches flushed, hooks changed, restarts; an edge that
    F12 few pages                               refuses by itself
                                            F25 requests that do not fit, a rendezvous with short timeouts

What the classes do at moments is `fault_schedule.py`; everything else is a distribution that is drawn here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from msgspec import structs

from tandem.core.dp_dispatch import method_for
from tandem.core.kv.windows import most_seen
from tandem.core.kv_parts import KvGrid
from tandem.core.router.circuit_breaker import BreakerSettings
from tandem.core.router.routed_request import RequestSettings
from tandem.core.router.router import RouterSettings
from tandem.core.router.routing import CACHE_AWARE, PolicySettings
from tandem.core.router.worker_registry import HealthSettings
from tandem.core.settings import (
    AllocationPolicy,
    DelayerSettings,
    DpConflictPolicy,
    LoadBalanceMethod,
    LoadFailurePolicy,
    NodeSettings,
    OptimisticPolicy,
    PrefetchPolicy,
    PrefillInfo,
    PrefillStall,
    Role,
    StorageSettings,
    TierSettings,
    WindowSettings,
    WritePolicy,
)
from tandem.core.values import MILLISECOND, SECOND, Cut, Incarnation, Nanos, ceil_div
from tandem.server.api.question_lanes import MAX_UNKNOWN
from tandem.server.node.links import Heartbeat, Limits
from tandem.simulator.actors.host_tier import TierFaults
from tandem.simulator.actors.storage import StorageFaults
from tandem.simulator.faults.names import name_of
from tandem.simulator.faults.queues import draw_queues, draws_queues
from tandem.simulator.network.links import LinkSettings
from tandem.simulator.renderings import ShownTime
from tandem.simulator.workload import WorkloadSettings

CLASSES = tuple(f"F{number}" for number in range(1, 26))
RARE = {"F19": 0.1, "F20": 0.3, "F11": 0.3, "F12": 0.4, "F21": 0.2}  # probability; 0.5 otherwise
RARE |= dict.fromkeys(("F23", "F24", "F25"), 0.08)

TIERS_ONE_IN = 6
STALLS_ONE_IN = 6
TUNED_ONE_IN = 6  # of the seeds with delayers
BLOCKS_ONE_IN = 8
WINDOWS_ONE_IN = 6
LATE_PAGES_ONE_IN = 5
FIRST_OFF_RECORD = 10_000  # seeds below are on record, in tests and elsewhere: what came later is not drawn for them
CONTEXT_ONE_IN = 6  # of the seeds whose replicas are one worker each, and cut in no other way
UNEQUAL_ONE_IN = 6  # of the seeds of which the replicas are one worker each
NEW_ROUTING_ONE_IN = 8
CONTEXTS = (Cut(cp_size=2), Cut(cp_size=3), Cut(2, 1, 2), Cut(1, 2, 2))
SIDES = (Cut(), Cut(2, 1), Cut(3, 1), Cut(4, 1), Cut(1, 2), Cut(1, 3), Cut(2, 2))
ALONE = PrefillInfo(method=LoadBalanceMethod.ROUND_ROBIN)  # one rank
USUAL_ROUTER = RouterSettings()
USUAL_LIMITS = Limits()
RARE_PINGS = Heartbeat(Nanos(60 * SECOND))


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that a seed decides before the first event."""

    seed: int
    classes: tuple[str, ...]
    num_prefills: int
    num_decodes: int
    num_unified: int
    num_shards: int  # of every replica, where both sides are cut alike
    workload: WorkloadSettings
    links: LinkSettings
    prefill: NodeSettings  # incarnation and role are filled in per replica
    decode: NodeSettings
    page_read_ns: tuple[int, int]  # how long reading one page takes, half-open range
    corruption: float  # share of pages
    linger_ns: int  # how late a cancelled page may still arrive, at most
    batch_failure: float  # share of batches
    event_copies: float  # share of events that a node hears twice
    hostility: float  # share of requests that come with a made-up message
    has_encoder: bool = False  # unified replicas look both ways, and all that they are asked for is vectors
    unified_share: float = 0.2  # of the requests, where there are unified replicas
    prefill_info: PrefillInfo = ALONE  # of every prefill server: its DP ranks
    decode_info: PrefillInfo = ALONE
    force_query: bool = False  # on both sides
    num_gateways: int = 0  # our routers
    direct_share: float = 1.0  # of the requests: they come through other gateways
    router: RouterSettings = USUAL_ROUTER
    turnover: bool = False  # operators take workers out of routers and put them back
    names_models: bool = False  # routers ask servers for the names of their models
    http_breaks: float = 0.0  # share of what is said between routers and servers
    error_heads: float = 0.0  # share of requests that a server's edge has no means for
    watchdog_ns: int = 30 * SECOND  # of every server
    io_failure: float = 0.0  # share of messages, of publishing and of pulling
    timed_share: float = 0.0  # of the requests: their prompts show the time
    http_silences: float = 0.0  # share of what is said between routers and servers
    edge_refuses: bool = False  # a server's edge says itself that it drains, or that a name is in use
    repeated_names: float = 0.0  # share of requests with the name of an earlier one
    heartbeat: Heartbeat = RARE_PINGS  # of all nodes
    link_limits: Limits = USUAL_LIMITS
    slow_readers: float = 0.0  # share of clients that take nothing for a while
    misfits: float = 0.0  # share of requests whose prompt or answer is larger than all pages together
    grid: KvGrid | None = None  # of the model; None: as coarse as the cuts of the servers allow
    tier_page_ns: int = 0  # to copy a page of host memory
    tier_faults: TierFaults = TierFaults()  # noqa: RUF009 - it never changes
    storage_page_ns: int = 0  # to fetch a page from storage; to write one takes twice as long
    storage_faults: StorageFaults = StorageFaults()  # noqa: RUF009 - it never changes
    bootstrap_lanes: int = MAX_UNKNOWN  # bootstrap servers that a client asks at a time, of those that keep silent
    resizes: bool = False  # a server of several DP ranks may have another number of them when it comes back

    def time_of_a_probe(self, index: int) -> ShownTime | None:
        """After healing: of every other probe, where some requests show the time."""
        return ShownTime() if self.timed_share and index % 2 else None

    @property
    def _cuts(self) -> str:
        if self.prefill.cut == self.decode.cut:
            return f"{self.num_shards} shard(s)"
        return f"{self.prefill.cut.name} to {self.decode.cut.name}"

    @property
    def _tiers(self) -> str:
        sides = [settings.host_tier for settings in (self.prefill, self.decode)]
        if sides == [None, None]:
            return ""
        told = "/".join("none" if one is None else f"{one.num_pages} {one.write_policy}" for one in sides)
        below = "/".join("none" if one is None or one.storage is None else one.storage.policy for one in sides)
        return f"host pages {told}, storage {below}, "

    @property
    def _windows(self) -> str:
        sides = (self.prefill.windows, self.decode.windows)
        parts = "/".join(str(one.max_parts) for one in sides if one is not None)
        return f"windows of {sides[0].tokens} tokens with {parts} parts, " if sides[0] is not None else ""

    def describe(self) -> str:
        on = " ".join(map(name_of, self.classes)) or "none"
        return (
            f"seed {self.seed}: {self.num_prefills} prefill, {self.num_decodes} decode, {self.num_unified} unified, "
            f"{self.prefill_info.dp_size}+{self.decode_info.dp_size} DP ranks ({self.prefill_info.method}, "
            f"{self.prefill_info.conflict}{', forced query' if self.force_query else ''}), "
            f"{self._cuts}, {self.num_gateways} router(s), {self.direct_share:.0%} direct, "
            f"{self.workload.num_requests} requests in "
            f"{self.workload.duration_ns / SECOND:.0f} s, page {self.prefill.page_size}, "
            f"blocks of {self.prefill.block_tokens}, {self._windows}"
            f"pages {self.prefill.num_pages}/{self.decode.num_pages}, optimistic {self.prefill.optimistic}, "
            f"allocation {self.decode.allocation}, "
            f"{self.timed_share:.0%} show the time, {self._tiers}"
            f"faults: {on}"
        )


def draw_options(seed: int) -> Options:
    random = Random(f"options {seed}")
    classes = tuple(name for name in CLASSES if Random(f"{name} {seed}").random() < RARE.get(name, 0.5))
    workload = _draw_workload(random, classes)
    num_shards = random.choice((1, 1, 1, 2, 3, 4))
    delayers = Random(f"delayer {seed}")
    prefill, decode = _draw_sides(
        random, delayers, Random(f"rendezvous timeouts {seed}"), classes, workload, num_shards
    )
    ranks, routers = Random(f"ranks {seed}"), Random(f"routers {seed}")
    prefill_info, decode_info = _draw_info(ranks, Role.PREFILL), _draw_info(ranks, Role.DECODE)
    server_counts = (1, 2, 2, 2, 3) if prefill_info.dp_size == decode_info.dp_size == 1 else (1, 2, 2)
    options = Options(
        seed=seed,
        classes=classes,
        num_prefills=random.choice(server_counts),
        num_decodes=random.choice(server_counts),
        num_unified=int(random.random() < 0.3),
        num_shards=num_shards,
        workload=workload,
        links=_draw_links(random, classes),
        prefill=prefill,
        decode=decode,
        page_read_ns=random.choice(((20_000, 400_000), (20_000, 400_000), (MILLISECOND, 20 * MILLISECOND))),
        corruption=random.uniform(0.0, 0.02) if "F14" in classes else 0.0,
        linger_ns=random.choice((SECOND, 10 * SECOND, 120 * SECOND)) if "F15" in classes else 0,
        batch_failure=random.uniform(0.0, 0.01) if "F20" in classes else 0.0,
        event_copies=random.uniform(0.0, 0.05) if "F3" in classes else 0.0,
        hostility=random.uniform(0.0, 1.0) if "F17" in classes else 0.0,
        has_encoder=Random(f"encoders {seed}").random() < 1 / 6,
        unified_share=delayers.choice((0.2, 0.8)),
        prefill_info=prefill_info,
        decode_info=decode_info,
        force_query=ranks.random() < 0.3,
        num_gateways=routers.choice((1, 1, 2)),
        direct_share=routers.choice((0.1, 0.3, 0.6)),
        router=_draw_breaker(
            _draw_policies(_draw_router(routers), routers, Random(f"routing {seed}")), Random(f"breakers {seed}")
        ),
        turnover=Random(f"turnover {seed}").randrange(NEW_ROUTING_ONE_IN) == 0,
        names_models=Random(f"models {seed}").randrange(NEW_ROUTING_ONE_IN) == 0,
        http_breaks=routers.uniform(0.0, 0.02) if "F1" in classes else 0.0,
        error_heads=routers.uniform(0.0, 0.02) if "F20" in classes else 0.0,
        watchdog_ns=Random(f"watchdog {seed}").choice((5, 10, 30)) * SECOND,
        io_failure=routers.uniform(0.0, 0.01) if "F20" in classes else 0.0,
        timed_share=Random(f"times {seed}").choice((0.0, 0.0, 0.0, 0.8)),
        http_silences=Random(f"silences {seed}").uniform(0.0, 0.02) if "F23" in classes else 0.0,
        edge_refuses="F24" in classes,
        repeated_names=0.1 if "F24" in classes else 0.0,
        heartbeat=_draw_heartbeat(Random(f"heartbeat {seed}"), workload),
        slow_readers=0.05 if "F2" in classes else 0.0,
        misfits=0.1 if "F25" in classes else 0.0,
        bootstrap_lanes=Random(f"bootstrap lanes {seed}").choice((1, 2, MAX_UNKNOWN)),
        resizes="F21" in classes and Random(f"resizes {seed}").random() < 0.5,
    )
    options = with_blocks(with_prefill_stalls(with_storage(with_host_tiers(with_far_peers(options)))))
    options = with_tuned_delayers(options)
    options = with_context_ranks(with_unequal_sides(options)) if num_shards == 1 else options
    return with_queues(with_late_pages(with_windows(options)))


def _draw_sides(
    random: Random,
    delayers: Random,
    timeouts: Random,
    classes: tuple[str, ...],
    workload: WorkloadSettings,
    num_shards: int,
) -> tuple[NodeSettings, NodeSettings]:
    """Of prefills, of decodes."""
    prefill = _draw_settings(random, classes, workload, num_shards)
    decode = _draw_settings(random, classes, workload, num_shards, page_size=prefill.page_size)
    prefill = structs.replace(prefill, delayer=_draw_delayer(delayers))
    decode = structs.replace(decode, delayer=_draw_delayer(delayers))
    if "F25" not in classes:
        return prefill, decode
    prefill, decode = _with_rendezvous_timeouts(prefill, timeouts), _with_rendezvous_timeouts(decode, timeouts)
    if prefill.delayer is not None:  # a healthy prefill may be held back for so long, and once more for a retry
        delayer = prefill.delayer
        least = 2 * max(delayer.max_delay_ns, delayer.max_delay_passes * delayer.pass_ns) + 3 * SECOND
        decode = structs.replace(decode, waiting_timeout_ns=Nanos(max(decode.waiting_timeout_ns or 0, least)))
    return prefill, decode


def on_both_sides(options: Options, **changes: object) -> Options:
    """The same fields of the settings of prefills and of decodes."""
    prefill, decode = (structs.replace(each, **changes) for each in (options.prefill, options.decode))
    return replace(options, prefill=prefill, decode=decode)


def with_far_peers(options: Options) -> Options:
    """In half of the seeds with operators, so that what these do meets transfers."""
    if "F24" not in options.classes or Random(f"far away {options.seed}").random() >= 0.5:
        return options
    links = replace(options.links, base_ns=20 * MILLISECOND)
    return replace(options, links=links, page_read_ns=(20_000, 400_000))


def with_storage(options: Options) -> Options:
    """In half of the seeds with host memory something is below that, on one side or both."""
    random = Random(f"storage {options.seed}")
    if random.random() < 0.5:
        return options
    strikes = "F16" in options.classes
    return replace(
        options,
        prefill=_with_storage(options.prefill, random),
        decode=_with_storage(options.decode, random),
        storage_page_ns=random.choice((50_000, MILLISECOND, 20 * MILLISECOND)),
        storage_faults=StorageFaults(
            slow=random.choice((0.0, 0.05)) * strikes,
            full=random.choice((0.0, 0.0, 0.3)) * strikes,
            short=random.uniform(0.0, 0.05) * strikes,
            stale=random.uniform(0.0, 0.05) * strikes,
            corrupt=random.uniform(0.0, 0.05) * strikes,
            vanished=random.uniform(0.0, 0.05) * strikes,
            broken=random.choice((0.0, 0.0, 0.05)) * strikes,
        ),
    )


def _with_storage(settings: NodeSettings, random: Random) -> NodeSettings:
    storage = StorageSettings(
        policy=random.choice(tuple(PrefetchPolicy)),
        min_pages=random.choice((1, 1, 3)),
        timeout_base_ns=Nanos(random.choice((SECOND // 10, SECOND))),
        io_timeout_ns=Nanos(random.choice((1, 5)) * SECOND),
        fetch_pages=random.choice((1, 3, 32)),
        max_prefetches=random.choice((1, 64)),
        max_writing=random.choice((4, 1024)),
    )
    if settings.host_tier is None or random.random() < 0.2:
        return settings
    return structs.replace(settings, host_tier=structs.replace(settings.host_tier, storage=storage))


def with_prefill_stalls(options: Options) -> Options:
    """In some seeds prompts take little time at once while others decode. Nothing else of a seed depends on it."""
    random = Random(f"prefill stalls {options.seed}")
    if random.randrange(STALLS_ONE_IN):
        return options
    stall = PrefillStall(Nanos(random.choice((1, 20)) * MILLISECOND), min_tokens=random.choice((1, 16)))
    return on_both_sides(options, prefill_stall=stall)


def with_tuned_delayers(options: Options) -> Options:
    """In some seeds with delayers the queue gate finds out itself how many it waits for. Nothing else depends on it."""
    if options.seed < FIRST_OFF_RECORD or Random(f"queue gate auto {options.seed}").randrange(TUNED_ONE_IN):
        return options
    return replace(options, prefill=_with_tuned_delayer(options.prefill), decode=_with_tuned_delayer(options.decode))


def _with_tuned_delayer(settings: NodeSettings) -> NodeSettings:
    if settings.delayer is None:
        return settings
    return structs.replace(settings, delayer=structs.replace(settings.delayer, queue_min_ratio=None, tunes_itself=True))


def with_blocks(options: Options) -> Options:
    """In some seeds rows sample several tokens at once, as models of block diffusion do; then nobody asks for
    log-probabilities. Nothing else of a seed depends on it.
    """
    random = Random(f"blocks {options.seed}")
    sizes = [size for size in (2, 4, 8, 16) if options.prefill.page_size % size == 0]
    if random.randrange(BLOCKS_ONE_IN) or not sizes:
        return options
    return on_both_sides(options, block_tokens=random.choice(sizes))


def with_late_pages(options: Options) -> Options:
    """In some seeds decodes reserve pages for a prompt when it is computed. Nothing else of a seed depends on it."""
    random = Random(f"late pages {options.seed}")
    if options.seed < FIRST_OFF_RECORD or random.randrange(LATE_PAGES_ONE_IN):
        return options
    return replace(options, decode=structs.replace(options.decode, allocation=AllocationPolicy.PREFILL_COMPLETE))


def with_queues(options: Options) -> Options:
    """In some seeds queues have another order, or priorities count. Nothing else of a seed depends on it."""
    if options.seed < FIRST_OFF_RECORD or not draws_queues(options.seed):
        return options
    prefill, decode = draw_queues(options.seed, options.prefill, options.decode)
    return replace(options, prefill=prefill, decode=decode)


def with_windows(options: Options) -> Options:
    """In some seeds some layers of the model see the latest tokens only, and there is less memory for them than for the
    others. Nothing else of a seed depends on it.
    """
    random = Random(f"windows {options.seed}")
    is_older = options.seed < FIRST_OFF_RECORD
    if is_older or random.randrange(WINDOWS_ONE_IN) or options.grid is not None or options.prefill.block_tokens > 1:
        return options
    page_size = options.prefill.page_size
    tokens = random.choice((1, page_size, page_size + 1, 3 * page_size))
    return replace(
        options,
        prefill=_with_windows(options.prefill, options.workload, tokens, random),
        decode=_with_windows(options.decode, options.workload, tokens, random),
    )


def _with_windows(settings: NodeSettings, workload: WorkloadSettings, tokens: int, random: Random) -> NodeSettings:
    """At least what one request may need at one time; in half of them chunks are small, so that this is little."""
    if random.random() < 0.5:
        settings = structs.replace(settings, chunk_tokens=min(settings.chunk_tokens, 2 * settings.page_size))
    new = settings.chunk_tokens * settings.window_depth
    longest = ceil_div(workload.prompt_len_max + workload.output_len_max + 1, settings.page_size)
    least = max(longest, most_seen(tokens, new, page_size=settings.page_size))
    max_parts = max(least, int(settings.num_pages * random.choice((0.2, 0.5, 0.8))))
    return structs.replace(settings, windows=WindowSettings(tokens, max_parts))


def with_host_tiers(options: Options) -> Options:
    """In some seeds servers have host memory below their pages. Whatever else a seed is like does not depend on it."""
    random = Random(f"host tiers {options.seed}")
    if random.randrange(TIERS_ONE_IN):
        return options
    strikes = "F16" in options.classes
    return replace(
        options,
        prefill=_with_host_tier(options.prefill, options.workload, random),
        decode=_with_host_tier(options.decode, options.workload, random),
        tier_page_ns=random.choice((20_000, 200_000, 2 * MILLISECOND)),
        tier_faults=TierFaults(
            slow=random.choice((0.0, 0.02)) * strikes,
            short=random.uniform(0.0, 0.1) * strikes,
            stale=random.uniform(0.0, 0.1) * strikes,
            corrupt=random.uniform(0.0, 0.1) * strikes,
        ),
    )


def _with_host_tier(settings: NodeSettings, workload: WorkloadSettings, random: Random) -> NodeSettings:
    """Its own pages are few, or nothing would leave them."""
    longest = workload.prompt_len_max + workload.output_len_max + 1
    few = int(ceil_div(longest, settings.page_size) * random.uniform(1.1, 2.5)) + 1
    settings = structs.replace(settings, num_pages=min(settings.num_pages, few))
    num_pages = max(1, int(settings.num_pages * random.choice((0.2, 1.0, 3.0))))
    policy = random.choice(tuple(WritePolicy))
    tier = TierSettings(num_pages, policy, Nanos(random.choice((1, 5)) * SECOND))
    return structs.replace(settings, host_tier=tier, announces_cache=False) if settings.prefix_cache else settings


def coarsest_grid(cuts: Sequence[Cut]) -> KvGrid:
    """Of a model that can just be cut in all these ways, and in which no two shards of one cut have the same head."""
    return KvGrid(max(cut.pp_size for cut in cuts), max(cut.tp_size for cut in cuts))


def with_unequal_sides(options: Options) -> Options:
    """In some seeds prefill and decode are cut differently. Whatever else a seed is like does not depend on it."""
    random = Random(f"unequal sides {options.seed}")
    if random.randrange(UNEQUAL_ONE_IN):
        return options
    prefill = random.choice(SIDES)
    decode = random.choice([cut for cut in SIDES if cut != prefill])
    num_layers = random.randint(max(prefill.pp_size, decode.pp_size), 3)
    return replace(
        options,
        prefill=structs.replace(options.prefill, cut=prefill),
        decode=structs.replace(options.decode, cut=decode),
        grid=KvGrid(num_layers, random.choice((1, 2, 3, 4))),  # where shards are more than heads some have the same
    )


def with_context_ranks(options: Options) -> Options:
    """In some seeds the workers of a prefill share out tokens. Whatever else a seed is like does not depend on it."""
    random = Random(f"context ranks {options.seed}")
    if options.grid is not None or random.randrange(CONTEXT_ONE_IN):
        return options
    cut = random.choice(CONTEXTS)
    prefill = structs.replace(options.prefill, cut=cut)
    return replace(options, prefill=prefill, grid=KvGrid(cut.pp_size, random.choice((1, 2))))


def _with_rendezvous_timeouts(settings: NodeSettings, random: Random) -> NodeSettings:
    """They end a wait before the deadline of its request, and leave a healthy pair the time that it takes.

    Nothing is recomputed, so that a client hears of it.
    """
    return structs.replace(
        settings,
        bootstrap_timeout_ns=Nanos(random.randrange(3 * SECOND, 10 * SECOND)),
        waiting_timeout_ns=Nanos(random.randrange(3 * SECOND, 10 * SECOND)),
        load_failure=LoadFailurePolicy.FAIL,
    )


def _draw_info(random: Random, role: Role) -> PrefillInfo:
    """How many DP ranks servers of this role have, and how they are dispatched to."""
    dp_size = random.choice((1, 1, 1, 1, 2, 2, 3, 4))
    method = method_for(random.choice(tuple(LoadBalanceMethod)), role)
    return PrefillInfo(dp_size, method, random.choice(tuple(DpConflictPolicy)))


def _draw_router(random: Random) -> RouterSettings:
    request = RequestSettings(
        retries=random.choice((0, 1, 3)),
        document_ns=Nanos(random.choice((60, 600)) * SECOND),
    )
    health = HealthSettings(
        interval_ns=Nanos(random.choice((5, 60)) * SECOND),
        fast_interval_ns=Nanos(random.choice((500, 3000)) * MILLISECOND),
        misses=random.choice((1, 2)),
    )
    return RouterSettings(
        request, health, max_active=random.choice((8, 4096)), lost_ns=Nanos(random.choice((10, 30)) * SECOND)
    )


def _draw_policies(settings: RouterSettings, first: Random, others: Random) -> RouterSettings:
    """The policies that look at more than turns and load came later: in some seeds, from randomness of their own."""
    drawn: list[PolicySettings] = []
    takes_part = others.randrange(NEW_ROUTING_ONE_IN) == 0
    for _ in range(2):
        usual = PolicySettings(first.choice(("round_robin", "least_load")))
        policy = PolicySettings(
            others.choice(("power_of_two", CACHE_AWARE, CACHE_AWARE)),
            cache_threshold=others.choice((0.0, 0.3, 0.9)),
            balance_abs_threshold=others.choice((0, 2, 64)),
            balance_rel_threshold=others.choice((1.0, 1.5)),
            max_blocks=others.choice((8, 1 << 16)),
        )
        drawn.append(policy if takes_part and others.random() < 0.7 else usual)
    prefill, decode = drawn
    return structs.replace(settings, prefill_policy=prefill, decode_policy=decode)


def _draw_breaker(settings: RouterSettings, random: Random) -> RouterSettings:
    """In some seeds one that soon opens."""
    if random.randrange(NEW_ROUTING_ONE_IN):
        return settings
    breaker = BreakerSettings(
        failures=random.choice((1, 2)),
        successes=random.choice((1, 3)),
        timeout_ns=Nanos(random.choice((1, 10, 60)) * SECOND),
        window_ns=Nanos(random.choice((10, 120)) * SECOND),
    )
    return structs.replace(settings, breaker=breaker)


def _draw_workload(random: Random, classes: tuple[str, ...]) -> WorkloadSettings:
    timeout_s = random.choice((5, 30, 600, 3600, 3600, 3600))
    return WorkloadSettings(
        num_requests=random.randrange(24, 49),
        duration_ns=random.choice((5, 20, 60, 600)) * SECOND,
        burst=random.choice((0.0, 0.3, 0.8)),
        num_prefixes=random.randrange(1, 6),
        prompt_len_max=random.choice((8, 24, 64, 128)),
        output_len_max=random.choice((4, 16, 40, 80)),
        timeout_ns_range=(timeout_s * SECOND, 2 * timeout_s * SECOND),
        tight_deadlines=random.choice((0.0, 0.0, 0.2)),
        aborts=random.uniform(0.0, 0.6) if "F13" in classes else 0.0,
        hostile_rooms=random.uniform(0.0, 0.2) if "F17" in classes else 0.0,
        lost_halves=random.uniform(0.05, 0.25) if {"F6", "F17"} & set(classes) else 0.0,
    )


def _draw_links(random: Random, classes: tuple[str, ...]) -> LinkSettings:
    base_ns = random.choice((50_000, 250_000, 20 * MILLISECOND))
    return LinkSettings(
        base_ns=base_ns,
        spread=random.choice((0.1, 0.5, 1.5)),
        loss=random.uniform(0.0, 0.3) if "F1" in classes else 0.0,
        duplication=random.uniform(0.0, 0.5) if "F3" in classes or "F4" in classes else 0.0,
        duplicate_delay_ns=random.choice((SECOND, 120 * SECOND)) if "F4" in classes else 10 * base_ns,
        duplicate_class="F4" if "F4" in classes else "F3",
        clog=random.uniform(0.0, 0.02) if "F2" in classes else 0.0,
        clog_ns=random.choice((SECOND, 30 * SECOND)),
        flips=random.choice((0.0, 0.003, 0.03)) if "F14" in classes else 0.0,
    )


def _draw_heartbeat(random: Random, workload: WorkloadSettings) -> Heartbeat:
    """Often where requests last seconds. Where they last hours rarely: pings would be all that happens."""
    is_short = max(workload.duration_ns, workload.timeout_ns_range[1]) <= 60 * SECOND
    return Heartbeat(Nanos(random.choice((1, 3, 10) if is_short else (30, 60)) * SECOND), random.choice((1, 4)))


def _draw_settings(
    random: Random, classes: tuple[str, ...], workload: WorkloadSettings, num_shards: int, page_size: int | None = None
) -> NodeSettings:
    """A template of one role; `role` and `incarnation` are placeholders."""
    page_size = page_size or random.choice((1, 4, 8, 16))
    largest = ceil_div(workload.prompt_len_max + workload.output_len_max + 1, page_size)
    num_pages = int(largest * random.uniform(1.1, 2.0)) + 1 if "F12" in classes else largest * random.randrange(4, 12)
    max_running, max_queued = random.choice((2, 4, 8, 16)), random.choice((8, 64, 64))
    chunk_tokens = max(page_size, random.choice((16, 32, 64)))
    window_depth = random.choice((1, 2, 2))
    return NodeSettings(
        role=Role.UNIFIED,
        incarnation=Incarnation("", ""),
        num_pages=num_pages,
        page_size=page_size,
        layout="layout",
        cut=Cut(tp_size=num_shards),
        max_running=max_running,
        max_queued=max_queued,
        chunk_tokens=chunk_tokens,
        window_depth=window_depth,
        num_micro_batches=window_depth if num_shards > 1 else 1,
        min_micro_batch=max_running // 8 + 1,
        mixed_chunk=random.random() < 0.3,
        prefix_cache=random.random() < 0.8,
        announces_cache=True,
        reserved_decode_tokens=random.choice((4, 64, 512)),
        conservativeness=random.choice((0.0, 0.0, 0.3, 1.0)),
        result_slots=random.randrange(1, 5) if "F11" in classes else 2 * max_running,
        optimistic=random.choice(
            (OptimisticPolicy.PARK, OptimisticPolicy.PARK, OptimisticPolicy.RETRY, OptimisticPolicy.OFF)
        ),
        optimistic_retries=random.randrange(1, 4),
        force_retry_prob=random.choice((0.0, 0.0, 0.3)),
        park_max_tokens=random.choice((64, 1 << 20)),
        load_failure=random.choice((LoadFailurePolicy.RECOMPUTE, LoadFailurePolicy.RECOMPUTE, LoadFailurePolicy.FAIL)),
        stall_timeout_ns=Nanos(random.choice((5, 30)) * SECOND),
        lease_ns=Nanos(random.choice((2, 10, 30)) * SECOND),
        tombstones=random.choice((2, 1024)),
        stashed_messages=random.choice((2, 1024)),
        stash_ns=Nanos(random.choice((1, 60)) * SECOND),
        ask_rank_ns=Nanos(random.choice((100, 300)) * MILLISECOND),
    )


def _draw_delayer(random: Random) -> DelayerSettings | None:
    if random.random() < 0.7:
        return None
    return DelayerSettings(
        max_delay_passes=random.choice((3, 30, 300)),
        low_watermark=random.choice((None, 0.3)),
        queue_min_ratio=random.choice((None, 0.2, 1.0)),
        max_delay_ns=Nanos(random.choice((100, 5000)) * MILLISECOND),
        pass_ns=Nanos(random.choice((20, 100)) * MILLISECOND),
    )
