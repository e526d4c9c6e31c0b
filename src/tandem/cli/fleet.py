"""Several `tandem` processes on this machine as one thing: started together, watched, ended together.

For `tandem up`, `tandem demo`, `tandem doctor` and the tests. A member that fails to start ends all others, and the
line in which it says why is the line that the user sees. Should this process be killed, the kernel tells the members
to drain.
"""

import argparse
import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec

from tandem import kv_events_config
from tandem.cli.failure import WRONG_USAGE, CommandFailed
from tandem.cli.flags import add_flags
from tandem.cli.ports import free_ports
from tandem.membership import NoPlaceForSecret, SecretError, make_secret, user_secret
from tandem.programs import module_command
from tandem.server.processes import describe_exit, end_with_parent

START_S = 600.0  # until all are ready: a large model takes its time
POLL_S = 0.02
PROBE_S = 1.0
BACKLOG = 2048  # connections that wait for a router
ERROR_MARK = "tandem: error: "
LAST_BYTES = 1 << 16  # of a log, in which an error line is looked for
MAX_LOG_BYTES, KEPT_LOG_BYTES = 64 << 20, 16 << 20  # of a log that is longer, so much of its end stays


@dataclass(slots=True)
class Member:
    name: str
    command: tuple[str, ...]
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    listener: socket.socket | None = None  # which it inherits; ours, so that it stays when the member ends
    is_ready: bool = False
    life_at: int = 0  # where in its log this life begins

    @property
    def kind(self) -> str:
        """`prefill` of `prefill-0`."""
        return self.name.rpartition("-")[0] or self.name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cause_of_end(self) -> str | None:
        """The error line in its log, if it wrote one in this life."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.life_at, self.log.stat().st_size - LAST_BYTES))
                said = file.read(LAST_BYTES).decode(errors="replace")
        except FileNotFoundError:  # somebody has tidied up
            return None
        for line in reversed(said.splitlines()):
            if line.startswith(ERROR_MARK):
                return line.removeprefix(ERROR_MARK)
        return None

    def bound_log(self) -> None:
        """Who writes it appends, and goes on behind what is kept. A line that comes in between may be lost."""
        with contextlib.suppress(OSError):  # somebody has tidied up, or the disk is full
            if self.log.stat().st_size <= MAX_LOG_BYTES:
                return
            with self.log.open("r+b") as file:
                file.seek(-KEPT_LOG_BYTES, os.SEEK_END)
                file.readline()  # the rest of one
                cut = file.tell()
                kept = file.read(MAX_LOG_BYTES)
                file.truncate(0)
            self.life_at = max(0, self.life_at - cut)
            with self.log.open("ab") as file:
                file.write(kept)


@dataclass(slots=True)
class Fleet:
    """Use as a context: at the end nothing of it runs any more."""

    folder: Path  # for the members' logs
    engines: int  # that share this machine's cores
    needs_logs: bool = False  # something went wrong that only the logs explain
    members: list[Member] = field(default_factory=list)

    def start(self, name: str, words: Sequence[str], *, port: int) -> Member:
        """`tandem WORDS`, with its output in `folder`."""
        return self.start_program(name, self._tandem(words), port=port)

    def _tandem(self, words: Sequence[str]) -> tuple[str, ...]:
        return tuple(module_command("tandem.cli.main", *words))

    def start_router(self, words: Sequence[str], listener: socket.socket) -> Member:
        """`tandem WORDS` on a socket that stays open while the router starts anew."""
        words = (*words, "--fd", str(listener.fileno()))
        return self.start_program("router", self._tandem(words), port=listener.getsockname()[1], listener=listener)

    def start_program(
        self, name: str, command: Sequence[str], *, port: int, listener: socket.socket | None = None
    ) -> Member:
        """Any program that is to live and end with it, such as somebody else's gateway."""
        log = self.folder / f"{name}.log"
        log.unlink(missing_ok=True)
        member = Member(name, tuple(command), self._spawn(command, log, listener), port, log, listener)
        self.members.append(member)
        return member

    def restart(self, member: Member) -> None:
        """Another life of a member that has ended, on the same ports. Its log goes on."""
        assert member.process.poll() is not None
        member.is_ready = False
        member.life_at = member.log.stat().st_size if member.log.exists() else 0  # somebody has tidied up
        member.process = self._spawn(member.command, member.log, member.listener)

    def _spawn(self, command: Sequence[str], log: Path, listener: socket.socket | None) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TANDEM_ENGINES": str(self.engines)},
                pass_fds=() if listener is None else (listener.fileno(),),
                start_new_session=True,  # Ctrl+C is for us, and we drain them
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
            )

    def wait_ready(self, *, timeout_s: float = START_S, tell: Callable[[Member], None] = lambda member: None) -> None:
        """Until every member is ready; `tell` hears of each. Raises CommandFailed.

        Also where one that was ready has ended: others may wait for it.
        """
        deadline = time.monotonic() + timeout_s
        while waiting := [member for member in self.members if not member.is_ready]:
            for member in self.members:
                self.check_alive(member)
            for member in waiting:
                if is_ready(member.port):
                    member.is_ready = True
                    tell(member)
            if time.monotonic() > deadline:
                names = ", ".join(member.name for member in waiting)
                self.needs_logs = True
                raise CommandFailed(f"{names}: not ready after {timeout_s:.0f} s; logs are in {self.folder}")
            time.sleep(POLL_S)

    def check_alive(self, member: Member) -> None:
        """Raises CommandFailed when it has ended."""
        if member.process.poll() is None:
            return
        code = member.process.returncode
        if (cause := member.cause_of_end()) is not None:
            raise CommandFailed(f"{member.name}: {cause}", is_wrong_usage=code == WRONG_USAGE)
        self.needs_logs = True
        raise CommandFailed(f"{member.name} {describe_exit(code)}; its log is {member.log}")

    def stop(self, *, timeout_s: float = 10.0) -> bool:
        """Drain in the order of the requests' way, so that what is under way can finish; kill what does not end.

        Returns whether all have ended by themselves.
        """
        deadline = time.monotonic() + timeout_s
        for member in self.members:
            if member.listener is not None:
                member.listener.close()  # who connects from here on is refused, and does not wait
            if member.process.poll() is None:
                member.process.send_signal(signal.SIGTERM)
        for member in self.members:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill()
                return False
        return True

    def kill(self) -> None:
        for member in self.members:
            if member.process.poll() is None:
                member.process.kill()
            member.process.wait()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self.kill()


@contextlib.contextmanager
def temporary_fleet(name: str, *, engines: int) -> Iterator[Fleet]:
    """A fleet whose logs go with it, unless something went wrong that only they explain.

    SIGTERM and a terminal that is closed end it as Ctrl+C does: with KeyboardInterrupt.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    fleet = Fleet(folder_for_logs(name), engines)
    try:
        check_loopback()
        with fleet:
            yield fleet
    finally:
        if not fleet.needs_logs:
            shutil.rmtree(fleet.folder)


def folder_for_logs(name: str) -> Path:
    """A new one in the folder for temporary files. Raises CommandFailed."""
    try:
        return Path(tempfile.mkdtemp(prefix=f"tandem-{name}-"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandFailed(f"no folder for logs can be made ({reason}); have TMPDIR name one to write to") from None


def check_loopback() -> None:
    """Raises CommandFailed where nobody can connect to this machine: no member would ever be seen to be ready."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=PROBE_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandFailed(
            f"127.0.0.1 cannot be reached ({reason}), where the servers would listen; is the loopback device up "
            "(ip link set lo up)?"
        ) from None


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROBE_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def start_pd(
    fleet: Fleet,
    model: str,
    *,
    prefills: int,
    decodes: int,
    router_port: int | socket.socket,
    server_flags: Sequence[str] = (),
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
    router_flags: Sequence[str] = (),
    kv_events: str | None = None,
) -> Member:
    """Prefill and decode servers and the router in front of them; the router. None of them is ready yet.

    router_port: 0 picks a free one; or a socket that listens already. Raises CommandFailed when it is taken.
    kv_events: `--kv-events-config` of the first server; the others get the ports behind it, one per DP rank.
    """
    listener = listen(router_port) if isinstance(router_port, int) else router_port
    ports = iter(free_ports(2 * prefills + decodes))
    router = ["router", *router_flags]
    server_flags = [*secret_flags(fleet.folder), *server_flags]  # of two the last one counts
    told = KvEventsFlags(kv_events)
    for index in range(prefills):
        port, bootstrap = next(ports), next(ports)
        mode = ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(bootstrap)]
        flags = told.added_to([*mode, *server_flags, *prefill_flags])
        fleet.start(f"prefill-{index}", serve_words(model, port, *flags), port=port)
        router += ["--prefill", f"http://127.0.0.1:{port}", str(bootstrap)]
    for index in range(decodes):
        port = next(ports)
        flags = told.added_to(["--disaggregation-mode", "decode", *server_flags, *decode_flags])
        fleet.start(f"decode-{index}", serve_words(model, port, *flags), port=port)
        router += ["--decode", f"http://127.0.0.1:{port}"]
    return fleet.start_router(router, listener)


def secret_flags(folder: Path) -> list[str]:
    """Where this user has no place for a secret, as many in containers have none: one that goes with the fleet.

    What is wrong with a secret that is there the servers say.
    """
    try:
        user_secret(os.environ)
    except NoPlaceForSecret:
        make_secret(folder / "cluster-secret")
        return ["--cluster-secret-file", str(folder / "cluster-secret")]
    except SecretError:
        pass
    return []


@dataclass(slots=True)
class KvEventsFlags:
    """`--kv-events-config` for one server after the other, so that no two publish at one port."""

    first: str | None  # None: nobody publishes
    ranks: int = 0  # of the servers so far

    def added_to(self, flags: Sequence[str]) -> list[str]:
        """Raises CommandFailed."""
        if self.first is None:
            return list(flags)
        try:
            config = kv_events_config.shifted(kv_events_config.read(self.first), self.ranks)
        except ValueError as error:
            raise CommandFailed(f"--kv-events-config: {error}", is_wrong_usage=True) from None
        self.ranks += server_flags_of(flags).dp_size
        return [*flags, "--kv-events-config", msgspec.json.encode(config).decode()]


def server_flags_of(flags: Sequence[str]) -> argparse.Namespace:
    """As `tandem serve` reads them; what is wrong with them it says itself."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    add_flags(parser)
    try:
        return parser.parse_known_args(flags)[0]
    except argparse.ArgumentError:
        return parser.parse_args([])


def listen(port: int) -> socket.socket:
    """Raises CommandFailed when the port is taken, or none."""
    if not 0 <= port < 1 << 16:
        raise CommandFailed("--port takes 0 to 65535", is_wrong_usage=True)
    try:
        return socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise CommandFailed(f"cannot listen on 127.0.0.1:{port}: {reason}; use another --port") from None


def serve_words(model: str, port: int, *flags: str) -> list[str]:
    return ["serve", model, "--port", str(port), *flags]
