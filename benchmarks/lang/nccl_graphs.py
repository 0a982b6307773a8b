"""The rings and trees that NCCL builds, read from its log, as algorithms of ours.

NCCL can be told that GPUs are wired like another machine's, but its bytes then go as fast as the real links let them.
As algorithms, its rings and trees run on links that are paced, like ours. Each channel carries an equal part of the
vector. Which pieces a part is cut into, and how they are pipelined, is ours.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from blinkmpi.errors import FormatError
from blinkmpi.lang import Algorithm, algorithm, chunk

Ring = Sequence[int]  # ranks, in the order in which a chunk passes them
Tree = Sequence[int]  # the rank above each rank; -1 above the root
ROOT, NOBODY = -1, -2


class Graphs(NamedTuple):
    """What each channel of NCCL's has, for an Allreduce."""

    rings: tuple[Ring, ...]
    trees: tuple[Tree, ...]


def read_graphs(text: str, n: int) -> Graphs:
    """Read the logs of all ranks of a job, with ``NCCL_DEBUG=INFO`` and the subsystem GRAPH.

    Raises:
        FormatError: where there are none, or for rings and trees that do not have ``n`` ranks once.
    """
    rings = {int(c): [*map(int, r.split())] for c, r in re.findall(r"Channel (\d+)/\d+ :((?: +\d+)+) *$", text, re.M)}
    trees: dict[int, list[int]] = {}
    for line in re.findall(r"Trees((?: \[\d+\] [-\d/>]+)+)", text):
        for channel, rank, parent in re.findall(r"\[(\d+)\] [-\d/]+->(\d+)->(-?\d+)", line):
            if int(rank) < n:
                trees.setdefault(int(channel), [NOBODY] * n)[int(rank)] = int(parent)
    for kind, found in (("ring", rings), ("tree", trees)):
        if not found:
            raise FormatError(f"NCCL's log has no {kind}: NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=GRAPH write them")
    for channel, ring in rings.items():
        if sorted(ring) != [*range(n)]:
            raise FormatError(f"NCCL's log: channel {channel} has the ring {ring}; expected each of {n} ranks once")
    for channel, tree in trees.items():
        if tree.count(ROOT) != 1 or sorted(from_root(tree)) != [*range(n)]:
            raise FormatError(f"NCCL's log: channel {channel} has {tree} above its ranks; expected a tree of all {n}")
    return Graphs(tuple(rings[c] for c in sorted(rings)), tuple(trees[c] for c in sorted(trees)))


def from_root(tree: Tree) -> list[int]:
    """The ranks of a tree, each after the one above it."""
    found = [rank for rank, above in enumerate(tree) if above == ROOT]
    for rank in found:  # grows as it goes
        found += [below for below, above in enumerate(tree) if above == rank]
    return found


def ring_allreduce(n: int, rings: Sequence[Ring]) -> Algorithm:
    """Each ring's part goes round to be folded, in as many chunks as ranks, and round again as the result."""

    @algorithm("allreduce", chunks=n * len(rings), inplace=True)
    def nccl_rings(n: int) -> None:
        for channel, ring in enumerate(rings):
            for i in range(n):
                at = channel * n + i
                c = chunk(ring[(i + 1) % n], "input", at)
                for k in range(2, n + 1):
                    c = chunk(ring[(i + k) % n], "input", at).reduce(c)
                for k in range(1, n):
                    c = c.copy(ring[(i + k) % n])

    return nccl_rings(n)


def tree_allreduce(n: int, trees: Sequence[Tree]) -> Algorithm:
    """Each tree's part is folded on the way up to its root, and goes down again as the result."""

    @algorithm("allreduce", chunks=len(trees), inplace=True)
    def nccl_trees(n: int) -> None:
        for channel, tree in enumerate(trees):
            down = from_root(tree)
            for rank in reversed(down[1:]):
                chunk(tree[rank], "input", channel).reduce(chunk(rank, "input", channel))
            for rank in down[1:]:
                chunk(tree[rank], "input", channel).copy(rank)

    return nccl_trees(n)
