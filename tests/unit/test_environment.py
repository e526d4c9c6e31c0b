"""Names in the environment that nobody reads."""

import pytest

from tandem.engine.native import library
from tandem.environment import misspelt


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("TANDEM_APIKEY", "TANDEM_API_KEY"),
        ("TANDEM_NATVE", "TANDEM_NATIVE"),
        ("TANDEM_DISAGGREGATION_HEARTBEAT_MAX_FAILURES", "TANDEM_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"),
        ("TANDEM_LOG_FORWARD_ITER", "TANDEM_LOG_FORWARD_ITERS"),
    ],
)
def test_a_slip_of_a_name_that_is_read_is_told(monkeypatch: pytest.MonkeyPatch, slip: str, meant: str) -> None:
    monkeypatch.setenv(slip, "1")
    assert f"the environment variable {slip} is not read; {meant} is" in misspelt()


def test_nothing_is_said_of_names_that_are_read_and_of_what_others_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("TANDEM_API_KEY", "TANDEM_ADMIN_API_KEY", library.SWITCH, "TANDEM_ENGINES", "TANDEM_TEST_STAGED_KV"),
        *("TANDEM_PORT", "TANDEM_PORT_8000_TCP_ADDR", "TANDEM_SERVICE_HOST", "TANDEM_ROUTER_SERVICE_PORT"),
        *("TANDEM_HOME", "SGLANG_LOG_FORWARD_ITER"),
    ):
        monkeypatch.setenv(name, "1")
    assert misspelt() == []
