"""The simulated AllReduce with sums in switches beside published ones: ``python benchmarks/planner/in_switch.py``.

For each figure of ``published_nvls.json`` it plans and simulates an AllReduce of 4 GiB on the same machine: trees of
copies, and with sums in the switches. Links have the rate of their data sheet, or what NCCL's own tuning takes for an
NVLink after its protocol. Nothing is measured: the machine that this project measures on forbids NVLink multicast.

Writes ``results/treegen-in-switch.json``.
"""

import json
import sys
from pathlib import Path
from typing import Any

from methods import written

from blinkmpi.bench.nccl_tests import call_of_size
from blinkmpi.planning.defaults import rule_of
from blinkmpi.planning.plan import chunk_for
from blinkmpi.program.cost_model import price
from blinkmpi.program.lower import lower
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees.in_switch.packing import pack_in_switch
from blinkmpi.trees.packing import pack
from blinkmpi.trees.tree import Packing

HERE = Path(__file__).resolve().parent
PUBLISHED = HERE / "published_nvls.json"
RESULT = HERE.parent / "results" / "treegen-in-switch.json"
NBYTES = 4 << 30
NCCL_MBPS = {"hgx-h100": 20_600, "hgx-h200": 20_600, "gb200-nvl72": 40_100}  # of an NVLink: NCCL's src/graph/topo.h


def simulated(packing: Packing, topology: Topology) -> float:
    """The bus bandwidth of a long vector, in GB/s."""
    call = call_of_size("allreduce", topology.n, NBYTES, "float32", "sum", 0)
    rule = rule_of(packing, topology, call)
    program = lower(packing, call, chunk_bytes=chunk_for(packing, call, rule), depth=rule.depth)
    return price(program, packing, topology).algbw * call.bus_factor


def beside(figure: dict[str, Any]) -> dict[str, Any]:
    """A published figure, and ours at the listed rate of an NVLink and at NCCL's."""
    listed = machine(figure["machine"]).subset(range(figure["gpus"]))
    rates = {"listed": listed, "nccl": listed.at_rate("nvlink", NCCL_MBPS[figure["machine"]])}
    ours = {
        name: {"without": simulated(pack(t, "allreduce"), t), "with": simulated(pack_in_switch(t), t)}
        for name, t in rates.items()
    }
    return {**figure, "simulated": ours}


def main(argv: list[str] | None = None) -> int:
    """Simulate all rows and write the file."""

    def made() -> dict[str, Any]:
        figures = json.loads(PUBLISHED.read_text())["figures"]
        return {"nbytes": NBYTES, "rows": [beside(figure) for figure in figures]}

    written(__doc__, argv, RESULT, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
