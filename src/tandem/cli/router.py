"""`tandem router`: one address in front of prefill and decode servers."""

import argparse
import logging
from collections.abc import Sequence
from typing import Any  # values that argparse hands over

from tandem.cli.failure import CommandFailed
from tandem.cli.flags import scalar
from tandem.core.fleet.registry import Worker
from tandem.core.settings import Role
from tandem.server.router.app import listen, serve_router
from tandem.server.router.config import RouterConfig, make_worker, router_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Send each request to a prefill and a decode server, and stream the answer of decode."
    parser.add_argument(
        "--prefill",
        action="append",
        nargs="+",
        default=[],
        metavar=("URL", "BOOTSTRAP_PORT"),
        help="a prefill server and the port of its bootstrap server (none: decode's default); repeatable",
    )
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="a decode server; repeatable")
    for name, field in router_flags():
        meta = field.metadata
        kind = {"str": str, "str | None": str, "int": int, "float": float}[_type_name(field.type)]
        parser.add_argument(
            name,
            type=scalar(kind),
            default=field.default,
            choices=meta["choices"] or None,
            metavar=meta["metavar"] or (None if meta["choices"] else kind.__name__.upper()),
            help=f"{meta['help']} (default: {field.default})" if field.default is not None else meta["help"],
        )


def run(args: argparse.Namespace) -> int:
    config = make_config(args)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    for chatty in ("httpx", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        listener = listen(config)
    except OSError as error:
        raise CommandFailed(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from None
    print(f"tandem router listens on http://{config.host}:{listener.getsockname()[1]}", flush=True)
    serve_router(config, listener)
    return 0


def make_config(args: argparse.Namespace) -> RouterConfig:
    """Raises CommandFailed with the reasons why these arguments make no router."""
    try:
        workers = [*_prefills(args.prefill), *_decodes(args.decode, first=len(args.prefill))]
    except ValueError as error:
        raise CommandFailed(str(error), is_wrong_usage=True) from None
    values: dict[str, Any] = {
        name.removeprefix("--").replace("-", "_"): getattr(args, name.removeprefix("--").replace("-", "_"))
        for name, _ in router_flags()
    }
    config = RouterConfig(workers=tuple(workers), **values)
    if reasons := config.violations():
        raise CommandFailed("; ".join(reasons), is_wrong_usage=True)
    return config


def _prefills(given: Sequence[Sequence[str]]) -> list[Worker]:
    return [make_worker(index, Role.PREFILL, words[0], _bootstrap_port(words[1:])) for index, words in enumerate(given)]


def _decodes(given: Sequence[str], *, first: int) -> list[Worker]:
    return [make_worker(first + index, Role.DECODE, url) for index, url in enumerate(given)]


def _bootstrap_port(words: Sequence[str]) -> int | None:
    if len(words) > 1:
        raise ValueError(f"--prefill takes URL [BOOTSTRAP_PORT], not also {' '.join(words[1:])}")
    if not words or words[0].lower() == "none":
        return None
    if not words[0].isdigit() or not 0 < int(words[0]) < 65536:
        raise ValueError(f"--prefill: {words[0]} is not a port")
    return int(words[0])


def _type_name(annotation: object) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
