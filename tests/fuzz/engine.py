"""Fuzzing: changed corpus entries go into a target until one of them gets an answer that the target does not document.

A target is a function over bytes. It may return, or raise one of `answers`. A finding is everything else:

    another exception, also one that was caught and logged as an error of ours
    more than CPU_S seconds of processor time for one input (of this process, so a busy machine finds nothing more)
    no progress at all for HUNG_S
    more than MEMORY_BYTES resident at once for one input
    the end of the process: a signal, a stack that overflowed, `os._exit`

Each target runs in a process of its own, forked from one that has imported everything. The input at work lies in
memory that its parent can read too: an input that ends the process is known, and another process goes on behind it.

What comes is a function of (seed, target, number of inputs): changes are drawn from one source of random numbers.

Why own code, without coverage feedback: nearly all that decodes here is native (msgspec, httptools, safetensors), which
shows no lines. Measured: with `sys.settrace` as feedback the same 225 lines of config.json were reached, by a fifth
fewer inputs in the same time. Atheris (libFuzzer) made 126,000 inputs for the frames between processes and found
nothing, since bytes that it changes are seldom MessagePack; a deep value in a frame is found here within 3,600. It
exists for one kind of machine, and would be one more native dependency for what is left: this loop.
"""

import contextlib
import faulthandler
import gc
import hashlib
import json
import logging
import mmap
import os
import resource
import selectors
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import IO

from mutators import MAX_INPUT_BYTES, Mutator

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
CPU_S = 2.0  # a usual input takes a thousandth of it; scaled by how slow this processor is
HUNG_S = 30.0
MEMORY_BYTES = 64 << 20
ADDRESS_BYTES = 4 << 30  # beyond what the process has: whoever asks for more gets a MemoryError, not the machine
MEMORY_CHECK_INPUTS = 32  # between two looks at the peak
TRACEBACK_LINES = 60
MAX_REPEATED = 100  # inputs with a finding that is known by then
SETUP_FAILED = 70
REFERENCE_S = 0.02  # for `reference_work`, on a processor of 2020

Run = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    name: str
    open: Callable[[], Run]  # called once per process
    mutate: Mutator
    work: int  # inputs in `make test`: about 1 to 2 s of processor time
    answers: tuple[type[BaseException], ...] = ()
    max_findings: int = 5  # in one run
    seeds: Callable[[], Mapping[str, bytes]] = (
        dict  # beside those in corpus/NAME: made by code, where a format may change
    )

    def entries(self) -> dict[str, bytes]:
        """The corpus, in the same order everywhere."""
        folder = CORPUS / self.name
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return {**self.seeds(), **{path.name: path.read_bytes() for path in files}}


@dataclass(frozen=True)
class Finding:
    target: str
    what: str  # one line
    place: str  # deepest line of ours, by which findings are told apart
    detail: str
    data_hex: str

    @property
    def data(self) -> bytes:
        return bytes.fromhex(self.data_hex)

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.target}-{hashlib.sha256(self.data).hexdigest()[:12]}"
        path.write_bytes(self.data)
        return path


@dataclass
class Report:
    target: str
    inputs: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    answered: int = 0  # inputs that ended with one of the documented exceptions
    seeds: int = 0
    seeds_answered: int = 0  # most seeds have to get through as they are, or nothing that is made of them does
    findings: list[Finding] = field(default_factory=list)


def command_for(target: str, path: Path) -> str:
    """The line that does it again."""
    return shlex.join([sys.executable, str(HERE), target, str(path)])


def inputs(target: Target, random: Random) -> Iterator[bytes]:
    """The corpus as it is, then changes of it for ever."""
    entries = list(target.entries().values())
    yield from entries
    while True:
        yield target.mutate(random, random.choice(entries), random.choice(entries))[:MAX_INPUT_BYTES]


def run_once(target: Target, run: Run, data: bytes) -> bool:
    """Whether the answer was an exception that is documented. Raises all others, also those that were only logged."""
    try:
        run(data)
    except target.answers:
        is_answer = True
    else:
        is_answer = False
    LOGGED_ERRORS.raise_first()
    return is_answer


class LoggedErrors(logging.Handler):
    """Exceptions that somebody has caught and logged as an error, or that have ended a thread."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._errors: list[BaseException] = []

    def watch(self) -> None:
        logging.getLogger().handlers = [self]
        threading.excepthook = lambda args: self._errors.append(args.exc_value or args.exc_type())

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._errors.append(record.exc_info[1])

    def raise_first(self) -> None:
        if self._errors:
            error = self._errors[0]
            self.clear()
            raise error

    def clear(self) -> None:
        self._errors.clear()


LOGGED_ERRORS = LoggedErrors()


# --- in the process of one target ------------------------------------------------------------------------------------


class CurrentInput:
    """The input at work, readable from outside."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 16 + MAX_INPUT_BYTES)

    def write(self, index: int, data: bytes) -> None:
        self._map[:16] = index.to_bytes(8) + len(data).to_bytes(8)
        self._map[16 : 16 + len(data)] = data

    def read(self) -> tuple[int, bytes]:
        index, size = int.from_bytes(self._map[:8]), int.from_bytes(self._map[8:16])
        return index, self._map[16 : 16 + size]


def reset_peak() -> int:
    """Begin to watch; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    with open("/proc/self/status", "rb") as status:
        line = next(line for line in status if line.startswith(b"VmHWM"))
    return int(line.split()[1]) << 10


def address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def reference_work() -> None:
    total = 0
    for number in range(400_000):
        total += number


def cpu_limit_s() -> float:
    """`CPU_S` on a fast processor, more on a slow one."""
    began = time.process_time()
    reference_work()
    return CPU_S * max(1.0, (time.process_time() - began) / REFERENCE_S)


class Child:
    """Runs one target over some of its inputs, and tells of the end and of each new finding in a line of JSON."""

    def __init__(self, target: Target, current: CurrentInput, out: IO[str], *, known: Collection[str]) -> None:
        self._target, self._current, self._out = target, current, out
        self._places = set(known)
        self._limit_s = cpu_limit_s()
        self._run = target.open()
        self._recent: list[bytes] = []
        self._answered = self._seeds_answered = self._repeated = 0
        self._num_seeds = len(target.seeds())
        self._resident = reset_peak()

    def go(self, *, seed: int, first: int, count: int | None, seconds: float | None) -> None:
        """Inputs `first` to `count` of the stream; or as many as fit into this time."""
        stream = inputs(self._target, Random(f"{seed} {self._target.name}"))
        for _ in range(first):
            next(stream)
        began, cpu_began = time.monotonic(), time.process_time()
        index = first
        while (count is None or index < count) and (seconds is None or time.monotonic() - began < seconds):
            data = next(stream)
            self._current.write(index, data)
            index += 1
            self._try(data)
            if index == self._num_seeds:
                self._seeds_answered = self._answered
            self._check_memory(data)
            if len(self._places) >= self._target.max_findings or self._repeated >= MAX_REPEATED:
                break
        self._say(
            inputs=index,
            answered=self._answered,
            seeds=self._num_seeds,
            seeds_answered=self._seeds_answered,
            seconds=time.monotonic() - began,
            cpu_s=time.process_time() - cpu_began,
        )

    def _say(self, **fields: object) -> None:
        self._out.write(json.dumps(fields) + "\n")
        self._out.flush()

    def _try(self, data: bytes) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._limit_s)
        try:
            self._answered += run_once(self._target, self._run, data)
        except BaseException as error:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._find(of_error(self._target, data, error))
            self._run = self._target.open()  # whatever state it was left in
            gc.collect()
            LOGGED_ERRORS.clear()  # of what was left there
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _find(self, finding: Finding) -> None:
        if finding.place in self._places:
            self._repeated += 1
            return
        self._places.add(finding.place)
        self._say(finding=asdict(finding))

    def _check_memory(self, data: bytes) -> None:
        """Now and then; when the peak has risen too far, each of the last inputs is tried alone."""
        self._recent.append(data)
        if len(self._recent) < MEMORY_CHECK_INPUTS:
            return
        recent, self._recent = self._recent, []
        if peak_bytes() - self._resident > MEMORY_BYTES:
            for again in recent:
                self._measure(again)
            self._resident = reset_peak()

    def _measure(self, data: bytes) -> None:
        before = reset_peak()
        with contextlib.suppress(*self._target.answers, Exception):
            self._run(data)
        grown = peak_bytes() - before
        if grown > MEMORY_BYTES:
            what = f"{grown >> 20} MiB for an input of {len(data)} bytes"
            self._find(Finding(self._target.name, what, "memory", "", data.hex()))


def of_error(target: Target, data: bytes, error: BaseException) -> Finding:
    lines = traceback.format_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/tandem/" in frame.filename] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "?"
    what = f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " ")
    detail = "".join(lines).splitlines()
    if len(detail) > TRACEBACK_LINES:
        detail = [*detail[:20], "...", *detail[-TRACEBACK_LINES + 21 :]]
    return Finding(target.name, what, f"{type(error).__name__} {place}", "\n".join(detail), data.hex())


def child_main(
    target: Target,
    current: CurrentInput,
    out: IO[str],
    trace: IO[str],
    known: Collection[str],
    work: Mapping[str, object],
) -> None:
    """Never returns to whoever has forked."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = address_bytes() + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        faulthandler.enable(trace)
        faulthandler.register(signal.SIGPROF, trace, all_threads=False, chain=True)
        LOGGED_ERRORS.watch()
        gc.freeze()
        Child(target, current, out, known=known).go(**work)  # type: ignore[arg-type]  # a mapping of mixed values, made in `fork`
        code = 0
    except BaseException:
        traceback.print_exc(file=trace)
        code = SETUP_FAILED
    out.flush()
    trace.flush()
    os._exit(code)


# --- in the process that forks them ----------------------------------------------------------------------------------


@dataclass
class Job:
    """One target, through as many processes as it takes."""

    target: Target
    report: Report
    seed: int
    count: int | None
    seconds: float | None
    pid: int = 0
    said: int = -1  # the reading end of what the child says ...
    heard: bytearray = field(default_factory=bytearray)
    trace: IO[str] | None = None
    current: CurrentInput = field(default_factory=CurrentInput)
    first: int = 0
    seen: tuple[int, float] = (-1, 0.0)  # what had moved at the last look: number of the input, processor time
    moved_at: float = 0.0
    deaths: int = 0
    is_over: bool = False

    def fork(self) -> None:
        self.said, writer = os.pipe()
        trace = os.memfd_create("trace")
        left_s = None if self.seconds is None else self.seconds - self.report.seconds
        known = [finding.place for finding in self.report.findings]
        self.heard.clear()
        self.pid = os.fork()
        if self.pid == 0:
            work = {"seed": self.seed, "first": self.first, "count": self.count, "seconds": left_s}
            child_main(self.target, self.current, os.fdopen(writer, "w"), os.fdopen(trace, "w"), known, work)
        os.close(writer)
        self.trace = os.fdopen(trace)
        self.moved_at = time.monotonic()

    def listen(self) -> bool:
        """Whether there may be more to come."""
        piece = os.read(self.said, 1 << 16)
        self.heard += piece
        return bool(piece)

    def check_progress(self) -> None:
        """End the child when neither its input nor its processor time has moved for too long."""
        now = (self.current.read()[0], cpu_of(self.pid))
        if now != self.seen:
            self.seen, self.moved_at = now, time.monotonic()
        elif time.monotonic() - self.moved_at > HUNG_S:
            os.kill(self.pid, signal.SIGKILL)

    def collect(self) -> None:
        """The child has ended: take what it said, and what its end says."""
        os.close(self.said)
        _, status = os.waitpid(self.pid, 0)
        assert self.trace is not None
        with self.trace as trace:
            trace.seek(0)
            output = trace.read()
        end = None
        for fields in map(json.loads, self.heard.splitlines()):
            if "finding" in fields:
                self.report.findings.append(Finding(**fields["finding"]))
            else:
                end = fields
        if end is None:
            self._note_death(os.waitstatus_to_exitcode(status), output)
            return
        self.report.inputs = end["inputs"]
        self.report.answered += end["answered"]
        self.report.seeds, self.report.seeds_answered = end["seeds"], end["seeds_answered"]
        self.report.seconds += end["seconds"]
        self.report.cpu_s += end["cpu_s"]
        self.is_over = True

    def _note_death(self, code: int, output: str) -> None:
        index, data = self.current.read()
        if code == -signal.SIGPROF:
            what = f"more than {CPU_S:g} s of processor time (of a fast processor) for an input of {len(data)} bytes"
        elif code == -signal.SIGKILL:
            what = f"nothing moves any more, or it was killed from outside, at an input of {len(data)} bytes"
        else:
            what = f"the process ends with {code}: {output.strip().splitlines()[-1:]}"
        place = next((line.strip() for line in output.splitlines() if "/tandem/" in line), what)
        is_known = any(finding.place == place for finding in self.report.findings)
        if not is_known:
            self.report.findings.append(Finding(self.target.name, what, place, output[-8_000:], data.hex()))
        self.deaths += 1
        self.first = self.report.inputs = index + 1
        self.is_over = code == SETUP_FAILED or self.deaths >= self.target.max_findings


def cpu_of(pid: int) -> float:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return float(words[11]) + float(words[12])


def explore(
    targets: Sequence[Target], *, seed: int, seconds: float | None = None, processes: int = 2
) -> Iterator[Report]:
    """Fuzz targets, some at a time: each for its fixed work, or for so many seconds. Reports come as they end."""
    waiting = [
        Job(target, Report(target.name), seed, target.work if seconds is None else None, seconds) for target in targets
    ]
    running: dict[int, Job] = {}
    try:
        with selectors.DefaultSelector() as ready:
            while waiting or running:
                while waiting and len(running) < processes:
                    job = waiting.pop(0)
                    job.fork()
                    ready.register(job.said, selectors.EVENT_READ)
                    running[job.said] = job
                for key, _ in ready.select(timeout=1.0):
                    job = running[key.fd]
                    if job.listen():
                        continue
                    ready.unregister(key.fd)
                    del running[key.fd]
                    job.collect()
                    if job.is_over:
                        yield job.report
                    else:
                        waiting.insert(0, job)
                for job in running.values():
                    job.check_progress()
    finally:
        for job in running.values():
            os.kill(job.pid, signal.SIGKILL)
            os.waitpid(job.pid, 0)
