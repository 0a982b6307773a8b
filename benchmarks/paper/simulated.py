"""What the figures share: simulated times of packings, and NCCL's rings on the same GPUs.

Nothing here was measured: times are the cost model's (``blinkmpi/program/cost_model.py``).
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from benchmarks.planner.methods import head
from blinkmpi.bench.environment import versions
from blinkmpi.errors import TopologyError
from blinkmpi.planning.defaults import rule_of
from blinkmpi.planning.plan import chunk_for
from blinkmpi.planning.subsets import PCIE_MBPS, connected
from blinkmpi.program.call import Call
from blinkmpi.program.cost_model import price
from blinkmpi.program.lower import lower
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees.packing import pack
from blinkmpi.trees.tree import ROOTED, Packing

FEWEST = 3  # GPUs: of two, there is no choice
DGX_1 = ("dgx-1v", "dgx-1p")
NAMES = {"dgx-1v": "DGX-1V", "dgx-1p": "DGX-1P"}
GREY = "#c9c9c9"  # of NCCL's rings in every picture
MIB = 1 << 20


def result(name: str, **facts: Any) -> dict[str, Any]:
    """A figure's result file: commit, date, machine and versions, then its facts."""
    known = {what: version for what, version in versions("", None).items() if version}
    known["scipy"] = metadata.version("scipy")
    return {**head(f"paper-{name}"), "versions": known, "simulated": True, **facts}


def call_of(packing: Packing, nbytes: int) -> Call:
    """The call of a packing for a vector of so many bytes, float32."""
    collective = packing.collective
    op, root = "sum" if collective == "allreduce" else "", packing.root if collective in ROOTED else -1
    return Call(collective, packing.n, (nbytes // 4,), "float32", op, root)


def seconds_of(packing: Packing, part: Topology, nbytes: int, *, chunk: int | None = None) -> float:
    """Simulated seconds of a call.

    Args:
        nbytes: of the vector, float32.
        chunk: bytes; by default the best that the cost model finds, as a plan has it.
    """
    call = call_of(packing, nbytes)
    rule = rule_of(packing, part, call)
    program = lower(packing, call, chunk_bytes=chunk or chunk_for(packing, call, rule), depth=rule.depth)
    return price(program, packing, part).seconds


class RingsOf(NamedTuple):
    """NCCL's rings on a set of GPUs: the links that they use, their rate in GB/s, and seconds by bytes."""

    links: str
    gbps: float
    seconds: Callable[[int], float]


def nccl_rings(part: Topology, collective: str) -> RingsOf:
    """Rings of NVLinks, or, where there are none, a ring over PCIe at its usual rate without any latency."""
    try:
        packing = pack(part, collective, method="rings")
    except TopologyError:
        rate = PCIE_MBPS * 1e6
        if collective == "allreduce":
            rate = rate * part.n / (2 * (part.n - 1))
        return RingsOf("PCIe", rate / 1e9, lambda nbytes: nbytes / rate)
    return RingsOf("NVLink", float(packing.rate) / 1000, lambda nbytes: seconds_of(packing, part, nbytes))


def sets_of(name: str) -> Iterator[tuple[Topology, tuple[int, ...], int]]:
    """The unique connected sets of 3 GPUs and more of a DGX-1, on NVLink alone, and how often each occurs."""
    whole, found = connected(machine(name))
    for some in found:
        if len(some.ranks) >= FEWEST:
            yield whole.subset(some.ranks), some.ranks, some.alike


def names_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """``1,4,5,6`` for each row."""
    return [",".join(map(str, row["gpus"])) for row in rows]
