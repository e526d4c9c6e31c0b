"""The prefill delayer over several DP ranks: every pass has one outcome, and a rank that is silent holds up nobody."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from core_driver import Replica, World, expected_tokens
from tandem.core.commands import GatherLoad
from tandem.core.events import LoadsGathered, LoadWanted
from tandem.core.rank_load import DelayHistory, RankLoad
from tandem.core.scheduler.delayer_policy import agree
from tandem.core.scheduler.delayer_sync import DelayerSync
from tandem.core.scheduler.request_state import State, WaitingFor
from tandem.core.settings import DelayerSettings
from tandem.core.values import SECOND, ZERO_NS, Nanos

TWO = DelayerSettings(num_ranks=2)
IDLE = RankLoad(is_prefillable=False)
WANTS = RankLoad(is_prefillable=True, num_waiting=1, num_free_slots=4)
BUSY = RankLoad(is_prefillable=True, num_running=4, num_waiting=1, usual_batch=2)


@dataclass
class Group:
    """Ranks and their gathering, driven by hand."""

    world: World
    ranks: list[Replica]
    gathering: DelayerSync
    silent: set[int] = field(default_factory=set)
    heard: list[tuple[int, LoadsGathered]] = field(default_factory=list)
    seen: list[int] = field(default_factory=lambda: [0, 0])

    def carry(self) -> None:
        """Bring what ranks said to the gathering, and its mail to the ranks, until nobody says anything."""
        while self.world.turn_all() or self.collect():
            pass

    def collect(self) -> bool:
        moved = False
        for rank, replica in enumerate(self.ranks):
            said = [command for command in replica.commands if isinstance(command, GatherLoad)]
            new, self.seen[rank] = said[self.seen[rank] :], len(said)
            for command in new:
                if rank not in self.silent:
                    self.post(self.gathering.say(rank, command.number, command.load, self.world.now))
                    moved = True
        return moved

    def post(self, mail: list[tuple[int, LoadWanted | LoadsGathered]]) -> None:
        for rank, event in mail:
            if isinstance(event, LoadsGathered):
                self.heard.append((rank, event))
            self.world.send(self.ranks[rank], event)

    def sleep(self, nanos: int) -> None:
        """Let time pass, with everybody woken when they want to be."""
        until = self.world.now + nanos
        while True:
            self.carry()
            times = [rank.wake_at for rank in self.ranks] + [self.gathering.closes_at]
            wakes = [time for time in times if time is not None and time > self.world.now]
            if not wakes or min(wakes) > until:
                break
            self.world.now = Nanos(min(wakes))
            self.post(self.gathering.tick(self.world.now))
        self.world.now = Nanos(until)


def group(**delayer: object) -> Group:
    world = World()
    settings = {"num_ranks": 2, "queue_min_ratio": 0.5, "max_delay_ns": SECOND} | delayer
    ranks = [
        world.add("unified", f"rank-{rank}", dp_rank=rank, delayer=settings, num_pages=200, max_running=16)
        for rank in range(2)
    ]
    return Group(world, ranks, DelayerSync(ranks[0].state.settings.delayer))


# --- the gathering ---------------------------------------------------------------------------------------------------


def test_a_rank_that_wants_a_pass_makes_the_others_speak_and_all_hear_the_same() -> None:
    gathering = DelayerSync(TWO)
    assert gathering.say(1, None, WANTS, ZERO_NS) == [(0, LoadWanted(1))]
    said = LoadsGathered(1, (IDLE, WANTS), DelayHistory())
    assert gathering.say(0, 1, IDLE, ZERO_NS) == [(0, said), (1, said)]
    assert gathering.closes_at is None


def test_two_ranks_that_ask_at_once_share_a_pass() -> None:
    gathering = DelayerSync(TWO)
    gathering.say(1, None, WANTS, ZERO_NS)
    (_, said), _ = gathering.say(0, None, BUSY, ZERO_NS)
    assert said == LoadsGathered(1, (BUSY, WANTS), DelayHistory())


def test_a_silent_rank_is_left_out_at_the_deadline_and_told_all_the_same() -> None:
    gathering = DelayerSync(TWO)
    gathering.say(1, None, WANTS, ZERO_NS)
    assert gathering.closes_at is not None
    assert gathering.tick(Nanos(gathering.closes_at - 1)) == []
    said = LoadsGathered(1, (WANTS,), DelayHistory())
    assert gathering.tick(gathering.closes_at) == [(0, said), (1, said)]
    assert gathering.say(0, 1, IDLE, ZERO_NS) == [], "too late"


def test_the_memory_outlives_the_ranks() -> None:
    gathering = DelayerSync(TWO)
    memories = []
    for number in range(1, 4):
        gathering.say(1, None, BUSY, ZERO_NS)
        (_, said), _ = gathering.say(0, number, BUSY, ZERO_NS)
        memories.append(said.memory)
    assert memories == [DelayHistory(0, False), DelayHistory(0, True), DelayHistory(1, True)]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from([IDLE, WANTS, BUSY])), max_size=60))
def test_every_rank_decides_alike_whatever_comes_when(said: list[tuple[int, bool, RankLoad]]) -> None:
    settings = DelayerSettings(num_ranks=3)
    gathering = DelayerSync(settings)
    decisions: dict[int, list[object]] = {0: [], 1: [], 2: []}
    memory = DelayHistory()
    for moment, (rank, asks, load) in enumerate(said):
        mail = gathering.tick(Nanos(moment * settings.gather_timeout_ns // 4))
        mail += gathering.say(rank, None if asks else gathering.number, load, Nanos(moment * 25_000_000))
        for who, event in mail:
            if isinstance(event, LoadsGathered):
                decisions[who].append(agree(event.loads, event.memory, settings))
                if who == 0:
                    assert event.memory == memory
                    _, memory = agree(event.loads, memory, settings)
    assert decisions[0] == decisions[1] == decisions[2]


# --- nodes that are ranks --------------------------------------------------------------------------------------------


def test_prompts_of_ranks_wait_for_the_pass_and_get_their_tokens() -> None:
    it = group()
    ids = [(rank, it.world.submit(rank, prompt_len=20, seed=seed)) for seed, rank in enumerate(it.ranks * 3)]
    it.sleep(10 * SECOND)
    for seed, (rank, request) in enumerate(ids):
        assert rank.tokens[request] == expected_tokens(20, 4, seed=seed)
    assert {rank for rank, _ in it.heard} == {0, 1}


def test_who_decodes_goes_on_while_a_pass_is_open() -> None:
    it = group(max_delay_passes=1)
    first = it.world.submit(it.ranks[0], max_new_tokens=50)
    while it.ranks[0].state_of(first) is not State.RUNNING:
        it.world.turn_all()
        it.collect()
    it.silent = {0, 1}
    second = it.world.submit(it.ranks[0], seed=2)
    it.carry()
    assert it.ranks[0].state_of(first) is State.DONE
    assert it.ranks[0].progress(second).waiting_for is WaitingFor.GATE
    it.silent = set()
    it.sleep(SECOND)
    assert it.ranks[0].tokens[second] == expected_tokens(40, 4, seed=2)


def test_a_rank_that_is_dead_does_not_hold_up_the_others() -> None:
    it = group()
    it.silent = {1}
    request = it.world.submit(it.ranks[0])
    it.sleep(10 * SECOND)
    assert it.ranks[0].tokens[request] == expected_tokens(40, 4, seed=1)
    assert [len(event.loads) for rank, event in it.heard if rank == 0] == [1]


def test_a_rank_that_slept_through_passes_takes_the_one_that_let_its_prompts() -> None:
    it = group()
    rank = it.ranks[0]
    request = it.world.submit(rank, max_new_tokens=1)
    it.world.run_until(lambda: rank.state_of(request) is State.COMPUTING)
    lets, holds = DelayHistory(29, True), DelayHistory(0, True)
    for number, memory in enumerate((holds, lets, holds, holds)):
        it.world.send(rank, LoadsGathered(number, (WANTS, IDLE), memory))
    it.world.run()
    assert rank.tokens[request] == expected_tokens(40, 1, seed=1)


def test_prompts_of_one_rank_wait_for_the_others_no_longer_than_the_passes_allow() -> None:
    it = group(max_delay_passes=5)
    for rank in it.ranks:
        it.world.submit(rank, max_new_tokens=150, prompt_len=16)
    it.sleep(SECOND // 50)
    late = it.world.submit(it.ranks[0], seed=3)
    it.sleep(10 * SECOND)
    assert it.ranks[0].tokens[late] == expected_tokens(40, 4, seed=3)
    assert max(event.memory.delayed_passes for _, event in it.heard) <= 4
