"""Squares by mpi4py.futures, whose workers are the other ranks: what make clients runs."""

from mpi4py import MPI
from mpi4py.futures import MPICommExecutor

NUMBERS = 500


def square(x: int) -> int:
    """Of a number."""
    return x * x


with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
    if executor is not None:
        RESULT = {"sum": float(sum(executor.map(square, range(NUMBERS), chunksize=10)))}
