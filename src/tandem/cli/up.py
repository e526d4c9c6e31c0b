"""`tandem up`: router, prefill and decode servers on this machine, until Ctrl+C."""

import argparse
import shlex
import signal

from tandem.cli.failure import CommandFailed
from tandem.cli.fleet import Member, free_ports, start_pd, temporary_fleet

START_S = 600.0  # a large model takes its time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="tandem/mini", help="default: tandem/mini")
    parser.add_argument("--prefill", metavar="N", type=int, default=1, help="prefill servers (default: 1)")
    parser.add_argument("--decode", metavar="N", type=int, default=1, help="decode servers (default: 1)")
    parser.add_argument("--port", type=int, default=8000, help="of the router; 0 picks a free one (default: 8000)")
    parser.add_argument(
        "--server-flags", metavar="FLAGS", default="", help='flags of `tandem serve` for every server, as "--a 1 --b"'
    )
    parser.add_argument("--router-flags", metavar="FLAGS", default="", help="flags of `tandem router`, in the same way")


def run(args: argparse.Namespace) -> int:
    if args.prefill < 1 or args.decode < 1:
        raise CommandFailed("--prefill and --decode must be at least 1", is_wrong_usage=True)
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        _run(args)
    except KeyboardInterrupt:
        print("tandem: drained", flush=True)
    return 0


def _run(args: argparse.Namespace) -> None:
    with temporary_fleet("up", engines=args.prefill + args.decode) as fleet:
        router = start_pd(
            fleet,
            args.model,
            prefills=args.prefill,
            decodes=args.decode,
            router_port=args.port or free_ports(1)[0],
            server_flags=shlex.split(args.server_flags),
            router_flags=shlex.split(args.router_flags),
        )
        fleet.wait_ready(timeout_s=START_S, tell=_tell)
        print(f"tandem: ready: {args.model} at {router.url}/v1 (logs in {fleet.folder}); Ctrl+C drains", flush=True)
        fleet.watch()


def _tell(member: Member) -> None:
    print(f"  {member.name} is up at {member.url}", flush=True)


def _as_interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
