"""Whole clusters whose model shows the time in its chats, or has no template for them."""

import pytest

from tandem.server.api.client import Live
from tandem.server.api.rendering import Renderer
from tandem.server.api.sample_requests import SampleRequest
from tandem.simulator.whole.options import draw_options
from tandem.simulator.whole.templates import CLOCK, NONE
from tandem.simulator.whole.world import run_seed

AT_ONCE = 10_008  # both halves are asked by a router that stamps no time, and see another one each
WITHOUT = 10_046


def test_prefill_renders_again_what_decode_has_rendered_at_another_time() -> None:
    assert draw_options(AT_ONCE).template == CLOCK
    result = run_seed(AT_ONCE, watches=True)
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.occurred["process Rendered"] == 1


def test_a_prefill_that_does_not_render_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def waits(self: Renderer, ask: SampleRequest, live: Live, arrival_ns: int) -> SampleRequest:
        live.render_at = None
        return ask

    monkeypatch.setattr(Renderer, "render", waits)
    assert run_seed(AT_ONCE).invariant == "L5"


def test_without_a_template_chats_are_refused_and_all_else_is_served() -> None:
    assert draw_options(WITHOUT).template == NONE
    result = run_seed(WITHOUT)
    assert not result.invariant, f"{result.line}: {result.detail}"
    assert result.occurred["code no_chat_template"] >= 1
