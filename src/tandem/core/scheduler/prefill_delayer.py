"""The prefill delayer of one replica: what its node asks in each pass before prompts may begin.

Two policies of one shape: `AlwaysOpen`, and `Delayer`, which measures this rank's load, agrees with the other ranks,
and keeps the books. A rank that is alone agrees with itself at once. Where there are several, a pass is asked for
(`DelayerSync`), and its outcome is for the next batch that is planned; meanwhile who decodes goes on. It is asked
about prompts that are admitted already, so they have pages, slot and result slot, and nothing can come in between once
it lets them. A prompt that has begun always goes on.

A request that is held waits for `WaitingFor.GATE`. It is held only while somebody decodes or is about to: each batch
that returns asks again, and the time at which the queue gate gives up is a wake-up of the node.
"""

from typing import Protocol

from msgspec import Struct, structs

from tandem.core.commands import GatherLoad, PromptsLetIn
from tandem.core.disagg.sides import PrefillSide
from tandem.core.events import LoadsGathered
from tandem.core.rank_load import RankLoad
from tandem.core.scheduler.delayer_policy import agree, expected_batch, remember_batch, worth_waiting_for
from tandem.core.scheduler.prompt_costs import next_prompt_ns, remember_arrivals
from tandem.core.scheduler.request_state import Progress, State, WaitingFor
from tandem.core.scheduler.state import NodeState
from tandem.core.settings import DelayerSettings, NodeSettings
from tandem.core.values import ZERO_NS, Nanos


class PrefillGate(Protocol):
    def may_begin(self, node: NodeState, num_decoding: int) -> bool:
        """May admitted prompts that are not begun be in this batch? `num_decoding`: rows that would decode instead."""
        ...

    def planned(self, node: NodeState, num_rows: int) -> None:
        """So many prompt rows are in the batch that was asked about."""
        ...

    def opens_at(self, node: NodeState) -> Nanos | None:
        """When to ask again although nothing has happened."""
        ...


class AlwaysOpen(Struct, frozen=True):
    def may_begin(self, node: NodeState, num_decoding: int) -> bool:
        return True

    def planned(self, node: NodeState, num_rows: int) -> None:
        pass

    def opens_at(self, node: NodeState) -> Nanos | None:
        return None


class Delayer(Struct, frozen=True):
    settings: DelayerSettings

    def may_begin(self, node: NodeState, num_decoding: int) -> bool:
        state = node.delayer
        computing = node.live(State.COMPUTING)
        fresh = [progress for progress in computing if is_fresh(progress)]
        if self.settings.tunes_itself:
            state.arrivals = remember_arrivals(state.arrivals, (progress.entered_at for progress in fresh))
        load = state.load = self.look(node, computing, num_decoding)
        if self.settings.num_ranks > 1 and state.gathered is None:
            state.decision = None
            if not fresh:
                state.since = None  # whom the last delay was for has gone
            self.ask(node, load, fresh)
            return False
        ranks = (load,)
        if state.gathered is not None:
            ranks, state.memory, state.gathered = state.gathered.loads, state.gathered.memory, None
        decision, memory = agree(ranks, state.memory, self.settings)
        state.decision, state.ranks = decision, ranks
        if self.settings.tunes_itself and fresh:
            state.num_wanted = worth_waiting_for(ranks)
        if decision.allows:
            state.waited_passes = state.memory.delayed_passes
            state.waited_ns = Nanos(node.now - state.since) if state.since is not None else ZERO_NS
            state.since = None
        elif state.since is None:
            state.since = node.now
        state.memory = memory
        for progress in fresh:
            progress.blocked_on = None if decision.allows else WaitingFor.GATE
        return decision.allows

    def ask(self, node: NodeState, load: RankLoad, fresh: list[Progress]) -> None:
        """Want a pass, if there is anything to begin."""
        for progress in fresh:
            progress.blocked_on = WaitingFor.GATE
        if fresh and node.delayer.ask_at <= node.now:
            node.delayer.ask_at = Nanos(node.now + self.settings.pass_ns)
            node.out.append(GatherLoad(None, load))

    def look(self, node: NodeState, computing: list[Progress], num_decoding: int) -> RankLoad:
        """This rank's row. Pages that waiting prompts hold are not 'used': nothing is computed in them yet."""
        state, pool = node.delayer, node.pool
        num_fresh = num_held = 0
        num_running, is_prefillable = num_decoding, False
        decoding = frozenset(node.micro_batches.members)
        for progress in computing:
            if is_fresh(progress):
                num_fresh += 1
                num_held += len(progress.pages) - progress.inserted
            num_running += is_about_to_decode(progress) and progress.id not in decoding
            is_prefillable = is_prefillable or progress.launched < progress.length
        usage = (pool.num_pages - pool.num_free - node.tree.num_evictable - num_held) / pool.num_pages
        watermark = self.settings.low_watermark
        load = RankLoad(
            is_prefillable=is_prefillable,
            is_under_watermark=is_prefillable and watermark is not None and usage < watermark,
            num_running=num_running,
            num_free_slots=node.settings.max_running - num_running,
            usual_batch=max(state.batches, default=0),
            num_waiting=len(node.queues[State.QUEUED]) + num_fresh,
            is_timed_out=state.since is not None and node.now - state.since >= self.settings.max_delay_ns,
        )
        return self.weigh(node, load, computing) if self.settings.tunes_itself else load

    def weigh(self, node: NodeState, load: RankLoad, computing: list[Progress]) -> RankLoad:
        """With what tells whether more prompts are worth waiting for."""
        settings, own = node.settings, node.delayer
        unfinished = [progress for progress in computing if progress.launched < progress.length]
        fresh = [progress for progress in unfinished if is_fresh(progress)]
        num_tokens = sum(progress.length - progress.launched for progress in fresh)
        most = node.chunk_budget.largest_while_others_wait(
            settings.prefill_stall, settings.chunk_tokens, settings.page_size
        )
        is_full = num_tokens >= most or load.num_waiting >= (settings.prompt_batch_max or load.num_waiting + 1)
        return structs.replace(
            load,
            waited_ns=Nanos(sum(node.now - progress.entered_at for progress in fresh)),
            batch_ns=node.chunk_budget.cost.fixed_ns,
            next_prompt_ns=next_prompt_ns(own.arrivals, node.now),
            gets_no_larger=is_full or len(fresh) < len(unfinished),
        )

    def planned(self, node: NodeState, num_rows: int) -> None:
        state = node.delayer
        load, decision = state.load, state.decision
        assert load is not None
        if decision is None:
            return  # a pass has been asked for
        if not num_rows and not load.num_running:
            return  # nobody runs and nobody could: not a pass
        if num_rows or decision.lacks_slots:
            would_be = expected_batch(
                num_waiting=load.num_waiting,
                num_running=load.num_running,
                max_running=node.settings.max_running,
                most=self.settings.prompt_batch_max,
            )
            state.batches = remember_batch(state.batches, num_rows or would_be, window=self.settings.window)
        outcome = (decision.estimation, decision.allows, decision.reason, num_rows > 0)
        state.outcomes[outcome] = state.outcomes.get(outcome, 0) + 1
        if decision.allows and num_rows:
            node.out.append(PromptsLetIn(state.waited_passes, state.waited_ns))

    def opens_at(self, node: NodeState) -> Nanos | None:
        since = node.delayer.since
        times: list[int] = []
        if since is not None and self.settings.has_queue_gate:
            times.append(since + self.settings.max_delay_ns)
        if self.settings.num_ranks > 1 and any(map(is_fresh, node.live(State.COMPUTING))):
            times.append(node.delayer.ask_at)
        # What is over already is asked again whenever a batch returns.
        times = [time for time in times if time > node.now]
        return Nanos(min(times)) if times else None


ALWAYS_OPEN = AlwaysOpen()


def prefill_gate(settings: NodeSettings) -> PrefillGate:
    return ALWAYS_OPEN if settings.delayer is None else Delayer(settings.delayer)


def on_load_wanted(node: NodeState, number: int) -> None:
    """Another rank has prompts to begin."""
    if node.settings.delayer is not None:
        computing = node.live(State.COMPUTING)
        load = Delayer(node.settings.delayer).look(node, computing, node.micro_batches.num_members)
        node.out.append(GatherLoad(number, load))


def on_loads_gathered(node: NodeState, event: LoadsGathered) -> None:
    """For the next batch, if there are prompts to begin. A pass that let them is not taken back before it is used."""
    settings, state = node.settings.delayer, node.delayer
    if settings is None or not any(map(is_fresh, node.live(State.COMPUTING))):
        return
    before = state.gathered
    if before is None or not agree(before.loads, before.memory, settings)[0].allows:
        state.gathered = event


def is_fresh(progress: Progress) -> bool:
    """Admitted, and no batch has begun with it: the workers do not know its pages."""
    return progress.synced_pages == 0


def is_about_to_decode(progress: Progress) -> bool:
    """The last chunk of its prompt is launched, and what comes after runs here."""
    return progress.launched >= progress.length and not isinstance(progress.side, PrefillSide)
