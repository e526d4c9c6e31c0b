"""Faults as distributions. A seed draws its option set: each class is on or off, and how bad it is when it is on.

    F1  message loss                        F13 aborts at random moments
    F2  delays and clogged links            F14 corrupted transfers
    F3  duplicates of messages and events   F15 transfers that end late after a cancel
    F4  duplicates from old connections     F17 repeated rooms, hostile messages
    F5  partitions                          F18 bursts of clients that leave
    F6  crash and restart                   F19 prefill and decode with different layouts
    F8  pauses of a node                    F20 batches that fail, logits that are not finite
    F9  slow executors                      F22 nodes replaced by their own snapshot
    F11 few metadata slots
    F12 few pages

A run has a safety phase, in which faults happen, and a liveness phase: everything is healed, nothing new happens, and
the system has to drain.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from msgspec import structs

from tandem.core.settings import DelayerSettings, LoadFailurePolicy, NodeSettings, OptimisticPolicy, Role
from tandem.core.values import MILLISECOND, SECOND, Incarnation, Nanos, ShardId, ceil_div
from tandem.sim.clock import Clock
from tandem.sim.links import LinkSettings
from tandem.sim.workload import WorkloadSettings

CLASSES = (
    "F1",
    "F2",
    "F3",
    "F4",
    "F5",
    "F6",
    "F8",
    "F9",
    "F11",
    "F12",
    "F13",
    "F14",
    "F15",
    "F17",
    "F18",
    "F19",
    "F20",
    "F22",
)
RARE = {"F19": 0.1, "F20": 0.3, "F11": 0.3, "F12": 0.4}  # probability; 0.5 otherwise


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that a seed decides before the first event."""

    seed: int
    classes: tuple[str, ...]
    num_prefills: int
    num_decodes: int
    num_unified: int
    num_shards: int
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

    def describe(self) -> str:
        on = " ".join(self.classes) or "none"
        return (
            f"seed {self.seed}: {self.num_prefills} prefill, {self.num_decodes} decode, {self.num_unified} unified, "
            f"{self.num_shards} shard(s), {self.workload.num_requests} requests in "
            f"{self.workload.duration_ns / SECOND:.0f} s, page {self.prefill.page_size}, "
            f"pages {self.prefill.num_pages}/{self.decode.num_pages}, optimistic {self.prefill.optimistic}, "
            f"faults: {on}"
        )


def draw_options(seed: int) -> Options:
    random = Random(f"options {seed}")
    classes = tuple(name for name in CLASSES if random.random() < RARE.get(name, 0.5))
    workload = _draw_workload(random, classes)
    num_shards = random.choice((1, 1, 1, 2))
    prefill = _draw_settings(random, classes, workload, num_shards)
    decode = _draw_settings(random, classes, workload, num_shards, page_size=prefill.page_size)
    delayers = Random(f"delayer {seed}")
    prefill = structs.replace(prefill, delayer=_draw_delayer(delayers))
    decode = structs.replace(decode, delayer=_draw_delayer(delayers))
    return Options(
        seed=seed,
        classes=classes,
        num_prefills=random.choice((1, 2, 2, 2, 3)),
        num_decodes=random.choice((1, 2, 2, 2, 3)),
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
    )


def _draw_workload(random: Random, classes: tuple[str, ...]) -> WorkloadSettings:
    timeout_s = random.choice((5, 30, 120, 600))
    return WorkloadSettings(
        num_requests=random.randrange(30, 61),
        duration_ns=random.choice((5, 20, 60, 600)) * SECOND,
        burst=random.choice((0.0, 0.3, 0.8)),
        num_prefixes=random.randrange(1, 6),
        prompt_len_max=random.choice((8, 24, 64, 128)),
        output_len_max=random.choice((4, 16, 40, 80)),
        timeout_ns_range=(timeout_s * SECOND, 2 * timeout_s * SECOND),
        tight_deadlines=random.choice((0.0, 0.0, 0.2)),
        aborts=random.uniform(0.0, 0.6) if "F13" in classes else 0.0,
        hostile_rooms=random.uniform(0.0, 0.2) if "F17" in classes else 0.0,
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
    )


def _draw_settings(
    random: Random, classes: tuple[str, ...], workload: WorkloadSettings, num_shards: int, page_size: int | None = None
) -> NodeSettings:
    """A template of one role; `role` and `incarnation` are placeholders."""
    page_size = page_size or random.choice((1, 4, 8, 16))
    largest = ceil_div(workload.prompt_len_max + workload.output_len_max + 1, page_size)
    num_pages = int(largest * random.uniform(1.1, 2.0)) + 1 if "F12" in classes else largest * random.randrange(4, 12)
    max_running = random.choice((2, 4, 8, 16))
    return NodeSettings(
        role=Role.UNIFIED,
        incarnation=Incarnation("", 0),
        num_pages=num_pages,
        page_size=page_size,
        layout="layout",
        shards=tuple(ShardId(shard) for shard in range(num_shards)),
        max_running=max_running,
        max_queued=random.choice((8, 64, 64)),
        chunk_tokens=max(page_size, random.choice((16, 32, 64))),
        window_depth=random.choice((1, 2, 2)),
        mixed_chunk=random.random() < 0.3,
        prefix_cache=random.random() < 0.8,
        reserved_decode_tokens=random.choice((4, 64, 512)),
        conservativeness=random.choice((0.0, 0.0, 0.3, 1.0)),
        metadata_slots=random.randrange(1, 5) if "F11" in classes else 2 * max_running,
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
    )


def _draw_delayer(random: Random) -> DelayerSettings | None:
    if random.random() < 0.7:
        return None
    return DelayerSettings(
        max_delay_passes=random.choice((3, 30)),
        low_watermark=random.choice((None, 0.3)),
        queue_min_ratio=random.choice((None, 0.2, 1.0)),
        max_delay_ns=Nanos(random.choice((100, 5000)) * MILLISECOND),
    )


class Target(Protocol):
    """What the nemesis may do to the world."""

    clock: Clock

    def replica_names(self) -> list[str]: ...

    def crash(self, name: str, *, down_ns: int) -> None: ...

    def pause(self, name: str, *, duration_ns: int) -> None: ...

    def slow_down(self, name: str, *, factor: float, duration_ns: int) -> None: ...

    def partition(self, source: str, target: str, *, duration_ns: int) -> None: ...

    def disconnect(self, share: float) -> None: ...

    def swap_for_snapshot(self, name: str) -> None: ...


@dataclass(slots=True)
class Nemesis:
    """Puts the faults that are moments, not probabilities, on the clock."""

    target: Target
    random: Random
    options: Options

    def schedule(self, until_ns: int) -> None:
        for name, times, strike in self._plans():
            if name in self.options.classes:
                for _ in range(times):
                    self.target.clock.at(self.random.randrange(until_ns), strike)

    def _plans(self) -> list[tuple[str, int, Callable[[], None]]]:
        draw = self.random.randrange
        return [
            ("F5", draw(1, 6), self._partition),
            ("F6", draw(1, 4), self._crash),
            ("F8", draw(1, 4), self._pause),
            ("F9", draw(1, 3), self._slow_down),
            ("F18", draw(1, 3), lambda: self.target.disconnect(self.random.uniform(0.1, 0.9))),
            ("F22", draw(5, 20), lambda: self.target.swap_for_snapshot(self._any_name())),
        ]

    def _any_name(self) -> str:
        return self.random.choice(self.target.replica_names())

    def _duration_ns(self, longest_s: float) -> int:
        """Short ones are as likely as long ones: what matters often happens just after a restart."""
        return int(longest_s * SECOND * 10 ** self.random.uniform(-3.0, 0.0))

    def _partition(self) -> None:
        source, target = self._any_name(), self._any_name()
        duration_ns = self._duration_ns(60.0)
        self.target.partition(source, target, duration_ns=duration_ns)
        if self.random.random() < 0.6:
            self.target.partition(target, source, duration_ns=duration_ns)

    def _crash(self) -> None:
        self.target.crash(self._any_name(), down_ns=self._duration_ns(120.0))

    def _pause(self) -> None:
        self.target.pause(self._any_name(), duration_ns=self._duration_ns(60.0))

    def _slow_down(self) -> None:
        factor = self.random.uniform(2.0, 50.0)
        self.target.slow_down(self._any_name(), factor=factor, duration_ns=self._duration_ns(60.0))
