"""sglang-router, somebody else's gateway, in front of the servers of a cluster: the same wire, none of our code.

Started exactly as its users start it. It takes a worker once the worker's health, server_info and model_info say what
it wants to hear; `sglang_router` returns when it has taken all of them.
"""

import http.client
import json
import sys
from typing import Any  # JSON documents

from cluster import Cluster, HttpError, Server, bootstrap_port, eventually

from tandem.cli.ports import free_ports

REGISTERED_S = 60.0


def sglang_router(it: Cluster) -> Server:
    """Lives and ends with the cluster."""
    port, metrics_port = free_ports(2)
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    for prefill in it.prefills:
        command += ["--prefill", prefill.url, str(bootstrap_port(prefill))]
    for decode in it.decodes:
        command += ["--decode", decode.url]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--policy", "round_robin", "--health-check-interval-secs", "1", "--worker-startup-check-interval", "1"]
    member = it.fleet.start_program("sglang-router", command, port=port)
    router = Server(member)
    workers = len(it.prefills) + len(it.decodes)
    eventually(
        lambda: readiness(router).get("healthy_workers") == workers,
        within_s=REGISTERED_S,
        what=lambda: readiness(router),
    )
    member.is_ready = True
    return router


def readiness(router: Server) -> dict[str, Any]:
    """What it says of its workers; nothing while it does not listen yet."""
    try:
        found: dict[str, Any] = router.get("/readiness")
    except HttpError as error:
        found = json.loads(error.body)
    except (OSError, http.client.HTTPException):
        found = {}
    return found
