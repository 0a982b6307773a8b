"""The cheapest arborescence (Chu and Liu 1965, Edmonds 1967) and spanning tree (Prim 1957) of a dense graph."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fabric import Arc

Costs = NDArray[np.number[Any]]


def cheapest_arborescence(cost: Costs, root: int) -> list[int]:
    """The parent of every vertex in the cheapest arborescence from ``root``; the root's is itself.

    Ties go to the lowest parent.

    Args:
        cost: of the arc from u to v in row u, column v; more than all arcs together on the diagonal, and where there is
            no arc. All vertices can be reached from the root.
    """
    n = len(cost)
    parent = cost.argmin(axis=0)
    parent[root] = root
    group, cycles = _groups(parent.tolist(), root)
    if not cycles:
        return [int(p) for p in parent]
    looped = [v for cycle in cycles for v in cycle]
    spent = np.zeros(n, cost.dtype)
    spent[looped] = cost[parent[looped], looped]
    entering = cost - spent
    count = max(group) + 1
    members: list[list[int]] = [[] for _ in range(count)]
    for v, g in enumerate(group):
        members[g].append(v)
    firsts = [m[0] for m in members]
    tail = np.tile(np.array(firsts)[:, None], (1, n))  # the best vertex of group a to go to v from
    rows = entering[firsts].copy()
    for g, some in enumerate(members):
        if len(some) > 1:
            best = entering[some].argmin(axis=0)
            tail[g] = np.array(some)[best]
            rows[g] = entering[some].min(axis=0)
    head = np.tile(np.array(firsts)[None, :], (count, 1))
    small = rows[:, firsts].copy()
    for g, some in enumerate(members):
        if len(some) > 1:
            head[:, g] = np.array(some)[rows[:, some].argmin(axis=1)]
            small[:, g] = rows[:, some].min(axis=1)
    np.fill_diagonal(small, cost.diagonal().max())
    found = cheapest_arborescence(small, group[root])
    result = parent.tolist()
    for b, a in enumerate(found):
        if b != group[root]:
            v = int(head[a, b])
            result[v] = int(tail[a, v])
    return [int(p) for p in result]


def _groups(parent: list[int], root: int) -> tuple[list[int], list[list[int]]]:
    """Vertices numbered so that those of one cycle share a number, and the cycles."""
    n = len(parent)
    state = [0] * n  # 0 unseen, else the walk that saw it
    state[root] = -1
    cycles: list[list[int]] = []
    for start in range(n):
        v, walk = start, []
        while state[v] == 0:
            state[v] = start + 1
            walk.append(v)
            v = parent[v]
        if state[v] == start + 1 and v in walk:
            cycles.append(walk[walk.index(v) :])
    group, count = [-1] * n, 0
    for cycle in cycles:
        for v in cycle:
            group[v] = count
        count += 1
    for v in range(n):
        if group[v] < 0:
            group[v] = count
            count += 1
    return group, cycles


def minimum_spanning_tree(cost: Costs) -> list[Arc] | None:
    """The edges of the cheapest tree, from vertex 0 on, each from the side that has it; None where vertices are apart.

    Args:
        cost: of every edge, the same both ways; on the diagonal, and where there is no edge, as for arborescences.
    """
    size = len(cost)
    best: NDArray[np.number] = cost[0].copy()
    near = np.zeros(size, np.int64)
    out = np.ones(size, bool)
    out[0] = False
    edges: list[Arc] = []
    for _ in range(size - 1):
        v = int(np.flatnonzero(out)[best[out].argmin()])
        if best[v] >= cost[v, v]:
            return None
        edges.append((int(near[v]), v))
        out[v] = False
        closer = out & (cost[v] < best)
        best[closer] = cost[v][closer]
        near[closer] = v
    return edges
