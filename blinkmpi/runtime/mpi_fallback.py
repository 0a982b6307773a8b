"""A collective as the user called it, before its arguments are looked at."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from mpi4py import MPI

from ..errors import BufferTypeError
from ..program.call import Call
from .arguments import Prepared
from .buffers import hold, lies_on_device, mpi_op


class Job(NamedTuple):
    """A collective, and (see :meth:`of`) the arguments with which the user called it."""

    name: str
    prepare: Callable[..., Prepared]  # of rank, size and the arguments: checks them; may raise Foreign
    method: Callable[..., MPI.Request]  # of a communicator and the arguments: MPI's own, non-blocking
    args: tuple[Any, ...] = ()

    def of(self, *args: Any) -> Job:
        """The call with these arguments."""
        return Job(self.name, self.prepare, self.method, args)

    def held(self) -> tuple[Job, list[MPI.Datatype]]:
        """The call with arguments for later, when MPI reads them in another thread, and datatypes to free then."""
        held = [hold(arg) for arg in self.args]
        return self.of(*(arg for arg, _ in held)), [datatype for _, own in held for datatype in own]

    def mpi(self, comm: MPI.Intracomm) -> MPI.Request:
        """Begin MPI's own collective on ``comm``."""
        for arg in self.args:
            if lies_on_device(arg):
                raise BufferTypeError(
                    f"{self.name} with these arguments is MPI's alone, and this MPI would crash on GPU memory; "
                    "pass NumPy copies, or an operation and types that blinkmpi has"
                )
        return self.method(comm, *(mpi_op(a) if isinstance(a, str) else a for a in self.args))


@lru_cache(maxsize=256)
def describe(call: Call) -> str:
    """A call as people read it, and as ranks compare it."""
    count = call.counts[0] if len(set(call.counts)) == 1 else list(call.counts)
    parts = [f"{count} x {call.dtype}" if call.dtype else "", f"op {call.op}" if call.op else ""]
    parts.append(f"root {call.root}" if call.root >= 0 else "")
    return f"{call.collective}({', '.join(p for p in parts if p)})"
