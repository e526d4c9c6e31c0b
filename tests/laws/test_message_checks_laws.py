"""Laws of the door: whatever well-typed messages a peer makes up, a node never raises, and everything still ends."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from core_driver import assert_nothing_is_held
from core_scripts import STRANGER, USUAL, Life, lives, scripts
from tandem.core.disagg.message_checks import Bounds, admitted
from tandem.core.disagg.messages import Abort, Message, Offer, Ready, Release, ResultSlot
from tandem.core.disagg.sides import DecodeSide
from tandem.core.events import PeerSaid
from tandem.core.values import Cause, Incarnation, Nanos, Room

BOUNDS = Bounds(1 << 31, lambda extra: True, lambda extra: True)
INT64 = st.integers(-(1 << 63), (1 << 64) - 1)  # all that msgpack can carry
numbers = st.one_of(st.integers(-1, 9), st.sampled_from((16, 100, 1 << 31, 1 << 63)), INT64)
texts = st.text(max_size=20)
blobs = st.one_of(st.binary(max_size=40), st.integers(0, 4).map(lambda pages: bytes(8 * pages)))
tuples = st.lists(numbers, max_size=4).map(tuple)
rooms = st.integers(0, 40)  # an index into those that exist; beyond them: one that does not, or none
sources = st.sampled_from(("peer", "peer", "peer", "stranger"))


@st.composite
def rows(draw: st.DrawFn) -> ResultSlot:
    token = draw(st.one_of(st.binary(max_size=8), st.integers(0, 500).map(lambda token: token.to_bytes(4, "little"))))
    durations = [Nanos(draw(numbers)) for _ in range(3)]
    return ResultSlot(Room(draw(numbers)), token, draw(numbers), draw(blobs), draw(numbers), *durations)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """About a room to be filled in, by a source to be filled in."""
    room, source = Room(1), STRANGER
    cause = draw(st.sampled_from(Cause))
    match draw(st.integers(0, 3)):
        case 0:
            target = Incarnation(draw(texts), draw(texts))
            digest = draw(blobs)
            return Ready(
                room, draw(numbers), source, target, draw(texts), draw(numbers), draw(numbers), draw(numbers), digest
            )
        case 1:
            digests, secrets = (tuple(draw(st.lists(blobs, max_size=2))) for _ in range(2))
            result = draw(st.one_of(st.none(), rows()))
            return Offer(
                room, draw(numbers), source, draw(numbers), draw(tuples), draw(tuples), digests, secrets,
                Nanos(draw(numbers)), draw(numbers), result,
            )  # fmt: skip
        case 2:
            outcome = draw(st.sampled_from(("done", "aborted", "not_needed")))
            told_cause, num_pulled = draw(st.one_of(st.none(), st.just(cause))), draw(numbers)
            return Release(room, source, outcome, told_cause, draw(numbers), draw(texts), num_pulled=num_pulled)
        case _:
            return Abort(room, source, cause, draw(texts))


def fitted(life: Life, message: Message, which: int) -> Message:
    """Half of them as nearly right as a peer that knows everything can make them."""
    if isinstance(message, Ready):
        here = life.prefill
        fields = {"target": here.name, "layout": here.state.settings.layout}
        found = [progress.request for progress in here.state.requests.values() if progress.request.room == message.room]
        if found:
            fields |= {"prompt_len": found[0].prompt_len, "prompt_digest": found[0].prompt_digest}
        return structs.replace(message, attempt=1 + which % 3, **fields)
    if isinstance(message, Offer):
        receivers = [
            progress.side
            for progress in life.decode.state.requests.values()
            if isinstance(progress.side, DecodeSide) and progress.request.room == message.room
        ]
        if receivers:
            end, count = receivers[0], which % 3
            return structs.replace(
                message,
                attempt=end.attempt,
                first_page=end.offered,
                total_pages=end.total_pages,
                pages=tuple(range(count)),
                generations=(0,) * count,
                digests=(bytes(8 * count),),
                secrets=(b"secret",),
                lease_ns=Nanos(10**9),
            )
    return message


made_up = st.lists(st.tuples(messages(), rooms, sources, st.booleans(), st.integers(0, 9)), min_size=1, max_size=12)


@given(chosen=lives, before=scripts(USUAL, max_size=25), said=made_up, after=scripts(USUAL, max_size=15))
def test_nothing_that_peers_make_up_raises_and_every_request_ends(
    chosen: dict, before: list[tuple[str, int]], said: list[tuple[Message, int, str, bool, int]], after: list
) -> None:
    life = Life(chosen)
    life.run(before)
    for message, index, who, fits, which in said:
        here, there = (life.both[which % 2], life.both[1 - which % 2])
        room = Room(life.rooms[index % len(life.rooms)] if life.rooms and index < 30 else index - 35)
        source = there.name if who == "peer" else STRANGER
        message = structs.replace(message, room=room, source=source)
        if isinstance(message, Offer) and message.result is not None and fits:
            message = structs.replace(message, result=structs.replace(message.result, room=room))
        told = admitted(fitted(life, message, which) if fits else message, BOUNDS)
        if told is not None:
            life.world.send(here, PeerSaid(source, told))
            life.world.turn(here)
    life.run(after)
    life.heal()
    for asked in life.asked:
        assert asked.replica.is_dead or asked.request in asked.replica.ended
    assert_nothing_is_held(life.both)
