"""What admission keeps free for the output of those who were admitted, so that they need not be pushed back."""

from dataclasses import dataclass

from tandem.core.disagg.sides import PrefillSide
from tandem.core.scheduler.page_tables import lacks_page
from tandem.core.scheduler.request_state import Progress, State
from tandem.core.scheduler.state import NodeState
from tandem.core.values import ceil_div


@dataclass(slots=True)
class Reserve:
    short_pages: int  # that running requests need at this moment and have not
    tokens: int  # expected output

    @classmethod
    def of(cls, node: NodeState) -> "Reserve":
        running = node.live(State.RUNNING)
        admitted = (*running, *node.live(State.ARRIVING), *node.live(State.COMPUTING), *node.live(State.LOADING))
        short_pages = sum(lacks_page(node, progress) for progress in running)
        return cls(short_pages, sum(expected_tokens(node, progress) for progress in admitted))

    def pages(self, node: NodeState, newcomer: Progress) -> int:
        tokens = self.tokens + expected_tokens(node, newcomer)
        return self.short_pages + ceil_div(int(tokens * node.settings.conservativeness), node.settings.page_size)

    def without(self, node: NodeState, progress: Progress) -> None:
        """One who runs is pushed back."""
        self.short_pages -= lacks_page(node, progress)
        self.tokens -= expected_tokens(node, progress)


def expected_tokens(node: NodeState, progress: Progress) -> int:
    """Tokens that a request is assumed to emit here still. A prefill half emits none, nor does who wants a vector."""
    if isinstance(progress.side, PrefillSide) or progress.request.wants_vector:
        return 0
    return min(progress.request.max_new_tokens - progress.generated, node.settings.reserved_decode_tokens)
