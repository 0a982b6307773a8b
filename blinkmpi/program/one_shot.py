"""Programs for short vectors on one memory: each rank writes what others need of it once, and reads the rest directly.

No partial result travels and no rank waits for a second step of another one, so a call takes one meeting of the ranks
where trees take two: what it costs is that each rank folds whole vectors. Operands are folded in ascending order of
rank, as along trees. A channel has two slots, for calls of even and of odd number: a rank that enters call s has seen
all others enter call s - 1, so they are through with the slots of call s - 2. So data may lie in a slot before the call
is announced, and the announcement says that it does.
"""

from collections.abc import Sequence

from ..errors import PlanError
from .call import Call
from .ir import ONE_SHOT, Channel, Program, Stage

SLOTS = 2  # of each channel


def one_shot(call: Call) -> Program:
    """The program of a call; the same on every rank.

    Raises:
        PlanError: for a collective that moves nothing.
    """
    if call.collective == "barrier":
        raise PlanError("a barrier moves nothing and needs no program; announce it")
    builder = _Shots(call)
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


class _Shots:
    def __init__(self, call: Call) -> None:
        self.call = call
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
        call = self.call
        final = call.collective not in ("scan", "exscan")
        readers: dict[tuple[int, int, int], list[int]] = {}
        for rank, first, count, operands in results:
            for source in operands if count else ():
                readers.setdefault((source, first, count), []).append(rank)
        written: dict[tuple[int, int, int], int] = {}
        for (source, first, count), ranks in readers.items():
            others = tuple(r for r in ranks if r != source)
            if others:
                self.channels.append(Channel(source, source, others, partial=True, operands=True))
                written[source, first, count] = c = len(self.channels) - 1
                self.stages.append(Stage(source, source, "up", count, first, (), (-1,), None, (c,), False))
        for rank, first, count, operands in results:
            if not count:
                continue
            sources = [s for s in operands if s != rank]
            ins = tuple(written[s, first, count] for s in sources)
            fold = tuple(-1 if s == rank else sources.index(s) for s in operands)
            own = first if rank in operands else None
            self.stages.append(Stage(rank, rank, "turn" if final else "up", count, own, ins, fold, 0, (), final))
