"""Gives a life the product's links, over the simulated network."""

from collections.abc import Callable, Iterable
from random import Random

from tandem.core.events import Event
from tandem.core.settings import Role
from tandem.core.values import Address
from tandem.membership import CHALLENGE_BYTES, ClusterSecret
from tandem.server.node.candidates import Endpoint
from tandem.server.wire import DataEndpoint
from tandem.simulator.actors.edge import BOOTSTRAP_PORT
from tandem.simulator.actors.replica import Life, Replica
from tandem.simulator.actors.servers import server_of
from tandem.simulator.faults.options import Options
from tandem.simulator.network.host import CountedLinks
from tandem.simulator.network.links import Network

FIRST_PORT = 9000
CLUSTER_SECRET = ClusterSecret(b"of all simulated clusters")


def link(life: Life, options: Options, network: Network, place: int, report: Callable[[Event], None]) -> None:
    """`place`: the number of its replica. A prefill listens from now on."""
    random = Random(f"links of {options.seed} {life.incarnation}")
    life.endpoint = draw_endpoint(random, place, int(life.incarnation.id))
    host, port = life.endpoint
    life.host.links = CountedLinks(
        life.incarnation,
        life.settings.layout,
        CLUSTER_SECRET,
        tuple(DataEndpoint(host, port) for _ in life.settings.shards),
        life.bounds,
        life.host,
        report=report,
        reach=lambda peer, cut, shards: None,
        note=lambda line: None,
        new_nonce=lambda: random.randbytes(CHALLENGE_BYTES),
        heartbeat=options.heartbeat,
        limits=options.link_limits,
        counts=network.heard,
    )
    if life.replica.role is Role.PREFILL:
        network.listen(life.host, life.endpoint)


def draw_endpoint(random: Random, place: int, epoch: int) -> Endpoint:
    """The next life at a place may get the port of the last one, or another."""
    is_used_again = random.random() < 0.5
    return f"10.0.0.{place + 1}", FIRST_PORT + (0 if is_used_again else epoch)


def introduce(replicas: Iterable[Replica]) -> None:
    """Every decode has met every prefill before, as in a cluster that has been up for a while."""
    lives = [replica.life for replica in replicas if replica.life is not None]
    for decode in [life for life in lives if life.replica.role is Role.DECODE]:
        for prefill in [life for life in lives if life.replica.role is Role.PREFILL]:
            address = Address(server_of(prefill.replica.name), BOOTSTRAP_PORT)
            voucher = (address, prefill.settings.dp_rank)
            decode.host.connect(prefill.incarnation, voucher, prefill.endpoint)
