"""Lower a packing and a call to a Program (Blink section 4, CodeGen): pure, and the same on every rank.

The vector (or each rank's block) is cut into one span per tree, in proportion
to the trees' weights. Operands are folded in ascending order of rank: the local
operand stands at its own rank, a child's partial result at the child's rank. An
alltoall is a scatter from every rank. In a scan each rank gets the fold of all
before it, and passes on that of itself, too, chunk by chunk.

A tree's inner vertices may be switches that fold and copy (``trees/in_switch``): their numbers come after the ranks',
and their stages have no operand and no result of their own. Such programs are checked and simulated, never executed.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction

from ..errors import PlanError
from ..trees.tree import Edge, Packing, Tree
from .call import BLOCKED, Call
from .ir import Channel, Program, Stage, Wire
from .reduction import accumulator_of, dtype_of
from .spans import Cut, align_of, spans


def lower(packing: Packing, call: Call, *, chunk_bytes: int, depth: int, wire: Wire = "accumulator") -> Program:
    """Lower ``call`` along the trees of ``packing``.

    Args:
        chunk_bytes: size of a slot; where partial results of 16-bit types travel, they take float32's room in it.
        depth: slots of each channel.
        wire: the type in which partial results travel.

    Raises:
        PlanError: if the packing is for another collective, root or number of ranks.
    """
    rooted = packing.root if packing.root >= 0 else -1
    if (packing.collective, packing.n, rooted) != (call.collective, call.n, call.root if rooted >= 0 else -1):
        raise PlanError(
            f"packing for {packing.collective} of {packing.n} ranks, root {packing.root}, cannot carry "
            f"{call.collective} of {call.n} ranks, root {call.root}; pack again"
        )
    builder = _Builder(packing, call, wire)
    if call.collective != "barrier":
        if call.collective == "alltoall":
            builder.alltoall(packing)
        elif call.collective in ("scan", "exscan"):
            builder.scan(packing)
        else:
            for blocks, trees in _jobs(packing, call):
                builder.job(blocks, trees)
    # Which trees of a reduction are empty makes no difference to chunks: calls of one template differ in that.
    some = call.widened and len({stage.tree for stage in builder.stages}) < len(packing.trees)
    channels = _outlined(packing, call, wire).channels if some else builder.channels
    chunk = max(1, chunk_bytes // slot_width(call, channels))
    return Program(call, packing.scheme, chunk, depth, tuple(builder.channels), tuple(builder.stages))


def slot_width(call: Call, channels: Iterable[Channel]) -> int:
    """Bytes of an element in a slot, which has room for the accumulator if partial results travel."""
    wide = any(channel.wide for channel in channels)
    return (accumulator_of if wide else dtype_of)(call.dtype).itemsize


def cuts(packing: Packing, call: Call) -> dict[int, Cut]:
    """Each tree's part of its block; one that is not named has all of it."""
    groups: list[list[tuple[int, Tree]]]
    if call.collective == "alltoall":
        groups = list(_ways(packing).values())
    else:
        groups = [] if call.collective in ("scan", "exscan") else [trees for _, trees in _jobs(packing, call)]
    found = {}
    for trees in groups:
        total, done = sum((tree.weight for _, tree in trees), Fraction(0)), Fraction(0)
        for number, tree in trees:
            found[number] = Cut(len(trees), done / total, (done + tree.weight) / total)
            done += tree.weight
    return found


def outline(
    packing: Packing, call: Call, *, chunk_bytes: int, depth: int, wire: Wire = "accumulator"
) -> tuple[Program, list[tuple[int, list[tuple[int, Fraction]]]]]:
    """What does not depend on counts: the stages of every tree, and the trees of every block with their weights.

    A stage's offset is 0 if it counts from the beginning of the block, and 1 if from that of the vector of all blocks.

    Raises:
        PlanError: as :func:`lower`.
    """
    program = lower(packing, call, chunk_bytes=chunk_bytes, depth=depth, wire=wire)
    builder, jobs = _outlined(packing, call, wire), _jobs(packing, call)
    channels, stages = tuple(builder.channels), tuple(builder.stages)
    whole = Program(call, program.scheme, program.chunk, depth, channels, stages)
    return whole, [(block, [(number, tree.weight) for number, tree in trees]) for block, trees in jobs]


def _outlined(packing: Packing, call: Call, wire: Wire) -> _Builder:
    """Every tree of every block, as if each had elements."""
    builder = _Builder(packing, call, wire)
    if call.collective not in ("scan", "exscan"):
        for _, trees in _jobs(packing, call):
            for number, tree in trees:
                builder._tree(number, tree, 1, 0, 1)
    return builder


def _jobs(packing: Packing, call: Call) -> list[tuple[int, list[tuple[int, Tree]]]]:
    """(rank whose block moves, its trees with their numbers); one job of -1 where the vector moves as a whole."""
    numbered = list(enumerate(packing.trees))
    if call.collective not in BLOCKED:
        return [(-1, numbered)]
    by_end = call.collective in ("gather", "scatter")
    ends = [t.edges[-1].dst if by_end and t.edges else t.root for t in packing.trees]
    jobs = [(rank, [pair for pair, end in zip(numbered, ends, strict=True) if end == rank]) for rank in range(call.n)]
    if by_end:
        alone = Tree(root=call.root, edges=(), weight=Fraction(1))
        jobs[call.root] = (call.root, [(len(numbered), alone)])  # the root's own block stays where it is
    return jobs


def _ways(packing: Packing) -> dict[tuple[int, int], list[tuple[int, Tree]]]:
    """The trees, with their numbers, that lead from each rank to each."""
    ways: dict[tuple[int, int], list[tuple[int, Tree]]] = defaultdict(list)
    for number, tree in enumerate(packing.trees):
        ways[tree.root, tree.edges[-1].dst if tree.edges else tree.root].append((number, tree))
    return ways


class _Builder:
    """Collects channels and stages."""

    def __init__(self, packing: Packing, call: Call, wire: Wire) -> None:
        self.multicast, self.rounded = packing.multicast, wire == "operand"
        self.call = call
        self.channels: list[Channel] = []
        self.stages: list[Stage] = []

    def job(self, block: int, trees: list[tuple[int, Tree]]) -> None:
        start, count = self.call.block(max(block, 0))
        if count == 0:
            return
        if not trees:
            raise PlanError(f"{self.call.collective}: no tree carries the block of rank {block}; pack again")
        for first, length, number, tree in self._cut(count, trees):
            self._tree(number, tree, start, first, length)

    def _cut(self, count: int, trees: list[tuple[int, Tree]]) -> Iterator[tuple[int, int, int, Tree]]:
        """The spans of ``count`` elements that trees carry: (start, length, number, tree), none of them empty."""
        cut = spans(count, [t.weight for _, t in trees], align_of(self.call))
        for (first, length), (number, tree) in zip(cut, trees, strict=True):
            if length:
                yield first, length, number, tree

    def alltoall(self, packing: Packing) -> None:
        """Every rank's blocks along its paths to the others."""
        ways = _ways(packing)
        for turn, source in itertools.product(range(1, self.call.n + 1), range(self.call.n)):
            target = (source + turn) % self.call.n
            read, store, count = self.call.piece(source, target)
            if source == target:  # last: the others wait for what is sent
                alone = Tree(source, (), Fraction(1))
                self._block(count, [(len(packing.trees), alone)], read, store)
            else:
                self._block(count, ways[source, target], read, store)

    def _block(self, count: int, trees: list[tuple[int, Tree]], read: int, store: int) -> None:
        """A block from one rank to another."""
        if count and not trees:
            raise PlanError(f"{self.call.collective}: no tree carries a block; pack again")
        for first, length, number, tree in self._cut(count, trees) if count else ():
            self._path(number, _vertices(tree), length, read + first, store + first)

    def scan(self, packing: Packing) -> None:
        """Folds from rank to rank: each gets that of all before it, and sends on that of itself, too."""
        count, last = self.call.counts[0], self.call.n - 1
        if not count:
            return
        inclusive = self.call.collective == "scan"
        edges = iter(packing.trees[0].edges)
        going: tuple[int, ...] = ()  # the channel with the fold of all ranks before, to go on with
        kept: tuple[int, ...] = ()  # the same once more, where it is also what an exscan's rank receives
        for rank in range(last + 1):
            if kept:
                self.stages.append(Stage(rank, 0, "down", count, None, kept, (0,), 0, (), False))
            if inclusive and not going:  # a stage of its own: sending need not wait until the result may be written
                self.stages.append(Stage(rank, 0, "down", count, 0, (), (-1,), 0, (), False))
            onward = inclusive or rank + 1 < last  # whether the next rank folds
            hops = [] if rank == last else self._way(edges, rank + 1, onward + (not inclusive))
            store = 0 if inclusive and going else None
            if hops or store is not None:
                fold, outs = (0, -1) if going else (-1,), hops[0] if hops else ()
                self.stages.append(Stage(rank, 0, "up", count, 0, going, fold, store, outs, False))
            for ins, outs in itertools.pairwise(hops):
                for c, d in zip(ins, outs, strict=True):
                    via = self.channels[d].writer
                    self.stages.append(Stage(via, 0, "up", count, None, (c,), (0,), None, (d,), False))
            arrived = hops[-1] if hops else ()
            going, kept = arrived[:onward], arrived[onward:]

    def _way(self, edges: Iterator[Edge], to: int, copies: int) -> list[tuple[int, ...]]:
        """Channels along the next edges until ``to``, so many on each."""
        hops: list[tuple[int, ...]] = []
        for edge in edges:
            hops.append(tuple(self._channel(0, edge.src, (edge.dst,), partial=True) for _ in range(copies)))
            if edge.dst == to:
                break
        return hops

    def _tree(self, number: int, tree: Tree, start: int, first: int, length: int) -> None:
        kind = self.call.collective
        inside = start + first  # offset in the vector of all blocks; `first` is the offset in the block itself
        if kind == "allreduce":
            self._down(number, tree, length, first, self._up(number, tree, length, first, first, turn=True))
        elif kind == "reduce":
            self._up(number, tree, length, first, first)
        elif kind == "reduce_scatter":
            self._up(number, tree, length, inside, first)
        elif kind == "broadcast":
            self._down(number, tree, length, first, self._source(number, tree, length, first, None))
        elif kind == "allgather":
            self._down(number, tree, length, inside, self._source(number, tree, length, first, inside))
        elif kind == "gather":
            self._path(number, [*reversed(_vertices(tree))], length, first, inside)
        elif kind == "scatter":
            self._path(number, _vertices(tree), length, inside, first)

    def _channel(
        self, tree: int, writer: int, readers: tuple[int, ...], *, partial: bool = False, operands: bool = False
    ) -> int:
        self.channels.append(
            Channel(tree, writer, readers, partial, operands, partial and self.rounded and not operands)
        )
        return len(self.channels) - 1

    def _outs(self, number: int, tree: Tree, rank: int) -> dict[int, int]:
        """Channels from ``rank`` to those who read from it on the way down, by reader."""
        if self.multicast:
            others = tuple(sorted(e.dst for e in tree.edges)) if rank == tree.root else ()
            if not others:
                return {}
            channel = self._channel(number, rank, others)
            return dict.fromkeys(others, channel)
        return {child: self._channel(number, rank, (child,)) for child in tree.children(rank)}

    def _up(
        self, number: int, tree: Tree, length: int, local: int, store: int, *, turn: bool = False
    ) -> dict[int, int]:
        """Reduce towards the root. Returns the root's channels down, by reader, if ``turn``."""
        upward = tree.upward
        inner = {e.dst for e in upward}
        to_parent = {
            e.src: self._channel(number, e.src, (e.dst,), partial=True, operands=e.src not in inner) for e in upward
        }
        down = self._outs(number, tree, tree.root) if turn else {}
        for rank in (*(e.src for e in upward), tree.root):
            children = sorted(e.src for e in upward if e.dst == rank)
            own = [(rank, -1)] if rank < self.call.n else []  # else a switch that folds
            operands = sorted([*own, *((child, i) for i, child in enumerate(children))])
            root = rank == tree.root
            ins, fold = tuple(to_parent[child] for child in children), tuple(i for _, i in operands)
            outs = tuple(dict.fromkeys(down.values())) if root else (to_parent[rank],)
            kept = store if root else None
            read = local if own else None
            stage = Stage(rank, number, "turn" if root else "up", length, read, ins, fold, kept, outs, root)
            self.stages.append(stage)
        return down

    def _source(self, number: int, tree: Tree, length: int, local: int, store: int | None) -> dict[int, int]:
        """The root of a broadcast: read its own buffer, write to whoever reads from it."""
        down = self._outs(number, tree, tree.root)
        if down:
            outs = tuple(dict.fromkeys(down.values()))
            self.stages.append(Stage(tree.root, number, "down", length, local, (), (-1,), None, outs, False))
        if store is not None:  # a stage of its own: sending need not wait until the result may be written
            self.stages.append(Stage(tree.root, number, "down", length, local, (), (-1,), store, (), False))
        return down

    def _down(self, number: int, tree: Tree, length: int, store: int, incoming: dict[int, int]) -> None:
        """Everybody below the root: read, keep, forward."""
        for edge in tree.edges:
            rank = edge.dst
            down = {} if self.multicast else self._outs(number, tree, rank)
            outs = tuple(dict.fromkeys(down.values()))
            kept = store if rank < self.call.n else None  # else a switch that copies
            self.stages.append(Stage(rank, number, "down", length, None, (incoming[rank],), (0,), kept, outs, False))
            incoming = {**incoming, **down}

    def _path(self, number: int, ranks: list[int], length: int, local: int, store: int) -> None:
        """One block along a path: read at the first rank, keep at the last, only pass on in between."""
        incoming: tuple[int, ...] = ()
        for i, rank in enumerate(ranks):
            last = i == len(ranks) - 1
            outs = () if last else (self._channel(number, rank, (ranks[i + 1],)),)
            read, kept = local if i == 0 else None, store if last else None
            fold = (0,) if incoming else (-1,)
            self.stages.append(Stage(rank, number, "down", length, read, incoming, fold, kept, outs, False))
            incoming = outs


def _vertices(tree: Tree) -> list[int]:
    return [tree.root, *(e.dst for e in tree.edges)]
