"""Programs for short vectors on one memory: each rank writes what others need of it once, and reads the rest directly.

No partial result travels and no rank waits for a second step of another one, so a call takes one meeting of the ranks
where trees take two: what it costs is that each rank folds whole vectors. Operands are folded in ascending order of
rank, as along trees. A channel has two slots, for calls of even and of odd number: a rank that enters call s has seen
all others enter call s - 1, so they are through with the slots of call s - 2. So data may lie in a slot before the call
is announced, and the announcement says that it does.

Between nodes one message takes the slots of a node's ranks to another node, behind the announcement
(:func:`.partition.messages_of`). So that it carries one vector and not one of each rank, the first rank of each node
folds its node's operands before, where the ranks of a node follow one another.
"""

from collections.abc import Sequence

from ..errors import PlanError
from .call import Call
from .ir import ONE_SHOT, Channel, Program, Stage

SLOTS = 2  # of each channel


def one_shot(call: Call, nodes: Sequence[int] = ()) -> Program:
    """The program of a call; the same on every rank.

    Args:
        nodes: the node of each rank, if they lie on several.

    Raises:
        PlanError: for a collective that moves nothing.
    """
    if call.collective == "barrier":
        raise PlanError("a barrier moves nothing and needs no program; announce it")
    builder = _Shots(call, nodes)
    n, counts, kind = call.n, call.counts, call.collective
    if kind in ("broadcast", "scatter", "alltoall"):
        {"broadcast": builder.broadcast, "scatter": builder.scatter}.get(kind, builder.alltoall)()
    elif kind in ("gather", "allgather"):
        builder.gather((call.root,) if kind == "gather" else tuple(range(n)))
    elif kind == "exscan":
        builder.folds([(r, 0, counts[0], range(r)) for r in range(1, n)])
    elif kind == "scan":
        builder.folds([(r, 0, counts[0], range(r + 1)) for r in range(n)])
    else:
        builder.folds([(r, *call.block(r), range(n)) for r in ((call.root,) if kind == "reduce" else range(n))])
    longest = max((stage.count for stage in builder.stages), default=1)
    return Program(call, ONE_SHOT, longest, SLOTS, tuple(builder.channels), tuple(builder.stages))


_Operand = tuple[range, int, int]  # the fold of some ranks' elements, or one rank's: ranks, first element, elements


class _Shots:
    def __init__(self, call: Call, nodes: Sequence[int] = ()) -> None:
        self.call = call
        places = [range(nodes.index(x), nodes.index(x) + nodes.count(x)) for x in dict.fromkeys(nodes)]
        apart = len(places) > 1 and all(nodes[r] == nodes[ranks[0]] for ranks in places for r in ranks)
        self.places = places if apart else []  # the ranks of each node, where they follow one another
        self.channels: list[Channel] = []
        self.stages: list[Stage] = []

    def broadcast(self) -> None:
        """One slot that all others read."""
        root, count = self.call.root, self.call.counts[0]
        others = tuple(r for r in range(self.call.n) if r != root)
        self._blocks(root, [(others, 0, 0, count)])

    def scatter(self) -> None:
        """A slot for each rank's block."""
        call = self.call
        self._blocks(call.root, [((r,), start, 0, length) for r in range(call.n) for start, length in [call.block(r)]])

    def gather(self, readers: tuple[int, ...]) -> None:
        """A slot of each rank, which all ``readers`` read."""
        for rank in range(self.call.n):
            start, count = self.call.block(rank)
            self._blocks(rank, [(readers, 0, start, count)])

    def alltoall(self) -> None:
        """A slot for each pair of ranks."""
        call = self.call
        for source in range(call.n):
            pieces = [((target,), *call.piece(source, target)) for target in range(call.n)]
            self._blocks(source, pieces)

    def _blocks(self, writer: int, blocks: Sequence[tuple[tuple[int, ...], int, int, int]]) -> None:
        """What a rank sends: (ranks that receive it, offset in its buffer, in theirs, elements) of each block."""
        for readers, local, store, count in blocks:
            if not count:
                continue
            others = tuple(r for r in readers if r != writer)
            if others:
                self.channels.append(Channel(writer, writer, others))
                c = len(self.channels) - 1
                self.stages.append(Stage(writer, writer, "down", count, local, (), (-1,), None, (c,), False))
                for reader in others:
                    self.stages.append(Stage(reader, writer, "down", count, None, (c,), (0,), store, (), False))
            if writer in readers:
                self.stages.append(Stage(writer, writer, "down", count, local, (), (-1,), store, (), False))

    def folds(self, results: list[tuple[int, int, int, range]]) -> None:
        """Results of a reduction: (rank, first element, elements, ranks whose operands are folded), for each rank.

        Where several results are of the same elements, these have one slot of each operand's rank.
        """
        final = self.call.collective not in ("scan", "exscan")
        alike = (
            self.call.collective == "allreduce"
        )  # all ranks fold the same parts, in the same order: to the same bits
        readers: dict[_Operand, list[int]] = {}
        folded: list[tuple[int, int, int, list[_Operand]]] = []  # each result, of what it is folded
        for rank, first, count, ranks in results if self.places else ():
            complete = (p for p in self.places if len(p) > 1 and p[0] in ranks and p[-1] in ranks)
            whole = [p for p in complete if alike or rank not in p]
            owners = {r: p for p in whole for r in p}
            parts = dict.fromkeys((owners.get(r, range(r, r + 1)), first, count) for r in ranks)
            folded.append((rank, first, count, [*parts]))
        for rank, first, count, ranks in () if self.places else results:
            folded.append((rank, first, count, [(range(r, r + 1), first, count) for r in ranks]))
        for rank, _, count, operands in folded:
            for operand in operands if count else ():
                readers.setdefault(operand, []).append(rank)
        for members, first, count in [operand for operand in readers if len(operand[0]) > 1]:
            for r in members[1:]:  # whose operands the first rank of the node reads
                known = readers.setdefault((range(r, r + 1), first, count), [])
                known += [] if members[0] in known else [members[0]]
        written: dict[_Operand, int] = {}
        for operand, them in sorted(readers.items(), key=lambda each: len(each[0][0]) > 1):
            (source, *others), first, count = operand
            readers_of = tuple(sorted(r for r in them if r != source or others))
            if not readers_of:
                continue
            self.channels.append(Channel(source, source, readers_of, partial=True, operands=not others))
            written[operand] = c = len(self.channels) - 1
            ins = tuple(written[range(r, r + 1), first, count] for r in others)
            fold = (-1, *range(len(others)))
            self.stages.append(Stage(source, source, "up", count, first, ins, fold, None, (c,), False))
        for rank, first, count, operands in folded:
            if not count:
                continue
            own = (range(rank, rank + 1), first, count)
            sources = [operand for operand in operands if operand != own]
            ins = tuple(written[operand] for operand in sources)
            fold = tuple(-1 if operand == own else sources.index(operand) for operand in operands)
            local = first if own in operands else None
            self.stages.append(Stage(rank, rank, "turn" if final else "up", count, local, ins, fold, 0, (), final))
