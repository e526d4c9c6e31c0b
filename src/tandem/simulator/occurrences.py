"""What has happened in a run, by name: events, commands, messages, statuses of the data plane, causes of failures.

What never occurs is never checked. `every_name` is made from the classes of the product, so a new one is asked for as
soon as it is there; tests/simulator/test_known_seeds.py compares it with what random seeds bring about.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import ModuleType
from typing import Any, get_args, get_type_hints  # Any: an event or command of a node or of a router

from msgspec import Struct

from tandem.core import commands, events
from tandem.core.commands import Effects, FailRequest, StageTimings
from tandem.core.disagg import messages
from tandem.core.disagg.messages import Message, Offer, Release
from tandem.core.disagg.sides import Local
from tandem.core.disagg.transfer_state import TransferState
from tandem.core.router import messages as router_messages
from tandem.core.router.messages import Fail, RouteCause
from tandem.core.router.worker_registry import ProbeResult
from tandem.core.scheduler.node import EngineNode
from tandem.core.values import Cause
from tandem.server.node.session import Greeting, PeerHello, PeerPing
from tandem.transfer.protocol import Status

MODULES = (commands, events, messages, router_messages)
ENUMS = (ProbeResult, Status)
LINK_ONLY = [kind.__name__ for kind in (PeerHello, Greeting, PeerPing)]
OUTCOMES = get_args(get_type_hints(Release)["outcome"])


class Occurrences:
    """How often each name has occurred in one world."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def see_step(self, heard: Sequence[Any], wanted: Sequence[Any]) -> None:
        """A step of a node or of a router."""
        for it in (*heard, *wanted):
            self.counts.update(names_in(it))

    def see_transfers(self, node: EngineNode) -> None:
        """Where the transfers of a node are, after one of its steps."""
        for progress in node.state.requests.values():
            side = progress.side
            if not isinstance(side, Local):
                self.counts[f"{type(side).__name__} {side.state.name}"] += 1

    def see_answers(self, answers: Mapping[Status, int]) -> None:
        """What owners of pages have said to who wants to read them."""
        self.counts.update({name_of(status): count for status, count in answers.items()})

    def see_links(self, heard: Mapping[str, int]) -> None:
        """What nodes have heard on their connections, besides messages of the rendezvous, which come as events."""
        said = {name: count for name, count in heard.items() if name in LINK_ONLY}
        self.counts.update({f"link {name}": count for name, count in said.items()})

    def see_codes(self, codes: Mapping[str, int]) -> None:
        """With which edges have ended requests."""
        self.counts.update({f"code {code}": count for code, count in codes.items()})


def name_of(it: object) -> str:
    """A member of an enumeration by its value; of one that is numbers on the wire by its name."""
    if isinstance(it, Enum):
        return f"{type(it).__name__} {it.name if isinstance(it.value, int) else it.value}"
    return type(it).__name__


def names_in(it: Struct) -> Iterator[str]:
    """Its own, that of a message in it, and those of its fields that are members of an enumeration.

    A code of `docs/errors.md` counts where a request ends with it: a liar may name any in his messages.
    """
    yield name_of(it)
    if isinstance(it, FailRequest | Fail):
        yield f"code {it.cause}"
    for field in it.__struct_fields__:
        value = getattr(it, field)
        if isinstance(value, Enum) and not isinstance(value, Cause):
            yield name_of(value)
        elif isinstance(value, Message | StageTimings):
            yield from names_in(value)
    if isinstance(it, Release):
        yield f"Release {it.outcome}"
    elif isinstance(it, Offer) and it.result is not None:
        yield name_of(it.result)


def every_name() -> list[str]:
    """Everything that can occur: what a seed does not bring about has to be explained."""
    classes = [found for module in MODULES for found in classes_of(module)]
    structs = [found.__name__ for found in classes if issubclass(found, Struct) and found is not Effects]
    enums = [*ENUMS, *(found for found in classes if issubclass(found, Enum))]
    members = [name_of(member) for enum in enums for member in enum]
    ends = [f"{end} {state.name}" for end in ("PrefillSide", "DecodeSide") for state in TransferState]
    codes = [f"code {code}" for code in dict.fromkeys((*Cause, *RouteCause))]
    names = [*structs, *members, *codes, *ends, *(f"Release {outcome}" for outcome in OUTCOMES)]
    assert len(set(names)) == len(names), "two have the same name"
    return names


def classes_of(module: ModuleType) -> list[type]:
    """Those that are written there, not imported."""
    return [it for it in vars(module).values() if isinstance(it, type) and it.__module__ == module.__name__]


def table(counts: Mapping[str, int]) -> Iterator[str]:
    """One line per name: how often it has occurred."""
    yield f"{'times':>9}"
    for name in every_name():
        count = counts.get(name, 0)
        yield f"{count:9}  {name}{'' if count else ': never'}"
