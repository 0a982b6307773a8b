"""One tree along which a vector of few bytes is soon with all ranks of a large machine.

A message keeps its sender busy for a while, and arrives some time after. Whoever has the vector sends it on, and of all
messages that may come next it is always the one that arrives first: the best there is where all take equally long
(Bar-Noy and Kipnis, "Designing broadcasting algorithms in the postal model", 1992; Karp et al., "Optimal broadcast and
summation in the LogP model", 1993). Here messages within a node take less time than others, of which a node gets one.
"""

import heapq
from collections.abc import Iterator
from fractions import Fraction

from ..graph.fabric import Fabric, Path
from ..tree import Edge, Tree

BUSY, ARRIVES = (1, 4), (4, 14)  # within a node and from node to node; ratios of the cost model's NVLink and network


def soonest(f: Fabric, root: int) -> Tree:
    """The tree away from ``root``, of the ranks that it reaches."""
    homes = f.topology.homes
    near = {u: sorted(vs, key=lambda v: (homes[v] < 0, v)) for u, vs in f.neighbours.items()}  # in nodes, not between
    left, nodes = set(range(f.n)) - {root}, {homes[root]}  # ranks that nothing has reached, nodes that something has
    edges: list[Edge] = []
    paths: dict[int, dict[int, Path]] = {}
    targets: dict[int, Iterator[int]] = {}
    free = {root: 0}  # when a rank that was reached may send again
    coming: list[tuple[int, int, int]] = []  # when a message would arrive, its sender, its target

    def needs(v: int, *, far: bool, anywhere: bool) -> bool:
        """Whether to send to rank ``v``; from another node (``far``) once for a node, or ``anywhere`` needed."""
        return v in left and (not far or anywhere or homes[v] not in nodes)

    def prepare(u: int, *, anywhere: bool) -> None:
        """Find the next rank that ``u`` would send to."""
        if u not in targets:
            paths[u] = paths.get(u) or f.hops_from(u, near)
            order = sorted((homes[v] != homes[u], len(path), (v - u) % f.n) for v, path in paths[u].items())
            targets[u] = iter([(u + distance) % f.n for *_, distance in order])
        for v in targets[u]:
            far = homes[v] != homes[u]
            if needs(v, far=far, anywhere=anywhere):
                heapq.heappush(coming, (free[u] + ARRIVES[far], u, v))
                return

    for anywhere in (False, True):  # the second time also to ranks that no other one of their node reaches
        targets.clear()
        for u in list(free):
            prepare(u, anywhere=anywhere)
        while coming:
            when, u, v = heapq.heappop(coming)
            far = homes[v] != homes[u]
            if needs(v, far=far, anywhere=anywhere):
                edges.append(Edge(u, v, paths[u][v]))
                left.remove(v)
                nodes.add(homes[v])
                free[u] += BUSY[far]
                free[v] = when
                prepare(v, anywhere=anywhere)
            prepare(u, anywhere=anywhere)
        if not left:
            break
    return Tree(root, tuple(edges), Fraction(1))
