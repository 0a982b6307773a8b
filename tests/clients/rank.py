"""A rank of somebody else's program, which is not changed: ``python tests/clients/rank.py --by blink ...``.

``--by blink`` puts a Communicator where the program finds ``MPI.COMM_WORLD``, as ``blinkmpi run`` does, or, where
torchrun has started it, backend blink where it asks ``torch.distributed`` for gloo, as ``--backend-for`` does there;
``--by plain`` changes nothing.
``--tests`` runs files of tests by pytest, ``--program`` a file and ``--module`` a module as its ``__main__``; a program
is one test, and what it leaves in ``RESULT`` is kept. A line of ``RANK.jsonl`` says when a test begins, another how it
ended.
"""

import argparse
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

BLINK, PLAIN = "blink", "plain"


class Record:
    """The file that a rank writes."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.file = (folder / f"{rank}.jsonl").open("w", encoding="utf-8", buffering=1)

    def begins(self, test: str) -> None:
        """Say so, for one that hangs."""
        self._line(test=test, outcome="began")

    def ended(self, test: str, outcome: str, seconds: float, **more: Any) -> None:
        """How a test ended."""
        self._line(test=test, outcome=outcome, seconds=round(seconds, 4), **more)

    def _line(self, **line: Any) -> None:
        self.file.write(json.dumps(line) + "\n")


class Plugin:
    """Records pytest's tests."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.outcome, self.seconds, self.error = "passed", 0.0, ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome, self.seconds, self.error = "passed", 0.0, ""
        self.record.begins(named(nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds += report.duration
        if report.failed:
            self.outcome, self.error = "failed", str(report.longrepr)[-1500:]
        elif report.skipped and self.outcome == "passed":
            self.outcome = "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        more = {"error": self.error} if self.error else {}
        self.record.ended(named(nodeid), self.outcome, self.seconds, **more)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.record.ended(named(report.nodeid), "failed", 0.0, error=str(report.longrepr)[-1500:])


def named(nodeid: str) -> str:
    """A test's name without its folder."""
    path, colons, name = nodeid.partition("::")
    return Path(path).name + colons + name


def run(asked: argparse.Namespace, record: Record) -> int:
    """Run the tests or the program; 1 if something failed."""
    if asked.tests:
        import pytest

        sys.path.insert(0, str(Path(asked.tests[0]).parent))  # tests import what lies beside them
        options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--noconftest", "-c", os.devnull]
        return int(pytest.main([*options, *asked.options, *asked.tests], plugins=[Plugin(record)]))
    name = asked.module or Path(asked.program).name
    path = asked.program and str(Path(asked.program).resolve())
    sys.argv = [name, *asked.options]
    if path:
        sys.path.insert(0, str(Path(path).parent))
        os.chdir(sys.path[0])  # where it reads what lies beside it
    record.begins(name)
    began, found, error = time.monotonic(), {}, ""
    try:
        if asked.module:
            found = runpy.run_module(asked.module, run_name="__main__", alter_sys=True)
        else:
            found = runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        error = f"SystemExit: {end.code}" if end.code else ""
    except Exception:
        error = traceback.format_exc()
        print(error, file=sys.stderr, flush=True)
    more = {"error": error[-1500:]} if error else {"result": found["RESULT"]} if "RESULT" in found else {}
    record.ended(name, "failed" if error else "passed", time.monotonic() - began, **more)
    return int(bool(error))


def main() -> int:
    """Run what is asked for on this rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--by", choices=(BLINK, PLAIN), required=True)
    parser.add_argument("--into", type=Path, required=True, help="the folder of the records")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tests", nargs="+")
    what.add_argument("--program")
    what.add_argument("--module")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of pytest, or of the program")
    asked = parser.parse_args()
    sys.path.remove(str(Path(__file__).parent))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        record = Record(asked.into, int(os.environ["RANK"]))
        if asked.by == BLINK:
            from blinkmpi.torch.names import serve

            serve(["gloo"])
        return run(asked, record)
    from mpi4py import MPI

    record = Record(asked.into, MPI.COMM_WORLD.rank)
    world = MPI.COMM_WORLD
    if asked.by == BLINK:
        from blinkmpi.world import World

        World().put()
    world.Barrier()  # no rank's times hold the start of another
    failed = run(asked, record)
    if failed and not asked.tests:  # the others may be in a call
        MPI.COMM_WORLD.Abort(1)
    return failed


if __name__ == "__main__":
    sys.exit(main())
