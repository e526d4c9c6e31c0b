"""Runs seeds: one, or many over all cores. A result depends on its seed alone, so results merge in seed order."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from multiprocessing.pool import Pool
from secrets import randbelow

from tandem.cgroups import num_cores
from tandem.garbage import no_collector
from tandem.simulator.actors.clients import Half
from tandem.simulator.coverage import Watch
from tandem.simulator.faults.options import draw_options
from tandem.simulator.occurrences import Occurrences
from tandem.simulator.oracle import Violation
from tandem.simulator.report import SeedResult, trace_step
from tandem.simulator.world import World, describe_error

WORTH_A_PROCESS = 20  # seeds; below that, starting processes takes longer than running them
FEED_EVERY_S = 0.02
SEED_LIMIT = 1 << 31


def draw_first_seed() -> int:
    return randbelow(SEED_LIMIT)


@no_collector()  # to the end of the world: what is dead by then is looked at once
def run_seed(
    seed: int,
    until_ns: int | None = None,
    write_trace: Callable[[str], None] | None = None,
    *,
    watches: bool = False,
) -> SeedResult:
    """One seed to its end, to `until_ns`, or to its first violation. It may write a trace, or watch for what occurs."""
    world = World(draw_options(seed))
    watch, occurrences = Watch(world), Occurrences()
    if write_trace is not None:
        world.trace = partial(_write_step, write_trace)
    elif watches:
        world.trace = watch.look
        world.occurrences = occurrences
    invariant = detail = ""
    try:
        world.schedule_all()
        world.run(until_ns)
    except Violation as violation:
        invariant, detail = violation.invariant, violation.detail
    except Exception as error:  # of a machine beside nodes and routers, whose steps the world looks at itself
        invariant, detail = "S13", f"the product raised {describe_error(error)}"
    occurrences.see_answers(world.page_faults.answers)
    occurrences.see_links(world.network.heard)
    occurrences.see_codes(world.edge.codes)
    return SeedResult(
        seed=seed,
        invariant=invariant,
        detail=detail,
        simulated_ns=world.clock.time,
        lived_ns=lived_ns(chain.from_iterable(each.halves for each in world.edge.exchanges), world.clock.time),
        num_events=world.num_events,
        num_requests=len(world.edge.exchanges),
        num_finished=world.edge.num_finished(),
        faults=dict(world.faults),
        log_hash=world.log.hexdigest(),
        rare=tuple(sorted(watch.reached)),
        occurred=dict(occurrences.counts),
    )


RunSeed = Callable[[int], SeedResult]  # a function of a module, which other processes find by its name


def run_seeds(
    first_seed: int, num_seeds: int, until_ns: int | None = None, *, watches: bool = False
) -> Iterator[SeedResult]:
    return run_all(range(first_seed, first_seed + num_seeds), until_ns, watches=watches)


def run_all(seeds: Sequence[int], until_ns: int | None = None, *, watches: bool = False) -> Iterator[SeedResult]:
    return run_each(seeds, partial(run_seed, until_ns=until_ns, watches=watches))


def run_each(seeds: Sequence[int], run: RunSeed, *, are_long: bool = False) -> Iterator[SeedResult]:
    """In the order of the seeds, from as many processes as there are cores when that pays.

    are_long: each takes longer than it takes to start a process, as whole clusters do
    """
    num_processes = min(num_cores(), len(seeds) if are_long else len(seeds) // WORTH_A_PROCESS + 1)
    if num_processes <= 1:
        yield from map(run, seeds)
        return
    with _workers(num_processes) as pool:
        yield from pool.imap(run, seeds, chunksize=1 if are_long else 4)


def run_until(first_seed: int, is_over: Callable[[], bool], *, watches: bool = False) -> Iterator[SeedResult]:
    return run_each_until(first_seed, is_over, partial(run_seed, watches=watches))


def run_each_until(first_seed: int, is_over: Callable[[], bool], run: RunSeed) -> Iterator[SeedResult]:
    """Seeds in order, on all cores, until somebody has had enough; what is under way then still counts."""
    with _workers(num_cores()) as pool:
        seeds = count(first_seed)
        ahead = deque([pool.apply_async(run, (next(seeds),))])
        while ahead:
            while sum(not result.ready() for result in ahead) < 2 * num_cores() and not is_over():
                ahead.append(pool.apply_async(run, (next(seeds),)))
            ahead[0].wait(FEED_EVERY_S)  # a long one holds up the order, not the others
            while ahead and ahead[0].ready():
                yield ahead.popleft().get()


def lived_ns(halves: Iterable[Half], now: int) -> int:
    """Virtual time in which at least one request was somewhere. Empty hours show nothing, so they do not count."""
    total = reached = 0
    for half in sorted(halves, key=lambda half: half.arrived_at):
        ended_at = now if half.ended_at is None else half.ended_at
        total += max(0, ended_at - max(reached, half.arrived_at))
        reached = max(reached, ended_at)
    return total


def _workers(num_processes: int) -> Pool:
    """Ctrl+C is for the process that waits for them."""
    context = multiprocessing.get_context("spawn")
    return context.Pool(num_processes, signal.signal, (signal.SIGINT, signal.SIG_IGN))


def _write_step(write: Callable[[str], None], now: int, life, events, commands) -> None:  # type: ignore[no-untyped-def]
    name = f"{life.replica.name}.{life.incarnation.id}"
    for line in trace_step(now, name, events, commands):
        write(line)
