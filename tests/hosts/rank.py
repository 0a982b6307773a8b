"""The program of a rank on several hosts: check that it runs on the wanted host, then call a function of the tests.

``python -m tests.hosts.rank 2,1 60 tests.hosts.test_across conformance broadcast``: two ranks on host0, one on host1,
60 s until the rank prints its stacks and exits, and what to call.
"""

import faulthandler
import importlib
import socket
import sys

from mpi4py import MPI

from tests.hosts.world import HostsError


def check_layout(comm: MPI.Intracomm, layout: tuple[int, ...]) -> None:
    """Raise, on all ranks, unless host i has ``layout[i]`` ranks and MPI takes them for one node."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    found = comm.allgather((socket.gethostname(), node.size))
    node.Free()
    wanted = [(f"host{i}", ranks) for i, ranks in enumerate(layout) for _ in range(ranks)]
    if found != wanted:
        raise HostsError(f"each rank's host and the ranks of its node are {found}, not {wanted}")


def main(layout: str, timeout: str, module: str, function: str, *args: str) -> None:
    faulthandler.dump_traceback_later(float(timeout), exit=True)
    check_layout(MPI.COMM_WORLD, tuple(map(int, layout.split(","))))
    getattr(importlib.import_module(module), function)(*args)


if __name__ == "__main__":
    main(*sys.argv[1:])
