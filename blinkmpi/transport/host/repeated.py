"""``RepeatedCalls``: the number of a communicator's last call, and the calls that C finds and makes again by itself.

Where the library was compiled without Python's headers there is the number alone; calls are looked up in Python.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from ..interface import Resumable
from .native import Native

if TYPE_CHECKING:
    from .block_call import BlockKind
    from .count_kind import CountKind
    from .host_call import HostCall
    from .pending_calls import Finish, PendingCalls


Found = bool | tuple[Resumable, int, int]  # made; not known; or begun: the call, its number and the C status


OPEN, INSIDE = 1, 2  # as in repeated_calls.h


class _Shared(ctypes.Structure):
    """The first fields of ``repeated_t`` in repeated_calls.h."""

    _fields_ = (
        ("seq", ctypes.c_uint64), ("open", ctypes.c_int64), ("open_gpu", ctypes.c_int64), ("pending", ctypes.c_int64),
    )  # fmt: skip


class RepeatedCalls:
    """Calls to be made again, by their method, arguments and stream, wherever the buffers of these lie.

    ``again(method, arguments, stream)`` returns True if C has made the call; False if C does not know it, or must not
    make calls (:meth:`shut`); a tuple if C has begun it and the caller must finish it. With a fourth argument, True,
    the caller itself keeps operands on a GPU until the work on them is through; a fifth is the call's own timeout in
    seconds, or None.

    Args:
        most: so many calls are kept at most; what was used least recently goes.
    """

    def __init__(self, native: Native | None, most: int) -> None:
        self.again: Callable[..., Found] = _unknown
        self._known: Callable[..., Found] = _unknown
        self._find: Callable[..., HostCall | None] = _none
        self._keep: Callable[..., bool] | None = None
        self._keep_kind: Callable[..., bool] | None = None
        self._keep_counts: Callable[..., bool] | None = None
        self._keep_group: Callable[..., None] | None = None
        self._forget: Callable[[], None] | None = None
        self._keep_launch: Callable[..., bool] | None = None
        self._aim: Callable[..., bool] | None = None
        self._read_tensors: Callable[..., None] | None = None
        self._last: Callable[[], tuple[Any, int] | None] = _none
        self._kept: Callable[[], int] = int
        self._serve: Callable[..., tuple[Any, ...]] | None = None
        self.begin: Callable[..., Any] = _none  # (method, arguments, timeout): the request of a known call, begun in C
        self.calls: PendingCalls | None = None  # the non-blocking ones, if C makes them
        self._aimed: tuple[object, ...] = ()
        self._tensors: tuple[Any, ...] = ()
        if native is None or native.repeated is None:
            self._shared = _Shared()
        else:
            told_by = np.ndarray, np.integer, MPI.Datatype, MPI.Op, MPI.IN_PLACE
            at, *functions = native.repeated((*told_by, MPI._sizeof(MPI.Datatype), most))
            (
                self.again, self._find, self._keep, self._keep_kind, self._keep_counts, self._keep_group,
                self._keep_launch, self._aim, self._read_tensors, self._last, self._forget, self._kept, self._serve,
            ) = functions  # fmt: skip
            self._shared = _Shared.from_address(at)  # memory that lives as long as the functions
            self._known = self.again

    def __len__(self) -> int:
        """How many calls are kept."""
        return self._kept()

    @property
    def seq(self) -> int:
        """The number of the last call."""
        return int(self._shared.seq)

    @seq.setter
    def seq(self, number: int) -> None:
        self._shared.seq = number

    @property
    def inside(self) -> bool:
        """Whether a thread makes a call in C."""
        return bool(self._shared.open == INSIDE)

    @property
    def pending(self) -> int:
        """How many non-blocking calls have not ended, of those that C makes."""
        return int(self._shared.pending)

    def serve(self, request: type[MPI.Request], finish: Callable[[], Finish | None]) -> bool:
        """Have non-blocking calls made by C, if they can be; whether they are. See :class:`.PendingCalls`."""
        from .pending_calls import PendingCalls, why_not

        if self.calls is None and self._serve is not None and not why_not():
            self.calls = PendingCalls(self._serve, request, finish)
            self.begin = self.calls.begin
        return self.calls is not None

    def give_up(self, error: BaseException) -> None:
        """Let non-blocking calls fail that C has not begun."""
        if self.calls is not None:
            self.calls.give_up(error)

    def close(self) -> None:
        """End the thread that looks after non-blocking calls. Safe to call twice."""
        if self.calls is not None:
            self.calls.stop()

    def open(self) -> None:
        """Calls may be made in C."""
        self._shared.open = OPEN

    def shut(self) -> None:
        """Every call must come through Python: another one is under way, or nothing may be called any more."""
        self._shared.open = self._shared.open_gpu = 0

    @property
    def launches(self) -> bool:
        """Whether C can launch kernels."""
        return self._keep_launch is not None

    def keep_launch(
        self,
        bound: Resumable,
        launch: int,
        method: object,
        arguments: tuple[Any, ...],
        stream: Any,
        aim: tuple[Any, ...],
        *,
        counts: bool = False,
    ) -> bool:
        """Let C repeat a call on a stream, wherever its arrays lie. Returns whether C will.

        Args:
            launch: the address of its LaunchStruct, which lives as long as ``bound`` does.
            aim: what all such calls need, and C is given once; see ``set_launches`` in launches.h.
            counts: whether calls of other counts are this one, to which ``bound.fit(count)`` then fits it.
        """
        if self._keep_launch is None:
            return False
        self._aim_at(aim)
        known = self._keep_launch(bound, launch, method, arguments, stream, counts)
        self._shared.open_gpu = 1
        return known

    def _aim_at(self, aim: tuple[Any, ...]) -> None:
        if self._aim is not None and aim != self._aimed:
            self._aim(*aim)
            self._aimed = aim

    @property
    def last_launch(self) -> tuple[Any, int] | None:
        """The last call that C has put on a stream, and its number; None if there is none."""
        return self._last()

    def hide(self) -> None:
        """Know no call until :meth:`show`: in some thread, calls are noted to be made later."""
        self.again, self.begin = _unknown, _none

    def show(self) -> None:
        """Undo :meth:`hide`."""
        self.again = self._known
        if self.calls is not None:
            self.begin = self.calls.begin

    def find(self, method: object, arguments: tuple[Any, ...]) -> HostCall | None:
        """The call on host memory that was kept of such arguments, aimed at the buffers among these."""
        return self._find(method, arguments)

    def keep(self, call: HostCall, method: object, arguments: tuple[Any, ...], *, pending: bool = False) -> bool:
        """Let C repeat a call on host memory, which C executes, or a non-blocking one. Returns whether C will."""
        if self._keep is None or not (call.alone if pending else call.aimable):
            return False
        at, rows = call.addresses
        return self._keep(call, at, rows if call.alone else 0, method, arguments, pending)

    def keep_kind(self, call: BlockKind, method: object, arguments: tuple[Any, ...], *, pending: bool = False) -> bool:
        """Let C make calls of blocks that differ from one in lengths and places alone. Returns whether C will."""
        if self._keep_kind is None or not call.alone:
            return False
        return self._keep_kind(call, *call.addresses, method, arguments, call.address, pending)

    def keep_counts(
        self, call: CountKind, method: object, arguments: tuple[Any, ...], *, pending: bool = False
    ) -> bool:
        """Let C make calls that differ from one in their counts alone. Returns whether C will."""
        if self._keep_counts is None or not call.alone:
            return False
        return self._keep_counts(call, *call.addresses, method, arguments, call.address, pending)

    def read_tensors(self, types: tuple[Any, ...], exchange: Any) -> None:
        """Let C read torch's tensors in host memory through torch's table of DLPack functions; None: it has none.

        It is not needed where launches were set up (``aim``), which has the same table.
        """
        if self._read_tensors is not None and exchange is not None and not self._aimed and types != self._tensors:
            self._read_tensors(types, exchange)
            self._tensors = types

    def keep_group(
        self, bound: Resumable, calls: Sequence[HostCall], method: object, arguments: tuple[Any, ...]
    ) -> None:
        """Let C repeat a group, if it can repeat all of its calls.

        Args:
            bound: finishes the group. The status that it gets has C's code in its lower 8 bits, above them how many
                calls were made.
            arguments: with lists or tuples among them.
        """
        if self._keep_group is not None and all(call.alone for call in calls):
            addresses = struct.pack(f"{2 * len(calls)}Q", *(at for call in calls for at in call.addresses))
            self._keep_group(bound, addresses, 0, method, arguments, None)

    def keep_launched_group(
        self, bound: Resumable, launch: int, method: object, arguments: tuple[Any, ...], stream: Any,
        aim: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Make a group known that is one launch on a stream, as :meth:`keep_launch` does; of arrays where they are."""
        if self._keep_group is not None:
            self._aim_at(aim)
            self._keep_group(bound, b"", launch, method, arguments, stream)
            self._shared.open_gpu = 1

    def forget(self) -> None:
        """Know no call."""
        if self._forget is not None:
            self._forget()
            self._aimed = ()


def _unknown(*_: Any) -> bool:
    return False


def _none(*_: Any) -> None:
    return None
