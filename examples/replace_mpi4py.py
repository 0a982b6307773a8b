"""The smallest program: one line differs from mpi4py's. ``mpirun -np 4 python examples/replace_mpi4py.py``."""

import numpy as np
from mpi4py import MPI

import blinkmpi

comm = blinkmpi.Communicator(MPI.COMM_WORLD)  # with mpi4py alone: comm = MPI.COMM_WORLD

gradient = np.full(1 << 20, comm.rank, dtype=np.float32)
comm.Allreduce(MPI.IN_PLACE, gradient)
assert (gradient == sum(range(comm.size))).all()

if comm.rank == 0:
    print(comm.explain("allreduce", nbytes=gradient.nbytes))
comm.Free()
