"""An operator who takes workers out of a router and puts them back, while requests are under way there."""

from dataclasses import dataclass
from random import Random
from typing import Protocol

from msgspec import structs

from tandem.core.router.messages import RouterEvent, WorkerAdded, WorkerRemoved
from tandem.core.router.router import Router
from tandem.core.router.worker_registry import RegisteredWorker
from tandem.core.values import MILLISECOND, SECOND
from tandem.simulator.actors.upstream_calls import Surroundings

SHARE = 0.2  # of the requests that a router gets


class Routing(Protocol):
    """What an operator sees of a gateway."""

    world: Surroundings
    epoch: int
    router: Router | None

    def tell(self, *events: RouterEvent) -> None: ...


@dataclass(slots=True)
class Turnover:
    random: Random

    def visit(self, gateway: Routing) -> None:
        """Now and then one worker leaves. It comes back soon, so that healing finds all of them."""
        if gateway.router is None or gateway.world.is_healed or self.random.random() >= SHARE:
            return
        registry = gateway.router.registry
        there = [worker for worker in registry.workers() if worker.id not in registry.leaving()]
        if not there:
            return
        worker = self.random.choice(there)
        gateway.tell(WorkerRemoved(worker.id))
        away_ns = self.random.randrange(100 * MILLISECOND, 3 * SECOND)
        gateway.world.clock.after(away_ns, self._put_back, gateway, worker, gateway.epoch)

    def _put_back(self, gateway: Routing, worker: RegisteredWorker, epoch: int) -> None:
        """A router that was started anew knows everybody."""
        if gateway.router is not None and gateway.epoch == epoch:
            gateway.tell(WorkerAdded(structs.replace(worker, id=gateway.router.registry.next_id)))
