"""One data-parallel rank, as the API process sees it: the way to its node, and what the node answers.

Everything here runs on the event loop. Whose tokens come and who is told is `client.py`'s.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from tandem.core import commands
from tandem.core.events import DpRankAnswered, PeerLearned, PeerUnknown
from tandem.server import wire
from tandem.server.api.allowed_hosts import AllowedHosts
from tandem.server.api.bootstrap_client import BootstrapClient
from tandem.server.api.errors import Problem, Refusal
from tandem.server.api.live_requests import LOADING, LiveRank

QUERY_SECONDS = 5.0


class NodePort(Protocol):
    """The way to a node process. Its messages come back through `NodeClient.receive`."""

    def send(self, message: wire.ApiToNode) -> None:
        """Does not block and keeps the order; never raises for a node that is gone.

        Encodes the whole message before it sends any of it. Of a `SubmitAll` that the node cannot take it raises
        `Refusal`; then nothing was sent.
        """
        ...


class NodeRank:
    """`node` is None until the node is ready, and again when it is gone. state: what decides about it; shared.

    see_trouble: changes it there. num_ranks: that this server has.
    """

    def __init__(
        self,
        dp_rank: int,
        port: NodePort,
        hosts: AllowedHosts,
        state: LiveRank,
        see_trouble: Callable[[str], None],
        num_ranks: int = 1,
    ) -> None:
        self.dp_rank = dp_rank
        self.number_among_several = dp_rank if num_ranks > 1 else None
        self.port = port
        self.node: wire.NodeReady | None = None
        self.state = state
        self._see_trouble = see_trouble
        self._query_ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[bytes]] = {}
        self._bootstraps = BootstrapClient(hosts, own=self._own_replica, report=self._report)

    @property
    def trouble(self) -> str:
        return self.state.trouble

    @trouble.setter
    def trouble(self, trouble: str) -> None:
        if trouble != self.state.trouble:
            self._see_trouble(trouble)

    def check_there(self) -> None:
        """Raises `Refusal` while there is no node."""
        if self.node is None:
            raise Refusal(Problem.NOT_READY, self.state.loss or LOADING)

    async def query(self, what: str, *, timeout: float = QUERY_SECONDS) -> bytes:
        """Ask the node for one of `wire.Query`'s documents (JSON). Raises `Refusal` when it does not answer."""
        self.check_there()
        query_id = next(self._query_ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = answer
        self.port.send(wire.Query(query_id, what))
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise Refusal(Problem.NODE_SILENT, f"the node did not answer within {timeout:g} s") from None
        finally:
            del self._queries[query_id]

    def receive(self, message: wire.Answer | commands.LearnPeer | commands.AskDpRank | wire.NodeReady) -> None:
        match message:
            case wire.Answer():
                answer = self._queries.get(message.id)
                if answer is not None and not answer.done():
                    answer.set_result(message.body)
            case commands.LearnPeer():
                self._bootstraps.learn(message.address, message.dp_rank)
            case commands.AskDpRank():
                self._bootstraps.ask_rank(message.address, message.room)
            case wire.NodeReady():
                self.node = message

    def lose(self, reason: str) -> None:
        """The node is gone. Its requests are ended by who owns them."""
        self.node = None
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(Refusal(Problem.NODE_SILENT, f"the node is gone: {reason}"))

    async def close(self) -> None:
        """End what runs on the event loop on behalf of this rank."""
        await self._bootstraps.close()

    def _report(self, news: wire.Connect | PeerLearned | PeerUnknown | DpRankAnswered) -> None:
        """Unless who asked is gone: the next life of the node, which is still loading, has no peers yet."""
        if self.node is not None:
            self.port.send(news)

    def _own_replica(self) -> wire.ReplicaInfo | None:
        return None if self.node is None else self.node.replica
