"""What was asked of which replica, and what came of it.

A disaggregated request has two halves that share a room, one on a prefill and one on a decode; a unified one has one. A
half lives and ends where it was sent; a gateway that tries again adds two more to the same exchange.
"""

from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.commands import FailRequest, FinishRequest
from tandem.core.settings import Role
from tandem.core.values import RequestId, Room
from tandem.server.api.live_requests import ClientId
from tandem.simulator.oracle import Script
from tandem.simulator.workload import WorkloadRequest


class Listener(Protocol):
    """Who has sent a half, and hears at the server's edge what becomes of it."""

    def token_left(self, half: "Half", token: int) -> None: ...

    def half_ended(self, half: "Half") -> None:
        """`half.answer` says how."""
        ...

    def was_cut(self, half: "Half") -> None:
        """It has taken nothing for too long. The half ends too, but nobody is there to hear how."""
        ...

    def server_died(self, half: "Half") -> None:
        """Without a word."""
        ...


@dataclass(slots=True, eq=False)
class Half:
    """One request as one replica knows it."""

    exchange: "RoutedRequest"
    ask: WorkloadRequest
    role: Role
    replica: str
    request: RequestId
    client: ClientId
    room: Room | None
    arrived_at: int
    deadline: int
    pauses_before_ns: int  # pauses of the replica until the arrival
    rendered_at: int  # Unix seconds that its prompt shows; 0: none
    script: Script
    listener: Listener | None = None
    must_finish: bool = False  # asked after everything was healed
    tokens: int = 0  # emitted so far, all of them checked
    last_token_at: int | None = None
    has_started: bool = False
    stop_sent: bool = False
    num_said: int = 0  # tokens of the answer that were said elsewhere, and are a part of its prompt here
    abort_sent_at: int | None = None  # or given up otherwise, by who had sent it
    terminal: FinishRequest | FailRequest | None = None  # what its node has said
    answer: FinishRequest | FailRequest | None = None  # what its edge has said
    ended_at: int | None = None  # also when its server died

    @property
    def is_open(self) -> bool:
        return self.ended_at is None


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One client request and its halves."""

    ask: WorkloadRequest
    room: Room | None
    rendered_at: int | None = None  # as its router has stamped it; None: each server takes its own time
    halves: list[Half] = field(default_factory=list)
    has_left: bool = False
