"""Algorithms that people know by name, a few lines each: to run, to compare with, and to begin one's own from."""

from ..errors import ArgumentError
from .trace import Ref, chunk
from .written import algorithm

POWERS = tuple(2**k for k in range(11))  # of two, for those that halve


@algorithm("allreduce", chunks=lambda n: n, inplace=True)
def ring(n: int) -> None:
    """Each chunk goes round to be folded and round again as the result: 2 (n - 1) steps, least bytes."""
    for i in range(n):
        c = chunk((i + 1) % n, "input", i)
        for k in range(2, n + 1):
            c = chunk((i + k) % n, "input", i).reduce(c)
        for k in range(1, n):
            c = c.copy((i + k) % n)


@algorithm("allreduce", chunks=1, inplace=True)
def one_step(n: int) -> None:
    """Everybody sends everything to everybody, and each folds it, in one order for equal bits: one step, most bytes."""
    for r in range(n):
        for source in range(n):
            chunk(source, "input", 0).copy(r, "from", source)
    for r in range(n):
        total = chunk(r, "from", 0)
        for source in range(1, n):
            total.reduce(chunk(r, "from", source))
        total.copy(r, "input", 0)


@algorithm("allreduce", chunks=lambda n: n, inplace=True)
def all_pairs(n: int) -> None:
    """Everybody sends each chunk to its owner, who folds it and sends it to all: two steps, least bytes."""
    for i in range(n):
        own = chunk(i, "input", i)
        others = [r for r in range(n) if r != i]
        for r in others:
            own.reduce(chunk(r, "input", i))
        for r in others:
            own.copy(r)


@algorithm("allreduce", chunks=lambda n: n, inplace=True, ranks=POWERS)
def halving_doubling(n: int) -> None:
    """Pairs exchange halves of what they have, then double it again: 2 log2(n) steps, least bytes (Rabenseifner)."""
    size = n // 2
    while size:
        for r in range(n):
            chunk(r, "input", r // size * size, size).reduce(chunk(r ^ size, "input", r // size * size, size))
        size //= 2
    size = 1
    while size < n:
        for r in range(n):
            chunk(r, "input", r // size * size, size).copy(r ^ size)
        size *= 2


@algorithm("allgather", chunks=1, inplace=True, ranks=POWERS)
def recursive_doubling(n: int) -> None:
    """Pairs exchange all that they have: log2(n) steps."""
    size = 1
    while size < n:
        for r in range(n):
            chunk(r, "output", r // size * size, size).copy(r ^ size)
        size *= 2


@algorithm("allgather", chunks=1, inplace=True)
def bruck_allgather(n: int) -> None:
    """Rank r takes all that rank r + 1, 2, 4, ... has, for any number of ranks, in log2(n) steps (Bruck)."""
    size = 1
    while size < n:
        for r in range(n):
            for k in range(size, min(2 * size, n)):
                chunk((r + size) % n, "output", (r + k) % n).copy(r)
        size *= 2


@algorithm("alltoall", chunks=1)
def all_pairs_alltoall(n: int) -> None:
    """Every block goes straight to its rank: one step."""
    for s in range(n):
        for d in range(n):
            chunk(s, "input", d).copy(d, "output", s)


@algorithm("alltoall", chunks=1)
def bruck_alltoall(n: int) -> None:
    """A block for the rank i further on goes there by the powers of two in i: log2(n) messages a rank (Bruck)."""
    for r in range(n):
        for i in range(n):
            chunk(r, "input", (r + i) % n).copy(r, "moved by 0", i)
    size = 1
    while size < n:
        for i in range(n):
            if i & size:
                for r in range(n):
                    at = chunk(r, f"moved by {i % size}", i)
                    at.copy((r + size) % n, f"moved by {i % (2 * size)}", i)
        size *= 2
    for r in range(n):
        for i in range(n):
            chunk(r, f"moved by {i}", i).copy(r, "output", (r - i) % n)


@algorithm("alltoall", chunks=1)
def two_step(n: int, k: int) -> None:
    """On nodes of k ranks: in the node to the rank that has the target's place, from there to the other node."""
    _nodes(n, k)
    for s in range(n):
        for d in range(n):
            c = chunk(s, "input", d)
            if s // k == d // k:
                c.copy(d, "output", s)
            else:
                c.copy(s // k * k + d % k, f"to node {d // k}", s % k)
    for a in range(n // k):
        for b in range(n // k):
            for p in range(k if a != b else 0):
                chunk(a * k + p, f"to node {b}", 0, k).copy(b * k + p, "output", a * k)


@algorithm("allreduce", chunks=lambda n: n, inplace=True)
def hierarchical(n: int, k: int) -> None:
    """On nodes of k ranks: fold in the node, a ring of nodes for each chunk, copy in the node."""
    nodes = _nodes(n, k)
    for i in range(n):
        heads = [_folded_in_node(a, k, i) for a in range(nodes)]
        home = i // k
        at = heads[(home + 1) % nodes]
        for step in range(2, nodes + 1):
            at = heads[(home + step) % nodes].reduce(at)
        for step in range(nodes):
            _spread_in_node(at, k)
            if step < nodes - 1:
                at = at.copy(heads[(home + step + 1) % nodes].rank)


@algorithm("allreduce", chunks=lambda n: n, inplace=True)
def islands(n: int, k: int) -> None:
    """k GPUs behind each PCIe switch: fold there, each 1/n of the vector crosses straight to its owner, and back."""
    nodes = _nodes(n, k)
    for i in range(n):
        heads = [_folded_in_node(a, k, i) for a in range(nodes)]
        home = heads[i // k]
        for head in heads:
            if head is not home:
                home.reduce(head)
        for head in heads:
            _spread_in_node(home if head is home else home.copy(head.rank), k)


def _nodes(n: int, k: int) -> int:
    """How many nodes of k ranks there are; ArgumentError if ranks are left over."""
    if k < 1 or n % k:
        raise ArgumentError(f"{n} ranks in nodes of {k}: expected a divisor of {n}")
    return n // k


def _folded_in_node(a: int, k: int, i: int) -> Ref:
    """Chunk i of all ranks of node a, folded on the one that has the place of its owner."""
    head = chunk(a * k + i % k, "input", i)
    for r in range(a * k, a * k + k):
        if r != head.rank:
            head.reduce(chunk(r, "input", i))
    return head


def _spread_in_node(at: Ref, k: int) -> None:
    """Copy to all other ranks of the node."""
    first = at.rank // k * k
    for r in range(first, first + k):
        if r != at.rank:
            at.copy(r)
