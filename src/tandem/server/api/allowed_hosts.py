"""Which hosts a request may make this server connect to.

A body names its prefill (`bootstrap_host`). Without a bound, whoever can send a request could have this server talk to
any machine that it reaches. So a host is used only if it is loopback, the one this server listens on (this machine, for
one that listens everywhere), or inside a network of `--disaggregation-allow`; both halves refuse everything else before
anything is reserved.

    a number    is checked as it stands: IPv4, IPv6 with or without brackets, IPv4 written as IPv6
    a name      is looked up off the event loop, and each address that it has is checked. Who connects asks again and
                connects to the numbers that were just checked, so a name that changes in between gains nothing
    any other name, where no network was allowed      is refused without a look-up
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from tandem.config import ServerConfig
from tandem.server.api.errors import Problem, Refusal, contradiction
from tandem.server.api.resolver import NoThread, Resolver
from tandem.server.wire import EVERY_HOST

LOCALHOST = ("127.0.0.1", "::1")
LOOKUP_SECONDS = 2.0
MAX_HOSTS = 64  # that one request may name
MAX_NAME_CHARS = 253
NO_HOST = re.compile(r"[\s/@?#\\]")
REFUSED = "is neither loopback nor the address this server listens on, nor in a network of --disaggregation-allow"

LookUp = Callable[[str], Awaitable[Sequence[str]]]  # a name's addresses; raises OSError, UnicodeError


class HostRefused(Exception):
    """One line: the host and why."""


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    own: str = ""  # as --host names it; empty: this server listens everywhere
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    look_up: LookUp = field(default_factory=Resolver)

    @classmethod
    def of(cls, config: ServerConfig) -> "AllowedHosts":
        networks = tuple(ip_network(text) for text in config.disaggregation_allow)
        return cls("" if config.host in EVERY_HOST else config.host, networks)

    async def check(self, hosts: str | Sequence[str | None] | None) -> None:
        """The `bootstrap_host` of a body. Raises `Refusal`."""
        named = dict.fromkeys([hosts] if isinstance(hosts, str) else hosts or ())
        if len(named) > MAX_HOSTS:
            raise contradiction("bootstrap_host", f"names {len(named)} hosts; at most {MAX_HOSTS} are accepted")
        for host in named:
            if host is None:
                continue
            try:
                await self.addresses(host)
            except HostRefused as refused:
                raise Refusal(Problem.HOST_NOT_ALLOWED, f"bootstrap_host: {refused}", param="bootstrap_host") from None
            except NoThread as lack:
                raise Refusal(Problem.NOT_READY, str(lack)) from None

    async def addresses(self, host: str) -> Sequence[str]:
        """The numbers to connect to, at least one. Raises HostRefused, NoThread."""
        bare = without_brackets(host)
        if not is_host(bare):
            raise HostRefused(f"{host[:MAX_NAME_CHARS]!r} is no host: 1 to {MAX_NAME_CHARS} printable characters")
        number = number_of(bare)
        if number is not None:
            if not self._allows(bare, number):
                raise HostRefused(f"{host!r} {REFUSED}")
            return [bare]
        if bare == "localhost":
            return LOCALHOST
        if bare != self.own and not self.networks:
            raise HostRefused(f"{host!r} {REFUSED}")
        found = await self._look_up(bare)
        admitted = [text for text in found if bare == self.own or self._admits(number_of(text))]
        if not admitted:
            raise HostRefused(f"{host!r} {REFUSED}")
        return admitted

    async def _look_up(self, name: str) -> Sequence[str]:
        try:
            return await asyncio.wait_for(self.look_up(name), LOOKUP_SECONDS)
        except (OSError, UnicodeError):  # a timeout is an OSError too
            raise HostRefused(f"{name!r} cannot be looked up") from None

    def check_peer(self, host: str, *, found_at: str, field: str) -> None:
        """An address that a bootstrap server names for its prefill: the one where it was found, or one that a body
        might name too. Raises HostRefused.
        """
        number = number_of(host)
        if number is None or not (number == number_of(found_at) or self._allows(host, number)):
            raise HostRefused(f"{field}: {host!r} is not {found_at}, where it was found, and {REFUSED}")

    def _allows(self, text: str, number: IPv4Address | IPv6Address) -> bool:
        return text == self.own or self._admits(number) or (self.own == "" and is_of_this_machine(number))

    def _admits(self, number: IPv4Address | IPv6Address | None) -> bool:
        return number is not None and (number.is_loopback or any(number in network for network in self.networks))


def is_host(text: str) -> bool:
    """Fit to be looked up, connected to and repeated in a log line. An IPv6 address may name an interface."""
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable() and NO_HOST.search(text) is None


def without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def number_of(text: str) -> IPv4Address | IPv6Address | None:
    """None: it is a name. IPv4 written as IPv6 is IPv4, as it is on the wire."""
    try:
        number = ip_address(text)
    except ValueError:
        return None
    return getattr(number, "ipv4_mapped", None) or number


def is_of_this_machine(number: IPv4Address | IPv6Address) -> bool:
    """Nobody can listen at an address of another one."""
    if number.is_unspecified or number.is_multicast:
        return False
    with socket.socket(socket.AF_INET if number.version == 4 else socket.AF_INET6) as sock:
        try:
            sock.bind((str(number), 0))
        except OSError:
            return False
    return True


def is_loopback(host: str) -> bool:
    number = number_of(host)
    return host == "localhost" if number is None else number.is_loopback
