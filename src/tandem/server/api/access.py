"""Who may ask for which page: one table, and the middleware that keeps it, for servers and router alike.

A request is refused by the first of these that it fails:

    form      one well-formed Host, and a path without dot segments, backslashes or control characters, encoded or not
    key       the page's row says whose key; where no key of that kind is set, none is asked for
    browser   where no API key is set: a web page must not reach the server through the browser of somebody who can.
              A browser says so itself (`Sec-Fetch-Site`, `Origin`). A page whose host was made to resolve to this
              machine gives itself away by the name in `Host`
    machine   debug pages: the connection comes from this machine, or with a key from a network of `--debug-host`, and
              not through a proxy there

Pages are looked up by the whole of the decoded path, the one that is routed by (never by `request.url`, which is put
together from what the client says). What is not in the table needs the API key, so a forgotten page is not open.
"""

import asyncio
import re
import socket
import time
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Network, IPv6Network, ip_network
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.core.values import Cause
from tandem.server.api.allowed_hosts import is_loopback, number_of
from tandem.server.api.endpoint_parts import error_response, request_id_of
from tandem.server.api.errors import Failure, Problem
from tandem.server.api.tenant import given_key
from tandem.server.exposure import Reachable, listens_on_loopback
from tandem.server.keys import KeyRing


class Access(Enum):
    OPEN = "open"  # probes and scrapers have no keys
    USER = "user"
    ADMIN = "admin"
    LOCAL = "local"  # the admin key, and on the server's own machine only, or from `--debug-host`
    OPERATOR = "operator"  # the admin key, or where there is none on the server's own machine: who gets prompts


PAGES: dict[str, Access] = {
    "/health": Access.OPEN,
    "/ready": Access.OPEN,
    "/ping": Access.OPEN,
    "/metrics": Access.OPEN,
    "/docs": Access.OPEN,  # the same for everybody; a browser that looks at it has no key to send
    "/flush_cache": Access.ADMIN,
    "/abort_request": Access.ADMIN,
    "/workers": Access.OPERATOR,
    "/add_worker": Access.OPERATOR,
    "/remove_worker": Access.OPERATOR,
    "/list_workers": Access.OPERATOR,
    "/debug/waits": Access.LOCAL,
    "/debug/state": Access.LOCAL,
    "/debug/faults": Access.LOCAL,
    "/debug/pd": Access.OPEN,  # says nothing by itself: its data do
    "/debug/pd/data": Access.LOCAL,
}
FOLDERS: dict[str, Access] = {"/workers/": Access.OPERATOR}  # of all pages below
# A GET that changes something needs a key: any link or image of any web page is a GET.
ORDERS_BY_GET = frozenset({"/flush_cache"})

HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?")
SHARED = (Access.OPEN, Access.USER)  # with pages of `--allowed-origins`
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Of one server or router."""

    user: KeyRing
    admin: KeyRing
    allowed: frozenset[str]  # host names that pages may have been loaded from
    names: frozenset[str] | None  # that a client without a key may call this server by; None: any
    origins: frozenset[str] = frozenset()  # whose pages may use what is for users; `*`: all
    debug_from: tuple[IPv4Network | IPv6Network, ...] = ()  # besides this machine, for who holds the key

    @classmethod
    def of(cls, config: Reachable) -> "AccessRules":
        user = KeyRing(config.api_key)
        allowed = frozenset(map(bare_name, config.allowed_host))
        own = {config.host, socket.gethostname(), socket.gethostname().partition(".")[0], "localhost"}
        checks_names = not user and (bool(allowed) or listens_on_loopback(config.host))
        names = allowed | frozenset(map(bare_name, own)) if checks_names else None
        debug_from = tuple(map(ip_network, config.debug_host))
        return cls(user, KeyRing(config.admin_api_key), allowed, names, frozenset(config.allowed_origins), debug_from)

    def refusal(self, scope: Scope, headers: Headers) -> Failure | None:
        """Why this request is not answered."""
        path: str = scope["path"]
        if (fault := malformed_path(path) or malformed_host(headers)) is not None:
            return Failure(Problem.MALFORMED_REQUEST, fault)
        access = access_of(path)
        keys = self._keys(access)
        if keys:
            if scope["method"] != "OPTIONS" and not holds_key(headers, keys):
                return Failure(Problem.UNAUTHORIZED, "the key is missing or wrong")
        elif path in ORDERS_BY_GET and scope["method"] in ("GET", "HEAD"):
            return Failure(Problem.METHOD_NOT_ALLOWED, f"GET {path} needs an admin key: use POST")
        elif not self.user and (failure := self._browser_refusal(headers, access)) is not None:
            return failure
        if access is Access.LOCAL and not (is_local(scope, headers) or (keys and self._may_debug(scope, headers))):
            detail = "debug endpoints answer on the server's own machine only, and to --debug-host with a key"
            return Failure(Problem.FORBIDDEN, detail)
        if access is Access.OPERATOR and not self.admin and not is_local(scope, headers):
            return Failure(Problem.FORBIDDEN, "without an admin key workers change on the router's own machine only")
        return None

    def _keys(self, access: Access) -> tuple[KeyRing, ...]:
        """Those that open such a page; none: everybody may."""
        match access:
            case Access.OPEN:
                return ()
            case Access.USER:
                return (self.user, self.admin) if self.user else ()
            case Access.ADMIN | Access.LOCAL | Access.OPERATOR:
                ring = self.admin or self.user
                return (ring,) if ring else ()

    def _may_debug(self, scope: Scope, headers: Headers) -> bool:
        number = number_of(client_of(scope, headers) or "")
        return number is not None and any(number in network for network in self.debug_from)

    def _browser_refusal(self, headers: Headers, access: Access) -> Failure | None:
        host = headers.get("host", "")  # who sends none is no browser
        name = bare_name(host)
        is_usual = number_of(name) is not None or is_localhost(name)
        if self.names is not None and host and not (is_usual or name in self.names):
            return Failure(Problem.UNKNOWN_HOST, f"this server has no key, and is not known as {name}")
        if self._is_cross_site(headers, host) and not (access in SHARED and self._is_invited(headers)):
            return Failure(Problem.CROSS_SITE, "a web page of another origin cannot use a server without keys")
        return None

    def _is_invited(self, headers: Headers) -> bool:
        """By `--allowed-origins`: the browser, which is told so (`cors.py`), names the page's origin itself."""
        origin = headers.get("origin")
        return origin is not None and ("*" in self.origins or origin in self.origins)

    def _is_cross_site(self, headers: Headers, host: str) -> bool:
        """By the browser's own word, which no page can forge. One that does not say it sends `Origin` with a POST."""
        origin = headers.get("origin")
        page = None if origin is None else page_host(origin)
        if page is not None and bare_name(page) in self.allowed:
            return False
        site = headers.get("sec-fetch-site")
        return page not in (None, host.lower()) if site is None else site not in ("same-origin", "none")


def access_of(path: str) -> Access:
    below = (access for folder, access in FOLDERS.items() if path.startswith(folder))
    return PAGES.get(path) or next(below, Access.USER)


class AuthMiddleware:
    """ASGI middleware, outermost but for the error handling and what browsers are told (`cors.py`): a request gets its
    id and the clock of its arrival, and an answer also where the end of a drain cuts it off."""

    def __init__(self, app: ASGIApp, *, rules: AccessRules, stage: str) -> None:
        """`stage` is who refuses, as the error says it."""
        self._app = app
        self._rules = rules
        self._stage = stage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["arrival_ns"] = time.monotonic_ns()
        tags = [(name, request_id.encode()) for name in id_headers(scope["path"])]
        has_begun = False

        async def send_tagged(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *(tag for tag in tags if tag not in message["headers"])]
            await send(message)

        failure = self._rules.refusal(scope, headers)
        if failure is None:
            try:
                await self._app(scope, receive, send_tagged)
            except asyncio.CancelledError:  # of which uvicorn would tell as an internal error
                if has_begun:
                    raise
                cut_off = Failure(Cause.DRAINING, "the server has ended before the request", None, self._stage)
                await error_response(cut_off, request_id)(scope, receive, send_tagged)
            return
        told = Failure(failure.code, failure.message, None, self._stage)
        response = error_response(told, request_id)
        if failure.code is Problem.METHOD_NOT_ALLOWED:
            response.headers["allow"] = "POST"
        await response(scope, receive, send_tagged)


def id_headers(path: str) -> tuple[bytes, ...]:
    """That say which request it was: clients of Anthropic's know it by another name."""
    return (b"x-request-id", b"request-id") if path.startswith("/v1/messages") else (b"x-request-id",)


def holds_key(headers: Headers, rings: tuple[KeyRing, ...]) -> bool:
    given = given_key(headers)
    matches = [ring.holds(given) for ring in rings]
    return any(matches)


def malformed_path(path: str) -> str | None:
    """`path` is decoded. What other programs take for another path is none at all here."""
    if not path.startswith("/"):
        return "the target of the request is no path"
    if "\\" in path or not all(char.isprintable() for char in path if char.isascii()):
        return "the path has a backslash or a control character"
    if any(segment.partition(";")[0] in (".", "..") for segment in path.split("/")):
        return "the path has a dot segment"
    return None


def malformed_host(headers: Headers) -> str | None:
    """One Host at most, which is a name or a number, and perhaps a port. None at all is left to scripts."""
    given = headers.getlist("host")
    if len(given) > 1:
        return "more than one Host"
    if given and given[0] and not HOST.fullmatch(given[0]):
        return "the Host is malformed"
    return None


def is_local(scope: Scope, headers: Headers) -> bool:
    client = client_of(scope, headers)
    return client is not None and (not client or is_loopback(client))


def client_of(scope: Scope, headers: Headers) -> str | None:
    """Its address, by the peer of the socket, never by what a header says of it; empty: a unix socket. None: a proxy,
    which speaks for others, wherever it is."""
    if any(name in headers for name in PROXY_HEADERS):
        return None
    client = scope.get("client")
    return "" if client is None else client[0]


def bare_name(host: str) -> str:
    """Of a Host: without port and brackets, in lower case."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] if is_pair(host) else host
    return name.lower().removesuffix(".")


def is_pair(host: str) -> bool:
    """NAME:PORT, and no IPv6 number without brackets."""
    return host.count(":") == 1


def is_localhost(name: str) -> bool:
    """Browsers resolve these to loopback, whatever the name service says."""
    return name == "localhost" or name.endswith(".localhost")


def page_host(origin: str) -> str:
    """NAME or NAME:PORT of the page; empty for one that has none, such as `null` or `file://`."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
