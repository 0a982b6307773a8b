"""Flows for the tests of MSCCL's XML: well known algorithms, value by value."""

from collections.abc import Callable

from blinkmpi.lang.flow import Flow, Node, goal_of


class Values:
    """A flow in the making."""

    def __init__(self, collective: str, n: int, chunks: int, root: int = -1) -> None:
        self.goal = goal_of(collective, n, chunks, root)
        self.nodes: list[Node] = []
        self.outputs: list[list[int | None]] = [[None] * len(want) for want in self.goal.wanted]
        self._inputs: dict[tuple[int, int], int] = {}

    def given(self, rank: int, chunk: int) -> int:
        """A reference, good on every rank, to a chunk of a rank's input."""
        return self._inputs.setdefault((rank, chunk), self.make(rank, ~chunk))

    def make(self, rank: int, *operands: int) -> int:
        """A value that is folded on a rank."""
        self.nodes.append(Node(rank, operands, f"test.py:{len(self.nodes) + 1}"))
        return len(self.nodes) - 1

    def give(self, rank: int, chunk: int, value: int) -> None:
        """Take a value as a rank's output."""
        self.outputs[rank][chunk] = value

    def flow(self) -> Flow:
        """What was made, proved."""
        return Flow(self.goal, tuple(self.nodes), tuple(map(tuple, self.outputs))).prove()


def ring_allreduce(n: int, rings: int = 1) -> Flow:
    """Chunk by chunk around the ring, then once more around."""
    v = Values("allreduce", n, n * rings)
    for chunk in range(n * rings):
        value = v.given((chunk + 1) % n, chunk)
        for k in range(2, n + 1):
            value = v.make((chunk + k) % n, ~chunk, value)
        v.give(chunk % n, chunk, value)
        for k in range(1, n):
            value = v.make((chunk + k) % n, value)
            v.give((chunk + k) % n, chunk, value)
    return v.flow()


def step_ring_allreduce(n: int) -> Flow:
    """The same values, all ranks one step, then all the next one."""
    v = Values("allreduce", n, n)
    at = [v.given((chunk + 1) % n, chunk) for chunk in range(n)]
    for k in range(2, n + 1):
        at = [v.make((chunk + k) % n, ~chunk, at[chunk]) for chunk in range(n)]
    for chunk in range(n):
        v.give(chunk, chunk, at[chunk])
    for k in range(1, n):
        at = [v.make((chunk + k) % n, at[chunk]) for chunk in range(n)]
        for chunk in range(n):
            v.give((chunk + k) % n, chunk, at[chunk])
    return v.flow()


def all_pairs(n: int, chunks: int = 1) -> Flow:
    """Each rank folds its part of everybody's vector, and sends it to all."""
    v = Values("allreduce", n, n * chunks)
    for i in range(n):
        for chunk in range(i * chunks, i * chunks + chunks):
            total = v.make(i, ~chunk, *(v.given(r, chunk) for r in range(n) if r != i))
            for r in range(n):
                v.give(r, chunk, total if r == i else v.make(r, total))
    return v.flow()


def by_copies(n: int) -> Flow:
    """All pairs, where everything is copied to its owner first and folded there."""
    v = Values("allreduce", n, n)
    for i in range(n):
        copies = [v.make(i, v.given(r, i)) for r in range(n) if r != i]
        total = ~i
        for copy in copies:
            total = v.make(i, total, copy)
        for r in range(n):
            v.give(r, i, total if r == i else v.make(r, total))
    return v.flow()


def one_step(n: int, chunks: int = 2) -> Flow:
    """Everybody folds everything."""
    v = Values("allreduce", n, chunks)
    for i in range(n):
        for chunk in range(chunks):
            v.give(i, chunk, v.make(i, ~chunk, *(v.given(r, chunk) for r in range(n) if r != i)))
    return v.flow()


def halving_doubling(n: int) -> Flow:
    """Recursive halving, then doubling; n a power of two."""
    v = Values("allreduce", n, n)
    at = [[~chunk for chunk in range(n)] for _ in range(n)]
    size = n // 2
    while size:
        before = [[v.given(r, ~x) if x < 0 else x for x in at[r]] for r in range(n)]
        for r in range(n):
            for chunk in range(r // size * size, r // size * size + size):
                at[r][chunk] = v.make(r, at[r][chunk], before[r ^ size][chunk])
        size //= 2
    size = 1
    while size < n:
        for r in range(n):
            for chunk in range(r // size * size, r // size * size + size):
                at[r ^ size][chunk] = v.make(r ^ size, at[r][chunk])
        size *= 2
    for r in range(n):
        for chunk in range(n):
            v.give(r, chunk, at[r][chunk])
    return v.flow()


def tree_allreduce(n: int, chunks: int = 2) -> Flow:
    """Up a binary tree and down again."""
    v = Values("allreduce", n, chunks)

    def fold(rank: int, chunk: int) -> int:
        below = [fold(child, chunk) for child in (2 * rank + 1, 2 * rank + 2) if child < n]
        return v.make(rank, ~chunk, *below)

    def spread(rank: int, chunk: int, value: int) -> None:
        v.give(rank, chunk, value)
        for child in (2 * rank + 1, 2 * rank + 2):
            if child < n:
                spread(child, chunk, v.make(child, value))

    for chunk in range(chunks):
        spread(0, chunk, fold(0, chunk))
    return v.flow()


def ring_allgather(n: int, chunks: int = 2) -> Flow:
    """Every block around the ring."""
    v = Values("allgather", n, chunks)
    for source in range(n):
        values = [v.given(source, c) for c in range(chunks)]
        for k in range(n):
            rank = (source + k) % n
            values = [v.make(rank, value) for value in values] if k else values
            for c, value in enumerate(values):
                v.give(rank, source * chunks + c, value)
    return v.flow()


def ring_reduce_scatter(n: int, chunks: int = 2) -> Flow:
    """Every block around the ring to its owner."""
    v = Values("reduce_scatter", n, chunks)
    for owner in range(n):
        place = range(owner * chunks, owner * chunks + chunks)
        values = [v.given((owner + 1) % n, c) for c in place]
        for k in range(2, n + 1):
            values = [v.make((owner + k) % n, ~c, value) for c, value in zip(place, values, strict=True)]
        for c, value in enumerate(values):
            v.give(owner, c, value)
    return v.flow()


def two_step_alltoall(nodes: int, k: int) -> Flow:
    """Gather in the node by the target's place, then one long message for each pair of nodes."""
    n = nodes * k
    v = Values("alltoall", n, 1)
    for a in range(nodes):
        for b in range(nodes):
            for p in range(k):
                middle = [v.given(a * k + q, b * k + p) for q in range(k)]
                if a != b:
                    middle = [x if q == p else v.make(a * k + p, x) for q, x in enumerate(middle)]
                for q, x in enumerate(middle):
                    local = a == b and q == p
                    v.give(b * k + p, a * k + q, x if local else v.make(b * k + p, x))
    return v.flow()


def direct_alltoall(n: int, chunks: int = 2) -> Flow:
    """Every block straight to its rank."""
    v = Values("alltoall", n, chunks)
    for source in range(n):
        for target in range(n):
            for c in range(chunks):
                value = v.given(source, target * chunks + c)
                v.give(target, source * chunks + c, value if source == target else v.make(target, value))
    return v.flow()


def chain_broadcast(n: int, root: int = 1, chunks: int = 3) -> Flow:
    """From rank to rank."""
    v = Values("broadcast", n, chunks, root)
    for c in range(chunks):
        value = v.given(root, c)
        for k in range(1, n):
            value = v.make((root + k) % n, value)
            v.give((root + k) % n, c, value)
    return v.flow()


def tree_reduce(n: int, root: int = 0, chunks: int = 2) -> Flow:
    """Two at a time."""
    v = Values("reduce", n, chunks, root)
    for c in range(chunks):
        at = {r: v.given(r, c) for r in range(n)}
        step = 1
        while step < n:
            for r in range(0, n - step, 2 * step):
                one, other = (root + r) % n, (root + r + step) % n
                at[one] = v.make(one, at[one], at[other])
            step *= 2
        v.give(root, c, at[root])
    return v.flow()


MAKERS: dict[str, Callable[[], Flow]] = {
    "ring": lambda: ring_allreduce(4),
    "two rings": lambda: ring_allreduce(3, 2),
    "ring by steps": lambda: step_ring_allreduce(4),
    "all pairs": lambda: all_pairs(3, 2),
    "by copies": lambda: by_copies(3),
    "one step": lambda: one_step(3),
    "halving and doubling": lambda: halving_doubling(4),
    "tree": lambda: tree_allreduce(5),
    "allgather": lambda: ring_allgather(4),
    "reduce_scatter": lambda: ring_reduce_scatter(3),
    "two-step alltoall": lambda: two_step_alltoall(2, 2),
    "direct alltoall": lambda: direct_alltoall(3),
    "broadcast": lambda: chain_broadcast(4),
    "reduce": lambda: tree_reduce(5, 2),
}
