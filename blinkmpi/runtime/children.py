"""Communicators that are made of the ranks of another one: MPI makes them, and they open at their first call of ours.

What the ranks of a communicator have found out together holds for a part of them, too: settings, machine, rates, what
they can do and how they plan. So a child finds out nothing anew. It takes a place in its parent's memory, and its plans
begin with those of the last communicator of the same ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ..errors import PeerLost
from ..planning.algorithms import for_part
from ..planning.on_demand import Planned
from ..planning.plan import Plan
from ..topology.model import Topology
from ..transport.host.capabilities import Known
from ..transport.liveness import died_of
from ..transport.network.exchanges import BegunDup
from ..util.lru import LRU
from ..util.settings import LogOnce, Settings
from ..util.shared_memory import SharedFile
from .bootstrap import Options
from .cuda.buffers import lies_on_device
from .process_exit import in_child
from .requests import ProgressThread

if TYPE_CHECKING:
    from ..transport.cuda.device import Gpu

SETS = 256  # of ranks, of which plans are kept


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
        why_no_gpus: why no rank has a GPU; None if some have one.
        plans: of communicators of some of the ranks, by these.
        warn_once: logs what would be said of each child.
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
    why_no_gpus: str | None
    plans: LRU[tuple[int, ...], Planned]
    warn_once: LogOnce


class Group:
    """A group of MPI's, which is freed with the last that need it."""

    def __init__(self, group: MPI.Group) -> None:
        self.mpi = group

    def __del__(self) -> None:
        """Free it."""
        if not MPI.Is_finalized():
            self.mpi.Free()


class Child:
    """A communicator that has not opened.

    Args:
        comm: as MPI has it.
        made_by: the call that made it, in words.
    """

    def __init__(self, parent: Parent, comm: MPI.Intracomm, made_by: str) -> None:
        self.parent, self.comm, self.made_by = parent, comm, made_by
        self.timeout_s: float | None = None  # of the call that opens it
        self.dead: BaseException | None = None
        self.thread = ProgressThread()  # which opens it, where the first call does not block
        self.begun: BegunDup | None = None  # by the user's thread, which orders MPI's collectives on it

    def check_alive(self) -> None:
        """Raise PeerLost if it can never open."""
        if self.dead is not None:
            raise died_of(self.dead) from self.dead
        if in_child():
            raise PeerLost(f"process {os.getpid()} was forked by a rank, which alone makes its calls")

    def may_wait(self, args: tuple[Any, ...]) -> bool:
        """Whether a call with these arguments can open it in a thread: on host memory, by an operation of MPI's."""
        own = any(isinstance(arg, MPI.Op) and not arg.is_predefined for arg in args)
        return self.parent.why_no_gpus is not None and not own and not any(map(lies_on_device, args))

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
        algo = parent.settings.algo if parent.options.algo is None else parent.options.algo
        algo, algorithms = for_part(algo, parent.options.algorithms, len(self.ranks))
        topology = self.machine if parent.emulated else None
        return replace(parent.options, plan=None, topology=topology, algo=algo, algorithms=algorithms)

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
            gpu_machine=self._part(parent.gpu_machine) if parent.gpu_machine else None, plans=LRU(SETS),
        )  # fmt: skip

    @property
    def planned(self) -> Planned | None:
        """Those of the last communicator of the same ranks."""
        return self.parent.plans.find(self.ranks)

    @property
    def plan(self) -> Plan:
        """What is planned for it: nothing, before its first call."""
        machine = self.main_machine
        return Plan(machine.name, machine.fingerprint, machine.n, (), ())
