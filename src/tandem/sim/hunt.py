"""Runs seeds: one, or many over all cores. A result depends on its seed alone, so results merge in seed order."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import partial
from secrets import randbelow

from tandem.sim.faults import draw_options
from tandem.sim.oracle import Violation
from tandem.sim.report import SeedResult, trace_step
from tandem.sim.world import World

WORTH_A_PROCESS = 20  # seeds; below that, starting processes takes longer than running them
SEED_LIMIT = 1 << 31


def draw_first_seed() -> int:
    return randbelow(SEED_LIMIT)


def run_seed(seed: int, until_ns: int | None = None, write_trace: Callable[[str], None] | None = None) -> SeedResult:
    """One seed to its end, to `until_ns`, or to its first violation."""
    world = World(draw_options(seed))
    if write_trace is not None:
        world.trace = partial(_write_step, write_trace)
    invariant = detail = ""
    try:
        world.schedule_all()
        world.run(until_ns)
    except Violation as violation:
        invariant, detail = violation.invariant, violation.detail
    return SeedResult(
        seed=seed,
        invariant=invariant,
        detail=detail,
        simulated_ns=world.clock.time,
        num_events=world.num_events,
        num_requests=len(world.router.exchanges),
        num_finished=world.router.num_finished(),
        faults=dict(world.faults),
        log_hash=world.log.hexdigest(),
    )


def run_seeds(first_seed: int, num_seeds: int, until_ns: int | None = None) -> Iterator[SeedResult]:
    """In the order of the seeds, from as many processes as there are cores when that pays."""
    seeds = range(first_seed, first_seed + num_seeds)
    num_processes = min(os.cpu_count() or 1, num_seeds // WORTH_A_PROCESS + 1)
    run = partial(run_seed, until_ns=until_ns)
    if num_processes == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap(run, seeds, chunksize=4)


def _write_step(write: Callable[[str], None], now: int, life, events, commands) -> None:  # type: ignore[no-untyped-def]
    name = f"{life.replica.name}.{life.incarnation.epoch}"
    for line in trace_step(now, name, events, commands):
        write(line)
