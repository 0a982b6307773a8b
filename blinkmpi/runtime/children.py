"""Communicators made from another one (``Split``, ``Dup``): MPI makes them, and their first call of ours opens them.

What the ranks of a communicator have found out together holds for a part of them, too: settings, machine, rates, what
they can do and how they plan. So a child finds out nothing anew. It takes a place in its parent's memory, and its plans
begin with those of the last communicator of the same ranks. If that one was freed, or nobody holds it any more, the
child takes over all of it that had been opened (:class:`Spares`).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from mpi4py import MPI

from ..errors import PeerLost
from ..planning.algorithms import for_part
from ..planning.on_demand import Latest, Planned
from ..planning.plan import Plan
from ..topology.live import NOBODY
from ..topology.model import Topology
from ..transport.host.capabilities import Known
from ..transport.liveness import died_of
from ..transport.network.bounded import Rendezvous
from ..transport.network.exchanges import BegunDup, BoundedComm, ends_soon
from ..transport.slow_waits import SlowWaits
from ..util.lru import LRU
from ..util.settings import LogOnce, Settings
from ..util.shared_memory import SharedFile
from ..util.together import Comm, allgather
from .bootstrap import Options
from .cuda.buffers import lies_on_device
from .process_exit import in_child
from .requests import ProgressThread

if TYPE_CHECKING:
    from ..transport.cuda.device import Gpu

SETS = 256  # sets of ranks whose plans are kept
SPARES, SPARE_BYTES = 4, 1 << 18  # freed communicators that are kept for reuse; bytes of each on a rank
AT_ONCE = 1000  # polls before the clock is looked at: mostly all ranks come at once


@dataclass(frozen=True)
class Parent:
    """What a communicator gives to its children. It outlives the communicator.

    Args:
        group: its ranks, as MPI has them.
        nodes: which node each rank is on, in order of appearance.
        firsts: of each rank, the first rank of its node.
        place: this process's number on its machine, and how many there are.
        emulated: whether the user named the machine.
        known, executor: what the ranks can do, and what executes programs, in words.
        file: the memory in which children have room; None where there is none.
        visible: of each rank, whether its process can be seen from here.
        gpu, gpu_machine: this rank's, and that of all, if every rank has one.
        why_no_gpus: why they have no GPUs together; empty if they have.
        plans: of communicators of some of the ranks, by these.
        warn_once: logs what would be said of each child.
        spares: what its children leave.
        remedy: what the user can do when one of its ranks is lost, in words.
    """

    group: Group
    options: Options
    settings: Settings
    machine: Topology
    nodes: Sequence[int]
    firsts: Sequence[int]
    place: tuple[int, int]
    emulated: bool
    known: Known
    executor: str
    file: SharedFile | None
    arena_bytes: int
    visible: Sequence[bool]
    gpu: Gpu | None
    gpu_machine: Topology | None
    why_no_gpus: str
    plans: LRU[tuple[int, ...], Latest]
    warn_once: LogOnce
    spares: Spares
    remedy: str


def part_of_options(options: Options, settings: Settings, machine: Topology | None, n: int) -> Options:
    """The arguments of a communicator of ``n`` of the ranks; ``machine``: theirs, if the user has named one."""
    algo, algorithms = for_part(settings.algo if options.algo is None else options.algo, options.algorithms, n)
    return replace(options, plan=None, topology=machine, algo=algo, algorithms=algorithms)


class Group:
    """A group of MPI's, which is freed with the last that need it."""

    def __init__(self, group: MPI.Group) -> None:
        self.mpi = group

    def __del__(self) -> None:
        """Free it."""
        if not MPI.Is_finalized():
            self.mpi.Free()


class Left(Protocol):
    """What was opened of a communicator that is no more."""

    def rest(self) -> None:
        """Do nothing, until :meth:`wake`."""

    def wake(self) -> None:
        """Be there for calls again."""

    def end(self) -> None:
        """Free everything; collective."""

    def discard(self) -> None:
        """Give back what is this process's."""


class Spares:
    """What was opened of communicators that are no more, for others of the same ranks.

    Each has a number that is the same on its ranks. They may leave communicators in different orders, so they take what
    all of them have last.
    """

    def __init__(self) -> None:
        self._lock, self._numbers = threading.Lock(), count(1)
        self._left: dict[tuple[tuple[int, ...], int], Left] = {}
        self._turns: Counter[tuple[int, ...]] = Counter()  # by ranks: how often they have looked for something to reuse
        self._closed = False

    def number(self) -> int:
        """A number that is given once; what is opened has that of its first rank."""
        return next(self._numbers)

    def put(self, ranks: tuple[int, ...], number: int, left: Left) -> bool:
        """Keep something, unless the parent is freed; what has been here longest goes where there is too much."""
        with self._lock:
            if self._closed:
                return False
            self._left[ranks, number] = left
            old = self._left.pop(next(iter(self._left))) if len(self._left) > SPARES else None
        if old is not None:
            old.discard()
        return True

    def take(self, child: Child, timeout_s: float | None) -> Left | None:
        """What all ranks have last; None if they have different ones. Collective.

        Raises:
            CollectiveTimeout, PeerLost: if a rank does not come.
        """
        with self._lock:  # taken out at once: another thread may open a communicator of these ranks, too
            last = max((number for ranks, number in self._left if ranks == child.ranks), default=0)
            found = self._left.pop((child.ranks, last), None)
            if found is not None:
                found.wake()  # here, before other ranks may wait for this one
            self._turns[child.ranks] += 1
            turn = f"{child.ranks} {self._turns[child.ranks]}"
        try:
            if set(_numbers_of_all(child, last, timeout_s, turn)) == {last}:
                return found
        except BaseException:
            if found is not None:
                found.discard()
            raise
        if found is not None:
            found.rest()
            if not self.put(child.ranks, last, found):
                found.discard()
        return None

    def close(self, comm: Comm) -> None:
        """Free what all of its ranks have, together; collective among the parent's."""
        self._closed = True
        have = Counter(itertools.chain(*allgather(comm, list(self._left), list[tuple[tuple[int, ...], int]])))
        for ranks, number in sorted(have):
            left = self._left.pop((ranks, number), None)
            if left is not None:
                left.end() if have[ranks, number] == len(ranks) else left.discard()

    def discard(self) -> None:
        """Give back what is this process's."""
        self._closed = True
        while self._left:
            self._left.popitem()[1].discard()


def _numbers_of_all(child: Child, mine: int, timeout_s: float | None, turn: str) -> list[int]:
    """Every rank's number; collective, and mostly through before anybody has to look at the clock."""
    own, all_of_them = np.array([mine]), np.empty(len(child.ranks), np.int64)
    request = child.comm.Iallgather(own, all_of_them)
    if not ends_soon(request, (own, all_of_them), AT_ONCE):
        rendezvous = Rendezvous(child.first_call, timeout_s or child.usual_timeout_s, SlowWaits(child.parent.settings))
        comm = BoundedComm(child.comm, rendezvous, name=f"what was left, {turn}")
        comm.wait(request, (own, all_of_them))
    return list(map(int, all_of_them))


class Child:
    """A communicator that has not opened.

    Args:
        comm: as MPI has it.
        made_by: the call that made it, in words.
    """

    def __init__(self, parent: Parent, comm: MPI.Intracomm, made_by: str) -> None:
        self.parent, self.comm, self.made_by = parent, comm, made_by
        self.timeout_s: float | None = None  # the timeout of the call that opens the communicator
        self.dead: BaseException | None = None
        self.thread = ProgressThread()  # opens the communicator if the first call is non-blocking
        self.begun: BegunDup | None = None  # begun by the user's thread, to keep the order of MPI's collectives

    def check_alive(self) -> None:
        """Raise PeerLost if it can never open."""
        if self.dead is not None:
            raise died_of(self.dead) from self.dead
        if in_child():
            raise PeerLost(f"process {os.getpid()} was forked by a rank, which alone makes its calls")

    def may_wait(self, args: tuple[Any, ...]) -> bool:
        """Whether a call with these arguments can open it in a thread: on host memory, by an operation of MPI's."""
        own = any(isinstance(arg, MPI.Op) and not arg.is_predefined for arg in args)
        return bool(self.why_no_gpus) and not own and not any(map(lies_on_device, args))

    @property
    def may_take(self) -> bool:
        """Whether one of these ranks can have left something; the same on every rank."""
        parent = self.parent
        return parent.gpu is None and (not any(parent.firsts) or len(set(self.firsts)) == 1)

    @cached_property
    def why_no_gpus(self) -> str:
        """Why its ranks can have no GPUs together, if its parent's reason is one for it, too; else empty."""
        why = self.parent.why_no_gpus
        return why if why.startswith(NOBODY) or len(self.ranks) == self.parent.group.mpi.size else ""

    @property
    def first_call(self) -> str:
        """The call that opens it, in words."""
        return f"the first call on a communicator of {self.made_by}"

    @property
    def usual_timeout_s(self) -> float:
        """How long its calls may wait."""
        return float(self.parent.options.timeout_s or self.parent.settings.timeout_s)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks, by their numbers in the parent."""
        own = self.comm.Get_group()
        found = MPI.Group.Translate_ranks(own, list(range(own.size)), self.parent.group.mpi)
        own.Free()
        return tuple(map(int, found))

    @cached_property
    def machine(self) -> Topology:
        """Its part of the parent's machine."""
        return self._part(self.parent.machine)

    @property
    def main_machine(self) -> Topology:
        """The same of the GPUs' machine, if every rank has one."""
        return self._part(self.parent.gpu_machine or self.parent.machine)

    def _part(self, whole: Topology) -> Topology:
        return whole if self.ranks == tuple(range(whole.n)) else whole.subset(self.ranks)

    @cached_property
    def options(self) -> Options:
        """Its arguments."""
        parent = self.parent
        machine = self.machine if parent.emulated else None
        return part_of_options(parent.options, parent.settings, machine, len(self.ranks))

    @property
    def firsts(self) -> list[int]:
        """Of each rank, the first rank of its node."""
        theirs = [self.parent.firsts[r] for r in self.ranks]
        return [theirs.index(first) for first in theirs]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Which node each rank is on."""
        numbers: dict[int, int] = {}
        return tuple(numbers.setdefault(self.parent.nodes[r], len(numbers)) for r in self.ranks)

    @cached_property
    def as_parent(self) -> Parent:
        """What it gives to its own children before it opens."""
        parent = self.parent
        return replace(
            parent, group=Group(self.comm.Get_group()), options=self.options, machine=self.machine, nodes=self.nodes,
            firsts=self.firsts, known=parent.known.of(self.ranks), visible=[parent.visible[r] for r in self.ranks],
            gpu_machine=self._part(parent.gpu_machine) if parent.gpu_machine else None, why_no_gpus=self.why_no_gpus,
            plans=LRU(SETS), spares=Spares(),
        )  # fmt: skip

    @property
    def planned(self) -> Planned | None:
        """What the last communicator of the same ranks has planned so far."""
        found = self.parent.plans.find(self.ranks)
        return found.planned if found is not None else None

    @property
    def plan(self) -> Plan:
        """What is planned for it: nothing, before its first call."""
        machine = self.main_machine
        return Plan(machine.name, machine.fingerprint, machine.n, (), ())
