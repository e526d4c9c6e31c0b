"""Which hosts a body may name: numbers in both families, names by what they mean now, and nothing else."""

import asyncio
from collections.abc import Sequence
from ipaddress import ip_address

import pytest

from tandem.config import ServerConfig
from tandem.server.api.allowed_hosts import MAX_HOSTS, AllowedHosts, HostRefused, is_of_this_machine
from tandem.server.api.errors import Refusal

FORGED = ("::1%\n[12:00:00 api] all is lost", "::1%" + "x" * 300, "127.0.0.1\n", "[::1%\x1b[2J]")
ALLOWED = ("10.1.0.0/16", "fd00:7::/32")


class Names:
    """A resolver that counts what it is asked."""

    def __init__(self, **found: Sequence[str]) -> None:
        self.found = found
        self.asked: list[str] = []

    async def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        if name not in self.found:
            raise OSError("no such name")
        return self.found[name]


def hosts(names: Names | None = None, *, host: str = "192.0.2.7", allow: Sequence[str] = ALLOWED) -> AllowedHosts:
    made = AllowedHosts.of(ServerConfig(model="m", host=host, disaggregation_allow=tuple(allow)))
    return AllowedHosts(made.own, made.networks, names or Names())


def addresses(it: AllowedHosts, host: str) -> Sequence[str]:
    return asyncio.run(it.addresses(host))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "::1", "192.0.2.7", "10.1.255.255", "fd00:7::5", "::ffff:10.1.2.3"]
)
def test_a_number_that_is_allowed_is_used_as_it_stands_with_or_without_brackets(host: str) -> None:
    assert addresses(hosts(), host) == [host]
    assert addresses(hosts(), f"[{host}]") == [host]


@pytest.mark.parametrize(
    "host",
    [
        "10.2.0.1",
        "0.0.0.0",
        "::",
        "192.0.2.8",
        "fd00:8::5",
        "::ffff:10.2.0.1",
        "169.254.169.254",
        "[10.2.0.1]",
        "8.8.8.8",
    ],
)
def test_every_other_number_is_refused(host: str) -> None:
    with pytest.raises(HostRefused, match="is neither loopback nor"):
        addresses(hosts(), host)


def test_localhost_is_loopback_in_both_families_whatever_a_resolver_says() -> None:
    names = Names(localhost=["10.2.0.1"])
    assert addresses(hosts(names), "localhost") == ("127.0.0.1", "::1")
    assert names.asked == []


def test_of_a_name_only_the_addresses_that_are_allowed_are_used() -> None:
    names = Names(prefill=["10.1.0.4", "10.2.0.4", "fd00:7::4"], elsewhere=["10.2.0.4"])
    assert addresses(hosts(names), "prefill") == ["10.1.0.4", "fd00:7::4"]
    for name in ("elsewhere", "nowhere"):
        with pytest.raises(HostRefused, match=name):
            addresses(hosts(names), name)


def test_a_name_that_changes_after_the_check_is_checked_again_when_it_is_used() -> None:
    names = Names(prefill=["10.1.0.4"])
    it = hosts(names)
    asyncio.run(it.check("prefill"))
    names.found = {"prefill": ["169.254.169.254"]}
    with pytest.raises(HostRefused):
        addresses(it, "prefill")


def test_numbers_in_disguise_are_judged_by_what_they_mean() -> None:
    names = Names(**{"2130706433": ["127.0.0.1"], "0xa020001": ["10.2.0.1"]})
    assert addresses(hosts(names), "2130706433") == ["127.0.0.1"]
    with pytest.raises(HostRefused):
        addresses(hosts(names), "0xa020001")


def test_where_nothing_is_allowed_no_name_is_looked_up_but_this_servers_own() -> None:
    names = Names(me=["192.0.2.7"], prefill=["127.0.0.1"])
    assert addresses(hosts(names, host="me", allow=()), "me") == ["192.0.2.7"]
    with pytest.raises(HostRefused):
        addresses(hosts(names, host="me", allow=()), "prefill")
    assert names.asked == ["me"]


@pytest.mark.parametrize("host", ["", "x" * 254, "[]", "a\0b", "a b", "ä" * 100, *FORGED])
def test_what_cannot_be_a_host_is_refused(host: str) -> None:
    real = hosts()
    with pytest.raises(HostRefused):
        addresses(AllowedHosts(real.own, real.networks), host)


def test_a_server_that_listens_everywhere_is_at_each_address_of_its_machine_and_no_other() -> None:
    for listens in ("0.0.0.0", "::"):
        it = hosts(host=listens, allow=())
        for host in ("0.0.0.0", "::", "", "224.0.0.1", "198.51.100.7", "2001:db8::7"):
            with pytest.raises(HostRefused):
                addresses(it, host)
    assert is_of_this_machine(ip_address("127.0.0.2"))
    assert not is_of_this_machine(ip_address("198.51.100.7"))


def test_a_server_that_listens_at_one_address_is_at_no_other_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.server.api.allowed_hosts.is_of_this_machine", lambda number: True)
    assert addresses(hosts(host="0.0.0.0", allow=()), "198.51.100.7") == ["198.51.100.7"]
    with pytest.raises(HostRefused):
        addresses(hosts(allow=()), "198.51.100.7")


def test_the_hosts_of_a_body_are_checked_each_once_and_are_not_too_many() -> None:
    names = Names(prefill=["10.1.0.4"])
    asyncio.run(hosts(names).check(["prefill", None, "prefill", "10.1.0.9"]))
    assert names.asked == ["prefill"]
    for bad in (["prefill", "10.2.0.1"], [f"10.1.0.{number}" for number in range(MAX_HOSTS + 1)]):
        with pytest.raises(Refusal) as refusal:
            asyncio.run(hosts(names).check(bad))
        assert refusal.value.failure.param == "bootstrap_host"
