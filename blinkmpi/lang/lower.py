"""Lower a flow to a Program: by value, so that no scratch memory and no order of the user's lines is left.

1. What no result needs is dropped, and equal values of one rank are one.
2. A value whose only use is on its own rank is folded there: a chain of reductions becomes one stage, in their order.
3. A value that is used by several on its own rank reaches them by channels that their rank both writes and reads. In a
   reduction, so does an input chunk: **one stage alone reads it**, and the result that takes its place is made of what
   that stage has read, so that a call in place never overwrites what is still to be read
   (:func:`..program.in_place.check_in_place` proves it). Of several input chunks that a custom collective folds into
   one value, its stage reads the first alone.
4. Chunks have nothing to do with one another. Consecutive ones with which the same is done become one span.

These steps depend on no count: :class:`Lowering`. A value has the length of its chunk: the vector, or each block, is
cut into equal parts as :func:`..program.lower.spans` cuts them, so any count will do. Pure.
"""

from collections import Counter, defaultdict
from fractions import Fraction
from functools import cache

from ..errors import PlanError
from ..program.call import REDUCTIONS, Call
from ..program.check import Piece, check
from ..program.in_place import check_in_place
from ..program.ir import Program
from ..program.lower import slot_width
from ..program.spans import align_of, spans
from .flow import Flow, Goal
from .stages import Emitter, JoinedValues, StageValue, Values


class Lowering:
    """What all calls by one flow have in common.

    Args:
        flow: a proved one.

    """

    def __init__(self, flow: Flow) -> None:
        self.goal = flow.goal
        values = _folded_where_used(_needed(flow))
        if self.goal.reduces:
            values = _by_channels(values, read_once=self.goal.collective in REDUCTIONS)
        self._groups = _groups(values)

    def program(self, call: Call, *, scheme: str, chunk_bytes: int, depth: int, multicast: bool = False) -> Program:
        """The program of a call; proved, also for calls in place.

        Args:
            chunk_bytes, depth: of slots, as for :func:`..program.lower.lower`.
            multicast: whether all readers of a value read one slot, as ranks can that share a memory.

        Raises:
            PlanError: for a call of another collective, root or number of ranks.
        """
        goal = self.goal
        wanted = _wanted(goal, call.counts[0]) if goal.collective == "custom" else ()
        if (call.collective, call.n, call.root) != (goal.collective, goal.n, goal.root):
            raise PlanError(
                f"{scheme} is for {goal.collective} of {goal.n} ranks, root {goal.root}, and cannot carry "
                f"{call.collective} of {call.n} ranks, root {call.root}; make it for these"
            )
        emitter = Emitter(goal, multicast=multicast)
        for number, run in enumerate(self._runs(call)):
            emitter.add(number, run)
        chunk = max(1, chunk_bytes // slot_width(call, emitter.channels))
        program = Program(call, scheme, chunk, depth, tuple(emitter.channels), tuple(emitter.stages))
        return check_in_place(check(program, wanted=wanted))

    def _runs(self, call: Call) -> list[JoinedValues]:
        """The groups with their elements, neighbours as one; none that is empty."""
        places = _Places(self.goal, call)
        runs: list[JoinedValues] = []
        for alike in self._groups:
            joined: list[JoinedValues] = []
            for run in sorted((run for values in alike if (run := places.run(values)).length), key=lambda r: r.start):
                longer = joined[-1].then(run) if joined else None
                joined[-1:] = [longer] if longer else [*joined[-1:], run]
            runs += joined
        return runs


def _wanted(goal: Goal, elements: int) -> list[list[Piece]]:
    """What each rank of a custom collective must receive; chunks that one stage may store together, as one piece."""
    found: list[list[Piece]] = []
    for outputs in goal.wanted:
        pieces: list[Piece] = []
        for i, want in enumerate(outputs):
            sources = tuple(sorted((r, c * elements) for r, c in want))
            start, length, before = pieces[-1] if pieces else (0, 0, ())
            if want and start + length == i * elements and sources == tuple((r, at + length) for r, at in before):
                pieces[-1] = start, length + elements, before
            elif want:
                pieces.append((i * elements, elements, sources))
        found.append(pieces)
    return found


# ---------------------------------------------------------------- steps 1 to 4


class _Collected:
    """A growing list of values, equal ones as one."""

    def __init__(self) -> None:
        self.values: Values = []
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self._copies: dict[int, int] = {}  # of a value that is stored more than once: the last one

    def add(self, rank: int, operands: tuple[int, ...]) -> int:
        key = rank, operands
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(StageValue(rank, operands))
        return self._numbers[key]

    def store(self, number: int, chunk: int) -> None:
        """Store a value; where it is stored already, a copy of it, which a channel of the rank carries."""
        at = self._copies.get(number, number)
        while self.values[at].stored >= 0:
            at = self._copies[number] = self.add(self.values[at].rank, (at,))
        self.values[at] = self.values[at]._replace(stored=chunk)


def _needed(flow: Flow) -> Values:
    """The values that some result needs, and the inputs that are results as they are."""
    wanted = [
        (rank, i, reference)
        for rank, (outputs, wants) in enumerate(zip(flow.outputs, flow.goal.wanted, strict=True))
        for i, (reference, want) in enumerate(zip(outputs, wants, strict=True))
        if want and reference is not None
    ]
    found, number = _Collected(), dict[int, int]()

    def here(rank: int, reference: int) -> int:
        """An operand of a value on ``rank``: an input chunk of that rank, or a value."""
        if reference < 0:
            return reference
        value = found.values[number[reference]]
        return value.operands[0] if value.rank == rank and value.is_input else number[reference]

    for i in flow.live:
        rank, operands = flow.nodes[i].rank, tuple(here(flow.nodes[i].rank, o) for o in flow.nodes[i].operands)
        same = len(operands) == 1 and operands[0] >= 0 and found.values[operands[0]].rank == rank
        number[i] = operands[0] if same else found.add(rank, operands)
    kept = []
    for rank, i, reference in wanted:
        value = here(rank, reference)
        if value < 0:
            kept.append(StageValue(rank, (value,), i))
        else:
            found.store(value if found.values[value].rank == rank else found.add(rank, (value,)), i)
    return [*found.values, *kept]


def _folded_where_used(values: Values) -> Values:
    """Without those that one value of the same rank uses, and nobody else: it has their operands instead."""
    uses = Counter(o for value in values for o in value.operands if o >= 0)
    found, number, kept = _Collected(), dict[int, int](), []
    inside: dict[int, tuple[int, ...]] = {}  # operands of those that are left out
    alone = {
        o
        for value in values
        for o in value.operands
        if o >= 0 and uses[o] == 1 and values[o].rank == value.rank and values[o].stored < 0
    }
    for i, value in enumerate(values):
        parts = ((inside[o] if o in inside else (number[o],)) if o >= 0 else (o,) for o in value.operands)
        operands = tuple(o for part in parts for o in part)
        if i in alone:
            inside[i] = operands
        elif value.is_input and value.stored >= 0:
            kept.append(value)
        else:
            number[i] = found.add(value.rank, operands)
            if value.stored >= 0:
                found.store(number[i], value.stored)
    return [*found.values, *kept]


def _by_channels(values: Values, *, read_once: bool) -> Values:
    """With at most one input chunk in a fold, which has others of its rank by channels.

    Args:
        read_once: also with one reader of each input chunk, from which the others have it; a result that is the input
            reads it again.
    """
    readers = Counter((v.rank, o) for v in values if not (v.is_input and v.stored >= 0) for o in v.operands if o < 0)
    found, number, kept = _Collected(), dict[int, int](), []
    for i, value in enumerate(values):
        if value.is_input:
            if value.stored >= 0:
                kept.append(value)
            else:
                number[i] = found.add(*value[:2])
            continue
        operands = []
        own = next((o for o in value.operands if o < 0), 0)
        for o in value.operands:
            if o < 0 and (o != own or (read_once and readers[value.rank, o] > 1)):
                operands.append(found.add(value.rank, (o,)))
            else:
                operands.append(number[o] if o >= 0 else o)
        number[i] = found.add(value.rank, tuple(operands))
        if value.stored >= 0:
            found.store(number[i], value.stored)
    return [*found.values, *kept]


def _groups(values: Values) -> list[list[Values]]:
    """The values in groups that channels join, operands by position in the group; groups of one shape together."""
    group = list(range(len(values)))
    shapes: dict[tuple[int, tuple[int, ...], bool], int] = {}
    shape: list[int] = []
    for i, value in enumerate(values):
        operands = tuple(shape[o] if o >= 0 else -1 for o in value.operands)
        shape.append(shapes.setdefault((value.rank, operands, value.stored >= 0), len(shapes)))
        for o in value.operands:
            if o >= 0:
                group[_root(group, o)] = _root(group, i)
    members: dict[int, list[int]] = defaultdict(list)
    for i in range(len(values)):
        members[_root(group, i)].append(i)
    alike: dict[tuple[tuple[int, tuple[int, ...]], ...], list[Values]] = defaultdict(list)
    for inside in members.values():
        inside.sort(key=shape.__getitem__)  # shapes are numbered as they come, operands first
        place = {i: at for at, i in enumerate(inside)}
        moved = [
            values[i]._replace(operands=tuple(place[o] if o >= 0 else o for o in values[i].operands)) for i in inside
        ]
        # Of values of one shape, which a fold of several chunks of a rank has, the operands say which is which.
        alike[
            tuple((shape[i], tuple(max(o, -1) for o in v.operands)) for i, v in zip(inside, moved, strict=True))
        ].append(moved)
    return list(alike.values())


def _root(group: list[int], i: int) -> int:
    while group[i] != i:
        group[i] = group[group[i]]
        i = group[i]
    return i


# ---------------------------------------------------------------- elements


class _Places:
    """Where the chunks of a call lie."""

    def __init__(self, goal: Goal, call: Call) -> None:
        self.goal, self.call = goal, call
        self._align = align_of(call)
        self._cut = cache(self._spans)

    def _spans(self, count: int) -> list[tuple[int, int]]:
        return spans(count, [Fraction(1)] * self.goal.chunks, self._align)

    def run(self, values: Values) -> JoinedValues:
        """A group with its elements."""
        reads = [self.read(v.rank, ~o) for v in values for o in v.operands if o < 0]
        stores = [self.store(v.rank, v.stored) for v in values if v.stored >= 0]
        return JoinedValues(values, reads[0][1], tuple(at for at, _ in reads), tuple(at for at, _ in stores))

    def read(self, rank: int, i: int) -> tuple[int, int]:
        """(offset, length) of a chunk of a rank's send buffer."""
        block, part = divmod(i, self.goal.chunks)
        match self.call.collective:
            case "custom":
                return i * self.call.counts[0], self.call.counts[0]
            case "alltoall":
                start, _, count = self.call.piece(rank, block)
            case "scatter" | "reduce_scatter":
                start, count = self.call.block(block)
            case _:
                start, count = 0, self.call.block(rank)[1]
        return self._part(start, count, part)

    def store(self, rank: int, i: int) -> tuple[int, int]:
        """(offset, length) of a chunk of a rank's receive buffer."""
        block, part = divmod(i, self.goal.chunks)
        match self.call.collective:
            case "custom":
                return i * self.call.counts[0], self.call.counts[0]
            case "alltoall":
                _, start, count = self.call.piece(block, rank)
            case "allgather" | "gather":
                start, count = self.call.block(block)
            case _:
                start, count = 0, self.call.block(rank)[1]
        return self._part(start, count, part)

    def _part(self, start: int, count: int, part: int) -> tuple[int, int]:
        """A part of the vector, or of a block, that begins at ``start``."""
        first, length = self._cut(count)[part]
        return start + first, length
