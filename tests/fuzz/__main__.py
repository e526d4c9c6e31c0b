"""Fuzzing by hand.

python tests/fuzz                          every target for its fixed work, as in `make test`
python tests/fuzz --seconds 600            new inputs for so long, all targets together
python tests/fuzz TARGET [TARGET ...]      these only
python tests/fuzz TARGET FILE              one input: what a finding prints to do it again
"""

import argparse
import contextlib
import json
import secrets
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("unit", "e2e_cpu")), str(HERE.parent)]

import engine  # noqa: E402
from breaks import BROKEN_TARGETS  # noqa: E402
from targets import TARGETS  # noqa: E402

FIXED_SEED = 1
MEMORY = Path("/dev/shm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="TARGET", help="; or one, and a file")
    parser.add_argument("--seconds", type=float, help="for so long, in all, instead of the fixed work")
    parser.add_argument("--seed", type=int, help="of the changes (default: a new one with --seconds)")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="folder for what is found")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON document per target on stdout")
    args = parser.parse_args()
    *names, last = args.words or [*TARGETS]
    known = TARGETS | BROKEN_TARGETS
    unknown = [name for name in (*names, *([] if len(names) == 1 else [last])) if name not in known]
    if unknown:
        parser.error(f"there is no target {unknown[0]}; there are {', '.join(TARGETS)}")
    with scratch_folder():
        if len(names) == 1 and last not in known:
            return do_again(known[names[0]], Path(last))
        return explore([known[name] for name in (*names, last)], args)


@contextlib.contextmanager
def scratch_folder() -> Iterator[None]:
    """Where processes that end without cleaning up have their files: in memory, if there is such a folder."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="tandem-fuzz-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def do_again(target: engine.Target, path: Path) -> int:
    engine.LOGGED_ERRORS.watch()
    began = time.process_time()
    try:
        is_answer = engine.run_once(target, target.open(), path.read_bytes())
    except BaseException:
        traceback.print_exc()
        return 1
    print(f"{'answered as documented' if is_answer else 'taken'}, {time.process_time() - began:.3f} s")
    return 0


def explore(chosen: list[engine.Target], args: argparse.Namespace) -> int:
    seed = args.seed if args.seed is not None else FIXED_SEED if args.seconds is None else secrets.randbits(31)
    share = None if args.seconds is None else args.seconds * args.processes / len(chosen)
    if not args.json:
        print(f"seed {seed}, {len(chosen)} targets" + (f", {share:.1f} s each" if share else ""), flush=True)
    num_findings = 0
    for report in engine.explore(chosen, seed=seed, seconds=share, processes=args.processes):
        num_findings += len(report.findings)
        if args.json:
            print(json.dumps(asdict(report)), flush=True)
        else:
            show(report, args.findings)
    return 1 if num_findings else 0


def show(report: engine.Report, folder: Path) -> None:
    print(
        f"{report.target:<24}{report.inputs:>9} inputs{report.answered:>9} refused"
        f" ({report.seeds_answered} of {report.seeds} seeds)"
        f"{report.cpu_s:>8.1f} s CPU{report.seconds:>8.1f} s",
        flush=True,
    )
    for finding in report.findings:
        print(f"  FOUND {finding.what}\n    {engine.command_for(finding.target, finding.save(folder))}", flush=True)
        if finding.detail:
            print("    " + finding.detail.replace("\n", "\n    "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
