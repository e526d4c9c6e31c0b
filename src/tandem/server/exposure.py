"""Who can reach a port, as far as the address tells that it listens on."""

import socket
from typing import Protocol

from tandem.server.api.allowed_hosts import is_loopback, number_of
from tandem.server.keys import Keyed


class Reachable(Keyed, Protocol):
    """What a configuration says of who may reach it."""

    @property
    def host(self) -> str: ...
    @property
    def allowed_host(self) -> tuple[str, ...]: ...
    @property
    def allowed_origins(self) -> tuple[str, ...]: ...
    @property
    def allow_credentials(self) -> bool: ...
    @property
    def allowed_methods(self) -> tuple[str, ...]: ...
    @property
    def allowed_headers(self) -> tuple[str, ...]: ...


def open_to_others(config: Reachable) -> str | None:
    """A line for the log, where more than this machine may ask for anything."""
    if config.api_key is not None or listens_on_loopback(config.host):
        return None
    return f"no API key is set: everybody who reaches {config.host} may use this server (--api-key-file)"


def takes_ipv4(host: str) -> bool:
    """Whether who listens there on IPv6 takes IPv4, too: at `::`, as other servers do."""
    return host == "::" and socket.has_dualstack_ipv6()


def listens_on_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach a server that listens there."""
    if number_of(host) is not None or host == "localhost":
        return is_loopback(host)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(host) and all(is_loopback(str(address[0])) for *_, address in found)
