"""Which way imports point, what the core may know, what nobody may use, and where files and functions have grown.

The table below is the picture in docs/ARCHITECTURE.md. A part that is not in it does not exist: name it here first.
"""

import ast
import json
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from diagrams import MACHINES, PAGE, block, missing, refreshed

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tandem"
BASELINE = Path(__file__).with_name("architecture_baseline.json")
SLACK = 1.10  # how far the tail may grow before somebody has to look

BASE = tuple(
    f"core.{name}"
    for name in ("values", "machine", "kv_parts", "request", "rank_load", "batch", "events", "commands", "settings")
)
CORE = {"core.base", "core.kv", "core.disagg", "core.state", "core.sides", "core.scheduler", "core.router"}
# What a checkpoint says, without torch; and what a forward pass is about.
ENGINE_CONFIG = (
    "documents",
    "eos",
    "rope_config",
    "experts_config",
    "encoder_config",
    "pooling_config",
    "state_space_config",
    "transformers_facts",
    "block_config",
    "generation_config",
    "model_config",
    "quantization",
    "models.table",
)
ENGINE_BATCH = (
    *("batch", "rows", "parallel", "kv_memory", "device_pages", "decode_set", "sequence", "sampler", "draws"),
    "recurrent_states",
)
# What the server decides and says without a socket, thread or clock: the simulator drives it too.
SERVER_MACHINES = (
    *("wire", "frames", "api.errors", "api.live_requests", "api.bootstrap_questions", "api.question_lanes"),
    *("node.candidates", "node.session", "node.links"),
)
BELOW_SHELLS = {"ports", "config", "leaf", *CORE}
ENGINE_PARTS = {"engine.native", "engine.config", "engine.batch", "engine.layers", "engine.attention", "engine.models"}
SHELLS_USE = {"engine", *ENGINE_PARTS, "transfer", "metrics", *BELOW_SHELLS}

# part -> parts that it may import, besides itself
EDGES: dict[str, set[str]] = {
    "core.base": set(),
    "core.kv": {"core.base"},
    "core.disagg": {"core.base", "core.kv"},
    "core.state": {"core.base", "core.kv", "core.disagg"},
    "core.sides": {"core.base", "core.kv", "core.disagg", "core.state"},
    "core.scheduler": {"core.base", "core.kv", "core.disagg", "core.state", "core.sides"},
    "core.router": {"core.base", "core.kv", "core.disagg"},
    "leaf": {"core.base"},
    "ports": CORE,
    "config": {"leaf", *CORE},
    "engine.config": {"leaf", "core.base"},
    "engine.batch": {"engine.native", "engine.config", "leaf", "core.base"},
    "engine.native": set(),
    "engine.layers": {"engine.native", "engine.config", "engine.batch"},
    "engine.attention": {"engine.native", "engine.config", "engine.batch", "leaf"},
    "engine.models": {"engine.native", "engine.config", "engine.batch", "engine.layers", "engine.attention", "leaf"},
    "engine": {*ENGINE_PARTS, *BELOW_SHELLS},
    "transfer": BELOW_SHELLS,
    "server.machines": {"leaf", *CORE},
    "metrics": BELOW_SHELLS,
    "server": {"server.machines", *SHELLS_USE},
    "simulator": {"server.machines", *SHELLS_USE},
    "simulator.whole": {"server", "server.machines", "simulator", *SHELLS_USE},  # whole servers, their own code
    "cli": {"server", "server.machines", "simulator", "simulator.whole", *SHELLS_USE},
}
CORE_STATE = (
    "state",
    "request_state",
    "page_tables",
    "priorities",
    "window_claims",
    "leaving",
    "chunk_budget",
    "prompt_costs",
    "micro_batches",
    "delayer_policy",
)
LEAVES = (
    *("sampling", "grammar", "closed_schemas", "followed_schemas", "pagehash", "batch_tables", "host_memory"),
    *("page_files", "page_storage", "membership", "ranks", "several_hosts", "logtext", "log_stream", "garbage"),
    *("cgroups", "programs", "kv_events_config", "storage_config", "otlp", "environment"),
)
# The first prefix that fits names the part.
PREFIXES: tuple[tuple[str, str], ...] = (
    *((name, "core.base") for name in BASE),
    ("core.disagg.messages", "core.base"),  # the words of the rendezvous: events and commands carry them
    ("core.kv", "core.kv"),
    *((f"core.scheduler.{name}", "core.state") for name in CORE_STATE),
    *(
        (f"core.disagg.{name}", "core.sides")
        for name in ("prefill_side", "decode_side", "prefill_lookup", "promises", "rendering", "shared_pull")
    ),
    ("core.disagg", "core.disagg"),
    ("core.dp_dispatch", "core.disagg"),
    ("core.scheduler", "core.scheduler"),
    *(
        (f"core.{name}", "core.router")
        for name in ("router", "bootstrap_registry", "stall_detector", "worker_group", "lockstep")
    ),
    *((name, "leaf") for name in LEAVES),
    *((f"engine.{name}", "leaf") for name in ("attention.table", "quantization_names", "lean_torch")),
    *((f"engine.{name}", "engine.config") for name in ENGINE_CONFIG),
    *((f"engine.{name}", "engine.batch") for name in ENGINE_BATCH),
    *((f"engine.{name}", f"engine.{name}") for name in ("native", "layers", "attention", "models")),
    *((f"server.{name}", "server.machines") for name in SERVER_MACHINES),
    *((name, "config") for name in ("flag_roles", "door_config")),
    ("simulator.whole", "simulator.whole"),
    *((name, name) for name in ("ports", "config", "engine", "transfer", "metrics", "server")),
    *((name, name) for name in ("simulator", "cli")),
)
PURE = frozenset(
    {"abc", "array", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools"}
    | {"math", "operator", "typing", "msgspec"}
)
PURE_IN_SERVER = PURE | {"ipaddress", "cryptography", "tandem"}
MACHINES_OF_SHELLS = {  # without I/O, threads, clocks and randomness; the simulator drives them: what else they import
    "transfer.lender": frozenset({"hmac", "tandem.transfer.port", "tandem.transfer.protocol"}),
    "transfer.jobs": frozenset({"tandem.transfer.protocol"}),
    "transfer.puller": frozenset(f"tandem.transfer.{name}" for name in ("digests", "jobs", "port", "protocol")),
    "transfer.digests": frozenset({"struct"}),
}
TORCH_USERS = (  # the ports of groups speak of tensors
    *("engine.", "server.worker_process"),
    *("simulator.whole.shards", "simulator.whole.torch_engine"),
)
CODE_FROM_BYTES = frozenset({"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
CODE_FROM_TEXT = frozenset({"eval", "exec", "__import__", "compile"})


# --- reading the source ----------------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """Relative to `tandem`; empty for the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text(), str(path)) for path in sorted(SOURCE.rglob("*.py"))}


def names_imported(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node, node.module or ""
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def own_imports(name: str) -> set[str]:
    """Modules of tandem that a module imports, relative to `tandem`."""
    found = {imported for _, imported in names_imported(modules()[name])}
    return {full.removeprefix("tandem.") for full in found if full.removeprefix("tandem.") in modules()} - {""}


def part_of(name: str) -> str | None:
    for prefix, part in PREFIXES:
        if name == prefix or name.startswith(prefix + "."):
            return part
    return None


@cache
def tracked_files() -> list[Path]:
    """What git knows or would add; the whole tree where there is no git."""
    asked = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        found = [path for path in ROOT.rglob("*") if not any(part.startswith(".") for part in path.parts)]
    return [path for path in found if path.is_file()]


# --- imports ---------------------------------------------------------------------------------------------------------


def test_every_module_belongs_to_a_part() -> None:
    packages = {"", "core"}
    assert [name for name in modules() if part_of(name) is None and name not in packages] == []


def test_imports_point_down() -> None:
    wrong = [
        f"{name} ({part_of(name)}) imports {imported} ({part_of(imported)})"
        for name in modules()
        for imported in own_imports(name)
        if part_of(imported) not in (part_of(name), None) and part_of(imported) not in EDGES[part_of(name) or ""]
    ]
    assert wrong == []


def test_no_two_modules_import_each_other_however_far_around() -> None:
    graph = {name: own_imports(name) - {name} for name in modules()}
    done: set[str] = set()
    while len(done) < len(graph):
        free = {name for name, imported in graph.items() if name not in done and imported <= done}
        assert free, f"a cycle among {sorted(set(graph) - done)}"
        done |= free


def test_the_core_imports_pure_modules_only() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, tree in modules().items()
        if name.startswith("core")
        for _, imported in names_imported(tree)
        if imported.split(".")[0] not in PURE and not imported.startswith("tandem.core")
    ]
    assert wrong == []


def test_the_machines_of_the_server_import_pure_modules_only() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, tree in modules().items()
        if part_of(name) == "server.machines"
        for _, imported in names_imported(tree)
        if imported.split(".")[0] not in PURE_IN_SERVER
    ]
    assert wrong == []


def test_machines_of_shells_import_pure_modules_only() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, allowed in MACHINES_OF_SHELLS.items()
        for node, imported in names_imported(modules()[name])
        for top in [node.module if isinstance(node, ast.ImportFrom) else imported]
        if top is not None
        and top.split(".")[0] not in PURE
        and not top.startswith("tandem.core")
        and top not in allowed
    ]
    assert wrong == []


def test_only_the_engine_and_the_worker_process_know_torch() -> None:
    wrong = [
        name
        for name, tree in modules().items()
        if not (name.startswith(TORCH_USERS) and part_of(name) not in ("engine.config", "leaf"))
        and any(imported.split(".")[0] == "torch" for _, imported in names_imported(tree))
    ]
    assert wrong == []


def test_an_assert_does_nothing_but_look() -> None:
    """Whoever reads it may think it away, as a python without asserts does."""
    does = {"pop", "popleft", "destroy", "close", "send", "recv", "write", "read", "remove", "discard", "add", "append"}
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        for part in ast.walk(node.test)
        if isinstance(part, ast.NamedExpr)
        or (isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in does)
    ]
    assert wrong == []


def test_nothing_imports_the_command_line() -> None:
    outside = [name for name in modules() if not name.startswith("cli")]
    assert [name for name in outside if any(imported.startswith("cli") for imported in own_imports(name))] == []


def test_imports_stand_at_the_top_of_the_file_except_on_the_command_line() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        if not name.startswith("cli")
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node, _ in names_imported(function)
    ]
    assert wrong == []


def test_there_are_no_imports_for_types_only() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    assert wrong == []


# --- what nobody may use ---------------------------------------------------------------------------------------------


# What they wrote themselves: the training script its checkpoint, optimizer state included; the search of the small
# worlds situations of a reader, in the memory of one process.
MAY_LOAD_OWN_STATE = {
    "models/mini/train.py": "torch.load",
    "src/tandem/simulator/model_check/data_plane.py": "pickle",
}


def python_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py"]


def forbidden(tree: ast.Module) -> Iterator[str]:
    for node, imported in names_imported_loosely(tree):
        if imported.split(".")[0] in CODE_FROM_BYTES:
            yield f"line {node.lineno} imports {imported}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CODE_FROM_TEXT:
            yield f"line {node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node) == "torch.load":
            yield f"line {node.lineno} uses torch.load"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"line {node.value.lineno} passes allow_pickle"


def names_imported_loosely(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node, node.module or ""


def test_bytes_and_text_from_outside_never_become_code() -> None:
    found = [
        f"{name}: {wrong}"
        for path in python_files()
        for wrong in forbidden(ast.parse(path.read_text()))
        if MAY_LOAD_OWN_STATE.get(name := path.relative_to(ROOT).as_posix(), "?") not in wrong
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "exec(x)",
        "torch.load(f)",
        "np.load(f, allow_pickle=1)",
    ],
)
def test_the_search_for_code_from_outside_finds_it(source: str) -> None:
    assert list(forbidden(ast.parse(source)))


def test_no_tracked_text_names_a_place_of_the_machine_it_was_written_on() -> None:
    places = "|".join(("wo" + "rk", "fa" + "rm"))
    pattern = re.compile(rf"(?<![\w.}}])/(?:{places})/")
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {hit.group()}" for hit in pattern.finditer(text)]
    assert found == []


# --- sizes -----------------------------------------------------------------------------------------------------------

CONTROL = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}.{node.name}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}.{node.name}", node
            yield from functions(node, f"{prefix}.{node.name}")


def depth(node: ast.AST, *, is_elif: bool = False) -> int:
    inside = 0
    for child in ast.iter_child_nodes(node):
        chained = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        inside = max(inside, depth(child, is_elif=chained))
    return inside + (isinstance(node, CONTROL) and not is_elif)


def tails(how_many: int = 5) -> dict[str, dict[str, int]]:
    """The longest files and functions (lines), and the deepest functions (nested statements)."""
    files = {name: path.read_text().count("\n") for path in SOURCE.rglob("*.py") if (name := module_name(path))}
    lengths: dict[str, int] = {}
    depths: dict[str, int] = {}
    for name, tree in modules().items():
        for function, node in functions(tree, name):
            lengths[function] = (node.end_lineno or node.lineno) - node.lineno + 1
            depths[function] = max((depth(statement) for statement in node.body), default=0)
    return {
        kind: dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:how_many])
        for kind, sizes in (("files", files), ("functions", lengths), ("nesting", depths))
    }


def test_the_tail_of_sizes_has_not_grown() -> None:
    """With TANDEM_UPDATE_BASELINE=1 the present sizes become the baseline; a reviewer sees the difference."""
    now = tails()
    if os.environ.get("TANDEM_UPDATE_BASELINE"):
        BASELINE.write_text(json.dumps(now, indent=2) + "\n")
    before = json.loads(BASELINE.read_text())
    grown = [
        f"{kind}: {name} has {size}, where the {rank + 1}. largest had {limit}"
        for kind, sizes in now.items()
        for rank, ((name, size), limit) in enumerate(zip(sizes.items(), before[kind].values(), strict=True))
        if size > limit * SLACK
    ]
    assert grown == []


# --- names -----------------------------------------------------------------------------------------------------------

# A message between the hosts of a server has its name in its bytes, one of the data plane in docs/protocol.md, and the
# core's words are everybody's.
SHARED_NAMES = {
    "Join": "what a host says that comes in; in a batch plan a request that comes into the decode set",
    "Refused": "what a host hears that may not come in; of the dispatcher, a request for which there is no rank",
    "Welcome": "what a host hears that may come in; on the data plane, a reader",
}


def names_of_several_classes(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Each with the modules that have a class of this name."""
    found: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for statement in tree.body:
            if isinstance(statement, ast.ClassDef):
                found.setdefault(statement.name, []).append(module)
    return {name: owners for name, owners in found.items() if len(owners) > 1}


def test_a_class_has_its_name_for_itself() -> None:
    """So a reader finds by it what is meant, without its module. The simulator may have the product's names."""
    product = {name: tree for name, tree in modules().items() if not name.startswith("simulator")}
    shared = names_of_several_classes(product)
    assert {name: owners for name, owners in shared.items() if name not in SHARED_NAMES} == {}
    assert shared.keys() == SHARED_NAMES.keys(), "a name that is not shared any more"
    assert all(len(owners) == 2 for owners in shared.values()), shared


# --- diagrams --------------------------------------------------------------------------------------------------------


def test_the_diagrams_in_the_documentation_are_those_of_the_tables() -> None:
    text = PAGE.read_text()
    assert missing(text) == [], "python -m tests.diagrams"
    assert refreshed(text) == text, "python -m tests.diagrams"
    assert all(block(machine) in text for machine in MACHINES)
