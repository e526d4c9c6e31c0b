"""What nobody who keeps the protocol would do: messages from a stranger, or malformed, about rooms that exist, and
reads of pages by somebody who knows all about them but the secret of their grant, or their generation."""

from collections.abc import Callable
from random import Random

from tandem.core.disagg.messages import Abort, Message, Moved, Offer, Ready, Release, ResultSlot
from tandem.core.disagg.sides import DecodeSide
from tandem.core.kv_parts import parts
from tandem.core.values import SECOND, Cause, Cut, Incarnation, Nanos, PageId, Room
from tandem.simulator.actors.kv_reader import Link
from tandem.simulator.actors.replica import Life
from tandem.transfer.lender import Grant

CutOf = Callable[[Incarnation], Cut | None]
STRANGER = Incarnation("stranger", "1")


def made_up_message(random: Random, room: Room, life: Life, cut_of: CutOf) -> tuple[Incarnation, Message]:
    """(who says it, what). The stranger may claim to speak for a replica; the connection still is the stranger's, who
    is cut as the one that he speaks to."""
    names = sorted(life.node.state.peers.values(), key=lambda known: known.incarnation)
    claimed = random.choice(names).incarnation if names and random.random() < 0.5 else STRANGER
    attempt = random.choice((0, 1, 1, 2))
    match random.randrange(6):
        case 0:
            target = Incarnation(life.incarnation.name, str(int(life.incarnation.id) - random.choice((0, 0, 1))))
            ready = Ready(
                room, attempt, claimed, target, life.settings.layout, random.randrange(1, 100),
                held_pages=random.randrange(-1, 4), known_pages=random.randrange(-1, 4), rendered_at=attempt,
                cut=life.settings.cut,
            )  # fmt: skip
            return STRANGER, ready
        case 1 if (end := _decode_side(life, room)) is not None:  # a forged result behind the pages of the real prefill
            row = ResultSlot(room, random.randbytes(4), 0, b"", 0)
            digests = secrets = tuple(b"" for _ in life.settings.shards)
            source, total = end.peer or claimed, end.total_pages
            offer = Offer(room, end.attempt, source, end.offered, (), (), digests, secrets, Nanos(SECOND), total, row)
            return STRANGER, offer
        case 4 if (end := _decode_side(life, room)) is not None and end.peer is not None:
            cut = cut_of(end.peer) or life.settings.cut
            num_parts = len(parts(life.grid, cut, life.settings.cut))
            return end.peer, _misfitting_offer(random, room, end, end.peer, num_parts, cut.num_shards)
        case 1:
            num_pages = random.randrange(0, 4)
            row = ResultSlot(room, random.randbytes(4), 0, b"", 0)
            offer = Offer(
                room, attempt, claimed, random.randrange(0, 3), tuple(range(num_pages)), (0,) * num_pages,
                tuple(random.randbytes(8 * num_pages) for _ in life.settings.shards),
                tuple(bytes(16) for _ in life.settings.shards), Nanos(random.randrange(1 << 40)),
                random.randrange(0, 9), row if random.random() < 0.5 else None,
            )  # fmt: skip
            return STRANGER, offer
        case 2:
            outcome = random.choice(("done", "aborted", "not_needed"))
            cause, digest = random.choice((None, Cause.ABORTED)), bytes(16 * attempt)  # none, or of no prompt
            return STRANGER, Release(room, claimed, outcome, cause, prompt_digest=digest)
        case 3:
            return STRANGER, Moved(room, claimed, random.randrange(4))
        case _:
            return STRANGER, Abort(room, claimed, random.choice(tuple(Cause)), "made up")


def read_wrongly(life: Life, room: Room) -> None:
    """Ask every shard for every page of this room: with the secret of nobody, and for another generation with the right
    one."""
    store = life.store
    for shard, lender in zip(life.settings.shards, store.lenders, strict=True):
        link = Link(store.readers[shard], store, shard)
        for known in lender.grants(room):
            for page, generation in list(known.generations.items()):
                grant = store.lease(link, room, page, generation, secret=bytes(16))
                store.lease(link, room, page, generation + 1, secret=known.secret)
                if isinstance(grant, Grant):
                    store.end_lease(link, grant, PageId(page), generation, secret=bytes(16))


def _misfitting_offer(
    random: Random, room: Room, end: DecodeSide, peer: Incarnation, num_parts: int, num_shards: int
) -> Offer:
    """What the right prefill would say if it had lost its mind: for this room and attempt, and the sizes are wrong."""
    count = random.randrange(1, 4)
    short, long = random.choice(((1, 0), (0, 1), (0, 0)))
    total = end.total_pages if (short or long) else end.total_pages + 1
    first = max(0, end.total_pages - count) if random.random() < 0.3 else end.offered
    digests = tuple(random.randbytes(8 * (count - short)) for _ in range(num_parts))
    pages, generations = tuple(range(count)), (0,) * (count + long)
    secrets = (bytes(16),) * num_shards
    return Offer(room, end.attempt, peer, first, pages, generations, digests, secrets, Nanos(SECOND), total)


def _decode_side(life: Life, room: Room) -> DecodeSide | None:
    """The decode end of this room, if it is here: a liar who has listened knows what fits."""
    state = life.node.state
    progress = state.requests.get(state.rooms[room]) if room in state.rooms else None
    return progress.side if progress is not None and isinstance(progress.side, DecodeSide) else None
