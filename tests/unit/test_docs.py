"""The pages under docs/ say what is there: the tables of reports and cases, and nothing outside of this repository.

Pages that are generated are compared where they come from: flags.md in test_config_flags.py, errors.md in
test_api_operations.py, the diagrams in tests/test_architecture.py.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tandem.config import flags
from tandem.engine.attention.table import ATTENTION_BACKENDS
from tandem.engine.models.table import FAMILIES
from tandem.server.api.access import PAGES as HTTP_PAGES
from told import Tell

ROOT = Path(__file__).parents[2]
PARITY = ROOT / "docs" / "sglang-parity.md"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
CASES = ROOT / "docs" / "pd-cases.md"
MODELS = ROOT / "docs" / "models.md"
NUMBERS = ROOT / "docs" / "numbers.md"
LAYOUTS = ("server/worker_process.py", "engine/weights.py")
SECURITY = ROOT / "docs" / "security.md"
HEADER = ["report", "kind", "name there", "here", "file", "in", "shown by"]
PROCESSES, SIMULATION, FUNCTION = "processes", "simulation", "function only"
STARTS_PROCESSES = re.compile(r"\b(?:cluster|halves|start_pd|serve_words)\(|from arena import")
RUNS_NODES = re.compile(
    r"^from core_driver import|run_seed\(|^from tandem\.simulator\.|import_module\(\"delayer\"\)", re.MULTILINE
)
NEEDS_GPU = "needs a GPU: "
NUM_CASES, NUM_SPOTS = 29, 40
KINDS = {
    "#26780": {
        "flag",
        "environment",
        "metric",
        "symbol",
        "behaviour",
        "error text",
        "test",
        "incompatibility",
        "related",
    },
    "#27028": {"metric", "log line", "error text", "symbol", "behaviour", "test", "related"},
    "#23189": {"flag", "metric", "symbol", "behaviour", "test", "incompatibility", "related"},
    "#22901": {"environment", "flag", "symbol", "error text", "behaviour", "test", "incompatibility", "related"},
    "#20845": {"environment", "flag", "log line", "symbol", "behaviour", "test"},
}
CAPABILITIES = {
    "bootstrap registry",
    "CUDA graphs",
    "diffusion language models",
    "DP ranks",
    "embeddings",
    "fault injection at run time",
    "hierarchical cache",
    "PP ranks",
    "role switch",
}


@dataclass(frozen=True)
class Row:
    report: str
    kind: str
    there: str
    here: str
    file: str | None
    level: str
    shown_by: str

    @property
    def capability(self) -> str | None:
        """What is missing, when it is."""
        return self.shown_by.removeprefix("open: ") if self.shown_by.startswith("open: ") else None

    def __str__(self) -> str:
        return f"{self.report} {self.kind} {self.there}"


def words(cell: str) -> list[str]:
    """What is written as code."""
    return re.findall(r"`([^`]+)`", cell)


@cache
def rows() -> tuple[Row, ...]:
    lines = PARITY.read_text().splitlines()
    start = lines.index("| " + " | ".join(HEADER) + " |") + 2
    found = []
    for line in lines[start:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == len(HEADER), line
        report, kind, there, here, file, level, shown_by = cells
        found.append(Row(report, kind, there, here, None if file == "-" else file.strip("`"), level, shown_by))
    return tuple(found)


def level_of(names: list[str]) -> str:
    """What the tests of these names show it in: servers as processes, simulated nodes, or functions of their own."""
    paths = {name.partition("::")[0] for name in names}
    if any(is_process_test(path) for path in paths):
        return PROCESSES
    return SIMULATION if any(is_simulation(path) for path in paths) else FUNCTION


@cache
def is_process_test(path: str) -> bool:
    """By where it is and by what it does: some tests beside those of processes start none."""
    is_there = path.startswith(("tests/e2e_cpu/", "tests/chaos/", "tests/ranks/"))
    return is_there and STARTS_PROCESSES.search((ROOT / path).read_text()) is not None


@cache
def is_simulation(path: str) -> bool:
    """Whole nodes that speak to each other on virtual time."""
    if path.startswith("tests/scenarios/"):
        return True
    return path.startswith("tests/") and RUNS_NODES.search((ROOT / path).read_text()) is not None


@cache
def functions(path: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def test_every_report_has_rows_of_every_kind_that_it_names() -> None:
    assert {report: {row.kind for row in rows() if row.report == report} for report in KINDS} == KINDS
    assert {row.report for row in rows()} == set(KINDS)


def test_no_name_has_two_rows_and_no_cell_is_empty() -> None:
    names = Counter((row.report, row.kind, row.there) for row in rows())
    assert [name for name, count in names.items() if count > 1] == []
    assert [str(row) for row in rows() if not (row.kind and row.there and row.here and row.shown_by)] == []


@pytest.mark.parametrize("row", rows(), ids=str)
def test_a_row_is_shown_by_tests_that_exist_or_names_what_is_open(row: Row) -> None:
    if row.capability is not None:
        assert row.capability in CAPABILITIES
        return
    assert_it_is_there(words(row.shown_by))


@pytest.mark.parametrize("row", rows(), ids=str)
def test_a_row_says_what_its_tests_show_it_in_and_no_more(row: Row) -> None:
    expected = "-" if row.capability is not None else level_of(words(row.shown_by))
    assert row.level == expected, f"{row} is shown in {expected}"


def test_tests_are_told_apart_by_what_they_run() -> None:
    assert level_of(["tests/e2e_cpu/test_pd_edges.py::x", "tests/unit/test_dp_rank.py::x"]) == PROCESSES
    assert level_of(["tests/chaos/test_chaos.py::x"]) == PROCESSES
    assert level_of(["tests/e2e_cpu/test_router_http.py::x", "tests/e2e_cpu/test_transfer_sock.py::x"]) == FUNCTION
    assert level_of(["tests/unit/test_core_plans.py::x", "tests/unit/test_dp_rank.py::x"]) == SIMULATION
    assert level_of(["tests/simulator/test_simulation.py::x"]) == level_of(["tests/scenarios/abort_while_queued.txt"])
    assert level_of(["tests/unit/test_dp_rank.py::x", "tests/laws/test_shard_progress.py::x"]) == FUNCTION


def assert_it_is_there(names: list[str]) -> None:
    """Each names a test, or a story with its trace."""
    assert names
    for path, _, test in (name.partition("::") for name in names):
        assert path.startswith("tests/")
        assert (ROOT / path).is_file(), path
        assert path.endswith(".txt") or test in functions(ROOT / path), f"{path} has no {test}"


@pytest.mark.parametrize("row", [row for row in rows() if row.capability is None or row.file], ids=str)
def test_the_named_file_exists_and_has_the_names_that_play_the_part(row: Row) -> None:
    assert row.file is not None
    text = (ROOT / row.file).read_text()
    missing = [word for word in words(row.here) if word not in text and word not in NOT_IN_A_FILE]
    assert missing == []


NOT_IN_A_FILE = {"tandem eval"}


def test_flags_are_there_unless_they_are_open() -> None:
    there = {name for name, _ in flags()}
    for row in rows():
        if row.kind == "flag" and row.capability is not None:
            assert there.isdisjoint(words(row.there)), (
                f"{row} is not open any more: name its test in docs/sglang-parity.md"
            )


def test_how_much_of_the_reports_is_open_is_printed(tell: Tell) -> None:
    open_rows = Counter(row.capability for row in rows() if row.capability is not None)
    levels = Counter(row.level for row in rows() if row.capability is None)
    tell(f"docs/sglang-parity.md: {len(rows())} rows, shown in: {dict(levels.most_common())}")
    tell(f"{open_rows.total()} rows are open: {dict(open_rows.most_common())}")
    assert set(levels) == {PROCESSES}
    assert set(open_rows) <= CAPABILITIES


def test_what_is_open_says_why_it_needs_a_gpu() -> None:
    assert [str(row) for row in rows() if row.capability is not None and not row.here.startswith(NEEDS_GPU)] == []


# --- the cases of prefill and decode ---------------------------------------------------------------------------------


def cases() -> list[list[str]]:
    """The cells of each row that begins with a number: of the cases, then of the weak spots."""
    lines = [line.strip("|").split("|") for line in CASES.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in cells] for cells in lines]


def test_every_case_and_every_weak_spot_has_its_row() -> None:
    numbers = [int(cells[0]) for cells in cases()]
    assert numbers == [*range(1, NUM_CASES + 1), *range(1, NUM_SPOTS + 1)]
    assert all(cell for cells in cases() for cell in cells)


@pytest.mark.parametrize("cells", cases(), ids=lambda cells: f"{len(cells)} cells {cells[0]}")
def test_a_case_is_shown_or_says_why_not(cells: list[str]) -> None:
    kind, _, what = cells[-1].partition(": ")
    match kind:
        case "open":
            assert what in CAPABILITIES
        case "does not apply":
            assert what
        case _:
            assert_it_is_there(words(cells[-1]))


def test_every_threat_has_an_answer_that_tests_show() -> None:
    threats = [line for line in SECURITY.read_text().splitlines() if "`tests/" in line]
    assert threats
    for line in threats:
        threat, answer, shown_by = (cell.strip() for cell in line.strip("|").split("|"))
        assert threat
        assert answer
        assert_it_is_there(words(shown_by))


def test_the_page_of_numbers_names_every_script() -> None:
    scripts = {file.stem for file in (ROOT / "bench").glob("*.py") if "__main__" in file.read_text()} | {"peers"}
    table = NUMBERS.read_text().partition("## The scripts")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == scripts


def test_the_page_of_the_protocol_names_every_page_with_its_access_and_every_field_of_a_layout() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    table = text.partition("## 8. Who may ask, over HTTP")[2].partition("| everything else")[0]
    assert [page for page in HTTP_PAGES if f"`{page}`" not in table] == []
    keys = {key.value for source in LAYOUTS for key in keys_of(ROOT / "src" / "tandem" / source)}
    rows = text.partition("| field of a layout |")[2].partition("\n\n")[0]
    assert [key for key in sorted(keys) if f"`{key}`" not in rows] == []


def keys_of(source: Path) -> Iterator[ast.Constant]:
    """Of the dictionary that its function about layouts returns, and of those within."""
    functions = (it for it in ast.walk(ast.parse(source.read_text())) if isinstance(it, ast.FunctionDef))
    (layout,) = (function for function in functions if function.name.endswith("layout_fields"))
    for node in ast.walk(layout):
        if isinstance(node, ast.Dict):
            yield from (key for key in node.keys if isinstance(key, ast.Constant))


def test_the_page_of_models_names_every_architecture_and_backend_and_tests_that_exist() -> None:
    text = MODELS.read_text()
    assert [name for name in (*FAMILIES, *ATTENTION_BACKENDS) if f"`{name}`" not in text] == []
    tests = [word for word in words(text) if word.startswith("tests/")]
    assert tests
    assert [name for name in tests if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_no_path_outside_of_the_repository(page: Path) -> None:
    absolute = re.findall(r"(?<![\w.:/>])/(?:home|root|tmp|work|usr|opt|mnt|var|data)/[\w./-]*", page.read_text())
    assert absolute == []
    assert re.findall(r"(?:\.\./)+[\w./-]*", page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []
