"""Hostile HTTP: to the router, to the servers themselves, and to the bootstrap servers of prefills.

Each of them has to be refused, with a 4xx or because the fleet is busy with its faults; the router shows no page that
only the machine's own people may see.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from arena import Arena
from attacks import Attack, Attacks
from proxy import LOOPBACK

HUGE = 10**30
HOLD_S = 4.0
ANSWER_S = 15.0
INSIDE = (b'"queues"', b'"result_slots"', b'"waiting_for"')  # of the debug pages
TRAVERSALS = (
    b"/v1/models/../../debug/state",
    b"/v1/models/..%2f..%2fdebug/state",
    b"/v1/models/%2e%2e/%2e%2e/debug/waits",
    b"/v1/models//../..//debug/state",
    b"/v1/models/../../debug/state?x=1",
    b"/v1/models/../../flush_cache",
    b"/debug/state",
    b"/debug/faults",
    b"//debug/state",
)
PROMPT = [300, 301, 302, 303]
BODIES: tuple[dict[str, Any], ...] = (
    {"priority": HUGE},
    {"priority": -HUGE},
    {"timeout": -1},
    {"rid": "a" * 100_000},
    {"sampling_params": {"max_new_tokens": HUGE}},
    {"sampling_params": {"sampling_seed": HUGE}},
    {"sampling_params": {"top_k": HUGE}},
    {"sampling_params": {"stop_token_ids": [HUGE]}},
    {"sampling_params": {"logit_bias": {str(HUGE): 1}}},
    {"sampling_params": {"n": HUGE}},
    {"input_ids": [HUGE]},
    {"input_ids": [-1]},
    {"input_ids": [[]]},
    {"bootstrap_room": HUGE},
    {"bootstrap_port": HUGE},
    {"bootstrap_host": "169.254.169.254"},
    {"routed_dp_rank": HUGE},
    {"disagg_prefill_dp_rank": HUGE},
)
OF_THE_ROUTER = ("bootstrap_room", "bootstrap_port", "bootstrap_host")  # it puts its own in their place
REFUSED = range(400, 500)
BUSY = (502, 503, 504)


class HttpAttacks:
    def __init__(self, it: Arena, attacks: Attacks) -> None:
        self._it, self._attacks = it, attacks
        self._random = attacks.random

    def kinds(self) -> Mapping[str, Attack]:
        return {
            "huge numbers": self.huge_numbers,
            "half a list": self.half_a_list,
            "half a body": self.half_a_body,
            "traversal": self.traversal,
            "unsigned write": self.unsigned_write,
        }

    async def _send(
        self, port: int, method: bytes, target: bytes, body: bytes = b"", *headers: bytes
    ) -> tuple[int, bytes]:
        """Status and what followed; 0 when nobody answers."""
        lines = [method + b" " + target + b" HTTP/1.1", b"host: 127.0.0.1", b"connection: close", *headers]
        lines += [b"content-type: application/json", b"content-length: %d" % len(body)]
        async with self._attacks.connection(port) as (reader, writer), asyncio.timeout(ANSWER_S):
            writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            answer = await reader.read(-1)
        head, _, rest = answer.partition(b"\r\n\r\n")
        words = head.split(b" ", 2)
        return (int(words[1]) if len(words) > 2 and words[1].isdigit() else 0), rest

    async def _refused(self, kind: str, port: int, document: dict[str, Any]) -> None:
        status, said = await self._send(port, b"POST", b"/generate", json.dumps(document).encode())
        if status and status not in REFUSED and status not in BUSY:
            self._attacks.violate(kind, f"{str(document)[:200]} was answered {status}: {said[:200]!r}")

    def _body(self, changes: dict[str, Any]) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 4, **changes.get("sampling_params", {})}
        return {"input_ids": PROMPT, "timeout": 5.0, **changes, "sampling_params": sampling}

    async def huge_numbers(self) -> None:
        """All of them at the router, and at one decode with a pair that fits."""
        router, decode = self._it.router_server, self._random.choice(self._it.of("decode"))
        pair = {"bootstrap_host": LOOPBACK, "bootstrap_port": self._it.routes[0].port}
        for changes in self._random.sample(BODIES, 6):
            body = self._body(changes)
            if not changes.keys() & set(OF_THE_ROUTER):
                await self._refused("huge numbers", router.member.port, body)
            room = {"bootstrap_room": self._random.getrandbits(62) | 1}
            await self._refused("huge numbers", decode.server.member.port, {**room, **pair, **body})

    async def half_a_list(self) -> None:
        """Of two prompts the second cannot be: the first must not run on with nobody to wait for it."""
        prompts = {"input_ids": [PROMPT, PROMPT], "disagg_prefill_dp_rank": [0, HUGE]}
        body = self._body(prompts)
        await self._refused("half a list", self._it.router_server.member.port, body)
        pair = {"bootstrap_host": [LOOPBACK] * 2, "bootstrap_port": [self._it.routes[0].port] * 2}
        rooms = {"bootstrap_room": [self._random.getrandbits(62) | 1 for _ in range(2)]}
        for target in self._it.targets:
            await self._refused("half a list", target.server.member.port, {**body, **pair, **rooms})

    async def half_a_body(self) -> None:
        """Some leave in the middle, some just stop."""
        ports = [self._it.router_server.member.port, *(target.server.member.port for target in self._it.targets)]
        head = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n{"
        talks = [
            self._attacks.talk("half a body", port, head, hold_s=self._random.choice((0.0, HOLD_S)))
            for port in ports
            for _ in range(4)
        ]
        await self._attacks.together(talks)

    async def traversal(self) -> None:
        port = self._it.router_server.member.port
        for target in TRAVERSALS:
            headers = self._random.choice(((), (b"x-forwarded-for: 127.0.0.1",), (b"x-forwarded-proto: https",)))
            status, said = await self._send(port, b"GET", target, b"", *headers)
            if status == 200 or any(word in said for word in INSIDE):
                self._attacks.violate("traversal", f"{target!r} through the router: {status} {said[:200]!r}")

    async def unsigned_write(self) -> None:
        """Into a prefill's own bootstrap server: another life of it, with endpoints of ours."""
        for route in self._it.routes:
            documents = [json.dumps(document) for document in self._it.known_documents()]
            changed = json.loads(self._random.choice(documents)) if documents else {}
            changed["incarnation"] = {"name": "attacker", "id": f"{self._random.getrandbits(128):032x}"}
            await self._write(route.target_port, b"PUT", b"/route", changed)
            room = {"bootstrap_room": self._random.getrandbits(62), "dp_rank": 0}
            await self._write(route.target_port, b"POST", b"/register_dp_rank", room)

    async def _write(self, port: int, method: bytes, target: bytes, document: dict[str, Any]) -> None:
        status, said = await self._send(port, method, target, json.dumps(document).encode())
        if status not in (0, 401, *BUSY):
            self._attacks.violate("unsigned write", f"{target!r} was answered {status}: {said[:200]!r}")
