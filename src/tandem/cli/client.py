"""What the client commands share: reaching an OpenAI-compatible server, reading its streams, naming what went wrong."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Annotated, Any, TypeVar  # Any: options of httpx
from urllib.request import getproxies_environment, proxy_bypass

import httpcore
import httpx
import msgspec
from msgspec import Meta, Struct

from tandem.cli.failure import CommandFailed
from tandem.server.keys import ENVIRONMENT, KeyProblem, authorization, key_text

DEFAULT_URL = "http://127.0.0.1:30000"
# Where a server may be that nobody has named: of `tandem serve` and `tandem router`, of `tandem up` and vLLM.
LIKELY_URLS = (DEFAULT_URL, "http://127.0.0.1:8000")
KEY_VARIABLE = ENVIRONMENT["--api-key"]
CONNECT_SECONDS = 5.0
SILENT_SECONDS = 1200.0  # of a server that answers: twice what ours give themselves until the first token
PROBE_SECONDS = 2.0
PROGRESS_SECONDS = 0.2  # between two updates on a terminal; elsewhere lines come far less often
PROGRESS_SECONDS_PLAIN = 10.0
WITHOUT_PROXY = "(NO_PROXY names hosts and networks that need none)"
HTTP_UNAUTHORIZED = 401
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)  # no JSON, of another shape, nested without end

Document = TypeVar("Document")


class ServerTrouble(CommandFailed):
    """The server is not there, or has answered with an error: one line for the user."""


class Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(Struct):
    """Of chat, whole or streamed, and of completions."""

    text: str | None = None
    delta: Delta | None = None
    message: Delta | None = None

    @property
    def piece(self) -> str:
        return self.text or (self.delta.content if self.delta is not None else None) or ""

    @property
    def thought(self) -> str:
        return (self.delta.reasoning_content if self.delta is not None else None) or ""


Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class Usage(Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class StreamChunk(Struct):
    """One event of a stream, as far as it is of use here. Servers may add what they like."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None  # whatever the dialect


class ListedModel(Struct):
    id: str


class ListedModels(Struct):
    data: list[ListedModel]


def read_answer(body: bytes | str, kind: type[Document]) -> Document:
    """What any server may have sent, as a document of this type. Raises ServerTrouble."""
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        start = body[:80].decode(errors="replace") if isinstance(body, bytes) else body[:80]
        raise ServerTrouble(f"the server's answer cannot be read ({error}): {start}") from None


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        help="server or router (default: OPENAI_BASE_URL of the environment, or who answers on port 30000 or 8000)",
    )
    parser.add_argument("--model", help="model name (default: the first that the server lists)")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="sent as a bearer token (default: TANDEM_API_KEY of the environment, or OPENAI_API_KEY where --url or "
        "OPENAI_BASE_URL says whom it is for)",
    )
    parser.add_argument("--api-key-file", metavar="PATH", help="the same from a file; the first key in it is sent")


def base_url(url: str) -> str:
    """Without a slash or /v1 at the end, with a scheme at the front."""
    full = url if "://" in url else f"http://{url}"
    return full.rstrip("/").removesuffix("/v1")


def find_server(args: argparse.Namespace) -> None:
    """Have `args.url` name a server, and `args.api_key` be what it may be told. Raises ServerTrouble.

    A key of OpenAI's is for whoever the user has named, and not for a stranger who listens where a server might.
    """
    if args.url is None:
        args.url = os.environ.get("OPENAI_BASE_URL") or None
    if args.url is None:
        args.url = next(filter(_answers, LIKELY_URLS), None)
        if args.url is None:
            raise ServerTrouble(
                f"no server answers at {' or '.join(LIKELY_URLS)}; start one with `tandem serve tandem/mini` or "
                "`tandem up`, or name yours with --url"
            )
    elif not (args.api_key or args.api_key_file or os.environ.get(KEY_VARIABLE)):
        args.api_key = os.environ.get("OPENAI_API_KEY") or None


def _answers(url: str) -> bool:
    """As an OpenAI-compatible server does, if only to say that it wants a key, and not as any web server."""
    try:
        with httpx.Client(base_url=url, timeout=PROBE_SECONDS, trust_env=False) as client:
            return client.get("/v1/models").status_code in (200, 401, 403, 503)
    except httpx.HTTPError:
        return False


def client_options(args: argparse.Namespace, *, timeout_seconds: float | None = None) -> dict[str, Any]:
    """For `httpx.Client` and `httpx.AsyncClient` alike. Raises CommandFailed when they cannot be."""
    try:
        keys = key_text("--api-key", args.api_key, args.api_key_file, os.environ)
    except KeyProblem as problem:
        raise CommandFailed(str(problem), is_wrong_usage=True) from None
    url = _checked(base_url(args.url))
    return {
        "base_url": url,
        "headers": authorization(keys),
        "timeout": httpx.Timeout(timeout_seconds or SILENT_SECONDS, connect=CONNECT_SECONDS),
        "proxy": _usable_proxy(url),
        "verify": httpcore.default_ssl_context(),  # also what SSL_CERT_FILE names
        "trust_env": False,
    }


def proxy_for(url: str) -> str | None:
    """Of the environment, and None for loopback and for what NO_PROXY names, networks too.

    Why not httpx's: it knows no networks, cannot read `[::1]` there, and takes the proxy for loopback.
    """
    host = httpx.URL(base_url(url)).host
    proxies = getproxies_environment()
    if host == "localhost" or proxy_bypass(host):
        return None
    with contextlib.suppress(ValueError):  # a name, which is no address
        address = ip_address(host)
        if address.is_loopback or any(address in network for network in _networks(proxies.get("no", ""))):
            return None
    found = proxies.get(httpx.URL(base_url(url)).scheme) or proxies.get("all")
    return found if found is None or "://" in found else f"http://{found}"


def _networks(no_proxy: str) -> Iterator[IPv4Network | IPv6Network]:
    for word in no_proxy.split(","):
        with contextlib.suppress(ValueError):
            yield ip_network(word.strip().strip("[]"), strict=False)


def _usable_proxy(url: str) -> str | None:
    """Raises CommandFailed."""
    proxy = proxy_for(url)
    try:
        httpx.Client(proxy=proxy, trust_env=False, verify=False).close()
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise CommandFailed(f"the proxy of the environment cannot be used: {error} {WITHOUT_PROXY}") from None
    return proxy


def _checked(url: str) -> str:
    """httpx takes `http://` and an unknown scheme, and complains only when it sends."""
    try:
        found = httpx.URL(url)
        found.host.encode("idna")  # as who looks it up does
    except (httpx.InvalidURL, UnicodeError) as error:
        raise CommandFailed(f"--url {url} is not the URL of a server ({error})", is_wrong_usage=True) from None
    if found.scheme not in ("http", "https") or not found.host:
        raise CommandFailed(f"--url {url} is not the URL of a server, like {DEFAULT_URL}", is_wrong_usage=True)
    return url


def served_model(args: argparse.Namespace) -> str:
    """The model to name in requests; also the first thing asked, so a missing server is noticed here.

    Where no --url says which server it is, `args.url` does from here on.
    """
    find_server(args)
    if args.model:
        return args.model
    with httpx.Client(**client_options(args, timeout_seconds=30)) as client:
        try:
            response = client.get("/v1/models")
        except httpx.HTTPError as error:
            raise trouble(error, args.url) from None
    raise_for_status(response.status_code, response.content)
    try:
        return read_answer(response.content, ListedModels).data[0].id
    except (ServerTrouble, IndexError):
        raise ServerTrouble(f"{args.url} lists no model; name one with --model") from None


def trouble(error: Exception, url: str) -> ServerTrouble:
    if isinstance(error, httpx.TransportError) and proxy_for(url) is not None:
        told = f"{type(error).__name__} {error}".strip()
        return ServerTrouble(f"{url} was asked by way of the proxy of the environment ({told}) {WITHOUT_PROXY}")
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return ServerTrouble(
            f"no server answers at {url}; start one with `tandem serve tandem/mini`, or name yours with --url"
            " (of `tandem up`: http://127.0.0.1:8000)"
        )
    return ServerTrouble(f"{url}: {type(error).__name__} {error}".strip())


def raise_for_status(status: int, body: bytes) -> None:
    if status >= 300:
        remedy = f"; give one by --api-key, --api-key-file or {KEY_VARIABLE}" if status == HTTP_UNAUTHORIZED else ""
        raise ServerTrouble(f"{status}: {_message(body)}{remedy}")


def chunks_of(lines: Iterator[str]) -> Iterator[StreamChunk]:
    """The events of an event stream up to `[DONE]`. Raises ServerTrouble for an error event or a torn stream.

    Reads to the end of the body, after which the connection can be used again: closing it earlier looks like leaving.
    """
    stream = EventStream()
    for line in lines:
        yield from stream.take(line)
    stream.end()


class EventStream:
    """What the lines of an event stream say, one after the other, for whoever gets them one at a time."""

    def __init__(self) -> None:
        self._is_done = False

    def take(self, line: str) -> Iterator[StreamChunk]:
        """The event in a line, if there is one. Raises ServerTrouble for an error."""
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        self._is_done = self._is_done or data == "[DONE]"
        if data and not self._is_done:
            chunk = read_answer(data, StreamChunk)
            if chunk.error:
                raise ServerTrouble(_message(data.encode()))
            yield chunk

    def end(self) -> None:
        """No line follows. Raises ServerTrouble where one should."""
        if not self._is_done:
            raise ServerTrouble("the stream broke off")


class ProgressLine:
    """One line on stderr that tells how far things are."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_terminal = sys.stderr.isatty()
        self._pause = PROGRESS_SECONDS if self._is_terminal else PROGRESS_SECONDS_PLAIN
        self._shown_at = time.monotonic()

    def show(self, done: int, text: str) -> None:
        now = time.monotonic()
        if now < self._shown_at + self._pause and done < self._total:
            return
        self._shown_at = now
        line = f"{done}/{self._total} {text}"
        end = "\n" if done == self._total or not self._is_terminal else ""
        print(f"\r{line:<78}" if self._is_terminal else line, end=end, file=sys.stderr, flush=True)


def _message(body: bytes) -> str:
    """The sentence inside an error body of any dialect."""
    try:
        document = msgspec.json.decode(body)
    except UNREADABLE:
        return body[:200].decode(errors="replace").strip() or "no explanation"
    error = document.get("error", document) if isinstance(document, dict) else document
    if not isinstance(error, dict):
        return str(error)
    code = f"{error['code']}: " if isinstance(error.get("code"), str) else ""
    return f"{code}{error.get('message') or error}"
