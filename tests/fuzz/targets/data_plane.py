"""The data plane: bytes to an owner of pages, and an owner's bytes to a reader. Real threads, sockets on loopback.

    data_noise      whatever somebody sends who has connected
    data_member     what a member of the cluster sends once it was welcomed; it was granted some pages, and not others
    data_answers    what an owner, a member too, sends to a reader that pulls

Nobody reads a page that was not granted to him, and nothing lands but in the pages that were to be filled.
"""

import contextlib
import mmap
import queue
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from random import Random
from unittest.mock import patch

from engine import Run, Target
from mutators import EDGES, EDGES_64, apply, mutate_bytes, put_an_integer

from attackers_data import Asker, Impostor
from attackers_data import Target as Owner
from data_planes import introduce, pack_read
from tandem.core.commands import CancelPull, PublishPages, PullPages
from tandem.core.events import Event, PagesDigested, PagesLanded, TransferDrained, TransferFailed
from tandem.core.kv_parts import KvShard, Runs
from tandem.core.values import Incarnation, PageId, RequestId, ShardId
from tandem.membership import ClusterSecret
from tandem.transfer import protocol
from tandem.transfer.digests import unpack_digests
from tandem.transfer.pages import Pages
from tandem.transfer.protocol import Status
from tandem.transfer.sock import SockTransfer
from targets.http import Broken

OWNER, READER = Incarnation("prefill", "1" * 32), Incarnation("decode", "2" * 32)
SECRET = ClusterSecret(b"what all members know")
PAGE_BYTES, NUM_PAGES = 1024, 16
GRANTED, FOREIGN = tuple(range(4)), tuple(range(4, NUM_PAGES))
ROOM, FOREIGN_ROOM, GENERATION = 5, 6, 1
PLACE_OF_SECRET = b"<the secret...>!"  # in an input, where that of the grant is to stand
PATIENCE_S = 10.0
HANDSHAKE_BYTES = protocol.CHALLENGE_MESSAGE_BYTES + protocol.WELCOME_BYTES


class Side:
    """A data plane with pages that can be told apart, and what it reports."""

    def __init__(self, who: Incarnation, fill: Callable[[int], bytes]) -> None:
        self.memory = memoryview(mmap.mmap(-1, NUM_PAGES * PAGE_BYTES))
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.transfer = SockTransfer(
            Pages(self.memory, PAGE_BYTES),
            KvShard.whole(PAGE_BYTES),
            incarnation=who,
            secret=SECRET,
            host="127.0.0.1",
            report=self.events.put,
            io_timeout_s=PATIENCE_S,
        )
        for page in range(NUM_PAGES):
            self.memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = fill(page)

    def publish(self, request: int, pages: tuple[int, ...], *, room: int) -> PagesDigested:
        numbers = tuple(map(PageId, pages))
        command = PublishPages(RequestId(request), 0, 0, numbers, (GENERATION,) * len(pages), room)
        self.transfer.publish(command)
        event = self.events.get(timeout=PATIENCE_S)
        assert isinstance(event, PagesDigested)
        return event


def marked(page: int) -> bytes:
    return f"page {page:02} ".encode() * (PAGE_BYTES // 8)


# --- an owner, and somebody who asks ---------------------------------------------------------------------------------


class Lent:
    """An owner that has granted some pages to one reader, and others to somebody else."""

    def __init__(self) -> None:
        self._side = Side(OWNER, marked)
        with patch.object(secrets, "token_bytes", Random("grants").randbytes):  # inputs name them
            self.secret = self._side.publish(1, GRANTED, room=ROOM).secret
            self._side.publish(2, FOREIGN, room=FOREIGN_ROOM)
        self.owner = Owner(OWNER, PAGE_BYTES, self._side.transfer.host, self._side.transfer.port)

    def check(self, heard: bytes, *, granted: tuple[int, ...]) -> None:
        for page in range(NUM_PAGES):
            if page not in granted and marked(page)[:8] in heard:
                raise Broken(f"page {page} was read by somebody to whom it was not granted")


def rest_of(link: socket.socket) -> bytes:
    """Until the owner has closed: whoever has nothing more to say is not kept."""
    heard, deadline = b"", time.monotonic() + PATIENCE_S
    link.settimeout(PATIENCE_S)
    try:
        while piece := link.recv(1 << 16):
            heard += piece
            if time.monotonic() > deadline:
                break
    except TimeoutError:
        raise Broken("the owner keeps somebody who has left") from None
    except OSError:
        pass
    return heard


def half_close(link: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end was first
        link.shutdown(socket.SHUT_WR)


def data_noise() -> Run:
    lent = Lent()

    def run(data: bytes) -> None:
        with Asker(lent.owner, secret=SECRET) as asker:
            asker.say(data)
            half_close(asker.link)
            heard = rest_of(asker.link)
        if len(heard) > HANDSHAKE_BYTES:
            raise Broken(f"{len(heard)} bytes for somebody who has proved nothing")
        lent.check(heard, granted=())

    return run


def data_member() -> Run:
    lent = Lent()

    def run(data: bytes) -> None:
        with Asker(lent.owner, secret=SECRET, reader=READER) as asker:
            if asker.join() is not Status.OK:
                raise Broken("a member is not welcome")
            asker.say(data.replace(PLACE_OF_SECRET, lent.secret))
            half_close(asker.link)
            heard = rest_of(asker.link)
        lent.check(heard, granted=GRANTED)

    return run


def noise_seeds() -> Mapping[str, bytes]:
    hello = protocol.Hello(
        version=protocol.VERSION,
        page_bytes=PAGE_BYTES,
        incarnation=protocol.incarnation_digest(OWNER),
        reader=protocol.reader_digest(READER, ShardId(0)),
        challenge=bytes(protocol.CHALLENGE_BYTES),
        proof=protocol.NO_PROOF,
    )
    return {"hello": protocol.pack_hello(hello), "and_a_read": protocol.pack_hello(hello) + reads()["granted"]}


def read_of(room: int, secret: bytes, pages: tuple[int, ...], generations: tuple[int, ...]) -> bytes:
    return pack_read(room, secret, pages, generations, page_bytes=PAGE_BYTES)


def reads() -> dict[str, bytes]:
    none, ones = bytes(protocol.GRANT_SECRET_BYTES), (GENERATION,) * len(GRANTED)
    return {
        "granted": read_of(ROOM, PLACE_OF_SECRET, GRANTED, ones),
        "backwards": read_of(ROOM, PLACE_OF_SECRET, GRANTED[::-1], ones),
        "other_generation": read_of(ROOM, PLACE_OF_SECRET, GRANTED, (2, 2, 2, 2)),
        "not_granted": read_of(ROOM, PLACE_OF_SECRET, FOREIGN, (GENERATION,) * len(FOREIGN)),
        "other_room": read_of(FOREIGN_ROOM, PLACE_OF_SECRET, FOREIGN, (GENERATION,) * len(FOREIGN)),
        "without_secret": read_of(ROOM, none, GRANTED, ones),
        "parts": protocol.pack_read(ROOM, PLACE_OF_SECRET, Runs(8, 8, 16, 3), GRANTED, ones),
        "many": read_of(ROOM, PLACE_OF_SECRET, GRANTED * 512, ones * 512),
    }


def read_seeds() -> Mapping[str, bytes]:
    return {**reads(), "two": reads()["granted"] * 2}


def edit_words(random: Random, entry: bytes, other: bytes) -> bytes:
    """Numbers of these protocols are little endian and aligned to their size."""
    width = random.choice((4, 8))
    if len(entry) < width:
        return entry
    at = random.randrange(len(entry) // width) * width
    number = random.choice((*EDGES, *EDGES_64, *range(NUM_PAGES))) % (1 << 8 * width)
    return entry[:at] + number.to_bytes(width, "little") + entry[at + width :]


def mutate_words(random: Random, entry: bytes, other: bytes) -> bytes:
    if random.random() < 0.5:
        return mutate_bytes(random, entry, other)
    return apply(random, (edit_words, edit_words, put_an_integer), entry, other)


# --- a reader, and somebody who answers ------------------------------------------------------------------------------


class Pulling:
    """A reader that pulls four pages into every second one of its own."""

    def __init__(self) -> None:
        self._side = Side(READER, lambda page: b"\xee" * PAGE_BYTES)
        self._impostor = Impostor()
        self._impostor.listener.setblocking(False)
        self._digests = digests_of(GRANTED)
        self._next = 0

    def __call__(self, data: bytes) -> None:
        self._next += 1
        transfer = self._side.transfer
        introduce(transfer, OWNER, "127.0.0.1", self._impostor.port)
        transfer.pull(self._command())
        end = self._answer(data)
        transfer.disconnect(OWNER)
        transfer.cancel(CancelPull(RequestId(self._next), 0))
        while not isinstance(self._side.events.get(timeout=PATIENCE_S), TransferDrained):
            pass
        self._check(has_landed=isinstance(end, PagesLanded))

    def _command(self) -> PullPages:
        destinations = tuple(PageId(2 * index) for index in range(len(GRANTED)))
        return PullPages(
            request=RequestId(self._next),
            attempt=0,
            room=ROOM,
            peer=OWNER,
            first_wanted=0,
            sources=GRANTED,
            generations=(GENERATION,) * len(GRANTED),
            destinations=destinations,
            digests=(self._digests,),
            secrets=(bytes(protocol.GRANT_SECRET_BYTES),),
        )

    def _answer(self, data: bytes) -> Event:
        """The same to every connection, until the pull has ended."""
        deadline = time.monotonic() + PATIENCE_S
        with contextlib.ExitStack() as links:
            while time.monotonic() < deadline:
                if select.select([self._impostor.listener], [], [], 0.0005)[0]:
                    link = links.enter_context(self._impostor.accept())
                    hello = self._impostor.greet(link)
                    if len(hello) == protocol.HELLO_BYTES:
                        say(link, Impostor.welcome(Status.OK, SECRET, hello) + data)
                    half_close(link)
                if (end := self._end()) is not None:
                    return end
        raise Broken("the pull never ends")

    def _end(self) -> Event | None:
        while not self._side.events.empty():
            event = self._side.events.get()
            if isinstance(event, TransferFailed) or (isinstance(event, PagesLanded) and event.landed == len(GRANTED)):
                return event
        return None

    def _check(self, *, has_landed: bool) -> None:
        memory = self._side.memory
        for page in range(NUM_PAGES):
            content = bytes(memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
            is_destination = page % 2 == 0 and page // 2 < len(GRANTED)
            if not is_destination and content != b"\xee" * PAGE_BYTES:
                raise Broken(f"bytes have landed in page {page}, which was not to be filled")
            if is_destination and has_landed and content != marked(page // 2):
                raise Broken(f"page {page} has landed and is not what was offered")


def say(link: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it has heard enough
        link.sendall(data)


def digests_of(pages: tuple[int, ...]) -> bytes:
    side = Side(OWNER, marked)
    digested = side.publish(1, pages, room=ROOM)
    side.transfer.close()
    (digests,) = digested.digests
    assert len(unpack_digests(digests)) == len(pages)
    return digests


def answer_seeds() -> Mapping[str, bytes]:
    whole = b"".join(marked(page) for page in GRANTED)
    halves = [protocol.pack_frame(Status.OK, 2) + whole[at : at + 2 * PAGE_BYTES] for at in (0, 2 * PAGE_BYTES)]
    found = {status.name.lower(): protocol.pack_frame(status, 0) for status in Status}
    found["whole"] = protocol.pack_frame(Status.OK, len(GRANTED)) + whole
    found["halves"] = b"".join(halves)
    found["torn"] = found["whole"][:-100]
    found["other_pages"] = protocol.pack_frame(Status.OK, 4) + b"".join(marked(page) for page in FOREIGN[:4])
    return found


def data_answers() -> Run:
    return Pulling()


TARGETS = (
    Target("data_noise", data_noise, mutate_words, 600, seeds=noise_seeds),
    Target("data_member", data_member, mutate_words, 600, seeds=read_seeds),
    Target("data_answers", data_answers, mutate_words, 400, seeds=answer_seeds),
)
