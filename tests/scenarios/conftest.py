"""`pytest tests/scenarios --regenerate` writes the traces anew; review them as a diff."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write the traces of all scenarios anew")
