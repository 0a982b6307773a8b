"""The ways of chunks through a machine, from rank to rank: along the trees of a packing, or each the cheapest. Pure."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Protocol

from ..errors import PlanError
from ..topology.model import Topology
from ..util.codec import Value
from .ir import Channel

NS_PER_MB = 10**9  # at 1 MB/s


class Routes(Protocol):
    """What the cost model asks; a packing answers, too.

    ``links`` are the kinds of links to prefer between two vertices. ``multicast`` says that the ranks share a memory,
    in which all readers read one slot. ``depth`` is the hops of a barrier.
    """

    @property
    def links(self) -> str: ...
    @property
    def multicast(self) -> bool: ...
    @property
    def depth(self) -> int: ...

    def route(self, tree: int, src: int, dst: int, *, partial: bool) -> tuple[int, ...]:
        """The vertices from ``src`` to ``dst``; ``src`` alone if they are one."""

    def crossed(self) -> frozenset[int]:
        """All vertices on routes."""


class CheapestRoutes(Value, frozen=True):
    """The direct link of each pair of ranks, or else the cheapest way over switches: :func:`cheapest_routes`."""

    paths: Mapping[tuple[int, int], tuple[int, ...]]
    multicast: bool = False
    links: str = ""
    depth: int = 1

    def route(self, tree: int, src: int, dst: int, *, partial: bool) -> tuple[int, ...]:
        """The same for every tree."""
        return self.paths[src, dst]

    def crossed(self) -> frozenset[int]:
        """All vertices on routes."""
        return frozenset(v for path in self.paths.values() for v in path)


def cheapest_routes(channels: Iterable[Channel], topology: Topology, *, multicast: bool = False) -> CheapestRoutes:
    """The routes of some channels.

    A direct link is always taken; of ways over switches, that on which a byte works the least. Other ranks forward
    nothing of their own accord.

    Raises:
        PlanError: for two ranks that neither links nor switches join.
    """
    pairs = sorted({(c.writer, reader) for c in channels for reader in c.readers})
    direct = {(k.src, k.dst) for k in topology.links}
    paths: dict[tuple[int, int], tuple[int, ...]] = {}
    known: dict[int, dict[int, tuple[int, ...]]] = {}
    for src, dst in pairs:
        if src == dst or (src, dst) in direct:
            paths[src, dst] = (src,) if src == dst else (src, dst)
            continue
        if src not in known:
            known[src] = _over_switches(topology, src)
        if dst not in known[src]:
            raise PlanError(
                f"{topology.name} has no way from rank {src} to {dst} but over other ranks; copy the "
                "chunk to one of these first"
            )
        paths[src, dst] = known[src][dst]
    return CheapestRoutes(paths, multicast)


def _over_switches(topology: Topology, src: int) -> dict[int, tuple[int, ...]]:
    """The cheapest ways to all ranks; of equals the shortest one, then that of the lowest vertices."""
    onward: dict[int, dict[int, int]] = defaultdict(dict)
    for k in topology.links:
        cost = NS_PER_MB // k.mbps
        onward[k.src][k.dst] = min(cost, onward[k.src].get(k.dst, cost))
    found: dict[int, tuple[int, ...]] = {}
    heap: list[tuple[int, int, tuple[int, ...]]] = [(0, 1, (src,))]
    while heap:
        cost, hops, path = heapq.heappop(heap)
        at = path[-1]
        if at in found:
            continue
        found[at] = path
        for v, more in onward[at].items() if at == src or at >= topology.n else ():
            if v not in found:
                heapq.heappush(heap, (cost + more, hops + 1, (*path, v)))
    return found
