"""What the pages call by name exists: flags, files and what is in them, tests, decisions, metrics, targets of make.

Rows of the tables that name their tests are compared in test_docs.py.
"""

import argparse
import ast
import importlib
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tandem.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tandem"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REPORTS = "sglang-parity.md"  # names of SGLang's in its third column
TOOLS = ("bench", "tests/fuzz", "tests/foreign", "docs/dynamo")  # commands of their own, whose flags pages name
OF_OTHERS = {
    "--eviction-interval-secs",  # sglang-router's
    "--config.file",  # Prometheus'
    "--storage.tsdb.path",
    "--dp-aware",  # smg's
    "--http-port",  # Dynamo's
    "--migration-limit",
    "--router-mode",
}
NOT_FILES_HERE = {"1_Pooling/config.json", "modules.json", "config.json", "generation_config.json", "config.toml"}
NOT_FILES_HERE |= {"openapi.json", "flag_roles}.py", "quantization_config.json"}
METRIC_PARTS = ("router_", "worker_", "storage_")  # before the names that the source has
TARGET = re.compile(r"\bmake ([a-z]+)(?=[`\s;:,.)]|$)")


@cache
def tracked() -> frozenset[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return frozenset(listed.stdout.split())


def found(path: str) -> list[Path]:
    """Files that are called so, from the root or from a folder of it."""
    return [ROOT / name for name in tracked() if name == path or name.endswith("/" + path)]


def code(page: Path) -> str:
    """What is between backticks, a piece a line."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL))


@cache
def known_flags() -> frozenset[str]:
    flags = set()
    for command in COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"tandem.cli.{command}").add_arguments(parser)
        flags |= set(re.findall(r"--[\w-]+", parser.format_help()))
        flags |= {option for action in parser._actions for option in action.option_strings}
    for folder in TOOLS:
        flags |= {
            flag for path in (ROOT / folder).rglob("*.py") for flag in re.findall(r'"(--[\w-]+)"', path.read_text())
        }
    return frozenset(flags)


@cache
def literals() -> frozenset[str]:
    """Names of metrics as the source has them: strings, or fields of what is counted, without what is put around."""
    paths = [*SOURCE.glob("metrics/*.py"), SOURCE / "server" / "router" / "metrics.py", SOURCE / "page_files.py"]
    trees = [ast.parse(path.read_text()) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    fields = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    names = {re.split(r"[{]", string)[0].rpartition(":")[2].removesuffix("_total") for string in strings}
    return frozenset(names | fields)


def spelled_out(name: str) -> Iterator[str]:
    """`a_{b,c}_d` is two names."""
    match = re.search(r"\{([^{}]*)\}", name)
    if match is None:
        yield name
        return
    for part in match[1].split(","):
        yield from spelled_out(name[: match.start()] + part + name[match.end() :])


def metrics_of(text: str) -> set[str]:
    named = re.findall(r"(?<!\w)(?:sglang|tandem):((?:\w|\{[\w,]+\})+)(?![\w*])", text)
    return {one for name in named for one in spelled_out(name)}


def is_exported(metric: str) -> bool:
    name = metric.removesuffix("_total")
    spellings = {name}
    for part in METRIC_PARTS:
        spellings |= {spelling.removeprefix(part) for spelling in spellings}
    return not spellings.isdisjoint(literals())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_a_page_names_are_flags(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", code(page)))
    if page.name != REPORTS:
        assert named - known_flags() - OF_OTHERS == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_have_what_it_finds_in_them(page: Path) -> None:
    named = re.findall(r"(?<![\w*{},/.])([\w-][\w/.-]*\.(?:py|txt|json|cpp|toml|c|h))\b(?::: ?|: )?(\w+)?", code(page))
    if page.name == REPORTS:  # what is here is compared in test_docs.py
        return
    for path, name in named:
        if Path(path).name in NOT_FILES_HERE or path in NOT_FILES_HERE:
            continue
        files = found(path)
        assert files, f"there is no {path}"
        assert not name or any(re.search(rf"\b{name}\b", file.read_text()) for file in files), f"no {name} in {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_a_page_names_are_exported(page: Path) -> None:
    if page.name != REPORTS:
        assert [name for name in sorted(metrics_of(code(page))) if not is_exported(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_decisions_and_targets_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    decisions = {path.name[:3] for path in (ROOT / "docs" / "decisions").glob("*.md")}
    assert set(re.findall(r"\bdecision (\d{3})", text)) - decisions == set()
    (names,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = set(names.split())
    assert set(TARGET.findall(code(page))) - targets == set()


def test_names_that_are_not_there_would_be_noticed() -> None:
    assert "--dp-sizes" not in known_flags()
    assert {"--dp-size", "--tp", "--whole", "--cb-timeout-duration-secs"} <= known_flags()
    assert metrics_of("`tandem:hicache_{stored,lost}_tokens_total`, `sglang:*`") == {
        "hicache_stored_tokens_total",
        "hicache_lost_tokens_total",
    }
    assert is_exported("worker_storage_evicted_total")
    assert not is_exported("worker_storage_evicted_pages")
    assert not is_exported("num_waiting_reqs")
    assert found("core/kv/pool.py")
    assert not found("core/kv/pools.py")
