"""What all hosts of a server have to be told alike, and who may join: decided by node rank 0, without I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.server.hosts.messages import Join, Refused, Welcome, as_reason


@dataclass(slots=True)
class Roster:
    """The other hosts of one server: which are there, by node rank."""

    nnodes: int
    fields: Mapping[str, str]
    there: dict[int, str] = field(default_factory=dict[int, str])  # node rank -> address

    def admit(self, join: Join, address: str) -> Welcome | Refused:
        """Enters a host that is welcome."""
        if not 0 < join.node_rank < self.nnodes:
            return Refused(f"node rank {join.node_rank} is none of 1 to {self.nnodes - 1}", is_final=True)
        if difference := first_difference(self.fields, join.fields, node_rank=join.node_rank):
            return Refused(as_reason(difference), is_final=True)
        if join.node_rank in self.there:
            other = self.there[join.node_rank]
            return Refused(f"node rank {join.node_rank} is there already, at {other}", is_final=False)
        self.there[join.node_rank] = address
        return Welcome()

    def leave(self, node_rank: int) -> None:
        del self.there[node_rank]

    def missing(self, node_ranks: set[int]) -> list[int]:
        return sorted(node_ranks - {0} - self.there.keys())


def first_difference(here: Mapping[str, str], there: Mapping[str, str], *, node_rank: int) -> str:
    """A sentence that names it; empty where there is none."""
    for name in sorted({*here, *there}):
        ours, theirs = here.get(name, "not known"), there.get(name, "not known")
        if ours != theirs:
            return f"{name} is {theirs} on node rank {node_rank} and {ours} on node rank 0; all hosts need the same"
    return ""
