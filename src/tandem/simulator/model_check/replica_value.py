"""One replica of the small world as a value: the node, its worker, its data plane, and what is between them.

A `SmallReplica` is immutable and can be compared. While something happens to it, it is a `Draft`: the same, taken
apart. The worker is the simulator's `Executor`, which knows what every page must hold; free pages are wiped, so whoever
reads one has read something wrong.
"""

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar  # Any: an answer to a move, of any shape

from msgspec import Struct

from tandem.core.batch import BatchPlan
from tandem.core.commands import FetchPages, LoadPages, LookUpPages, PublishPages, StorePages, WritePages
from tandem.core.disagg.messages import Message
from tandem.core.events import Event
from tandem.core.kv.pool import PageState
from tandem.core.request import Request
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import NodeSettings
from tandem.core.values import ZERO_NS, Address, Incarnation, Nanos, PageHash, PageId, RequestId
from tandem.host_memory import HostMemory
from tandem.simulator.actors.executor import Executor, ShardMemory, WorkerRequest, last_link
from tandem.simulator.actors.host_tier import host_memory_of
from tandem.simulator.model_check.data_plane import SHARD, Reader, ReaderValue, new_lender
from tandem.simulator.oracle import Script
from tandem.transfer.lender import Grant, Lender

Value = TypeVar("Value", bound=Hashable)
NO_READER = Reader().frozen()


@dataclass(slots=True)
class Numbered(Generic[Value]):
    """Equal values have one number, in order of appearance."""

    values: list[Value] = field(default_factory=list[Value])
    numbers: dict[Value, int] = field(default_factory=dict[Value, int])

    def number(self, value: Value) -> int:
        number = self.numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


@dataclass(frozen=True, slots=True)
class Cast:
    """What never changes on one side of a small world."""

    settings: NodeSettings
    requests: dict[RequestId, Request]
    scripts: dict[RequestId, Script]
    root: bytes
    rendered: dict[RequestId, tuple[Request, Script]] = field(default_factory=dict)  # the same at the peer's time

    @property
    def name(self) -> str:
        return self.settings.incarnation.name

    def script(self, request: RequestId, *, is_rendered_anew: bool) -> Script:
        return self.rendered[request][1] if is_rendered_anew else self.scripts[request]


class GrantValue(Struct, frozen=True):
    """A grant of the product's `Lender`. When a read of it was last told does not count: that must not matter."""

    room: int
    request: RequestId
    attempt: int
    secret: bytes
    generations: tuple[tuple[int, int], ...]
    readers: tuple[int, ...]
    is_revoked: bool


class SmallHalf(Struct, frozen=True):
    """What the client has seen of one request on this replica."""

    request: RequestId
    tokens: int = 0
    has_started: bool = False
    is_rendered_anew: bool = False
    end: str = ""  # "finished", or the cause of the failure


Stored = tuple[tuple[str, bytes], ...]
"""The files of storage, by name."""


Kept = tuple[tuple[PageId, PageHash, bytes], ...]
"""What is in pages of host memory."""


class WorkerRequestValue(Struct, frozen=True):
    request: RequestId
    is_rendered_anew: bool
    tokens: bytes
    chain: tuple[bytes, ...]
    num_reported: int
    pages: tuple[PageId, ...]
    is_broken: bool


class WorkerValue(Struct, frozen=True):
    """An `Executor`, with everything that it will ever read."""

    slots: tuple[tuple[int, ...], ...]  # per page
    requests: tuple[WorkerRequestValue, ...] = ()
    decode_sets: tuple[tuple[RequestId, ...], ...] = ()  # by micro-batch
    last_iteration: int = 0


class SmallReplica(Struct, frozen=True):
    life: Incarnation
    node: int  # in `Forks`
    worker: WorkerValue
    to_come: tuple[RequestId, ...]
    age_ns: Nanos = ZERO_NS  # time since the node's last step
    halves: tuple[SmallHalf, ...] = ()
    work: tuple[BatchPlan | tuple[RequestId, ...], ...] = ()  # batches, and requests to forget in between
    to_digest: tuple[PublishPages, ...] = ()
    copies: tuple[StorePages | LoadPages, ...] = ()
    host: Kept = ()
    asked: tuple[LookUpPages | FetchPages | WritePages, ...] = ()  # of storage
    stored: Stored = ()  # outlives the replica
    grants: tuple[GrantValue, ...] = ()
    reader: ReaderValue = NO_READER
    lookups: tuple[Address, ...] = ()
    to_render: tuple[RequestId, ...] = ()
    inbox: tuple[Event, ...] = ()  # said by the data plane, not heard yet


@dataclass(slots=True)
class Draft:
    """A replica taken apart."""

    cast: Cast
    life: Incarnation
    node: EngineNode
    now: Nanos
    executor: Executor
    to_come: list[RequestId]
    halves: dict[RequestId, SmallHalf]
    work: list[BatchPlan | tuple[RequestId, ...]]
    to_digest: list[PublishPages]
    copies: list[StorePages | LoadPages]
    host: HostMemory
    asked: list[LookUpPages | FetchPages | WritePages]
    stored: dict[str, bytes]
    lender: Lender[int]
    reader: Reader
    lookups: list[Address]
    to_render: list[RequestId]
    inbox: list[Event]
    told: list[tuple[Incarnation, Message]] = field(default_factory=list)
    answer: Any = None  # to whoever made this happen

    def forget_first(self) -> None:
        """Requests to forget wait only for the batches before them."""
        while self.work and not isinstance(self.work[0], BatchPlan):
            self.executor.forget(self.work.pop(0))  # type: ignore[arg-type]


def thaw_host(kept: Kept, memory: ShardMemory, settings: NodeSettings) -> HostMemory:
    host = host_memory_of(memory, settings.host_tier.num_pages if settings.host_tier is not None else 0)
    for page, page_hash, contents in kept:
        host.store(page, page_hash, memoryview(contents))
    return host


def frozen_host(draft: Draft) -> Kept:
    """Pages that are free will be read by nobody."""
    host, states = draft.host, draft.node.state.host.pool.states
    labels = [(PageId(page), host.label(PageId(page))) for page in range(host.num_pages)]
    return tuple(
        (page, label.page_hash, bytes(host.page(page)))
        for page, label in labels
        if label is not None and states[page] != PageState.FREE
    )


def thaw_lender(grants: tuple[GrantValue, ...], inbox: list[Event]) -> Lender[int]:
    """One that says to `inbox` what it has to say."""
    lender = new_lender(SHARD, inbox.append)
    for value in grants:
        grant: Grant[int] = Grant(value.request, value.attempt, value.room, value.secret, dict(value.generations))
        grant.readers, grant.is_revoked = list(value.readers), value.is_revoked
        lender.take_over(grant)
    return lender


def frozen_lender(lender: Lender[int]) -> tuple[GrantValue, ...]:
    return tuple(
        GrantValue(
            grant.room,
            grant.request,
            grant.attempt,
            grant.secret,
            tuple(grant.generations.items()),
            tuple(grant.readers),
            grant.is_revoked,
        )
        for grant in lender.grants()
    )


def thaw(executor: Executor, value: WorkerValue, cast: Cast) -> None:
    """Make `executor`, which is new, what `value` says."""
    for page, slots in enumerate(value.slots):
        executor.memory.copy_in(PageId(page), list(slots))
    executor.last_iteration = value.last_iteration
    for kept in value.requests:
        script = cast.script(kept.request, is_rendered_anew=kept.is_rendered_anew)
        prompt_hash = last_link(cast.root, script.prompt, page_size=executor.page_size)
        sequence = WorkerRequest.of(kept.request, script, prompt_hash, page_size=executor.page_size)
        sequence.tokens = array("i", kept.tokens)
        sequence.chain, sequence.num_reported = list(kept.chain), kept.num_reported
        sequence.pages, sequence.is_broken = list(kept.pages), kept.is_broken
        executor.tables.add(sequence)
    for micro_batch, members in enumerate(value.decode_sets):
        for request in members:
            executor.tables.decode_sets[micro_batch].join(executor.requests[request])


def frozen(executor: Executor, node: EngineNode, cast: Cast) -> WorkerValue:
    memory, pages = executor.memory, range(executor.num_pages)
    states, wiped = node.state.pool.states, (0,) * len(memory.copy_out(PageId(0)))
    return WorkerValue(
        tuple(wiped if states[page] == PageState.FREE else tuple(memory.copy_out(PageId(page))) for page in pages),
        tuple(
            WorkerRequestValue(
                sequence.request,
                sequence.script is not cast.scripts[sequence.request],
                sequence.tokens.tobytes(),
                tuple(sequence.chain),
                sequence.num_reported,
                tuple(sequence.pages),
                sequence.is_broken,
            )
            for sequence in executor.requests.values()
        ),
        tuple(
            tuple(member.request for member in executor.tables.decode_sets[micro_batch].members)
            for micro_batch in range(node.state.settings.num_micro_batches)
        ),
        executor.last_iteration,
    )
