"""Every command of the core to the neighbour that carries it out. Sends only: completions come back as events."""

from typing import Protocol, assert_never

import msgspec

from tandem.core import commands
from tandem.core.commands import Command
from tandem.core.disagg.messages import Message
from tandem.core.values import Incarnation


class Outlet(Protocol):
    """A channel, as far as commands need it."""

    def send(self, message: msgspec.Struct) -> None: ...


class Tells(Protocol):
    def tell(self, who: Incarnation, message: Message) -> None: ...


def dispatch(command: Command, *, api: Outlet, workers: Outlet, peers: Tells) -> None:
    """Raises ChannelFull when a process of this server does not keep up."""
    match command:
        case (
            commands.LaunchBatch()
            | commands.ForgetRequests()
            | commands.PublishPages()
            | commands.RevokePages()
            | commands.PullPages()
            | commands.CancelPull()
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
        case commands.GatherSnapshot():
            raise AssertionError("a server has one DP rank, which agrees with itself")
        case never:
            assert_never(never)
