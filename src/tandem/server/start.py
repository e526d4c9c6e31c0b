"""From a configuration and its ports to a server that runs: the same for the command line and for simulations."""

import dataclasses
import importlib
import os
import time
from functools import partial
from pathlib import Path

from tandem.config import ServerConfig
from tandem.garbage import no_collector
from tandem.membership import ClusterSecret
from tandem.server import keys
from tandem.server.api.model_facts import ModelFacts
from tandem.server.hosts.fields import fields_of
from tandem.server.hosts.leader import Hooks, Leader, NoOtherHosts, OtherHosts
from tandem.server.processes import (
    Launch,
    Listeners,
    ServerFailure,
    cluster_secret,
    engine_threads,
    new_incarnation,
    start_replicas,
)


def with_ports(config: ServerConfig, listeners: Listeners) -> ServerConfig:
    """Port 0 means any; from here on it is the one that was found."""
    bootstrap_port = listeners.bootstrap_port or config.disaggregation_bootstrap_port
    return dataclasses.replace(config, port=listeners.http_port, disaggregation_bootstrap_port=bootstrap_port)


def serve(config: ServerConfig, listeners: Listeners, model: ModelFacts) -> None:
    """Until a signal comes. Raises ServerFailure."""
    members = cluster_secret(config)
    make_hosts = partial(other_hosts, config, listeners, model, members)
    secret = None if config.role == "unified" else members  # what is for peers
    keys.forget_environment()  # which the children inherit
    launch = Launch(
        config=dataclasses.replace(config, api_key=None, admin_api_key=None),  # clients speak to this process only
        model_dir=model.model_path,
        incarnation=new_incarnation(listeners),
        http_port=listeners.http_port,
        cpu_threads=engine_threads(config),
        parent_pid=os.getpid(),
        cluster_secret=b"" if secret is None else secret.raw,
        began_ns=time.monotonic_ns(),
    )
    try:
        replicas = start_replicas(launch, listeners)
    except OSError as error:
        raise ServerFailure(
            f"cannot start the processes of this server ({error.strerror or error}); raise the limit of this user or "
            "container on processes (ulimit -u, pids.max), open files or memory"
        ) from error
    try:
        # Why not at the top: a second of imports during which the children already load the model.
        with no_collector():
            api_process = importlib.import_module("tandem.server.api.process")
        api_process.run_api(config, replicas, listeners, model, secret, make_hosts)
    finally:
        replicas.kill()


def other_hosts(
    config: ServerConfig, listeners: Listeners, model: ModelFacts, secret: ClusterSecret | None, hooks: Hooks
) -> OtherHosts:
    """Raises ServerFailure."""
    if listeners.hosts is None or secret is None:
        return NoOtherHosts()
    try:
        fields = fields_of(config, Path(model.model_path))
    except OSError as error:
        raise ServerFailure(f"cannot read the model: {error}") from error
    incarnations = partial(new_incarnation, listeners)
    return Leader(config, listeners.hosts, secret, fields, new_incarnation=incarnations, hooks=hooks)
