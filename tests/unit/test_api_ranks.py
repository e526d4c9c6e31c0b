"""Several DP ranks behind one API: who gets a request, what a refusal or a loss leaves behind, what loads count."""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest
from api_fakes import REPLICA, FakeNode, Script

from tandem.core import commands, events
from tandem.core.request import Request
from tandem.core.settings import LoadBalanceMethod, PrefillInfo
from tandem.core.values import SECOND, Address, Cause, Nanos, RequestId, Room
from tandem.sampling import Payload, SamplingParams
from tandem.server import wire
from tandem.server.api.allowed_hosts import AllowedHosts
from tandem.server.api.client import Generation, NodeClient
from tandem.server.api.errors import Problem, Refusal
from tandem.server.api.live_requests import IncomingRequest, LiveRank
from tandem.server.api.node_rank import NodeRank


class Node(FakeNode):
    """Of one rank. Runs what it gets until it is told to end it; `refusal`: takes nothing."""

    def __init__(self, dp_rank: int, prefill: PrefillInfo) -> None:
        super().__init__(lambda request, payload: Script(is_silent=True), dp_rank=dp_rank)
        self.prefill = prefill
        self.refusal: Refusal | None = None
        self.asked: list[str] = []

    def send(self, message: wire.ApiToNode) -> None:
        if isinstance(message, wire.SubmitAll) and self.refusal is not None:
            raise self.refusal
        if isinstance(message, wire.Query):
            self.asked.append(message.what)
        super().send(message)

    def ready(self) -> None:
        replica = msgspec.structs.replace(REPLICA, dp_rank=self.dp_rank, prefill=self.prefill)
        self.tell(wire.NodeReady(replica, 10, 10))

    @property
    def ids(self) -> list[int]:
        return [submit.request.id for submit in self.submits]


class Ranks:
    """A client and its nodes, all ready."""

    def __init__(self, count: int = 2, method: LoadBalanceMethod = LoadBalanceMethod.ROUND_ROBIN) -> None:
        self.nodes = [Node(dp_rank, PrefillInfo(count, method)) for dp_rank in range(count)]
        self.announced: list[commands.AnnounceDpRank] = []  # in the bootstrap server of this prefill
        self.client = NodeClient(
            *self.nodes,
            stall_timeout=1.0,
            method=method,
            announce=self.announced.append,
        )
        for node in self.nodes:
            node.client = self.client
            node.ready()

    @property
    def loads(self) -> list[tuple[int, int]]:
        return [(rank.state.num_requests, rank.state.num_tokens) for rank in self.client.ranks]

    @contextmanager
    def running(self, *submits: wire.Submit, routed: Sequence[int | None] = ()) -> Iterator[Generation]:
        with self.client.running(submits, [(submit.request.rid,) for submit in submits], routed=routed) as generation:
            yield generation

    async def ask(self, *submits: wire.Submit, routed: Sequence[int | None] = ()) -> list[int]:
        """The ranks that got them; they go on running."""
        rows = zip(submits, routed or [None] * len(submits), strict=True)
        arrivals = [IncomingRequest(submit.request, (submit.request.rid,), dp_rank) for submit, dp_rank in rows]
        self.client._submit(submits, arrivals, Generation(), is_canary=False)
        return [self.rank_of(submit) for submit in submits]

    def rank_of(self, submit: wire.Submit) -> int:
        (found,) = [node.dp_rank for node in self.nodes if submit.request.id in node.ids]
        return found


def submit(number: int, *, prompt_len: int = 3, room: int | None = None) -> wire.Submit:
    found = None if room is None else Room(room)
    request = Request(RequestId(number), f"r{number}", prompt_len, (), 8, Nanos(60 * SECOND), room=found)
    return wire.Submit.of(request, Payload(number, array("i", [5] * prompt_len).tobytes(), SamplingParams(), b""))


async def ranks_for(ranks: Ranks, *submits: wire.Submit) -> list[int]:
    return [rank for one in submits for rank in await ranks.ask(one)]


def test_round_robin_takes_turns_and_passes_over_a_rank_in_trouble() -> None:
    async def story() -> None:
        ranks = Ranks(3)
        assert await ranks_for(ranks, *map(submit, range(1, 5))) == [0, 1, 2, 0]
        ranks.client.ranks[1].trouble = "the worker hangs"
        assert await ranks_for(ranks, *map(submit, range(5, 8))) == [2, 0, 2]
        assert ranks.client.is_healthy

    asyncio.run(story())


def test_a_probe_of_generation_takes_nobodys_turn() -> None:
    async def story() -> None:
        ranks = Ranks(3)
        assert await ranks_for(ranks, submit(1)) == [0]
        with ranks.client.running([submit(2)], [("probe",)], is_canary=True):
            assert await ranks_for(ranks, submit(3), submit(4)) == [1, 2]

    asyncio.run(story())


def test_a_request_goes_to_the_rank_with_the_fewest_requests_or_tokens() -> None:
    async def story() -> None:
        few = Ranks(2, LoadBalanceMethod.TOTAL_REQUESTS)
        assert await ranks_for(few, submit(1, prompt_len=90), submit(2), submit(3), submit(4)) == [0, 1, 0, 1]
        small = Ranks(2, LoadBalanceMethod.TOTAL_TOKENS)
        assert await ranks_for(small, submit(1, prompt_len=90), submit(2), submit(3), submit(4)) == [0, 1, 1, 1]

    asyncio.run(story())


def test_a_room_names_its_rank_and_without_a_room_nothing_does() -> None:
    async def story() -> None:
        ranks = Ranks(3, LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM)
        assert await ranks_for(ranks, submit(1, room=7), submit(2, room=9), submit(3, room=11)) == [1, 0, 2]
        with pytest.raises(Refusal, match="needs a bootstrap_room"):
            await ranks.ask(submit(4))
        assert ranks.client.num_live == 3

    asyncio.run(story())


@pytest.mark.parametrize("method", [method for method in LoadBalanceMethod if method is not LoadBalanceMethod.AUTO])
def test_the_rank_that_a_request_names_comes_before_every_method(method: LoadBalanceMethod) -> None:
    async def story() -> None:
        ranks = Ranks(3, method)
        for number in (1, 2, 3):
            assert await ranks.ask(submit(number, room=number + 6), routed=[2]) == [2]
        with pytest.raises(Refusal, match="routed_dp_rank 3 does not exist"):
            await ranks.ask(submit(4), routed=[3])
        ranks.client.ranks[2].trouble = "the worker hangs"
        with pytest.raises(Refusal, match="routed_dp_rank 2 is not active"):
            await ranks.ask(submit(5), routed=[2])

    asyncio.run(story())


def test_when_every_rank_is_in_trouble_each_still_gets_its_own() -> None:
    async def story() -> None:
        ranks = Ranks(2)
        for rank in ranks.client.ranks:
            rank.trouble = "the worker hangs"
        assert not ranks.client.is_healthy
        assert await ranks_for(ranks, submit(1), submit(2)) == [0, 1]

    asyncio.run(story())


def test_samples_that_one_rank_cannot_take_are_run_by_none() -> None:
    async def story() -> None:
        ranks = Ranks(2)
        first, second = ranks.nodes
        second.refusal = Refusal(Cause.QUEUE_FULL, "the channel is full")
        with (
            pytest.raises(Refusal, match="the channel is full"),
            ranks.running(submit(1, room=4), submit(2), submit(3, room=6), submit(4, room=8)),
        ):
            pass
        assert first.ids == [1, 3]
        declined = [
            events.RequestRefused(submit(number, room=room).request, Cause.QUEUE_FULL, "the channel is full")
            for number, room in ((1, 4), (3, 6), (4, 8))
        ]
        aborted = [events.AbortRequested(RequestId(number)) for number in (1, 3)]
        assert first.sent == [*aborted, *declined[:2]]
        assert second.sent == declined[2:], "each room is declined where it would have been"
        assert (ranks.client.num_live, ranks.loads) == (0, [(0, 0), (0, 0)])
        assert ranks.client.abort_named("r1") == 0
        second.refusal = None
        assert await ranks_for(ranks, submit(5), submit(6)) == [0, 1]

    asyncio.run(story())


def test_a_refused_request_with_a_room_is_declined_at_the_rank_that_would_have_had_it() -> None:
    async def story() -> None:
        ranks = Ranks(3, LoadBalanceMethod.FOLLOW_BOOTSTRAP_ROOM)
        ranks.client.drain()
        with pytest.raises(Refusal) as refused:
            await ranks.ask(submit(1, room=7), submit(2, room=8), submit(3), routed=[None, 0, None])
        assert refused.value.failure.code == Cause.DRAINING
        found = [[event for event in node.sent if isinstance(event, events.RequestRefused)] for node in ranks.nodes]
        assert [[event.request.room for event in of_rank] for of_rank in found] == [[8], [7], []]
        moved = commands.AnnounceDpRank(Room(8), 0, sought=2)
        assert ranks.announced == [moved], "decode, which looks on rank 2, finds who tells it; room 7 tells its rank"
        ranks.client.tell_elsewhere(moved)
        assert ranks.nodes[2].sent[-1] == events.RoomElsewhere(Room(8), 0)

    asyncio.run(story())


def test_the_loss_of_one_rank_ends_its_requests_only() -> None:
    async def story() -> None:
        ranks = Ranks(2)
        with ranks.running(submit(1), submit(2), submit(3)) as generation:
            ranks.client.receive(wire.Died("node", "a bug"), 1)
            (ended,) = await generation.changed()
            assert ended.request.id == 2
            assert isinstance(ended.ended, commands.FailRequest)
            assert (ended.ended.cause, ended.ended.detail) == (Cause.WORKER_LOST, "node: a bug")
            ranks.client.check_acceptable()
            assert (ranks.client.num_live, ranks.loads) == (2, [(2, 6), (0, 0)])
            assert await ranks.ask(submit(4)) == [0]
            with pytest.raises(Refusal, match="routed_dp_rank 1 is not active"):
                await ranks.ask(submit(5), routed=[1])
            ranks.nodes[1].ready()
            assert await ranks.ask(submit(6), routed=[1]) == [1]

    asyncio.run(story())


def test_who_looks_for_a_room_of_a_lost_rank_is_told_by_one_that_is_left() -> None:
    async def story() -> None:
        ranks = Ranks(2)
        await ranks.ask(submit(1, room=7), submit(2, room=8), submit(3), submit(4))
        ranks.client.receive(wire.Died("node", "a bug"), 1)
        (told,) = [event for event in ranks.nodes[0].sent if isinstance(event, events.RequestRefused)]
        assert (told.request.room, told.cause, told.detail) == (8, Cause.WORKER_LOST, "node: a bug")
        assert ranks.announced == [commands.AnnounceDpRank(Room(8), 0)]

        ranks.client.receive(wire.Died("node", "a bug"), 0)
        assert len(ranks.announced) == 1, "nobody is left who could tell"

    asyncio.run(story())


def test_loads_count_requests_and_tokens_and_return_to_zero() -> None:
    async def story() -> None:
        ranks = Ranks(2)
        with ranks.running(submit(1, prompt_len=5), submit(2), submit(3)) as generation:
            assert ranks.loads == [(2, 8), (1, 3)]
            tokens = array("i", [4, 4]).tobytes()
            ranks.nodes[0].tell(commands.EmitTokens((RequestId(1), RequestId(3)), tokens, ()))
            ranks.nodes[1].tell(commands.EmitTokens((RequestId(2),), array("i", [4]).tobytes(), ()))
            assert ranks.loads == [(2, 10), (1, 4)]
        while any(live.ended is None for live in generation.lives):
            await generation.changed()
        assert (ranks.client.num_live, ranks.loads) == (0, [(0, 0), (0, 0)])
        assert [node.sent for node in ranks.nodes] == [
            [events.AbortRequested(RequestId(1)), events.AbortRequested(RequestId(3))],
            [events.AbortRequested(RequestId(2))],
        ]

    asyncio.run(story())


def test_a_question_to_all_leaves_out_who_does_not_answer() -> None:
    async def story() -> None:
        ranks = Ranks(4)
        for node in ranks.nodes[:3]:
            node.answers["state"] = node.dp_rank
        ranks.client.receive(wire.Died("node", "a bug"), 0)
        assert await ranks.client.query_all("state", timeout=0.05) == {1: b"1", 2: b"2"}

    asyncio.run(story())


def test_what_concerns_the_whole_server_reaches_every_rank_once() -> None:
    async def story() -> None:
        ranks = Ranks(3)
        for node in ranks.nodes:
            node.answers["flush"] = {}
        assert await ranks_for(ranks, *map(submit, range(1, 5))) == [0, 1, 2, 0]
        await ranks.client.query_all("flush")
        assert [node.asked for node in ranks.nodes] == [["flush"]] * 3
        ranks.client.change_hooks(0.5, 0.25)
        assert ranks.client.abort_all() == 4
        assert [node.sent for node in ranks.nodes] == [
            [
                events.HooksChanged(0.5),
                wire.FailTransfers(0.25),
                *(events.AbortRequested(RequestId(n)) for n in numbers),
            ]
            for numbers in ((1, 4), (2,), (3,))
        ]

    asyncio.run(story())


def test_nothing_is_accepted_before_every_rank_has_been_ready_once() -> None:
    async def story() -> None:
        nodes = [Node(dp_rank, PrefillInfo(2)) for dp_rank in range(2)]
        client = NodeClient(*nodes, stall_timeout=1.0)
        for node in nodes:
            node.client = client
        nodes[0].ready()
        with pytest.raises(Refusal) as refused:
            client.check_acceptable()
        assert refused.value.failure.code == Problem.NOT_READY
        nodes[1].ready()
        client.check_acceptable()
        client.receive(wire.Died("node", "a bug"), 0)
        client.check_acceptable()

    asyncio.run(story())


def test_what_a_bootstrap_server_says_to_a_node_that_is_gone_is_not_told_to_the_one_that_loads() -> None:
    class Port:
        def __init__(self) -> None:
            self.told: list[wire.ApiToNode] = []
            self.send = self.told.append

    async def answered(*, is_lost: bool) -> list[wire.ApiToNode]:
        port, asked, says = Port(), asyncio.Event(), asyncio.Event()
        document = msgspec.json.encode(msgspec.structs.replace(REPLICA, shards=(wire.DataEndpoint("127.0.0.1", 6),)))

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await says.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(document) + document)
            writer.close()

        rank = NodeRank(0, port, AllowedHosts(), LiveRank(), lambda trouble: None)
        rank.receive(wire.NodeReady(REPLICA, 10, 10))
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            rank.receive(commands.LearnPeer(Address("127.0.0.1", server.sockets[0].getsockname()[1])))
            await asked.wait()
            if is_lost:
                rank.lose("a bug")
            says.set()
            async with asyncio.timeout(20):
                while rank._bootstraps._tasks:
                    await asyncio.sleep(0.001)
        await rank.close()
        return port.told

    assert asyncio.run(answered(is_lost=False))
    assert not asyncio.run(answered(is_lost=True))
