"""Hypothesis in a reproducible profile, and a table at the end: how long each part of the suite took, and may take.

Where several files run at a time, a part takes its tests' time divided by their number.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import quick_uvicorn
from tandem.garbage import no_collector
from told import SAID, Tell, WhatTestsTell, draw_seeds

settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("hunt", deadline=None, max_examples=2_000, stateful_step_count=80, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

HERE = Path(__file__).parent
STATE = tempfile.TemporaryDirectory(prefix="tandem-state-")  # the user's own secret is not for tests
os.environ["XDG_STATE_HOME"] = STATE.name
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # `gpu_world.py` is too late where torch has imported Triton before
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # servers start hundreds of times; each would compile all of its code
quick_uvicorn.install()
draw_seeds()


@dataclass(frozen=True)
class Part:
    """Tests whose path starts with one of `prefixes` belong here; the first part that matches takes them."""

    name: str
    prefixes: tuple[str, ...]
    budget_s: float


OF_THE_ENGINE = ("engine", "native", "draws", "int8_kv", "lean_torch", "torch_linear")
OF_CLIENTS = ("openapi_schemathesis", "api_openai_sdk", "api_messages_sdk", "api_responses_sdk")  # programs of others

PARTS = (
    Part("engine", (*(f"unit/test_{name}" for name in OF_THE_ENGINE), "e2e_cpu/test_engine"), 150),
    Part("clients", (*(f"unit/test_{name}" for name in OF_CLIENTS), "e2e_cpu/test_clients"), 60),
    Part("units, laws, scenarios", ("unit/", "laws/", "scenarios/"), 60),
    Part("processes", ("e2e_cpu/",), 300),
    Part("ranks", ("ranks/",), 240),
    Part("fuzz", ("fuzz/",), 30),
    Part("chaos", ("chaos/",), 240),
    Part("mutants in real servers", ("mutants/test_real_server",), 60),
    Part("breaks of one line", ("mutants/test_lines",), 20),
    Part("simulation", ("simulator/", "mutants/"), 150),
    Part("kernels of devices", ("gpu/",), 120),
    Part("published models", ("published/",), 180),
    Part("rest", ("",), 60),
)


def part_of(path: str) -> Part:
    return next(part for part in PARTS if path.startswith(part.prefixes))


class PartTimes:
    """Sums set-up, call and tear-down of every test by part."""

    def __init__(self, testers: int) -> None:
        self.testers = testers
        self.seconds: dict[str, float] = {}
        self.tests: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = Path(report.nodeid.partition("::")[0]).as_posix().removeprefix("tests/")
        name = part_of(path).name
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration / self.testers
        self.tests[name] = self.tests.get(name, 0) + (report.when == "call")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time per part", sep="-")
        terminalreporter.write_line(f"{'part':<26}{'tests':>7}{'seconds':>10}{'budget':>9}")
        for part in PARTS:
            if part.name not in self.seconds:
                continue
            seconds = self.seconds[part.name]
            late = "  OVER BUDGET" if seconds > part.budget_s else ""
            line = f"{part.name:<26}{self.tests[part.name]:>7}{seconds:>10.1f}{part.budget_s:>9.0f}{late}"
            terminalreporter.write_line(line)


@pytest.fixture(scope="module", autouse=True)
def _kept_from_the_collector() -> None:
    """What modules leave behind stays. A full collection that looks at all of it takes a second by the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Tell:
    return lambda text: record_property(SAID, text)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What four hundred files import stays: looking at all of it again and again takes a fifth of their time."""
    with no_collector():
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts a suite in the background has it ignore Ctrl+C, nohup has it ignore that its terminal closes,
    # and programs under test would inherit that; a handler of Python's is not inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    config.pluginmanager.register(WhatTestsTell(), "what-tests-tell")
    config.pluginmanager.register(PartTimes(config.getoption("numprocesses", 0) or 1), "part-times")
