"""Prompts that show the time, as a chat template may: what such a prompt says depends on when it was rendered.

Every server has a wall clock of its own, some seconds off. Our routers stamp one time into both halves of a request;
under other gateways each half is rendered at its server's own time, and mostly they differ.
"""

from dataclasses import dataclass, field
from random import Random

from tandem.core.settings import Role
from tandem.core.values import SECOND
from tandem.simulator.model import FIRST_TOKEN, VOCABULARY
from tandem.simulator.oracle import Script

EPOCH = 1_700_000_000  # Unix seconds at the beginning of virtual time
MAX_SKEW_NS = 3 * SECOND
SPREAD = 7919  # tokens of neighbouring times lie apart
UNITS = (1, 1, 10, 86_400)  # seconds; the date is mostly the same on both halves


@dataclass(slots=True)
class ShownTime:
    """In the middle of a prompt one token stands for the time, and takes the place of one or two."""

    unit_s: int = 1  # how coarse it is
    prefill_differs: bool = False  # it has a template of its own, and renders something else at any time
    scripts: dict[tuple[int, bool], Script] = field(default_factory=dict[tuple[int, bool], Script])

    def script(self, plain: Script, rendered_at: int, role: Role) -> Script:
        time, is_other = rendered_at // self.unit_s, self.prefill_differs and role is Role.PREFILL
        known = self.scripts.get((time, is_other))
        if known is None:
            place, width = len(plain.prompt) // 2, 1 + time % 2
            token = FIRST_TOKEN + (SPREAD * time + is_other) % VOCABULARY
            prompt = (*plain.prompt[:place], token, *plain.prompt[place + width :])
            known = Script(prompt, plain.max_new_tokens, plain.eos_one_in)
            self.scripts[time, is_other] = known
        return known


@dataclass(slots=True)
class WallClocks:
    seed: int
    skews: dict[str, int] = field(default_factory=dict[str, int])

    def seconds(self, name: str, now: int) -> int:
        """Unix time of a server or router, at `now` in virtual time."""
        skew_ns = self.skews.get(name)
        if skew_ns is None:
            skew_ns = self.skews[name] = Random(f"wall clock {self.seed} {name}").randrange(MAX_SKEW_NS)
        return EPOCH + (now + skew_ns) // SECOND


def draw_shown_time(random: Random, *, hostility: float) -> ShownTime:
    return ShownTime(random.choice(UNITS), prefill_differs=bool(hostility) and random.random() < 0.1)
