"""Which of the running requests get their next tokens together, whose turn it is, and what the workers know of that.

A replica of several pipeline stages divides those who decode into up to as many micro-batches, and these take turns:
while the tokens of one are sampled on the last stage, another one is on the first. A stage reads its weights for every
batch, so that few rows cost about as much as one; another micro-batch is worth it from so many members on as make rows
the larger part. With one stage there is one, and all run in every decode batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tandem.core.batch import Join
from tandem.core.scheduler.request_state import Progress
from tandem.core.values import RequestId

UNEVEN = 4  # members: a difference that is left as it is, for who moves waits once for its token


def is_last_sampled(progress: Progress) -> bool:
    """All tokens that it may have are known or being sampled."""
    return progress.generated + progress.pending >= progress.request.max_new_tokens


@dataclass(slots=True)
class MicroBatch:
    members: dict[RequestId, None] = field(default_factory=dict[RequestId, None])
    joins: dict[RequestId, Join] = field(default_factory=dict[RequestId, Join])  # of them, not told to the workers yet
    leaves: list[RequestId] = field(default_factory=list[RequestId])  # in whom the workers see members still
    num_prompt_batches: int = 0  # in a row, since its last batch

    def join(self, progress: Progress, token: bytes) -> None:
        self.members[progress.id] = None
        first = progress.synced_pages
        self.joins[progress.id] = Join(progress.id, first, tuple(progress.pages[first:]), token)
        progress.synced_pages = len(progress.pages)

    def leave(self, progress: Progress) -> None:
        del self.members[progress.id]
        join = self.joins.pop(progress.id, None)
        if join is None:
            self.leaves.append(progress.id)
        else:
            progress.synced_pages = join.first_page
            progress.untold_token = join.token

    def take_changes(self) -> tuple[tuple[Join, ...], tuple[RequestId, ...]]:
        """For its next batch: who joins and who leaves."""
        joins, leaves = tuple(self.joins.values()), tuple(self.leaves)
        self.joins, self.leaves = {}, []
        return joins, leaves


@dataclass(slots=True)
class MicroBatches:
    """Every running request is a member of one of them, but for those whose last token is being sampled; and so may be
    one whose first token is (`join_ahead`)."""

    each: list[MicroBatch]
    num_open: int = 1  # the first of them, which have members
    next: int = 0  # whose turn it is

    @classmethod
    def empty(cls, count: int) -> "MicroBatches":
        return cls([MicroBatch() for _ in range(count)])

    @property
    def members(self) -> list[RequestId]:
        return [request for one in self.each for request in one.members]

    @property
    def num_members(self) -> int:
        return sum([len(one.members) for one in self.each])

    @property
    def all_open(self) -> bool:
        """Each stage has one."""
        return self.num_open == len(self.each)

    @property
    def joining(self) -> set[RequestId]:
        """Members of whom the workers have not heard yet."""
        return {request for one in self.each for request in one.joins}

    @property
    def longest_wait(self) -> int:
        """How many batches of prompts in a row some member has let pass."""
        return max((one.num_prompt_batches for one in self.each if one.members), default=0)

    def join(self, progress: Progress, *, token: bytes = b"") -> None:
        """It gets a token from each batch of the smallest of them, from the next one on. token: as in `Join`"""
        self._smallest.join(progress, token)

    def join_late(self, progress: Progress) -> None:
        """The same for one whose first token is known, unless it has joined ahead of that."""
        if not any(progress.id in one.members for one in self.each):
            self.join(progress)

    def leave(self, progress: Progress) -> None:
        """From the next batch on it gets none, if it is a member."""
        for one in self.each:
            if progress.id in one.members:
                one.leave(progress)

    def leave_if_last(self, requests: Mapping[RequestId, Progress]) -> None:
        """Take those out whose last token is being sampled already."""
        done = [progress for progress in map(requests.__getitem__, self.members) if is_last_sampled(progress)]
        for progress in done:
            self.leave(progress)

    def forget(self, request: RequestId) -> None:
        """The workers forget it, and with that where it was a member."""
        for one in self.each:
            if request in one.leaves:
                one.leaves.remove(request)

    def balance(self, requests: Mapping[RequestId, Progress], least: int) -> None:
        """Open as many as have `least` members each, and even them out where that is much."""
        if len(self.each) == 1:
            return
        before, self.num_open = self.num_open, self._worth(least)
        for one in self.each[self.num_open : before]:
            for request in list(one.members):
                self._move(requests[request], one)
        if self.num_open > before or self._difference >= UNEVEN:
            while self._difference > 1:
                request = next(reversed(self._largest.members))
                self._move(requests[request], self._largest)

    def _worth(self, least: int) -> int:
        """How many are to be open. One more at so many members that each has `least`, one less at half of that."""
        count, found = self.num_members, self.num_open
        while found < len(self.each) and count >= (found + 1) * least:
            found += 1
        while found > 1 and 2 * count < found * least:
            found -= 1
        return found

    @property
    def _difference(self) -> int:
        return len(self._largest.members) - len(self._smallest.members)

    @property
    def _smallest(self) -> MicroBatch:
        return min(self.each[: self.num_open], key=lambda one: len(one.members))

    @property
    def _largest(self) -> MicroBatch:
        return max(self.each[: self.num_open], key=lambda one: len(one.members))

    def _move(self, progress: Progress, source: MicroBatch) -> None:
        """To the smallest. Its last token may still be sampled for a batch of the one that it leaves."""
        source.leave(progress)
        token, progress.untold_token = progress.untold_token, b""
        self._smallest.join(progress, token)

    def in_turn(self) -> Iterator[int]:
        """Indices, from the one whose turn it is."""
        size = len(self.each)
        return ((self.next + offset) % size for offset in range(size))

    def decoded(self, index: int) -> None:
        """It has its batch."""
        self.each[index].num_prompt_batches = 0
        self.next = (index + 1) % len(self.each)

    def waited(self) -> None:
        """A batch of prompts has been launched."""
        for one in self.each:
            one.num_prompt_batches += 1
