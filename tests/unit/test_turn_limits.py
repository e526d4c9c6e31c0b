"""A burst is taken on a little in each turn of the event loop; who is refused, or probes, does not stand behind it."""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable

from starlette.types import Message, Receive, Scope, Send

from tandem.server.api.http1 import ACCEPTS_PER_TURN, Http1, uvicorn_config
from tandem.server.api.turn_limits import REQUESTS_PER_TURN, TurnMiddleware, TurnServer

BURST = 20 * ACCEPTS_PER_TURN


class Turns:
    """Numbers the turns of the running loop."""

    def __init__(self) -> None:
        self.number = 0
        self._tick()

    def _tick(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._tick)


async def nothing() -> Message:
    raise AssertionError("nobody reads")


async def nowhere(message: Message) -> None:
    raise AssertionError("nobody writes")


def asked(app: TurnMiddleware, path: str, number: int) -> asyncio.Task[None]:
    scope: Scope = {"type": "http", "path": path, "number": number}

    async def story() -> None:
        await app(scope, nothing, nowhere)

    return asyncio.create_task(story())


def begun(story: Callable[[TurnMiddleware], list[asyncio.Task[None]]]) -> list[tuple[int, int]]:
    """(turn, number) of what has begun, in its order."""
    found: list[tuple[int, int]] = []

    async def main() -> None:
        turns = Turns()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            found.append((turns.number, scope["number"]))

        await asyncio.gather(*story(TurnMiddleware(app)), return_exceptions=True)

    asyncio.run(main())
    return found


def test_a_turn_begins_a_few_requests_in_their_order() -> None:
    found = begun(lambda app: [asked(app, "/generate", number) for number in range(BURST)])
    assert [number for _, number in found] == list(range(BURST))
    assert max(Counter(turn for turn, _ in found).values()) <= REQUESTS_PER_TURN


def test_probes_do_not_stand_behind_them() -> None:
    def story(app: TurnMiddleware) -> list[asyncio.Task[None]]:
        return [*(asked(app, "/generate", number) for number in range(BURST)), asked(app, "/health", -1)]

    found = begun(story)
    assert found.index((found[0][0], -1)) <= REQUESTS_PER_TURN


def test_who_leaves_while_it_waits_takes_nobodys_turn() -> None:
    def story(app: TurnMiddleware) -> list[asyncio.Task[None]]:
        tasks = [asked(app, "/generate", number) for number in range(BURST)]
        asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in tasks[REQUESTS_PER_TURN:-1]])
        return tasks

    assert [number for _, number in begun(story)] == [*range(REQUESTS_PER_TURN), BURST - 1]


def test_a_turn_accepts_a_few_connections_and_the_kernel_keeps_the_others() -> None:
    async def main() -> Counter[int]:
        accepted: Counter[int] = Counter()

        class Counting(Http1):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
                super().connection_made(transport)
                accepted[turns.number] += 1

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            raise AssertionError("nobody asks")

        config = uvicorn_config(app, drain_seconds=1, http=Counting)
        config.load()
        server = TurnServer(config)
        server.lifespan = config.lifespan_class(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await server.startup(sockets=[listener])
            address = listener.getsockname()
            clients = [socket.create_connection(address, timeout=20) for _ in range(10 * ACCEPTS_PER_TURN)]
            turns = Turns()
            async with asyncio.timeout(20):
                while accepted.total() < len(clients):
                    await asyncio.sleep(0)
            for client in clients:
                client.close()
            for one in server.servers:
                one.close()
        return accepted

    # Python 3.12 and later accept one more than they were told.
    assert max(asyncio.run(main()).values()) <= ACCEPTS_PER_TURN + 1
