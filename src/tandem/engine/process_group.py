"""The workers of one replica as processes: collectives of torch.distributed behind the ports of `parallel.py`.

One static group, made at start; a worker that is gone ends all others, for nothing is ever sent anew. It has a backend
for each kind of memory, and where a tensor is says which one carries it: gloo, over TCP, those on the CPU (tokens and
numbers always), NCCL those on devices. Gloo asks nobody who he is, so when all are connected nobody else is let in.

What NCCL is told to do it does later, in the order of the device's default stream: `wait` makes that stream wait, not
the caller. A worker that is gone is not noticed there: who waits for it is ended by its node, with the replica.

A sum is taken in order of ranks, whatever its size and whoever takes it. (A ring that reduces by blocks would add the
rows of a batch in an order that depends on their place in it.)
"""

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented

from tandem.core.values import ShardId
from tandem.engine.closed_doors import close_doors
from tandem.engine.parallel import OneContext, OneShard, Shard, WorkerGone
from tandem.ranks import Rank, all_ranks

JOIN_SECONDS = 300  # until all are there: the slowest has to import torch first
SILENCE_DAYS = 365  # an idle server says nothing; who hangs is found by the watchdog
LOOPBACK = "lo"
INTERFACES = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}  # =: this one, not all like it
NCCL_WATCHED = "NCCL_RAS_ENABLE"  # a port at which NCCL tells whoever asks how it is
HIDDEN, TOKENS = 1, 2  # tags. NCCL has none; it carries hidden states only, so that their order is enough
MOST_BATCHES_BEHIND = 64  # more than a worker may be behind another one, with all that the node launches ahead


@contextlib.contextmanager
def others_there() -> Iterator[None]:
    """gloo says with a bare RuntimeError that a connection is gone, NCCL with one of its own."""
    try:
        yield
    except torch.OutOfMemoryError:  # of this device: nobody is gone
        raise
    except RuntimeError as error:
        raise WorkerGone(str(error).splitlines()[0]) from error


class TensorGroup:
    """A `Group`: the shards of one stage."""

    def __init__(self, shard: Shard, group: dist.ProcessGroup, *, is_exact: bool) -> None:
        self.shard = shard
        self.is_exact = is_exact
        self._group = group

    @property
    def mlp(self) -> "TensorGroup":
        return self

    def rows(self, own: Tensor) -> Tensor:
        return own

    def sums(self, part: Tensor) -> Tensor:
        return self.all_reduce(part)

    def all_reduce(self, part: Tensor) -> Tensor:
        first, *others = gathered(part, self.shard.size, self._group)
        for other in others:
            first += other
        return first

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        width = max(sizes)
        if part.shape[-1] < width:
            part = torch.nn.functional.pad(part, (0, width - part.shape[-1]))
        parts = zip(gathered(part, self.shard.size, self._group), sizes, strict=True)
        return torch.cat([other[..., :size] for other, size in parts], dim=-1)


class ContextGroup:
    """The `ContextRanks` of one worker: those that have the same layers and heads."""

    def __init__(self, shard: Shard, group: dist.ProcessGroup) -> None:
        self.shard = shard
        self._group = group

    def all_rows(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        return joined_rows(own, sizes, self._group)


def gathered(part: Tensor, size: int, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """What all `size` members have given, of one shape, in order of ranks."""
    found = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
    with others_there():
        dist.all_gather([as_bytes(one) for one in found], as_bytes(part.contiguous()), group=group)
    return found


def joined_rows(own: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """The rows of all members, in order of ranks, of which each has so many."""
    padded = torch.nn.functional.pad(own, (0, 0, 0, max(sizes) - own.shape[0]))
    return torch.cat([rows[:size] for rows, size in zip(gathered(padded, len(sizes), group), sizes, strict=True)])


@dataclass
class Sent:
    """What was sent last, with its bytes. most: 0 on a device, which goes on when it is taken: of all that NCCL does
    there nothing may run beside another thing (two that wait for each other would do so for ever)."""

    most: int
    works: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)

    def add(self, work: dist.Work, values: Tensor) -> None:
        """Let go of the oldest, which was taken long ago."""
        self.works.append((work, values))
        if len(self.works) > self.most:
            self.works.popleft()[0].wait()


class ProcessPipeline:
    """A `Pipeline`. Things of one kind arrive in the order in which they were sent."""

    def __init__(self, rank: Rank, device: str) -> None:
        self.rank = rank
        self._device = device
        self.stage = Shard(rank.pp_rank, rank.pp_size)
        self.samples = rank.samples
        ranks = all_ranks(*rank.cut.sizes)
        self._in_stage = rank.tp_size * rank.cp_size
        self._others = [other.shard for other in ranks if other != rank]
        self._sampler = next(other.shard for other in ranks if other.samples)
        # Maybe not gone yet: the bytes must stay. A batch that has returned from all workers has gone through all
        # stages, and the node launches at most one more than there are stages; tokens are taken later.
        self._hidden_sent = Sent(most=rank.pp_size + 1 if device == "cpu" else 0)
        self._tokens_sent = Sent(most=MOST_BATCHES_BEHIND * len(self._others))

    def greet(self) -> None:
        """See the function of this name."""
        word = torch.zeros(1, dtype=torch.uint8, device=self._device)
        before, behind = self.rank.shard - self._in_stage, self.rank.shard + self._in_stage
        if self.stage.rank > 0:
            dist.recv(word, src=before, tag=HIDDEN)
        if self.stage.rank < self.stage.size - 1:
            dist.send(word, dst=behind, tag=HIDDEN)
        word.cpu()

    def receive_hidden(self, rows: int, features: int, dtype: torch.dtype) -> Tensor:
        hidden = torch.empty(rows, features, dtype=dtype, device=self._device)
        self._receive(hidden, self.rank.shard - self._in_stage, tag=HIDDEN)
        return hidden

    def send_hidden(self, hidden: Tensor) -> None:
        self._send(hidden.contiguous(), self.rank.shard + self._in_stage, tag=HIDDEN, sent=self._hidden_sent)

    def send_tokens(self, tokens: np.ndarray) -> None:
        values = torch.from_numpy(tokens)
        for other in self._others:
            self._send(values, other, tag=TOKENS, sent=self._tokens_sent)

    def receive_tokens(self, count: int) -> np.ndarray:
        tokens = torch.empty(count, dtype=torch.int32)
        self._receive(tokens, self._sampler, tag=TOKENS)
        return tokens.numpy()

    def _send(self, values: Tensor, to: int, *, tag: int, sent: Sent) -> None:
        with others_there():
            work = dist.isend(as_bytes(values), dst=to, tag=tag)
            assert work is not None, "this worker is a member of the group"
            sent.add(work, values)

    def _receive(self, values: Tensor, source: int, *, tag: int) -> None:
        with others_there():
            dist.recv(as_bytes(values), src=source, tag=tag)


def as_bytes(values: Tensor) -> Tensor:
    """A view: backends need not know the type."""
    return values.view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the workers of a group find each other, and how one of them comes there."""

    host: str
    port: int
    listener_fd: int | None = None  # of the socket that listens there, on the first
    own: str = ""  # at which this worker listens for the others, where they are on several hosts; else on loopback
    device: str = "cpu"  # where it computes; all of them have one, or none has


def connect(number: int, size: int, at: Meeting) -> None:
    """This worker to all `size` of its group. Raises OSError or RuntimeError when they do not come."""
    os.environ.update(INTERFACES)  # nothing of it is for other machines, whatever is set
    os.environ.setdefault(NCCL_WATCHED, "0")
    backend = backends(gloo_at(at.own) if at.own else "gloo", at.device)
    is_master = at.listener_fd is not None
    store = TCPStore(
        at.host,
        at.port,
        size,
        is_master,
        timeout=timedelta(seconds=JOIN_SECONDS),
        wait_for_workers=False,
        master_listen_fd=at.listener_fd,
    )
    dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=timedelta(days=SILENCE_DAYS))


def backends(gloo: str, device: str) -> str:
    """As torch has them: for each kind of memory one. gloo: its name."""
    return f"cpu:{gloo}" if device == "cpu" else f"cpu:{gloo},cuda:nccl"


def greet(device: str, groups: Sequence[dist.ProcessGroup | None]) -> None:
    """NCCL connects the workers of a group when they first use it: now, so that no request waits for that, and the
    KV pool takes only what is left then. After `close_doors`: NCCL listens for its own as long as it lives, and asks
    for a number that it has told them. Raises RuntimeError.
    """
    word = torch.zeros(1, dtype=torch.uint8, device=device)
    for group in groups:
        dist.all_gather([torch.empty_like(word) for _ in range(dist.get_world_size(group))], word, group=group)
    word.cpu()  # waits for it


def gloo_at(address: str) -> str:
    """The name of a backend that is gloo, listening at this address whatever interface has it."""

    def make(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]  # pyright: ignore[reportPrivateUsage]
        options._timeout = timeout  # pyright: ignore[reportPrivateUsage]
        return ProcessGroupGloo(store, rank, size, options)

    name = "gloo_at"
    dist.Backend.register_backend(name, make, devices=["cpu"])
    return name


def least(number: int) -> int:
    """The least of what all workers of the group call with; they all have to. Raises WorkerGone."""
    value = torch.tensor([number], dtype=torch.int64)
    with others_there():
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
    return int(value)


class ReplicaGroup:
    """What a worker needs of the others of its replica."""

    def __init__(self, rank: Rank, at: Meeting, *, is_exact: bool = False) -> None:
        """Returns when all are there.

        Raises OSError or RuntimeError when they do not come, WorkerGone when they do not stay.
        """
        connect(rank.shard, rank.num_shards, at)
        self._rank = rank
        self._is_exact = is_exact
        self._groups: list[dist.ProcessGroup] = []
        self.pipeline = ProcessPipeline(rank, at.device)
        self.group = self._tensor_group() if rank.tp_size > 1 else OneShard()
        self.context = self._context_group() if rank.cp_size > 1 else OneContext()
        least(0)  # all have connected to all
        close_doors()
        if at.device != "cpu":
            greet(at.device, self._groups)
            self.pipeline.greet()

    def _tensor_group(self) -> TensorGroup:
        rank, (_, stages, contexts) = self._rank, self._rank.cut.sizes
        rows = [(stage, context) for stage in range(stages) for context in range(contexts)]
        members = [[rank.cut.shard(*row, tp_rank) for tp_rank in range(rank.tp_size)] for row in rows]
        return TensorGroup(Shard(rank.tp_rank, rank.tp_size), self._own_group(members), is_exact=self._is_exact)

    def _context_group(self) -> ContextGroup:
        rank, (shards, stages, contexts) = self._rank, self._rank.cut.sizes
        columns = [(stage, tp_rank) for stage in range(stages) for tp_rank in range(shards)]
        members = [[rank.cut.shard(stage, context, tp) for context in range(contexts)] for stage, tp in columns]
        return ContextGroup(Shard(rank.cp_rank, rank.cp_size), self._own_group(members))

    def _own_group(self, members: list[list[ShardId]]) -> dist.ProcessGroup:
        """All have to make all groups, in one order."""
        groups = [(shards, dist.new_group(list(shards))) for shards in members]
        found = next(group for shards, group in groups if self._rank.shard in shards)
        assert isinstance(found, dist.ProcessGroup)
        self._groups.append(found)
        return found
