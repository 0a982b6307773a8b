"""Compare trees with rings on every part of a machine that a job may get: its connected subsets up to isomorphism.

This is Blink's section 2.2. A subset counts once for all choices of devices whose links look the same. Where no ring
joins a subset, its baseline is a ring over PCIe at a given rate, as NCCL falls back to it. Pure functions.
"""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import combinations, groupby
from statistics import geometric_mean
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, TopologyError
from ..topology.model import SwitchKind, Topology
from ..trees.graph.fabric import Fabric, choose_links
from ..trees.packing import extra_methods, pack
from ..trees.pareto_front import fewest
from ..util.codec import Value
from ..util.text import plural

COLLECTIVES = ("broadcast", "allreduce", "allgather")
PCIE_MBPS = 10_000  # what a ring over the PCIe of a DGX-1 reaches
MAX_RANKS = 10

Ints = NDArray[np.int64]
# Of a vertex: its colour; of each neighbour the MB/s to it and from it, and its colour.
Signature = tuple[int, tuple[tuple[int, int, int], ...]]
SWITCHES = get_args(SwitchKind)


class Allocations(NamedTuple):
    """One unique subset: its first choice of ranks, and how many choices look like it."""

    ranks: tuple[int, ...]
    alike: int


class Subset(Value, frozen=True):
    """One unique subset; rates are MB/s for broadcast, allreduce and allgather.

    ``rings`` counts directed rings that share no lane, ``baseline`` is their rate or that of PCIe. ``trees`` broadcast
    at the best rate; no fewer do so, if they are ``fewest``.
    """

    gpus: tuple[int, ...]
    allocations: int
    rates: tuple[Fraction, ...]
    rings: int
    baseline: tuple[Fraction, ...]
    trees: int
    fewest: bool

    @property
    def speedups(self) -> tuple[Fraction, ...]:
        """How many times as fast as the baseline."""
        return tuple(rate / base for rate, base in zip(self.rates, self.baseline, strict=True))


class Spread(NamedTuple):
    """Least, geometric mean, greatest."""

    least: float
    mean: float
    most: float


class Summary(NamedTuple):
    """What the subsets of some sizes have in common; ``speedups`` as in ``COLLECTIVES``."""

    unique: int
    allocations: int
    without_ring: int
    speedups: tuple[Spread, ...]
    most_trees: int


def connected(topology: Topology) -> tuple[Topology, list[Allocations]]:
    """The machine with the links that its trees use alone, and its connected subsets of 2 ranks or more.

    Raises:
        ArgumentError: for a machine with too many ranks, or one on which trees are not counted.
    """
    n = topology.n
    if not 2 <= n <= MAX_RANKS:
        raise ArgumentError(
            f"{topology.name} has {plural(n, 'rank')}; subsets are listed for 2 to {MAX_RANKS}: choose some with --gpus"
        )
    if "few" not in extra_methods(topology, "broadcast"):
        raise ArgumentError(
            f"{topology.name}: ranks joined by memory or by switches behind switches have no subsets to compare; "
            "take a machine with NVLink or xGMI such as dgx-1v"
        )
    machine = topology.only(choose_links(topology, "allreduce", 0).kinds)
    sets = ((ranks, 1) for size in range(2, n + 1) for ranks in combinations(range(n), size))
    return machine, classes(machine, sets)[0]


def classes(machine: Topology, sets: Iterable[tuple[Sequence[int], int]]) -> tuple[list[Allocations], int]:
    """The sets that links join, one of each kind, and the number of those that none join.

    Args:
        sets: of ranks, each with the number of sets that are known to look like it, itself included.
    """
    found: list[Allocations] = []
    kept: dict[object, list[tuple[ColouredGraph, int]]] = {}
    apart = 0
    for ranks, alike in sets:
        try:
            links = choose_links(machine.subset(ranks), "allreduce", 0)
        except TopologyError:
            apart += alike
            continue
        graph = coloured(links)
        like = kept.setdefault((links.kinds, tuple(sorted(graph.colours))), [])
        number = next((i for other, i in like if isomorphic(graph, other)), None)
        if number is None:
            like.append((graph, len(found)))
            found.append(Allocations(tuple(ranks), alike))
        else:
            found[number] = found[number]._replace(alike=found[number].alike + alike)
    return found, apart


def subset(machine: Topology, some: Allocations, pcie_mbps: int = PCIE_MBPS) -> Subset:
    """Plan for one subset of what :func:`connected` gave."""
    part = machine.subset(some.ranks)
    best, proof = fewest(part, "broadcast")
    rates = (best.rate, *(pack(part, c).rate for c in COLLECTIVES[1:]))
    lane = min(k.lane_mbps for k in part.links)
    try:
        around = pack(part, "broadcast", method="rings").rate
        rings = int(around / lane)
    except TopologyError:
        around, rings = Fraction(pcie_mbps), 0
    n = part.n
    baseline = (around, around * n / (2 * (n - 1)), around * n / (n - 1))
    gpus = tuple(machine.devices[r].index for r in some.ranks)
    return Subset(gpus, some.alike, rates, rings, baseline, len(best.trees), proof.minimal)


def summary(some: Sequence[Subset]) -> Summary:
    """Min, geometric mean and max over unique subsets."""
    columns = zip(*(s.speedups for s in some), strict=True)
    speedups = tuple(spread(map(float, column)) for column in columns)
    allocations, without_ring = sum(s.allocations for s in some), sum(not s.rings for s in some)
    return Summary(len(some), allocations, without_ring, speedups, max(s.trees for s in some))


def by_size(some: Sequence[Subset]) -> dict[int, list[Subset]]:
    """The subsets of each size, ascending."""

    def size(s: Subset) -> int:
        return len(s.gpus)

    return {n: list(same) for n, same in groupby(sorted(some, key=size), size)}


def spread(values: Iterable[float]) -> Spread:
    """Least, geometric mean and greatest of positive numbers."""
    known = list(values)
    return Spread(min(known), geometric_mean(known), max(known))


class ColouredGraph(NamedTuple):
    """Capacities between vertices, and for each vertex what isomorphic graphs must agree on."""

    capacities: Ints
    colours: tuple[Signature, ...]


def coloured(f: Fabric) -> ColouredGraph:
    """Colours of ranks and switches, refined by their neighbours' as often as that tells more apart."""
    cap = f.matrix() * f.unit
    rows = cap.tolist()
    joined = [
        [(w, out, rows[w][v]) for w, out in enumerate(row) if w != v and (out or rows[w][v])]
        for v, row in enumerate(rows)
    ]
    colours = [0 if v < f.n else 1 + SWITCHES.index(f.topology.switches[v - f.n].kind) for v in f.vertices]
    while True:
        near: list[Signature] = [
            (colours[v], tuple(sorted((out, back, colours[w]) for w, out, back in some)))
            for v, some in enumerate(joined)
        ]
        order = {signature: i for i, signature in enumerate(sorted(set(near)))}
        finer = [order[signature] for signature in near]
        if len(order) == len(set(colours)):
            return ColouredGraph(cap, tuple(near))
        colours = finer


def isomorphic(a: ColouredGraph, b: ColouredGraph) -> bool:
    """Whether some renaming of vertices turns one graph into the other, capacities kept."""
    if sorted(a.colours) != sorted(b.colours):
        return False
    size = len(a.colours)
    ours, theirs = a.capacities.tolist(), b.capacities.tolist()

    def extend(chosen: list[int]) -> bool:
        v = len(chosen)
        if v == size:
            return True
        return any(fits(v, w, chosen) and extend([*chosen, w]) for w in range(size) if w not in chosen)

    def fits(v: int, w: int, chosen: list[int]) -> bool:
        if a.colours[v] != b.colours[w]:
            return False
        return all(
            theirs[w][x] == ours[v][u] and theirs[x][w] == ours[u][v] for u, x in zip(range(v), chosen, strict=True)
        )

    return extend([])


Each = Callable[[Sequence[Allocations]], Iterable[Allocations]]


def survey(topology: Topology, *, pcie_mbps: int = PCIE_MBPS, each: Each = iter) -> list[Subset]:
    """All unique connected subsets, small ones first.

    Args:
        pcie_mbps: what a ring over PCIe reaches, where the links of the machine hold none.
        each: walks over the subsets; a progress bar, for one.
    """
    if pcie_mbps < 1:
        raise ArgumentError(f"pcie_mbps is {pcie_mbps}, expected a rate above 0; 10000 is usual for a DGX-1")
    machine, found = connected(topology)
    return [subset(machine, some, pcie_mbps) for some in each(found)]
