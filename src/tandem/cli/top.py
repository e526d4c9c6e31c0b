"""`tandem top`: a live table of one server, or of a router and all servers behind it.

A router says in /v1/loads who they are; each is asked for its /metrics. A row is one DP rank, and of a server with
several the first row, `all`, has what is counted for the server: tokens and times to the first one. Rates are what the
counters did between two looks. A server that cannot be reached from here keeps the row that the router has of it.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any  # documents of servers

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem.cli.client import (
    ServerTrouble,
    add_server_arguments,
    client_options,
    find_server,
    raise_for_status,
    trouble,
)
from tandem.cli.flags import finite
from tandem.cli.plain_text import plain

ASK_SECONDS = 5.0
MAX_INTERVAL = 1e6  # seconds; clocks end somewhere
SERVER = "all"  # in the column of ranks
SCREEN, SHELL = "\x1b[?1049h", "\x1b[?1049l"  # a screen of its own, and back
HOME, LINE_END, SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
COLUMNS = (
    *("server", "role", "rank", "run", "queue", "boot", "xfer"),
    *("in_tok/s", "out_tok/s", "kv", "hits", "ttft", "failed"),
)
Counters = dict[str, float]


@dataclass(slots=True)
class Look:
    """At one DP rank of one server, at one time. Names as in /metrics, without their prefix."""

    server: str
    role: str
    rank: str
    at: float  # of the monotonic clock
    values: Counters = field(default_factory=Counters)
    trouble: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.server, self.rank


@dataclass(frozen=True, slots=True)
class RankRow:
    """What is shown of a rank. None: it does not say, or there was no look before."""

    server: str
    role: str
    rank: str
    running: float | None = None
    queued: float | None = None
    bootstrap: float | None = None  # wait for the other half to be ready
    transfer: float | None = None  # wait for KV, or for who fetches it
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    kv_usage: float | None = None
    kv_hits: float | None = None
    ttft_s: float | None = None  # mean of those who began between the two looks
    transfers_open: float | None = None
    failed: float | None = None  # bootstraps and transfers, since its start
    trouble: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "A live table of requests, queues, token rates, KV and transfers. Ctrl+C leaves."
    add_server_arguments(parser)
    parser.add_argument("--interval", type=finite, default=1.0, metavar="S", help="seconds between looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one table and end, as where no terminal is")
    parser.add_argument("--json", action="store_true", help="the same as one JSON document")


def run(args: argparse.Namespace) -> int:
    find_server(args)
    interval = min(max(args.interval, 0.1), MAX_INTERVAL)
    with httpx.Client(**client_options(args, timeout_seconds=ASK_SECONDS)) as client:
        before = look(client, args.url)
        if args.once or args.json or not sys.stdout.isatty():
            time.sleep(interval)
            rows = rows_between(before, look(client, args.url))
            print(json.dumps([asdict(row) for row in rows]) if args.json else "\n".join(table(rows)))
            return 0
        return live(client, args.url, before, interval)


def live(client: httpx.Client, url: str, before: list[Look], interval: float) -> int:
    """Until Ctrl+C. A server that goes away and comes back is shown again."""
    sys.stdout.write(SCREEN)
    try:
        while True:
            time.sleep(interval)
            try:
                now = look(client, url)
                lines, before = table(rows_between(before, now)), now
            except ServerTrouble as error:
                lines = [plain(str(error))]
            head = f"{url}   {time.strftime('%H:%M:%S')}   Ctrl+C leaves"
            sys.stdout.write(HOME + "".join(f"{line}{LINE_END}\r\n" for line in (head, "", *lines)) + SCREEN_END)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write(SHELL)
        sys.stdout.flush()


def look(client: httpx.Client, url: str) -> list[Look]:
    """Every rank of every server. Raises ServerTrouble when the one that was named does not answer."""
    found: list[Look] = []
    loads = _get(client, url, "/v1/loads")
    try:
        ranks = json.loads(loads)["loads"]
        servers = dict.fromkeys(str(rank["url"]) for rank in ranks if "url" in rank)
        if not servers:
            return ranks_of(_get(client, url, "/metrics"), url, "")
        for server in servers:
            known = [rank for rank in ranks if rank.get("url") == server]
            try:
                found += ranks_of(_get(client, server, "/metrics", base=server), server, str(known[0].get("role", "")))
            except ServerTrouble as error:
                found += [from_load(server, rank, str(error)) for rank in known]
    except (ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RecursionError) as error:
        raise ServerTrouble(f"{url} answers, but not as a server of tandem or SGLang does ({error!r})") from None
    return found


def _get(client: httpx.Client, url: str, path: str, *, base: str = "") -> str:
    try:
        response = client.get(f"{base}{path}")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise trouble(error, base or url) from None
    raise_for_status(response.status_code, response.content)
    return response.text


def ranks_of(metrics: str, server: str, role: str) -> list[Look]:
    """One look for each DP rank that /metrics tells of; numbers of its workers are added up. What has no rank is the
    server's: of its only rank, or else a look of its own before them. Raises ValueError."""
    found: dict[str, Look] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                rank, kind = sample.labels.get("dp_rank", SERVER), sample.labels.get("engine_type", "")
                values = found.setdefault(rank, Look(server, role or kind, rank, time.monotonic())).values
                name = sample.name.partition(":")[2]
                values[name] = values.get(name, 0.0) + sample.value
    looks = [found[rank] for rank in sorted(found, key=lambda rank: (rank != SERVER, len(rank), rank))]  # 2 before 10
    if len(looks) == 2 and looks[0].rank == SERVER:
        whole, only = looks
        only.values |= whole.values
        return [only]
    return looks or [Look(server, role, SERVER, time.monotonic())]


def from_load(server: str, load: Mapping[str, Any], why: str) -> Look:
    names = {
        "num_running_reqs": "num_running_reqs",
        "num_waiting_reqs": "num_queue_reqs",
        "token_usage": "token_usage",
    }
    values = {ours: float(load[name]) for name, ours in names.items() if name in load}
    return Look(server, str(load.get("role", "")), str(load.get("dp_rank", 0)), time.monotonic(), values, why)


def rows_between(before: Iterable[Look], now: Iterable[Look]) -> list[RankRow]:
    earlier = {look.key: look for look in before}
    return [row_of(look, earlier.get(look.key)) for look in now]


def row_of(look: Look, before: Look | None) -> RankRow:
    values = look.values

    def total(*names: str) -> float | None:
        there = [values[name] for name in names if name in values]
        return sum(there) if there else None

    def rise(name: str) -> float | None:
        """Since the look before; None also where the counter began anew with its server."""
        old = None if before is None else before.values.get(name)
        new = values.get(name)
        return new - old if old is not None and new is not None and new >= old else None

    def rate(name: str) -> float | None:
        risen = rise(name)
        return None if risen is None or before is None else risen / max(look.at - before.at, 1e-3)

    firsts, first_s = rise("time_to_first_token_seconds_count"), rise("time_to_first_token_seconds_sum")
    return RankRow(
        server=look.server,
        role=look.role,
        rank=look.rank,
        running=total("num_running_reqs"),
        queued=total("num_queue_reqs"),
        bootstrap=total("num_prefill_bootstrap_queue_reqs", "num_decode_prealloc_queue_reqs"),
        transfer=total("num_prefill_inflight_queue_reqs", "num_decode_transfer_queue_reqs"),
        prompt_tokens_per_s=rate("prompt_tokens_total"),
        output_tokens_per_s=rate("generation_tokens_total"),
        kv_usage=total("token_usage"),
        kv_hits=total("cache_hit_rate"),
        ttft_s=first_s / firsts if firsts and first_s is not None else None,
        transfers_open=total("worker_open_transfers"),
        failed=total("num_bootstrap_failed_reqs_total", "num_transfer_failed_reqs_total"),
        trouble=look.trouble,
    )


def table(rows: Sequence[RankRow]) -> list[str]:
    """For a terminal, or a script that splits lines at white space; `-`: not known."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    for row in rows:
        lines.append(
            (
                plain(row.server.removeprefix("http://")) or "-",
                plain(row.role) or "-",
                plain(row.rank),
                *map(_whole, (row.running, row.queued, row.bootstrap, row.transfer)),
                *map(_whole, (row.prompt_tokens_per_s, row.output_tokens_per_s)),
                *map(_share, (row.kv_usage, row.kv_hits)),
                "-" if row.ttft_s is None else f"{row.ttft_s * 1000:.0f}ms",
                _whole(row.failed),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(f"{word:<{width}}" for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return shown + [f"{plain(row.server)}: {plain(row.trouble)}" for row in rows if row.trouble]


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
