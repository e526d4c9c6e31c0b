"""Breaks the core of every server that is started with this folder in PYTHONPATH.

Python imports a module of this name when it starts. `TANDEM_TEST_MUTANT` names the mutant, and each process that it was
put into adds its command to the file `TANDEM_TEST_MUTANT_LOG`: Python goes on when this file fails, and whoever counts
kills has to know that there was a bug at all. Only the processes that run a core are touched, the node and the router,
and the worker, whose data plane decides who may read; the tests themselves, which start the servers, see everything as
it is.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

NODE = "tandem.server.node.process"
WORKER = "tandem.server.worker_process"
broken = contextlib.ExitStack()  # entered here, left never


def decides(words: list[str]) -> bool:
    return NODE in words or WORKER in words or ("tandem.cli.main" in words and "router" in words)


def put_in(name: str) -> None:
    from worker_mutants import WORKER_MUTANTS

    from seeded_bugs import MUTANTS

    broken.enter_context(WORKER_MUTANTS[name]() if name in WORKER_MUTANTS else MUTANTS[name].breaks())
    with open(os.environ["TANDEM_TEST_MUTANT_LOG"], "a") as log:
        print(name, *sys.orig_argv, file=log)


def run_the_one_that_this_hides() -> None:
    """A system's own module of the same name."""
    here = Path(__file__).parent
    others = [path for path in sys.path if Path(path).resolve() != here.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


run_the_one_that_this_hides()
if os.environ.get("TANDEM_TEST_MUTANT") and decides(sys.orig_argv):
    put_in(os.environ["TANDEM_TEST_MUTANT"])
