"""Every command of the core to the local peer that carries it out. Sends only: completions come back as events."""

from typing import Protocol, assert_never

import msgspec
from msgspec import Struct

from tandem.core import commands
from tandem.core.commands import Command
from tandem.core.disagg.messages import Message
from tandem.core.values import Incarnation
from tandem.server import wire


class Outlet(Protocol):
    """A channel, as far as commands need it."""

    def send(self, message: msgspec.Struct) -> None: ...


class Tells(Protocol):
    def tell(self, who: Incarnation, message: Message) -> None: ...


class Siblings(Protocol):
    """The other DP ranks of this server, as far as a node has to do with them."""

    def launched(self) -> None:
        """They have to take part in a batch of ours."""
        ...

    def gather(self, command: commands.GatherLoad) -> None: ...


class NoSiblings:
    """Of a replica that steps alone: others, if there are any, go on by themselves."""

    def launched(self) -> None:
        pass

    def gather(self, command: commands.GatherLoad) -> None:
        raise AssertionError("a rank that steps alone agrees with itself")


class SteppingSiblings(Struct, frozen=True):
    """With DP attention. The API process is the way to them."""

    dp_rank: int  # our own
    api: Outlet

    def launched(self) -> None:
        self.api.send(wire.BatchLaunched(self.dp_rank))

    def gather(self, command: commands.GatherLoad) -> None:
        self.api.send(command)


def dispatch(command: Command, *, api: Outlet, workers: Outlet, peers: Tells, siblings: Siblings) -> None:
    """Raises ChannelFull when a process of this server does not keep up."""
    match command:
        case commands.LaunchBatch():
            workers.send(command)
            siblings.launched()
        case (
            commands.ForgetRequests()
            | commands.PublishPages()
            | commands.RevokePages()
            | commands.PullPages()
            | commands.CancelPull()
            | commands.FreeWindows()
            | commands.StorePages()
            | commands.LoadPages()
            | commands.LookUpPages()
            | commands.FetchPages()
            | commands.WritePages()
        ):
            workers.send(command)
        case (
            commands.EmitTokens()
            | commands.StartRequest()
            | commands.FinishRequest()
            | commands.FailRequest()
            | commands.RenderAgain()
            | commands.LearnPeer()
            | commands.AskDpRank()
            | commands.AnnounceDpRank()
        ):
            api.send(command)
        case commands.Tell():
            peers.tell(command.peer, command.message)
        case commands.AnnounceStored() | commands.AnnounceRemoved() | commands.AnnounceCleared():
            pass  # for those who observe the stream (`kv_events.py`)
        case commands.PromptsLetIn():
            pass  # alike (`metrics/delayer_waits.py`)
        case commands.GatherLoad():
            siblings.gather(command)
        case never:
            assert_never(never)
