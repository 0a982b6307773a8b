"""AllReduce with sums in the switches: as fast as a linear program over all trees says, and below every cut."""

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from msgspec.structs import replace
from scipy.optimize import linprog

from blinkmpi.errors import NoPackingError, PlanError, TopologyError
from blinkmpi.topology.importers import modify
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, Switch, Topology
from blinkmpi.trees import pack
from blinkmpi.trees.graph.fabric import choose_links
from blinkmpi.trees.in_switch.packing import bound_in_switch, pack_in_switch
from blinkmpi.trees.in_switch.verify import verify_in_switch
from blinkmpi.trees.tree import Certificate, Packing
from tests.unit.trees.networks import dragonfly
from tests.unit.trees.tiers import fat_tree, leaf_spine

Arc = tuple[int, int]
GB = 1000


def drawn(seed: int, *, even: bool = True) -> Topology:
    """Two to four ranks and one to three switches, some of them sharp, on links that join all."""
    rng = random.Random(seed)
    n, s = rng.randint(2, 4), rng.randint(1, 3)
    switches = tuple(Switch("net", -1, "", j == 0 or rng.random() < 0.5) for j in range(s))
    size = n + s
    while True:
        arcs: dict[Arc, int] = {}
        for u, v in combinations(range(size), 2):
            if rng.random() < 0.6:
                arcs[u, v] = arcs[v, u] = rng.randint(1, 6)
                if not even:
                    arcs[v, u] = rng.randint(1, 6)
        links = tuple(Link(u, v, "net", c, GB) for (u, v), c in arcs.items())
        t = Topology(f"drawn {seed}", tuple(Device("gpu", 0, i) for i in range(n)), switches, links)
        try:
            f = choose_links(t, "allreduce", 0)
        except TopologyError:
            continue
        if set(t.sharp) & set(f.vertices):
            return t.check()


def all_trees(t: Topology) -> Iterator[list[tuple[int, ...]]]:
    """Every tree on the ranks and some sharp switches whose edges are simple paths over other switches."""
    near: dict[int, set[int]] = {}
    for k in t.links:
        near.setdefault(k.src, set()).add(k.dst)
    inner = set(t.sharp)

    def paths(at: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for v in near.get(at[-1], ()):
            if v < t.n or v in inner:
                if v > at[0]:
                    yield (*at, v)
            elif v not in at:
                yield from paths((*at, v))

    edges = [path for u in (*range(t.n), *inner) for path in paths((u,))]
    for count in range(t.n - 1, t.n + len(inner)):
        for some in combinations(edges, count):
            home = {v: v for v in (*range(t.n), *(v for p in some for v in (p[0], p[-1])))}

            def top(v: int, home: dict[int, int] = home) -> int:
                while home[v] != v:
                    v = home[v]
                return v

            if len(home) != count + 1:
                continue
            for p in some:
                if (a := top(p[0])) != (b := top(p[-1])):
                    home[a] = b
            if len({top(v) for v in home}) == 1:
                yield list(some)


def best_rate(t: Topology) -> float:
    """The linear program over every tree up and every tree down, with a rank or sharp switch of both as the root."""
    capacity: dict[Arc, int] = {}
    for k in t.links:
        capacity[k.src, k.dst] = capacity.get((k.src, k.dst), 0) + k.mbps
    row = {arc: i for i, arc in enumerate(capacity)}
    columns: list[np.ndarray] = []
    for tree in all_trees(t):
        near: dict[int, list[tuple[int, ...]]] = {}
        for p in tree:
            near.setdefault(p[0], []).append(p)
            near.setdefault(p[-1], []).append(p[::-1])
        for root in near:
            for up in (False, True):
                column, seen, queue = np.zeros(len(row) + t.n + len(t.switches)), {root}, [root]
                fits = True
                for u in queue:
                    for p in near[u]:
                        if p[-1] in seen:
                            continue
                        seen.add(p[-1])
                        queue.append(p[-1])
                        for arc in pairwise(p[::-1] if up else p):
                            fits = fits and arc in row
                            column[row.get(arc, 0)] += 1
                column[len(row) + root] = -1 if up else 1
                if fits:
                    columns.append(column)
    matrix = np.array(columns).T
    gain = -(matrix[len(row) :] > 0).sum(axis=0).astype(float)
    found = linprog(gain, A_ub=matrix[: len(row)], b_ub=list(capacity.values()), A_eq=matrix[len(row) :],
                    b_eq=np.zeros(t.n + len(t.switches)), method="highs")  # fmt: skip
    return float(-found.fun)


def least_cut(t: Topology) -> int:
    """The least capacity that leaves a set of vertices with some ranks and without others."""
    size, least = t.n + len(t.switches), None
    for mask in range(1, 1 << size):
        if 0 < (mask & ((1 << t.n) - 1)) < (1 << t.n) - 1:
            out = sum(k.mbps for k in t.links if mask >> k.src & 1 and not mask >> k.dst & 1)
            least = out if least is None else min(least, out)
    assert least is not None
    return least


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_on_small_machines_the_rate_is_that_of_a_linear_program_over_all_trees(seed: int) -> None:
    t = drawn(seed)
    found = pack_in_switch(t)
    assert float(found.rate) == pytest.approx(best_rate(t))
    assert found.optimal  # its own certificate says so, in fractions
    assert found.rate <= least_cut(t)


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_is_the_least_of_all_cuts(seed: int) -> None:
    t = drawn(seed, even=seed % 2 == 0)
    assert bound_in_switch(choose_links(t, "allreduce", 0)).bound == least_cut(t)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_where_directions_differ_the_bound_holds_for_trees_up_and_other_trees_down(seed: int) -> None:
    t = drawn(seed, even=False)
    found = pack_in_switch(t)
    assert float(found.rate) <= best_rate(t) * (1 + 1e-9) <= float(found.bound) * (1 + 2e-9)


@pytest.mark.parametrize("seed", range(12))
def test_sums_in_switches_are_never_slower_than_trees_of_copies(seed: int) -> None:
    t = drawn(seed)
    assert pack_in_switch(t).rate >= pack(t, "allreduce").rate


@pytest.mark.parametrize(("name", "sharp", "rate"), [
    ("hgx-h100", None, 450), ("hgx-h200", None, 450), ("b200", None, 900), ("gb200-nvl72", None, 900),
    ("hgx-h100:2", None, 400), ("hgx-h100:4", None, Fraction(800, 3)), ("hgx-h100:8", None, Fraction(1600, 7)),
    ("hgx-h100:4", "nvswitch,net", 400), ("hgx-h100:8", "nvswitch,net", 400), ("dgx-1v:4", "net", 50),
    ("hgx-h100:2", "net", 275),
])  # fmt: skip
def test_machines_reach_their_bound(name: str, sharp: str | None, rate: Fraction) -> None:
    """Links are loaded once each way by every byte, where trees of copies load them 2 (n - 1) / n times."""
    found = pack_in_switch(modify(machine(name), sharp=sharp))
    assert found.rate == found.bound == rate * GB


@pytest.mark.slow
@pytest.mark.parametrize(("t", "rate"), [
    (fat_tree(2, 2, 2, 4).done(), 200), (fat_tree(2, 2, 2, 4, over=4).done(), 100),
    (leaf_spine([8] * 8, 4, 4, 400_000)[0].done(), 400), (dragonfly(5, 4, 2), 50),
], ids=["fat tree", "oversubscribed fat tree", "leaves and spines", "dragonfly"])  # fmt: skip
def test_networks_that_make_sums_reach_what_leaves_a_box(t: Topology, rate: int) -> None:
    kinds = sorted({s.kind for s in t.switches})
    found = pack_in_switch(modify(t, sharp=",".join(kinds)))
    assert found.rate == found.bound == rate * GB
    assert found.certificate.kind == "cut"
    assert found.rate > pack(t, "allreduce").bound


def test_without_sums_in_the_switch_the_same_box_has_four_sevenths_of_the_rate() -> None:
    t = machine("hgx-h100")
    assert pack(t, "allreduce").bound / pack_in_switch(t).bound == Fraction(8, 14)


def test_a_tree_goes_up_to_a_rank_and_down_through_the_switch() -> None:
    (tree,) = pack_in_switch(machine("hgx-h100")).trees
    assert tree.root < 8
    assert [(e.src, e.dst) for e in tree.edges] == [(tree.root, 8), *((8, r) for r in range(8) if r != tree.root)]
    assert tree.depth == 2


def test_where_no_switch_adds_up_the_error_says_how_to_say_so() -> None:
    for t in (machine("dgx-1v"), machine("dgx-a100"), modify(machine("hgx-h100"), sharp="none")):
        with pytest.raises(NoPackingError, match=r"no switch on its .* links reduces and multicasts.*--sharp"):
            pack_in_switch(t)


def test_too_many_ranks_are_refused_with_the_most() -> None:
    with pytest.raises(NoPackingError, match="264 ranks; expected at most 256"):
        pack_in_switch(machine("hgx-h100:33"))


def test_links_that_lead_one_way_are_refused() -> None:
    """A ring of one-way links joins the ranks, but no tree can be used both ways."""
    ends = [(0, 3), (3, 1), (1, 2), (2, 0)]
    links = tuple(Link(u, v, "nvlink", 1, GB) for u, v in ends)
    t = Topology("ring", tuple(Device("gpu", 0, i) for i in range(3)), (Switch("nvswitch", 0, "", True),), links)
    with pytest.raises(NoPackingError, match="links that lead both ways do not join all ranks") as caught:
        pack_in_switch(t.check())
    assert caught.value.why == "links that lead both ways do not join all ranks"
    assert bound_in_switch(choose_links(t, "allreduce", 0)).bound == GB


def test_one_rank_alone_moves_nothing() -> None:
    switch = (Switch("nvswitch", 0, "", True),)
    links = (Link(0, 1, "nvlink", 1, GB), Link(1, 0, "nvlink", 1, GB))
    found = pack_in_switch(Topology("one", (Device("gpu", 0, 0),), switch, links))
    assert (found.trees[0].edges, found.certificate.kind, found.optimal) == ((), "trivial", True)


def spoilt() -> Iterator[tuple[str, Packing, str]]:
    """Packings for a box whose ranks 0 to 7 are on a sharp switch, each with one fault."""
    t = machine("hgx-h100")
    good = pack_in_switch(t)
    tree, edges = good.trees[0], good.trees[0].edges
    yield "rate", replace(good, rate=good.rate + 1), "weights sum"
    yield "load", replace(good, rate=good.rate * 2, trees=(replace(tree, weight=tree.weight * 2),)), "link .* carries"
    yield "lost rank", replace(good, trees=(replace(tree, edges=edges[:-1]),)), "does not reach ranks"
    yield "root", replace(good, trees=(replace(tree, root=8),)), "root 8"
    yield "order", replace(good, trees=(replace(tree, edges=edges[::-1]),)), "expected parents before children"
    yield "path", replace(good, trees=(replace(tree, edges=(*edges[:-1], replace(edges[-1], path=(8, 0, 7)))),)), "path"
    cut = good.certificate
    yield "capacity", replace(good, certificate=replace(cut, capacity_mbps=cut.capacity_mbps + 1)), "certificate states"
    yield "side", replace(good, certificate=replace(cut, parts=((8,), tuple(range(8))))), "each not empty"
    classes = Certificate("partition", ((0, 8), (1, 2, 3, 4, 5, 6)), Fraction(1), Fraction(1), "")
    yield "class", replace(good, certificate=classes), "part the 8 ranks"
    one_way = Certificate("prices", ((0, 8, 1),), Fraction(450 * GB), Fraction(1), "")
    yield "prices", replace(good, certificate=one_way), "not of both ways"
    yield "kind", replace(good, certificate=replace(cut, kind="copies")), "expected a cut"
    yield "links", replace(good, links="pcie"), "uses pcie"
    yield "collective", replace(good, collective="broadcast"), "expected allreduce"


@pytest.mark.parametrize(("fault", "packing", "words"), list(spoilt()), ids=[fault for fault, _, _ in spoilt()])
def test_a_packing_with_a_fault_is_refused_by_what_is_wrong(fault: str, packing: Packing, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        verify_in_switch(packing, machine("hgx-h100"))


def test_a_switch_that_only_forwards_is_no_inner_vertex() -> None:
    good = pack_in_switch(machine("hgx-h100"))
    with pytest.raises(PlanError, match="NVSwitch neither folds nor copies"):
        verify_in_switch(good, modify(machine("hgx-h100"), sharp="none"))
