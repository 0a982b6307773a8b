"""Undirected capacities as directed ones, so that as many arborescences fit as trees did (Frank 1978).

k trees, used both ways, fit into an undirected graph if and only if its links can be directed so that k arborescences
from any one root fit. How much must enter each rank is found by a greedy algorithm: for small graphs over all subsets
(:mod:`.arborescences`), else that of the partition bound (:func:`..graph.cuts_by_flow.greedy`). A flow then directs the
links accordingly.
"""

from collections.abc import Sequence

import numpy as np

from ..deadline import Deadline
from ..graph.cuts_by_flow import CutNetwork, greedy
from ..graph.fabric import Arc, Fabric, Ints
from ..graph.max_flow import MaxFlow


def directed(f: Fabric, cap: Ints, trees: int, deadline: Deadline) -> Ints | None:
    """Divide every capacity between its two directions; None if ``trees`` do not fit, or time is over.

    Args:
        f: a fabric between ranks alone, of capacities in proportion to ``cap``.
        cap: symmetric.
        trees: their total weight, in units of ``cap``; they are rooted at the last rank.
    """
    net = CutNetwork(f)
    scale = int(cap.sum()) // int(net.cap.sum())
    assert scale * int(net.cap.sum()) == int(cap.sum())
    # The values are degree - 2 * (what must enter): every set X without the root has enter(X) >= trees + within(X).
    values, _ = greedy(net, 2 * trees, scale, deadline)
    if not values:
        return None
    enter = [(int(degree) - y) // 2 for degree, y in zip(cap.sum(axis=1)[:-1], values, strict=False)]
    left = int(cap.sum()) // 2 - sum(enter)
    found = divided(cap, [*enter, left]) if left >= 0 else np.zeros_like(cap)
    return found if 2 * found.sum() == cap.sum() else None


def divided(cap: Ints, enter: Sequence[int]) -> Ints:
    """Direct the links so that ``enter[v]`` enters each rank v, by a flow from the links through their ends.

    Some capacity is left out where that is impossible.
    """
    n = len(cap)
    pairs = np.argwhere(np.triu(cap)).tolist()
    flow = MaxFlow(n + len(pairs) + 2)
    source, sink = n + len(pairs), n + len(pairs) + 1
    halves: dict[Arc, int] = {}
    for i, (u, v) in enumerate(pairs):
        flow.arc(source, n + i, int(cap[u, v]))
        halves[u, v] = flow.arc(n + i, v, int(cap[u, v]))
        halves[v, u] = flow.arc(n + i, u, int(cap[u, v]))
    for v, amount in enumerate(enter):
        flow.arc(v, sink, amount)
    flow.run(source, sink)
    result = np.zeros_like(cap)
    for arc, number in halves.items():
        result[arc] = flow.used(number)
    return result
