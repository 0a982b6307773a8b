"""Arrays out of band by mpi4py.util.pkl5, and sums of buffers on its communicator: what make clients runs."""

import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5

COUNT = 100_000

comm = pkl5.Intracomm(MPI.COMM_WORLD)
rank, size = comm.Get_rank(), comm.Get_size()
mine = {"rank": rank, "data": np.full(COUNT, rank + 1.0)}
parts = comm.allgather(mine)
told = comm.bcast(mine, root=size - 1)
request = comm.isend(mine, (rank + 1) % size)
came = comm.recv(source=(rank - 1) % size)
request.wait()
total = np.empty(COUNT)
comm.Allreduce(told["data"] + came["data"], total)
RESULT = {"gathered": float(sum(part["data"].sum() for part in parts)), "summed": float(total.sum())}
