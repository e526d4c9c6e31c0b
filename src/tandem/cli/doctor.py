"""`tandem doctor`: what this machine has, what is missing, and whether a pair answers on it. One line for each.

ok     nothing to do
note   it works; the line says what would be better
bad    it does not work; the line says what to do, and the exit code is 1
"""

import argparse
import json
import os
import platform
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from tandem import cgroups
from tandem.cli import demo
from tandem.cli.failure import CommandFailed
from tandem.cli.fleet import start_pd, temporary_fleet
from tandem.cli.model_source import BUNDLED, find_model
from tandem.config import ServerConfig
from tandem.membership import NoPlaceForSecret, SecretError, user_secret

OK, NOTE, BAD = "ok", "note", "bad"
PORTS = {30000: "tandem serve and tandem router", 8000: "tandem up", 8998: "a prefill's bootstrap server"}
FEW_FILES = 4096
LITTLE_BYTES = 2 << 30
QUESTION, ANSWER = "Calculate 9 * 13 + 48.", "#### 165"  # of the bundled model


@dataclass(frozen=True, slots=True)
class Finding:
    level: str
    name: str
    text: str

    def line(self) -> str:
        return f"{self.level:<5} {self.name:<11} {self.text}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Look at this machine, load a model, and have a pair of servers answer. Exit code 1: see bad."
    parser.add_argument("model", metavar="MODEL", nargs="?", default=BUNDLED, help=f"default: {BUNDLED}")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def run(args: argparse.Namespace) -> int:
    found: list[Finding] = []
    for finding in findings(args.model):
        found.append(finding)
        if not args.json:
            print(finding.line(), flush=True)
    num_bad = sum(finding.level == BAD for finding in found)
    if args.json:
        print(json.dumps({"ok": num_bad == 0, "findings": [asdict(finding) for finding in found]}))
    else:
        print("a pair works here" if not num_bad else f"{num_bad} to mend, see the lines that begin with bad")
    return 1 if num_bad else 0


def findings(model: str) -> Iterator[Finding]:
    """In the order in which one needs the other; a pair is tried only where all that it needs is there."""
    is_able = True
    for found in (system(), *engine(), open_files(), secret(), *map(port, PORTS), model_files(model)):
        is_able = is_able and found.level != BAD
        yield found
    if is_able:
        yield pair(model)


def system() -> Finding:
    text = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    if platform.system() != "Linux":
        return Finding(BAD, "system", f"{text}: servers need Linux (memfd, process groups); use a container")
    return Finding(OK, "system", text)


def engine() -> Iterator[Finding]:
    """Of torch only, where that cannot be imported."""
    try:
        from tandem.engine import machine_report
    except (ImportError, OSError) as error:  # OSError: a library that torch needs
        yield Finding(BAD, "torch", f"cannot be imported ({error}): pip install torch")
        return
    yield Finding(OK, "torch", machine_report.torch_text())
    yield processor(cgroups.num_cores(), machine_report.features_text())
    yield memory(machine_report.memory_bytes())
    if (complaint := machine_report.kernels_complaint()) is not None:
        yield Finding(BAD, "kernels", complaint)
        return
    kind, remedy = machine_report.kernels()
    yield Finding(NOTE, "kernels", f"{kind}: {remedy}") if remedy else Finding(OK, "kernels", kind)


def processor(cores: int, features: str) -> Finding:
    text = f"{cores} core{'s' * (cores != 1)}; {features}"
    if cores < 2:
        return Finding(NOTE, "processor", f"{text}: prefill and decode share it, so one stalls the other")
    return Finding(OK, "processor", text)


def memory(total_bytes: int) -> Finding:
    text = f"{total_bytes / (1 << 30):.1f} GiB for this process"
    if total_bytes < LITTLE_BYTES:
        return Finding(NOTE, "memory", f"{text}: little; give --max-total-tokens, or a larger limit of the container")
    return Finding(OK, "memory", text)


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FEW_FILES:
        remedy = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
        return Finding(NOTE, "open files", f"at most {soft}: a server of many connections needs more ({remedy})")
    return Finding(OK, "open files", f"at most {soft}")


def secret() -> Finding:
    try:
        user_secret(os.environ)
    except NoPlaceForSecret as error:
        return Finding(NOTE, "secret", f"{error}, or set XDG_STATE_HOME; `tandem up` and `tandem demo` make their own")
    except SecretError as error:
        return Finding(BAD, "secret", str(error))
    return Finding(OK, "secret", "servers of this user can prove to each other who they are")


def port(number: int) -> Finding:
    try:
        socket.create_server(("127.0.0.1", number)).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return Finding(NOTE, f"port {number}", f"{reason}: give {PORTS[number]} another --port")
    return Finding(OK, f"port {number}", f"free for {PORTS[number]}")


def model_files(name: str) -> Finding:
    from tandem.cli.serve import read_facts

    def text() -> str:
        facts = read_facts(find_model(name), ServerConfig(model=name))
        return f"{name}: {', '.join(facts.architectures)}, {facts.dtype}, {facts.context_length} tokens of context"

    return _or_bad("model", text)


def pair(model: str) -> Finding:
    """Router, prefill and decode server as processes, and one question through all of them."""
    return _or_bad("pair", lambda: _pair_text(model))


def _pair_text(model: str) -> str:
    began = time.monotonic()
    with temporary_fleet("doctor", engines=2) as fleet:
        router = start_pd(fleet, model, prefills=1, decodes=1, router_port=0)
        fleet.wait_ready()
        ready_s = time.monotonic() - began
        answer = demo.ask(router, demo.chat_prompt(fleet.members[0], QUESTION), demo.Screen(is_quiet=True))
    if answer.meta["path"] != "remote":
        raise CommandFailed(
            f"it answered by the path {answer.meta['path']}, not through both servers; see /debug/waits"
        )
    if model == BUNDLED and not answer.text.endswith(ANSWER):
        raise CommandFailed(f"{QUESTION!r} was answered with {answer.text[-40:]!r}: the engine computes wrongly here")
    return (
        f"router, prefill and decode were ready after {ready_s:.1f} s and answered through both; first token after "
        f"{answer.ttft_ms / 1000:.2f} s, {answer.meta['kv_bytes'] / 1024:.0f} KiB of KV moved"
    )


def _or_bad(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(OK, name, look())
    except (CommandFailed, OSError) as failure:  # OSError: a disk that is full, no process left to start
        return Finding(BAD, name, str(failure))
