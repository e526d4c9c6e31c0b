"""What the prefill delayer's queue gate is worth: output throughput with it, as a ratio to `off` (sglang#23189).

Clients with one request at a time each; who is answered asks again after 10 ms and a bit. Output lengths are all equal,
or drawn between a share of it and the whole: then requests end one by one, and without the gate each end is followed
by a prompt batch of one or two that stalls all others. One node of the production core drives one of two workers:

    engine     the real engine with the bundled model. The clock is the CPU time that its one thread takes. All variants
               run in lockstep, a batch of one and a batch of another, so what else the machine does slows all alike.
    190, 91, 60, 20, 0
               models of a worker in virtual time, by what a prompt batch costs beside its tokens, in ms. Exact: the
               same on every machine. 190: Qwen3.5-397B on one node of four GB200 as the report has it, 60: in between,
               20: as tables of its kernels have it. 91: DeepSeek-R1 on 8 H200. 0: Llama 3.1 70B on four H100, where a
               batch takes at least 20 ms, and no longer for a prompt of 300 tokens than for one of 10.

Variants: ratios of `--prefill-delayer-queue-min-ratio` and `auto`, with everything else as it is by default; `no bound`
is without a bound in passes, so that time alone bounds a wait. Every slot that clients can want is there twice, so the
slot gate stays open, but where the load says otherwise.

    python bench/delayer.py [--workers engine 190 ...] [--repetitions 3] [--output bench/results/delayer.json]
"""

import argparse
import json
import statistics
import time
from array import array
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

import torch
from conditions import conditions
from msgspec import structs

from tandem.core.batch import TOKEN_BYTES, BatchOutcome, BatchPlan
from tandem.core.commands import EmitTokens, FailRequest, FinishRequest, ForgetRequests, LaunchBatch
from tandem.core.events import BatchReturned, Event, RequestArrived
from tandem.core.request import Request
from tandem.core.scheduler.node import EngineNode
from tandem.core.settings import DelayerSettings, NodeSettings, PrefillStall, Role
from tandem.core.values import MILLISECOND, SECOND, Incarnation, Nanos, RequestId, ceil_div
from tandem.engine.engine import Engine
from tandem.engine.weights import LoadedModel, load
from tandem.sampling import Payload, SamplingParams
from tandem.simulator.clock import Clock

MINI = Path(__file__).parents[1] / "src" / "tandem" / "bundled" / "mini"
PAGE_SIZE = 16
THINK_NS, THINK_MORE_NS = 10 * MILLISECOND, 15 * MILLISECOND  # between an answer and the next question: least, and mean
NO_BOUND = 1_000_000
VARIANTS = {
    "off": None,
    "0.1": DelayerSettings(queue_min_ratio=0.1),
    "0.2": DelayerSettings(queue_min_ratio=0.2),
    "0.5": DelayerSettings(queue_min_ratio=0.5),
    "auto": DelayerSettings(tunes_itself=True),
    "0.2 no bound": DelayerSettings(NO_BOUND, queue_min_ratio=0.2),
    "auto no bound": DelayerSettings(NO_BOUND, tunes_itself=True),
}


@dataclass(frozen=True)
class Load:
    clients: int
    prompt: int  # tokens
    output: int  # tokens, at most
    least_share: float  # of `output`; 1: all are equally long
    rounds: int  # requests per client
    chunk: int  # prompt tokens per batch
    stall_ms: int = 0  # `--max-prefill-stall-ms`; 0: whole chunks
    slots: float = 2.0  # for each client

    @property
    def requests(self) -> int:
        return self.clients * self.rounds

    @property
    def num_pages(self) -> int:
        """Nobody is pushed back, and nobody waits for pages."""
        return 2 * self.clients * ceil_div(self.prompt + self.output + 2, PAGE_SIZE)

    def lengths(self, seed: int) -> list[int]:
        random = Random(seed)
        return [random.randint(int(self.least_share * self.output), self.output) for _ in range(self.requests)]


class Worker(Protocol):
    def seat(self, request: RequestId, prompt: int, draw: Random) -> None:
        """One with a prompt of so many tokens comes."""
        ...

    def forget(self, requests: tuple[RequestId, ...]) -> None: ...

    def run(self, plan: BatchPlan) -> tuple[BatchOutcome, int]:
        """(what came out, nanoseconds it took)"""
        ...

    def close(self) -> None: ...


class RealWorker:
    def __init__(self, model: LoadedModel, num_pages: int) -> None:
        self.engine = Engine(model, page_size=PAGE_SIZE, num_pages=num_pages)

    def seat(self, request: RequestId, prompt: int, draw: Random) -> None:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        tokens = array("i", (draw.randrange(3, 500) for _ in range(prompt))).tobytes()
        self.engine.add(Payload(request=request, tokens=tokens, sampling=sampling, last_hash=bytes(16)))

    def forget(self, requests: tuple[RequestId, ...]) -> None:
        self.engine.forget(requests)

    def run(self, plan: BatchPlan) -> tuple[BatchOutcome, int]:
        began = time.thread_time_ns()
        outcome = self.engine.run(plan)
        return timed(outcome, time.thread_time_ns() - began)

    def close(self) -> None:
        self.engine.close()


def timed(outcome: BatchOutcome, took_ns: int) -> tuple[BatchOutcome, int]:
    return structs.replace(outcome, duration_ns=Nanos(took_ns)), took_ns


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one batch."""

    prompt_batch: float = 190.0
    prompt_token: float = 0.0055
    prompt_least: float = 0.0
    decode_batch: float = 9.0
    decode_row: float = 0.004
    experts: float = 4.6  # reading the weights of all of them; a row needs `experts_share` of them
    experts_share: float = 10 / 512

    def batch_ns(self, plan: BatchPlan, num_decode_rows: int) -> int:
        prompt_tokens = sum(row.stop - row.start for row in plan.rows)
        prompts = max(self.prompt_least, self.prompt_batch + prompt_tokens * self.prompt_token) if plan.rows else 0.0
        touched = 1 - (1 - self.experts_share) ** num_decode_rows
        decode = self.decode_batch + num_decode_rows * self.decode_row + touched * self.experts if plan.decodes else 0.0
        return int((prompts + decode) * MILLISECOND)


PROFILES = {
    "190": Costs(),  # fitted to what sglang#23189 measured without the gate, and to nothing with it
    "91": Costs(prompt_batch=91.0, prompt_token=0.03675, decode_batch=7.1, decode_row=0.04, experts=17.1),
    "60": Costs(prompt_batch=60.0),
    "20": Costs(prompt_batch=20.2, prompt_token=0.01418, decode_batch=5.01, decode_row=0.0151, experts=14.76),
    "0": Costs(
        prompt_batch=0.1, prompt_token=0.06616, prompt_least=20.0, decode_batch=15.15, decode_row=0.0313, experts=0.0
    ),
}


class ModelledWorker:
    """Knows who decodes, and what that takes; all tokens are 0."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.decoding: dict[RequestId, None] = {}

    def seat(self, request: RequestId, prompt: int, draw: Random) -> None:
        pass

    def forget(self, requests: tuple[RequestId, ...]) -> None:
        for request in requests:
            self.decoding.pop(request, None)

    def run(self, plan: BatchPlan) -> tuple[BatchOutcome, int]:
        for request in plan.leave:
            del self.decoding[request]
        self.decoding |= dict.fromkeys(join.request for join in plan.join)
        count = sum(row.samples for row in plan.rows) + len(self.decoding) * plan.decodes
        outcome = BatchOutcome(plan.id, plan.iteration, bytes(TOKEN_BYTES * count), bytes(count))
        return timed(outcome, self.costs.batch_ns(plan, len(self.decoding)))

    def close(self) -> None:
        pass


@dataclass
class Serving:
    """One node, its worker and its clients, from the first question to the last answer."""

    load: Load
    worker: Worker
    delayer: DelayerSettings | None
    seed: int
    clock: Clock = field(default_factory=Clock)
    work: deque[BatchPlan | tuple[RequestId, ...]] = field(default_factory=deque)
    is_busy: bool = False
    wake_at: Nanos | None = None
    num_asked: int = 0
    num_ended: int = 0
    prompt_batches: int = 0
    last_seen: dict[RequestId, int] = field(default_factory=dict)  # when it arrived, or got its last token
    started: set[RequestId] = field(default_factory=set)
    ttfts: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node = EngineNode(
            NodeSettings(
                Role.UNIFIED,
                Incarnation("bench", "1"),
                num_pages=self.load.num_pages,
                page_size=PAGE_SIZE,
                max_running=int(self.load.slots * self.load.clients),
                chunk_tokens=self.load.chunk,
                prefill_stall=PrefillStall(Nanos(self.load.stall_ms * MILLISECOND)) if self.load.stall_ms else None,
                delayer=self.delayer,
                prefix_cache=False,
                conservativeness=0.0,
            )
        )
        self.lengths = self.load.lengths(self.seed)
        self.random = Random(self.seed)

        for _ in range(self.load.clients):
            self.clock.after(self.random.random() * THINK_NS, self.ask)

    @property
    def is_over(self) -> bool:
        return self.num_ended == self.load.requests

    def numbers(self) -> dict[str, float]:
        return {
            "tokens_per_second": sum(self.lengths) / (self.clock.now() / SECOND),
            "prompts_per_batch": self.load.requests / self.prompt_batches,
            "ttft_p50_ms": percentile(self.ttfts, 50),
            "ttft_p99_ms": percentile(self.ttfts, 99),
            "gap_p99_ms": percentile(self.gaps, 99),
        }

    def ask(self) -> None:
        if self.num_asked == self.load.requests:
            return
        number = self.num_asked
        self.num_asked += 1
        request, draw = RequestId(self.num_asked), Random(self.seed * self.load.requests + number)
        prompt = self.load.prompt
        self.worker.seat(request, prompt, draw)
        self.last_seen[request] = self.clock.now()
        hashes = tuple(draw.randbytes(16) for _ in range(prompt // PAGE_SIZE))
        timeout = Nanos(100_000 * SECOND)
        self.step(RequestArrived(Request(request, str(number), prompt, hashes, self.lengths[number], timeout)))

    def step(self, *events: Event) -> None:
        effects = self.node.step(events, self.clock.now())
        for command in effects.commands:
            match command:
                case LaunchBatch(plan):
                    self.work.append(plan)
                    self.prompt_batches += bool(plan.rows)
                case ForgetRequests(requests):
                    self.work.append(requests)
                case EmitTokens(requests):
                    self.book(requests)
                case FinishRequest():
                    self.num_ended += 1
                    self.clock.after(THINK_NS + self.random.expovariate(1 / THINK_MORE_NS), self.ask)
                case FailRequest():
                    raise RuntimeError(f"{command}: this benchmark has no faults")
                case _:
                    pass
        if effects.wake_at is not None and effects.wake_at != self.wake_at:
            self.clock.at(effects.wake_at, self.wake, effects.wake_at)
        self.wake_at = effects.wake_at
        self.start_work()

    def wake(self, when: Nanos) -> None:
        if when == self.wake_at:
            self.step()

    def start_work(self) -> None:
        while self.work and not self.is_busy:
            item = self.work.popleft()
            if isinstance(item, tuple):
                self.worker.forget(item)
                continue
            self.is_busy = True
            outcome, took_ns = self.worker.run(item)
            self.clock.after(took_ns, self.end_work, outcome)

    def end_work(self, outcome: BatchOutcome) -> None:
        self.is_busy = False
        self.start_work()  # what is launched already does not wait for the node
        self.step(BatchReturned(outcome))

    def book(self, requests: tuple[RequestId, ...]) -> None:
        now = self.clock.now()
        for request in requests:
            (self.gaps if request in self.started else self.ttfts).append(now - self.last_seen[request])
            self.started.add(request)
            self.last_seen[request] = now


def percentile(values: list[int], percent: int) -> float:
    """Milliseconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] / MILLISECOND


CLIENTS = (16, 32, 64, 128)
MODELLED = [
    *(Load(clients, 1000, 1000, share, rounds=6, chunk=16_384) for share in (0.8, 1.0) for clients in CLIENTS),
    *(Load(clients, 1000, 250, 0.8, rounds=6, chunk=16_384) for clients in CLIENTS),  # short answers
    *(Load(clients, 100, 1000, 0.2, rounds=6, chunk=16_384) for clients in (4, 8, 16)),  # few clients, short prompts
    Load(128, 1000, 250, 0.8, rounds=6, chunk=16_384, slots=0.5),  # half of them wait for a slot
    *(Load(clients, 1000, 250, 0.8, rounds=6, chunk=512, stall_ms=150) for clients in (32, 128)),
    *(Load(clients, 100, 250, 0.8, rounds=6, chunk=512, stall_ms=150) for clients in (32, 128)),  # and short prompts
]
LOADS = {
    "engine": [Load(64, 128, 128, share, rounds=4, chunk=512) for share in (1.0, 0.8, 0.2)],
    **dict.fromkeys(PROFILES, MODELLED),
}


def measure(name: str, load_: Load, repetitions: int, model: LoadedModel) -> list[dict[str, object]]:
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for seed in range(1, repetitions + 1):
        workers: dict[str, Worker] = {
            variant: RealWorker(model, load_.num_pages) if name == "engine" else ModelledWorker(PROFILES[name])
            for variant in VARIANTS
        }
        all_ = {variant: Serving(load_, workers[variant], delayer, seed) for variant, delayer in VARIANTS.items()}
        run_in_lockstep(list(all_.values()))
        for variant, serving in all_.items():
            found[variant].append(serving.numbers())
            workers[variant].close()
    return [row(name, load_, variant, runs, found["off"]) for variant, runs in found.items()]


def run_in_lockstep(all_: list[Serving]) -> None:
    """Who is furthest behind on its own clock goes on."""
    while live := [serving for serving in all_ if not serving.is_over]:
        min(live, key=lambda serving: serving.clock.now()).clock.run_next()


def row(name: str, load_: Load, variant: str, runs: list[dict[str, float]], off: list[dict[str, float]]) -> dict:
    """Medians over the repetitions; the ratio with its least and largest."""
    medians = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
    key = "tokens_per_second"
    ratios = sorted(this[key] / other[key] for this, other in zip(runs, off, strict=True))
    ratio = {"ratio": statistics.median(ratios), "ratio_min": ratios[0], "ratio_max": ratios[-1]}
    return {
        "worker": name,
        **asdict(load_),
        "variant": variant,
        **{key: round(value, 3) for key, value in ratio.items()},
        **medians,
    }


NOTE = (
    "ratio: output tokens per second over those of off, which runs in lockstep; median of the repetitions. engine: CPU "
    "time of the engine's one thread, without HTTP and the node. Numbers: virtual time, by profiles_ms."
)
COLUMNS = (
    *("worker", "clients", "prompt", "output", "least_share", "chunk", "slots", "variant"),
    *("ratio", "ratio_min", "ratio_max", "tokens_per_second", "prompts_per_batch"),
    *("ttft_p50_ms", "ttft_p99_ms", "gap_p99_ms"),
)


def width(column: str) -> int:
    return max(13 if column == "variant" else 7, len(column))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", choices=tuple(LOADS), default=list(LOADS))
    parser.add_argument("--repetitions", type=int, default=3, help="each with lengths of its own")
    parser.add_argument("--output", type=Path, help="also write the JSON line there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = conditions()
    model = load(MINI, dtype="auto", device="cpu")
    rows: list[dict[str, object]] = []
    print(" ".join(f"{column:>{width(column)}}" for column in COLUMNS))
    for name in args.workers:
        for load_ in LOADS[name]:
            for line in measure(name, load_, args.repetitions, model):
                rows.append(line)
                print(" ".join(f"{line[column]!s:>{width(column)}}" for column in COLUMNS), flush=True)
    profiles = {name: asdict(costs) for name, costs in PROFILES.items()}
    setting = {"repetitions": args.repetitions, "page_size": PAGE_SIZE, "window_depth": 2, "profiles_ms": profiles}
    document = {"bench": "delayer", "note": NOTE, "results": rows, **setting, **known}
    print(json.dumps(document))
    if args.output is not None:
        args.output.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
