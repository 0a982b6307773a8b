"""A process with Python whose program is one of nccl-tests: ``python rank.py all_reduce_perf.so -b 8 -e 1M``.

``build.py`` has made a shared library of the program, with its ``main`` as it is. The door before NCCL finds Python in
the process and asks it for what makes calls, as in a program of torch's; in the executable it would find none.
"""

import ctypes
import sys
from collections.abc import Sequence

import mpi4py

from blinkmpi.nccl.library import find_nccl

mpi4py.rc.initialize = mpi4py.rc.finalize = False  # the program does


def run(program: str, words: Sequence[str]) -> int:
    """Call the program's ``main`` with an argument list; its result."""
    nccl = find_nccl()
    if nccl is None:
        raise SystemExit("no libnccl.so.2 was found; set BLINKMPI_NCCL_LIBRARY to its path")
    from mpi4py import MPI  # noqa: F401  loads the MPI library, which the program names only

    ctypes.CDLL(str(nccl))
    argv = [program, *words]
    arguments = (ctypes.c_char_p * (len(argv) + 1))(*(word.encode() for word in argv), None)
    environ = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ")
    result: int = ctypes.CDLL(program).main(len(argv), arguments, environ)
    return result


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
