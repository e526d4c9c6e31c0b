"""A scenario as lines that can be left out, replaced and written down: what shrinking works on.

A line is a value. Requests and what their clients do later belong together by their story; everything else stands
alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tandem.simulator.scenario.parse import ns_text

DEFAULT_TIMEOUT_NS = 600_000_000_000


@dataclass(frozen=True, slots=True)
class NodeLine:
    name: str
    role: str
    settings: tuple[str, ...]  # name=value

    def text(self) -> str:
        return " ".join(["node", self.name, self.role, *self.settings])


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One half of a request, at the edge of one replica."""

    at: int
    replica: str
    prompt_len: int
    max_new_tokens: int
    story: int
    prompt: str
    room: int | None = None
    peer: str | None = None
    timeout_ns: int = DEFAULT_TIMEOUT_NS
    priority: int = 0
    eos_one_in: int = 0
    tenant: str = ""
    rank: int | None = None
    rendered_at: int | None = None  # its prompt shows the time
    logprobs_from: int | None = None  # the client wants to know of prompt tokens behind this one
    wants_vector: bool = False

    def text(self) -> str:
        words = ["at", ns_text(self.at), self.replica, "request", f"{self.prompt_len}+{self.max_new_tokens}"]
        options = (
            ("room", self.room),
            ("from", self.peer),
            ("prompt", self.prompt),
            ("timeout", ns_text(self.timeout_ns) if self.timeout_ns != DEFAULT_TIMEOUT_NS else None),
            ("priority", self.priority or None),
            ("eos", self.eos_one_in or None),
            ("tenant", self.tenant or None),
            ("rank", self.rank),
            ("rendered", self.rendered_at),
            ("logprobs", self.logprobs_from),
            ("vector", "yes" if self.wants_vector else None),
        )
        return " ".join([*words, *(f"{name} {value}" for name, value in options if value is not None)])


@dataclass(frozen=True, slots=True)
class OrderLine:
    """Anything else that happens."""

    at: int
    words: tuple[str, ...]
    story: int | None = None  # whose client this is

    def text(self) -> str:
        return " ".join(["at", ns_text(self.at), *self.words])


ScheduledLine = RequestLine | OrderLine


@dataclass(frozen=True, slots=True)
class Script:
    chances: tuple[str, ...] = ()  # name=value; empty: steady and quiet
    nodes: tuple[NodeLine, ...] = ()
    scheduled: tuple[ScheduledLine, ...] = ()
    recount_every: int = 1
    until: str = "idle"
    comments: tuple[str, ...] = field(default=(), compare=False)

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from (f"# {comment}" for comment in self.comments)
        if self.chances:
            yield " ".join(["chances", *self.chances])
        yield from (node.text() for node in self.nodes)
        yield from (line.text() for line in sorted(self.scheduled, key=lambda line: line.at))
        if self.recount_every > 1:
            yield f"recount every {self.recount_every} events"
        yield f"until {self.until}"

    def without(self, dropped: frozenset[int]) -> "Script":
        """`dropped`: indices of scheduled lines."""
        kept = (line for index, line in enumerate(self.scheduled) if index not in dropped)
        return replace(self, scheduled=tuple(kept))

    def changed(self, index: int, line: ScheduledLine) -> "Script":
        scheduled = list(self.scheduled)
        scheduled[index] = line
        return replace(self, scheduled=tuple(scheduled))

    def groups(self) -> list[frozenset[int]]:
        """Indices of scheduled lines that make sense together only."""
        found: dict[object, set[int]] = {}
        for index, line in enumerate(self.scheduled):
            found.setdefault(("story", line.story) if line.story is not None else index, set()).add(index)
        return [frozenset(group) for group in found.values()]
