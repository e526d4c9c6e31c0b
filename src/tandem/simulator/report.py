"""What is said about runs: the line that reproduces a violation, the summary, and the trace of one seed.

A trace line says what a node was told (`<`) and what it wants (`>`), in the words of the protocol. Durations and
content that a reader cannot check by eye (hashes, digests, tokens of the fake model) are left out.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any  # a JSON document

from msgspec import Struct

from tandem.core.batch import TOKEN_BYTES, BatchPlan
from tandem.core.commands import (
    AnnounceCleared,
    AnnounceDpRank,
    AnnounceRemoved,
    AnnounceStored,
    AskDpRank,
    CancelPull,
    Command,
    EmitTokens,
    FailRequest,
    FetchPages,
    FinishRequest,
    ForgetRequests,
    FreeWindows,
    GatherLoad,
    LaunchBatch,
    LearnPeer,
    LoadPages,
    LookUpPages,
    PromptsLetIn,
    PublishPages,
    PullPages,
    RenderAgain,
    RevokePages,
    StartRequest,
    StorePages,
    Tell,
    WritePages,
)
from tandem.core.disagg.messages import Abort, Message, Moved, Offer, Ready, Release
from tandem.core.events import (
    AbortRequested,
    BatchFailed,
    BatchReturned,
    DpRankAnswered,
    Event,
    HooksChanged,
    LoadsGathered,
    LoadWanted,
    PageRead,
    PagesCopied,
    PagesDigested,
    PagesFound,
    PagesLanded,
    PeerLearned,
    PeerLost,
    PeerReturned,
    PeerSaid,
    PeerUnknown,
    PromptRendered,
    ReadsDrained,
    RequestArrived,
    RequestRefused,
    RoomElsewhere,
    StopMatched,
    TransferDrained,
    TransferFailed,
)
from tandem.core.values import SECOND, Cut, Incarnation
from tandem.simulator.faults.names import name_of


@dataclass(slots=True)
class SeedResult:
    """What one seed came to. Plain values: it travels between processes."""

    seed: int
    invariant: str = ""  # empty: no violation
    detail: str = ""
    simulated_ns: int = 0
    lived_ns: int = 0  # of it the time in which a request lived
    num_events: int = 0
    num_requests: int = 0
    num_finished: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    log_hash: str = ""
    rare: tuple[str, ...] = ()  # states that it has reached, where that was asked (`coverage.py`)
    occurred: dict[str, int] = field(
        default_factory=dict
    )  # how often, by name, where that was asked (`occurrences.py`)
    is_whole: bool = False  # of a whole cluster (`simulator/whole`)
    engine: str = ""  # of its workers, where it is another one than usual

    @property
    def line(self) -> str:
        """Reproduces the violation: the whole command, up to the moment after it happened."""
        if self.is_whole:
            engine = f" --engine {self.engine}" if self.engine else ""
            return f"tandem simulate --whole{engine} --seed {self.seed} --trace"
        until_ms = self.simulated_ns // 1_000_000 + 1
        return f"tandem simulate --seed {self.seed} --until {until_ms / 1000}s --trace"


@dataclass(slots=True)
class Summary:
    """Results in the order of their seeds."""

    first_seed: int
    seeds: int = 0
    violations: list[dict[str, Any]] = field(default_factory=list)
    lived_ns: int = 0
    events: int = 0
    requests: int = 0
    finished: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    hashes: list[str] = field(default_factory=list)
    rare: Counter[str] = field(default_factory=Counter)  # seeds that have reached each rare state
    occurred: Counter[str] = field(default_factory=Counter)  # how often, over all seeds

    def add(self, result: SeedResult) -> None:
        self.seeds += 1
        self.lived_ns += result.lived_ns
        self.events += result.num_events
        self.requests += result.num_requests
        self.finished += result.num_finished
        self.faults.update(result.faults)
        self.hashes.append(result.log_hash)
        self.rare.update(result.rare)
        self.occurred.update(result.occurred)
        if result.invariant:
            self.violations.append({"seed": result.seed, "invariant": result.invariant, "line": result.line})

    def log_hash(self) -> str:
        """Of one seed its own; of several the hash of theirs, in order."""
        if len(self.hashes) == 1:
            return self.hashes[0]
        return hashlib.blake2b("".join(self.hashes).encode(), digest_size=16).hexdigest()

    def document(self) -> dict[str, Any]:
        return {
            "first_seed": self.first_seed,
            "seeds": self.seeds,
            "violations": self.violations,
            "simulated_hours": round(self.lived_ns / SECOND / 3600, 4),
            "events": self.events,
            "requests": self.requests,
            "faults": {name_of(fault): self.faults[fault] for fault in sorted(self.faults, key=fault_order)},
            "log_hash": self.log_hash(),
        }

    def json(self) -> str:
        return json.dumps(self.document())

    def text(self) -> str:
        document = self.document()
        faults = " ".join(f"{name}:{count}" for name, count in document["faults"].items()) or "none"
        return (
            f"{self.seeds} seeds from {self.first_seed}: {len(self.violations)} violations, "
            f"{document['simulated_hours']:.2f} simulated hours, {self.events} events, {self.requests} requests "
            f"({self.finished} halves finished), faults {faults}, log {document['log_hash']}"
        )

    def rates(self, seconds: float, num_cores: int) -> dict[str, float]:
        """What a hunt is worth: per minute of the machine, and per second of one core."""
        return {
            "seeds_per_minute": self.seeds / seconds * 60,
            "simulated_hours_per_minute": self.lived_ns / SECOND / 3600 / seconds * 60,
            "events_per_second_per_core": self.events / seconds / num_cores,
        }


def fault_order(name: str) -> tuple[int, str]:
    """Classes (F1, F2, ...) by their number, others by name."""
    return (int(name[1:]) if name[1:].isdigit() else 0, name)


# --- traces ----------------------------------------------------------------------------------------------------------


def trace_step(now: int, name: str, events: Sequence[Event], commands: Sequence[Command]) -> Iterable[str]:
    """Lines for one step of one node; a step in which nothing was told and nothing is wanted has none."""
    if not events and not commands:
        return
    yield f"{now / SECOND:.6f} {name}"
    for event in events:
        yield f"    < {describe_event(event)}"
    for command in commands:
        yield f"    > {describe_command(command)}"


def describe_event(event: Event) -> str:
    match event:
        case RequestArrived(request):
            room = f" room {request.room}" if request.room is not None else ""
            peer = f" from {request.peer.host}" if request.peer is not None else ""
            return f"request {request.id} arrived: {request.prompt_len}+{request.max_new_tokens} tokens{room}{peer}"
        case RequestRefused(request, cause, detail):
            return f"request {request.id} was refused at the edge: {cause} ({detail})"
        case PromptRendered(request):
            return f"request {request.id} rendered at {request.rendered_at}: {request.prompt_len} tokens"
        case AbortRequested(request, cause):
            return f"request {request} abort: {cause}"
        case StopMatched(request):
            return f"request {request} stop string"
        case BatchReturned(outcome):
            count = len(outcome.tokens) // TOKEN_BYTES
            return f"batch {outcome.iteration} returned: {count} tokens{_flags(outcome.flags)}"
        case BatchFailed(batch, cause, detail):
            return f"batch {batch} failed: {cause} ({detail})"
        case PeerLearned(address, peer, layout):
            rank = f", DP rank {event.dp_rank} of {event.prefill.dp_size}" if event.prefill.dp_size > 1 else ""
            return f"{address.host} is {_name(peer)}, layout {layout}{rank}"
        case PeerUnknown(address, detail):
            return f"{address.host} is unknown: {detail}"
        case DpRankAnswered(address, room, rank):
            return f"{address.host} has room {room} on DP rank {'unknown' if rank is None else rank}"
        case RoomElsewhere(room, rank):
            return f"DP rank {rank} has room {room}"
        case HooksChanged(prob):
            return f"forced retries: {prob:g} of all requests"
        case LoadWanted(number):
            return f"pass {number} of the delayer wants our load"
        case LoadsGathered(number, loads, _):
            return f"pass {number} of the delayer has {len(loads)} loads"
        case PeerSaid(peer, message):
            return f"{_name(peer)} says {describe_message(message)}"
        case PeerReturned(peer):
            return f"the connection to {_name(peer)} is back"
        case PeerLost(peer, cause):
            return f"{_name(peer)} is lost: {cause}"
        case PagesDigested(request, attempt, shard, first_page, num_pages):
            return f"request {request}.{attempt} shard {shard} digested {_span(first_page, num_pages)}"
        case PageRead(request, shard):
            return f"request {request} shard {shard} is being read"
        case ReadsDrained(request, attempt, shard):
            return f"request {request}.{attempt} shard {shard} reads drained"
        case PagesLanded(request, attempt, shard, landed):
            return f"request {request}.{attempt} shard {shard} landed {landed}"
        case TransferFailed(request, attempt, shard, cause, detail):
            return f"request {request}.{attempt} shard {shard} transfer failed: {cause} ({detail})"
        case TransferDrained(request, attempt, shard):
            return f"request {request}.{attempt} shard {shard} transfer drained"
        case PagesCopied(copy, shard, num_pages, detail):
            return f"copy {copy} shard {shard} has copied {num_pages}" + (f" ({detail})" if detail else "")
        case PagesFound(number, shard, num_pages, detail):
            return f"look-up {number} shard {shard} has found {num_pages}" + (f" ({detail})" if detail else "")
        case _:
            return _plain(event)


def describe_command(command: Command) -> str:
    match command:
        case LaunchBatch(plan):
            return f"launch {describe_plan(plan)}"
        case ForgetRequests(requests):
            return f"forget {_ids(requests)}"
        case EmitTokens(requests, _, _):
            return f"emit {_emitted(requests)}"
        case StartRequest(request, path, cached, _, told):
            tells = f", {sum(map(len, told))} bytes of logprobs of its prompt" if told else ""
            return f"start request {request}: {path}, {cached} cached{tells}"
        case FinishRequest(request, reason, path, cached, computed, kv_pages, _, retries):
            return (
                f"finish request {request}: {reason}, {path}, {cached} cached, {computed} computed, "
                f"{kv_pages} pages pulled, {retries} retries"
            )
        case FailRequest(request, cause, stage, detail):
            return f"fail request {request}: {cause} in {stage} ({detail})"
        case RenderAgain(request, rendered_at):
            return f"render request {request} again, at {rendered_at}"
        case LearnPeer(address, rank):
            return f"ask who is {'' if rank is None else f'DP rank {rank} '}at {address.host}"
        case AskDpRank(address, room):
            return f"ask {address.host} which DP rank has room {room}"
        case GatherLoad(number, _):
            return "want a pass of the delayer" if number is None else f"give the load to pass {number} of the delayer"
        case AnnounceDpRank(room, rank, sought):
            return f"announce that room {room} is on DP rank {rank}" + (
                "" if sought is None else f", also to rank {sought}"
            )
        case Tell(peer, message):
            return f"tell {_name(peer)} {describe_message(message)}"
        case PublishPages():
            pages = _span(command.first_page, len(command.pages))
            return f"publish request {command.request}.{command.attempt} {pages} = {_pages(command.pages)}"
        case RevokePages(request, attempt, _):
            return f"revoke request {request}.{attempt}"
        case PullPages():
            wanted = _span(command.first_wanted, len(command.sources))
            return (
                f"pull request {command.request}.{command.attempt} wanted {wanted} from {_name(command.peer)}: "
                f"{_pages(command.sources)} into {_pages(command.destinations)}"
            )
        case CancelPull(request, attempt):
            return f"cancel pull of request {request}.{attempt}"
        case AnnounceStored(request, first_page, _, hashes):
            return f"announce that {_span(first_page, len(hashes))} of request {request} are cached"
        case AnnounceRemoved(hashes):
            return f"announce that {len(hashes)} pages are no longer cached"
        case AnnounceCleared():
            return "announce that nothing is cached any more"
        case PromptsLetIn(passes, waited_ns):
            return f"let prompts in after {passes} passes and {waited_ns} ns"
        case FreeWindows(pages):
            return f"free the windows of {_pages(pages)}"
        case StorePages() | LoadPages() | LookUpPages() | FetchPages() | WritePages():
            return _describe_copy(command)


def _describe_copy(command: StorePages | LoadPages | LookUpPages | FetchPages | WritePages) -> str:
    match command:
        case StorePages(copy, _, pages, host_pages):
            return f"copy {copy}: store {_pages(pages)} in host {_pages(host_pages)}"
        case LoadPages(copy, _, host_pages, pages):
            return f"copy {copy}: load {_pages(pages)} from host {_pages(host_pages)}"
        case LookUpPages(number, hashes):
            return f"look {len(hashes)} pages up in storage as {number}"
        case FetchPages(copy, _, host_pages):
            return f"copy {copy}: fetch {_pages(host_pages)} of host from storage"
        case WritePages(copy, _, host_pages):
            return f"copy {copy}: write {_pages(host_pages)} of host to storage"


def describe_plan(plan: BatchPlan) -> str:
    parts = [f"batch {plan.iteration} {plan.kind}"]
    for row in plan.rows:
        samples = " and sample" if row.samples else ""
        table = f" pages {row.first_page}.. = {_pages(row.pages)}" if row.pages else ""
        parts.append(f"request {row.request} [{row.start}, {row.stop}){samples}{table}")
    if plan.leave:
        parts.append(f"leave {_ids(plan.leave)}")
    for join in plan.join:
        first = " with a first token" if join.token else ""
        table = f" pages {join.first_page}.. = {_pages(join.pages)}" if join.pages else ""
        parts.append(f"join {join.request}{first}{table}")
    for grow in plan.grow:
        parts.append(f"grow {grow.request} pages {grow.first_page}.. = {_pages(grow.pages)}")
    if plan.decodes:
        parts.append("decode set")
    return "; ".join(parts)


def describe_message(message: Message) -> str:
    match message:
        case Ready():
            time = f", rendered at {message.rendered_at}" if message.rendered_at else ""
            cut = f", into {message.cut.name}" if message.cut != Cut() else ""
            return (
                f"READY room {message.room} attempt {message.attempt} for {_name(message.target)}: "
                f"{message.prompt_len} tokens, holds {message.held_pages}, knows {message.known_pages}{time}{cut}"
            )
        case Offer():
            result = " and the result" if message.result is not None else ""
            pages = _span(message.first_page, len(message.pages))
            return (
                f"OFFER room {message.room} attempt {message.attempt}: {pages} of {message.total_pages} "
                f"= {_pages(message.pages)}{result}"
            )
        case Release(room, _, outcome, cause):
            return f"RELEASE room {room}: {outcome}" + (f" ({cause})" if cause else "")
        case Abort(room, _, cause, detail):
            return f"ABORT room {room}: {cause} ({detail})"
        case Moved(room, _, rank):
            return f"MOVED room {room}: to DP rank {rank}"


def _name(incarnation: Incarnation) -> str:
    return f"{incarnation.name}.{incarnation.id}"


def _span(start: int, count: int) -> str:
    return f"pages [{start}, {start + count})"


def _pages(pages: Sequence[int]) -> str:
    """Page ids; a run of neighbours as `3..7`, upwards or downwards."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and abs(page - runs[-1][1]) == 1 and (runs[-1][0] == runs[-1][1] or _same_way(runs[-1], page)):
            runs[-1] = (runs[-1][0], page)
        else:
            runs.append((page, page))
    return "{" + " ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"


def _same_way(run: tuple[int, int], page: int) -> bool:
    return (run[1] > run[0]) == (page > run[1])


def _ids(requests: Sequence[int]) -> str:
    return "request " + " ".join(map(str, requests))


def _emitted(requests: Sequence[int]) -> str:
    counts = Counter(requests)
    if max(counts.values(), default=1) == 1:
        return f"a token of {_ids(requests)}"
    return "tokens of request " + ", ".join(f"{request} ({count})" for request, count in counts.items())


def _flags(flags: bytes) -> str:
    return f", flags {list(flags)}" if any(flags) else ""


def _plain(value: Struct) -> str:
    return type(value).__name__
