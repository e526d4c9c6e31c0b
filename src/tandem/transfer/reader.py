"""The reader's side: pulls pages of peers into own pages, checks them, and knows when no byte can land any more.

Up to `max_transfers` threads work on the attempts that have something to pull; one thread works on an attempt at a
time, on a connection that nobody else uses meanwhile. Bytes can land for an attempt only while it is *armed* with a
link. Arming, disarming and cancelling happen under one lock; a cancelled attempt is never armed again, and whoever
disarms it, or finds it disarmed, reports that it is drained.

A connection that breaks is made anew, and the pull goes on behind the last page that was checked: this costs
microseconds when the peer is dead, and tells a read that was revoked from a peer that is gone. Two in a row that break
before a page has come are one too many.

The owner proves that it is a member of the cluster before anything is asked (`handshake.py`). What it says afterwards
is checked like what anybody says: a frame that cannot be ends the attempt, and nothing else.
"""

import contextlib
import logging
import queue
import select
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.core.commands import CancelPull, PullPages
from tandem.core.events import Event, PagesLanded, TransferDrained, TransferFailed
from tandem.core.values import Cause, Incarnation, RequestId, ShardId
from tandem.membership import ClusterSecret
from tandem.transfer import link as links
from tandem.transfer import protocol
from tandem.transfer.handshake import NotProven, ReaderHandshake
from tandem.transfer.pages import DIGEST_BYTES, Pages, unpack_digests
from tandem.transfer.port import Held
from tandem.transfer.protocol import Status

log = logging.getLogger(__name__)
MAX_PEERS = 1024  # the one learned first is forgotten
MAX_ENDED = 8192  # attempts that failed or were cancelled and are remembered, to say their end once
LANDED_REPORT_INTERVAL_S = 0.002
BUSY_PAUSE_S = 0.01
BUSY_PATIENCE = 2  # timeouts: within one, the owner has cut off a reader that does not move

Key = tuple[RequestId, int]  # request, attempt


class PullFailed(Exception):
    """This attempt is over. Carries what the node is told."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause, self.detail = cause, detail


class PeerBusy(PullFailed):
    """The peer is there and had no connection for us: worth another try, until `BUSY_PATIENCE` is over."""


@dataclass(slots=True)
class Peer:
    host: str
    port: int
    unix: str
    idle: list[socket.socket] = field(default_factory=list)  # welcomed, no Read under way


@dataclass(slots=True, eq=False)
class Pull:
    """One attempt of one request that has pages to pull. Forgotten when they all landed."""

    key: Key
    room: int
    wanted: int  # pages named so far, by all commands of the attempt
    landed: int  # of which these are here and checked
    commands: deque[PullPages] = field(default_factory=deque)
    armed: socket.socket | None = None
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class OfferedPages:
    """What this shard was offered by one command, checked."""

    digests: tuple[int, ...]
    secret: bytes = field(repr=False)  # of the grant


class PageReader:
    def __init__(
        self,
        pages: Pages,
        *,
        incarnation: Incarnation,
        secret: ClusterSecret,
        shard: ShardId,
        report: Callable[[Event], None],
        report_later: Callable[[Event], None],
        io_timeout_s: float,
        max_transfers: int,
    ) -> None:
        """`report_later` reports from another thread and never blocks; it keeps the order of its calls."""
        self._pages, self._shard = pages, shard
        self._incarnation, self._secret = protocol.incarnation_digest(incarnation), secret
        self._report, self._report_later = report, report_later
        self._io_timeout_s, self._max_transfers = io_timeout_s, max_transfers
        self._lock = threading.Lock()
        self._peers: OrderedDict[Incarnation, Peer] = OrderedDict()
        self._pulls: dict[Key, Pull] = {}
        self._leaving: dict[Key, Pull] = {}  # cancelled, and a thread still receives
        self._ended: OrderedDict[Key, bool] = OrderedDict()  # True: TransferDrained is said or on its way
        self._queue: queue.SimpleQueue[Pull | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def learn(self, incarnation: Incarnation, *, host: str, port: int, unix: str) -> None:
        """What was known of it before is forgotten. Beyond MAX_PEERS the one learned first is."""
        with self._lock:
            known = self._peers.get(incarnation)
            if known is not None and (known.host, known.port, known.unix) == (host, port, unix):
                return
            if known is not None:
                _close_all(self._peers.pop(incarnation).idle)
            self._peers[incarnation] = Peer(host, port, unix)
            if len(self._peers) > MAX_PEERS:
                _close_all(self._peers.popitem(last=False)[1].idle)

    def forget(self, incarnation: Incarnation) -> None:
        with self._lock:
            known = self._peers.pop(incarnation, None)
        if known is not None:
            _close_all(known.idle)

    def pull(self, command: PullPages) -> None:
        count = len(command.destinations)
        assert count == len(command.sources) == len(command.generations)
        assert self._pages.has_all(command.destinations)
        key = (command.request, command.attempt)
        with self._lock:
            if key in self._ended or self._is_closed:
                return
            pull = self._pulls.get(key)
            is_new = pull is None
            if pull is None:
                pull = self._pulls[key] = Pull(
                    key, command.room, wanted=command.first_wanted, landed=command.first_wanted
                )
            assert pull.wanted == command.first_wanted
            pull.wanted += count
            pull.commands.append(command)
            if is_new:
                self._queue.put(pull)
                if len(self._threads) < self._max_transfers:
                    self._start_thread()

    def cancel(self, command: CancelPull) -> None:
        key = (command.request, command.attempt)
        with self._lock:
            if self._ended.get(key) or self._is_closed:
                return
            self._end(key, is_drained=True)
            pull = self._pulls.pop(key, None)
            if pull is not None:
                pull.is_cancelled = True
                if pull.armed is not None:
                    links.cut(pull.armed)
                    self._leaving[key] = pull
                    return  # the thread that receives says it, when it has left
            self._report_later(TransferDrained(*key, self._shard))

    def held(self) -> Held:
        """A cancelled pull counts until no byte of it can land any more."""
        with self._lock:
            pulls = [*self._pulls.values(), *self._leaving.values()]
        return Held(
            live_rooms=len({pull.room for pull in pulls}),
            pinned_pages=sum(pull.wanted - pull.landed for pull in pulls),
            open_transfers=sum(pull.armed is not None for pull in pulls),
        )

    def close(self, *, grace_s: float) -> None:
        """No byte lands after this. Threads that still dial end by themselves: they find nothing to arm."""
        give_up_at = time.monotonic() + grace_s
        with self._lock:
            self._is_closed = True
            for pull in self._pulls.values():
                pull.is_cancelled = True
                if pull.armed is not None:
                    links.cut(pull.armed)
            for peer in self._peers.values():
                _close_all(peer.idle)
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))

    def _end(self, key: Key, *, is_drained: bool) -> None:
        self._ended[key] = is_drained
        self._ended.move_to_end(key)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work_loop, name="kv-pull", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work_loop(self) -> None:
        while (pull := self._queue.get()) is not None:
            try:
                self._work(pull)
            except PullFailed as failure:
                self._fail(pull, failure)
            except Exception as error:
                log.exception("a pull ended by an error of ours")
                self._fail(pull, PullFailed(Cause.TRANSFER_FAILED, repr(error)))

    def _work(self, pull: Pull) -> None:
        while (command := self._next_command(pull)) is not None:
            self._pull_command(pull, command)

    def _next_command(self, pull: Pull) -> PullPages | None:
        with self._lock:
            if pull.is_cancelled:
                return None
            if not pull.commands:
                assert pull.landed == pull.wanted
                del self._pulls[pull.key]
                return None
            return pull.commands.popleft()

    def _fail(self, pull: Pull, failure: PullFailed) -> None:
        with self._lock:
            if pull.is_cancelled:
                return
            del self._pulls[pull.key]
            self._end(pull.key, is_drained=False)
            # Not `report`: a TransferDrained that is asked for right now must come behind it.
            self._report_later(TransferFailed(*pull.key, self._shard, failure.cause, failure.detail))

    def _pull_command(self, pull: Pull, command: PullPages) -> None:
        offer = self._checked_offer(command)
        may_retry = True
        while not pull.is_cancelled and (began_at := pull.landed) < command.first_wanted + len(offer.digests):
            link, was_idle = self._wait_for_link(pull, command.peer)
            if link is None:
                return
            if not self._arm(pull, link):
                link.close()
                return
            is_whole = False
            try:
                self._receive(pull, command, offer, link)
                is_whole = True
            except links.LinkBroken as error:
                has_moved = pull.landed > began_at
                if not (may_retry or was_idle or has_moved):
                    raise PullFailed(Cause.PEER_LOST, str(error)) from error
                may_retry = has_moved or (may_retry and was_idle)
            except links.LinkFrozen as error:
                raise PullFailed(Cause.PEER_LOST, str(error)) from error
            except protocol.Malformed as error:
                raise PullFailed(Cause.TRANSFER_FAILED, f"the peer talks nonsense: {error}") from error
            finally:
                self._disarm(pull, command.peer, link, is_whole=is_whole)

    def _wait_for_link(self, pull: Pull, peer: Incarnation) -> tuple[socket.socket | None, bool]:
        """As `_borrow_link`; no link when the pull is cancelled meanwhile."""
        give_up_at = time.monotonic() + BUSY_PATIENCE * self._io_timeout_s
        while not pull.is_cancelled:
            try:
                return self._borrow_link(peer)
            except PeerBusy:
                if time.monotonic() >= give_up_at:
                    raise
                time.sleep(BUSY_PAUSE_S)
        return None, False

    def _checked_offer(self, command: PullPages) -> OfferedPages:
        """What of the command came from the peer through the control plane, and may be wrong. Raises PullFailed."""
        if len(command.digests) <= self._shard or len(command.secrets) <= self._shard:
            raise PullFailed(Cause.TRANSFER_FAILED, "the peer offered no digests or no secret for this shard")
        packed, secret = command.digests[self._shard], command.secrets[self._shard]
        if len(packed) != DIGEST_BYTES * len(command.sources):
            raise PullFailed(Cause.TRANSFER_FAILED, "the peer offered another number of digests than of pages")
        if len(secret) != protocol.GRANT_SECRET_BYTES:
            raise PullFailed(Cause.TRANSFER_FAILED, f"the peer offered a secret of {len(secret)} bytes")
        if not protocol.may_be_read(command.room, command.sources, command.generations):
            raise PullFailed(Cause.TRANSFER_FAILED, "the peer offered pages that cannot be")
        return OfferedPages(unpack_digests(packed), secret)

    def _arm(self, pull: Pull, link: socket.socket) -> bool:
        with self._lock:
            if pull.is_cancelled or self._is_closed:
                return False
            pull.armed = link
            return True

    def _disarm(self, pull: Pull, incarnation: Incarnation, link: socket.socket, *, is_whole: bool) -> None:
        """No byte lands from here on. A link without a Read under way (`is_whole`) is kept for the next pull."""
        with self._lock:
            pull.armed = None  # before the link is closed: `cut` must never meet a descriptor that was closed
            is_cancelled = pull.is_cancelled
            self._leaving.pop(pull.key, None)
        if is_whole and not is_cancelled:
            self._return_link(incarnation, link)
        else:
            link.close()
        if is_cancelled and not self._is_closed:
            self._report(TransferDrained(*pull.key, self._shard))

    def _receive(self, pull: Pull, command: PullPages, offer: OfferedPages, link: socket.socket) -> None:
        """Read what is missing of `command`, in order. Raises when the rest of it cannot be had from this link."""
        reported_at = time.monotonic()
        num_pages = len(offer.digests)
        while (start := pull.landed - command.first_wanted) < num_pages:
            stop = min(num_pages, start + protocol.MAX_READ_PAGES)
            span = slice(start, stop)
            request = protocol.pack_read(command.room, offer.secret, command.sources[span], command.generations[span])
            links.send(link, [request], timeout_s=self._io_timeout_s)
            while start < stop:
                count = self._receive_frame(command, offer.digests, link, start=start, stop=stop)
                start += count
                pull.landed += count
                if pull.is_cancelled:
                    raise links.LinkBroken("cancelled")
                now = time.monotonic()
                if start == num_pages or now - reported_at >= LANDED_REPORT_INTERVAL_S:
                    reported_at = now
                    self._report(PagesLanded(*pull.key, self._shard, pull.landed))

    def _receive_frame(
        self, command: PullPages, digests: tuple[int, ...], link: socket.socket, *, start: int, stop: int
    ) -> int:
        """Receive the frame that begins at page `start` of the command, check it, and return how many pages it has."""
        header = bytearray(protocol.FRAME_HEADER_BYTES)
        links.receive_into(link, [memoryview(header)], timeout_s=self._io_timeout_s)
        frame = protocol.unpack_frame(header, count_max=stop - start)
        if frame.status is not Status.OK:
            raise PullFailed(*protocol.REFUSALS[frame.status])
        span = slice(start, start + frame.count)
        destinations = command.destinations[span]
        links.receive_into(link, self._pages.runs(destinations), timeout_s=self._io_timeout_s)
        landed = self._pages.digests(
            destinations, room=command.room, sources=command.sources[span], generations=command.generations[span]
        )
        if tuple(landed) != digests[span]:
            raise PullFailed(Cause.CORRUPT_PAGES, "a page differs from its digest")
        return frame.count

    def _borrow_link(self, incarnation: Incarnation) -> tuple[socket.socket, bool]:
        """A link to the peer for exclusive use, and whether it has been used before (it may be dead by now)."""
        with self._lock:
            peer = self._peers.get(incarnation)
            while peer is not None and peer.idle:
                link = peer.idle.pop()
                if not _has_news(link):
                    return link, True
                link.close()
        if peer is None:
            raise PullFailed(Cause.PEER_LOST, "no address is known for this life of the peer")
        try:
            return self._dial(incarnation, peer), False
        except (links.LinkBroken, links.LinkFrozen) as error:
            raise PullFailed(Cause.PEER_LOST, str(error)) from error
        except protocol.Malformed as error:
            raise PullFailed(Cause.TRANSFER_FAILED, f"not a data plane: {error}") from error

    def _dial(self, incarnation: Incarnation, peer: Peer) -> socket.socket:
        """A new connection whose two ends have proved themselves. The handshake has one deadline for all of it."""
        give_up_at = time.monotonic() + self._io_timeout_s
        link = links.dial(peer.host, peer.port, peer.unix, timeout_s=self._io_timeout_s)
        try:
            status = self._shake_hands(incarnation, link, give_up_at)
            if status is Status.BUSY:
                raise PeerBusy(*protocol.REFUSALS[status])
            if status is not Status.OK:
                raise PullFailed(*protocol.REFUSALS[status])
        except BaseException:
            link.close()
            raise
        return link

    def _shake_hands(self, incarnation: Incarnation, link: socket.socket, give_up_at: float) -> Status:
        handshake = ReaderHandshake(
            self._secret, peer=incarnation, reader=self._incarnation, page_bytes=self._pages.page_bytes
        )

        def left_s() -> float:
            return give_up_at - time.monotonic()

        try:
            challenge = links.receive(link, protocol.CHALLENGE_MESSAGE_BYTES, timeout_s=left_s())
            links.send(link, [handshake.hello(challenge)], timeout_s=left_s())
            return handshake.hear(links.receive(link, protocol.WELCOME_BYTES, timeout_s=left_s()))
        except links.LinkBroken as error:  # crowded out, or about to be gone: the next dial tells
            raise PeerBusy(Cause.PEER_LOST, f"the peer ended the handshake: {error}") from error
        except NotProven as error:
            raise PullFailed(Cause.TRANSFER_FAILED, str(error)) from error

    def _return_link(self, incarnation: Incarnation, link: socket.socket) -> None:
        with self._lock:
            peer = self._peers.get(incarnation)
            if peer is not None and len(peer.idle) < self._max_transfers and not self._is_closed:
                peer.idle.append(link)
                return
        link.close()


def _has_news(link: socket.socket) -> bool:
    """Whether an idle link was closed by the peer, or says what nobody asked for: useless either way."""
    waiter = select.poll()
    waiter.register(link, select.POLLIN)
    return bool(waiter.poll(0))


def _close_all(idle: list[socket.socket]) -> None:
    while idle:
        with contextlib.suppress(OSError):
            idle.pop().close()
