"""``comm.grouped()``, and calls of lists of buffers: calls are recorded, and made together at the end.

A group belongs to a communicator and to the thread that has opened it. What other threads call, and what is no
collective of ours, is not part of it.
"""

from __future__ import annotations

import array
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from ...errors import ArgumentError
from ...transport.host.host_call import HostCall
from ...transport.host.repeated import RepeatedCalls
from ...transport.interface import BoundCall, PeerDelegates
from ...util.lru import LRU
from ..call_keys import key_of
from ..collectives import CollectiveMethod, Invocation
from ..delegation import delegated_in_group
from ..making import CallMaker
from .launches import PACKED, GroupLaunch, NotedCall, launches, refused

KEPT = 256  # groups that are kept to be made again
Args = tuple[Any, ...]


class HasGroups(Protocol):
    """What makes the calls of a communicator."""

    groups: Groups


class Group:
    """What ``comm.grouped()`` gives: calls within its ``with`` are made together when that ends.

    Args:
        dispatcher: gives that of the communicator; ArgumentError if it is freed.

    Attributes:
        begins: whether they are only begun there, which is for host memory; ``request`` is then what to wait for.
    """

    def __init__(self, dispatcher: Callable[[], HasGroups], stream: Any, timeout: float | None) -> None:
        self._open, self._groups = dispatcher, dispatcher().groups
        self.stream, self.timeout = stream, timeout
        self.begins = False
        self.request: MPI.Request | None = None

    def __enter__(self) -> None:
        """Begin to note this thread's calls."""
        self._open()
        self._groups.enter(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Make them; after an error forget them, and make none."""
        calls = self._groups.leave(self, forget=kind is not None)
        if self.begins and kind is None:
            self.request = self._open().groups.begin(calls)
        elif calls:
            self._open().groups.end(calls)


class OpenGroup:
    """The calls that a thread has made since it opened a group, and how many there were when it opened each."""

    def __init__(self) -> None:
        self.calls: list[NotedCall] = []
        self.entered: list[tuple[Group, int]] = []


class Groups:
    """The groups of a communicator's threads."""

    def __init__(self, maker: CallMaker) -> None:
        self._maker, self._sequence, self._cuda = maker, maker.sequence, maker.cuda
        self.open: dict[int, OpenGroup] = {}  # by thread
        self._lock = threading.Lock()
        self._kept: LRU[tuple[Any, ...], tuple[GroupLaunch, ...]] = LRU(KEPT)

    # ---- noting calls

    def enter(self, group: Group) -> None:
        """Open a group in this thread, or one more within it."""
        with self._lock:
            if any(group is other for held in self.open.values() for other, _ in held.entered):
                raise ArgumentError("this group is open; call comm.grouped() for one more")
            held = self.open.setdefault(threading.get_ident(), OpenGroup())
            held.entered.append((group, len(held.calls)))
            self._sequence.repeated.hide()

    def leave(self, group: Group, *, forget: bool) -> list[NotedCall]:
        """End a group.

        Args:
            forget: what it has noted.

        Returns:
            What is to be made now: nothing within another group.
        """
        with self._lock:
            me = threading.get_ident()
            held = self.open.get(me)
            if held is None or held.entered[-1][0] is not group:
                if held is not None:
                    del self.open[me]
                self._show()
                raise ArgumentError(
                    "a group ends in the thread that opened it, and before the groups around it do; nothing of it was "
                    "sent. Use it in a with statement"
                )
            _, first = held.entered.pop()
            if forget:
                del held.calls[first:]
            if held.entered:
                return []
            del self.open[me]
            self._show()
            return held.calls

    def _show(self) -> None:
        if not self.open:
            self._sequence.repeated.show()

    def note(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> bool:
        """Note a call, if this thread has an open group; whether it has."""
        held = self.open.get(threading.get_ident())
        if held is None:
            return False
        for group, _ in reversed(held.entered):
            timeout_s = group.timeout if timeout_s is None else timeout_s
            stream = group.stream if stream is None else stream
        held.calls += listed(method, args, timeout_s, stream) or [NotedCall(method, args, timeout_s, stream)]
        return True

    def refuse(self, name: str) -> None:
        """Raise ArgumentError if this thread has an open group, for what cannot be part of it."""
        if threading.get_ident() in self.open:
            raise ArgumentError(f"{name}: only blocking calls are grouped; make it outside of the group")

    # ---- making calls

    def end(self, calls: Sequence[NotedCall]) -> None:
        """Make the calls of a group that has ended: again by C, where they were made before."""
        method, args, stream = calls[0].method, tuple(calls), calls[0].stream
        begun = self._sequence.again(method, args, stream)
        if isinstance(begun, tuple):
            self._sequence.go_on(method, args, begun, None)
        elif not begun:
            self.make(calls, method, args)

    def make(self, calls: Sequence[NotedCall], method: CollectiveMethod, args: Args) -> None:
        """Make calls together, in as few launches as there are kinds of them; C finds them by ``method`` and ``args``.

        C makes them again by itself from then on, on host memory or as one launch on a stream, if it is to be had.
        """
        self._sequence.check_alive()
        waits = not self._maker.enqueues and any(call.stream is None for call in calls)
        found = self._launches(calls)
        for launch in found:
            mine = [calls[i] for i in launch.calls] or calls
            timeout_s = min((c.timeout_s for c in mine if c.timeout_s is not None), default=None)
            stream = next((c.stream for c in mine if c.stream is not None), None)
            if launch.ready is None:  # a call by itself
                self._maker.make(launch.method, mine[0].args, timeout_s, stream)
            else:
                self._run(launch, mine, timeout_s, stream, waits=waits)
        stream = calls[0].stream
        if any(call.timeout_s is not None or call.stream is not stream for call in calls):
            return
        known = [self._bound(launch, stream) for launch in found]
        bound = [call for call in known if isinstance(call, HostCall)]
        if len(bound) == len(found):
            repeated = self._sequence.repeated
            repeated.keep_group(RepeatedGroup(repeated, method.name, bound), bound, method, args)
        elif waits or self._cuda is None:
            return
        elif len(found) == len(found[0].streams) == 1 and self._cuda.makes(known[0]):
            self._cuda.repeating.keep_group(known[0], method, args, stream)

    def _bound(self, launch: GroupLaunch, stream: Any) -> BoundCall | None:
        """A launch that was made, as it was bound; None where calls are so many that it may soon be forgotten."""
        calls = self._maker.binder.calls
        key = key_of(launch.method.prepare, (launch,), stream, 0) if 2 * len(calls) <= calls.size else None
        return calls.get(key) if key is not None else None

    def _run(self, launch: GroupLaunch, operands: Any, timeout_s: float | None, stream: Any, *, waits: bool) -> None:
        """Make a launch; what it reads and writes on a stream lives until that is done."""
        self._join(launch.streams[:1], launch.streams[1:])
        self._maker.make(launch.method, (launch,), timeout_s, None if waits else stream)
        if launch.streams and not waits and self._cuda is not None:
            self._cuda.operands.keep((operands,), 0, launch.streams[0])
            for other in launch.streams[1:]:
                self._join((other,), launch.streams[:1])

    def begin(self, calls: Sequence[NotedCall]) -> MPI.Request:
        """Begin calls on host memory together; their buffers are read and written until the request is complete."""
        sequence, binder = self._sequence, self._maker.binder
        sequence.check_alive()
        sequence.repeated.shut()  # until a call has waited for it
        made = []
        for launch in self._launches(calls):
            mine = [calls[i] for i in launch.calls] or calls
            timeout_s = min((c.timeout_s for c in mine if c.timeout_s is not None), default=None)
            invocation = Invocation(launch.method, (launch,) if launch.ready is not None else mine[0].args)
            made.append((binder.prepare(invocation, timeout_s, None), invocation, sequence.deadline(timeout_s)))

        def work(_operands: Sequence[NotedCall] = calls) -> None:
            sequence.drain_c()
            for each in made:
                self._maker.make_prepared(*each)

        return sequence.thread.begin(work, sequence.context.log_once)

    def made(self, method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> bool:
        """Make a call of lists of buffers, if this is one; whether it is."""
        calls = listed(method, args, timeout_s, stream)
        if calls:
            self.make(calls, method, args)
        return bool(calls)

    def _join(self, streams: Sequence[int], others: Sequence[int]) -> None:
        """Let a stream wait for what is now on others."""
        if self._cuda is not None:
            for other in others:
                self._cuda.context.gpu.after(streams[0], other)

    def _launches(self, calls: Sequence[NotedCall]) -> tuple[GroupLaunch, ...]:
        if not calls:
            return ()
        keys = [key_of(method.prepare, args, stream, method.buffers) for method, args, _, stream in calls]
        for error in (call.args[0] for call in calls if call.args and isinstance(call.args[0], WrongLists)):
            return refused(calls[0].method, ArgumentError(str(error)))
        kept = None not in keys
        found = self._kept.find(key := tuple(keys)) if kept else None
        if found is None:
            found = launches(self._maker, calls, kept=kept)
            if kept and not any(isinstance(launch.ready, Exception) for launch in found):
                self._kept.put(key, found)
        return found


class RepeatedGroup:
    """A group on host memory that C makes again; it refers to nothing that keeps C's table."""

    def __init__(self, repeated: RepeatedCalls, name: str, calls: Sequence[HostCall]) -> None:
        self._repeated, self._name, self._calls = weakref.proxy(repeated), name, calls

    def go_on(self, seq: int, status: int) -> None:
        """Complete it from the call that C could not end; see :meth:`.RepeatedCalls.keep_group`."""
        made, status = status >> 8, status & 0xFF
        try:
            self._calls[made].go_on(seq, status)
            for call in self._calls[made + 1 :]:
                self._repeated.seq += 1
                call.run(self._repeated.seq)
        except PeerDelegates:
            raise delegated_in_group(self._name) from None


# ---------------------------------------------------------------- lists of buffers


class WrongLists(Exception):
    """Lists of buffers that do not fit together: the argument of a call that all ranks shall hear of."""


def listed(method: CollectiveMethod, args: Args, timeout_s: float | None, stream: Any) -> list[NotedCall]:
    """The calls that one of lists of buffers stands for; none, if there are no such lists among the arguments."""
    if method not in PACKED:
        return []
    make = partial(NotedCall, method, timeout_s=timeout_s, stream=stream)
    lists = [i for i, arg in enumerate(args) if is_list(arg)]
    if not lists:
        return []
    lengths = {len(args[i]) for i in lists}
    beside = [i for i, arg in enumerate(args) if i not in lists and (isinstance(arg, list | tuple) or is_buffer(arg))]
    if len(lengths) > 1 or beside:
        text = f"lists of {' and '.join(map(str, sorted(lengths)))} buffers" if not beside else "a list beside a buffer"
        wrong = WrongLists(f"{method.name}: {text}; pass lists of as many buffers, or MPI.IN_PLACE and one list")
        return [make(args=(wrong,))]
    return [make(args=tuple(a[k] if i in lists else a for i, a in enumerate(args))) for k in range(lengths.pop())]


def is_list(arg: Any) -> bool:
    """Whether an argument is a list of buffers, and not mpi4py's specification of one, as ``[array, count]``."""
    return type(arg) is list and bool(arg) and all(map(is_buffer, arg))


def is_buffer(item: Any) -> bool:
    """Whether an item of a list is a buffer; arrays without dimensions are numbers there."""
    if isinstance(item, np.ndarray | memoryview):
        return item.ndim > 0
    if isinstance(item, bytearray | array.array):
        return True
    return len(getattr(item, "shape", ())) > 0 and (
        hasattr(item, "__dlpack__") or hasattr(item, "__cuda_array_interface__")
    )
