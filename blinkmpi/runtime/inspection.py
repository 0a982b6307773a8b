"""What a Communicator answers: its machine, its plans, and how a call will run, why and how fast.

No call is made here. What follows from machine and plan alone is said by
``explain`` and ``simulate``, which need no MPI; here stands what only the live
job can add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..planning.diff import PlanDifference
from ..planning.explain import explain, plan_line
from ..planning.plan import Plan, chunk_for
from ..program.call import BLOCKED, REDUCTIONS, Call, collective_named
from ..program.cost_model import price
from ..program.reduction import dtype_of
from ..topology import Topology
from ..transport.cuda.device import Gpu
from ..trees.tree import ROOTED, Collective
from .buffers import foreign, op_name
from .dispatch import Engine


class Answers:
    """The part of a Communicator that answers the user's questions, by what its engine knows."""

    if TYPE_CHECKING:

        def _engine(self) -> Engine:
            """What stands behind the communicator, which has this; ArgumentError if it is freed."""

    @property
    def machine(self) -> Topology:
        """The machine of this job, as found or as told: of its GPUs, if every rank has one."""
        return self._engine().protocol.machine

    @property
    def plans(self) -> Plan:
        """Every packing of this job and the selection table."""
        return self._engine().protocol.plans

    def replan(self) -> tuple[PlanDifference, ...]:
        """Probe the machine again, plan again and go on with the new plan; collective.

        Returns what is different, as ``blinkmpi plan --diff`` shows it; nothing if the machine is as it was.
        """
        return self._engine().replan()

    @property
    def gpu(self) -> Gpu | None:
        """This rank's GPU, if every rank has one."""
        gpus = self._engine().gpus
        return gpus.gpu if gpus else None

    @property
    def executor(self) -> str:
        """What executes our programs on the ranks of this job, and what was measured of it."""
        engine = self._engine()
        if engine.gpus:
            return f"CUDA kernels on {engine.gpus.gpu.name}"
        return engine.transport.executor_reason

    def explain(
        self, collective: str, nbytes: int = 1 << 20, *, dtype: str = "float32", op: Any = "sum", root: int = 0
    ) -> str:
        """Say which scheme a call of ``nbytes`` takes, why, how fast it could be, and what was rejected."""
        engine = self._engine()
        if why := foreign(op):
            return f"{collective}: MPI's own collective, because {why}"
        call = call_of(engine.n, collective, nbytes, dtype, op, root)
        live = [self.executor]
        if engine.gpus and engine.gpus.here:
            live.append(f"between nodes: chunks are {engine.gpus.crossing}")
        if engine.gpus and engine.gpus.emulated:
            live.append(f"emulated: the trees of {engine.machine.name} on other GPUs, every link paced to its rate")
        elif engine.emulated and not engine.gpus:
            live.append(
                f"emulated: the trees of {engine.machine.name} on CPU ranks; times are predictions for that machine"
            )
        protocol = engine.protocol
        return explain(protocol.plans, protocol.machine, call, rule=protocol.rule(call), live=live)

    def plan_line(self, collective: str, root: int = 0) -> str:
        """The packing that large vectors take, in one line: trees, rate, bound."""
        engine = self._engine()
        name = collective_named(collective)
        scheme = engine.protocol.plans.rule(name, 1 << 62).scheme
        if scheme == "mpi":
            return f"{name}: MPI's own, by BLINKMPI_ALGO"
        return plan_line(engine.protocol.plans.packing(name, root, scheme))

    def how(
        self, collective: str, nbytes: int, *, dtype: str = "float32", op: Any = "sum", root: int = 0
    ) -> dict[str, Any]:
        """The choice for a call, as data: scheme, executor, chunk_bytes, depth, reason."""
        engine = self._engine()
        why = foreign(op)
        if why:
            return {"scheme": "mpi", "executor": "mpi", "chunk_bytes": 0, "depth": 0, "reason": why}
        call = call_of(engine.n, collective, nbytes, dtype, op, root)
        protocol = engine.protocol
        rule, chunk = protocol.rule(call), 0
        if rule.scheme != "mpi":
            chunk = chunk_for(protocol.plans.packing(call.collective, call.root, rule.scheme), call, rule.chunk_bytes)
        executor = "cuda" if engine.gpus else engine.transport.executor
        return {
            "scheme": rule.scheme,
            "executor": "mpi" if rule.scheme == "mpi" else executor,
            "protocol": rule.protocol,
            "ctas": rule.ctas,
            "chunk_bytes": chunk,
            "depth": rule.depth,
            "reason": rule.reason,
        }

    def predict(
        self, collective: str, nbytes: int, *, dtype: str = "float32", op: Any = "sum", root: int = 0
    ) -> tuple[float | None, float | None]:
        """(predicted seconds, seconds that the bound allows) for a call; None where the plan has no say."""
        engine = self._engine()
        if foreign(op):
            return None, None
        call = call_of(engine.n, collective, nbytes, dtype, op, root)
        protocol = engine.protocol
        rule = engine.rule(call, blocking=False) if protocol is engine else protocol.rule(call)
        packing = protocol.plans.packing(call.collective, call.root, rule.scheme)
        program = protocol.program(call, rule)
        bound = call.total * dtype_of(call.dtype).itemsize / float(packing.bound * 10**6) if packing.bound else None
        return price(program, packing, protocol.machine).seconds, bound


def call_of(n: int, collective: str, nbytes: int, dtype: str, op: Any, root: int) -> Call:
    """The call of ``n`` ranks that moves ``nbytes`` in its largest buffer."""
    kind: Collective = collective_named(collective)
    count = nbytes // dtype_of(dtype).itemsize
    name = op_name(op)
    blocks = count // n if kind in BLOCKED else count
    counts = (blocks,) * (n if kind == "reduce_scatter" else 1)
    return Call(kind, n, counts, dtype, name if kind in REDUCTIONS else "", root if kind in ROOTED else -1)
