"""The catalogue against the numbers that its sources state."""

from collections import Counter

import networkx as nx
import pytest
from networkx.algorithms.isomorphism import GraphMatcher, numerical_edge_match

from blinkmpi.errors import TopologyError
from blinkmpi.topology import Topology, machine, names

ONE_BOX = [name for name in names() if name != "cpu"]

# xGMI links of RCCL's topology model topo_16p1h: eight MI250 packages numbered by PCI bus.
RCCL_16P1H = (
    "0-1:4 0-2:1 0-4:2 1-2:1 1-3:1 1-5:1 2-3:4 2-6:1 3-7:2 4-5:4 4-12:1 5-13:1 5-14:1 6-7:4 6-13:1 6-14:1 "
    "7-15:1 8-9:4 8-10:1 8-12:2 9-10:1 9-11:1 9-13:1 10-11:4 10-14:1 11-15:2 12-13:4 14-15:4"
)


def graph(topology: Topology) -> "nx.DiGraph[int]":
    made: nx.DiGraph[int] = nx.DiGraph()
    made.add_nodes_from(range(topology.n + len(topology.switches)))
    made.add_edges_from((k.src, k.dst) for k in topology.links)
    return made


def out_mbps(topology: Topology, kind: str) -> list[int]:
    total = [0] * topology.n
    for k in topology.links:
        if k.kind == kind and k.src < topology.n:
            total[k.src] += k.mbps
    return total


@pytest.mark.parametrize("spec", [*names(), *(f"{name}:3" for name in names())])
def test_every_machine_is_whole(spec: str) -> None:
    made = machine(spec)
    assert made.check() is made
    assert made.name == spec
    assert made.source
    assert {k.origin for k in made.links} == {"table"}
    assert nx.is_strongly_connected(graph(made)), "a device or switch hangs loose"
    forth = Counter((k.src, k.dst, k.kind, k.mbps) for k in made.links)
    back = Counter((k.dst, k.src, k.kind, k.mbps) for k in made.links)
    assert forth == back, "rates differ between directions"


@pytest.mark.parametrize(("spec", "devices", "kind", "mbps"), [
    ("dgx-1p", 8, "nvlink", 4 * 20_000), ("dgx-1v", 8, "nvlink", 6 * 25_000), ("dgx-2", 16, "nvlink", 6 * 25_000),
    ("dgx-a100", 8, "nvlink", 12 * 25_000), ("hgx-h100", 8, "nvlink", 18 * 25_000),
    ("hgx-h200", 8, "nvlink", 18 * 25_000), ("pcie-8", 8, "pcie", 31_500), ("mi250", 16, "xgmi", 7 * 50_000),
    ("dgx-1v", 8, "pcie", 15_750), ("cpu:5", 5, "memory", 8_000), ("mi300x", 8, "xgmi", 7 * 64_000),
    ("b200", 8, "nvlink", 18 * 50_000), ("gb200-nvl72", 72, "nvlink", 18 * 50_000),
    ("h200-nvl", 4, "nvlink", 18 * 25_000), ("h200-nvl", 4, "pcie", 63_000),
    ("a6000-pair", 2, "nvlink", 4 * 14_062), ("rtx-3090-pair", 2, "nvlink", 4 * 14_062),
    ("rtx-3090-pair", 2, "pcie", 31_500),
])  # fmt: skip
def test_every_device_has_what_its_source_states(spec: str, devices: int, kind: str, mbps: int) -> None:
    made = machine(spec)
    assert made.n == devices
    assert out_mbps(made, kind) == [mbps] * devices


@pytest.mark.parametrize(
    ("name", "gbps"),
    [("dgx-1p", 50), ("dgx-1v", 50), ("dgx-2", 100), ("dgx-a100", 200), ("hgx-h100", 400), ("hgx-h200", 400),
     ("pcie-8", 50), ("mi250", 256), ("mi300x", 400), ("b200", 400), ("gb200-nvl72", 3600), ("h200-nvl", 100)],
)  # fmt: skip
def test_a_box_reaches_the_network_through_its_cards(name: str, gbps: int) -> None:
    boxes = machine(f"{name}:4")
    network = boxes.n + len(boxes.switches) - 1
    assert boxes.switches[-1].kind == "net"
    assert sum(k.mbps for k in boxes.links if k.dst == network) == 4 * gbps * 1000
    assert "net" not in machine(name).kinds()


@pytest.mark.parametrize("name", [n for n in ONE_BOX if n != "dgx-2"])
@pytest.mark.parametrize("box", [0, 1])
def test_boxes_are_copies(name: str, box: int) -> None:
    one, two = machine(name), machine(f"{name}:2")
    assert [d.node for d in two.devices] == [0] * one.n + [1] * one.n
    assert [d.index for d in two.devices] == 2 * list(range(one.n))
    part = two.subset(range(box * one.n, (box + 1) * one.n))
    assert part.links == one.links
    assert [s.kind for s in part.switches] == [s.kind for s in one.switches]


def test_two_gpus_of_a_dgx2_share_a_card() -> None:
    two = machine("dgx-2:2")
    part = two.only({"pcie", "net"})
    assert sum(s.kind == "pcie" for s in part.switches) == 16
    assert not any(s.kind == "pcie" for s in machine("dgx-2").switches)


def test_mi250_is_the_graph_that_rccl_models() -> None:
    ours: nx.Graph[int] = nx.Graph()
    theirs: nx.Graph[int] = nx.Graph()
    ours.add_weighted_edges_from((k.src, k.dst, k.lanes) for k in machine("mi250").links)
    for entry in RCCL_16P1H.split():
        pair, lanes = entry.split(":")
        theirs.add_edge(*map(int, pair.split("-")), weight=int(lanes))
    assert GraphMatcher(ours, theirs, edge_match=numerical_edge_match("weight", 0)).is_isomorphic()


def test_cpu_ranks_share_one_node() -> None:
    made = machine("cpu:4")
    assert made.nodes == (0,)
    assert made.memory_of(0) == 4
    assert made.kinds() == ("memory",)
    assert machine("cpu").n == 1


@pytest.mark.parametrize(("spec", "said"), [
    ("dgx1v", "'dgx-1v'"), ("DGX-A100", "'dgx-a100'"), ("h200", "'hgx-h200'"), ("zzz", "choose one of dgx-1p"),
    ("", "unknown machine ''"), ("dgx-1v:0", "1..1024"), ("dgx-1v:", "1..1024"), ("dgx-1v:-1", "1..1024"),
    ("dgx-1v:two", "write dgx-1v:4"), ("cpu:1025", "1..1024"), ("cpu:²", "1..1024"),
])  # fmt: skip
def test_a_wrong_name_or_count_says_what_would_be_right(spec: str, said: str) -> None:
    with pytest.raises(TopologyError, match=said.replace(".", r"\.")):
        machine(spec)
