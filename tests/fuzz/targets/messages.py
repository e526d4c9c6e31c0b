"""Arbitrary well-typed messages of a peer to a prefill and a decode in the middle of their work.

They come through the one door for what peers say, as they do in a server. An input is a stream of frames: what is said
to whom and in whose name. Whatever it is, the node takes it, its books stay right, every request ends by its deadline,
and then nothing is left.
"""

from collections.abc import Mapping

import msgspec
from engine import Run, Target
from msgspec import Struct
from mutators import framed, join_frames, mutate_typed, split_frames

from core_driver import Replica, World, assert_nothing_is_held
from tandem.core.commands import Tell
from tandem.core.disagg.message_checks import Bounds, admitted
from tandem.core.disagg.messages import Message, Ready
from tandem.core.events import BatchReturned, PagesLanded, PeerSaid
from tandem.core.values import SECOND, Incarnation
from targets.http import Broken

PROMPT_TOKENS, NEW_TOKENS = 100, 3
LIMIT_NS = 60 * SECOND
LONG_NS = 1_000 * SECOND  # beyond every deadline and lease
MAX_MESSAGES = 12
BOUNDS = Bounds(vocab_size=60_000, is_extra=lambda extra: True, is_prompt_extra=lambda extra: True)
NOT_DECODED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # an input that no channel lets through


SCENES = ("arrived", "ready", "computing", "offered", "landing", "done")


class Said(Struct, frozen=True):
    """Numbers instead of names where every number means something: a changed input stays an input."""

    scene: (
        int  # how far the requests have come on both sides when the first message comes; of the first frame it counts
    )
    to_decode: bool
    source: Incarnation  # whose connection it is
    message: Message
    wait_ns: int = 0  # before it


def scene_of(until: str) -> tuple[World, Replica, Replica]:
    world = World()
    prefill, decode = world.prefill(chunk_tokens=48, max_running=2), world.decode(max_running=2)
    match until:
        case "arrived":
            world.pair(prefill, decode, prompt_len=PROMPT_TOKENS, max_new_tokens=NEW_TOKENS, timeout_ns=LIMIT_NS)
            return world, prefill, decode
        case "ready" | "computing":
            prefill.holds.add(BatchReturned)
        case "offered":
            decode.holds.add(PagesLanded)
        case "landing":
            decode.holds.add(BatchReturned)
        case "done":
            pass
    for _ in range(2):
        world.pair(prefill, decode, prompt_len=PROMPT_TOKENS, max_new_tokens=NEW_TOKENS, timeout_ns=LIMIT_NS)
    if until == "ready":
        world.run_until(lambda: bool(decode.said(Ready)))
    else:
        world.run()
    return world, prefill, decode


def tell_all(data: bytes) -> None:
    """Raises one of NOT_DECODED."""
    said = [msgspec.msgpack.decode(body, type=Said) for body in split_frames(data)[:MAX_MESSAGES]]
    if not said:
        return
    world, prefill, decode = scene_of(SCENES[said[0].scene % len(SCENES)])
    for one in said:
        world.now = world.now + min(max(one.wait_ns, 0), LONG_NS)  # type: ignore[assignment]  # int is Nanos at run time
        replica = decode if one.to_decode else prefill
        told = admitted(one.message, BOUNDS)
        if told is not None:
            world.step(replica, [PeerSaid(one.source, told)])
    end(world, prefill, decode)


def end(world: World, prefill: Replica, decode: Replica) -> None:
    for replica in (prefill, decode):
        replica.release(*replica.holds)
        for worker_seat in replica.executor.requests.values():
            worker_seat.is_broken = True  # tokens after made-up messages are not compared
    world.advance(LONG_NS)
    for replica in (prefill, decode):
        live = {request for queue in replica.state.queues.values() for request in queue}
        if live:
            raise Broken(f"beyond every deadline {replica.name.name} still has {live}")
    assert_nothing_is_held([prefill, decode])


def seeds() -> Mapping[str, bytes]:
    """What the two really say from each scene on: one by one, and all of it."""
    found: dict[str, bytes] = {}
    for scene, until in enumerate(SCENES):
        world, prefill, decode = scene_of(until)
        for replica in (prefill, decode):
            replica.release(*replica.holds)
        world.advance(2 * SECOND)
        said = [
            Said(scene, replica is prefill, replica.name, command.message)
            for replica in (decode, prefill)
            for command in replica.commands
            if isinstance(command, Tell)
        ]
        kinds = {type(one.message): one for one in said}
        for kind, one in kinds.items():
            found[f"{until}_{kind.__name__.lower()}"] = stream(one)
        found[f"{until}_all"] = stream(*said[:MAX_MESSAGES])
    return found


def stream(*said: Said) -> bytes:
    return join_frames([msgspec.msgpack.encode(one) for one in said])


def peer_messages() -> Run:
    return tell_all


TARGETS = (Target("peer_messages", peer_messages, framed(mutate_typed), 1_200, answers=NOT_DECODED, seeds=seeds),)
