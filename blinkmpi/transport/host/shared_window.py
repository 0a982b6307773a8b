"""The memory that the CPU ranks of a node share: control pages of every rank of the job, a slot arena of each here.

Behind the control pages (:mod:`..control_pages`) lie the counters (:mod:`..counters`) of the ranks here, then their
arenas: the slots of the channels that a rank writes, or that come to it from another node. Behind each arena lie the
slots of calls in one shot (``program/one_shot.py``), and behind all of them the messages of these calls, if there are
several nodes: those that this node sends, then those that it receives of each other node, of even and of odd calls.
"""

import atexit
import os
import platform
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ...errors import TopologyError
from ...util.settings import LEAST_BUFFER_BYTES
from ...util.shared_memory import PAGE, SHM, NotShared, SharedFile, longest, shared_file
from ...util.text import plural, size_text
from ...util.together import Comm, allgather, gathered, together
from ..control_pages import CONTROL, DROPPED, FLAGS, HEADS, LEFT, LINE, RESTS, WENT_ON, ControlPages, PagePlaces
from ..counters import LINE_BYTES, lines_for

SKEW = 3328  # arenas begin at different places of a page, none where a large NumPy array begins
ARENA_BYTES = 8 << 20
ONE_SHOT_BYTES = 208 << 10  # a rank, behind its arena: slots that are filled before a call is announced, of 512 peers
MESSAGE_BYTES = 1088 << 10  # bytes that a node sends in one call of one shot, and bytes that it receives
MIN_ARENA_BYTES = LEAST_BUFFER_BYTES
REMEDY = (
    f"free communicators that are no longer used, or enlarge {SHM} (docker run --shm-size=1g, mount -o "
    f"remount,size=1G {SHM})"
)
NO_ROOM = f"{SHM} has no room for slots: {REMEDY}"


class NoRoom(TopologyError):
    """There is no room in /dev/shm for a call's flags and slots. Such a call is MPI's."""


class WindowLayout:
    """Where things lie in the window of ``rank``'s node.

    Args:
        firsts: of each rank of the job, the first rank of its node.
        arena_bytes: slots per rank.
    """

    full = ""  # why there are no slots; SharedWindow says more

    def __init__(self, rank: int, firsts: Sequence[int], arena_bytes: int) -> None:
        n = len(firsts)
        self.firsts, self.nodes = list(firsts), sorted(set(firsts))
        self.here = tuple(r for r in range(n) if firsts[r] == firsts[rank])
        self.places = PagePlaces(n, rank, self.here)
        self.arena_bytes = arena_bytes
        self.one_shot_bytes = ONE_SHOT_BYTES if len(self.nodes) == 1 else 2 * MESSAGE_BYTES  # for the longest message
        self.message_bytes = 4 * MESSAGE_BYTES if len(self.nodes) > 1 else 0
        self.counter_bytes = -(-lines_for(n) * LINE_BYTES // PAGE) * PAGE  # bytes of a rank's counters
        counters, each = -(-n * CONTROL // PAGE) * PAGE, arena_bytes + self.one_shot_bytes + SKEW
        self.counter_places = {r: counters + i * self.counter_bytes for i, r in enumerate(self.here)}
        first = counters + len(self.here) * self.counter_bytes
        self._arenas = {r: first + i * each + SKEW for i, r in enumerate(self.here)}
        self._messages = first + len(self.here) * each
        self.total = self._messages + self.message_bytes

    @property
    def pages(self) -> PagePlaces:
        """Where things lie in the control pages."""
        return self.places

    def arena(self, rank: int) -> int:
        """Offset in ``bytes`` of the arena of ``rank``, a rank of this node."""
        return self._arenas[rank]

    def one_shot(self, rank: int) -> int:
        """Offset in ``bytes`` of the slots of ``rank`` for calls of one shot, which no other call uses."""
        return self._arenas[rank] + self.arena_bytes

    def sent(self) -> int:
        """Offset in ``bytes`` of what this node sends in even calls of one shot; of odd ones MESSAGE_BYTES behind."""
        return self._messages

    @property
    def longest_message(self) -> int:
        """Bytes of the longest message of a call in one shot that a node takes from another one."""
        return MESSAGE_BYTES // max(len(self.nodes) - 1, 1) // LINE * LINE

    def received(self, first: int) -> int:
        """Offset in ``bytes`` of the message of an even call of one shot from the node whose first rank is ``first``.

        That of an odd one is MESSAGE_BYTES behind it.
        """
        others = [other for other in self.nodes if other != self.here[0]]
        return self._messages + 2 * MESSAGE_BYTES + others.index(first) * self.longest_message

    # ---- what a rank reserves

    def controls(self) -> list[tuple[int, int]]:
        """What every call of this rank needs, (offset, bytes) each."""
        rank = self.places.rank
        return [(rank * CONTROL, FLAGS), (self.counter_places[rank], PAGE), *self._elsewhere()]

    def everything(self) -> list[tuple[int, int]]:
        """What any call of this rank may need."""
        rank = self.places.rank
        counters = self.counter_places[rank], self.counter_bytes
        slots = self._arenas[rank], self.arena_bytes + self.one_shot_bytes
        return [(rank * CONTROL, CONTROL), counters, slots, *self._elsewhere()]

    def _elsewhere(self) -> list[tuple[int, int]]:
        """What the first rank of a node also looks after: pages of the ranks on other nodes, and messages."""
        if self.places.rank != self.here[0]:
            return []
        others = [(r * CONTROL, CONTROL) for r in range(self.places.n) if r not in self.here]
        return [*others, (self._messages, self.message_bytes)]


@dataclass(frozen=True)
class Place:
    """Where a communicator has its memory that is made of ranks of another one.

    Args:
        file: the other one's.
        at: where in it this one's begins, the same on the ranks of a node.
        firsts, arena_bytes: as for :class:`WindowLayout`.
        visible: of each rank, whether its process can be seen from here.
    """

    file: SharedFile
    at: int
    firsts: Sequence[int]
    arena_bytes: int
    visible: Sequence[bool]


class SharedWindow(WindowLayout):
    """One piece of shared memory a node. It lives until all ranks have closed it.

    Args:
        comm: all ranks.
        node: those of them that share memory with this one, in their order.
        arena_bytes: slots per rank, the same for all; made smaller if some /dev/shm has less room.
        strict: whether it is an error that some /dev/shm has no room.
        place: where it lies, if the ranks are some of another communicator's.

    Attributes:
        full: why there are no slots, the same on every rank; empty where there are.

    Raises:
        TopologyError: on every rank, if a file in /dev/shm cannot be made, or if ``strict``.
    """

    def __init__(
        self, comm: Comm, node: Comm, arena_bytes: int = ARENA_BYTES, *, strict: bool = False,
        place: Place | None = None,
    ) -> None:  # fmt: skip
        self._comm, self._node, self._process = comm, node, os.getpid()
        self.full = ""
        # by offset: bytes reserved behind it, if they are reserved on demand
        self._kept: dict[int, int] | None = None if place is None else {}
        self._fences = None if platform.machine() in ("x86_64", "AMD64") else MPI.Win.Allocate(8, comm=MPI.COMM_SELF)
        if self._fences:
            self._fences.Lock_all(MPI.MODE_NOCHECK)
        if place is None:
            opened = self._open_file(arena_bytes)
        else:
            super().__init__(comm.rank, place.firsts, place.arena_bytes)
            opened = all(gathered(comm, partial(self._enter, place.file, place.at, self.controls()), bool))
            if not opened:
                place.file.give_back(place.at, self.total)
        self.shrunk = opened and place is None and self.arena_bytes < arena_bytes
        if not opened:
            self._open_elsewhere(strict)
        self.pages.see(place.visible if place is not None else None)
        _open.add(self)

    def _open_file(self, arena_bytes: int) -> bool:
        """Have a file with as large arenas as there is room for on every node; whether there is room."""
        comm, node = self._comm, self._node
        firsts = allgather(comm, allgather(node, comm.rank, int)[0], int)
        super().__init__(comm.rank, firsts, MIN_ARENA_BYTES)
        wanted = -(-arena_bytes // PAGE) * PAGE
        size = max(min(wanted, *gathered(comm, self._fit, int, error=TopologyError)), MIN_ARENA_BYTES)
        file, at = self._shared(limited=True), 0
        while True:
            super().__init__(comm.rank, firsts, size)
            if all(gathered(comm, partial(self._enter, file, at, self.everything()), bool, error=TopologyError)):
                file.skip(at + self.total)
                return True
            file.give_back(at, self.total)
            if size == MIN_ARENA_BYTES:
                return False
            at += -(-self.total // PAGE) * PAGE  # the next place lies behind, so a late rank gives back nothing of it
            size = max(size // 2 // PAGE * PAGE, MIN_ARENA_BYTES)

    def _open_elsewhere(self, strict: bool) -> None:
        """Have control pages where no file system limits them."""
        self.full = self._no_room()
        if strict:
            raise TopologyError(self.full)
        file = self._shared(limited=False)
        if not all(gathered(self._comm, partial(self._enter, file, 0, self.controls()), bool, error=TopologyError)):
            raise TopologyError(self.full)

    def _shared(self, *, limited: bool) -> SharedFile:
        """A file that all ranks of the node have open; TopologyError on every rank of the job if one has not."""
        number = shared_file(self._node, longest(), limited=limited)

        def own() -> SharedFile:
            if isinstance(number, NotShared):
                raise number
            return SharedFile(number, self._node.rank, self._node.size)

        return together(self._comm, own, error=TopologyError)

    def _enter(self, file: SharedFile, at: int, parts: list[tuple[int, int]]) -> bool:
        """Reserve some parts, map the window, and say who this is; whether there was room."""
        if not all(file.reserve(at + start, length) for start, length in parts):
            return False
        if self._kept is not None:
            self._kept = dict(parts)
        self.file, self._at = file, at
        self.bytes: NDArray[np.uint8] = np.asarray(file.mapped(at, self.total))
        fence = self._fences.Sync if self._fences else None
        rank = self.places.rank
        self._pages = ControlPages(self.bytes, self.places.n, rank, self.here, fence)
        start = self.counter_places[rank]
        self.counters = self.bytes[start : start + self.counter_bytes]  # this rank's
        self._pages.introduce(start, self.counter_bytes)
        if fence:
            fence()
        return True

    @property
    def pages(self) -> ControlPages:
        """The control pages."""
        return self._pages

    def _fit(self) -> int:
        """The largest arena for which a quarter of what /dev/shm has left is enough: others open communicators, too."""
        pages = self._comm.size * CONTROL + len(self.here) * self.counter_bytes + self.message_bytes
        return ((free_bytes() // 4 - pages) // len(self.here) - SKEW - self.one_shot_bytes) // PAGE * PAGE

    def _no_room(self) -> str:
        """What to say of the node that has least to spare; collective."""
        parts = self.everything() if self._kept is None else self.controls()
        need = sum(allgather(self._node, sum(length for _, length in parts), int))
        room = free_bytes() - need, need, len(self.here), MPI.Get_processor_name()
        rooms = allgather(self._comm, room, tuple[int, int, int, str])
        spare, need, ranks, host = min(rooms)
        return (
            f"{SHM} on {host} has {size_text(spare + need)} free; a communicator of {plural(ranks, 'rank')} there "
            f"needs at least {size_text(need)} of it: {REMEDY}"
        )

    # ---- while calls are made

    def need(self, heads: int, tails: int, slots: int, *, one_shot: bool) -> None:
        """Reserve what this rank's part of a program takes: flags of so many channels, and bytes of slots.

        Raises:
            NoRoom: if there is no room in /dev/shm; the program must not run then.
        """
        if self.full:
            raise NoRoom(NO_ROOM)
        rank = self.places.rank
        flags = rank * CONTROL + FLAGS
        wanted = {flags: heads * LINE, flags + HEADS * LINE: tails * LINE}
        if one_shot:
            half = self.one_shot(rank) + self.one_shot_bytes // 2
            wanted |= {self.one_shot(rank): slots, half: slots}
        else:
            wanted[self.arena(rank)] = slots
        if not all(self.keep(start, length) for start, length in wanted.items()):
            raise NoRoom(NO_ROOM)

    def keep(self, start: int, length: int) -> bool:
        """Reserve bytes from a place on, unless they are; whether there is room."""
        if self._kept is None or self._kept.get(start, 0) >= length:
            return True
        length += -(start + length) % PAGE  # whole pages are kept
        if not self.file.reserve(self._at + start, length):
            return False
        self._kept[start] = length
        return True

    # ---- the end, for the time being or for good

    @property
    def held(self) -> int:
        """Bytes that this rank has reserved, of what lies in another communicator's memory."""
        return sum((self._kept or {}).values())

    def give_back_slots(self) -> None:
        """Hold what every call needs, and no more; only when all ranks have completed all calls."""
        kept = self._kept or {}
        self._kept = dict(self.controls())
        for start in kept.keys() - self._kept.keys():
            self.file.give_back(self._at + start, kept[start])

    def rest(self) -> None:
        """Take part in no call until :meth:`wake`."""
        self._pages.lefts[self._pages.rank] = RESTS

    def wake(self) -> None:
        """Take part in calls again."""
        self._pages.lefts[self._pages.rank] = 0

    def leave(self) -> None:
        """Say that this process takes part in no call any more. Python's end says so, too, but not a child's."""
        if os.getpid() == self._process and self in _open:
            self.pages.lefts[self.pages.rank] = LEFT

    def close(self, *, went_on: bool = False) -> None:
        """Look at it no more. Local, and safe to call twice: the last rank of a node gives back the memory.

        Args:
            went_on: whether this rank has another communicator of those that are left, which is told.
        """
        if self not in _open or os.getpid() != self._process:
            return
        _open.discard(self)
        pages = self._pages
        pages.lefts[pages.rank] = WENT_ON if went_on else DROPPED
        with _fence:  # a fence: of two ranks that leave at once, one sees the other
            (pages.fence or int)()
        last = all(int(pages.lefts[r]) in (DROPPED, WENT_ON) for r in self.here)
        if last or not pages.lefts[pages.rank]:  # the last rank has given the memory back meanwhile
            self.file.give_back(self._at, self.total)  # though this or another rank may still have a view
        del self.bytes, self.counters, self._pages, self.file
        if self._fences:
            self._fences.Unlock_all()
            self._fences.Free()


_fence = threading.Lock()  # taking the lock is a fence, for machines whose loads overtake stores
_open: weakref.WeakSet[SharedWindow] = weakref.WeakSet()  # the windows of this process


@atexit.register
def _leave_all() -> None:
    for window in list(_open):
        window.leave()


def free_bytes() -> int:
    """What /dev/shm has left."""
    found = os.statvfs(SHM)
    return int(found.f_bavail * found.f_frsize)
