"""The lender of pages alone: grants, leases and places, told by hand what happens."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.commands import PublishPages
from tandem.core.events import Event, PageRead, PagesDigested, ReadsDrained, TransferFailed
from tandem.core.values import Cause, PageId, RequestId, ShardId
from tandem.transfer.lender import IDLE_GRACE_NS, READ_REPORT_INTERVAL_NS, Grant, Lender
from tandem.transfer.port import Held
from tandem.transfer.protocol import Status

ONE, TWO = RequestId(1), RequestId(2)
MAX_LINKS = 8
READER = b"a reader"


@dataclass
class World:
    """A lender, what it has said, and the links that it has cut. Links are numbers."""

    events: list[Event] = field(default_factory=list)
    is_cut: list[int] = field(default_factory=list)
    num_secrets: int = 0

    def __post_init__(self) -> None:
        self.lender: Lender[int] = Lender(
            ShardId(0),
            draw_secret=self._draw,
            report=self.events.append,
            cut=self.is_cut.append,
            max_links=MAX_LINKS,
        )

    def _draw(self, command: PublishPages) -> bytes:
        self.num_secrets += 1
        return b"secret %9d" % self.num_secrets

    def publish(
        self, *pages: int, request: RequestId = ONE, attempt: int = 0, room: int = 5, age: int = 0
    ) -> tuple[Grant[int], PublishPages]:
        """Page p has generation 10 * p + age."""
        generations = tuple(10 * page + age for page in pages)
        command = PublishPages(request, attempt, 0, tuple(map(PageId, pages)), generations, room)
        return self.lender.publish(command), command

    def lend(self, *pages: int, request: RequestId = ONE, attempt: int = 0, room: int = 5, age: int = 0) -> Grant[int]:
        grant, command = self.publish(*pages, request=request, attempt=attempt, room=room, age=age)
        self.lender.digested(grant, command, (bytes(8 * len(pages)),))
        return grant

    def lease(
        self, secret: bytes, pages: list[int], generations: list[int], *, room: int = 5, link: int = 1
    ) -> Grant[int] | Status:
        return self.lender.lease(link, room, secret=secret, pages=pages, generations=generations)

    def said(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


def test_a_lease_needs_room_pages_and_generations() -> None:
    world = World()
    secret = world.lend(1, 2).secret
    assert isinstance(world.lease(secret, [2, 1], [20, 10]), Grant)
    assert world.lease(secret, [1], [10], room=6) is Status.NOT_GRANTED
    assert world.lease(secret, [1, 3], [10, 0]) is Status.NOT_GRANTED
    assert world.lease(secret, [1, 2], [10, 21]) is Status.WRONG_GENERATION


def test_without_the_secret_nothing_is_told() -> None:
    world = World()
    secret = world.lend(1, 2).secret
    other = world.lend(1, request=TWO, room=6).secret
    assert other != secret
    for wrong in (other, bytes(16), b"", secret[:15]):
        for room, pages, generations in ((5, [1, 2], [10, 20]), (5, [1], [11]), (5, [7], [1]), (4, [1], [10])):
            assert world.lease(wrong, pages, generations, room=room) is Status.NOT_GRANTED
    assert world.lender.held().open_transfers == 0


def test_a_grant_that_follows_a_revoked_one_has_another_secret() -> None:
    world = World()
    secret = world.lend(1).secret
    world.lender.revoke(ONE, 0)
    assert world.lend(1, attempt=1).secret != secret
    assert world.lease(secret, [1], [10]) is Status.NOT_GRANTED


def test_the_secret_of_a_grant_is_in_no_log_line() -> None:
    grant = World().lend(1)
    assert repr(grant.secret) not in repr(grant)


def test_a_grant_grows() -> None:
    world = World()
    secret = world.lend(1).secret
    assert world.lend(3).secret == secret
    assert isinstance(world.lease(secret, [1, 3], [10, 30]), Grant)


def test_pages_are_lent_when_they_are_digested_and_not_before() -> None:
    world = World()
    grant, command = world.publish(1)
    assert world.lease(grant.secret, [1], [10]) is Status.NOT_GRANTED
    world.lender.digested(grant, command, (b"8 bytes.",))
    assert world.events == [PagesDigested(ONE, 0, ShardId(0), 0, 1, (b"8 bytes.",), grant.secret)]
    assert isinstance(world.lease(grant.secret, [1], [10]), Grant)


def test_digests_that_come_after_the_revocation_lend_nothing_and_are_not_told() -> None:
    world = World()
    grant, command = world.publish(1)
    world.lender.revoke(ONE, 0)
    world.lender.digested(grant, command, (bytes(8),))
    assert world.events == [ReadsDrained(ONE, 0, ShardId(0))]
    assert world.lease(grant.secret, [1], [10]) is Status.NOT_GRANTED
    assert world.lender.held() == Held()


def test_pages_that_cannot_be_read_are_never_lent_and_are_told_unless_revoked() -> None:
    world = World()
    grant, command = world.publish(3, attempt=2)
    world.lender.unreadable(grant, command, "why")
    (failed,) = world.events
    assert failed == TransferFailed(ONE, 2, ShardId(0), Cause.TRANSFER_FAILED, "pages cannot be read: why")
    assert world.lease(grant.secret, [3], [30]) is Status.NOT_GRANTED
    world.lender.revoke(ONE, 2)
    world.lender.unreadable(grant, command, "why")
    assert [type(event) for event in world.events] == [TransferFailed, ReadsDrained]


def test_revoking_without_readers_drains_at_once_and_ends_leases() -> None:
    world = World()
    secret = world.lend(1).secret
    world.lender.revoke(ONE, 0)
    assert world.said(ReadsDrained) == 1
    assert world.lease(secret, [1], [10]) is Status.NOT_GRANTED
    assert not world.is_cut


def test_the_last_lease_of_a_revoked_grant_drains_it_and_readers_are_cut() -> None:
    world = World()
    grant = world.lend(1)
    for link in (1, 2):
        assert world.lease(grant.secret, [1], [10], link=link) is grant
    world.lender.revoke(ONE, 0)
    assert world.is_cut == [1, 2]
    world.lender.revoke(ONE, 0)
    assert world.is_cut == [1, 2]
    world.lender.end_lease(grant, 1, 0, is_sent=False)
    assert not world.said(ReadsDrained)
    world.lender.end_lease(grant, 2, 0, is_sent=False)
    assert world.said(ReadsDrained) == 1
    assert world.lender.held() == Held()


def test_a_revocation_of_what_was_never_lent_is_answered_each_time() -> None:
    world = World()
    world.lender.revoke(ONE, 0)
    world.lender.revoke(ONE, 0)
    assert world.events == 2 * [ReadsDrained(ONE, 0, ShardId(0))]


def test_a_publication_during_the_drain_is_a_new_grant() -> None:
    world = World()
    old = world.lend(1)
    world.lease(old.secret, [1], [10])
    world.lender.revoke(ONE, 0)
    new = world.lend(1, age=1)
    assert world.lease(new.secret, [1], [11], link=2) is new
    assert world.lease(new.secret, [1], [10], link=2) is Status.WRONG_GENERATION
    world.lender.end_lease(old, 1, 0, is_sent=False)
    assert world.said(ReadsDrained) == 1
    world.lender.revoke(ONE, 0)
    assert world.said(ReadsDrained) == 1
    world.lender.end_lease(new, 2, 0, is_sent=False)
    assert world.said(ReadsDrained) == 2


def test_what_is_lent_is_counted_until_the_last_reader_has_left() -> None:
    world = World()
    grant = world.lend(1, 2)
    assert world.lender.held() == Held(live_rooms=1, pinned_pages=2)
    world.lease(grant.secret, [1], [10])
    world.lender.revoke(ONE, 0)
    assert world.lender.held() == Held(live_rooms=1, pinned_pages=2, open_transfers=1)
    world.lender.end_lease(grant, 1, 0, is_sent=True)
    assert world.lender.held() == Held()


def test_reads_are_reported_at_most_once_per_interval_and_only_whole_ones() -> None:
    world = World()
    grant = world.lend(1)
    for now, is_sent, reported in (
        (0, False, 0),
        (1, True, 1),
        (READ_REPORT_INTERVAL_NS, True, 1),
        (READ_REPORT_INTERVAL_NS + 1, True, 2),
    ):
        world.lease(grant.secret, [1], [10])
        world.lender.end_lease(grant, 1, now, is_sent=is_sent)
        assert world.said(PageRead) == reported


# --- connections -----------------------------------------------------------------------------------------------------


def admit(world: World, link: int, now: int = 0, reader: bytes = READER) -> bool:
    return world.lender.admit(link, reader, now)


def test_one_reader_may_have_a_quarter_of_the_places() -> None:
    world = World()
    assert [admit(world, link) for link in range(3)] == [True, True, False]
    assert [admit(world, link, reader=b"%d" % link) for link in range(3, 10)] == 6 * [True] + [False]


def test_a_new_connection_takes_the_place_of_the_one_that_was_idle_longest() -> None:
    world = World()
    assert admit(world, 1)
    assert admit(world, 2)
    world.lender.idle(1, 5)
    world.lender.idle(2, 4)
    assert not admit(world, 3, now=IDLE_GRACE_NS + 3), "nobody has been idle for long enough"
    assert admit(world, 3, now=IDLE_GRACE_NS + 4)
    assert world.is_cut == [2]
    world.lender.left(2)
    world.lender.asked(1)
    assert not admit(world, 4, now=10 * IDLE_GRACE_NS), "one is at work, the other was just welcomed"


def test_the_own_idle_connection_goes_when_a_reader_has_its_share_and_not_that_of_another() -> None:
    world = World()
    for link in (1, 2):
        assert admit(world, link)
    assert admit(world, 3, reader=b"another")
    world.lender.idle(3, 0)
    world.lender.idle(2, 1)
    assert admit(world, 4, now=10 * IDLE_GRACE_NS)
    assert world.is_cut == [2]


def test_connections_that_were_cut_count_until_there_are_twice_as_many_as_allowed() -> None:
    world = World()
    now = 0
    for link in range(3 * MAX_LINKS):
        now += 2 * IDLE_GRACE_NS
        if not admit(world, link, now):
            break
        world.lender.idle(link, now)
    else:
        pytest.fail("there is no end of connections")
    assert link == 2 * MAX_LINKS
    world.lender.left(world.is_cut[0])
    assert admit(world, 1000, now + IDLE_GRACE_NS)


@given(st.data())
def test_however_it_goes_drained_is_said_once_and_only_without_leases(data: st.DataObject) -> None:
    """A law: after a revocation no lease begins, and ReadsDrained comes with the end of the last one."""
    world = World()
    grant = world.lend(1, 2, 3)
    leases: list[int] = []
    is_revoked = False
    for link in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["lease", "end", "revoke", "publish"])):
            case "lease":
                answer = world.lease(grant.secret, [1, 2], [10, 20], link=link)
                assert (answer is grant) is not is_revoked
                leases += [link] if answer is grant else []
            case "end" if leases:
                ended = leases.pop(data.draw(st.integers(0, len(leases) - 1)))
                world.lender.end_lease(grant, ended, link, is_sent=True)
            case "revoke" if not is_revoked:
                is_revoked = True
                world.lender.revoke(ONE, 0)
                assert world.is_cut == leases
            case "publish" if not is_revoked:
                assert world.lend(4) is grant
        assert world.said(ReadsDrained) == (is_revoked and not leases)
        assert world.lender.held().open_transfers == len(leases)
