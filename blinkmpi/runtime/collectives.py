"""The collectives that are ours, as mpi4py spells them."""

from __future__ import annotations

from mpi4py.MPI import Intracomm

from . import arguments
from .mpi_fallback import CollectiveMethod

BCAST = CollectiveMethod("broadcast", arguments.broadcast, Intracomm.Ibcast)
REDUCE = CollectiveMethod("reduce", arguments.reduce, Intracomm.Ireduce)
ALLREDUCE = CollectiveMethod("allreduce", arguments.allreduce, Intracomm.Iallreduce)
GATHER = CollectiveMethod("gather", arguments.gather, Intracomm.Igather)
SCATTER = CollectiveMethod("scatter", arguments.scatter, Intracomm.Iscatter)
ALLGATHER = CollectiveMethod("allgather", arguments.allgather, Intracomm.Iallgather)
REDUCE_SCATTER = CollectiveMethod("reduce_scatter", arguments.reduce_scatter, Intracomm.Ireduce_scatter, exchanges=True)
BLOCKS = CollectiveMethod("reduce_scatter", arguments.reduce_scatter_block, Intracomm.Ireduce_scatter_block)
BARRIER = CollectiveMethod("barrier", arguments.barrier, Intracomm.Ibarrier)
