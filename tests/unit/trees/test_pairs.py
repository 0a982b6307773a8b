"""AllReduce by pairs of trees, one to a root and another from it, on links of unequal directions."""

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import permutations

import networkx as nx
import numpy as np
import pytest
from msgspec.structs import replace

from blinkmpi.errors import PlanError, TopologyError
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose, program_for
from blinkmpi.program.cost_model import price
from blinkmpi.program.interpreter import run
from blinkmpi.topology.model import Device, Link, Topology
from blinkmpi.trees import methods, pack, verify
from blinkmpi.trees.tree import Edge, Packing
from tests.unit.trees.packings import even_call, reference, sends_of

RING3 = "0>1:25 1>2:25 2>0:25"


def directed(text: str) -> Topology:
    """A machine from "0>1:25 1>0:50": GB/s of links that lead one way."""
    arcs = [(int(part[0]), int(part[2]), int(part[4:])) for part in text.split()]
    n = 1 + max(max(u, v) for u, v, _ in arcs)
    links = tuple(Link(u, v, "nvlink", 1, 1000 * gbps) for u, v, gbps in arcs)
    return Topology("directed", tuple(Device("gpu", 0, i) for i in range(n)), (), links)


def random_machine(seed: int) -> Topology:
    """Up to seven ranks that reach each other, over links that are drawn for each direction alone."""
    rng = random.Random(seed)
    while True:
        n = rng.randint(2, 7)
        arcs = [(u, v, rng.choice((0, 0, 1, 2, 3, 4))) for u, v in permutations(range(n), 2)]
        graph = nx.DiGraph([(u, v) for u, v, c in arcs if c])
        if len(graph) == n and nx.is_strongly_connected(graph):
            return directed(" ".join(f"{u}>{v}:{c}" for u, v, c in arcs if c))


@pytest.mark.parametrize("seed", range(40))
def test_a_machine_of_unequal_directions_reaches_its_bound(seed: int) -> None:
    topology = random_machine(seed)
    packing = pack(topology, "allreduce")
    assert packing.optimal, packing.reason
    if len(methods(topology, "allreduce")) > 1:  # else no other has a plan at all
        others = [pack(topology, "allreduce", method=name) for name in methods(topology, "allreduce")[1:]]
        assert all(other.rate <= packing.rate for other in others)


def test_pairs_gain_where_directions_differ() -> None:
    """A link that is fast one way alone, and a ring that goes one way."""
    topology = directed("0>1:50 1>0:10 1>2:50 2>1:10 2>0:50 0>2:10")
    pairs, best_of_others = pack(topology, "allreduce"), pack(topology, "allreduce", method="exact")
    assert pairs.scheme == "pairs"
    assert pairs.rate > 2 * best_of_others.rate
    ring = pack(directed(RING3), "allreduce")
    assert ring.rate == ring.bound == Fraction(3, 4) * 25_000
    with pytest.raises(TopologyError, match=r"they fall into GPU 0 \| GPU 1"):
        pack(directed("0>1:25 1>2:25 0>2:25"), "allreduce")


@pytest.mark.parametrize("text", [RING3, "0>1:50 1>0:10 1>2:30 2>1:10 2>3:50 3>2:20 3>0:10 0>3:10"])
def test_every_collective_has_a_plan_and_right_results(text: str) -> None:
    topology = directed(text)
    plan = make_plan(topology)
    for kind in ("allreduce", "barrier", "broadcast", "reduce_scatter", "alltoall", "scan"):
        call = even_call(kind, topology.n, 1000)
        rule = choose(plan, call)
        program = program_for(plan, call, rule)
        sends = sends_of(call, np.random.default_rng(7))
        for got, want in zip(run(program, sends), reference(call, sends), strict=True):
            assert (got is None and want is None) or (got == want).all()
        if kind == "allreduce":
            long = even_call(kind, topology.n, 1 << 26)
            rule = choose(plan, long)
            assert rule.scheme == "pairs"
            packing = plan.packing(kind, -1, rule.scheme)
            cost = price(program_for(plan, long, rule), packing, topology)
            assert 0.9 < cost.algbw / float(packing.rate / 1000) <= 1
    assert type(plan).from_json(plan.to_json()).check(topology) == plan


def swapped(p: Packing, change: Callable[[tuple[Edge, ...]], tuple[Edge, ...]]) -> Packing:
    """With other edges on the first tree's way up."""
    first, *rest = p.trees
    return replace(p, trees=(replace(first, up=change(first.up)), *rest))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda up: up[1:], "does not reach ranks"),
        (lambda up: up[::-1], "is not reached yet"),
        (lambda up: (*up, up[-1]), "that the tree does not have yet"),
        (lambda up: (replace(up[0], path=up[0].path[::-1]), *up[1:]), "must begin and end with the edge's ranks"),
        (lambda up: tuple(Edge(e.dst, e.src, e.path[::-1]) for e in up), "not"),
        (lambda _: (), "uses link"),
    ],
)
def test_a_pair_that_was_tampered_with_is_refused(
    change: Callable[[tuple[Edge, ...]], tuple[Edge, ...]], text: str
) -> None:
    topology = directed(RING3)
    packing = pack(topology, "allreduce")
    assert verify(packing, topology) == packing
    with pytest.raises(PlanError, match=text):
        verify(swapped(packing, change), topology)


def test_another_way_up_is_for_allreduce_alone() -> None:
    topology = directed("0>1:25 1>0:25")
    packing = pack(topology, "broadcast")
    tree = packing.trees[0]
    with pytest.raises(PlanError, match="another tree up"):
        verify(replace(packing, trees=(replace(tree, up=tree.upward),)), topology)
