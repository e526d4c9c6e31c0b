"""Who the prefills are, as bootstrap servers have told, and telling them of halves that end before that is known."""

from typing import assert_never

from tandem.core.commands import AskDpRank, LearnPeer, Tell
from tandem.core.disagg.dp_rank import AskBootstrap, Conflict, Known, Likely, RequestFacts, resolve
from tandem.core.disagg.messages import LastWord, Release
from tandem.core.events import DpRankAnswered
from tandem.core.scheduler.state import Farewell, NodeState
from tandem.core.settings import PrefillInfo
from tandem.core.values import Address, Nanos, Room


def key(address: Address, dp_rank: int | None = None) -> str:
    where = f"{address.host}:{address.port}"
    return where if dp_rank is None else f"{where}/{dp_rank}"


def remember_prefill(node: NodeState, address: Address, prefill: PrefillInfo) -> bool:
    """True if it has said something else before: another life with other flags. Its ranks are others, too."""
    before = node.prefills.pop(key(address), prefill)
    if before != prefill:
        forget_ranks(node, key(address))
        for room, whom in node.farewells.items():
            if whom.address == address:
                node.farewells[room] = Farewell(address, whom.facts, None)
    node.prefills[key(address)] = prefill
    while len(node.prefills) > node.settings.max_prefills:
        oldest = next(iter(node.prefills))
        del node.prefills[oldest]
        forget_ranks(node, oldest)
    return before != prefill


def forget_ranks(node: NodeState, server: str) -> None:
    for known in [known for known in node.peers if known.rpartition("/")[0] == server]:
        del node.peers[known]


def find_rank(
    node: NodeState, address: Address, facts: RequestFacts
) -> Known | Likely | AskBootstrap | Conflict | None:
    """Which DP rank of the prefill has the request. None: nothing is known of that prefill."""
    prefill = node.prefills.get(key(address))
    return None if prefill is None else resolve(facts, prefill, force_query=node.settings.force_query)


def ask_who(node: NodeState, address: Address, dp_rank: int | None) -> Nanos:
    """One question per rank and interval, however many requests wait for the answer. Returns when it was asked."""
    while node.asked and next(iter(node.asked.values())) + node.settings.learn_peer_ns <= node.now:
        del node.asked[next(iter(node.asked))]  # in the order in which they were asked
    question = key(address, dp_rank)
    if question not in node.asked:
        node.asked[question] = node.now
        node.out.append(LearnPeer(address, dp_rank))
    return node.asked[question]


def tell_prefill(
    node: NodeState, address: Address, facts: RequestFacts, release: Release, *, is_informed: bool = False
) -> None:
    """A half that never said READY is over. Who has the other half may have to be found out first.

    `is_informed`: since this request came, the prefill has said what it is.
    """
    found = find_rank(node, address, facts)
    match found:
        case None:
            send_farewell(node, Farewell(address, facts, None), release)
        case Known(rank) | Likely(rank):
            send_farewell(node, Farewell(address, facts, rank), release)
        case AskBootstrap():
            ask_where(node, address, facts)
        case Conflict() if not is_informed:
            send_farewell(node, Farewell(address, facts, None), release)
        case Conflict():
            node.farewells.pop(facts.room, None)  # there is no such rank
        case _:
            assert_never(found)


def send_farewell(node: NodeState, whom: Farewell, last_word: LastWord) -> None:
    """Now, or when the bootstrap server has told who that is. Not at all where nobody is there."""
    room = last_word.room
    known = node.peers.get(key(whom.address, whom.dp_rank)) if whom.dp_rank is not None else None
    if known is not None:
        node.farewells.pop(room, None)
        node.out.append(Tell(known.incarnation, last_word))
        return
    ask_who(node, whom.address, whom.dp_rank)
    keep_farewell(node, room, whom)


def ask_where(node: NodeState, address: Address, facts: RequestFacts) -> None:
    """Which rank is to be told? Answered by `on_rank_found`."""
    node.out.append(AskDpRank(address, facts.room))
    keep_farewell(node, facts.room, Farewell(address, facts, None, is_asked=True))


def keep_farewell(node: NodeState, room: Room, whom: Farewell) -> None:
    node.farewells[room] = whom
    while len(node.farewells) > node.settings.tombstones:
        del node.farewells[next(iter(node.farewells))]


def on_rank_found(node: NodeState, event: DpRankAnswered) -> None:
    """A half that is over hears where its prefill half is. If no rank has told: where such a room belongs by now."""
    whom, last_word, rank = node.farewells.get(event.room), node.tombstones.get(event.room), event.dp_rank
    if whom is not None and whom.is_asked and whom.dp_rank is None and whom.address == event.address:
        del node.farewells[event.room]
        found = find_rank(node, event.address, whom.facts) if event.prefill is not None else None
        if rank is None and isinstance(found, Known | Likely):
            rank = found.rank
    if last_word is not None and rank is not None:
        send_farewell(node, Farewell(event.address, RequestFacts(event.room), rank, is_asked=True), last_word)


def send_farewells(node: NodeState, address: Address) -> None:
    """Something new is known of the prefill at this address."""
    for room, whom in list(node.farewells.items()):
        last_word = node.tombstones.get(room)
        if last_word is None:  # too long ago
            del node.farewells[room]
        elif whom.address == address and whom.dp_rank is not None:
            send_farewell(node, whom, last_word)
        elif whom.address == address and isinstance(last_word, Release) and not whom.is_asked:
            tell_prefill(node, address, whom.facts, last_word, is_informed=True)


def nobody_to_tell(node: NodeState, address: Address, dp_rank: int | None) -> None:
    """Nobody is there. Of one rank: the prefill may have other ones by now, and say where the room is."""
    for room, whom in list(node.farewells.items()):
        if (whom.address, whom.dp_rank) != (address, dp_rank):
            continue
        if dp_rank is not None and not whom.is_asked:
            ask_where(node, address, whom.facts)
        elif dp_rank is not None or not whom.is_asked:
            del node.farewells[room]
