"""`make clients`: programs of other people against our servers, each in its own environment with pinned versions.

Starts a pair behind our router, one engine alone to compare with, and a pair of four DP ranks, or one that publishes
its KV events and may be killed, where a program wants them; runs the programs of `table.py` one after the other and
prints a table. The exit code is 1 when one of them fails or cannot be installed. `--page FILE` also writes the table as
Markdown, each row with its date; rows of programs that were not run stay as they stand there.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from bench.peers import peers  # noqa: E402
from table import NOT_RUN, PINNED_ON, PROGRAMS, Program  # noqa: E402

from tandem.cli.fleet import Fleet, serve_words, start_pd, temporary_fleet  # noqa: E402
from tandem.cli.model_source import BUNDLED, find_model  # noqa: E402
from tandem.cli.ports import free_ports  # noqa: E402

ENVIRONMENTS, PEER_ENVIRONMENTS = ROOT / ".venv-clients", ROOT / ".venv-peers"
INSTALL_S, RUN_S, START_S = 900.0, 600.0, 120.0
PAUSES_S = (5.0, 10.0)  # between attempts to install one
AT_ONCE = 2  # environments that are made
TAIL_CHARS = 3000
# Only root may ask for the list of packages, which a small system does not have.
UNPACK = """set -e
cd "$0"
if [ "$(id -u)" = 0 ]; then apt-get -q update; fi
apt-get -q download "$@"
for file in *.deb; do dpkg-deb -x "$file" .; rm "$file"; done"""
NUM_RANKS = 4  # of each side, where a program wants ranks: it and the rooms agree one time in four


@dataclass(frozen=True)
class Outcome:
    program: Program
    shown: str  # what it says it has shown
    failure: str = ""
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make clients")
    parser.add_argument("names", nargs="*", help="of programs (default: all)")
    parser.add_argument("--page", type=Path, help="write the table to this file, too")
    args = parser.parse_args()
    known = {program.name: program for program in PROGRAMS}
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"unknown {', '.join(unknown)}; known are {', '.join(known)}")
    outcomes: list[Outcome] = []
    for outcome in run_all([known[name] for name in args.names] or list(PROGRAMS)):
        outcomes.append(outcome)
        print(
            f"{'FAILED' if outcome.failure else 'ok':<7} {outcome.program.name:<18} {outcome.seconds:4.0f} s  ", end=""
        )
        print(outcome.failure or outcome.shown, flush=True)
    if args.page:
        args.page.write_text(page(outcomes, rows_of(args.page.read_text()) if args.page.exists() else {}))
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def run_all(programs: list[Program]) -> Iterator[Outcome]:
    """Environments first, so that nothing serves while compilers and disks are busy."""
    failures = install_all(programs)
    for kind in ("pair", "ranks", "events"):
        wanted = [program for program in programs if program.servers == kind]
        if wanted:
            with servers(kind) as environment:
                for program in wanted:
                    failure = failures[program.folder]
                    yield Outcome(program, "", failure) if failure else run(program, environment)


def install_all(programs: list[Program]) -> dict[str, str]:
    """By environment, why it could not be. Two at once: each waits for the network, then for the disk or a core."""
    by_folder = {program.folder: program for program in programs if not program.peer}
    failures = {program.folder: install_peer(program) for program in programs if program.peer}
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return failures | dict(zip(by_folder, threads.map(install, by_folder.values()), strict=True))


def install_peer(program: Program) -> str:
    """As `install`, by what `bench/peers` knows of it."""
    try:
        peers.install(peer_of(program), PEER_ENVIRONMENTS)
    except peers.NotInstalled as error:
        return f"it cannot be installed: {error}"
    return ""


def peer_of(program: Program) -> peers.Peer:
    (found,) = (peer for peer in peers.PEERS if peer.name == program.peer)
    return found


def python_of(program: Program) -> Path:
    """Of its environment, which is there."""
    if program.peer:
        return peers.install(peer_of(program), PEER_ENVIRONMENTS)
    if program.npm or program.debian:
        return Path(sys.executable)  # what starts it needs nothing
    return ENVIRONMENTS / program.folder / "bin" / "python"


def install(program: Program) -> str:
    """Why it could not be; empty: it is there, as pinned. An index that hiccups gets three chances."""
    folder = ENVIRONMENTS / program.folder
    done_file, wanted = folder / ".installed", "\n".join(sorted(program.needs))
    if done_file.exists() and done_file.read_text() == wanted:
        return ""
    print(f"installing {', '.join(program.needs)}", flush=True)
    until = time.monotonic() + INSTALL_S
    failure = install_once(program, folder, until)
    for pause_s in PAUSES_S:
        if not failure or time.monotonic() + pause_s > until:
            break
        time.sleep(pause_s)
        failure = install_once(program, folder, until)
    if not failure:
        done_file.write_text(wanted)
    return failure


def install_once(program: Program, folder: Path, until: float) -> str:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    commands = [[sys.executable, "-m", "venv", "--clear", str(folder)], [*pip, "install", *program.needs]]
    if program.npm:
        npm = shutil.which("npm")
        if npm is None:
            return "it cannot be installed: npm is not there"
        commands = [[npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", *program.needs]]
        folder.mkdir(parents=True, exist_ok=True)
    if program.debian:
        folder.mkdir(parents=True, exist_ok=True)
        commands = [["bash", "-c", UNPACK, str(folder), *program.needs]]
    for command in commands:
        try:
            left_s = max(0.0, until - time.monotonic())
            done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
        except subprocess.TimeoutExpired:
            return f"it could not be installed in {INSTALL_S:.0f} s"
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.lower().startswith(("error", "npm error"))]
            return f"it cannot be installed: {' '.join(lines)[:300] or done.stderr[-300:]}"
    return ""


@contextmanager
def servers(kind: str) -> Iterator[dict[str, str]]:
    """The variables that `programs/_shared.py` reads, while they run."""
    flags = ["--dp-size", str(NUM_RANKS)] if kind == "ranks" else []
    with temporary_fleet("clients", engines=3) as fleet:
        (port,) = free_ports(1)
        events = [
            {"endpoint": f"ipc://{fleet.folder}/{name}", "replay_endpoint": f"ipc://{fleet.folder}/{name}-again"}
            for name in ("pair", "unified")
        ]
        pairs, units = (json.dumps(it) if kind == "events" else None for it in events)
        router = start_pd(fleet, BUNDLED, prefills=1, decodes=1, router_port=0, server_flags=flags, kv_events=pairs)
        words = serve_words(BUNDLED, port, *([] if units is None else ["--kv-events-config", units]))
        unified = fleet.start("unified", words, port=port)
        fleet.wait_ready(timeout_s=START_S)
        yield {
            "CLIENTS_URL": router.url,
            "CLIENTS_UNIFIED_URL": unified.url,
            "CLIENTS_MODEL": BUNDLED,
            "CLIENTS_MODEL_DIR": str(find_model(BUNDLED)),
            "CLIENTS_WORKERS": "\n".join(workers(fleet)),
            "CLIENTS_KV_EVENTS": "\n".join(" ".join(it.values()) for it in events),
            "CLIENTS_DECODE_PID": next(str(it.process.pid) for it in fleet.members if it.kind == "decode"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it need not ask the network what a model costs
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }


def workers(fleet: Fleet) -> Iterator[str]:
    for member in fleet.members:
        if member.kind == "prefill":
            words = member.command
            yield f"prefill {member.url} {words[words.index('--disaggregation-bootstrap-port') + 1]}"
        elif member.kind == "decode":
            yield f"decode {member.url}"


def run(program: Program, environment: dict[str, str]) -> Outcome:
    began = time.monotonic()
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if program.npm or program.debian:
        folder = ENVIRONMENTS / program.folder
        commands = [folder / "node_modules" / ".bin"] if program.npm else [folder / "usr/bin", folder / "usr/sbin"]
        others["PATH"] = os.pathsep.join([*map(str, commands), others["PATH"]])
    command = command_of(program)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_S, check=False, env={**others, **environment}
        )
    except subprocess.TimeoutExpired:
        return Outcome(program, "", f"it did not end in {RUN_S:.0f} s", RUN_S)
    shown = [line.removeprefix("SHOWN ") for line in done.stdout.splitlines() if line.startswith("SHOWN ")]
    seconds = time.monotonic() - began
    if done.returncode or len(shown) != 1:
        print(done.stderr[-TAIL_CHARS:] or done.stdout[-TAIL_CHARS:], file=sys.stderr)
        lines = (done.stderr or done.stdout).strip().splitlines()
        return Outcome(program, "", f"exit code {done.returncode}: {(lines or ['it says nothing'])[-1][:300]}", seconds)
    return Outcome(program, shown[0], "", seconds)


def command_of(program: Program) -> list[str]:
    file, *words = program.words
    path = HERE / "programs" / file
    if path.suffix != ".mjs":
        return [str(python_of(program)), str(path), *words]
    folder = ENVIRONMENTS / program.folder  # Node finds packages from where the file is
    shutil.copy(path.with_name("_shared.mjs"), folder)
    return ["node", shutil.copy(path, folder), *words]


def page(outcomes: list[Outcome], kept: dict[str, str]) -> str:
    """kept: rows of programs that may not have been run, by their names."""
    lines = [
        "# Programs of others",
        "",
        "Written by `make clients PAGE=docs/clients.md`, each row on its date: those of programs that it has not run",
        f"stay. Versions were pinned on {PINNED_ON} (`tests/foreign/table.py`). Each program runs unmodified in an",
        "environment of its own, against our router in front of a prefill and a decode server with the bundled model",
        f"(`smg --dp-aware`: of {NUM_RANKS} DP ranks each); what it has to get is in its file below",
        "`tests/foreign/programs/`. The command fails when one does.",
        "",
        "| program | version | | run on | shown |",
        "|---|---|---|---|---|",
    ]
    rows = kept | {it.program.name: row(it) for it in outcomes}
    lines += [rows[program.name] for program in PROGRAMS if program.name in rows]
    lines += ["", "Not run:", "", "| program | why |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in NOT_RUN.items()]
    lines += ["", "The Python SDKs of OpenAI and Anthropic, and `sglang-router` under faults, are in `tests/e2e_cpu`."]
    return "\n".join(lines) + "\n"


def row(it: Outcome) -> str:
    result = "**fails**" if it.failure else "works"
    date = time.strftime("%-d %B %Y", time.gmtime())
    shown = (it.failure or it.shown).replace("|", "/")
    return f"| {it.program.name} | {it.program.version} | {result} | {date} | {shown} |"


def rows_of(page: str) -> dict[str, str]:
    """By program, of a page that was written before."""
    lines = [line for line in page.splitlines() if line.count(" | ") == 4]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


if __name__ == "__main__":
    sys.exit(main())
