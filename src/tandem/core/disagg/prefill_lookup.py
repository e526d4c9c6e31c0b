"""Who the prefills are, as bootstrap servers have told, and telling them of halves that end before that is known."""

from typing import assert_never

from tandem.core.commands import AskDpRank, LearnPeer, Tell
from tandem.core.disagg.dp_rank import Ask, Conflict, Known, Likely, RequestFacts, resolve
from tandem.core.disagg.messages import LastWord, Release
from tandem.core.scheduler.state import Farewell, NodeState
from tandem.core.values import Address, Nanos


def key(address: Address, dp_rank: int | None = None) -> str:
    where = f"{address.host}:{address.port}"
    return where if dp_rank is None else f"{where}/{dp_rank}"


def find_rank(node: NodeState, address: Address, facts: RequestFacts) -> Known | Likely | Ask | Conflict | None:
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


def tell_prefill(node: NodeState, address: Address, facts: RequestFacts, release: Release) -> None:
    """A half that never said READY is over. Who has the other half may have to be found out first."""
    found = find_rank(node, address, facts)
    match found:
        case None:
            say_farewell(node, Farewell(address, facts, None), release)
        case Known(rank) | Likely(rank):
            say_farewell(node, Farewell(address, facts, rank), release)
        case Ask():
            node.out.append(AskDpRank(address, facts.room))
        case Conflict():
            pass  # there is no such rank
        case _:
            assert_never(found)


def say_farewell(node: NodeState, whom: Farewell, last_word: LastWord) -> None:
    """Now, or when the bootstrap server has told who that is. Not at all where nobody is there."""
    room = last_word.room
    known = node.peers.get(key(whom.address, whom.dp_rank)) if whom.dp_rank is not None else None
    if known is not None:
        node.farewells.pop(room, None)
        node.out.append(Tell(known.incarnation, last_word))
        return
    ask_who(node, whom.address, whom.dp_rank)
    node.farewells[room] = whom
    while len(node.farewells) > node.settings.tombstones:
        del node.farewells[next(iter(node.farewells))]


def say_farewells(node: NodeState, address: Address) -> None:
    """Something new is known of the prefill at this address."""
    for room, whom in list(node.farewells.items()):
        last_word = node.tombstones.get(room)
        if last_word is None:  # too long ago
            del node.farewells[room]
        elif whom.address == address and whom.dp_rank is not None:
            say_farewell(node, whom, last_word)
        elif whom.address == address and isinstance(last_word, Release):
            tell_prefill(node, address, whom.facts, last_word)
