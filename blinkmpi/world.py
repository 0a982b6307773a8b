"""``World``: a Communicator in the place of ``MPI.COMM_WORLD``, for programs that do not change (``blinkmpi run``)."""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from mpi4py import MPI

from .communicator import Communicator
from .errors import CannotGrow
from .runtime.process_exit import UNCAUGHT, in_child

REAL = MPI.COMM_WORLD  # MPI's own
END_POLL_S = 1e-3  # between looks whether all ranks have come to their end


class World(Communicator):
    """What a program finds as ``MPI.COMM_WORLD``; the arguments are a Communicator's.

    It does what MPI's own does besides calls: it has MPI's name and attributes, cannot be freed, and is pickled and
    copied by name.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(REAL, **options)
        self.__module__ = "mpi4py.MPI"  # where pickle looks for its name
        self.Set_name(REAL.Get_name())

    def __new__(cls, **options: Any) -> World:
        """As a Communicator of MPI's own."""
        return super().__new__(cls, REAL, **options)  # type: ignore[return-value]

    def Get_attr(self, keyval: int) -> Any:
        """MPI's predefined attributes belong to its own communicator alone."""
        found = super().Get_attr(keyval)
        return REAL.Get_attr(keyval) if found is None else found

    def Free(self) -> None:
        """Raise what MPI raises, while it is ``MPI.COMM_WORLD``."""
        if MPI.COMM_WORLD is self:
            raise MPI.Exception(MPI.ERR_COMM)
        super().Free()

    Disconnect = Free

    def Get_info(self) -> MPI.Info:
        """What MPI says of itself, as which memory it takes, it says of its own communicator alone."""
        return REAL.Get_info()

    def grow(self, n: int, command: Sequence[str] | None = None, *, timeout: float | None = None) -> NoReturn:
        """Raise CannotGrow: MPI's world keeps its size."""
        raise CannotGrow(
            f"grow({n}): MPI.COMM_WORLD keeps its size under blinkmpi run; grow a communicator of your own, such as "
            "MPI.COMM_WORLD.Dup()"
        )

    def __reduce__(self) -> str:  # type: ignore[override]
        return "COMM_WORLD"

    def put(self) -> None:
        """Be ``MPI.COMM_WORLD`` from now on, until the process ends."""
        MPI.COMM_WORLD = self  # type: ignore[misc]
        atexit.register(self.leave)

    def leave(self) -> None:
        """Give ``MPI.COMM_WORLD`` back, and free this one when all ranks have come to their end, however late.

        A rank that ends by an error does not come: it ends the job.
        """
        MPI.COMM_WORLD = REAL  # type: ignore[misc]
        if MPI.Is_finalized() or in_child() or UNCAUGHT.is_set() or self._is_dead:
            return
        request = REAL.Ibarrier()  # MPI_Finalize waits as long
        while not request.Test():
            time.sleep(END_POLL_S)
        self.Free()

    @property
    def _is_dead(self) -> bool:
        return self._blink is None or self._blink.sequence.dead is not None
