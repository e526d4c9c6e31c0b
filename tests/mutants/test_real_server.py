"""Seeded bugs of the simulator in the core of real servers: tests that only see processes from outside notice them too.

With them bugs of one worker among several, which only real ones have (`real/worker_mutants.py`).

Each row runs one test, of tests/e2e_cpu if it names no other folder, in a pytest of its own, with the mutant in every
node and worker process that the test starts (`real/sitecustomize.py`). It has to fail, by the law that the row names: a
server that does not start, or a test that hangs, kills nothing. Two run at a time.

`make hunt` tries all, `make test` one for each test that it takes: with TANDEM_ALL_MUTANTS=1 all are tried. Without a
mutant the same tests pass, in tests/e2e_cpu; that they do so in a pytest of its own is shown for one of them.
"""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from seeded_bugs import MUTANTS

sys.path.append(str(Path(__file__).parent / "real"))
from worker_mutants import WORKER_MUTANTS

HERE = Path(__file__).parent
TESTS = HERE.parent / "e2e_cpu"
HUNG_S = 60.0  # a start and a wait or two; who needs so long hangs
NODE = "tandem.server.node.process"

LAWS = "test_pd_laws.py::test_"
CACHES = LAWS + "tokens_are_the_same_whatever_is_in_the_caches"
TOGETHER = LAWS + "answers_that_push_each_other_back_are_those_of_each_alone"
FOREIGN = LAWS + "one_room_is_no_proof_of_one_prompt"
FROZEN = LAWS + "pages_that_a_worker_may_still_touch_belong_to_nobody_else"
GAUGES = LAWS + "a_request_that_runs_does_not_wait_in_any_queue"
REFUSED = LAWS + "what_prefill_refuses_decode_does_not_wait_for"
LEDGER = LAWS + "the_ledger_of_a_request_that_fell_back_has_the_time_that_it_waited_before"
NUMBERS = "test_serve_unified.py::test_batches_are_logged_under_the_numbers_of_their_launch"
RETRIED = "test_forced_retry.py::test_what_a_retry_finds_of_itself_is_no_cache_hit"

ATTACKED = "test_pd_data_attackers.py::test_pages_of_a_user_are_read_by_nobody_who_was_not_granted_them"

ORPHANS = "../ranks/test_rank_orphans.py::test_"
ABORTED = ORPHANS + "an_abort_while_pages_move_and_one_shard_stands_still_reaches_every_shard"

OTHER_TOKENS = r"At index \d diff: "


@dataclass(frozen=True)
class Kill:
    mutant: str
    test: str
    says: str  # a pattern in what the test says when it fails


KILLS = (
    # pages
    Kill("source_pages_freed_without_waiting_for_readers", FROZEN, r"not within.*'prefill'.*'quarantined': 0"),
    Kill("destination_pages_freed_without_waiting_for_the_transfer", FROZEN, r"not within.*'decode'.*'quarantined': 0"),
    Kill("end_revokes_nothing", FROZEN, r"not within.*'prefill'.*'quarantined': 0"),
    Kill("owner_ignores_the_secret_of_a_grant", ATTACKED, r"Status\.(OK|WRONG_GENERATION)"),
    # rows, rooms, ends
    Kill("result_slot_leaks_at_the_end", TOGETHER, r"not within.*'total': 64, 'free': (?!64)"),
    Kill("unlock_forgets_one_pin", TOGETHER, r"'pages_pinned_by_tree': [1-9]|\"stage\":\"pages\""),
    Kill("drained_request_is_never_forgotten", CACHES, r"not within.*'draining': \[\d"),
    Kill("running_request_ends_as_soon_as_pages_are_short", TOGETHER, "out_of_pages"),
    # rendezvous
    Kill("release_is_forgotten", CACHES, "deadline_exceeded"),
    Kill("refused_half_tells_nobody", REFUSED, "deadline_exceeded"),
    Kill("room_is_trusted_without_comparing_prompts", FOREIGN, "DID NOT RAISE"),
    Kill("decode_starts_before_the_last_page_has_landed", CACHES, OTHER_TOKENS),
    Kill("result_slot_of_another_request_is_offered", CACHES, OTHER_TOKENS),
    Kill("retracted_request_waits_for_its_peer_again", TOGETHER, "no token for too long"),
    # batches
    Kill("tokens_of_one_step_change_places", TOGETHER, OTHER_TOKENS),
    Kill("token_of_one_row_is_lost_on_the_way", TOGETHER, OTHER_TOKENS),
    Kill("iteration_is_used_twice", NUMBERS, r"assert \[1.* == \[1"),
    # accounts
    Kill("gauge_counts_something_else", GAUGES, "'queue': 1"),
    Kill("prompt_computed_again_counts_as_a_hit", RETRIED, r"== 0\.0"),
    Kill("retraction_resets_the_first_token_clock", LEDGER, r"assert .* > 0\.2"),
    # one worker of several
    Kill("one_worker_ignores_a_revoke", ABORTED, r"not within.*'prefill'.*'draining': \[\d"),
    Kill(
        "one_worker_says_drained_and_keeps_its_grants", ABORTED, r"'prefill-0'.*'pinned_pages': .*\('0', '1'\): [1-9]"
    ),
    Kill("one_worker_ignores_the_cancel_of_a_pull", ABORTED, r"not within.*'decode'.*'draining': \[\d"),
)


FIRST_OF_ITS_TEST = {kill.test: kill for kill in reversed(KILLS)}
TRIED = KILLS if os.environ.get("TANDEM_ALL_MUTANTS") else tuple(FIRST_OF_ITS_TEST.values())


@dataclass(frozen=True)
class Run:
    code: int
    failures: tuple[str, ...]  # the message of each failure of a test, and of each error around one
    broken: tuple[str, ...]  # commands of the processes with a mutant
    output: str


def run(tests: list[str], folder: Path, mutant: str = "") -> Run:
    """A pytest of its own. Raises TimeoutExpired, with all processes ended, when it hangs."""
    report, log = folder / "report.xml", folder / "broken"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    path = os.pathsep.join([str(HERE / "real"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = {"PYTHONPATH": path, "TANDEM_TEST_MUTANT": mutant, "TANDEM_TEST_MUTANT_LOG": str(log)}
    done = subprocess.run(
        [*command, *tests],
        cwd=TESTS,
        env={**os.environ, **told},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    cases = ET.parse(report).getroot().iter("testcase")
    failures = [f"{found.get('message')}\n{found.text}" for case in cases for found in case if found.tag == "failure"]
    broken = log.read_text().splitlines() if log.exists() else []
    return Run(done.returncode, tuple(failures), tuple(broken), done.stdout)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Run]]]:
    """Of all mutants that are asked for, started at once."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    kills = [spec.params["kill"] for spec in specs if spec is not None]
    with ThreadPoolExecutor(2) as pool:
        yield {
            kill.mutant: pool.submit(run, [kill.test], tmp_path_factory.mktemp("kill"), kill.mutant) for kill in kills
        }


def test_every_kill_is_of_a_mutant_and_by_a_test_that_are_there() -> None:
    assert {kill.mutant for kill in KILLS} <= {*MUTANTS, *WORKER_MUTANTS}
    for kill in KILLS:
        path, _, test = kill.test.partition("::")
        assert f"def {test}(" in (TESTS / path).read_text(), kill.mutant


@pytest.mark.parametrize("kill", TRIED, ids=lambda kill: kill.mutant)
def test_the_mutant_dies_in_the_real_server(kill: Kill, runs: dict[str, Future[Run]]) -> None:
    found = runs[kill.mutant].result()
    assert any(NODE in command for command in found.broken), f"no server had the bug\n{found.output}"
    assert found.code == pytest.ExitCode.TESTS_FAILED, found.output
    assert len(found.failures) == 1, f"not the test has failed, but something around it\n{found.output}"
    assert re.search(kill.says, found.failures[0]), found.output


def test_without_a_mutant_the_test_passes(tmp_path: Path) -> None:
    found = run([GAUGES], tmp_path)
    assert (found.code, found.broken) == (pytest.ExitCode.OK, ()), found.output
