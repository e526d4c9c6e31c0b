"""Operators, probes and gateways: whoever asks for anything but tokens, and whoever asks wrongly.

Each visit goes to a drawn page of a drawn server, from that server's own machine, so that debug pages are among them.
A page may refuse; no page may answer with a mistake of its own. Visitors have no keys: where these are asked for, only
the pages of probes answer them.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any  # JSON documents

import msgspec

from tandem.core.values import SECOND
from tandem.membership import ClusterSecret
from tandem.server.api.cluster_auth import signed_write
from tandem.server.api.errors import Problem
from tandem.server.api.http_exchange import ExchangeError
from tandem.simulator.oracle import Violation
from tandem.simulator.whole.clients import simple
from tandem.simulator.whole.cluster import Server
from tandem.simulator.whole.network import Network
from tandem.simulator.whole.peer_checks import REMEMBERED_NS
from tandem.simulator.whole.sockets import Machine

PAGES = (
    *("/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/tandem/mini", "/v1/models/no"),
    *("/server_info", "/model_info", "/v1/loads", "/get_load", "/flush_cache", "/openapi.json", "/health_generate"),
    *("/debug/waits", "/debug/state", "/debug/faults", "/nowhere", "/generate", "/a/../b", "/%2e%2e/"),
)
VISIT_S = 5.0  # within which there is an answer, where nothing goes wrong
GENERATING = ("/health_generate", "/generate", "/v1/c")
OPEN = ("/health", "/ready", "/metrics")  # to everybody
TEXT = {"text": "How many? \u2603 1 + 2"}
WRITES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/tokenize", {"prompt": "What is 1 + 2?"}),
    ("POST", "/tokenize", {"messages": [{"role": "user", "content": "Hello"}]}),
    ("POST", "/tokenize", {"prompt": 5}),
    ("POST", "/detokenize", {"tokens": [20, 21, 300]}),
    ("POST", "/detokenize", {"tokens": [[20], [400, 401]]}),
    ("POST", "/abort_request", {"rid": "nobody"}),
    ("POST", "/abort_request", {}),
    ("PUT", "/debug/faults", {"force_retry_prob": 0.5}),
    ("PUT", "/debug/faults", {"failure_prob": 2}),
    ("POST", "/generate", {}),
    ("POST", "/generate", {**TEXT, "input_ids": [1]}),
    ("POST", "/generate", {**TEXT, "sampling_params": {"temperature": -1}}),
    ("POST", "/generate", {**TEXT, "sampling_params": {"max_new_tokens": 0}}),
    ("POST", "/generate", {"input_ids": [[20, 21], ["x"]]}),
    ("POST", "/generate", {"input_ids": [99_999]}),
    ("POST", "/generate", {**TEXT, "bootstrap_room": 5, "bootstrap_host": "evil.example"}),
    ("POST", "/generate", {**TEXT, "sampling_params": {"regex": "a+"}}),
    ("POST", "/v1/completions", {"prompt": "x", "model": "another"}),
    ("POST", "/v1/completions", {"prompt": "x", "suffix": "y"}),
    ("POST", "/v1/completions", {"prompt": "x", "logit_bias": {"20": 500}}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stop": ["\u2603", "zz"], "n": 2}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10**6}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}),
)
BOOTSTRAP: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/health", None),
    ("GET", "/route", None),
    ("GET", "/route?prefill_dp_rank=0", None),
    ("GET", "/route?prefill_dp_rank=9", None),
    ("GET", "/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1", None),
    ("GET", "/challenge", None),
    ("POST", "/query_dp_ranks", {"bootstrap_rooms": [1, "77", 5]}),
    ("POST", "/query_dp_ranks", {"bootstrap_rooms": "all"}),
    ("POST", "/register_dp_rank", {"bootstrap_room": 77, "dp_rank": 0}),
    ("PUT", "/route", {"role": "prefill"}),
)


@dataclass(slots=True)
class Visitor:
    """One process on a server's machine."""

    server: Server
    bootstrap_port: int  # 0: it has none
    secret: bytes
    random: Random
    codes: list[str]  # is told what it was refused with
    has_cause: Callable[[int, bool], bool]  # whether since then something has gone wrong
    has_keys: bool  # the server asks for them

    def run(self) -> None:
        with suppress(OSError):  # it has no descriptor left
            asyncio.run(self._visit())

    async def _visit(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            if self.bootstrap_port and self.random.random() < 0.4:
                await self._visit_bootstrap()
            elif self.random.random() < 0.5:
                await self._ask(self.server.port, "GET", self.random.choice(PAGES), None)
            else:
                await self._ask(self.server.port, *self.random.choice(WRITES))

    async def _visit_bootstrap(self) -> None:
        if self.random.random() < 0.3:
            await self._announce()
        else:
            await self._ask(self.bootstrap_port, *self.random.choice(BOOTSTRAP))

    async def _announce(self) -> None:
        """As a gateway that has chosen a rank: proves that it belongs to the cluster."""
        room = self.random.getrandbits(40)
        body = msgspec.json.encode({"bootstrap_room": room, "dp_rank": self.random.choice((0, 0, 7))})
        with suppress(OSError, ExchangeError):
            await signed_write(
                ClusterSecret(self.secret),
                "127.0.0.1",
                self.bootstrap_port,
                method="POST",
                target="/register_dp_rank",
                body=body,
            )

    async def _ask(self, port: int, method: str, path: str, body: Any) -> None:
        began_ns = Machine.kernel.now
        answer = await simple("127.0.0.1", port, method, path, body)
        is_queued = path.startswith(GENERATING)  # behind the requests of clients, where it is in order
        is_late = Machine.kernel.now - began_ns >= VISIT_S * SECOND
        if is_late and not is_queued and not self.has_cause(began_ns - REMEMBERED_NS, False):
            raise Violation("L10", f"{method} {path} {body} has no answer in {VISIT_S:g} s")
        if answer is None:
            if is_queued or self.has_cause(began_ns - REMEMBERED_NS, False):
                return  # it has given up
            raise Violation("no answer", f"{method} {path} {body} has none")
        code = (answer.error or {}).get("code")
        if self.has_keys and port == self.server.port and path not in OPEN and answer.status < 400:
            raise Violation("no key", f"{method} {path} {body} is answered without a key: {answer.status}")
        if code is not None:
            self.codes.append(f"code {code}")
        if code == Problem.INTERNAL or (answer.status == 500 and code is None):
            raise Violation("internal", f"{method} {path} {body}: {answer.status} {bytes(answer.body[:300])!r}")


@dataclass(slots=True)
class Stranger:
    """A process that dials a port that it has found, says a few bytes or none, and leaves."""

    network: Network
    host: str
    random: Random

    def run(self) -> None:
        there = [address for address in self.network.listening if address[0] == self.host]
        if not there:
            return
        host, port = self.random.choice(there)
        is_unix = isinstance(port, str)
        with suppress(OSError), socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET) as sock:
            sock.settimeout(2.0)
            sock.connect(port if is_unix else (host, port))
            if self.random.random() < 0.5:
                sock.send(self.random.randbytes(self.random.randint(1, 80)))
            time.sleep(self.random.random() * 4)
