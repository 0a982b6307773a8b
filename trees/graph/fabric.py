"""The capacitated graph that a packing uses: the machine's links of some kinds, merged into arcs.

:func:`choose_links` says which links are taken; here is also whether they join the ranks. Vertex numbers are those of
the whole topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import gcd
from typing import Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...errors import TopologyError
from ...topology.model import Topology
from ...util.text import spans

Arc = tuple[int, int]
Path = tuple[int, ...]
Ints = NDArray[np.int64]
Key = TypeVar("Key")
Found = TypeVar("Found")

FAST = ("nvlink", "xgmi")
SLOW = ("c2c", "host", "pcie")
MANY = 16  # ranks; messages name whole nodes of larger machines by their number


class Fabric(msgspec.Struct, frozen=True, dict=True):
    """The links of ``kinds`` as a graph; ``arcs`` holds the MB/s of every joined pair of vertices, ascending."""

    topology: Topology
    kinds: tuple[str, ...]
    arcs: dict[Arc, int]

    @property
    def n(self) -> int:
        """The number of ranks."""
        return self.topology.n

    @cached_property
    def vertices(self) -> tuple[int, ...]:
        """All ranks, then the switches that an arc touches: the order of :meth:`matrix`."""
        return (*range(self.n), *sorted({v for arc in self.arcs for v in arc if v >= self.n}))

    @cached_property
    def unit(self) -> int:
        """Greatest common divisor of the capacities in MB/s: one unit of :meth:`matrix`."""
        return gcd(*self.arcs.values()) or 1

    @cached_property
    def flat(self) -> bool:
        """Whether no switch is wired to another switch."""
        return all(u < self.n or v < self.n for u, v in self.arcs)

    def matrix(self) -> Ints:
        """Capacities in units, in the order of ``vertices``."""
        at = {v: i for i, v in enumerate(self.vertices)}
        cap = np.zeros((len(at), len(at)), np.int64)
        for (u, v), mbps in self.arcs.items():
            cap[at[u], at[v]] = mbps // self.unit
        return cap

    @cached_property
    def even(self) -> bool:
        """Whether every link is equally fast both ways."""
        return all(self.arcs.get((v, u)) == c for (u, v), c in self.arcs.items())

    @cached_property
    def backwards(self) -> Fabric:
        """Every arc reversed; a broadcast tree of this graph is a reduce tree of the reversed one."""
        if self.even:
            return self
        return Fabric(self.topology, self.kinds, dict(sorted(((v, u), c) for (u, v), c in self.arcs.items())))

    @cached_property
    def two_way(self) -> Fabric:
        """The pairs joined in both directions, at the smaller of the two capacities."""
        if self.even:
            return self
        both = {(u, v): min(c, self.arcs[v, u]) for (u, v), c in self.arcs.items() if (v, u) in self.arcs}
        return Fabric(self.topology, self.kinds, both)

    @cached_property
    def neighbours(self) -> dict[int, tuple[int, ...]]:
        """The heads of the arcs that leave each vertex, ascending."""
        near: dict[int, list[int]] = {v: [] for v in self.vertices}
        for u, v in self.arcs:
            near[u].append(v)
        return {u: tuple(sorted(vs)) for u, vs in near.items()}

    def by_node(self) -> dict[int, list[int]]:
        """The vertices of every node, without the switches between nodes."""
        found: dict[int, list[int]] = {node: [] for node in self.topology.nodes}
        for v in self.vertices:
            if (node := self.topology.homes[v]) in found:
                found[node].append(v)
        return found

    def reached(self, start: int) -> set[int]:
        """The vertices that bytes from ``start`` can reach, ranks relaying."""
        seen, todo = {start}, [start]
        while todo:
            fresh = [v for v in self.neighbours[todo.pop()] if v not in seen]
            seen.update(fresh)
            todo.extend(fresh)
        return seen

    def hops_from(self, start: int, neighbours: Mapping[int, Iterable[int]] | None = None) -> dict[int, Path]:
        """The shortest path from rank ``start`` to every rank that it reaches through switches alone.

        Args:
            neighbours: this graph's, in an order by which to choose among paths of one length.
        """
        near = self.neighbours if neighbours is None else neighbours
        paths: dict[int, Path] = {start: (start,)}
        queue = [start]
        for u in queue:
            for v in near[u]:
                if v not in paths:
                    paths[v] = (*paths[u], v)
                    if v >= self.n:
                        queue.append(v)
        return {v: p for v, p in paths.items() if v < self.n and v != start}

    @cached_property
    def hops(self) -> dict[Arc, Path]:
        """The shortest path through switches alone between every two ranks that have one."""
        return {(u, v): path for u in range(self.n) for v, path in self.hops_from(u).items()}

    def parts(self) -> list[list[int]]:
        """The ranks in classes that reach each other both ways."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        _, labels = connected_components(csr_array(self.matrix()), connection="strong")
        ranks = labels[: self.n].tolist()
        return [[r for r, label in enumerate(ranks) if label == one] for one in dict.fromkeys(ranks)]

    def serves(self, collective: str, root: int) -> bool:
        """Whether trees for this collective exist here."""
        everybody = set(range(self.n))
        if collective in ("broadcast", "scatter"):
            return everybody <= self.reached(root)
        if collective in ("reduce", "gather"):
            return everybody <= self.backwards.reached(root)
        return everybody <= self.reached(0) and everybody <= self.backwards.reached(0)


class Kept(Generic[Key, Found]):
    """What one module has found about fabrics, for other collectives and roots that need it: nobody else sees it.

    Each fabric has a table for each of these, which lives as long as the fabric.
    """

    def of(self, f: Fabric) -> dict[Key, Found]:
        """The table of a fabric."""
        tables: dict[Kept[Key, Found], dict[Key, Found]] = f.__dict__.setdefault("_kept", {})
        return tables.setdefault(self, {})

    def once(self, f: Fabric, key: Key, make: Callable[[], Found]) -> Found:
        """What is in the table, or else is made now."""
        table = self.of(f)
        if key not in table:
            table[key] = make()
        return table[key]


def fabric(topology: Topology, kinds: Iterable[str]) -> Fabric:
    """The links of these kinds; parallel links of several kinds add up. Cached in the topology."""
    wanted = frozenset(kinds)
    kept: dict[frozenset[str], Fabric] = topology.__dict__.setdefault("_fabrics", {})
    if wanted not in kept:
        kept[wanted] = _merged(topology, wanted)
    return kept[wanted]


def _merged(topology: Topology, wanted: frozenset[str]) -> Fabric:
    arcs: dict[Arc, int] = {}
    for k in topology.links:
        if k.kind in wanted:
            arcs[k.src, k.dst] = arcs.get((k.src, k.dst), 0) + k.mbps
    present = tuple(sorted({k.kind for k in topology.links if k.kind in wanted}))
    return Fabric(topology, present, dict(sorted(arcs.items())))


def shared_memory(topology: Topology) -> int | None:
    """The memory vertex when all ranks are CPU processes that share it, else None."""
    if len(topology.nodes) != 1 or any(d.kind != "cpu" for d in topology.devices):
        return None
    memory = topology.memory_of(topology.nodes[0])
    ends = {(k.src, k.dst) for k in topology.links if k.kind == "memory"}
    if memory is None or any((r, memory) not in ends or (memory, r) not in ends for r in range(topology.n)):
        return None
    return memory


def choose_links(topology: Topology, collective: str, root: int) -> Fabric:
    """The links to use: NVLink or xGMI if they join the ranks, else all.

    Raises:
        TopologyError: if no links join the ranks; the message names the parts.
    """
    for kinds in (FAST, topology.kinds()):
        found = fabric(topology, kinds)
        if found.arcs and found.serves(collective, root):
            return found
    names = " | ".join(name_of(topology, part) for part in fabric(topology, topology.kinds()).parts())
    raise TopologyError(
        f"{topology.name}: {collective} needs links that join all {topology.n} ranks, but they fall into {names}; add "
        "the missing links or take a subset of devices that is connected"
    )


def name_of(topology: Topology, vertices: Iterable[int]) -> str:
    """A readable name for a set of vertices: ``GPUs 4,5,6, plx0``; whole nodes of a large machine: ``nodes 0-6``."""
    t, chosen = topology, set(vertices)
    words: list[str] = []
    several = len(t.nodes) > 1
    if several and t.n > MANY:
        sizes: dict[int, list[int]] = {}
        for r, d in enumerate(t.devices):
            sizes.setdefault(d.node, []).append(r)
        whole = [node for node, ranks in sizes.items() if chosen.issuperset(ranks)]
        if whole:
            words.append(f"node{'s' if len(whole) > 1 else ''} {','.join(spans(sorted(whole)))}")
            chosen -= {r for node in whole for r in sizes[node]}
    groups: dict[str, list[str]] = {}
    for v in sorted(chosen):
        if v < t.n:
            d = t.devices[v]
            groups.setdefault(d.kind.upper(), []).append(f"{d.index}@{d.node}" if several else f"{d.index}")
        else:
            groups.setdefault(t.vertex_label(v), [])
    for word, items in groups.items():
        if not several and t.n > MANY:
            items = spans(map(int, items))
        words.append(word + (f"{'s' if len(items) > 1 or '-' in items[0] else ''} {','.join(items)}" if items else ""))
    return ", ".join(words)


def capacity_across(arcs: Mapping[Arc, int], inside: Iterable[int]) -> int:
    """MB/s of the arcs that leave ``inside``."""
    side = set(inside)
    return sum(c for (u, v), c in arcs.items() if u in side and v not in side)


def capacity_leaving(arcs: Mapping[Arc, int], parts: Iterable[Iterable[int]]) -> int:
    """MB/s of the arcs that leave each part, summed over the parts."""
    times = leaving(parts)
    return sum(c * times(u, v) for (u, v), c in arcs.items())


def leaving(parts: Iterable[Iterable[int]]) -> Callable[[int, int], int]:
    """How many of the parts an arc leaves."""
    member: dict[int, set[int]] = {}
    for i, part in enumerate(parts):
        for v in part:
            member.setdefault(v, set()).add(i)
    nowhere: set[int] = set()
    return lambda u, v: len(member[u] - member.get(v, nowhere)) if u in member else 0


def subset_of(mask: int, vertices: Sequence[int]) -> tuple[int, ...]:
    """The vertices whose bits are set."""
    return tuple(v for i, v in enumerate(vertices) if mask >> i & 1)


def core_rates(topology: Topology, memory: int) -> dict[int, int]:
    """MB/s at which each rank's core copies: the slower of its links to and from the memory."""
    rates: dict[int, int] = {}
    for k in topology.links:
        if k.kind == "memory" and memory in (k.src, k.dst):
            rank = k.dst if k.src == memory else k.src
            rates[rank] = min(rates.get(rank, k.mbps), k.mbps)
    return rates


def star(n: int, centre: int, leave_out: int | None = None) -> list[Arc]:
    """The arcs from ``centre`` to every other rank."""
    return [(centre, v) for v in range(n) if v not in (centre, leave_out)]
