"""Which bytes of a page one worker of a prefill has for one worker of a decode, however the two are cut.

The KV of a page is a grid of cells, one per KV head and layer. A server that is cut into pipeline stages and
tensor-parallel shards (`values.Cut`) gives each of its workers a box of them: some heads of some layers. A *part* is
what the boxes of two workers, one on each side, have in common and one pulls from the other. Over all parts of a
decode's worker each of its cells comes exactly once: a head that several shards of the prefill hold is read from one.
So is what the context-parallel ranks of a prefill hold, who all have the whole KV: each of them lends to other readers.

In memory a page has its heads one behind the other, and within a head its layers. So a part is a number of equal *runs*
at equal distances, on either side others: all of it is one run where both sides have the same layers or one head.

Both sides compute the same parts from the two cuts, so nobody has to tell them, and the order of the parts is that in
which an OFFER has their digests. Arithmetic only, also for the engine, which has to hold what is said here.
"""

from functools import lru_cache

from msgspec import Struct

from tandem.core.values import Cut, ShardId

_CACHED_PAIRS = 256  # of cuts: a server meets few


def share(total: int, rank: int, size: int) -> range:
    """Of `total` things in a row, those of number `rank` of `size`: over all ranks all of them, once, in order."""
    return range(total * rank // size, total * (rank + 1) // size)


def kv_heads_of(tp_rank: int, tp_size: int, num_kv_heads: int) -> range:
    """The KV heads of a tensor-parallel shard: its share, or one that several have where there are more shards."""
    if tp_size <= num_kv_heads:
        return share(num_kv_heads, tp_rank, tp_size)
    head = tp_rank * num_kv_heads // tp_size
    return range(head, head + 1)


def holders(head: int, tp_size: int, num_kv_heads: int) -> list[int]:
    """The tensor-parallel ranks that have this KV head, in order: one, or several where there are more than heads."""
    return [rank for rank in range(tp_size) if head in kv_heads_of(rank, tp_size, num_kv_heads)]


class KvGrid(Struct, frozen=True):
    """Of a whole model."""

    num_layers: int = 1
    num_kv_heads: int = 1

    def can_be_cut(self, cut: Cut) -> bool:
        """Every stage needs a layer. Any number of tensor-parallel shards will do: they share heads."""
        return min(cut.tp_size, cut.cp_size) >= 1 and 1 <= cut.pp_size <= self.num_layers


class Box(Struct, frozen=True):
    """Cells of a page: of these heads, these layers."""

    heads: range
    layers: range

    @property
    def num_cells(self) -> int:
        return len(self.heads) * len(self.layers)

    def cells(self) -> list[tuple[int, int]]:
        """(head, layer), in the order in which a worker that has just this box has them in memory."""
        return [(head, layer) for head in self.heads for layer in self.layers]


class Part(Struct, frozen=True):
    source: ShardId  # of the prefill
    target: ShardId  # of the decode
    box: Box


class Runs(Struct, frozen=True):
    """`count` pieces of a page, each of `size` bytes, whose beginnings are `stride` bytes apart."""

    first: int
    size: int
    stride: int
    count: int

    @property
    def num_bytes(self) -> int:
        return self.size * self.count

    @property
    def end(self) -> int:
        return self.first + self.stride * (self.count - 1) + self.size


def box_of(grid: KvGrid, cut: Cut, shard: ShardId) -> Box:
    """What one worker holds."""
    stage, _, tp_rank = cut.place(shard)
    return Box(kv_heads_of(tp_rank, cut.tp_size, grid.num_kv_heads), share(grid.num_layers, stage, cut.pp_size))


@lru_cache(maxsize=_CACHED_PAIRS)
def parts(grid: KvGrid, source: Cut, target: Cut) -> tuple[Part, ...]:
    """In order of sources, then of targets. Between sides that are cut alike part i is all that worker i has."""
    found = [
        Part(source_shard, target_shard, box)
        for target_shard in target.shards
        for source_shard, box in _sources(grid, source, target, target_shard)
    ]
    return tuple(sorted(found, key=lambda part: (part.source, part.target)))


def _sources(grid: KvGrid, source: Cut, target: Cut, shard: ShardId) -> list[tuple[ShardId, Box]]:
    """From whom a worker of the decode reads, and what."""
    own = box_of(grid, target, shard)
    _, reader_cp, tp_rank = target.place(shard)
    lender = (reader_cp if target.cp_size > 1 else shard) % source.cp_size  # any of them would do
    heads: dict[int, list[int]] = {}  # tensor-parallel rank of the prefill -> heads
    for head in own.heads:
        readers = holders(head, target.tp_size, grid.num_kv_heads)
        owners = holders(head, source.tp_size, grid.num_kv_heads)
        # Shards that have the same head are spread over those that have it there.
        heads.setdefault(owners[readers.index(tp_rank) * len(owners) // len(readers)], []).append(head)
    found: list[tuple[ShardId, Box]] = []
    for stage in range(source.pp_size):
        theirs = share(grid.num_layers, stage, source.pp_size)
        layers = range(max(own.layers.start, theirs.start), min(own.layers.stop, theirs.stop))
        if layers:
            for rank, mine in heads.items():  # those of one rank follow each other, as both sides have them in order
                box = Box(range(mine[0], mine[-1] + 1), layers)
                found.append((source.shard(stage, lender, rank), box))
    return found


def runs_of(part: Box, held: Box, cell_bytes: int) -> Runs:
    """Where a worker that holds `held` has `part` of it."""
    stride = len(held.layers) * cell_bytes
    size = len(part.layers) * cell_bytes
    first = (part.heads.start - held.heads.start) * stride + (part.layers.start - held.layers.start) * cell_bytes
    if size == stride:
        return Runs(first, size * len(part.heads), size * len(part.heads), 1)
    return Runs(first, size, stride, len(part.heads))


class Tile(Struct, frozen=True):
    """What one worker pulls from one worker of a peer."""

    index: int  # of the part among those of the two cuts
    source: ShardId
    there: Runs
    here: Runs
    page_bytes: int  # of a page there


class KvShard(Struct, frozen=True):
    """The part of every page that one worker has. cell_bytes: keys and values of one head and layer, for one page."""

    grid: KvGrid
    cut: Cut
    shard: ShardId
    cell_bytes: int

    @classmethod
    def whole(cls, page_bytes: int, shard: int = 0) -> "KvShard":
        """A worker of which nobody needs to know more than the size of its pages, beside others that are like it."""
        cut = Cut(tp_size=shard + 1)
        return cls(KvGrid(num_layers=1, num_kv_heads=cut.tp_size), cut, ShardId(shard), page_bytes)

    @property
    def box(self) -> Box:
        return box_of(self.grid, self.cut, self.shard)

    @property
    def page_bytes(self) -> int:
        return self.box.num_cells * self.cell_bytes

    def may_be_read(self, runs: Runs) -> bool:
        """Whether these are whole cells of a page here, and no more pieces than heads: more are in no part."""
        numbers = (runs.first, runs.size, runs.stride)
        are_cells = 0 < runs.size <= runs.stride and not any(number % self.cell_bytes for number in numbers)
        return are_cells and 0 < runs.count <= len(self.box.heads) and runs.end <= self.page_bytes

    def lends(self, reader: Cut) -> tuple[Runs, ...]:
        """What the workers of a decode read of a page here, in order of the parts."""
        box = self.box
        found = parts(self.grid, self.cut, reader)
        return tuple(runs_of(part.box, box, self.cell_bytes) for part in found if part.source == self.shard)

    def pulls(self, owner: Cut) -> tuple[Tile, ...]:
        """What this worker reads of a page of a prefill: all that it has, each cell once."""
        box = self.box
        found: list[Tile] = []
        for index, part in enumerate(parts(self.grid, owner, self.cut)):
            if part.target == self.shard:
                held = box_of(self.grid, owner, part.source)
                there, here = runs_of(part.box, held, self.cell_bytes), runs_of(part.box, box, self.cell_bytes)
                found.append(Tile(index, part.source, there, here, held.num_cells * self.cell_bytes))
        return tuple(found)
