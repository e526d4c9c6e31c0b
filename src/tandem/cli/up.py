"""`tandem up`: router, prefill and decode servers on this machine, until Ctrl+C."""

import argparse
import shlex
from collections.abc import Mapping, Sequence

from tandem.cli.failure import CommandFailed
from tandem.cli.flag_synonyms import ROUTER_SYNONYMS, SYNONYMS
from tandem.cli.flags import Collect, add_flags, config_of, count
from tandem.cli.fleet import Fleet, Member, listen, start_pd, temporary_fleet
from tandem.cli.main import Parser
from tandem.cli.supervisor import Supervisor
from tandem.config import ServerConfig, flag_of
from tandem.server.logs import say
from tandem.server.router.config import RouterConfig

DRAIN_S = 90.0  # more than --drain-timeout of servers and router, unless the user raises that
FLAGS = ("server_flags", "prefill_flags", "decode_flags", "router_flags")
# What this command says itself: another word would have it watch, or send requests to, somebody who is not there.
OURS = {
    "--host": "all of them listen on loopback; where they shall not, start `tandem serve` and `tandem router`",
    "--port": "--port is the router's, and the servers' are drawn",
    "--fd": "the router's socket is opened here",
    "--disaggregation-mode": "--prefill and --decode say how many there are of each",
    "--disaggregation-bootstrap-port": "it is drawn",
    **dict.fromkeys(
        ("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"),
        "all of them run on this machine; start `tandem serve` on each host",
    ),
    "--prefill": "the router learns it from here",
    "--decode": "the router learns it from here",
}
# What both halves of a pair have to understand alike.
ALIKE = (
    *("dtype", "page_size", "context_length", "served_model_name"),
    *("chat_template", "tool_call_parser", "reasoning_parser", "sampling_defaults"),
    *("enable_priority_scheduling", "schedule_low_priority_values_first"),
)


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
    parser.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="of `tandem serve`, for every server; each has the ports behind those of the one before it, in the order "
        "in which they are started",
    )
    parser.add_argument("--router-flags", metavar="FLAGS", default="", help="flags of `tandem router`, in the same way")
    if isinstance(parser, Parser):
        parser.synonyms = passed_on()


def passed_on() -> dict[str, str]:
    """Flags of servers and of the router -> where this command takes them, or why not."""
    router, server = Parser(), Parser()
    add_flags(router, RouterConfig)
    add_flags(server)
    names = dict.fromkeys([*router.names(), *ROUTER_SYNONYMS], "it goes into --router-flags")
    return names | dict.fromkeys([*server.names(), *SYNONYMS], "it goes into --server-flags") | OURS


def run(args: argparse.Namespace) -> int:
    _run(args, {name: words_of(args, name) for name in FLAGS})
    return 0


def words_of(args: argparse.Namespace, name: str) -> list[str]:
    """As a shell would part them. Raises CommandFailed."""
    try:
        return shlex.split(getattr(args, name))
    except ValueError as error:
        raise CommandFailed(f"{flag_of(name)} cannot be parted into words ({error})", is_wrong_usage=True) from None


def refuse_contradictions(model: str, more_flags: Mapping[str, Sequence[str]]) -> None:
    """What no server would start with, and what each would but not all of them together. Raises CommandFailed."""
    for name, words in more_flags.items():
        for word in words:
            said = word.partition("=")[0]
            if (reason := OURS.get(said)) is not None:
                raise CommandFailed(f"{flag_of(name)} cannot say {said}: {reason}", is_wrong_usage=True)
    prefill, decode = (
        role_config(model, role, [*more_flags["server_flags"], *more_flags[f"{role}_flags"]])
        for role in ("prefill", "decode")
    )
    if unlike := [name for name in ALIKE if getattr(prefill, name) != getattr(decode, name)]:
        names = ", ".join(map(flag_of, unlike))
        raise CommandFailed(
            f"prefill and decode servers would differ in {names}, in which a pair must agree: say it in --server-flags",
            is_wrong_usage=True,
        )


def role_config(model: str, role: str, words: Sequence[str]) -> ServerConfig:
    """Raises CommandFailed with why such a server would not start."""
    parser = Parser(prog="tandem serve", allow_abbrev=False)
    parser.add_argument("model")
    add_flags(parser)
    args = parser.parse([model, "--disaggregation-mode", role, *words])
    actions = [parser.action_of(word) for word in words]
    given = [action.dest for action in actions if action is not None and not isinstance(action, Collect)]
    if twice := [name for name in dict.fromkeys(given) if given.count(name) > 1]:
        names = ", ".join(map(flag_of, twice))
        raise CommandFailed(f"{role}: {names} is given twice: give it once", is_wrong_usage=True)
    try:
        return config_of(args)
    except CommandFailed as failure:
        raise CommandFailed(f"{role}: {failure}", is_wrong_usage=failure.is_wrong_usage) from None


def _run(args: argparse.Namespace, more_flags: Mapping[str, Sequence[str]]) -> None:
    refuse_contradictions(args.model, more_flags)
    with listen(args.port) as listener, temporary_fleet("up", engines=args.prefill + args.decode) as fleet:
        _say(
            f"starting {1 + args.prefill + args.decode} processes: router, {args.prefill} prefill and {args.decode} "
            f"decode server{'s' * (args.decode > 1)} of {args.model}"
        )
        router = start_pd(
            fleet,
            args.model,
            prefills=args.prefill,
            decodes=args.decode,
            router_port=listener,
            kv_events=args.kv_events_config,
            **more_flags,
        )
        fleet.wait_ready(tell=_tell)
        _say(f"ready: {args.model} at {router.url}/v1 (logs in {fleet.folder}); Ctrl+C drains")
        _say(f"talk to it from another terminal: tandem chat --url {router.url}")
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
    say(f"tandem: {line}")


def _tell(member: Member) -> None:
    say(f"  {member.name} is up at {member.url}")
