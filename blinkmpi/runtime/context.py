"""What the calls of a Communicator stand on: its machine, its plans, its GPUs and its transport.

All ranks find, agree on and open these together, and all fail together:
settings, probe and gather the machine, pack on rank 0, check the plan, open the
transport. ``bootstrap`` has the steps that need no MPI. No call is made here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mpi4py import MPI

from ..errors import FallbackError
from ..planning.defaults import Gpus, by_slots
from ..planning.diff import PlanDifference, plan_differences
from ..planning.plan import Plan, Rule
from ..planning.selection import choose, program_for
from ..planning.tuned_table import file_of
from ..program.call import Call
from ..program.ir import Program
from ..topology import Topology, gather
from ..topology.gather import gather_gpus
from ..topology.measured import applied
from ..topology.network_rate import net_rates, with_net
from ..topology.probe import probe
from ..transport.cuda.device import Gpu
from ..transport.host.executor import HostTransport
from ..util.cache_folder import cache_dir
from ..util.settings import log
from .arguments import in_mpi
from .bootstrap import Options, agree_on_plan, dump_files, settle, told_machine, virtual_node
from .cuda_calls import open_gpus
from .cuda_context import CudaContext


class Ground:
    """Machine, plans, GPUs and transport of one communicator.

    ``private`` carries our own messages and the calls that we hand to MPI, in their order; the user's calls that
    never come here run on the Communicator itself, at the same time if they like.

    Args:
        comm: the Communicator.
        options: what the user said when making it.
        part: what a parent knows of the machine.
    """

    def __init__(self, comm: MPI.Intracomm, options: Options, part: Topology | None = None) -> None:
        self.public = MPI.Intracomm(comm)  # the Communicator's own handle, without its class
        self.private = self.public.Dup()
        self.rank, self.n = self.private.rank, self.private.size
        self.options = options
        self.transport: HostTransport  # opened at the end of the bootstrap
        self._no_cma = ""  # why the ranks of one node cannot read one another's memory
        self._shown: set[str] = set()
        self.gpus: CudaContext | None = None
        self.why_no_gpus = ""
        try:
            self.settings = settle(self.private, options)
            self.timeout_s = float(options.timeout_s or self.settings.timeout_s)
            self._bootstrap(part)
        except Exception:
            self.private.Free()
            raise

    def _bootstrap(self, part: Topology | None) -> None:
        """Find the machine (``part`` is what a parent knows of it), plan, and open the transport."""
        self.node, place = self._node()
        try:
            wanted = self.options.topology or self.settings.topo_file or None
            probed = gather(self.private, self.node, measure=wanted is None and part is None)
            self.nodes = tuple(d.node for d in probed.devices)
            self.one_node = len(probed.nodes) == 1
            self.emulated = wanted is not None
            self.machine = told_machine(self.private, wanted, self.n) if wanted is not None else part or probed
            told = self.machine if wanted is not None else None
            net = partial(with_net, rates=net_rates(probed))
            say = self._once_on_rank_0
            opened = open_gpus(self.private, self.node, place, told, net, self._gpu_plans, self.settings, say)
            self.gpus, self.why_no_gpus = opened
            self.plans = self._host_plans()
            found = self.gpus or self
            dump_files(self.private, self.settings, found.machine, found.plans)
            self.transport = HostTransport(
                self.private,
                self.node,
                executor=self.options.executor or self.settings.executor,
                arena_bytes=self.settings.buffer_bytes,
                cma=not self.settings.cma_disable,
                say=self._once,
            )
            self._no_cma = no_cma = self.transport.no_cma if self.one_node else ""
            if no_cma and self.options.strict and self.transport.native and not self.settings.cma_disable:
                self.transport.close()
                raise FallbackError(
                    f"strict=True: bytes would cross in two copies, because {no_cma}; allow it, or set "
                    "BLINKMPI_CMA_DISABLE=1"
                )
            if no_cma:
                self.plans = by_slots(self.plans)
        except BaseException:
            self.node.Free()
            raise
        if self.rank == 0:
            executor = self.transport.executor_reason
            log(self.settings, "INFO", f"{self.n} ranks on {self.machine.name} ({self.plans.fingerprint}); {executor}")
            if no_cma and self.transport.native and not self.settings.cma_disable:
                log(self.settings, "WARN", f"two copies where one would do: {no_cma}")
            if self.transport.window.shrunk:
                log(self.settings, "WARN", f"/dev/shm is small: {self.transport.arena_bytes} bytes of slots a rank")

    def _node(self) -> tuple[MPI.Intracomm, tuple[int, int]]:
        """The ranks that share memory with this one, as far as the user lets them; its place on its machine."""
        virtual = virtual_node(self.rank, self.n, self.options, self.settings)
        node = MPI.Intracomm(self.private.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank))
        place = node.rank, node.size
        if virtual is None:
            return node, place
        part = MPI.Intracomm(node.Split(virtual, self.rank))
        node.Free()
        return part, place

    def _host_plans(self) -> Plan:
        """The plan for host memory; on a job with GPUs, what the user says of plans is about those."""
        options = replace(self.options, algo="", plan=None) if self.gpus else self.options
        plans = agree_on_plan(self.private, self.machine, options, self.settings)
        return by_slots(plans) if self._no_cma else plans

    def _gpu_plans(self, machine: Topology, gpu: Gpu, emulated: bool) -> Plan:
        table = None if emulated or not self.one_node else file_of(cache_dir(), gpu.name, machine)
        links: Gpus = "slots" if emulated else "onehop" if self.one_node else "nodes"
        return agree_on_plan(self.private, machine, self.options, self.settings, links, table)

    def _plan_again(self) -> tuple[PlanDifference, ...]:
        """Probe the machine again and plan; collective, and no call may be under way. Returns what is different."""
        before = self.protocol.plans
        wanted = self.options.topology or self.settings.topo_file or None
        probed = gather(self.private, self.node, measure=wanted is None)
        if wanted is None:
            self.machine = probed
        if self.gpus is not None:
            facts = probe(self.gpus.gpu.bus_id)
            found = gather_gpus(self.private, self.node, facts).topology
            if found is not None:
                found = with_net(applied(self.private, found, facts, cache_dir()), net_rates(probed))
            machine = found if wanted is None and found is not None else self.gpus.machine
            self.gpus.take(machine, self._gpu_plans(machine, self.gpus.gpu, self.gpus.emulated))
        self.plans = self._host_plans()
        changes = plan_differences(before, self.protocol.plans)
        for change in changes if self.rank == 0 else ():
            text = f"{change.collective} {change.what}: {change.one or 'none'} -> {change.other or 'none'}"
            log(self.settings, "INFO", f"new plan: {text.strip()}")
        return changes

    # ---- what a call asks

    @property
    def protocol(self) -> CudaContext | Ground:
        """What the machine, plans and rules of this job are asked of: the GPUs, if every rank has one."""
        return self.gpus or self

    def rule(self, call: Call, *, blocking: bool = True) -> Rule:
        """The row of the table that a call takes. Non-blocking calls never go to MPI, nor what it does not do alike."""
        rule = choose(self.plans, call)
        if rule.scheme == "mpi" and not (blocking and in_mpi(call)):
            rows = [r for r in self.plans.rules if r.collective == call.collective and r.scheme != "mpi"]
            rule = min(rows, key=lambda r: r.min_bytes) if rows else rule
        return rule

    def program(self, call: Call, rule: Rule) -> Program:
        """The checked program of a call."""
        budget = self.transport.arena_bytes
        nodes = () if self.one_node else self.nodes
        return program_for(self.plans, call, rule, budget_bytes=budget, nodes=nodes)

    def child(self, ranks: list[int]) -> tuple[Options, Topology | None]:
        """For a communicator of some of our ranks, in this order: its options, and its part of the machine."""
        part = self.machine.subset(ranks) if self.one_node else None
        nodes = () if self.one_node else tuple(self.nodes[r] for r in ranks)
        return replace(self.options, topology=part if self.emulated else None, plan=None, nodes=nodes), part

    def close(self) -> None:
        """Free everything; collective."""
        if self.gpus is not None:
            self.gpus.close(collectively=True)
            self.gpus = None
        self.transport.close()
        self.node.Free()
        self.private.Free()

    # ---- the log

    def _once(self, text: str, level: str = "WARN") -> None:
        """Log a text the first time."""
        if text not in self._shown:
            self._shown.add(text)
            log(self.settings, level, text)

    def _once_on_rank_0(self, text: str, level: str) -> None:
        if self.rank == 0:
            self._once(text, level)
