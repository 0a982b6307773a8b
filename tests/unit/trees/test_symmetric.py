"""Tori and their kin: exact, as shallow as the machine is wide, and refused where a link differs."""

from fractions import Fraction
from itertools import product

import pytest
from msgspec.structs import replace

from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, Topology
from blinkmpi.trees import pack
from blinkmpi.trees.exact.symmetric import translations
from blinkmpi.trees.graph.fabric import fabric

LANE = 25_000


def torus(*sizes: int) -> Topology:
    """GPUs on a torus with these side lengths; a side of two has two lanes."""
    points = list(product(*map(range, sizes)))
    number = {p: i for i, p in enumerate(points)}
    lanes: dict[tuple[int, int], int] = {}
    for p in points:
        for axis, size in enumerate(sizes):
            for step in (1, -1):
                q = (*p[:axis], (p[axis] + step) % size, *p[axis + 1 :])
                arc = number[p], number[q]
                lanes[arc] = lanes.get(arc, 0) + 1
    links = tuple(Link(u, v, "nvlink", k, LANE) for (u, v), k in lanes.items())
    return Topology("torus", tuple(Device("gpu", 0, i) for i in range(len(points))), (), links)


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter", "allreduce"])
@pytest.mark.parametrize("sizes", [(9,), (20,), (4, 4), (3, 5), (8, 8), (4, 4, 4), (2, 2, 2, 2), (16, 16)])
def test_tori_at_full_speed_and_least_depth(sizes: tuple[int, ...], collective: str) -> None:
    t = torus(*sizes)
    packing = pack(t, collective)
    assert packing.scheme == "symmetric"
    assert packing.optimal
    assert packing.rate == Fraction(2 * len(sizes) * LANE * t.n, (t.n - 1) * (2 if collective == "allreduce" else 1))
    assert max(tree.depth for tree in packing.trees) == sum(size // 2 for size in sizes)


def test_translations_are_proved_on_every_link() -> None:
    t = torus(4, 4)
    assert translations(fabric(t, ["nvlink"])) is not None
    slower = replace(t, links=(replace(t.links[0], lane_mbps=LANE - 1), *t.links[1:]))
    assert translations(fabric(slower, ["nvlink"])) is None
    assert translations(fabric(t.drop_link(0, 1), ["nvlink"])) is None
    assert translations(fabric(machine("mi250"), ["xgmi"])) is None
    assert pack(slower, "allgather").optimal
