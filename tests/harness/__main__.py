"""The program of a rank, ``python tests/harness DIRECTORY``: call the ordered function, write the verdict."""

import faulthandler
import importlib.util
import json
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

import pytest


def load(name: str, file: str) -> ModuleType:
    """Import the module that holds the test, under the name that pytest gave it."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(box: Path) -> None:
    """Carry out the order in ``box`` (see ``run_ranks``) as one rank."""
    order = json.loads((box / "order.json").read_text())
    deadline = time.monotonic() + order["timeout"]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path[:] = list(dict.fromkeys(order["path"] + sys.path[1:]))
    from blinkmpi.util.launcher import launched_rank
    from tests.harness import Verdict, abort

    rank = launched_rank(os.environ)
    label = "unknown" if rank is None else rank
    with (box / f"{label}.stacks").open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGTERM, stacks, all_threads=True, chain=True)
        faulthandler.dump_traceback_later(order["timeout"], exit=True, file=stacks)
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        try:
            function = getattr(load(order["module"], order["file"]), order["function"])
            args, kwargs = pickle.loads((box / "arguments").read_bytes())
            getattr(function, "body", function)(world.Dup(), *args, **kwargs)
            verdict = Verdict("passed")
        except pytest.skip.Exception as reason:
            verdict = Verdict("skipped", str(reason))
        except BaseException:
            verdict = Verdict("failed", traceback.format_exc())
        draft = box / f".{world.rank}"
        draft.write_text(json.dumps({"outcome": verdict.outcome, "detail": verdict.detail}))
        draft.rename(box / f"{world.rank}.json")
        if verdict.outcome == "failed":
            abort(world)
        # Leave under the watchdog too, but after the ranks that really hang have shown where.
        faulthandler.dump_traceback_later(max(0.0, deadline - time.monotonic()) + 1.5, exit=True, file=stacks)
        MPI.Finalize()
        faulthandler.disable()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGTERM)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
