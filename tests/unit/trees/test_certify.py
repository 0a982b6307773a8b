"""Bounds against brute force that shares no code with them: all cuts, all partitions, random small machines."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import combinations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.topology.model import Device, Link, Switch, Topology
from blinkmpi.trees import pack
from blinkmpi.trees.bounds.certify import certify, quick
from blinkmpi.trees.bounds.prices import cheapest
from blinkmpi.trees.graph import cuts, cuts_by_flow
from blinkmpi.trees.graph.cuts import min_cut, ratio_cut
from blinkmpi.trees.graph.fabric import fabric
from blinkmpi.trees.graph.max_flow import MaxFlow

ONE_WAY = ("broadcast", "reduce", "allgather", "reduce_scatter", "gather", "scatter")


@st.composite
def machines(draw: st.DrawFn, *, most: int, symmetric: bool, switches: int = 0) -> Topology:
    """A connected machine: a random spanning tree and more links, lanes of 1 to 4."""
    n = draw(st.integers(2, most))
    vertices = n + draw(st.integers(0, switches))
    pairs = {(draw(st.integers(0, v - 1)), v) for v in range(1, vertices)}
    pairs |= set(draw(st.lists(st.sampled_from(list(combinations(range(vertices), 2))), max_size=2 * vertices)))
    links = []
    for u, v in sorted(pairs):
        there = draw(st.integers(1, 4))
        back = there if symmetric else draw(st.integers(1, 4))
        links += [Link(u, v, "nvlink", there, 7), Link(v, u, "nvlink", back, 7)]
    devices = tuple(Device("gpu", 0, i) for i in range(n))
    return Topology("random", devices, (Switch("nvswitch", 0),) * (vertices - n), tuple(links))


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    head, *tail = items
    for classes in partitions(tail):
        yield [[head], *classes]
        for i, c in enumerate(classes):
            yield [*classes[:i], [head, *c], *classes[i + 1 :]]


def leaving(t: Topology, side: set[int]) -> int:
    return sum(k.mbps for k in t.links if k.src in side and k.dst not in side)


def brute_force(t: Topology, collective: str, root: int) -> Fraction:
    vertices = t.n + len(t.switches)
    best = None
    for mask in range(1, (1 << vertices) - 1):
        side = {v for v in range(vertices) if mask >> v & 1}
        ranks = {v for v in side if v < t.n}
        outside = set(range(vertices)) - side
        if not ranks or len(ranks) == t.n:
            continue
        value = None
        if (collective == "broadcast" and root in side) or (collective == "reduce" and root in outside):
            value = Fraction(leaving(t, side))
        elif collective == "allgather" or (collective == "gather" and root in outside):
            value = Fraction(leaving(t, side) * t.n, len(ranks))
        elif collective == "reduce_scatter" or (collective == "scatter" and root in outside):
            value = Fraction(leaving(t, outside) * t.n, len(ranks))
        if value is not None and (best is None or value < best):
            best = value
    assert best is not None
    return best


def brute_force_partition(t: Topology) -> Fraction:
    """Least of half the capacity between classes (both ways) over classes - 1; no switches."""
    values = []
    for classes in partitions(list(range(t.n))):
        if len(classes) > 1:
            values.append(Fraction(sum(leaving(t, set(c)) for c in classes), 2 * (len(classes) - 1)))
    return min(values)


def stated(t: Topology, collective: str, root: int, limits: Mapping[str, int] | None = None) -> Fraction:
    """The bound, with other limits of the methods by which cuts are found."""
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in (limits or {}).items():
            patch.setattr(cuts if name == "MAX_VERTICES" else cuts_by_flow, name, limit)
        c = certify(fabric(t, ["nvlink"]), collective, root)
    return c.capacity_mbps / c.divisor


@settings(max_examples=40, deadline=None)
@given(machines(most=6, symmetric=False, switches=1), st.sampled_from(ONE_WAY), st.integers(0, 99))
def test_cut_bounds_equal_brute_force(t: Topology, collective: str, pick: int) -> None:
    root = pick % t.n
    assert stated(t, collective, root) == brute_force(t, collective, root)


@settings(max_examples=40, deadline=None)
@given(machines(most=6, symmetric=False))
def test_allreduce_bound_equals_all_partitions(t: Topology) -> None:
    assert stated(t, "allreduce", 0) == brute_force_partition(t)


@settings(max_examples=25, deadline=None)
@given(machines(most=5, symmetric=False, switches=2), st.sampled_from(ONE_WAY), st.integers(0, 99))
def test_flows_and_cut_vectors_agree(t: Topology, collective: str, pick: int) -> None:
    root = pick % t.n
    by_vector = stated(t, collective, root)
    assert stated(t, collective, root, {"MAX_VERTICES": 0}) == by_vector


@settings(max_examples=25, deadline=None)
@given(machines(most=6, symmetric=False, switches=1))
def test_partitions_by_flows_and_by_vectors_agree(t: Topology) -> None:
    exact = stated(t, "allreduce", 0)
    assert stated(t, "allreduce", 0, {"MAX_VERTICES": 0}) == exact


@settings(max_examples=25, deadline=None)
@given(machines(most=6, symmetric=False, switches=2), st.sampled_from([*ONE_WAY, "allreduce"]), st.integers(0, 99))
def test_flows_in_python_integers_agree(t: Topology, collective: str, pick: int) -> None:
    root = pick % t.n
    by_vector = stated(t, collective, root)
    assert stated(t, collective, root, {"MAX_VERTICES": 0, "FLOW_LIMIT": 0}) == by_vector


@settings(max_examples=25, deadline=None)
@given(machines(most=6, symmetric=False, switches=2), st.sampled_from([*ONE_WAY, "allreduce"]), st.integers(0, 99))
def test_likely_bound_is_a_bound(t: Topology, collective: str, pick: int) -> None:
    root = pick % t.n
    c = quick(fabric(t, ["nvlink"]), collective, root)
    assert c.capacity_mbps / c.divisor >= stated(t, collective, root)


@settings(max_examples=25, deadline=None)
@given(machines(most=6, symmetric=False, switches=1))
def test_cut_functions_return_their_own_cut(t: Topology) -> None:
    f = fabric(t, ["nvlink"])
    cap = f.matrix()
    for mask, units in (min_cut(cap, t.n, 0), ratio_cut(cap, t.n, None)):
        side = {v for i, v in enumerate(f.vertices) if mask >> i & 1}
        assert leaving(t, side) == units * f.unit


@settings(max_examples=30, deadline=None)
@given(machines(most=7, symmetric=False))
def test_flow_equals_its_cut_and_its_paths(t: Topology) -> None:
    flow = MaxFlow(t.n)
    for k in t.links:
        flow.arc(k.src, k.dst, k.mbps)
    value = flow.run(0, t.n - 1)
    assert value == leaving(t, flow.source_side(0))
    paths = list(flow.paths(0, t.n - 1))
    assert sum(amount for _, amount in paths) == value
    for path, _ in paths:
        assert (path[0], path[-1]) == (0, t.n - 1)
        assert len(set(path)) == len(path)


def test_certificate_reads_like_a_sentence() -> None:
    links = [Link(a, b, "nvlink", 2, 25000) for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))]
    links += [Link(a, b, "nvlink", 1, 25000) for a, b in ((2, 3), (3, 2))]
    t = Topology("path", tuple(Device("gpu", 0, i + 4) for i in range(4)), (), tuple(links))
    assert pack(t, "broadcast").certificate.text == "GPU 7 | GPUs 4,5,6: 1 nvlink lane, 25 GB/s"


# ---------------------------------------------------------------- prices, by networkx


def cheapest_by_networkx(t: Topology, prices: Mapping[tuple[int, int], int], collective: str, root: int) -> Fraction:
    """The cost of the cheapest trees, by shortest paths and arborescences that share no code with ours."""
    links = nx.DiGraph()
    links.add_nodes_from(range(t.n))
    links.add_weighted_edges_from((k.src, k.dst, prices.get((k.src, k.dst), 0)) for k in t.links)
    hops = nx.DiGraph()
    for u in range(t.n):
        for v in set(range(t.n)) - {u}:
            between = links.subgraph([u, v, *range(t.n, t.n + len(t.switches))])  # ranks do not forward
            if nx.has_path(between, u, v):
                hops.add_edge(u, v, weight=nx.shortest_path_length(between, u, v, weight="weight"))

    def tree(graph: nx.DiGraph, top: int) -> int:
        """By the heaviest branching of what is left of a lot; minimum_spanning_arborescence of 3.6 misses some."""
        left = nx.DiGraph()
        left.add_weighted_edges_from((u, v, 1000 - cost) for u, v, cost in graph.edges(data="weight") if v != top)
        found = nx.maximum_branching(left)
        assert found.number_of_edges() == t.n - 1
        return int(sum(1000 - weight for *_, weight in found.edges(data="weight")))

    towards = hops.reverse()
    match collective:
        case "broadcast" | "reduce":
            return Fraction(tree(hops if collective == "broadcast" else towards, root))
        case "allgather" | "reduce_scatter":
            return Fraction(sum(tree(hops if collective == "allgather" else towards, r) for r in range(t.n)), t.n)
    return Fraction(min(tree(hops, r) + tree(towards, r) for r in range(t.n)))


@given(machines(most=6, symmetric=False, switches=3), st.data())
@settings(max_examples=60, deadline=None)
def test_the_cheapest_trees_cost_what_networkx_says(t: Topology, data: st.DataObject) -> None:
    """What prices prove, they prove by this cost; ours finds prices and checks them by one function."""
    f = fabric(t, ["nvlink"])
    prices = {arc: data.draw(st.integers(0, 9)) for arc in f.arcs}
    collective = data.draw(st.sampled_from(("broadcast", "reduce", "allgather", "reduce_scatter", "allreduce")))
    root = data.draw(st.integers(0, t.n - 1))
    assert cheapest(f, collective, root, prices) == cheapest_by_networkx(t, prices, collective, root)
