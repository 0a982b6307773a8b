"""Where the buffers of a measured call lie: MPI's or NCCL's layout, in place or not, on the host or on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..program.call import Call
from ..program.reduction import dtype_of
from .verification import Wrong, fill, find_wrong, poison


class Buffers:
    """The send and the receive buffer of this rank, used by every row and every library.

    Args:
        allocate: gives so many bytes, as an array of ``uint8`` of module ``xp``; called twice.
    """

    def __init__(
        self, calls: Sequence[Call], *, unalign: int = 0, xp: Any = np,
        allocate: Callable[[int], Any] = lambda nbytes: np.empty(nbytes, np.uint8),
    ) -> None:  # fmt: skip
        self._send, self._recv = (allocate(max(1, size + unalign * 16)) for size in self.needs(calls))
        self._unalign = unalign
        self.xp = xp

    @property
    def whole(self) -> tuple[Any, Any]:
        """All bytes of both, for calls without an offset."""
        return self._send, self._recv

    @staticmethod
    def needs(calls: Sequence[Call]) -> tuple[int, int]:
        """Bytes of the two buffers that ``calls`` need: in place, the receive buffer holds the larger vector."""
        return max(c.send_count * c.itemsize for c in calls), max(c.nbytes for c in calls)

    def views(self, call: Call) -> tuple[Any, Any]:
        """Send and receive buffer of ``call``, ``unalign`` elements into the memory."""
        first = self._unalign * call.itemsize
        send = self._send[first : first + call.send_count * call.itemsize]
        recv = self._recv[first : first + call.nbytes]
        return send.view(dtype_of(call.dtype)), recv.view(dtype_of(call.dtype))


class Layout:
    """Where a row's input lies, what is passed to the library, and where the result will be.

    In place is MPI's in place, with ``marker`` for the other buffer; without a marker it is NCCL's: both buffers are
    passed, and a rank's part of a reduce-scatter stays where it lay; so it does with ``own_block``, which ours takes on
    GPUs. A broadcast has one buffer: out of place the root uses its send buffer.

    ``source`` and ``target`` are the buffers themselves, None where this rank has none. ``narrow``: whether the
    library's partial sums of 16-bit elements are of 16 bits.
    """

    def __init__(
        self, call: Call, rank: int, buffers: Buffers, *, in_place: bool, marker: Any = None, narrow: bool = False,
        own_block: bool = False,
    ) -> None:  # fmt: skip
        send, recv = buffers.views(call)
        kind, count = call.collective, call.counts[0]
        root = rank == call.root
        own = slice(rank * count, (rank + 1) * count)
        self.call, self.rank, self.xp = call, rank, buffers.xp
        self.in_place, self.narrow = in_place, narrow
        self.source: Any = send
        self.target: Any = recv[: call.recv_count(rank)]
        hidden = ""  # the argument that the marker replaces
        if kind == "broadcast":
            self.source = self.target = send if root and not in_place else recv
        elif kind in ("reduce", "gather") and not root:
            self.target = None
        elif kind == "scatter":
            if not root:
                self.source = None
            elif in_place:
                self.target, hidden = send[own], "target"
        elif in_place:
            self.source, hidden = (recv[own] if kind in ("allgather", "gather") else recv), "source"
            if kind == "reduce_scatter" and (marker is None or own_block):
                self.target, hidden = recv[own], ""
        self.result = self.target
        self.inputs = [self.source] if self.source is not None and (kind != "broadcast" or root) else []
        whole = recv if in_place and hidden == "source" else self.target
        self.touched = list({id(b): b for b in (self.source, whole) if b is not None}.values())
        source, target = self.source, whole if marker is not None else self.target
        if marker is not None and hidden:
            source, target = (marker, target) if hidden == "source" else (source, marker)
        self.arguments: tuple[Any, ...] = (source,) if kind == "broadcast" else (source, target)

    def prepare(self) -> None:
        """Poison the buffers, then write this rank's input."""
        for buffer in self.touched:
            poison(buffer)
        for buffer in self.inputs:
            fill(buffer, self.rank, self.call.dtype, xp=self.xp)

    def calm(self) -> None:
        """Fill the buffers with zeros, which repeated reductions in place leave as they are."""
        for buffer in self.touched:
            buffer.view("u1")[:] = 0

    def wrong(self) -> Wrong:
        """What is wrong in this rank's result."""
        if self.result is None:
            return Wrong(0, ())
        return find_wrong(self.call, self.rank, self.result, xp=self.xp, narrow=self.narrow)
