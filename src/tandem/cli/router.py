"""`tandem router`: one address in front of prefill and decode servers."""

import argparse
import errno
import logging
import os
from collections.abc import Sequence

from tandem.cli.failure import CommandFailed
from tandem.cli.flags import add_flags, keyed, values_of
from tandem.core.router.worker_registry import RegisteredWorker
from tandem.core.settings import Role
from tandem.environment import misspelt
from tandem.server import fault_records, logs
from tandem.server.exposure import open_to_others
from tandem.server.router.app import listen, serve_router
from tandem.server.router.config import RouterConfig, make_worker
from tandem.server.tracing import TracingRefused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Send each request to a prefill and a decode server, and stream the answer of decode."
    parser.add_argument(
        "--prefill",
        action="append",
        nargs="+",
        default=[],
        metavar=("URL", "BOOTSTRAP_PORT"),
        help="a prefill server and the port of its bootstrap server (none: as it says itself); repeatable",
    )
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="a decode server; repeatable")
    add_flags(parser, RouterConfig)


def run(args: argparse.Namespace) -> int:
    config = make_config(args)
    if (complaint := fault_records.complaint(config.fault_records)) is not None:
        raise CommandFailed(complaint)
    logs.set_up("text", process="router")
    try:
        listener = listen(config)
    except OSError as error:
        where = f"{config.host}:{config.port}" if config.fd is None else f"file descriptor {config.fd}"
        reason = os.strerror(error.errno) if error.errno else str(error)  # its own text repeats the address
        if (error.errno or 0) < 0:  # none of the kernel's: a name was not found
            reason = str(error.strerror)
        remedy = "; use another --port" if error.errno == errno.EADDRINUSE else ""
        raise CommandFailed(f"cannot listen on {where}: {reason}{remedy}") from None
    for warning in (open_to_others(config), *misspelt()):
        if warning is not None:
            logging.getLogger("tandem.router").warning(warning)
    host = f"[{config.host}]" if ":" in config.host else config.host
    logs.say(f"tandem router listens on http://{host}:{listener.getsockname()[1]}")
    try:
        serve_router(config, listener)
    except TracingRefused as refused:
        raise CommandFailed(str(refused)) from refused
    return 0


def make_config(args: argparse.Namespace) -> RouterConfig:
    """Raises CommandFailed with the reasons why these arguments make no router."""
    try:
        workers = [*_prefills(args.prefill), *_decodes(args.decode, first=len(args.prefill))]
    except ValueError as error:
        raise CommandFailed(str(error), is_wrong_usage=True) from None
    config = RouterConfig(workers=tuple(workers), **values_of(args, RouterConfig))
    if reasons := config.violations():
        raise CommandFailed("; ".join(reasons), is_wrong_usage=True)
    return keyed(config)


def _prefills(given: Sequence[Sequence[str]]) -> list[RegisteredWorker]:
    return [make_worker(index, Role.PREFILL, words[0], _bootstrap_port(words[1:])) for index, words in enumerate(given)]


def _decodes(given: Sequence[str], *, first: int) -> list[RegisteredWorker]:
    return [make_worker(first + index, Role.DECODE, url) for index, url in enumerate(given)]


def _bootstrap_port(words: Sequence[str]) -> int | None:
    if len(words) > 1:
        raise ValueError(f"--prefill takes URL [BOOTSTRAP_PORT], not also {' '.join(words[1:])}")
    if not words or words[0].lower() == "none":
        return None
    if not words[0].isdigit() or not 0 < int(words[0]) < 65536:
        raise ValueError(f"--prefill: {words[0]} is not a port")
    return int(words[0])
