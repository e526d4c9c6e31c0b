"""Laws of the KV events: for any course of events an index made of them is the prefix tree, with the right tokens."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from core_driver import ROOT, Replica, prompt_at
from core_scripts import ACTIONS, USUAL, Life, lives, scripts
from kv_subscriber import Index, read_batch
from tandem.core.commands import AnnounceCleared, AnnounceRemoved, AnnounceStored
from tandem.core.events import PromptRendered, RequestArrived
from tandem.core.scheduler.node import EngineNode
from tandem.core.values import RequestId
from tandem.pagehash import prompt_hashes
from tandem.sampling import Payload, SamplingParams
from tandem.server.node.kv_events import KvAnnouncement, KvEvents, block_hash, encode

FAULTS = [name for name in ACTIONS if name not in USUAL]
PAGE = 16
ANNOUNCED = (AnnounceStored, AnnounceRemoved, AnnounceCleared)


class Sent:
    """In place of a socket: what has been published comes to the index at once."""

    def __init__(self) -> None:
        self.index = Index()

    def publish(self, announced: list[KvAnnouncement]) -> None:
        self.index.take(read_batch(encode(announced, ts=0.0, page_size=PAGE, dp_rank=0)))

    def close(self) -> None:
        pass


def payload(request: RequestId, tokens: list[int]) -> Payload:
    return Payload(int(request), array("i", tokens).tobytes(), SamplingParams(), b"")


@settings(max_examples=max(150, settings.default.max_examples))
@given(chosen=lives, script=scripts([*USUAL, *USUAL, *FAULTS, "flush"]))
def test_replaying_the_events_gives_what_the_tree_holds_after_every_step(
    chosen: dict, script: list[tuple[str, int]]
) -> None:
    life = Life({**chosen, "prefix_cache": True, "announces_cache": True})
    life.run(script)
    life.heal()
    for replica in life.world.replicas.values():
        follow(life, replica)


def follow(life: Life, replica: Replica) -> None:
    """The steps of a replica once more, with an observer beside them that is given the prompts as a node process is."""
    asked = {one.request: one for one in life.asked if one.replica is replica}
    node, sent = EngineNode(replica.state.settings), Sent()
    events = KvEvents(sent, page_size=PAGE)
    for now, happened, effects in replica.log:
        for event in happened:
            if isinstance(event, RequestArrived | PromptRendered):
                shape = asked[event.request.id]
                tokens = prompt_at(shape.prompt_len, shape.seed, event.request.rendered_at)
                events.prompt_came(payload(event.request.id, tokens))
        events.before(now, happened)
        again = node.step(happened, now)
        assert again == effects
        events.after(now, happened, again)
        held = node.state.tree.nodes
        assert sent.index.blocks.keys() == {block_hash(page_hash) for page_hash in held}
    for block, tokens in sent.index.blocks.items():
        assert block == block_hash(prompt_hashes(ROOT, tokens, page_size=PAGE)[-1])
    assert events.num_kept == len(node.state.requests) == 0 or replica.is_dead


@given(chosen=lives, script=scripts([*USUAL, *FAULTS]))
def test_nodes_that_nobody_listens_to_announce_nothing_and_decide_the_same(
    chosen: dict, script: list[tuple[str, int]]
) -> None:
    quiet, told = Life(chosen), Life({**chosen, "announces_cache": True})
    for life in (quiet, told):
        life.run(script)
        life.heal()
    for one, other in zip(quiet.world.replicas.values(), told.world.replicas.values(), strict=True):
        assert not any(isinstance(command, ANNOUNCED) for command in one.commands)
        assert one.commands == [command for command in other.commands if not isinstance(command, ANNOUNCED)]


@given(st.binary(min_size=16, max_size=16))
def test_a_block_hash_is_the_same_number_to_those_who_read_it_signed_and_unsigned(page_hash: bytes) -> None:
    assert 0 <= block_hash(page_hash) < 1 << 63
