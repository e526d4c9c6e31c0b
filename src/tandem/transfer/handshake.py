"""How the two ends of a connection prove to each other that they are members of the cluster. No I/O here.

Each end draws a challenge, and proves the secret over the challenge of the other. The reader's proof covers its whole
Hello, the owner's covers Challenge, Hello and Welcome: what was recorded on one connection fits no other one, and
because the purposes differ nobody can be made to answer its own question. Nothing is told and nothing is believed
before the proof: an owner names what does not fit to members only, and a reader believes a member only.
"""

from tandem.core.values import Incarnation
from tandem.membership import PROOF_BYTES, ClusterSecret, new_challenge
from tandem.transfer import protocol
from tandem.transfer.protocol import NO_PROOF, Hello, Registered, Status

READER_PURPOSE = "data plane reader"
OWNER_PURPOSE = "data plane owner"
NIXL_PURPOSE = "data plane memory by NIXL"


class NotProven(Exception):
    """The other end does not prove that it has the secret of the cluster."""


class OwnerHandshake:
    """The owner's end of one connection: send `challenge`, give what comes to `hear`, and send a `welcome`."""

    def __init__(
        self,
        secret: ClusterSecret,
        *,
        incarnation: bytes,
        page_bytes: int,
        has_memory: bool = False,
        memory_only: bool = False,
        has_nixl: bool = False,
        nixl_only: bool = False,
    ) -> None:
        """incarnation: digest of this owner's

        has_memory: this connection can bring a descriptor of it
        memory_only: whoever does not want that is refused
        has_nixl: the memory can be read by NIXL, by those who need that
        nixl_only: and by all who take it; whoever does not is refused
        """
        self._secret = secret
        self._has_memory, self._memory_only = has_memory, memory_only
        self._has_nixl, self._nixl_only = has_nixl, nixl_only
        self._incarnation, self._page_bytes = incarnation, page_bytes
        self._challenge = new_challenge()
        self._hello: bytes | None = None  # once it is proven
        self.brings_memory = self.brings_nixl = False  # with the Welcome, if that is OK; one of them at most
        self.challenge = protocol.pack_challenge(self._challenge)

    def hear(self, message: bytes | bytearray) -> tuple[Hello, Status]:
        """What the reader says, and OK or why it is refused. Raises Malformed."""
        hello = protocol.unpack_hello(message)
        if not self._secret.is_proof(hello.proof, READER_PURPOSE, self._challenge, _unproven(message)):
            return hello, Status.NOT_A_MEMBER
        self._hello = bytes(message)
        if hello.version != protocol.VERSION:
            return hello, Status.WRONG_VERSION
        if hello.incarnation != self._incarnation:
            return hello, Status.OTHER_INCARNATION
        if hello.page_bytes != self._page_bytes:
            return hello, Status.WRONG_PAGE_BYTES
        self.brings_memory = hello.wants_memory and self._has_memory
        is_asked_for = hello.needs_nixl or (hello.takes_nixl and self._nixl_only)
        self.brings_nixl = is_asked_for and self._has_nixl and not self.brings_memory
        if self._memory_only and not self.brings_memory:
            return hello, Status.OTHER_BACKEND
        if self._nixl_only and not self.brings_nixl:
            return hello, Status.OTHER_BACKEND
        return hello, Status.OK

    def welcome(self, status: Status) -> bytes:
        """The answer. Who has proved nothing is told nothing but that, and gets no proof of ours."""
        if self._hello is None:
            return protocol.pack_welcome(Status.NOT_A_MEMBER, NO_PROOF)
        is_ok = status is Status.OK
        has = {"has_memory": self.brings_memory and is_ok, "has_nixl": self.brings_nixl and is_ok}
        said = _unproven(protocol.pack_welcome(status, NO_PROOF, **has))
        proof = self._secret.proof(OWNER_PURPOSE, self._challenge, self._hello, said)
        return protocol.pack_welcome(status, proof, **has)

    def registered(self, registered: Registered) -> bytes:
        """What follows a Welcome that brings NIXL."""
        assert self._hello is not None
        said = protocol.pack_registered(registered)
        return said + self._secret.proof(NIXL_PURPOSE, self._challenge, self._hello, said)


class ReaderHandshake:
    """The reader's end of one connection: answer the Challenge with `hello`, and give the Welcome to `hear`."""

    def __init__(
        self,
        secret: ClusterSecret,
        *,
        peer: Incarnation,
        reader: bytes,
        page_bytes: int,
        wants_memory: bool = False,
        takes_nixl: bool = False,
        needs_nixl: bool = False,
    ) -> None:
        """peer: the owner that is meant; reader: digest of the worker that asks; page_bytes: of the owner"""
        self._secret, self._wants_memory = secret, wants_memory
        self._takes_nixl, self._needs_nixl = takes_nixl, needs_nixl
        self._peer, self._reader, self._page_bytes = protocol.incarnation_digest(peer), reader, page_bytes
        self._challenge = self._hello = b""
        self.brings_memory = self.brings_nixl = False  # the Welcome that was heard

    def hello(self, message: bytes | bytearray) -> bytes:
        """The answer to the owner's Challenge. Raises Malformed."""
        self._challenge = protocol.unpack_challenge(message)
        unproven = Hello(
            version=protocol.VERSION,
            page_bytes=self._page_bytes,
            incarnation=self._peer,
            reader=self._reader,
            challenge=new_challenge(),
            proof=NO_PROOF,
            wants_memory=self._wants_memory,
            takes_nixl=self._takes_nixl,
            needs_nixl=self._needs_nixl,
        )
        said = _unproven(protocol.pack_hello(unproven))
        self._hello = said + self._secret.proof(READER_PURPOSE, self._challenge, said)
        return self._hello

    def hear(self, message: bytes | bytearray) -> Status:
        """What the owner, a member, says; or that it takes this reader for none. Raises Malformed and NotProven."""
        welcome = protocol.unpack_welcome(message)
        if welcome.status is Status.NOT_A_MEMBER:
            return welcome.status  # it cannot prove itself to somebody with another secret
        if not self._secret.is_proof(welcome.proof, OWNER_PURPOSE, self._challenge, self._hello, _unproven(message)):
            raise NotProven("whoever listens there does not prove the secret of the cluster")
        is_ok = welcome.status is Status.OK
        self.brings_memory = is_ok and welcome.has_memory and self._wants_memory
        takes_nixl = self._takes_nixl or self._needs_nixl
        self.brings_nixl = is_ok and welcome.has_nixl and takes_nixl and not self.brings_memory
        return welcome.status

    def hear_registered(self, message: bytes | bytearray) -> Registered:
        """What follows a Welcome that brings NIXL. Raises Malformed and NotProven."""
        registered = protocol.unpack_registered(message)
        proof, said = bytes(message[-PROOF_BYTES:]), _unproven(message)
        if not self._secret.is_proof(proof, NIXL_PURPOSE, self._challenge, self._hello, said):
            raise NotProven("what NIXL has to know is not proven")
        return registered


def _unproven(message: bytes | bytearray) -> bytes:
    """What a proof is about: all that stands before it."""
    return bytes(message[:-PROOF_BYTES])
