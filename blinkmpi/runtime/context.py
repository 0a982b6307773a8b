"""The state of a communicator that its calls share: machine, plans, GPUs, and the transport on CPU ranks.

All ranks find, agree on and open these together, and all fail together: settings, the probed machine, the plan that
rank 0 packs, the transports. ``bootstrap`` has the steps that need no MPI. No call is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ..errors import START_AGAIN, BlinkError, DeviceError, FallbackError, PlanError, TraceError
from ..lang.algorithms import Algorithm
from ..planning.on_demand import Latest, Planned, PlanOnDemand
from ..planning.plan import ONE_SHOTS, Rule
from ..planning.slots import Gpus
from ..program.call import Call
from ..program.ir import Program
from ..topology.live import gather
from ..topology.model import Topology
from ..topology.network_rate import net_rates, with_net
from ..transport import python_stacks
from ..transport.host.capabilities import Known
from ..transport.host.host_program import HostProgram
from ..transport.host.shared_window import NO_ROOM, Place, WindowLayout
from ..transport.host.transport import HostTransport
from ..transport.network.bounded import WORK_SECONDS, Rendezvous
from ..transport.slow_waits import SlowWaits
from ..util.cache_folder import cache_dir
from ..util.lru import LRU
from ..util.settings import LogOnce, log
from ..util.together import allgather
from .bootstrap import (
    Options,
    agree_on_plan,
    agree_on_settings,
    dump_files,
    first_deadline,
    given_machine,
    own_settings,
)
from .children import SETS, Child, Group, Parent, Spares
from .cuda.setup import open_gpus
from .outlook import Outlook
from .process_exit import BEFORE_KILLED
from .ranks.interface import INSTEAD, Ranks
from .ranks.mpi import DEAD, MpiRanks

if TYPE_CHECKING:
    from ..planning.diff import PlanDifference
    from ..transport.cuda.device import Gpu
    from ..transport.tracing import CallTrace
    from .cuda.context import CudaContext


class Context(Outlook):
    """Machine, plans, GPUs and transport of one communicator.

    Args:
        meet: brings the ranks together.
        options: what the user said when making it.
        child: what is known of the ranks, if they are some of another communicator's.
    """

    host: HostTransport  # opened at the end of the bootstrap

    def __init__(self, meet: Callable[[Rendezvous], Ranks], options: Options, child: Child | None = None) -> None:
        if child is None:
            self.slow, what, deadline = SlowWaits(own_settings()), "Communicator()", first_deadline(options.timeout_s)
        else:
            self.slow, what = SlowWaits(child.parent.settings), child.first_call
            deadline = child.timeout_s or child.usual_timeout_s
        self.rendezvous = Rendezvous(what, deadline, self.slow)
        self.ranks = meet(self.rendezvous)
        self.together = self.ranks.together
        self.rank, self.n = self.together.rank, self.together.size
        self.options = options
        self.gpus: CudaContext | None = None
        self.trace: CallTrace | None = None
        self.why_no_gpus = ""
        self._parent: Parent | None = None
        self.number = 0  # its number among the communicators of the same ranks (Spares)
        self.changed = False  # whether it has another plan than its parent's children begin with
        self.customs: dict[str, Algorithm] = {}  # those that were called as Custom(), by their identity
        self.open_mpi_call = ""  # a collective of MPI's own that has begun and not ended
        self._no_cma = ""  # why the ranks of one node cannot read one another's memory
        self._answers = False
        self._answer(True)
        try:
            if child is None:
                self.ranks.introduce()
                self.settings = self.slow.settings = agree_on_settings(self.together, options)
            else:
                self.settings = child.parent.settings
            self.log_once = self.warn_once = LogOnce(self.settings)
            self.timeout_s = float(options.timeout_s or self.settings.timeout_s)
            if child is None:
                self.rendezvous.timeout_s = self.timeout_s
            else:
                self.warn_once = child.parent.warn_once
            self._bootstrap(child)
            remedy = self.ranks.remedy if child is None else child.parent.remedy
            self.say_of_loss(START_AGAIN if self._gpus_of_several_nodes else remedy)
            self.rendezvous.timeout_s = self.timeout_s
            self.rendezvous.what, self.rendezvous.met = "a first call of its kind", False
        except Exception as error:
            self._answer(False)
            self.ranks.give_up(error)
            raise

    def _bootstrap(self, child: Child | None) -> None:
        """Find the machine, plan, and open the transports."""
        try:
            if child is None:
                self.node, self.place = self.ranks.of_node(self.options, self.settings)
                self._find_machine()
                self._open_host(None, None)
            else:
                self._inherit(child)
        except BaseException as error:
            if self.gpus is not None:  # our errors are raised on all ranks, but for DEAD
                self.gpus.close(collectively=isinstance(error, BlinkError) and not isinstance(error, DEAD))
                self.gpus = None
            raise
        if self.rank == 0:
            text = f"{self.n} ranks on {self.machine.name} ({self.machine.fingerprint}); {self.host.executor_reason}"
            log(self.settings, "INFO", text)
            if self._no_cma and self.host.native and not self.settings.cma_disable:
                self.warn_once(f"two copies where one would do: {self._no_cma}")
            if full := self.host.window.full:
                self.warn_once(f"MPI's own collectives carry the calls, because {NO_ROOM if child else full}")
            if self.host.window.shrunk:
                log(self.settings, "WARN", f"/dev/shm is small: {self.host.arena_bytes} bytes of slots a rank")

    def _find_machine(self) -> None:
        """Probe the machine, or take the given one, and plan for its GPUs and its CPU ranks."""
        given = self.options.topology or self.settings.topo_file or None
        probed = gather(self.together, self.node, measure=given is None)
        self.nodes = tuple(d.node for d in probed.devices)
        self.emulated = given is not None
        self.machine = given_machine(self.together, given, self.n) if given is not None else probed
        for remark in self.machine.remarks:  # what a file's reader had to guess
            self.say(partial(str, remark), "WARN")
        self._open_gpus(net_rates(probed))
        self.planned = self._host_plans()
        found = self.gpus or self
        dump_files(self.together, self.settings, found.machine, found.plans)

    def _open_gpus(self, net: dict[int, int], *, again: bool = False) -> None:
        """Take a GPU for each rank, if there are as many; ``net`` has the rates between nodes; see ``open_gpus``."""
        self.gpus, self.why_no_gpus = open_gpus(
            self.together, self.node, self.place, self.machine if self.emulated else None,
            partial(with_net, rates=net), self._gpu_plans, self.settings, self.say,
            self.options.max_ctas or self.settings.max_ctas, again=again,
        )  # fmt: skip
        if self.gpus is not None:
            self.gpus.searches = self.options.stream is None

    def _inherit(self, child: Child) -> None:
        """Take over what the parent's ranks have found out, and open the transports."""
        parent, firsts = child.parent, child.firsts
        self.why_no_gpus = child.why_no_gpus
        if self.why_no_gpus:
            self.rendezvous.work_s = 0.0  # nobody has work to do between two exchanges
        self.nodes, self.machine, self.emulated, self.place = child.nodes, child.machine, parent.emulated, parent.place
        self.node = self.ranks.of_nodes(firsts)
        layout, at = WindowLayout(self.rank, firsts, parent.arena_bytes), -1
        if parent.file is not None and self.rank == firsts[self.rank]:
            with suppress(OSError):
                at = parent.file.place(layout.total)
        known = child.planned
        mine = known.digest if known is not None else b"", at, parent.spares.number()
        told = allgather(self.together, mine, tuple[bytes, int, int])
        self.number = told[0][2]
        place = None
        if parent.file is not None and min(told[first][1] for first in firsts) >= 0:
            visible = [parent.visible[r] for r in child.ranks]
            place = Place(parent.file, told[firsts[self.rank]][1], firsts, parent.arena_bytes, visible)
        if not self.why_no_gpus:
            self._open_gpus(net_rates(self.machine), again=True)
        self._open_host(parent.known.of(child.ranks), place)
        self.rendezvous.work_s = WORK_SECONDS  # rank 0 may have to plan
        self.planned = self._host_plans(known if len({digest for digest, _, _ in told}) == 1 else None)
        parent.plans.put(child.ranks, self.planned.latest)

    def _open_host(self, known: Known | None, place: Place | None) -> None:
        self.host = HostTransport(
            self.together,
            self.node,
            executor=self.options.executor or self.settings.executor,
            arena_bytes=self.settings.buffer_bytes,
            cma=not self.settings.cma_disable,
            cma_threads=self.settings.cma_threads,
            say=self.log_once,
            slow=self.slow,
            events=self.settings.events,
            strict=self.options.strict,
            known=known,
            place=place,
        )
        self._open_trace()
        self._no_cma = self.host.no_cma if self.one_node else ""
        wanted = self.options.executor or self.settings.executor
        why = ""
        if self.host.native is None and wanted != "numpy":
            why = f"NumPy would execute programs ({self.host.executor_reason}); install a C compiler, or say "
            why += "executor='numpy'"
        elif self._no_cma and self.host.native and not self.settings.cma_disable:
            why = f"bytes would cross in two copies, because {self._no_cma}; allow it, or set BLINKMPI_CMA_DISABLE=1"
        if why and self.options.strict:
            self.host.close()
            raise FallbackError(f"strict=True: {why}")
        if known is None:
            self.without_what_is_missing(self.planned)

    def _open_trace(self) -> None:
        """Begin to trace the calls, if the settings say so."""
        ring = self.host.recorder.ring
        if not self.settings.trace or ring is None:
            return
        from ..transport.tracing import open_trace, write_all

        BEFORE_KILLED.add(write_all)
        try:
            self.trace = open_trace(
                self.together, self.node, self.settings.trace, ring, process=self.ranks.process, say=self.log_once
            )
        except TraceError:  # on every rank
            self.host.close()
            raise

    def _host_plans(self, like: Planned | None = None) -> PlanOnDemand:
        """The plan for host memory; on a job with GPUs, what the user says of plans is about those.

        Args:
            like: what is planned for another communicator of these ranks, with which it begins.
        """
        options, settings = self.options, self.settings
        if self.gpus:
            options = replace(options, algo="", plan=None)
            settings = msgspec.structs.replace(settings, graph_file="", graph_dump_file="")
        missing = self.without_what_is_missing if hasattr(self, "host") else None
        return agree_on_plan(
            self.together, self.machine, options, settings, mpi=self.has_mpi, change=missing, like=like
        )

    def _gpu_plans(self, machine: Topology, gpu: Gpu, emulated: bool) -> PlanOnDemand:
        from ..planning.tuned_table import file_of

        table = None if emulated or not self.one_node else file_of(cache_dir(), gpu.name, machine)
        links: Gpus = "slots" if emulated else "onehop" if self.one_node else "nodes"
        return agree_on_plan(self.together, machine, self.options, self.settings, links, table)

    def replan(self) -> tuple[PlanDifference, ...]:
        """Probe the machine again and plan; collective, and no call may be under way. Returns what is different."""
        from ..planning.diff import plan_differences

        before, self.rendezvous.what, self.changed = self.main.plans, "replan()", True
        self.close_spares()  # they have the old plan
        self._parent = None
        parts, host_parts = (self.gpus.planned.parts if self.gpus else []), self.planned.parts
        given = self.options.topology or self.settings.topo_file or None
        probed = gather(self.together, self.node, measure=given is None)
        if given is None:
            self.machine = probed
        if self.gpus is not None:
            from ..topology.live import gather_gpus
            from ..topology.probe import probe
            from .cuda.setup import as_measured

            facts = probe(self.gpus.gpu.bus_id)
            found = gather_gpus(self.together, self.node, facts, per_gpu=self.settings.ranks_per_gpu).topology
            if found is not None:
                found, self.gpus.costs = as_measured(self.together, found, facts)
                found = with_net(found, net_rates(probed))
            machine = found if given is None and found is not None else self.gpus.machine
            self.gpus.take(machine, self._gpu_plans(machine, self.gpus.gpu, self.gpus.emulated).with_parts(parts))
        self.planned = self._host_plans().with_parts(host_parts)
        changes = plan_differences(before, self.main.plans)
        for change in changes if self.rank == 0 else ():
            text = f"{change.collective} {change.what}: {change.one or 'none'} -> {change.other or 'none'}"
            log(self.settings, "INFO", f"new plan: {text.strip()}")
        return changes

    # ---- what a call asks

    def cuda(self) -> CudaContext:
        """The GPUs.

        Raises:
            DeviceError: if there are none.
        """
        if self.gpus is None:
            raise DeviceError(f"this job has no GPUs: {self.why_no_gpus}")
        return self.gpus

    @property
    def has_mpi(self) -> bool:
        """Whether MPI has collectives of its own among these ranks."""
        return isinstance(self.ranks, MpiRanks)

    @property
    def mpi(self) -> MpiRanks:
        """MPI's communicators of these ranks; PlanError where there are none."""
        if not isinstance(self.ranks, MpiRanks):
            raise PlanError(f"MPI did not start these processes, so it has no collective of them; {INSTEAD}")
        return self.ranks

    def maker(self, call: Call, rule: Rule) -> Callable[[], Program]:
        """What makes the program of a call whenever it is asked for."""
        return partial(self.program, call, rule)

    def load(self, call: Call, rule: Rule) -> HostProgram:
        """The program of a call, and how to make one that reads nobody's memory."""
        loaded = self.host.load(self.maker(call, rule), rule.protocol)
        if rule.protocol in ONE_SHOTS:
            loaded.make_through_slots = self.maker(call, self.by_slots(rule))
        return loaded

    @property
    def parent(self) -> Parent:
        """What it gives to communicators of some of its ranks."""
        if self._parent is None:
            window, gpus = self.host.window, self.gpus
            plans: LRU[tuple[int, ...], Latest] = LRU(SETS)
            if not (self.options.plan or self.settings.graph_file):
                plans.put(tuple(range(self.n)), self.planned.latest)
            self._parent = Parent(
                group=Group(self.mpi.public.Get_group()),
                options=self.options,
                settings=self.settings,
                machine=self.machine,
                nodes=self.nodes,
                firsts=window.firsts,
                place=self.place,
                emulated=self.emulated,
                known=self.host.known,
                executor=self.executor,
                file=None if window.full else window.file,
                arena_bytes=window.arena_bytes,
                visible=window.pages.visible,
                gpu=gpus.gpu if gpus else None,
                gpu_machine=gpus.machine if gpus else None,
                why_no_gpus=self.why_no_gpus,
                plans=plans,
                warn_once=self.warn_once,
                spares=Spares(),
                remedy=self.host.peers.remedy,
            )
        return self._parent

    @property
    def _gpus_of_several_nodes(self) -> bool:
        """Whether no rank goes on where another one is lost (see ``shrinking``)."""
        return self.gpus is not None and bool(self.gpus.here)

    def close_spares(self) -> None:
        """Free what communicators of some of its ranks have left; collective, on every rank or on none."""
        if isinstance(self.ranks, MpiRanks):
            (self._parent.spares if self._parent is not None else Spares()).close(self.together)

    @property
    def may_be_spare(self) -> bool:
        """Whether another communicator of the same ranks can go on with all of it; the same on every rank."""
        return self.number > 0 and self.gpus is None and self.one_node and not (self.host.recorder.ring or self.changed)

    def rest(self) -> None:
        """Do nothing, until :meth:`wake`."""
        self._answer(False)
        self.host.window.rest()

    def wake(self) -> None:
        """Be there for calls again."""
        self.host.window.wake()
        self._answer(True)

    def serve(self, child: Child) -> None:
        """Be that of another communicator."""
        self.mpi.serve(child.comm)
        self.host.recorder.counters.clear()
        self.rendezvous.what, self.rendezvous.met = "a first call of its kind", False

    def _answer(self, answers: bool) -> None:
        """Whether other processes may ask this one for its stacks because of this communicator."""
        if answers != self._answers:
            self._answers = answers
            (python_stacks.open_service if answers else python_stacks.close_service)()

    def close(self) -> None:
        """Free everything; collective."""
        self.rendezvous.what, self.rendezvous.give_up = "free()", self.ranks.abandon
        self.rendezvous.check = lambda: None  # the check reads memory that is being closed
        if self.gpus is not None:
            self.gpus.close(collectively=True)
            self.gpus = None
        self.end_trace()
        self.host.close()
        self._answer(False)
        self.ranks.close()

    def drop(self) -> None:
        """Free what is this process's alone. MPI's communicators stay, because MPI frees them on all ranks together."""
        self.rendezvous.give_up, self.rendezvous.check = self.ranks.abandon, lambda: None
        self.end_trace()
        if self._parent is not None:
            self._parent.spares.discard()
        self.host.close()
        self._answer(False)

    def leave_behind(self) -> None:
        """Look at its memory no more, and tell who comes late that this rank has gone on with others. Local."""
        self.rendezvous.give_up, self.rendezvous.check = lambda _: None, lambda: None
        self.end_trace()
        self._answer(False)
        if self._parent is not None:
            self._parent.spares.discard()
            self._parent = None  # the parent refers to the memory, too
        if self.gpus is not None and self.gpus.unmapped:
            self.gpus.free()
            self.gpus = None
        if self.host.messages is None:
            self.host.close(went_on=True)

    def end_trace(self) -> None:
        """Write this rank's part of the trace, if that is not done. Local."""
        if self.trace is not None:
            self.trace.write()

    # ---- the log

    def say_of_loss(self, remedy: str) -> None:
        """Let errors say what the user can do when a rank is lost."""
        self.host.peers.remedy = self.rendezvous.remedy = remedy

    def say(self, text: Callable[[], str], level: str) -> None:
        """Log a text once, on rank 0; it is not made unless it is wanted."""
        if self.rank == 0 and self.settings.wants(level):
            self.log_once(text(), level)
