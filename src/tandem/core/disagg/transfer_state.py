"""The states of one KV transfer, as its sender, the prefill side, and its receiver, the decode side, go through them.

The sides themselves are in `sides`. The result slots, of which a prefill has a bounded table, are here too.
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from tandem.core.machine import Machine
from tandem.core.values import RequestId

DIGEST_BYTES = 8  # of a page


class TransferState(IntEnum):
    """Ordered: agreement of many shards is the minimum, so a failure anywhere is a failure."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class TransferTrigger(StrEnum):
    READY_CHECKED = "ready checked"  # sender: decode's READY was for us and fits
    READY_SENT = "ready sent"  # receiver: somebody will collect
    PAGE_MOVED = "page moved"  # read by the peer / landed here
    RELEASED = "released"  # sender: decode has everything
    COMMITTED = "committed"  # receiver: every shard landed, result slot read
    FAULT = "fault"


_S, _T = TransferState, TransferTrigger
_OPEN = (_S.BOOTSTRAPPING, _S.WAITING_FOR_INPUT, _S.TRANSFERRING)
_FAULTS = {(state, _T.FAULT): _S.FAILED for state in _OPEN}
_TERMINAL = frozenset({_S.FAILED, _S.SUCCESS})

SENDER: Machine[TransferState, TransferTrigger] = Machine(
    name="sender",
    initial=(_S.BOOTSTRAPPING,),
    terminal=_TERMINAL,
    rules={
        (_S.BOOTSTRAPPING, _T.READY_CHECKED): _S.WAITING_FOR_INPUT,
        (_S.BOOTSTRAPPING, _T.RELEASED): _S.SUCCESS,  # decode did not need us
        (_S.WAITING_FOR_INPUT, _T.READY_CHECKED): _S.WAITING_FOR_INPUT,  # said again
        (_S.WAITING_FOR_INPUT, _T.PAGE_MOVED): _S.TRANSFERRING,
        (_S.WAITING_FOR_INPUT, _T.RELEASED): _S.SUCCESS,  # decode held the whole prefix
        (_S.TRANSFERRING, _T.READY_CHECKED): _S.TRANSFERRING,
        (_S.TRANSFERRING, _T.PAGE_MOVED): _S.TRANSFERRING,
        (_S.TRANSFERRING, _T.RELEASED): _S.SUCCESS,
        **_FAULTS,
    },
)

RECEIVER: Machine[TransferState, TransferTrigger] = Machine(
    name="receiver",
    initial=(_S.BOOTSTRAPPING,),
    terminal=_TERMINAL,
    rules={
        (_S.BOOTSTRAPPING, _T.READY_SENT): _S.WAITING_FOR_INPUT,
        (_S.WAITING_FOR_INPUT, _T.PAGE_MOVED): _S.TRANSFERRING,
        (_S.WAITING_FOR_INPUT, _T.COMMITTED): _S.SUCCESS,  # nothing had to move
        (_S.TRANSFERRING, _T.PAGE_MOVED): _S.TRANSFERRING,
        (_S.TRANSFERRING, _T.COMMITTED): _S.SUCCESS,
        **_FAULTS,
    },
)


@dataclass(slots=True)
class ResultSlots:
    """The prefill's bounded table of result slots; SGLang calls a slot a metadata buffer.

    A slot is taken before the first forward pass and given back exactly once, when the request ends or falls back.
    """

    num_slots: int
    free_slots: list[int] = field(default_factory=list[int])
    owners: dict[RequestId, int] = field(default_factory=dict[RequestId, int])

    @classmethod
    def empty(cls, num_slots: int) -> "ResultSlots":
        return cls(num_slots, free_slots=list(range(num_slots - 1, -1, -1)))

    def ensure_metadata_buffer(self, request: RequestId) -> bool:
        """True if the request has a slot now. Exhaustion is an answer: the caller goes on with the next request."""
        if request in self.owners:
            return True
        if not self.free_slots:
            return False
        self.owners[request] = self.free_slots.pop()
        return True

    def maybe_release_metadata_buffer(self, request: RequestId) -> None:
        """Give the slot back if there is one; idempotent."""
        slot = self.owners.pop(request, None)
        if slot is not None:
            self.free_slots.append(slot)
