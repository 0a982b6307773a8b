"""Method ``shallow``: trees of at most so many hops, the best of all where they can be listed."""

from fractions import Fraction

import pytest

from blinkmpi.errors import NoPackingError
from blinkmpi.topology import machine, modify
from blinkmpi.trees import MethodOptions, pack, verify
from blinkmpi.trees.answer import is_shallow
from blinkmpi.trees.exact.enumeration import all_arborescences

DGX = machine("dgx-1v")


@pytest.mark.parametrize(("depth", "units"), [(None, 2), (2, 2), (3, 5), (4, 6)])
def test_a_broadcast_on_eight_gpus_has_the_best_rate_of_each_depth(depth: int | None, units: int) -> None:
    found = pack(DGX, "broadcast", method="shallow", options=MethodOptions(max_depth=depth))
    assert found.rate == units * 25_000
    assert found.depth <= (depth or 2)
    assert found.scheme == f"depth-{depth or 2}"
    assert is_shallow(found)
    assert verify(found, DGX) == found


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "allreduce", "allgather", "reduce_scatter"])
@pytest.mark.parametrize("spec", ["dgx-1p", "mi250", "dgx-1v:2", "pcie-8"])
def test_every_machine_has_trees_of_least_depth(spec: str, collective: str) -> None:
    t = machine(spec)
    found = pack(t, collective, method="shallow")
    assert found.scheme == f"depth-{found.depth}"
    assert found.depth <= pack(t, collective).depth


def test_an_allreduce_gives_up_at_most_a_twentieth_for_fewer_trees() -> None:
    found = pack(DGX, "allreduce", method="shallow")
    best = Fraction(600_000, 7)
    assert found.depth == 2
    assert Fraction(19, 20) * best <= found.rate <= best
    assert len(found.trees) < 16


def test_limits_that_nothing_keeps_are_refused_with_the_reason() -> None:
    for t, depth, why in ((DGX, 1, "no trees of at most 1 hops"), (machine("mi250"), 6, "too many trees of at most 6")):
        with pytest.raises(NoPackingError, match=why):
            pack(t, "broadcast", method="shallow", options=MethodOptions(max_depth=depth))


def test_trees_of_one_hop_are_listed_at_once() -> None:
    """All subsets of the first level were tried, also where the last one must hold all that are left."""
    n = 40
    arcs = [(u, v) for u in range(n) for v in range(n) if u != v]
    assert len(list(all_arborescences(arcs, n, 0, 1))) == 1
    assert list(all_arborescences(arcs[1:], n, 0, 1)) == []


def test_links_of_one_direction_count_for_the_way_that_is_used() -> None:
    t = modify(DGX, gpus="0-3")
    down, up = (pack(t, collective, method="shallow") for collective in ("broadcast", "reduce"))
    assert (down.rate, down.depth) == (up.rate, up.depth)
