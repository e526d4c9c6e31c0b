"""`tandem up`: router, prefill and decode servers on this machine, until Ctrl+C."""

import argparse
import shlex
from collections.abc import Mapping, Sequence

from tandem.cli.failure import CommandFailed
from tandem.cli.flags import count
from tandem.cli.fleet import Fleet, Member, start_pd, temporary_fleet
from tandem.cli.supervisor import Supervisor

START_S = 600.0  # a large model takes its time
DRAIN_S = 90.0  # more than --drain-timeout of servers and router, unless the user raises that
FLAGS = ("server_flags", "prefill_flags", "decode_flags", "router_flags")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="tandem/mini", help="default: tandem/mini")
    parser.add_argument("--prefill", metavar="N", type=count, default=1, help="prefill servers (default: 1)")
    parser.add_argument("--decode", metavar="N", type=count, default=1, help="decode servers (default: 1)")
    parser.add_argument("--port", type=int, default=8000, help="of the router; 0 picks a free one (default: 8000)")
    parser.add_argument(
        "--server-flags",
        metavar="FLAGS",
        default="",
        help='flags of `tandem serve` for every server, as --server-flags="--a 1 --b"',
    )
    parser.add_argument("--prefill-flags", metavar="FLAGS", default="", help="the same for prefill servers only")
    parser.add_argument("--decode-flags", metavar="FLAGS", default="", help="the same for decode servers only")
    parser.add_argument("--router-flags", metavar="FLAGS", default="", help="flags of `tandem router`, in the same way")


def run(args: argparse.Namespace) -> int:
    _run(args, {name: words_of(args, name) for name in FLAGS})
    return 0


def words_of(args: argparse.Namespace, name: str) -> list[str]:
    """As a shell would part them. Raises CommandFailed."""
    try:
        return shlex.split(getattr(args, name))
    except ValueError as error:
        flag = "--" + name.replace("_", "-")
        raise CommandFailed(f"{flag} cannot be parted into words ({error})", is_wrong_usage=True) from None


def _run(args: argparse.Namespace, more_flags: Mapping[str, Sequence[str]]) -> None:
    with temporary_fleet("up", engines=args.prefill + args.decode) as fleet:
        router = start_pd(
            fleet,
            args.model,
            prefills=args.prefill,
            decodes=args.decode,
            router_port=args.port,
            **more_flags,
        )
        _say(f"starting {len(fleet.members)} servers")
        fleet.wait_ready(timeout_s=START_S, tell=_tell)
        _say(f"ready: {args.model} at {router.url}/v1 (logs in {fleet.folder}); Ctrl+C drains")
        try:
            Supervisor(fleet, _say).run()
        except KeyboardInterrupt:
            _drain(fleet)


def _drain(fleet: Fleet) -> None:
    try:
        _say("draining; Ctrl+C again ends it at once")  # in here: who reads it may do so before this returns
        has_drained = fleet.stop(timeout_s=DRAIN_S)
    except KeyboardInterrupt:
        fleet.kill()
        has_drained = False
    if not has_drained:
        raise CommandFailed("ended before it had drained: requests under way are lost")
    _say("drained")


def _say(line: str) -> None:
    print(f"tandem: {line}", flush=True)


def _tell(member: Member) -> None:
    print(f"  {member.name} is up at {member.url}", flush=True)
