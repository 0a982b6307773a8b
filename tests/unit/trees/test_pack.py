"""Packings meet their bound where that is promised, are proved everywhere, and the proof rejects what is wrong."""

from fractions import Fraction
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.errors import ArgumentError, PlanError, TopologyError
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, LinkKind, Switch, Topology
from blinkmpi.trees import COLLECTIVES, ROOTED, Edge, Packing, methods, pack, verify
from tests.effort import Effort
from tests.unit.trees.test_certify import machines

MOVING = tuple(c for c in COLLECTIVES if c != "barrier")
LANE = 25000
DGX = machine("dgx-1v")


def both_ways(pairs: list[tuple[int, int, int]], kind: LinkKind = "nvlink", mbps: int = LANE) -> tuple[Link, ...]:
    return tuple(Link(a, b, kind, lanes, mbps) for u, v, lanes in pairs for a, b in ((u, v), (v, u)))


def gpus(n: int) -> tuple[Device, ...]:
    return tuple(Device("gpu", 0, i) for i in range(n))


def star(ports: list[int]) -> Topology:
    """GPUs on one switch, with these lanes."""
    n = len(ports)
    return Topology(
        "star", gpus(n), (Switch("nvswitch", 0),), both_ways([(i, n, lanes) for i, lanes in enumerate(ports)])
    )


def memory(rates: list[int]) -> Topology:
    n = len(rates)
    links = tuple(k for i, rate in enumerate(rates) for k in both_ways([(i, n, 1)], "memory", rate))
    return Topology("cpu", tuple(Device("cpu", 0, i) for i in range(n)), (Switch("memory", 0),), links)


def joined_subsets() -> list[tuple[int, ...]]:
    near = {(k.src, k.dst) for k in DGX.links if k.kind == "nvlink"}
    found = []
    for size in range(2, 9):
        for some in combinations(range(8), size):
            reached, todo = {some[0]}, [some[0]]
            while todo:
                u = todo.pop()
                fresh = [v for v in some if (u, v) in near and v not in reached]
                reached.update(fresh)
                todo += fresh
            if len(reached) == size:
                found.append(some)
    return found


SUBSETS = joined_subsets()


def test_number_of_joined_subsets() -> None:
    assert [sum(len(s) == size for s in SUBSETS) for size in range(2, 9)] == [16, 32, 56, 56, 28, 8, 1]


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["broadcast", "allreduce", "allgather"])
def test_every_dgx1v_subset_is_optimal(collective: str) -> None:
    for some in SUBSETS:
        packing = pack(DGX.subset(some), collective)
        assert packing.optimal, (some, packing.reason)
        assert packing.links == "nvlink"
        if collective == "broadcast":
            assert len(packing.trees) <= 6


@pytest.mark.parametrize(("some", "collective", "units"), [
    (range(8), "broadcast", Fraction(6)), (range(8), "reduce", Fraction(6)), (range(8), "allreduce", Fraction(24, 7)),
    (range(8), "allgather", Fraction(48, 7)), (range(7), "allreduce", Fraction(3)),
    ((1, 4, 5, 6), "allreduce", Fraction(2)), ((1, 4, 5, 6), "broadcast", Fraction(2)),
])  # fmt: skip
def test_known_rates_in_nvlink_units(some: range | tuple[int, ...], collective: str, units: Fraction) -> None:
    assert pack(DGX.subset(tuple(some)), collective).rate == units * LANE


def test_dgx1v_broadcast_has_few_trees_and_little_work() -> None:
    for root in range(8):
        with Effort() as effort:
            packing = pack(DGX, "broadcast", root=root)
        assert len(packing.trees) == 4
        assert effort.ours < 10_000


@settings(max_examples=40, deadline=None)
@given(machines(most=7, symmetric=True), st.sampled_from(MOVING), st.integers(0, 99))
def test_without_switches_every_packing_is_optimal(t: Topology, collective: str, pick: int) -> None:
    packing = pack(t, collective, root=pick % t.n)
    assert packing.optimal, packing.reason


@settings(max_examples=30, deadline=None)
@given(machines(most=6, symmetric=False), st.sampled_from(MOVING), st.integers(0, 99))
def test_unequal_directions(t: Topology, collective: str, pick: int) -> None:
    packing = pack(t, collective, root=pick % t.n)
    assert packing.optimal or collective == "allreduce", packing.reason
    assert 0 < packing.rate <= packing.bound


@settings(max_examples=40, deadline=None)
@given(machines(most=6, symmetric=False, switches=3), st.sampled_from(COLLECTIVES), st.integers(0, 99))
def test_any_switches_give_a_proved_packing_by_every_method(t: Topology, collective: str, pick: int) -> None:
    chosen = pack(t, collective, root=pick % t.n)
    for name in methods(t, collective, root=pick % t.n):
        packing = pack(t, collective, root=pick % t.n, method=name)
        assert verify(packing, t) is packing
        assert packing.rate <= chosen.rate
    if collective in ("gather", "scatter"):
        assert chosen.optimal


@pytest.mark.parametrize("collective", MOVING)
@pytest.mark.parametrize("t", [star([6] * 8), star([6] * 2), machine("dgx-2")], ids=["8", "2", "16"])
def test_onehop_is_optimal_on_a_switch(t: Topology, collective: str) -> None:
    packing = pack(t, collective)
    assert packing.scheme == "onehop"
    assert packing.optimal
    assert max(tree.depth for tree in packing.trees) <= 2
    assert methods(t, collective)[0] == "onehop"


@pytest.mark.parametrize("collective", MOVING)
def test_unequal_ports_state_their_gap(collective: str) -> None:
    t = star([1, 2, 2, 4])
    packing = pack(t, collective)
    assert packing.optimal == ("meets the bound" in packing.reason)
    assert methods(t, collective)[0] == {"trees": "exact"}.get(packing.scheme, packing.scheme)


@pytest.mark.parametrize("collective", MOVING)
def test_pcie_is_used_where_nvlink_does_not_join(collective: str) -> None:
    packing = pack(DGX.subset([0, 5]), collective)
    assert packing.links == "host+pcie"
    assert packing.optimal


@pytest.mark.slow
@pytest.mark.parametrize("collective", MOVING)
def test_machines_of_the_catalogue(collective: str) -> None:
    for name in ("dgx-1p", "dgx-a100", "pcie-8", "mi250"):
        assert pack(machine(name), collective).optimal, name
    for name in ("pcie-8:2", "dgx-1v:2", "dgx-a100:4"):
        assert pack(machine(name), collective).rate > 0


def test_two_boxes_meet_the_ratio_cut() -> None:
    """Splitting the NVSwitches and the net between boxes loses nothing: 1040/3 GB/s."""
    packing = pack(machine("dgx-a100:2"), "allgather")
    assert packing.optimal
    assert packing.rate == Fraction(1_040_000, 3)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_shared_memory_rates(n: int) -> None:
    t, core = memory([8000] * n), Fraction(8000)
    for collective in ("broadcast", "allgather"):
        assert pack(t, collective).rate == pack(t, collective).bound == core
    for collective in ("gather", "scatter"):
        assert pack(t, collective).rate == pack(t, collective).bound == core * n / (n - 1)
    for collective in ("reduce", "reduce_scatter"):
        assert pack(t, collective, method="chain").rate == pack(t, collective).bound == core
    chain = pack(t, "allreduce", method="chain")
    assert chain.rate == chain.bound == core * n / (2 * n - 1)
    assert pack(t, "allreduce").scheme == "direct"
    assert pack(t, "allreduce").rate == core * n / max(3 * (n - 1), 2 * n - 1)
    assert pack(t, "reduce_scatter").rate == core * n / (2 * (n - 1))
    assert methods(t, "allreduce") == ("direct", "chain")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=2, max_size=7), st.sampled_from(COLLECTIVES), st.integers(0, 99))
def test_shared_memory_with_unequal_cores(rates: list[int], collective: str, pick: int) -> None:
    t = memory(rates)
    for name in methods(t, collective):
        packing = pack(t, collective, root=pick % t.n, method=name)
        assert packing.multicast
        assert packing.optimal or (name == "direct" and collective in ("reduce", "allreduce", "reduce_scatter"))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_has_the_trivial_packing(collective: str) -> None:
    for t in (Topology("one", gpus(1)), memory([8000])):
        packing = pack(t, collective)
        assert packing.trees[0].edges == ()
        assert packing.certificate.kind == "trivial"
        assert packing.rate == packing.bound == 1


def test_barrier_is_one_shallow_tree() -> None:
    for t, depth in ((DGX, 2), (machine("dgx-2"), 1), (memory([1] * 5), 1)):
        packing = pack(t, "barrier")
        assert [tree.depth for tree in packing.trees] == [depth]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_same_machine_same_packing(collective: str) -> None:
    some = DGX.subset([1, 2, 4, 5, 7])
    shuffled = msgspec.structs.replace(some, links=some.links[::-1])
    assert pack(some, collective) == pack(shuffled, collective)
    assert pack(some, collective).root == (0 if collective in ROOTED else -1)


@pytest.mark.parametrize("collective", MOVING)
def test_more_ranks_than_exact_methods_take(collective: str) -> None:
    """A ring of 20 GPUs without switches: proved, and the gap is stated."""
    t = Topology("ring-20", gpus(20), (), both_ways([(i, (i + 1) % 20, 1) for i in range(20)]))
    packing = pack(t, collective)
    assert 0 < packing.rate <= packing.bound
    assert ("meets the bound" in packing.reason) == packing.optimal
    if collective in ("gather", "scatter", "allgather"):
        assert packing.bound == Fraction(2 * LANE * 20, 19)


def test_disconnected_names_the_parts() -> None:
    t = Topology("two", gpus(4), (), both_ways([(0, 1, 1), (2, 3, 1)]))
    with pytest.raises(TopologyError, match=r"GPUs 0,1 \| GPUs 2,3"):
        pack(t, "allreduce")
    ring = tuple(Link(i, (i + 1) % 3, "nvlink", 1, LANE) for i in range(3))
    one_way = Topology("one-way", gpus(3), (), ring)
    assert pack(one_way, "broadcast").optimal
    with pytest.raises(TopologyError, match=r"join all 3 ranks, but they fall into GPU 0 \| GPU 1 \| GPU 2"):
        pack(Topology("path", gpus(3), (), ring[:2]), "allreduce")


@pytest.mark.parametrize(("collective", "arguments", "words"), [
    ("scan", {}, "scan"),
    ("broadcast", {"root": 8}, "ranks 0..7"),
    ("broadcast", {"root": -1}, "ranks 0..7"),
    ("broadcast", {"method": "direct"}, "expected auto, exact"),
])  # fmt: skip
def test_bad_calls(collective: str, arguments: dict[str, int | str], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        pack(DGX, collective, **arguments)  # type: ignore[arg-type]


def change(packing: Packing, **fields: object) -> Packing:
    return msgspec.structs.replace(packing, **fields)


def first_tree(packing: Packing, **fields: object) -> Packing:
    head, *rest = packing.trees
    return change(packing, trees=(msgspec.structs.replace(head, **fields), *rest))


@pytest.mark.parametrize("collective", MOVING)
def test_verify_rejects_what_is_wrong(collective: str) -> None:
    good = pack(DGX, collective)
    assert verify(good, DGX) is good
    head = good.trees[0]
    edge = head.edges[0]
    certificate = good.certificate
    wrong = {
        "weight": first_tree(good, weight=Fraction(0)),
        "carry|sum": first_tree(good, weight=head.weight + 1),
        "sum to|carry": change(good, rate=good.rate - 1),
        "parents before children|does not have yet|path from": first_tree(good, edges=head.edges[::-1] + head.edges),
        "of 0..7 that the tree does not have yet": first_tree(good, edges=(*head.edges, head.edges[-1])),
        "must begin and end": first_tree(good, edges=(Edge(edge.src, edge.dst, (edge.src,)), *head.edges[1:])),
        "switches alone": first_tree(good, edges=(Edge(edge.src, edge.dst, (edge.src, 6, edge.dst)), *head.edges[1:])),
        "pcie": change(good, links="pcie"),
        "expected a": change(good, certificate=msgspec.structs.replace(certificate, kind="copies")),
        "certificate states": change(
            good, certificate=msgspec.structs.replace(certificate, capacity_mbps=certificate.capacity_mbps + 1)
        ),
        "certificate gives": change(good, bound=good.bound + 1),
        "must part|cost nothing": change(
            good, certificate=msgspec.structs.replace(certificate, parts=certificate.parts[:1])
        ),
        "is for 9": change(good, n=9),
        "no trees": change(good, trees=()),
        "root": change(good, root=-1 if collective in ROOTED else 0),
    }
    for words, packing in wrong.items():
        with pytest.raises(PlanError, match=words):
            verify(packing, DGX)


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "allreduce", "allgather", "reduce_scatter"])
def test_verify_rejects_a_tree_that_does_not_span(collective: str) -> None:
    good = pack(DGX, collective)
    with pytest.raises(PlanError, match="tree 0 does not reach"):
        verify(first_tree(good, edges=good.trees[0].edges[:-1]), DGX)


@pytest.mark.parametrize("collective", MOVING)
def test_verify_rejects_overload(collective: str) -> None:
    """The plan of the whole machine on one whose links carry less, its bound untouched."""
    good = pack(DGX, collective)
    u, v = good.trees[0].edges[-1].src, good.trees[0].edges[-1].dst
    thin = tuple(
        msgspec.structs.replace(k, lanes=1, lane_mbps=1) if {k.src, k.dst} == {u, v} and k.kind == "nvlink" else k
        for k in DGX.links
    )
    with pytest.raises(PlanError, match=r"link \d->\d carries .* expected at most 1;"):
        verify(good, msgspec.structs.replace(DGX, links=thin))
    with pytest.raises(PlanError, match="which is not among the nvlink links"):
        verify(good, DGX.drop_link(u, v))


def test_verify_rejects_overloaded_core_and_foreign_memory() -> None:
    t = memory([8000] * 4)
    good = pack(t, "allreduce")
    with pytest.raises(PlanError, match="core of rank 2 copies"):
        verify(good, memory([8000, 8000, 7999, 8000]))
    with pytest.raises(PlanError):
        verify(change(good, multicast=False), t)


def test_verify_rejects_a_cut_on_the_wrong_side() -> None:
    good = pack(DGX, "broadcast")
    parts = good.certificate.parts[::-1]
    with pytest.raises(PlanError, match="wrong side"):
        verify(change(good, certificate=msgspec.structs.replace(good.certificate, parts=parts)), DGX)


def test_a_packing_survives_json() -> None:
    good = pack(DGX, "allreduce")
    from blinkmpi.util.codec import dumps, loads

    assert loads(dumps(good, kind="packing", version=1), Packing, kind="packing", version=1) == good
