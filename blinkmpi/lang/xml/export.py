"""A flow as MSCCL's XML: places for its values, and one sequence of steps, which :mod:`.fuse` makes thread blocks of.

**One sequence.** The values are worked through in the order of the flow, and each message is sent right before it is
received. Every thread block keeps that order, every dependency points back in it. So the sequence itself is a run of
the file in which no connection ever holds more than one message, and nothing can deadlock. :mod:`.fuse` then joins
steps that receive with steps that send on, only as long as a connection holds two messages at most.

**Places.** A value that is an output is made in its place, any other one in scratch of its own, which is written once.
In place, an output is made there only if nobody reads the input below it later; if somebody does, it is made in scratch
and copied at the end.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from ...errors import PlanError
from ...program.call import BLOCKED
from ...util.text import quoted
from ..flow import Flow, Node
from .file import COLLECTIVES_OF_XML, MOST_MOVES, MOST_WANTED, SLOTS, Place, XmlAlgorithm
from .fuse import Move, gpus_of
from .values import Key, keys_of

MOST_CHANNELS = 1 << 10  # executors have 32 and fewer
MOST_COUNT = 64  # chunks of a step; executors take 71
Ends = dict[int, list[Place]]  # a node: the places of its rank's output that get it


def export(
    flow: Flow, *, name: str, protocol: str = "Simple", in_place: bool = False, channels: int = 1, instances: int = 1,
    min_bytes: int = 0, max_bytes: int = 0,
) -> XmlAlgorithm:  # fmt: skip
    """Make MSCCL's XML of what a flow computes; :func:`.file.write_xml` makes its text.

    Args:
        channels: among which parts of the flow that have nothing to do with each other are dealt out.
        instances: pieces into which each chunk is cut; each piece goes its way on channels of its own.
        in_place: for calls in place; else for those out of place.
        min_bytes, max_bytes: of calls, what ``minBytes`` and ``maxBytes`` say; 0 for no upper limit.

    Raises:
        PlanError: if the flow is wrong, or MSCCL has no such collective or protocol.
    """
    flow = _sent(flow.prove())
    collective = flow.goal.collective
    if collective not in COLLECTIVES_OF_XML.values():
        raise PlanError(f"{collective}: MSCCL has no such collective; it has {', '.join(COLLECTIVES_OF_XML.values())}")
    numbered = isinstance(channels, int) and isinstance(instances, int)
    if protocol not in SLOTS or not numbered or not 1 <= channels <= MOST_CHANNELS or instances < 1:
        raise PlanError(f"protocol {quoted(protocol)}, {quoted(channels)} channels, {quoted(instances)} instances: "
                        f"expected one of {', '.join(SLOTS)}, at least one of each, and at most {MOST_CHANNELS} "
                        "channels")  # fmt: skip
    goal = flow.goal
    if 2 * instances * len(flow.nodes) > MOST_MOVES or instances * goal.chunks * goal.n**2 > MOST_WANTED:
        raise PlanError(f"{instances} instances of {len(flow.nodes)} values on {goal.n} ranks: more than a file may "
                        "have; take fewer")  # fmt: skip
    whole = replicated(flow, instances)
    numbers = [c + channels * j for j in range(instances) for c in _channels(flow, channels)]
    writer = _Writer(whole, numbers, in_place=in_place)
    gpus = gpus_of(writer.moves, whole.goal, writer.key)
    return XmlAlgorithm(
        name=name,
        collective=collective,
        protocol=protocol,
        chunks=writer.chunks,
        channels=1 + max((block.channel for gpu in gpus for block in gpu.blocks), default=0),
        root=flow.goal.root,
        in_place=in_place,
        out_of_place=not in_place,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        gpus=gpus,
    )


def _sent(flow: Flow) -> Flow:
    """The flow with a copy for each output that is a value of another rank."""
    nodes, outputs = list(flow.nodes), []
    for rank, out in enumerate(flow.outputs):
        row = list(out)
        for chunk, reference in enumerate(out):
            if reference is not None and reference >= 0 and flow.nodes[reference].rank != rank:
                row[chunk] = len(nodes)
                nodes.append(Node(rank, (reference,), flow.nodes[reference].where))
        outputs.append(tuple(row))
    return Flow(flow.goal, tuple(nodes), tuple(outputs))


def replicated(flow: Flow, instances: int) -> Flow:
    """The flow on chunks that are cut into ``instances`` pieces each; piece ``j`` of all chunks stands together."""
    goal = flow.goal
    if instances == 1:
        return flow

    def piece(chunk: int, j: int) -> int:
        """The chunks of a block (or of the vector) become ``instances`` rows of as many."""
        block, c = divmod(chunk, goal.chunks)
        return (block * instances + j) * goal.chunks + c

    def reference(old: int, j: int) -> int:
        return old + j * len(flow.nodes) if old >= 0 else ~piece(~old, j)

    nodes = [
        Node(node.rank, tuple(reference(r, j) for r in node.operands), node.where)
        for j in range(instances)
        for node in flow.nodes
    ]
    rows = [(j, range(s, s + goal.chunks)) for s in range(0, max(map(len, goal.wanted)), goal.chunks)
            for j in range(instances)]  # fmt: skip
    wanted, outputs = [], []
    for want, out in zip(goal.wanted, flow.outputs, strict=True):
        cells = [(j, c) for j, row in rows for c in row if c < len(want)]
        wanted.append(tuple(tuple((rank, piece(chunk, j)) for rank, chunk in want[c]) for j, c in cells))
        outputs.append(tuple(None if (old := out[c]) is None else reference(old, j) for j, c in cells))
    given = tuple(g * instances for g in goal.given)
    cut = replace(goal, chunks=goal.chunks * instances, given=given, wanted=tuple(wanted))
    return Flow(cut, tuple(nodes), tuple(outputs)).prove()


def _channels(flow: Flow, channels: int) -> list[int]:
    """A channel for each node; those that are made of one another have the same."""
    leader = list(range(len(flow.nodes)))

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for i, node in enumerate(flow.nodes):
        for r in node.operands:
            if r >= 0:
                one, other = sorted((find(i), find(r)))
                leader[other] = one
    numbers: dict[int, int] = {}
    return [numbers.setdefault(find(i), len(numbers)) % channels for i in range(len(flow.nodes))]


class _Group:
    """Nodes of one rank whose places, and those of their operands, follow each other: steps of a ``cnt``.

    Args:
        operands: of the first node, each operand's rank and place.
        reads: the input chunks that are read, as (rank, chunk).
    """

    def __init__(
        self, node: int, place: Place, operands: Sequence[tuple[int, Place]], reads: set[tuple[int, int]]
    ) -> None:
        self.nodes, self.place, self.operands, self.reads = [node], place, operands, reads


class _Writer:
    """The sequence of moves of a flow: see the module."""

    def __init__(self, flow: Flow, channels: Sequence[int], *, in_place: bool) -> None:
        self.flow, self.channels, self.in_place = flow, channels, in_place
        goal = flow.goal
        self.chunks = goal.chunks * (goal.n if goal.collective in BLOCKED else 1)
        if goal.collective == "custom":
            self.chunks = max(1, *goal.given, *map(len, goal.wanted))
        self.key = keys_of(goal.collective, goal.n, self.chunks, in_place=in_place)
        self.moves: list[Move] = []
        self._scratch = [0] * goal.n
        # For calls in place: the input chunk that lies in a place.
        self._below: list[dict[Key, int]] = [
            {self.key(r, "i", c): c for c in range(given if in_place else 0)} for r, given in enumerate(goal.given)
        ]
        self._place: dict[int, Place] = {}
        self._ends = self._outputs()
        self._last_read = self._reads()
        staged = self._staged()
        for group in self._groups():
            self._make(group)
        for rank, place, chunk in staged:
            self._copy(rank, place, ("o", chunk))
        for i, ends in sorted(self._ends.items()):
            for end in ends:
                self._copy(flow.nodes[i].rank, self._place[i], end)

    def _outputs(self) -> Ends:
        ends: Ends = {}
        for rank, (out, want) in enumerate(zip(self.flow.outputs, self.flow.goal.wanted, strict=True)):
            for chunk, reference in enumerate(out):
                if reference is not None and want[chunk]:
                    _, source = self._source(rank, reference)
                    if source >= 0:
                        ends.setdefault(source, []).append(("o", chunk))
        return ends

    def _live(self) -> set[int]:
        """The nodes of which something is used."""
        live: set[int] = set()
        todo = list(self._ends)
        while todo:
            i = todo.pop()
            if i not in live:
                live.add(i)
                todo += [r for r in self.flow.nodes[i].operands if r >= 0]
        return live

    def _source(self, rank: int, reference: int) -> tuple[int, int]:
        """The node, or input chunk, that a reference means: copies within a rank are followed back."""
        while reference >= 0:
            node = self.flow.nodes[reference]
            after = node.operands[0]
            local = after < 0 or self.flow.nodes[after].rank == node.rank
            if len(node.operands) > 1 or not local:
                return node.rank, reference
            rank, reference = node.rank, after
        return rank, reference

    def _reads(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each input chunk, as (rank, chunk), the last node that reads it, and as which operand."""
        last: dict[tuple[int, int], tuple[int, int]] = {}
        for i in sorted(self._live()):
            node = self.flow.nodes[i]
            if self._source(node.rank, i) == (node.rank, i):
                for k, reference in enumerate(node.operands):
                    rank, source = self._source(node.rank, reference)
                    if source < 0:
                        last[rank, ~source] = (i, k)
        return last

    def _staged(self) -> list[tuple[int, Place, int]]:
        """Copy input chunks that are outputs as they are: now where the input stays, else first to scratch."""
        later = []
        for rank, out in enumerate(self.flow.outputs):
            for chunk, reference in enumerate(out):
                if reference is None or not self.flow.goal.wanted[rank][chunk]:
                    continue
                _, source = self._source(rank, reference)
                if source >= 0:
                    continue
                place: Place = ("i", ~source)
                if self.in_place and self.key(rank, *place) != self.key(rank, "o", chunk):
                    place = self._fresh(rank)
                    self._copy(rank, ("i", ~source), place)
                later.append((rank, place, chunk))
        return later

    def _fresh(self, rank: int) -> Place:
        self._scratch[rank] += 1
        return "s", self._scratch[rank] - 1

    def _where(self, rank: int, reference: int) -> tuple[int, Place]:
        rank, source = self._source(rank, reference)
        return (rank, ("i", ~source)) if source < 0 else (rank, self._place[source])

    def _groups(self) -> list[_Group]:
        """Live nodes that do something, in the order of the flow, neighbours together."""
        groups: list[_Group] = []
        for i in sorted(self._live()):
            node = self.flow.nodes[i]
            if self._source(node.rank, i) != (node.rank, i):
                continue
            operands = [self._where(node.rank, r) for r in node.operands]
            reads = {(rank, place[1]) for rank, place in operands if place[0] == "i"}
            end = self._direct(i)
            joins = bool(groups) and self._follows(groups[-1], i, end, operands)
            place = end or self._fresh(node.rank)
            if joins:
                groups[-1].nodes.append(i)
                groups[-1].reads |= reads
            else:
                groups.append(_Group(i, place, operands, reads))
            self._place[i] = place
            if end is not None:
                self._ends[i].remove(end)
        return groups

    def _direct(self, i: int) -> Place | None:
        """The output in which a node may be made; None if it must be made in scratch."""
        rank = self.flow.nodes[i].rank
        for end in self._ends.get(i, []):
            below = self._below[rank].get(self.key(rank, *end))
            if below is None or self._last_read.get((rank, below), (-1, 0)) < (i, 1):
                return end
        return None

    def _follows(self, at: _Group, i: int, end: Place | None, operands: Sequence[tuple[int, Place]]) -> bool:
        """Whether a node can join a group: everything one chunk further, and nothing of the group is in its way."""
        node, size = self.flow.nodes[i], len(at.nodes)
        head = self.flow.nodes[at.nodes[0]]
        if (node.rank, self.channels[i]) != (head.rank, self.channels[at.nodes[0]]) or size >= MOST_COUNT:
            return False
        if (end or ("s", self._scratch[node.rank])) != (at.place[0], at.place[1] + size):
            return False
        if [(rank, (b, c)) for rank, (b, c) in operands] != [(rank, (b, c + size)) for rank, (b, c) in at.operands]:
            return False
        if not {*at.nodes}.isdisjoint(self._source(node.rank, r)[1] for r in node.operands):
            return False
        below = None if end is None else self._below[node.rank].get(self.key(node.rank, *end))
        return below is None or (node.rank, below) not in at.reads

    def _copy(self, rank: int, src: Place, dst: Place) -> None:
        if self.key(rank, *src) != self.key(rank, *dst):
            self.moves.append(Move(rank, "cpy", src, dst, 1, 0))

    def _make(self, group: _Group) -> None:
        """Fold the operands of a group, in their order."""
        rank, channel = self.flow.nodes[group.nodes[0]].rank, self.channels[group.nodes[0]]
        count, total = len(group.nodes), group.place
        so_far: Place | None = None
        for source, place in group.operands:
            if source != rank:
                self.moves.append(Move(source, "s", place, None, count, channel, send=rank))
                kind = "r" if so_far is None else "rrc"
                self.moves.append(Move(rank, kind, so_far, total, count, channel, recv=source))
                so_far = total
            elif so_far is None:
                so_far = place
            else:
                if self.key(rank, *so_far) != self.key(rank, *total):
                    self.moves.append(Move(rank, "cpy", so_far, total, count, channel))
                self.moves.append(Move(rank, "re", place, total, count, channel))
                so_far = total
