"""``wire="operand"`` on ranks: the bits that its program means, by every executor, on one node and on several."""

import os
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError, MismatchError
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.program.call import Call
from blinkmpi.program.interpreter import run
from blinkmpi.program.reduction import dtype_of
from tests.harness import mpi

COUNT = 70_001
TYPES = ("float16", "bfloat16", "float8_e5m2", "float32")


def inputs(dtype: str, n: int) -> list[np.ndarray]:
    return [np.random.default_rng(r).uniform(-1, 1, COUNT).astype(dtype_of(dtype)) for r in range(n)]


@pytest.mark.parametrize("executor", ["c", "numpy"])
@pytest.mark.parametrize("nodes", ["", "2+2"])
@mpi(ranks=(4,), timeout=60)
def test_the_bits_are_those_of_the_program(comm: MPI.Intracomm, executor: str, nodes: str) -> None:
    algo = "" if nodes else "allreduce:chain"
    with (
        mock.patch.dict(os.environ, {"BLINKMPI_NODES": nodes} if nodes else {}),
        blinkmpi.Communicator(comm, wire="operand", executor=executor, algo=algo) as ours,
    ):
        assert "rounded" in ours.explain("allreduce", 1 << 20, dtype="bfloat16")
        for dtype in TYPES:
            sends, got = inputs(dtype, comm.size), np.zeros(COUNT, dtype_of(dtype))
            ours.Allreduce(sends[comm.rank], got)
            if not nodes:
                call = Call("allreduce", comm.size, (COUNT,), dtype, "sum")
                program = program_for(ours.plans, call, choose(ours.plans, call))
                assert not any(channel.wide for channel in program.channels)
                want = run(program, sends)[comm.rank]
                assert want is not None
                assert got.tobytes() == want.tobytes(), dtype
            exact = np.sum([s.astype(np.float64) for s in sends], axis=0)
            size = np.sum([np.abs(s.astype(np.float64)) for s in sends], axis=0)
            unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e5m2": 2.0**-3, "float32": 2.0**-24}[dtype]
            assert (np.abs(got.astype(np.float64) - exact) <= comm.size * unit * 1.01 * size).all(), dtype
            assert len(set(comm.allgather(got.tobytes()))) == 1, dtype


@mpi(ranks=(3,), timeout=60)
def test_scans_and_children(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm, wire="operand") as ours:
        x, y = np.full(COUNT, 1 + comm.rank, "float16"), np.zeros(COUNT, "float16")
        ours.Scan(x, y)
        assert (y == (comm.rank + 1) * (comm.rank + 2) / 2).all()
        with ours.Split(0) as child:
            assert "rounded" in child.explain("allreduce", 1 << 20, dtype="float16")


@mpi(ranks=(2,), timeout=60)
def test_ranks_that_disagree(comm: MPI.Intracomm) -> None:
    with pytest.raises(ArgumentError, match="expected one of accumulator, operand"):
        blinkmpi.Communicator(comm, wire="half")
    with pytest.raises(MismatchError, match="wire=operand"):
        blinkmpi.Communicator(comm, wire="operand" if comm.rank else None)
