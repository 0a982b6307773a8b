"""The program of a rank, ``python tests/harness SOCKET``: carry out one order after another (see ``ranks.py``)."""

import faulthandler
import gc
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO
from unittest import mock

import pytest


def load(name: str, file: str) -> ModuleType:
    """Import the module that holds the test, under the name that pytest gave it."""
    known = sys.modules.get(name)
    if known is not None and known.__file__ == file:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def carry_out(order: dict[str, Any], world: Any, stacks: TextIO) -> tuple[str, str]:
    """Call the ordered function; its outcome and the reason or the traceback, as in ``Verdict``."""
    sys.path[:] = list(dict.fromkeys(order["path"] + sys.path[1:]))
    variables = {k: v for k, v in {**os.environ, **order["env"]}.items() if v is not None}
    stacks.seek(0)
    stacks.truncate()
    faulthandler.dump_traceback_later(order["timeout"], exit=True, file=stacks)
    try:
        with mock.patch.dict(os.environ, variables, clear=True):
            function = getattr(load(order["module"], order["file"]), order["function"])
            args, kwargs = pickle.loads(order["arguments"])
            comm = world.Dup()
            getattr(function, "body", function)(comm, *args, **kwargs)
        gc.collect()  # communicators that nobody has freed go now, not within another test
        if comm:  # not freed by the function
            comm.Free()
        return "passed", ""
    except pytest.skip.Exception as reason:
        return "skipped", str(reason)
    except BaseException:
        return "failed", traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()


def main(address: str) -> None:
    """Be a rank until there are no more orders."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
    from blinkmpi.util.launcher import launched_rank
    from tests.harness.jobs import GRACE_S

    with Path(address).with_name(f"{launched_rank(os.environ)}.stacks").open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGTERM, stacks, all_threads=True, chain=True)
        from mpi4py import MPI

        with Client(address, family="AF_UNIX") as orders:
            orders.send(MPI.COMM_WORLD.rank)
            while (order := orders.recv()) is not None:
                orders.send(carry_out(order, MPI.COMM_WORLD, stacks))
        faulthandler.dump_traceback_later(GRACE_S, exit=True, file=stacks)
        MPI.Finalize()
        faulthandler.disable()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1])
