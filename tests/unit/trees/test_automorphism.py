"""Symmetries of a machine: what is planned for one root is turned onto the others."""

from itertools import product

import pytest

from blinkmpi.topology import machine, modify
from blinkmpi.topology.model import Device, Link, Topology
from blinkmpi.trees import pack, verify
from blinkmpi.trees.graph.automorphism import automorphism, moved_by
from blinkmpi.trees.graph.fabric import fabric
from blinkmpi.trees.on_links import METHODS
from blinkmpi.trees.problem import Problem, Solution
from tests.unit.trees.rails import rails


@pytest.mark.parametrize("topology", [rails(3, 4), machine("dgx-a100:2"), machine("mi250:2"), machine("hgx-h100")])
def test_a_turn_keeps_all_links(topology: Topology) -> None:
    f = fabric(topology, topology.kinds())
    found = 0
    for start, to in product(range(topology.n), repeat=2):
        image = automorphism(f, start, to)
        if image is None:
            continue
        found += 1
        assert image[start] == to
        assert sorted(image) == sorted(image.values()) == sorted(f.vertices)
        assert {(image[u], image[v]): c for (u, v), c in f.arcs.items()} == f.arcs
    assert found >= topology.n * len(topology.nodes)


def test_what_looks_different_is_not_turned() -> None:
    slow = rails(3, 4, slow=5)
    f = fabric(slow, slow.kinds())
    assert all(automorphism(f, start, 5) is None for start in set(range(12)) - {5})
    assert automorphism(f, 5, 5) is not None
    apart = modify(machine("dgx-1v"), gpus="0-4")
    assert automorphism(fabric(apart, ["nvlink"]), 0, 4) is None


def test_a_packing_is_planned_once_for_all_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    flows = METHODS["flows"]

    def plan(problem: Problem) -> Solution | str:
        asked.append((problem.collective, problem.root))
        return flows.plan(problem)

    monkeypatch.setitem(METHODS, "flows", flows._replace(plan=plan))
    n, steps = 18, (1, 5)
    ends = [(r, (r + step) % n) for r in range(n) for step in steps]
    links = tuple(Link(a, b, "nvlink", 1, 25_000) for u, v in ends for a, b in ((u, v), (v, u)))
    topology = Topology("circulant", tuple(Device("gpu", 0, r) for r in range(n)), (), links)
    for collective in ("reduce", "broadcast"):
        for root in range(topology.n):
            packing = pack(topology, collective, root=root)
            assert packing.optimal
            assert {tree.root for tree in packing.trees} == {root}
            assert verify(packing, topology) == packing
    assert asked == [("broadcast", 0)]


def test_turned_trees_are_the_same_trees() -> None:
    topology = rails(3, 4)
    packing = pack(topology, "broadcast", root=2)
    image = automorphism(fabric(topology, topology.kinds()), 2, 7)
    assert image is not None
    back = {there: here for here, there in image.items()}
    moved = moved_by(packing.trees, image)
    assert {tree.root for tree in moved} == {7}
    assert moved_by(moved, back) == packing.trees
