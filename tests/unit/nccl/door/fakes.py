"""Ranks that are alone in their process, on GPUs that are none: what each would tell the others, all would tell."""

from benchmarks.fake.gpu import FakeDriver, FakeGpu
from blinkmpi.planning.on_demand import PlanOnDemand
from blinkmpi.planning.planner import make_plan
from blinkmpi.runtime.cuda.context import CudaContext
from blinkmpi.topology import machine, modify


class Alike:
    """A communicator whose ranks all bring the same."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def allgather_bytes(self, body: bytes) -> list[bytes]:
        return [body] * self.size

    def bcast_bytes(self, body: bytes, root: int) -> bytes:
        return body

    def Barrier(self) -> None:
        """All are here."""


def fake_context(driver: FakeDriver, rank: int, n: int) -> CudaContext:
    """The GPUs of a communicator on an H200 machine, as one rank has them."""
    topology = modify(machine("hgx-h200"), gpus=",".join(map(str, range(n))))
    comm = Alike(rank, n)
    plans = PlanOnDemand(comm, topology, make_plan(topology, gpus="onehop"))
    return CudaContext(comm, FakeGpu(driver), topology, plans, emulated=False, say=lambda text, level: None)  # type: ignore[arg-type]
