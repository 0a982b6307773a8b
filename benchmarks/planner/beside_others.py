"""Our rates beside published and closed-form ones: ``python benchmarks/planner/beside_others.py``.

Three comparisons, each on a machine where somebody has said how fast a collective can be: what SCCL found for a DGX-1V
in so many steps, the ideal rate of the meshes and tori that TACOS plans for, and the closed forms for AllToAlls on
graphs whose ranks all look alike (every link as full as the distances make it). No schedule beats the last two; on
Kautz graphs none reaches the last one. Every packing is proved by ``pack`` or ``by_depth``.

Writes ``results/treegen-beside.json``. The exit
code is 1 if a rate of ours is below another one, and not proved to be the most that there is.
"""

import sys
import time
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from methods import written

from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, Topology
from blinkmpi.trees.packing import pack
from blinkmpi.trees.pareto_front import by_depth
from blinkmpi.trees.tree import Packing

RESULT = Path(__file__).resolve().parents[1] / "results" / "treegen-beside.json"
LANE = 25_000  # MB/s of a link
SCCL = "SCCL"  # Cai et al., PPoPP 2021: C chunks a rank in R rounds, of a chunk on each link, and S steps
IDEAL = "ideal"  # no schedule brings a rank its blocks faster than its links do
CLOSED = "distances"  # the blocks of all pairs, times their distances, over all links

Arcs = set[tuple[int, int]]


class Row(NamedTuple):
    """A machine, a collective, in at most how many hops (0: any), and a rate of others in MB/s."""

    source: str
    topology: Topology
    collective: str
    depth: int
    theirs: Fraction


def direct(name: str, n: int, arcs: Arcs) -> Topology:
    """GPUs with a link for every arc."""
    links = tuple(Link(u, v, "nvlink", 1, LANE) for u, v in sorted(arcs))
    return Topology(name, tuple(Device("gpu", 0, i) for i in range(n)), (), links).check()


def grid(*sides: int, around: bool) -> Topology:
    """A mesh, or if it goes around a torus."""
    number = {at: i for i, at in enumerate(product(*map(range, sides)))}
    arcs: Arcs = set()
    for at, i in number.items():
        for axis, side in enumerate(sides):
            for step in (1, -1):
                to = at[axis] + step
                if around or 0 <= to < side:
                    arcs.add((i, number[*at[:axis], to % side, *at[axis + 1 :]]))
    return direct(f"{'torus' if around else 'mesh'} {'x'.join(map(str, sides))}", len(number), arcs)


def hypercube(dimensions: int) -> Topology:
    """Ranks whose numbers differ in one bit are joined."""
    n = 1 << dimensions
    return direct(f"hypercube {n}", n, {(i, i ^ 1 << bit) for i in range(n) for bit in range(dimensions)})


def complete_bipartite(side: int) -> Topology:
    """Every rank of one side is joined to every one of the other."""
    arcs = {(u, v) for u in range(2 * side) for v in range(2 * side) if (u < side) != (v < side)}
    return direct(f"K{side},{side}", 2 * side, arcs)


def kautz(degree: int, length: int) -> Topology:
    """Words of ``length`` letters of which no two neighbours are the same; each is joined to those it moves on to."""
    letters = range(degree + 1)
    words = [w for w in product(letters, repeat=length) if all(a != b for a, b in pairwise(w))]
    number = {word: i for i, word in enumerate(words)}
    arcs = {(number[w], number[*w[1:], letter]) for w in words for letter in letters if letter != w[-1]}
    return direct(f"Kautz {degree},{length}", len(words), arcs)


def degree_of(t: Topology) -> int:
    """The links into the rank that has the fewest."""
    return min(sum(k.lanes for k in t.links if k.dst == rank) for rank in range(t.n))


def gathered(t: Topology) -> Fraction:
    """An AllGather's ideal rate: n - 1 of n blocks come in by each rank's links."""
    return Fraction(degree_of(t) * LANE * t.n, t.n - 1)


def distances(t: Topology) -> int:
    """The sum of the distances from rank 0 to all others, all ranks being alike."""
    level, total, seen = {0}, 0, {0}
    hops = 0
    while level:
        total, hops = total + hops * len(level), hops + 1
        level = {k.dst for k in t.links if k.src in level} - seen
        seen |= level
    return total


def exchanged(t: Topology) -> Fraction:
    """An AllToAll's rate where all links are full and no block makes a detour."""
    return Fraction(degree_of(t) * LANE * t.n, distances(t))


def rows() -> list[Row]:
    """All comparisons."""
    dgx = machine("dgx-1v")
    found = [
        Row(SCCL, dgx, "allgather", steps, Fraction(chunks * dgx.n * LANE, rounds))
        for chunks, steps, rounds in ((1, 2, 2), (2, 2, 3), (6, 3, 7))
    ]
    grids = [grid(*sides, around=around) for sides in ((3, 3), (4, 4), (5, 5), (3, 3, 3)) for around in (False, True)]
    for t in (*grids, hypercube(3), hypercube(4)):
        ideal: tuple[tuple[str, Callable[[Topology], Fraction], int], ...]
        ideal = (("allgather", gathered, 1), ("allreduce", gathered, 2))
        found += [Row(IDEAL, t, collective, 0, rate(t) / parts) for collective, rate, parts in ideal]
    alike = [grid(*sides, around=True) for sides in ((8,), (3, 3), (4, 4), (5, 5), (3, 3, 3))]
    alike += [hypercube(3), hypercube(4), hypercube(5), complete_bipartite(4), kautz(2, 2), kautz(2, 3), kautz(3, 2)]
    return found + [Row(CLOSED, t, "alltoall", 0, exchanged(t)) for t in alike]


def measured(row: Row) -> dict[str, Any]:
    """Our packing for a row."""
    begin = time.thread_time()
    packing, proved = _packed(row)
    seconds = time.thread_time() - begin
    return {
        "source": row.source, "machine": row.topology.name, "ranks": row.topology.n, "collective": row.collective,
        "max_depth": row.depth, "theirs_gbps": float(row.theirs / 1000), "ours_gbps": float(packing.rate / 1000),
        "part": str(packing.rate / row.theirs), "proved": proved, "depth": packing.depth, "trees": len(packing.trees),
        "method": packing.reason.partition(":")[0], "cpu_seconds": round(seconds, 4),
    }  # fmt: skip


def _packed(row: Row) -> tuple[Packing, bool]:
    if not row.depth:
        packing = pack(row.topology, row.collective)
        return packing, packing.optimal
    points = [point for point in by_depth(row.topology, row.collective) if point.depth <= row.depth]
    return points[-1].packing, points[-1].proved


def main(argv: list[str] | None = None) -> int:
    """Plan all rows, write the file; 1 if a rate is below another one and not proved to be the most."""
    found = written(__doc__, argv, RESULT, lambda: {"rows": [measured(row) for row in rows()]})
    lines = below(found["rows"])
    print("\n".join(lines))
    return 1 if lines else 0


def below(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each rate that is below another one and not proved to be the most."""
    return [
        f"{row['machine']} {row['collective']}: {row['ours_gbps']:.2f} of {row['theirs_gbps']:.2f} GB/s"
        for row in rows
        if Fraction(row["part"]) < 1 and not row["proved"]
    ]


if __name__ == "__main__":
    sys.exit(main())
