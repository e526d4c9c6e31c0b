"""Servers for the tests: real processes on free loopback ports, ended whatever happens, logs shown when a test fails.

    with cluster(prefills=1, decodes=1, unified=True) as it:
        it.router.generate(tokens)

A module starts one cluster and shares it among its tests where it can: a start costs seconds of processor time.
"""

import http.client
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # JSON documents

from tandem.cli.demo import events
from tandem.cli.failure import CommandFailed
from tandem.cli.fleet import Fleet, Member, serve_words, start_pd
from tandem.cli.ports import free_ports

MODEL = "tandem/mini"
START_S = 90.0
REPLY_S = 30.0


class HttpError(Exception):
    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.body = body

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


@dataclass
class Server:
    """What a test asks of one member."""

    member: Member
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return self.member.url

    @property
    def log(self) -> str:
        return self.member.log.read_text(errors="replace")

    def open(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """The reply's head is here, its body not. Closing the reply closes the connection."""
        connection = http.client.HTTPConnection(self.host, self.member.port, timeout=REPLY_S)
        text = None if body is None else json.dumps(body)
        own = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, text, own | dict(headers or {}))
        return connection.getresponse()

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The JSON reply. Raises HttpError when it is not a 200."""
        with self.open(method, path, body) as reply:
            data = reply.read()
            if reply.status != 200:
                raise HttpError(reply.status, data)
            return json.loads(data)

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def generate(self, prompt: Sequence[int] | str, *, max_new_tokens: int = 32, **fields: Any) -> dict[str, Any]:
        """Greedy unless `sampling_params` say otherwise: `text`, `output_ids`, `meta_info`."""
        reply: dict[str, Any] = self.call("POST", "/generate", generate_body(prompt, max_new_tokens, **fields))
        return reply

    def stream(self, prompt: Sequence[int] | str, *, max_new_tokens: int = 32, **fields: Any) -> "Stream":
        """Starts; read from it or close it."""
        body = generate_body(prompt, max_new_tokens, **fields) | {"stream": True}
        return Stream(self.open("POST", "/generate", body))

    def open_stream(self, prompt: Sequence[int] | str, **fields: Any) -> http.client.HTTPConnection:
        """Send the request and wait for nothing: the head may come late, or never."""
        connection = http.client.HTTPConnection(self.host, self.member.port, timeout=REPLY_S)
        body = json.dumps(generate_body(prompt, 32, **fields) | {"stream": True})
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        return connection

    def is_ready(self) -> bool:
        try:
            with self.open("GET", "/ready") as reply:
                return reply.status == 200
        except OSError:
            return False

    def metric(self, *parts: str) -> float:
        """Of all lines of /metrics that have all of `parts`, the sum."""
        with self.open("GET", "/metrics") as reply:
            lines = reply.read().decode().splitlines()
        found = [line for line in lines if not line.startswith("#") and all(part in line for part in parts)]
        assert found, f"no line has {parts}"
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def live_workers(self) -> list[str]:
        """Of a router: its lines of metrics about those that it sends requests to."""
        with self.open("GET", "/metrics") as reply:
            lines = reply.read().decode().splitlines()
        return [line for line in lines if line.startswith("tandem:router_worker_live{") and line.endswith(" 1.0")]

    def state(self) -> dict[str, Any]:
        """Of the only DP rank."""
        (found,) = self.states()
        return found

    def states(self) -> list[dict[str, Any]]:
        """Of every DP rank that is there."""
        found: Any = self.get("/debug/state")
        return found if isinstance(found, list) else [found]

    def is_idle(self) -> bool:
        """No request, and nothing that only requests have: pages neither free nor cached, pins, rooms, result slots."""
        return all(map(is_idle, self.states()))


def is_idle(state: Mapping[str, Any]) -> bool:
    """What one node says of itself."""
    pages, rows = state["pages"], state["result_slots"]
    held = pages["owned"] + pages["quarantined"] + state["pages_pinned_by_tree"] + state["rooms"]
    return not any(state["queues"].values()) and held == 0 and rows["free"] == rows["total"]


@dataclass
class Stream:
    """A streamed answer under way."""

    reply: http.client.HTTPResponse
    _events: Iterator[dict[str, Any]] | None = None

    def next(self) -> dict[str, Any] | None:
        """The next event; None at the end."""
        if self._events is None:
            self._events = events(self.reply)
        return next(self._events, None)

    def rest(self) -> list[dict[str, Any]]:
        found = []
        while (event := self.next()) is not None:
            found.append(event)
        return found

    def close(self) -> None:
        """As a client that leaves."""
        self.reply.close()


def generate_body(prompt: Sequence[int] | str, max_new_tokens: int, **fields: Any) -> dict[str, Any]:
    asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens} | fields.pop("sampling_params", {})
    return {**asked, "sampling_params": sampling, **fields}


@dataclass
class Cluster:
    fleet: Fleet
    prefills: list[Server] = field(default_factory=list)
    decodes: list[Server] = field(default_factory=list)
    router: Server | None = None
    unified: Server | None = None

    @property
    def servers(self) -> list[Server]:
        return [*self.prefills, *self.decodes, *([self.unified] if self.unified else [])]

    def is_known(self) -> bool:
        """The router sends requests to every prefill and every decode."""
        assert self.router is not None
        return len(self.router.live_workers()) == len(self.prefills) + len(self.decodes)


@contextmanager
def cluster(
    *,
    prefills: int = 0,
    decodes: int = 0,
    unified: bool = False,
    model: str = MODEL,
    flags: Sequence[str] = (),
    **more_flags: Sequence[str],
) -> Iterator[Cluster]:
    """Ready when entered. `flags` are for every server; `unified_`, `prefill_`, ... `router_flags` for one kind."""
    with tempfile.TemporaryDirectory(prefix="tandem-test-") as folder:
        fleet = Fleet(Path(folder), engines=prefills + decodes + unified)
        try:
            with fleet:
                found = _start(fleet, model, prefills, decodes, unified, flags, more_flags)
                fleet.wait_ready(timeout_s=START_S)
                # A router is ready with one of each kind; who counts on the others waits for them.
                if found.router is not None:
                    eventually(found.is_known, what=found.router.live_workers)
                yield found
        except (Exception, CommandFailed):
            show_logs(fleet)
            raise


SECRET = b"a secret of the whole cluster"


def secret_flags(folder: Path) -> tuple[str, str]:
    """For servers of one cluster that listen elsewhere than on loopback."""
    path = folder / "cluster-secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return ("--cluster-secret-file", str(path))


@contextmanager
def halves(
    folder: Path,
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
    *,
    prefill_host: str = "127.0.0.1",
    decode_model: str = MODEL,
) -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode with flags of their own and nobody in front of them, ready."""
    fleet = Fleet(folder, engines=2)
    with fleet:
        prefill = start_half(fleet, "prefill", prefill_flags)
        decode = start_half(fleet, "decode", decode_flags, model=decode_model)
        found = Server(prefill, prefill_host), Server(decode)
        try:
            for server in found:
                eventually(server.is_ready, within_s=START_S, what=lambda: [member.name for member in fleet.members])
            yield found
        except BaseException:
            show_logs(fleet)
            raise


def start_half(fleet: Fleet, mode: str, flags: Sequence[str], *, model: str = MODEL, name: str = "") -> Member:
    """A prefill or a decode on ports of its own; not ready yet."""
    port, bootstrap = free_ports(2)
    words = ["--disaggregation-mode", mode]
    if mode == "prefill":
        words += ["--disaggregation-bootstrap-port", str(bootstrap)]
    return fleet.start(name or mode, serve_words(model, port, *words, *flags), port=port)


def bootstrap_port(prefill: Server) -> int:
    return int(prefill.get("/server_info")["disaggregation_bootstrap_port"])


def _start(
    fleet: Fleet,
    model: str,
    prefills: int,
    decodes: int,
    unified: bool,
    flags: Sequence[str],
    more_flags: Mapping[str, Sequence[str]],
) -> Cluster:
    found = Cluster(fleet)
    router_port, unified_port = free_ports(2)
    if prefills:
        router = start_pd(
            fleet,
            model,
            prefills=prefills,
            decodes=decodes,
            router_port=router_port,
            server_flags=flags,
            prefill_flags=more_flags.get("prefill_flags", ()),
            decode_flags=more_flags.get("decode_flags", ()),
            router_flags=more_flags.get("router_flags", ()),
        )
        found.router = Server(router)
        found.prefills = [Server(member) for member in fleet.members if member.name.startswith("prefill")]
        found.decodes = [Server(member) for member in fleet.members if member.name.startswith("decode")]
    if unified:
        words = serve_words(model, unified_port, *flags, *more_flags.get("unified_flags", ()))
        found.unified = Server(fleet.start("unified", words, port=unified_port))
    return found


def show_logs(fleet: Fleet) -> None:
    """The end of every log, for whoever reads a failed test."""
    for member in fleet.members:
        lines = member.log.read_text(errors="replace").splitlines()
        print(f"--- {member.name} (exit code {member.process.poll()})", *lines[-40:], sep="\n", file=sys.stderr)


def eventually(condition: Callable[[], object], *, within_s: float = 20.0, what: Callable[[], object] = str) -> None:
    """Wait for a condition; `what` is printed when it does not come true."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what()}")
        time.sleep(0.01)


def children_of(process_id: int) -> list[int]:
    """Ids of the direct children that run."""
    text = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
    return [int(word) for word in text.split()]


def child_named(process_id: int, module: str) -> int:
    """The child that runs `tandem.server.<module>`; of several the first."""
    return children_named(process_id, module)[0]


def children_named(process_id: int, module: str) -> list[int]:
    """The children that run `tandem.server.<module>`; at least one."""
    found = _running(process_id, module)
    assert found, f"no child runs {module}"
    return found


def workers_of(server: Server) -> list[int]:
    """Processes, in the order in which they were started: by DP rank, those of one in order of their shards."""
    return _running(server.member.process.pid, "worker_process")


def _running(process_id: int, module: str) -> list[int]:
    children = children_of(process_id)
    return [child for child in children if f"tandem.server.{module}" in Path(f"/proc/{child}/cmdline").read_text()]


@contextmanager
def frozen(server: Server, module: str) -> Iterator[None]:
    with stopped(child_named(server.member.process.pid, module)):
        yield


@contextmanager
def failing(*servers: Server, prob: float) -> Iterator[None]:
    """This share of transfers, one draw for each worker."""
    for server in servers:
        server.call("PUT", "/debug/faults", {"disagg_failure_prob": prob})
    try:
        yield
    finally:
        for server in servers:
            server.call("PUT", "/debug/faults", {"disagg_failure_prob": 0})


@contextmanager
def stopped(process: int) -> Iterator[None]:
    """All of its threads: on a busy machine the signal is heard later than what is said to the process after it."""
    os.kill(process, signal.SIGSTOP)
    try:
        eventually(lambda: states_of_threads(process) == {"T"}, within_s=5.0)
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def states_of_threads(process_id: int) -> set[str]:
    stats = [path.read_text() for path in Path(f"/proc/{process_id}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
