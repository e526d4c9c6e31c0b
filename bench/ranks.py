"""What two, four and eight workers cost and are worth, against one: pipeline and tensor parallel, and replicas.

Unified servers with the bundled model, all alive at once on this machine's cores; they are asked in turn, in a new
order every time, and only one has work at a time. Each gets the threads that it would take if it were alone here. A
ratio is the median of the ratios to the server of one worker, each taken within one repetition; beside it the least and
the greatest of them.

    ttft        milliseconds until the first token of one prompt on an idle server, in chunks of CHUNK tokens
    step        milliseconds between two tokens of a stream, of 1 and of 8 streams
    requests    per second, of 8 and of 16 clients that each wait for their answer, by number of replicas
    dispatch    nanoseconds of the API process's CPU for one request: the choice of a rank alone, and the whole way from
                `NodeClient.running` to the request's end without its node and its tokens

`ideal` of ttft: what the ratio would be with a core for every worker, stages that cost the same, and communication for
nothing. A pipeline of n stages takes (chunks + n - 1) / n times the time of a chunk: one chunk gains nothing from it.

    python bench/ranks.py [--repetitions 5] [--json]

Where there are fewer cores than workers, they wait for each other, as the server's log says: expect several workers to
be slower there than one. The clients of `requests` are threads of this process, which takes its part of a core.
What such a machine shows is the price of talking; what ranks are worth is seen where each has a core, or a device.
On a machine that has other work, too, do not read the ratios: the kernel gives a server of more processes more of it.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any  # a row: text and numbers

import httpx
from conditions import conditions

from tandem.cli.fleet import Fleet, serve_words
from tandem.cli.ports import free_ports
from tandem.core.commands import FailRequest
from tandem.core.dp_dispatch import Dispatched, DispatchLoad, Loads, Newcomer, dispatch
from tandem.core.request import Request
from tandem.core.settings import LoadBalanceMethod
from tandem.core.values import SECOND, Cause, Incarnation, Nanos, RequestId, Room, ceil_div
from tandem.sampling import Payload, SamplingParams
from tandem.server import wire
from tandem.server.api.client import NodeClient

MODEL = "tandem/mini"
ONE = "1 worker"
SPREAD = {
    ONE: (1, 1),
    "pp 2": (1, 2),
    "pp 4": (1, 4),
    "tp 2": (2, 1),
    "tp 4": (4, 1),
    "tp 2 pp 4": (2, 4),
    "tp 8": (8, 1),
}  # tensor-parallel shards, stages
REPLICAS = {ONE: 1, "dp 2": 2, "dp 4": 4}
CHUNK = 128
PROMPTS = (16, 512, 2048)
STREAMS = (1, 8)
CLIENTS = (8, 16)
STREAMED_TOKENS = 32
REQUESTS = 48  # for every number of clients
REQUEST_PROMPT, REQUEST_TOKENS = 64, 24
DISPATCHED = (1, 4)  # ranks
VOCABULARY = 500
WARM_UP = 1  # repetitions
SEED = 1

METHODS = [method for method in LoadBalanceMethod if method is not LoadBalanceMethod.AUTO]

Sample = Callable[[str], float]
"""One measurement at a server's URL."""


def body(rng: random.Random, prompt_tokens: int, new_tokens: int, *, is_streamed: bool) -> dict[str, object]:
    return {
        "input_ids": [rng.randrange(3, VOCABULARY) for _ in range(prompt_tokens)],  # nothing of it is cached
        "stream": is_streamed,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }


def new_client() -> httpx.Client:
    return httpx.Client(timeout=120, limits=httpx.Limits(max_connections=None), trust_env=False)


def event_times(client: httpx.Client, url: str, asked: Mapping[str, object]) -> list[float]:
    """Seconds from sending the request to each event of the answer. Events that came together have one time."""
    began = time.perf_counter()
    found: list[float] = []
    with client.stream("POST", f"{url}/generate", json=asked) as reply:
        assert reply.status_code == 200, reply.read()
        for piece in reply.iter_raw():
            found += repeat(time.perf_counter() - began, piece.count(b"data: {"))
    return found


def gaps(times: list[float]) -> list[float]:
    """Between neighbours; those that came together share the wait for them."""
    ends = sorted(set(times))
    return [
        gap for before, end in pairwise(ends) for gap in repeat((end - before) / times.count(end), times.count(end))
    ]


def ttft_ms(client: httpx.Client, url: str, asked: Mapping[str, object]) -> float:
    return event_times(client, url, asked)[0] * 1000


def step_ms(client: httpx.Client, url: str, bodies: list[dict[str, object]]) -> float:
    """Median gap over all of these streams, which run together."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        streams = list(pool.map(lambda asked: event_times(client, url, asked), bodies))
    return statistics.median(gap for times in streams for gap in gaps(times)) * 1000


def requests_per_second(url: str, bodies: list[dict[str, object]], *, clients: int) -> float:
    """Each client has a connection of its own and its share of the requests."""

    def ask_all(share: list[dict[str, object]]) -> None:
        with new_client() as client:
            for asked in share:
                client.post(f"{url}/generate", json=asked).raise_for_status()

    with ThreadPoolExecutor(clients) as pool:
        began = time.perf_counter()
        list(pool.map(ask_all, (bodies[first::clients] for first in range(clients))))
        return len(bodies) / (time.perf_counter() - began)


def in_turns(
    urls: Mapping[str, str], sample: Sample, *, repetitions: int, rng: random.Random
) -> dict[str, list[float]]:
    """What was sampled of each server, in order of repetitions."""
    found: dict[str, list[float]] = {name: [] for name in urls}
    for repetition in range(WARM_UP + repetitions):
        for name in rng.sample(list(urls), len(urls)):
            value = sample(urls[name])
            if repetition >= WARM_UP:
                found[name].append(value)
    return found


def ratios_to_one(values: list[float], ones: list[float]) -> dict[str, Any]:
    """Median, and least and greatest, of what was measured together."""
    ratios = [value / one for value, one in zip(values, ones, strict=True)]
    return {"ratio": round(statistics.median(ratios), 3), "range": [round(min(ratios), 3), round(max(ratios), 3)]}


def ideal_ttft(prompt_tokens: int, tp: int, pp: int) -> float:
    chunks = ceil_div(prompt_tokens, CHUNK)
    return (chunks + pp - 1) / (chunks * pp * tp)


def measure_servers(repetitions: int, tell: Callable[[dict[str, Any]], None]) -> None:
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), engines=1) as fleet:
        urls: dict[str, str] = {}
        names = [*SPREAD, *(name for name in REPLICAS if name not in SPREAD)]
        for name, port in zip(names, free_ports(len(names)), strict=True):
            tp, pp = SPREAD.get(name, (1, 1))
            sizes = ("--tp", str(tp), "--pp", str(pp), "--dp", str(REPLICAS.get(name, 1)))
            words = serve_words(
                MODEL, port, *sizes, "--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "16384"
            )
            urls[name] = fleet.start(name.replace(" ", "-"), words, port=port).url
        fleet.wait_ready(timeout_s=240)
        with new_client() as client:
            spread = {name: urls[name] for name in SPREAD}
            replicas = {name: urls[name] for name in REPLICAS}
            for length in PROMPTS:
                for row in ttft_rows(client, spread, length, repetitions=repetitions, rng=rng):
                    ideal = ideal_ttft(length, *SPREAD[row["server"]])
                    tell(row | {"ideal": round(ideal, 3)})
            for streams in STREAMS:
                for row in step_rows(client, spread, streams, repetitions=repetitions, rng=rng):
                    tell(row)
            for clients in CLIENTS:
                found = in_turns(
                    replicas,
                    lambda url, clients=clients: requests_per_second(
                        url,
                        [body(rng, REQUEST_PROMPT, REQUEST_TOKENS, is_streamed=False) for _ in range(REQUESTS)],
                        clients=clients,
                    ),
                    repetitions=repetitions,
                    rng=rng,
                )
                for name in replicas:
                    tell(line("requests", f"{clients} clients", name, found, unit="1/s"))


def ttft_rows(
    client: httpx.Client, urls: Mapping[str, str], length: int, *, repetitions: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Of every server, for prompts of `length` tokens."""

    def sample(url: str) -> float:
        return ttft_ms(client, url, body(rng, length, 1, is_streamed=True))

    found = in_turns(urls, sample, repetitions=repetitions, rng=rng)
    return [line("ttft", f"{length} prompt tokens", name, found, unit="ms") for name in urls]


def step_rows(
    client: httpx.Client, urls: Mapping[str, str], streams: int, *, repetitions: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Of every server, for so many streams together."""

    def sample(url: str) -> float:
        return step_ms(client, url, [body(rng, 16, STREAMED_TOKENS, is_streamed=True) for _ in range(streams)])

    found = in_turns(urls, sample, repetitions=repetitions, rng=rng)
    return [line("step", f"{streams} streams", name, found, unit="ms") for name in urls]


def line(what: str, load: str, name: str, found: Mapping[str, list[float]], *, unit: str) -> dict[str, Any]:
    return {
        "what": what,
        "load": load,
        "server": name,
        "p50": round(statistics.median(found[name]), 3),
        "unit": unit,
        **ratios_to_one(found[name], found[ONE]),
    }


# -- the dispatcher, without processes ------------------------------------------------------------------------------


def dispatched(ranks: int, method: LoadBalanceMethod, count: int) -> tuple[float, list[int]]:
    """Nanoseconds for the choice of one rank; and how many of `count` requests each rank got."""
    loads = Loads((DispatchLoad(),) * ranks)
    newcomers = [Newcomer(REQUEST_PROMPT, Room(number)) for number in range(count)]
    began = time.thread_time_ns()
    for newcomer in newcomers:
        chosen, loads = dispatch(newcomer, loads, method)
        assert isinstance(chosen, Dispatched)
    return (time.thread_time_ns() - began) / count, [load.requests for load in loads.ranks]


class Silent:
    """A `NodePort` of which nobody hears."""

    def __init__(self) -> None:
        self.num_submitted = 0

    def send(self, message: wire.ApiToNode) -> None:
        self.num_submitted += isinstance(message, wire.SubmitAll)


def submitted(ranks: int, count: int) -> tuple[float, list[int]]:
    """Nanoseconds of the client of the nodes for one request, by round robin; and how many each node was sent."""
    ports = [Silent() for _ in range(ranks)]

    async def run() -> float:
        client = NodeClient(*ports, stall_timeout=60.0)
        for dp_rank in range(ranks):
            replica = wire.ReplicaInfo(Incarnation("bench", "1"), "unified", "", {}, "127.0.0.1", 1, ())
            client.receive(wire.NodeReady(replica, 10, 10), dp_rank)
        submits = [submit(number) for number in range(1, count + 1)]
        began = time.thread_time_ns()
        for one in submits:
            with client.running([one], [(one.request.rid,)]):
                client.receive(FailRequest(one.request.id, Cause.ABORTED, "node", ""))
        spent = time.thread_time_ns() - began
        await client.close()
        return spent / count

    return asyncio.run(run()), [port.num_submitted for port in ports]


def submit(number: int) -> wire.Submit:
    request = Request(RequestId(number), f"r{number}", REQUEST_PROMPT, (), REQUEST_TOKENS, Nanos(600 * SECOND))
    return wire.Submit.of(request, Payload(number, bytes(4 * REQUEST_PROMPT), SamplingParams(), b""))


def measure_dispatch(repetitions: int, count: int) -> list[dict[str, Any]]:
    """The median of repetitions, in which numbers of ranks take turns."""
    ways: dict[str, Callable[[int], tuple[float, list[int]]]] = {
        method: lambda ranks, method=method: dispatched(ranks, method, count) for method in METHODS
    }
    ways["whole request, round_robin"] = lambda ranks: submitted(ranks, count)
    found: list[dict[str, Any]] = []
    for way, sample in ways.items():
        times: dict[int, list[float]] = {ranks: [] for ranks in DISPATCHED}
        for _ in range(repetitions):
            for ranks in DISPATCHED:
                times[ranks].append(sample(ranks)[0])
        for ranks in DISPATCHED:
            found.append(
                {
                    "what": "dispatch",
                    "load": way,
                    "server": f"dp {ranks}",
                    "p50": round(statistics.median(times[ranks])),
                    "unit": "ns",
                    **ratios_to_one(times[ranks], times[1]),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="of every measurement")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    known = conditions()  # the load before ours
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        rows.append(row)
        if not args.json:
            least, most = row["range"]
            ideal = f"   ideal {row['ideal']:.2f}" if "ideal" in row else ""
            print(
                f"{row['what']:<9} {row['load']:<27} {row['server']:<10} {row['p50']:>10} {row['unit']:<4}"
                f" {row['ratio']:>7.2f}x ({least:.2f} to {most:.2f}){ideal}",
                flush=True,
            )

    measure_servers(args.repetitions, tell)
    for row in measure_dispatch(args.repetitions, count=2_000):
        tell(row)
    settings = {"model": MODEL, "chunk": CHUNK, "repetitions": args.repetitions, "seed": SEED}
    print(json.dumps({"bench": "ranks", "rows": rows, **settings, **known}))


if __name__ == "__main__":
    main()
