"""What the requests of one server share."""

from dataclasses import dataclass

from tandem.config import ServerConfig
from tandem.metrics.log import RequestLog
from tandem.metrics.request_stats import RequestStats
from tandem.server.api.allowed_hosts import AllowedHosts
from tandem.server.api.client import NodeClient
from tandem.server.api.served_model import ServedModel
from tandem.server.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Edge:
    config: ServerConfig
    client: NodeClient
    served: ServedModel
    hosts: AllowedHosts
    stats: RequestStats
    log: RequestLog
    tracing: Tracing
