"""``Outlook``: how calls of a communicator will be made, by which row of the table and which program.

It follows from machine, plan and what the ranks can do, which are known before a communicator opens.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

import msgspec

from ..errors import BlinkError, PlanError
from ..lang.algorithms import Algorithm
from ..planning.memory_rows import SLOTS as MEMORY_SLOTS
from ..planning.memory_rows import by_slots, without_shots
from ..planning.on_demand import PlanOnDemand
from ..planning.plan import ONE_SHOTS, Plan, Rule
from ..planning.selection import choose, program_for
from ..planning.slots import LINK_SLOTS
from ..program.call import Call
from ..program.ir import Program
from ..topology.model import Topology
from ..transport.host.host_program import fits
from ..transport.host.outlook import HostOutlook
from ..transport.host.shared_window import WindowLayout
from ..util.cache_folder import cache_dir
from ..util.settings import LogOnce, Settings
from .arguments import in_mpi
from .bootstrap import Options, agree_on_plan
from .children import Child
from .ranks.interface import INSTEAD

if TYPE_CHECKING:
    from ..forecast.rates import StepRates
    from .cuda.context import CudaContext

FEW_CHANNELS = 64  # programs with at most so many channels are kept for later communicators of the same ranks


class Outlook:
    """What is known of the calls of a communicator.

    Attributes:
        nodes: which node each rank is on.
        emulated: whether the user named the machine.
        customs: algorithms that were called as Custom(), by their identity.
    """

    rank: int
    n: int
    options: Options
    settings: Settings
    machine: Topology
    nodes: tuple[int, ...]
    emulated: bool
    gpus: CudaContext | None = None
    host: HostOutlook
    planned: PlanOnDemand
    customs: dict[str, Algorithm]
    log_once: LogOnce

    @property
    def has_mpi(self) -> bool:
        """Whether MPI has collectives of its own among these ranks."""
        return True

    @cached_property
    def one_node(self) -> bool:
        """Whether the ranks share memory."""
        return len(set(self.nodes)) == 1

    @property
    def main(self) -> CudaContext | Outlook:
        """Whose machine, plans and rules are those of the job: the GPUs', if every rank has one."""
        return self.gpus or self

    @cached_property
    def step_rates(self) -> StepRates | None:
        """What steps cost on these CPU ranks, if ``blinkmpi tune`` kept it. What cannot be read is said once."""
        if not self.forecasts:
            return None
        from ..forecast.rates import file_of, hardware_of, read

        hardware = hardware_of(self.n, self.host.executor_reason)
        try:
            return read(file_of(cache_dir(), hardware), hardware)
        except BlinkError as error:
            self.log_once(f"predictions are by the copy rate alone: {error}")
            return None

    @property
    def forecasts(self) -> bool:
        """Whether times of calls follow from those of steps: of C, on the CPU ranks of one node."""
        return self.gpus is None and self.one_node and not self.emulated and self.host.native is not None

    @property
    def executor(self) -> str:
        """What executes our programs on these ranks, and what was found out about it."""
        return f"CUDA kernels on {self.gpus.gpu.name}" if self.gpus else self.host.executor_reason

    @property
    def plans(self) -> Plan:
        """The plan for host memory, as far as calls have needed it."""
        return self.planned.plan

    def rule(self, call: Call, *, blocking: bool = True, plan: Plan | None = None) -> Rule:
        """The row of the table that a call takes. Non-blocking calls never go to MPI, nor what it does not do alike.

        PlanError for a given plan that leaves a call to an MPI which cannot make it.
        """
        if plan is not None or call.name:
            return self._rule(call, blocking=blocking, plan=plan)
        known = self.planned.latest.planned
        follows, key = known.follows, (known.digest, call, blocking)
        found: Rule | None = follows.find(key)
        if found is None:
            follows.put(key, found := self._rule(call, blocking=blocking, plan=None))
        return found

    def _rule(self, call: Call, *, blocking: bool, plan: Plan | None) -> Rule:
        if call.name:
            chunk, depth = MEMORY_SLOTS if self.one_node else LINK_SLOTS
            return Rule(call.collective, 0, self.customs[call.name].scheme, chunk, depth, "called as Custom()")
        rule = choose(plan or self.plans, call, mpi=self.has_mpi and blocking and in_mpi(call))
        if rule.scheme == "mpi" and not self.has_mpi:
            raise PlanError(
                f"the plan leaves {call.collective} to MPI, which did not start these processes; give a plan with a "
                f"scheme for it, or {INSTEAD}"
            )
        if rule.protocol in ONE_SHOTS:
            cma = rule.protocol == "one_shot_cma" and not self.host.no_cma
            if not fits(self.program(call, rule), self.host.window, self.host.native, cma=cma):
                return self.by_slots(rule) if self.one_node else self._next(call, rule, blocking, plan or self.plans)
        return rule

    def _next(self, call: Call, rule: Rule, blocking: bool, plan: Plan) -> Rule:
        """The row of a call that does not fit into one message for each node, or that C does not execute."""
        return choose(without_shots(plan), call, mpi=self.has_mpi and blocking and in_mpi(call))

    @staticmethod
    def by_slots(rule: Rule) -> Rule:
        """A row whose vectors go along trees, through slots."""
        return msgspec.structs.replace(rule, protocol="slots", reason="longer than one shot can be, or cannot be read")

    def program(self, call: Call, rule: Rule, plan: Plan | None = None) -> Program:
        """The checked program of a call."""
        if plan is not None or call.name:
            return self._program(call, rule, plan)
        known = self.planned.latest.planned
        follows, key = known.follows, (known.digest, call, rule)
        found: Program | None = follows.find(key)
        if found is None:
            found = self._program(call, rule, None)
            if len(found.channels) <= FEW_CHANNELS:
                follows.put(key, found)
        return found

    def _program(self, call: Call, rule: Rule, plan: Plan | None) -> Program:
        if call.name:
            of = self.machine
            plan = Plan(of.name, of.fingerprint, of.n, (), (), algorithms=(self.customs[call.name],))
        nodes = () if self.one_node else self.nodes
        return program_for(
            plan or self.plans, call, rule, budget_bytes=self.host.arena_bytes, nodes=nodes, multicast=self.one_node
        )

    def without_what_is_missing(self, plans: PlanOnDemand) -> None:
        """Take out of the plan for host memory what these ranks cannot do."""
        if self.one_node and self.host.no_cma:
            plans.change(partial(by_slots, in_c=self.host.native is not None))
        if not self.one_node and not self.host.has_shots:
            plans.change(without_shots)


class Alone:
    """One rank, which plans for itself."""

    rank, size = 0, 1

    def allgather_bytes(self, body: bytes, /) -> list[bytes]:
        """Its own."""
        return [body]

    def bcast_bytes(self, body: bytes, root: int, /) -> bytes:
        """Its own."""
        return body

    def Barrier(self) -> None:
        """Nobody to wait for."""


class ChildOutlook(Outlook):
    """The outlook of a communicator on host memory that has not opened; as this rank alone sees it."""

    def __init__(self, child: Child) -> None:
        parent = child.parent
        self.rank, self.n, self.options, self.settings = (
            child.comm.rank,
            len(child.ranks),
            child.options,
            parent.settings,
        )
        self.machine, self.nodes, self.emulated, self.customs = child.machine, child.nodes, parent.emulated, {}
        self.log_once = LogOnce(self.settings)
        layout = WindowLayout(self.rank, child.firsts, parent.arena_bytes)
        known, helps = parent.known.of(child.ranks), self.settings.cma_threads > 1
        self.host = HostOutlook(known, parent.executor, layout, helps=helps)
        self.planned = agree_on_plan(
            Alone(), self.machine, self.options, self.settings, change=self.without_what_is_missing, like=child.planned
        )
