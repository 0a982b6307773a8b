"""Clusters that look the same from every rank: a few templates for all trees, at the bound, and quickly passed over."""

from itertools import pairwise, product

import pytest

from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, Switch, Topology
from blinkmpi.trees import methods, pack
from blinkmpi.trees.exact import symmetric
from blinkmpi.trees.graph.fabric import choose_links
from blinkmpi.trees.graph.loads import link_loads
from blinkmpi.trees.graph.symmetry import regular
from blinkmpi.trees.problem import Problem
from tests.harness import NEVER_S
from tests.unit.trees.rails import rails

FROM_ALL = ("allgather", "reduce_scatter", "allreduce")


def problem_of(topology: Topology, collective: str) -> Problem:
    return Problem(choose_links(topology, collective, 0), collective, 0)


def ports(boxes: int, each: int, *, up: int, down: int, out: int, back: int) -> Topology:
    """Boxes of GPUs around a switch, and a network, with GB/s into and out of the switch, and of the network."""
    n, links = boxes * each, []
    for gpu in range(n):
        for switch, kind, there, here in ((n + gpu // each, "nvlink", up, down), (n + boxes, "net", out, back)):
            links.append(Link(gpu, switch, kind, 1, there * 1000))
            links.append(Link(switch, gpu, kind, 1, here * 1000))
    switches = (*(Switch("nvswitch", box) for box in range(boxes)), Switch("net", -1))
    devices = tuple(Device("gpu", box, i) for box, i in product(range(boxes), range(each)))
    return Topology("ports", devices, switches, tuple(links)).check()


@pytest.mark.parametrize("collective", FROM_ALL)
@pytest.mark.parametrize("spec", ["dgx-a100:2", "hgx-h100:2", "hgx-h100:4"])
def test_two_shallow_templates_meet_the_bound(spec: str, collective: str) -> None:
    topology = machine(spec)
    packing = pack(topology, collective)
    assert packing.scheme == "symmetric"
    assert packing.optimal, packing.reason
    assert packing.depth == 2
    assert len(packing.trees) == 2 * topology.n
    assert methods(topology, collective)[0] == "symmetric"
    assert min(tree.weight for tree in packing.trees) * topology.n >= packing.rate / 10


@pytest.mark.parametrize("collective", FROM_ALL)
def test_links_of_an_orbit_carry_the_same(collective: str) -> None:
    topology = machine("dgx-a100:2")
    packing, f = pack(topology, collective, method="symmetric"), choose_links(topology, collective, 0)
    symmetry = regular(f)
    assert symmetry is not None
    assert {image[0] for image in symmetry.images} == set(range(topology.n))
    loads = link_loads(collective, packing.trees)
    by_orbit = {(k, loads.get(arc, 0)) for arc, k in symmetry.class_of.items()}
    assert len(by_orbit) == len(symmetry.times)
    for tree in packing.trees:
        assert all(arc in f.arcs for edge in tree.edges for arc in pairwise(edge.path))


@pytest.mark.slow
@pytest.mark.parametrize("collective", FROM_ALL)
@pytest.mark.parametrize("spec", ["dgx-a100:3", "dgx-1v:2", "mi250:2"])
def test_it_is_chosen_only_where_nothing_before_it_is_as_good(spec: str, collective: str) -> None:
    topology = machine(spec)
    packing = pack(topology, collective, seconds=NEVER_S)
    assert packing.scheme != "symmetric"
    assert packing.optimal, packing.reason
    if symmetric.fits(problem_of(topology, collective)):
        assert pack(topology, collective, method="symmetric", seconds=NEVER_S).rate == packing.rate


@pytest.mark.parametrize("collective", FROM_ALL)
@pytest.mark.parametrize("boxes", [2, 3])
def test_boxes_with_a_network_for_each_gpu_number(boxes: int, collective: str) -> None:
    packing = pack(rails(boxes, 8), collective, method="symmetric")
    assert packing.optimal, packing.reason
    assert packing.depth <= 2


@pytest.mark.slow
@pytest.mark.parametrize("collective", FROM_ALL)
@pytest.mark.parametrize(
    "topology", [rails(3, 4, slow=5), rails(8, 8, slow=9), machine("dgx-1v:8"), machine("mi250:2")]
)
def test_machines_that_look_different_from_some_ranks_are_passed_over(topology: Topology, collective: str) -> None:
    assert not symmetric.fits(problem_of(topology, collective))
    assert "symmetric" not in methods(topology, collective)


@pytest.mark.parametrize("collective", FROM_ALL)
@pytest.mark.parametrize(
    "topology",
    [ports(3, 3, up=10, down=40, out=20, back=10), ports(2, 5, up=60, down=20, out=10, back=20)],
    ids=["slow out of the switch", "slow into the switch"],
)
def test_prices_prove_the_bound_where_no_cut_is_tight(topology: Topology, collective: str) -> None:
    packing = pack(topology, collective)
    assert packing.scheme == "symmetric"
    assert packing.optimal, packing.reason
    assert packing.certificate.kind == "prices"


@pytest.mark.parametrize("collective", FROM_ALL)
def test_a_search_that_is_late_ends_with_a_packing(collective: str) -> None:
    packing = pack(machine("dgx-a100:2"), collective, method="symmetric", seconds=0)
    assert 0 < packing.rate < packing.bound
    assert "time for planning" in packing.reason


@pytest.mark.slow
def test_exact_is_listed_for_many_ranks_only_where_it_is_chosen() -> None:
    topology = machine("dgx-a100:2")
    for collective in ("allgather", "broadcast"):
        assert "exact" not in methods(topology, collective)
        assert pack(topology, collective, method="exact").optimal
    assert methods(topology, "scatter")[0] == "exact"
    assert "exact" in methods(machine("dgx-1v"), "allgather")
