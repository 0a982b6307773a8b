"""The addresses of MPI's functions, for C, which needs no header of any MPI."""

import ctypes
from functools import cache

from mpi4py import MPI

SHOTS = ("MPI_Start", "MPI_Test", "MPI_Isend", "MPI_Irecv")
REQUESTS = (
    "MPI_Grequest_start", "MPI_Grequest_complete", "MPI_Wait", "MPI_Request_free", "MPI_Finalized",
    "MPI_Status_set_elements", "MPI_Status_set_cancelled",
)  # fmt: skip
# MPICH's like MPI_Grequest_start, with a function that MPI calls while it waits for the request; and Open MPI's, by
# which one is called while it waits for anything.
POLLED, HOOK = "MPIX_Grequest_start", "opal_progress_register"


@cache
def addresses(*names: str) -> tuple[int, ...] | str:
    """Where functions of MPI's lie, or why they are not found."""
    try:
        library = ctypes.CDLL(MPI.__file__)  # its symbols include those of the MPI that it is linked to
        return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)
    except (OSError, AttributeError) as error:
        return f"MPI's functions are not found: {error}"


def address_if_any(name: str) -> int:
    """Where a function lies that some MPIs have; 0 if this one has it not."""
    found = addresses(name)
    return 0 if isinstance(found, str) else found[0]


def handles_are_pointers() -> bool:
    """Whether MPI's handles are pointers, and not numbers."""
    return MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_void_p)


def handle(of: MPI.Comm | MPI.Datatype) -> int:
    """MPI's handle as C's int64_t has it: that of MPICH and Intel MPI is an int, which mpi4py gives without a sign."""
    return ctypes.c_int64(MPI._handleof(of)).value
