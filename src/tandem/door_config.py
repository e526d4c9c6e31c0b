"""What every HTTP door, a server's or a router's, can be told: address, keys, web pages, responses, traces."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from types import MappingProxyType
from typing import Any  # values of dataclass metadata, whose shape the standard library leaves open

from tandem import otlp
from tandem.core.values import MAX_TIMEOUT_SECONDS


def flag(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    is_secret: bool = False,
    aliases: tuple[str, ...] = (),
    other_words: Mapping[str, str] = MappingProxyType({}),
    stand_in_row: bool = False,
) -> Any:
    """A field of a configuration that is also a command-line flag `--like-this`. A secret one is never shown.

    aliases: other names of the flag, for people who come from other servers.
    other_words: for choices, for the same people; a configuration has the choices themselves.
    stand_in_row: of words: several may stand behind the flag, as numbers always may.
    """
    metadata = {
        "help": text,
        "choices": choices,
        "metavar": metavar,
        "is_secret": is_secret,
        "aliases": aliases,
        "other_words": other_words,
        "stand_in_row": stand_in_row,
    }
    return field(default=default, repr=not is_secret, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorConfig:
    """Flags of `tandem serve` and `tandem router`, with one default and one meaning."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(30000, "HTTP port; 0 picks a free one")
    api_key: str | None = flag(
        None,
        "clients must send it as a bearer token, and a router to its workers; other users of this machine can read it "
        "here (default: TANDEM_API_KEY of the environment)",
        metavar="KEY",
        is_secret=True,
    )
    api_key_file: str | None = flag(
        None, "the same from a file that others cannot read: one key per line, any of which opens", metavar="PATH"
    )
    admin_api_key: str | None = flag(
        None,
        "key for flush, abort and debug endpoints (default: TANDEM_ADMIN_API_KEY of the environment, or the API key)",
        metavar="KEY",
        is_secret=True,
    )
    admin_api_key_file: str | None = flag(None, "the same from a file, as --api-key-file", metavar="PATH")
    allowed_host: tuple[str, ...] = flag(
        (),
        "without an API key: a name of this server in URLs, and a host whose web pages may use it, beside numbers and "
        "localhost (default: on loopback the machine's own names, else any); may be repeated",
        metavar="NAME",
    )
    debug_host: tuple[str, ...] = flag(
        (),
        "a network from which debug pages may be asked, with the admin key (default: this machine only); may be "
        "repeated",
        metavar="CIDR",
    )
    allowed_origins: tuple[str, ...] = flag(
        (),
        "a web page of this origin (https://NAME[:PORT], or * for any) may use the API (default: none may); may be "
        "repeated, or a list in JSON; debug pages and orders stay closed to it",
        metavar="ORIGIN",
    )
    allow_credentials: bool = flag(False, "and its browser may send cookies with it, which a proxy in front may read")
    allowed_methods: tuple[str, ...] = flag((), "methods that it may use (default: all)", metavar="METHOD")
    allowed_headers: tuple[str, ...] = flag((), "headers that it may send (default: all)", metavar="HEADER")
    max_stored_responses: int = flag(
        1024, "responses of /v1/responses that are kept in memory to be gone on from; 0: none", metavar="N"
    )
    stored_responses_max_bytes: int = flag(
        256 << 20, "of all of them; then the oldest of who has most are dropped", metavar="N"
    )
    enable_trace: bool = flag(
        False, "tell an OpenTelemetry collector of every request: a span, and one for each of its parts"
    )
    otlp_traces_endpoint: str = flag(
        otlp.DEFAULT_ENDPOINT,
        "the collector: HOST:PORT for gRPC, or http://HOST:4318/v1/traces",
        metavar="ENDPOINT",
    )


@dataclass(frozen=True, slots=True)
class ConfigRule:
    """A combination that is refused at start, and the sentence that tells the user why."""

    broken: Callable[[Any], bool]  # of the configuration
    reason: str


def is_origin(text: str) -> bool:
    """As browsers write it in `Origin`: scheme, host and perhaps a port, nothing behind; or `*`."""
    return text in ("*", "null") or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s*]+", text) is not None


def is_token(text: str) -> bool:
    """A word that a header may have as its name, or hold in a list of such."""
    return re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", text) is not None


def is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


TOO_LATE = f"timeouts are at most {MAX_TIMEOUT_SECONDS:g} seconds: no request may have more"

DOOR_RULES: tuple[ConfigRule, ...] = (
    ConfigRule(lambda c: c.enable_trace and not otlp.is_installed(), otlp.MISSING),
    ConfigRule(lambda c: not otlp.is_endpoint(c.otlp_traces_endpoint), otlp.MALFORMED),
    ConfigRule(
        lambda c: not all(map(is_network, c.debug_host)),
        "--debug-host takes networks, such as 10.1.0.0/16 or 10.1.2.3, without bits behind the prefix",
    ),
    ConfigRule(
        lambda c: c.max_stored_responses < 0 or c.stored_responses_max_bytes < 0,
        "--max-stored-responses and --stored-responses-max-bytes must not be negative",
    ),
    ConfigRule(
        lambda c: not all(map(is_origin, c.allowed_origins)),
        "--allowed-origins takes * or origins like https://example.org:8443, without a path",
    ),
    ConfigRule(
        lambda c: not all(is_token(text) and text == text.upper() for text in c.allowed_methods),
        "--allowed-methods takes methods in capital letters, as browsers say them, or *",
    ),
    ConfigRule(lambda c: not all(map(is_token, c.allowed_headers)), "--allowed-headers takes names of headers, or *"),
    ConfigRule(
        lambda c: c.allow_credentials and "*" in c.allowed_origins,
        "--allow-credentials with --allowed-origins '*' would lend every user's cookies to any page: name the origins",
    ),
)
