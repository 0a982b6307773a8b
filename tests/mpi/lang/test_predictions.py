"""What is predicted of algorithms on CPU ranks: by the steps that ``tune`` times, and between nodes."""

import json
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from blinkmpi.lang import library
from blinkmpi.runtime.inspection import choice, predict
from tests.harness import mpi, run_command
from tests.mpi.test_nodes import split

PROGRAM = """
import blinkmpi
from mpi4py import MPI
from blinkmpi.lang import library

with blinkmpi.Communicator(MPI.COMM_WORLD, algorithms=[library.ring(2)]) as comm:
    if comm.rank == 0:
        print(comm.explain("allreduce", 2 << 20))
"""


@pytest.mark.mpi_skip  # starts an mpirun of its own
def test_tune_times_the_steps_of_an_algorithm_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path))
    file = tmp_path / "ring.json"
    library.ring(2).save(str(file))
    words = ["tune", "allreduce", "-b", "2M", "-e", "2M", "--algorithm", str(file)]
    tuned = run_command(2, [sys.executable, "-m", "blinkmpi", *words], timeout=60)
    assert tuned.rc == 0, tuned.output
    (kept,) = tmp_path.glob("steps-cpu-x2-*.json")
    costs = json.loads(kept.read_text())["costs"]
    kinds = [(cost["in_place"], cost["kind"]) for cost in costs]
    assert len(kinds) == len(set(kinds))
    assert (False, "sum of float32: own+slot > result+slot") in kinds, "the ring's"
    assert any("cma" in kind for _, kind in kinds), "and those of what a call takes by default"
    told = run_command(2, [sys.executable, "-c", PROGRAM], timeout=60)
    assert told.rc == 0, told.output
    _, _, after = told.output.partition("runs as     lang:ring")
    assert "the cores, by what steps of these kinds took here" in after.partition("not chosen")[0], told.output


@mpi(ranks=(4,), timeout=60)
def test_predictions_between_nodes(comm: MPI.Intracomm) -> None:
    """By the cost model; one shot, whose messages follow no links, has none."""
    ring = library.ring(4)
    with split(comm, "2+2") as ours, split(comm, "2+2", algorithms=[ring]) as by_ring:
        for one in (ours, by_ring):
            one.plan("allreduce")
        assert choice(ours.context, "allreduce", 64 << 10)["protocol"] == "one_shot"
        assert predict(ours.context, "allreduce", 64 << 10) == (None, None)
        seconds, bound = predict(ours.context, "allreduce", 16 << 20)
        assert seconds is not None
        assert bound is not None
        assert seconds >= bound > 0
        for nbytes in (64 << 10, 16 << 20):
            seconds, bound = predict(by_ring.context, "allreduce", nbytes)
            assert seconds is not None
            assert (seconds > 0, bound) == (True, None)
