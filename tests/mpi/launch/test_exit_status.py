"""A kernel that gives up where nobody waits for it: how the program hears of it, and how its job ends."""

import sys

import pytest

from tests.harness import run_command

PROGRAM = """
import sys
import torch
from mpi4py import MPI

import blinkmpi
from benchmarks.fake.gpu import fake_gpus
from blinkmpi.errors import BlinkError

way = sys.argv[1]
with fake_gpus():
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=20)
    x = torch.ones(1000)
    for _ in range(3):
        comm.Allreduce(MPI.IN_PLACE, x, stream=5)
    MPI.COMM_WORLD.Barrier()
    if comm.rank == 1 and way != "well":
        comm.context.gpus.transport.report[1] = 2  # as the kernel of a replayed graph leaves it
    try:
        if way == "check" and comm.rank == 1:
            comm.check()
        elif way in ("free", "well"):
            comm.Free()
    except BlinkError as error:
        print("heard", comm.rank, type(error).__name__, flush=True)
    MPI.COMM_WORLD.Barrier()
    print("done", MPI.COMM_WORLD.rank, flush=True)
"""
WAYS = {
    "well": (0, 0, ""),
    "nothing": (1, 0, "rank 1: CollectiveTimeout"),  # it ends with the program, before anybody has looked
    "check": (0, 1, ""),
    "free": (1, 1, ""),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_has_not_heard_of_an_error_ends_with_status_1(way: str) -> None:
    status, heard, said = WAYS[way]
    outcome = run_command(2, [sys.executable, "-c", PROGRAM, way], timeout=60)
    assert outcome.output.count("done") == 2, outcome.output
    assert outcome.output.count("heard 1 CollectiveTimeout") == heard, outcome.output
    assert said in outcome.output
    assert ("ends with status 1" in outcome.output) == bool(status), outcome.output
    assert (outcome.rc != 0) == bool(status), outcome.output
