"""Where the planner finds other schemes for other roots, a row of the table names one that all of them have."""

import pytest
from msgspec.structs import replace

from blinkmpi.planning.selection import choose, make_plan, program_for
from blinkmpi.program.call import Call
from blinkmpi.topology import Topology
from blinkmpi.topology.gather import ProcessInfo, cpu_topology
from blinkmpi.trees import methods


def two_nodes(*memories: int, net: int) -> Topology:
    """Two nodes of two CPU ranks: MB/s of each memory, and between the nodes."""
    parts = [ProcessInfo(f"h{r // 2}", r, f"{r // 2}", (0,), memories[r // 2], r // 2 * 2, net) for r in range(4)]
    found = cpu_topology(parts)
    return replace(found, links=tuple(replace(k, lane_mbps=net) if k.kind == "net" else k for k in found.links))


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_uneven_nodes_have_a_row_for_every_root(collective: str) -> None:
    uneven = two_nodes(1000, 3000, net=1000)
    assert len({methods(uneven, collective, root=root) for root in range(4)}) > 1  # what the test is about
    plan = make_plan(uneven)
    for root in range(4):
        call = Call(collective, 4, (1000,), "float32", "sum" if collective == "reduce" else "", root)  # type: ignore[arg-type]
        assert program_for(plan, call, choose(plan, call)).scheme == "cluster"
