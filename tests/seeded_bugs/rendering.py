"""Seeded bugs of prompts that both halves have rendered, at two times."""

from collections.abc import Iterator

from seeded_bugs.base import mutant, replaced
from tandem.core.commands import Tell
from tandem.core.disagg import rendering
from tandem.core.disagg.messages import Abort
from tandem.core.disagg.sides import PrefillSide
from tandem.core.values import Cause


@mutant(5, "L5")
def another_time_is_another_prompt() -> Iterator[None]:
    with replaced(rendering, "differs_in_time", lambda node_state, request, peer, ready: False):
        yield


@mutant(5, "L5")
def decode_is_told_to_give_up_while_its_prompt_is_rendered() -> Iterator[None]:
    original = rendering.render_again

    def render_again(node_state, one, side, ready):
        original(node_state, one, side, ready)
        me = node_state.settings.incarnation
        abort = Abort(ready.room, me, Cause.PROTOCOL, "decode means another prompt")
        node_state.out.append(Tell(ready.source, abort))

    with replaced(rendering, "render_again", render_again):
        yield


@mutant(1, "S25")
def ready_said_again_asks_again() -> Iterator[None]:
    original = rendering.on_ready

    def on_ready(node_state, peer, ready):
        one = node_state.in_room(ready.room)
        if one is not None and isinstance(one.side, PrefillSide):
            one.side.ready = None
        original(node_state, peer, ready)

    with replaced(rendering, "on_ready", on_ready):
        yield
